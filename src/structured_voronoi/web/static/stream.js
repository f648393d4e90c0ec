// What the server streams: one object for each event, until the stream ends or the signal stops it.

export async function* events(path, form, signal) {
  let answer;
  try {
    answer = await fetch(path, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(form),
      signal,
    });
  } catch (error) {
    if (signal?.aborted) return;
    throw new Error("the server does not answer; is `svs serve` still running?");
  }
  if (!answer.ok) {
    const said = await answer.json().catch(() => ({}));
    throw new Error(said.error ?? `the server refused this (${answer.status})`);
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (!part.startsWith("data: ")) continue;
        const event = JSON.parse(part.slice(6));
        if (event.kind === "error") throw new Error(event.words);
        yield event;
      }
    }
  } catch (error) {
    if (signal?.aborted) return;
    if (error instanceof TypeError) throw new Error("the connection to the server was lost");
    throw error;
  } finally {
    reader.cancel().catch(() => {});
  }
}
