// Everything that is asked of the server, and the key it is asked with. A page asks for the key when it is refused.
export class Refused extends Error {
  constructor(status, code, message) {
    super(code ? `${code}: ${message}` : message);
    this.status = status;
  }
}

const access = document.getElementById("access");
const form = document.getElementById("access-form");
const field = document.getElementById("key");
const complaint = document.getElementById("access-error");
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

async function request(path, options) {
  for (;;) {
    const key = sessionStorage.getItem("key");
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(path, { ...options, headers });
    if (response.status !== 401) return response;
    await askForKey(key !== null);
    if (options.signal?.aborted) throw new DOMException("stopped", "AbortError");
  }
}

async function checked(response) {
  if (response.ok) return response;
  let said = {};
  try {
    said = (await response.json()).error ?? {};
  } catch { /* Not ours: a proxy's page, perhaps. */ }
  throw new Refused(response.status, said.code, said.message ?? `status ${response.status}`);
}

export async function get(path) {
  return (await checked(await request(path, {}))).json();
}

export async function getText(path) {
  return (await checked(await request(path, {}))).text();
}

// The events of a stream, one after the other; `signal` ends it and cancels the answer.
export async function* stream(path, body, signal) {
  const response = await checked(await request(path, {
    method: "POST", signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  }));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Refused(0, "", "the answer was broken off");
    held += value;
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
}
