// A file that goes along with a question: {name, text}, or {name, image} with an image as a data URL.
import { count, element } from "./dom.js";

// Characters of a text: what is more fits no context.
const TEXT_MAX = 2_000_000;
// Bytes of an image that is sent as it is. A request has a bound, an image goes along with every later question, and models
// look at a few hundred pixels on a side: a larger one is sent smaller.
const IMAGE_MAX = 1_000_000;
// Pixels on a side that it then has at most.
const SIDE_MAX = 2048;
const KINDS = ["image/jpeg", "image/png", "image/webp", "image/gif"];

export const isImage = (url) => typeof url === "string" && KINDS.some((kind) => url.startsWith(`data:${kind};base64,`));

// Throws a sentence where a file cannot go along.
export async function read(file) {
  if (file.type.startsWith("image/")) {
    if (!KINDS.includes(file.type)) throw new Error("is no JPEG, PNG, WebP or GIF");
    return { name: file.name, image: await imageOf(file) };
  }
  if (file.size > TEXT_MAX) throw new Error(`is larger than ${count(TEXT_MAX)} bytes`);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error("is no text in UTF-8");
  }
  if (text.includes("\0")) throw new Error("is no text file");
  return { name: file.name, text };
}

async function imageOf(file) {
  if (file.size <= IMAGE_MAX) {
    return new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(new Error("cannot be read"));
      reader.readAsDataURL(file);
    });
  }
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error("cannot be decoded");
  }
  const scale = Math.min(1, SIDE_MAX / Math.max(bitmap.width, bitmap.height));
  const canvas = element("canvas", { width: Math.max(1, Math.round(bitmap.width * scale)), height: Math.max(1, Math.round(bitmap.height * scale)) });
  const context = canvas.getContext("2d");
  // What is transparent stands before white, as the server has it.
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return canvas.toDataURL("image/jpeg", 0.9);
}

// A fence that is longer than any in the text.
function fenced(text) {
  const longest = Math.max(2, ...[...text.matchAll(/`{3,}/g)].map(([marks]) => marks.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}

// The content of a message as the API has it: a text, or parts where there are images.
export function content(attachments, said) {
  const files = attachments.filter((one) => !one.image).map(({ name, text }) => `File ${name}:\n${fenced(text)}`);
  const text = [...files, said].filter((part) => part !== "").join("\n\n");
  const images = attachments.filter((one) => one.image).map(({ image }) => ({ type: "image_url", image_url: { url: image } }));
  if (images.length === 0) return text;
  return text === "" ? images : [...images, { type: "text", text }];
}

// How it is called, with how large it is.
export const words = ({ name, text, image }) => (image ? name : `${name} (${count(text.length)} characters)`);

export const thumbnail = ({ name, image }) => element("img", { src: image, alt: name, title: name, className: "thumbnail" });
