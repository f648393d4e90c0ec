// Events of a job: one object per event, until the stream ends or the signal aborts it.

// An error of the server: the message, a code, and the field of the form at fault.
class ServerError extends Error {
  constructor(message, { code = "", field = "" } = {}) {
    super(message);
    Object.assign(this, { code, field });
  }
}

export async function* events(path, form, signal) {
  let response;
  try {
    response = await fetch(path, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(form),
      signal,
    });
  } catch (error) {
    if (signal?.aborted) return;
    throw new ServerError("the server does not respond; is `svs serve` still running?", { code: "unreachable" });
  }
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    throw new ServerError(body.error ?? `the server rejected the request (${response.status})`, { field: body.field });
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
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
        if (event.kind === "error") throw new ServerError(event.message, event);
        yield event;
      }
    }
  } catch (error) {
    if (signal?.aborted) return;
    if (error instanceof TypeError) throw new ServerError("the connection to the server was lost", { code: "connection-lost" });
    throw error;
  } finally {
    reader.cancel().catch(() => {});
  }
}
