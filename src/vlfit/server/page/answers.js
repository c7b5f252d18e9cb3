// Shows answers: streamed text, and detected objects with their boxes over the picture.

import { colourOf, draw, read } from "./boxes.js";

export class Answer {
  /**
   * Adds an answer to `place`. `picture`: where to draw boxes, or null. `looks`: the answer is JSON with objects;
   * until it is complete only their number is shown.
   */
  constructor(place, title, picture, looks) {
    this.picture = picture;
    this.looks = looks;
    this.text = "";
    this.article = document.createElement("article");
    const heading = document.createElement("h3");
    heading.textContent = title;
    this.words = document.createElement("div");
    this.words.className = "words";
    this.note = document.createElement("p");
    this.note.className = "quiet";
    this.article.append(heading, this.words, this.note);
    if (looks) this.words.textContent = "Looking …";
    place.append(this.article);
  }

  add(piece) {
    this.text += piece;
    if (!this.looks) {
      this.words.append(piece);
      return;
    }
    const count = read(this.text)?.things.length ?? 0;
    if (count) this.words.textContent = `Looking … ${count} ${count === 1 ? "thing" : "things"} so far`;
  }

  finish(found) {
    this.note.textContent = speedOf(found);
    this.#show();
  }

  /** Ends an incomplete answer with the note `why`; what was received is shown if it is of use. */
  breakOff(why) {
    this.note.textContent = why;
    const useful = this.looks ? read(this.text)?.things.length : this.text;
    if (useful) this.#show();
    else this.article.remove();
  }

  #show() {
    const scene = this.looks || this.picture ? read(this.text) : null;
    if (scene && (this.looks || scene.things.length || scene.summary)) {
      this.words.replaceChildren(...partsOf(scene, this.text, this.picture));
    } else {
      this.words.textContent = this.text;
    }
  }
}

function speedOf({ usage, seconds, reason }) {
  const tokens = usage?.completion_tokens ?? 0;
  const speed = tokens > 1 && seconds > 0 ? `, ${((tokens - 1) / seconds).toFixed(0)} tokens/s` : "";
  return `${tokens} tokens${speed}${reason === "length" ? ", cut off at the token limit" : ""}`;
}

/** A scene: summary, text, and a button for each object that highlights its box over the picture. */
function partsOf(scene, raw, picture) {
  const boxes = picture ? draw(picture.figure, scene.things) : [];
  const summary = document.createElement("p");
  summary.textContent = scene.summary || (scene.things.length ? "" : "Nothing found.");
  const list = document.createElement("ul");
  list.className = "things";
  scene.things.forEach((thing, number) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = thing.label;
    button.title = inPixels(thing.box, picture?.image);
    button.style.borderColor = colourOf(number);
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", () => {
      const on = boxes[number]?.classList.toggle("chosen") ?? false;
      button.setAttribute("aria-pressed", String(on));
    });
    const item = document.createElement("li");
    item.append(button);
    list.append(item);
  });
  const text = document.createElement("p");
  text.textContent = scene.text.length ? `Text: ${scene.text.join(" · ")}` : "";
  const details = document.createElement("details");
  const title = document.createElement("summary");
  title.textContent = "raw output";
  const pre = document.createElement("pre");
  pre.textContent = raw;
  details.append(title, pre);
  const warning = document.createElement("p");
  warning.textContent = scene.cut ? "The answer was cut off; later objects are missing." : "";
  return [summary, list, text, warning, details];
}

function inPixels([left, top, right, bottom], image) {
  if (!image) return "";
  const across = (edge) => Math.round((edge * image.naturalWidth) / 1000);
  const down = (edge) => Math.round((edge * image.naturalHeight) / 1000);
  return `${across(left)}, ${down(top)} to ${across(right)}, ${down(bottom)} pixels`;
}
