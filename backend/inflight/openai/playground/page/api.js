// Requests to the server, their errors, and streamed answers. Independent of the page's elements.

/** An error of the server or the network; `message` is unchanged. */
class ServerError extends Error {
  constructor(message, { status = 0, type = "", param = null } = {}) {
    super(message);
    this.status = status;
    this.type = type;
    this.param = param;
  }

  /** Return the line above the message, such as "400 · invalid_request_error · temperature". */
  get heading() {
    return [this.status || "", this.type, this.param].filter(Boolean).join(" · ") || "No answer";
  }
}

let apiKey = "";

/** Fetch a path below this page's address; raises ServerError for every failure. */
async function fetchFromServer(path, { body, signal } = {}) {
  const headers = { "Content-Type": "application/json" };
  if (apiKey) headers.Authorization = `Bearer ${apiKey}`;
  const options = { headers, signal, cache: "no-store" };
  if (body) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  const response = await fetch(path, options).catch((error) => {
    throw error.name === "AbortError" ? error : new ServerError(`The server cannot be reached: ${error.message}`);
  });
  if (response.ok) return response;
  throw errorFromText(await response.text(), response.status);
}

function errorFromText(text, status) {
  try {
    const { error, detail } = JSON.parse(text);
    if (error?.message) return new ServerError(error.message, { status, type: error.type, param: error.param });
    if (detail) return new ServerError(typeof detail === "string" ? detail : JSON.stringify(detail, null, 2), { status });
  } catch {
    // Not JSON: shown unchanged.
  }
  return new ServerError(text || "The answer was empty.", { status });
}

/** Return the ids of the server's models, including adapters. */
async function listModels() {
  const response = await fetchFromServer("v1/models");
  return (await response.json()).data;
}

/** Send a request and yield the JSON object of each event until the stream ends. */
async function* streamFromServer(path, body, signal) {
  const streamed = { ...body, stream: true, stream_options: { include_usage: true }, return_token_ids: true };
  const response = await fetchFromServer(path, { body: streamed, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ServerError("The connection ended before the answer did.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice("data:".length).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw errorFromText(data, 0);
      yield event;
    }
  }
}
