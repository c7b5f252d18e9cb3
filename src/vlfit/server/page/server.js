// HTTP client of this page's server: API key, JSON requests, server-sent events.

const KEY = "vlfit-key";
const base = new URL(".", location.href);

export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value.trim()),
};

export const address = (path) => new URL(path, base).href;

/** Fetches the JSON at `path`. Throws ServerError with a message for the user. */
export async function ask(path, options = {}) {
  const reply = await reach(path, options);
  return await reply.json();
}

/** Fetches the file at `path`. Throws as `ask`. */
export async function fetchBlob(path) {
  const reply = await reach(path, {});
  return await reply.blob();
}

/**
 * Streams a chat completion and calls `words(text)` for each piece. Returns {text, reason, usage, seconds}; seconds
 * from the first token to the last.
 */
export async function stream(body, signal, words) {
  const reply = await reach("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  const found = { text: "", reason: null, usage: null, seconds: 0 };
  let first = 0;
  for await (const event of events(reply.body)) {
    if (event === "[DONE]") break;
    const chunk = readEvent(event);
    if (chunk.error) throw new ServerError(chunk.error.message, 500);
    found.usage = chunk.usage ?? found.usage;
    const choice = chunk.choices?.[0];
    if (!choice) continue;
    found.reason = choice.finish_reason ?? found.reason;
    const piece = choice.delta?.content;
    if (piece) {
      first ||= performance.now();
      found.seconds = (performance.now() - first) / 1000;
      found.text += piece;
      words(piece);
    }
  }
  if (found.reason === null) throw new ServerError("the server closed the connection before the answer was complete", 502);
  return found;
}

function readEvent(event) {
  try {
    return JSON.parse(event);
  } catch {
    throw new ServerError("the server sent an invalid response", 502);
  }
}

async function reach(path, options) {
  const headers = new Headers(options.headers);
  if (key.get()) headers.set("authorization", `Bearer ${key.get()}`);
  let reply;
  try {
    reply = await fetch(address(path), { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("the server does not answer: is vlfit serve still running?", 0);
  }
  if (!reply.ok) {
    const told = await reply.json().catch(() => null);
    throw new ServerError(told?.error?.message ?? `the server answered ${reply.status}`, reply.status);
  }
  return reply;
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      if (data.length) yield data.map((line) => line.slice(5).trimStart()).join("\n");
    }
  }
}
