"""The page of `svs serve`.

`app` serves the page and its API, `guard` checks the origin of requests, and `connections` closes slow connections.
`forms` defines the requests and their limits, `pool` manages worker processes, and `worker` runs in them. `playground`
and `text` compute the responses with the functions of the package.
"""
