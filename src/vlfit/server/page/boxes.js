// Reads objects and boxes out of a model's JSON, and draws them over the picture.

const SVG = "http://www.w3.org/2000/svg";
const COLOURS = 6;
const BOX_NAMES = ["bbox_2d", "bbox", "box_2d", "box"];

/**
 * {summary, things: [{label, box}], text, cut} of an answer that contains JSON, or null. Boxes are in thousandths;
 * `cut`: the JSON is incomplete.
 */
export function read(answer) {
  const found = firstJSON(answer);
  if (found === null) return null;
  const { value, cut } = found;
  const parts = Array.isArray(value) ? { objects: value } : value;
  const entries = Array.isArray(parts.objects) ? parts.objects : BOX_NAMES.some((name) => name in parts) ? [parts] : [];
  const things = entries.map(thingOf).filter((thing) => thing !== null);
  const seen = typeof parts.text === "string" ? [parts.text] : Array.isArray(parts.text) ? parts.text : [];
  return {
    summary: typeof parts.summary === "string" ? parts.summary : "",
    things,
    text: seen.filter((word) => typeof word === "string" && word.trim()),
    cut,
  };
}

/** Draws `things` over the picture in `figure`, replacing earlier boxes. */
export function draw(figure, things) {
  const frame = figure.querySelector(".frame");
  const overlay = frame.querySelector("svg");
  overlay.replaceChildren();
  frame.querySelectorAll(".name").forEach((name) => name.remove());
  return things.map((thing, number) => {
    const [left, top, right, bottom] = thing.box;
    const box = document.createElementNS(SVG, "rect");
    const edges = { x: left, y: top, width: right - left, height: bottom - top };
    for (const [name, value] of Object.entries(edges)) box.setAttribute(name, value);
    box.style.stroke = colourOf(number);
    overlay.append(box);
    const name = document.createElement("span");
    name.className = "name";
    name.textContent = thing.label;
    name.style.left = `${left / 10}%`;
    name.style.top = `${top / 10}%`;
    frame.append(name);
    return box;
  });
}

export const colourOf = (number) => `var(--bar-${number % COLOURS})`;

function thingOf(entry) {
  if (entry === null || typeof entry !== "object") return null;
  const label = [entry.label, entry.name].find((name) => typeof name === "string" && name.trim());
  const box = BOX_NAMES.map((name) => entry[name]).find((value) => Array.isArray(value));
  if (!label || box?.length !== 4 || !box.every(Number.isFinite)) return null;
  const [left, right] = [box[0], box[2]].map(inside).sort((a, b) => a - b);
  const [top, bottom] = [box[1], box[3]].map(inside).sort((a, b) => a - b);
  return left < right && top < bottom ? { label: label.trim(), box: [left, top, right, bottom] } : null;
}

const inside = (edge) => Math.min(Math.max(edge, 0), 1000);

const MAX_STARTS = 50; // brackets tried as the start of JSON

/** {value, cut} of the first JSON object or array in `text`; `cut`: its end is missing. */
function firstJSON(text) {
  let start = text.search(/[[{]/);
  for (let tried = 0; start >= 0 && tried < MAX_STARTS; tried++) {
    const found = spanFrom(text, start);
    try {
      if (found) return { value: JSON.parse(found.json), cut: found.cut };
    } catch {
      // text in brackets: JSON may begin later
    }
    const further = text.slice(start + 1).search(/[[{]/);
    start = further < 0 ? -1 : start + 1 + further;
  }
  return null;
}

/** The JSON from the bracket at `start` to its closing one; if the text ends first, up to its last complete part. */
function spanFrom(text, start) {
  const open = [];
  let whole = null; // end of the last closed bracket, and how many were open then
  for (let at = start; at < text.length; at++) {
    const letter = text[at];
    if (letter === '"') {
      at = endOfString(text, at);
    } else if (letter === "{" || letter === "[") {
      open.push(letter === "{" ? "}" : "]");
    } else if (letter === "}" || letter === "]") {
      if (open.pop() !== letter) return null;
      if (open.length === 0) return { json: text.slice(start, at + 1), cut: false };
      whole = { end: at + 1, depth: open.length };
    }
  }
  // The brackets open then are still open, since none was closed after it.
  return whole && { json: text.slice(start, whole.end) + open.slice(0, whole.depth).reverse().join(""), cut: true };
}

function endOfString(text, quote) {
  let at = quote + 1;
  while (at < text.length && text[at] !== '"') at += text[at] === "\\" ? 2 : 1;
  return at;
}
