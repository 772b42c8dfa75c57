// Everything that is asked of the server, and the key it is asked with. A page asks for the key when it is refused, and says so
// while the server does not answer.
export class Refused extends Error {
  constructor(status, code, message) {
    super(code ? `${code}: ${message}` : message);
    this.status = status;
    this.code = code;
  }
}

// The server could not be reached, or went away in the middle of an answer.
export class Gone extends Error {}

const access = document.getElementById("access");
const form = document.getElementById("access-form");
const field = document.getElementById("key");
const complaint = document.getElementById("access-error");
const gone = document.getElementById("gone");
let asking = null;

// One question at a time, however many requests were refused.
function askForKey(wrong) {
  asking ??= new Promise((resolve) => {
    complaint.textContent = wrong ? "The server does not know this key." : "";
    if (!access.open) access.showModal();
    field.focus();
    form.addEventListener("submit", () => {
      sessionStorage.setItem("key", field.value);
      field.value = "";
      asking = null;
      resolve();
    }, { once: true });
  });
  return asking;
}
// Without a key there is nothing behind it to go back to.
access.addEventListener("cancel", (event) => event.preventDefault());

// Whoever looks every now and then finds out when it is back.
function reached(isThere) {
  if (gone.hidden === isThere) return;
  gone.hidden = isThere;
  gone.textContent = isThere ? "" : "The server does not answer. Trying again…";
  const status = document.getElementById("status");
  status.textContent = isThere ? "" : "no answer";
  if (isThere) delete status.dataset.state;
  else status.dataset.state = "gone";
}

async function request(path, options) {
  for (;;) {
    const key = sessionStorage.getItem("key");
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      reached(false);
      throw new Gone("The server does not answer.");
    }
    reached(true);
    if (response.status !== 401) return response;
    await askForKey(key !== null);
    if (options.signal?.aborted) throw new DOMException("stopped", "AbortError");
  }
}

async function checked(response) {
  if (response.ok) return response;
  let said = {};
  try {
    const { error } = await response.json();
    said = typeof error === "string" ? { message: error } : error ?? {};
  } catch { /* Not ours: a proxy's page, perhaps. */ }
  throw new Refused(response.status, said.code, said.message ?? `status ${response.status}`);
}

export async function get(path) {
  return (await checked(await request(path, {}))).json();
}

export async function getText(path) {
  return (await checked(await request(path, {}))).text();
}

// Sends JSON, a form, or nothing, and returns what is answered.
export async function send(path, body, method = "POST") {
  const isForm = body instanceof FormData;
  const headers = body === undefined || isForm ? {} : { "Content-Type": "application/json" };
  const content = body === undefined || isForm ? body : JSON.stringify(body);
  const response = await checked(await request(path, { method, headers, body: content }));
  return response.json();
}

// What a request answers as it comes, piece by piece; `signal` ends it.
async function* pieces(path, body, signal) {
  const response = await checked(await request(path, {
    method: "POST", signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  }));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      yield value;
    }
  } catch (error) {
    if (error.name === "AbortError" || signal?.aborted) throw new DOMException("stopped", "AbortError");
    throw new Gone("The connection broke off.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

// The events of a stream, one after the other; `signal` ends it and cancels the answer.
export async function* stream(path, body, signal) {
  let held = "";
  for await (const piece of pieces(path, body, signal)) {
    held += piece;
    const events = held.split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data === "[DONE]") return;
      if (data === "") continue;
      const message = JSON.parse(data);
      if (message.error) throw new Refused(0, message.error.code, message.error.message);
      yield message;
    }
  }
  throw new Gone("The answer was broken off.");
}

// Lines of JSON, one after the other.
export async function* lines(path, body, signal) {
  let held = "";
  for await (const piece of pieces(path, body, signal)) {
    held += piece;
    const whole = held.split("\n");
    held = whole.pop();
    for (const line of whole) if (line.trim() !== "") yield JSON.parse(line);
  }
  if (held.trim() !== "") yield JSON.parse(held);
}
