"""The page of `svs serve`: what a browser asks for, who may ask, and the processes that compute the answer.

`app` answers requests, `guard` refuses those of strangers and `connections` cuts off who does not keep up; `forms` say
what may be asked for and how much of it, `pool` keeps a few processes, and `worker` is what they run: `playground` and
`text` call the same functions as everyone else.
"""
