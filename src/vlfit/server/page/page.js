// The page: what is asked, what is answered, and the buttons around it.

import { asCurl, asPython } from "./copies.js";
import { colourOf, draw, read } from "./boxes.js";
import { show as showMemory } from "./memory.js";
import { Pictures, camera, receive } from "./pictures.js";
import { address, ask, key, stream } from "./server.js";

const LOOK_SECONDS = 2;
const ASKING = { ask: "What do you want to know?", detect: "What to find, for example: cups", more: "A further question" };
const $ = (id) => document.getElementById(id);

let facts = { model: "", prompts: {} }; // what the server says of itself
let messages = []; // the conversation so far, as the server takes it
let shown = []; // the pictures in it
let last = null; // the request that was made last
let running = null; // an AbortController while an answer comes
const pictures = new Pictures($("pictures"), looked, fail);

// Asking

async function submit(event) {
  event.preventDefault();
  if (running) return;
  fail("");
  const words = $("question").value.trim();
  const question = wording(words);
  if (question === null) return;
  const before = follows() ? messages : []; // any other task begins a conversation of its own
  if (before.length === 0) shown = [...pictures.all];
  const asked = { role: "user", content: contentOf(question.text, before) };
  const body = { model: facts.model, messages: [...before, asked], max_tokens: 1024 };
  if (question.task === "scene" || question.task === "detect") body.temperature = 0;
  last = { body, pictures: shown };
  const answer = newAnswer(question.title);
  running = new AbortController();
  busy(true);
  try {
    const found = await stream(body, running.signal, (piece) => answer.add(piece));
    answer.finish(found);
    messages = [...body.messages, { role: "assistant", content: found.text }];
    $("question").value = "";
    $("form").elements.task.value = "ask"; // what comes next is most likely about this
  } catch (error) {
    if (error.name === "AbortError") answer.note("stopped");
    else if (!(await askForKey(error))) fail(error.message);
    answer.dropIfEmpty();
  } finally {
    running = null;
    busy(false);
    changed();
    $("question").focus();
  }
}

/** What the model is asked: {task, title, text}; null, with a word why, if something is missing. */
function wording(words) {
  const task = $("form").elements.task.value;
  if (pictures.all.length === 0 && task !== "ask") return missing("Choose a picture first: drop, paste or pick one.");
  if (task === "ask" || task === "detect") {
    if (!words) return missing(task === "ask" ? "Type a question first." : "Type what to find first.");
    const text = task === "ask" ? words : facts.prompts.detect.replace("{}", words);
    return { task, title: task === "ask" ? words : `Find ${words}`, text };
  }
  return { task, title: task === "caption" ? "Caption" : "Scene", text: facts.prompts[task] };
}

function missing(words) {
  fail(words);
  $("question").focus();
  return null;
}

/** Whether a question now is a further one about the pictures and answers that are there. */
const follows = () => messages.length > 0 && $("form").elements.task.value === "ask";

function contentOf(text, before) {
  if (before.length > 0 || pictures.all.length === 0) return text;
  const parts = pictures.all.map((picture) => ({ type: "image_url", image_url: { url: picture.url } }));
  return [...parts, { type: "text", text }];
}

// Answering

function newAnswer(title) {
  const article = document.createElement("article");
  const heading = document.createElement("h3");
  heading.textContent = title;
  const words = document.createElement("div");
  words.className = "words";
  const note = document.createElement("p");
  note.className = "quiet";
  article.append(heading, words, note);
  $("answers").append(article);
  return {
    add: (piece) => words.append(piece),
    note: (text) => (note.textContent = text),
    dropIfEmpty: () => words.textContent || article.remove(),
    finish(found) {
      note.textContent = speedOf(found);
      const scene = read(found.text);
      if (scene && (scene.things.length || scene.summary)) words.replaceChildren(...partsOf(scene, found.text));
    },
  };
}

function speedOf({ usage, seconds, reason }) {
  const tokens = usage?.completion_tokens ?? 0;
  const speed = tokens > 1 && seconds > 0 ? `, ${((tokens - 1) / seconds).toFixed(0)} tokens/s` : "";
  return `${tokens} tokens${speed}${reason === "length" ? ", cut off at the limit: more may have come" : ""}`;
}

/** A scene in words, and over the picture: each thing is a button that shows its box. */
function partsOf(scene, raw) {
  const figure = shown[0]?.figure;
  const boxes = figure ? draw(figure, scene.things) : [];
  const summary = document.createElement("p");
  summary.textContent = scene.summary;
  const list = document.createElement("ul");
  list.className = "things";
  scene.things.forEach((thing, number) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = thing.label;
    button.title = inPixels(thing.box, shown[0]?.image);
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
  title.textContent = "as the model wrote it";
  const pre = document.createElement("pre");
  pre.textContent = raw;
  details.append(title, pre);
  const warning = document.createElement("p");
  warning.textContent = scene.cut ? "The answer broke off: what comes after these is missing." : "";
  return [summary, list, text, warning, details];
}

function inPixels([left, top, right, bottom], image) {
  if (!image) return "";
  const across = (edge) => Math.round((edge * image.naturalWidth) / 1000);
  const down = (edge) => Math.round((edge * image.naturalHeight) / 1000);
  return `${across(left)}, ${down(top)} to ${across(right)}, ${down(bottom)} pixels`;
}

// Around it

/** Other pictures: what was said about the ones before is over. */
function looked() {
  messages = [];
  changed();
}

function changed() {
  const task = $("form").elements.task.value;
  const needsWords = task === "ask" || task === "detect";
  $("question").disabled = !needsWords;
  $("question").placeholder = needsWords ? ASKING[follows() ? "more" : task] : "";
  $("question-label").textContent = $("question").placeholder || "Question";
  $("after").hidden = last === null;
}

function busy(is) {
  $("go").hidden = is;
  $("stop").hidden = !is;
  $("answers").setAttribute("aria-busy", String(is));
}

function anew() {
  running?.abort();
  messages = [];
  shown = [];
  last = null;
  pictures.clear();
  $("answers").replaceChildren();
  $("copied").textContent = "";
  fail("");
  changed();
  $("file").focus();
}

function fail(words) {
  $("error").textContent = words;
  $("error").hidden = !words;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    $("copied").textContent = "copied";
  } catch {
    $("copied").textContent = "this browser does not let the page copy";
  }
}

/** Whether a key was asked for: whoever failed for the want of one may try again. */
async function askForKey(error) {
  if (error.status !== 401) return false;
  fail(error.message);
  if (!$("key-dialog").open) $("key-dialog").showModal();
  return true;
}

// The server

async function begin() {
  try {
    facts = await ask("page/facts.json");
    $("model").textContent = facts.model;
    await look();
  } catch (error) {
    if (!(await askForKey(error))) fail(error.message);
  }
  changed();
}

async function look() {
  if (document.hidden) return;
  let status;
  try {
    status = await ask("v1/vlfit/status");
  } catch (error) {
    $("state").textContent = error.status === 401 ? "" : "not reached";
    return;
  }
  const { running: now = 0, waiting = 0 } = status.requests ?? {};
  $("state").textContent = now || waiting ? `${status.state}, ${now} running, ${waiting} waiting` : status.state;
  $("sleep").hidden = !("sleep" in status); // null while awake
  $("sleep").textContent = status.state === "asleep" ? "Wake" : "Sleep";
  showMemory($("memory"), status);
}

async function sleepOrWake() {
  $("sleep").disabled = true;
  fail("");
  try {
    await ask($("sleep").textContent === "Wake" ? "v1/vlfit/wake" : "v1/vlfit/sleep", { method: "POST" });
  } catch (error) {
    fail(error.message);
  }
  $("sleep").disabled = false;
  await look();
}

// Light and dark: as the system has it, until somebody chooses

const system = matchMedia("(prefers-color-scheme: dark)");

function paint() {
  const chosen = localStorage.getItem("vlfit-theme");
  const dark = chosen ? chosen === "dark" : system.matches;
  document.documentElement.classList.toggle("dark", dark);
  $("theme").setAttribute("aria-pressed", String(dark));
}

$("theme").addEventListener("click", () => {
  const dark = document.documentElement.classList.contains("dark");
  localStorage.setItem("vlfit-theme", dark ? "light" : "dark");
  paint();
});
system.addEventListener("change", paint);
$("form").addEventListener("submit", submit);
$("form").addEventListener("change", changed);
$("stop").addEventListener("click", () => running?.abort());
$("anew").addEventListener("click", anew);
$("sleep").addEventListener("click", sleepOrWake);
$("copy-curl").addEventListener("click", () => copy(asCurl(address("v1/chat/completions"), last.body, last.pictures, Boolean(key.get()))));
$("copy-python").addEventListener("click", () => copy(asPython(address("v1"), last.body, last.pictures, Boolean(key.get()))));
$("key-form").addEventListener("submit", () => {
  key.set($("key").value);
  fail("");
  begin();
});
receive($("drop"), $("file"), (files) => pictures.add(files));
camera($("camera"), $("camera-dialog"), (files) => pictures.add(files), fail);
document.addEventListener("visibilitychange", look);
setInterval(look, LOOK_SECONDS * 1000);
paint();
begin();
