// What a model says of things and where they are: reads it out of its JSON, and draws it over the picture.

const SVG = "http://www.w3.org/2000/svg";
const COLOURS = 6;
const BOX_NAMES = ["bbox_2d", "bbox", "box_2d", "box"];

/** {summary, things: [{label, box}], text} of an answer with JSON in it, or null. Boxes are in thousandths. */
export function read(answer) {
  const value = firstJSON(answer);
  if (value === null || typeof value !== "object") return null;
  const parts = Array.isArray(value) ? { objects: value } : value;
  const entries = Array.isArray(parts.objects) ? parts.objects : BOX_NAMES.some((name) => name in parts) ? [parts] : [];
  const things = entries.map(thingOf).filter((thing) => thing !== null);
  const seen = typeof parts.text === "string" ? [parts.text] : Array.isArray(parts.text) ? parts.text : [];
  return {
    summary: typeof parts.summary === "string" ? parts.summary : "",
    things,
    text: seen.filter((word) => typeof word === "string" && word.trim()),
  };
}

/** Draws `things` over the picture in `figure`, in place of what was drawn before. */
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

/** The first whole JSON object or array in `text`, whatever stands around it. */
function firstJSON(text) {
  for (let start = text.search(/[[{]/); start >= 0; start = next(text, start)) {
    for (let end = text.length; end > start; end = text.lastIndexOf(closing(text[start]), end - 2) + 1) {
      try {
        return JSON.parse(text.slice(start, end));
      } catch {
        if (text.lastIndexOf(closing(text[start]), end - 2) < start) break;
      }
    }
  }
  return null;
}

const closing = (letter) => (letter === "{" ? "}" : "]");

function next(text, start) {
  const further = text.slice(start + 1).search(/[[{]/);
  return further < 0 ? -1 : start + 1 + further;
}
