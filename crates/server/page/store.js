// Conversations, in the browser's own database (IndexedDB). They go nowhere else. Where a browser keeps nothing, they last as
// long as the page.
//
// A conversation is {id, title, named, created, updated, leaf, turns}. Its turns are a tree, by id: each has a `parent`, and what is
// shown is the way from the first turn to `leaf`. To ask again or to edit adds a branch and loses nothing.
import { isImage } from "./attachment.js";

const NAME = "fornax";
const STORE = "conversations";
// What an imported file may have at most.
const TURNS_MAX = 10_000;

let memory = null;
const opened = new Promise((resolve) => {
  const without = () => {
    memory = new Map();
    resolve(null);
  };
  try {
    const asked = indexedDB.open(NAME, 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(STORE, { keyPath: "id" });
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = without;
  } catch {
    without();
  }
});

async function act(mode, what) {
  const database = await opened;
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(STORE, mode);
    const asked = what(transaction.objectStore(STORE));
    transaction.oncomplete = () => resolve(asked?.result);
    transaction.onerror = () => reject(transaction.error);
    transaction.onabort = () => reject(transaction.error);
  });
}

export const isKept = async () => {
  await opened;
  return memory === null;
};

// The latest first.
export async function all() {
  await opened;
  const found = memory ? [...memory.values()] : await act("readonly", (store) => store.getAll());
  return found.sort((a, b) => b.updated - a.updated);
}

// Probabilities are not kept: they take a hundred times the room of the text.
function bare(conversation) {
  const turns = Object.fromEntries(Object.entries(conversation.turns).map(([id, { tokens, showTokens, editing, ...kept }]) => [id, kept]));
  return { ...conversation, turns };
}

export async function keep(conversation) {
  await opened;
  const copy = bare(conversation);
  if (memory) memory.set(copy.id, structuredClone(copy));
  else await act("readwrite", (store) => store.put(copy));
}

export async function forget(id) {
  await opened;
  if (memory) memory.delete(id);
  else await act("readwrite", (store) => store.delete(id));
}

export async function forgetAll() {
  await opened;
  if (memory) memory.clear();
  else await act("readwrite", (store) => store.clear());
}

export const newId = () => (crypto.randomUUID ? crypto.randomUUID() : `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`);

export function newConversation() {
  return { id: newId(), title: "", named: false, created: Date.now(), updated: Date.now(), leaf: null, turns: {} };
}

// From the first turn to the one that is shown last.
export function path(conversation, leaf = conversation.leaf) {
  const turns = [];
  const seen = new Set();
  for (let id = leaf; id && conversation.turns[id] && !seen.has(id); id = conversation.turns[id].parent) {
    seen.add(id);
    turns.push(conversation.turns[id]);
  }
  return turns.reverse();
}

const children = (conversation, parent) => Object.values(conversation.turns).filter((turn) => turn.parent === parent);

// What stands at the same place, the oldest first.
export const beside = (conversation, turn) => children(conversation, turn.parent);

export function add(conversation, parent, turn) {
  const added = { id: newId(), parent, created: Date.now(), ...turn };
  conversation.turns[added.id] = added;
  conversation.leaf = added.id;
  conversation.updated = Date.now();
  return added;
}

// The end of the newest branch behind a turn.
export function newest(conversation, id) {
  for (;;) {
    const behind = children(conversation, id);
    if (behind.length === 0) return id;
    id = behind.reduce((a, b) => (b.created >= a.created ? b : a)).id;
  }
}

// Removes a turn and everything behind it.
export function prune(conversation, turn) {
  const others = beside(conversation, turn).filter((other) => other.id !== turn.id);
  const doomed = [turn.id];
  while (doomed.length > 0) {
    const id = doomed.pop();
    doomed.push(...children(conversation, id).map((child) => child.id));
    delete conversation.turns[id];
  }
  const next = others.at(-1);
  conversation.leaf = next ? newest(conversation, next.id) : turn.parent;
  conversation.updated = Date.now();
}

export function title(conversation) {
  if (conversation.named) return conversation.title;
  const first = Object.values(conversation.turns).find((turn) => turn.role === "user");
  const words = (first?.text ?? "").trim().replace(/\s+/g, " ");
  return words.length > 60 ? `${words.slice(0, 59)}…` : words || "New chat";
}

const text = (value) => (typeof value === "string" ? value : "");

// A turn with what this page knows of one, and nothing else.
function turnOf(given) {
  if (typeof given !== "object" || given === null || !["user", "assistant", "tool"].includes(given.role)) return null;
  const turn = { role: given.role, text: text(given.text), created: Number(given.created) || Date.now() };
  for (const name of ["thoughts", "model", "figures", "name", "call", "finish", "error"]) if (typeof given[name] === "string") turn[name] = given[name];
  if (Array.isArray(given.attachments)) {
    turn.attachments = given.attachments.map((file) => ({ name: text(file?.name) || "file", ...(isImage(file?.image) ? { image: file.image } : { text: text(file?.text) }) }));
  }
  if (Array.isArray(given.calls)) {
    turn.calls = given.calls.map((call) => ({ id: text(call?.id), name: text(call?.name), arguments: text(call?.arguments) }));
  }
  if (given.structured === true) turn.structured = true;
  const { prompt, completion } = given.usage ?? {};
  if (Number.isSafeInteger(prompt) && Number.isSafeInteger(completion)) turn.usage = { prompt, completion };
  return turn;
}

function conversationOf(given) {
  if (typeof given !== "object" || given === null || typeof given.turns !== "object" || given.turns === null) return null;
  const entries = Object.entries(given.turns);
  if (entries.length > TURNS_MAX) throw new Error(`a conversation has more than ${TURNS_MAX} messages`);
  const conversation = newConversation();
  const ids = new Map(entries.map(([id]) => [id, newId()]));
  for (const [id, one] of entries) {
    const turn = turnOf(one);
    if (turn) conversation.turns[ids.get(id)] = { id: ids.get(id), parent: ids.get(one.parent) ?? null, ...turn };
  }
  // A parent that was left out, or a circle: what cannot be reached is not kept.
  for (const turn of Object.values(conversation.turns)) {
    const way = path(conversation, turn.id);
    if (way[0].parent !== null) turn.parent = null;
  }
  conversation.title = text(given.title);
  conversation.named = given.named === true && conversation.title !== "";
  conversation.created = Number(given.created) || Date.now();
  conversation.updated = Number(given.updated) || Date.now();
  const leaf = ids.get(given.leaf);
  conversation.leaf = conversation.turns[leaf] ? leaf : Object.keys(conversation.turns).at(-1) ?? null;
  return conversation.leaf ? conversation : null;
}

// Messages as OpenAI's clients write them, which `/save` in the terminal does too.
function ofMessages(messages) {
  const conversation = newConversation();
  let parent = null;
  for (const message of messages) {
    const calls = message?.tool_calls?.map?.((call) => ({ id: call?.id, name: call?.function?.name, arguments: call?.function?.arguments }));
    const parts = Array.isArray(message?.content) ? message.content : [];
    const attachments = parts.filter((part) => isImage(part?.image_url?.url)).map((part, at) => ({ name: `image ${at + 1}`, image: part.image_url.url }));
    const said = parts.length > 0 ? parts.map((part) => text(part?.text)).filter(Boolean).join("\n\n") : message?.content;
    const turn = turnOf({ role: message?.role, text: said, ...(attachments.length > 0 ? { attachments } : {}), thoughts: message?.reasoning_content, call: message?.tool_call_id, calls });
    if (turn) parent = add(conversation, parent, turn).id;
  }
  return conversation.leaf ? conversation : null;
}

// What a file of exported conversations holds. Throws where it holds none.
export function imported(source) {
  let given;
  try {
    given = JSON.parse(source);
  } catch (error) {
    throw new Error(`this is no JSON: ${error.message}`);
  }
  const list = Array.isArray(given?.conversations) ? given.conversations.map(conversationOf)
    : [ofMessages(Array.isArray(given) ? given : Array.isArray(given?.messages) ? given.messages : [])];
  const found = list.filter(Boolean);
  if (found.length === 0) throw new Error("no conversation is in this file");
  return found;
}

export function exported(conversations, messages) {
  return JSON.stringify({ fornax: "conversations", version: 1, ...(messages ? { messages } : {}), conversations: conversations.map(bare) }, null, 1);
}
