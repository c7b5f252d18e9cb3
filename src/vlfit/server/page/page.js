// The page: form, requests, answers and buttons.

import { Answer } from "./answers.js";
import { asCurl, asPython } from "./copies.js";
import { Keys } from "./keys.js";
import { show as showMemory } from "./memory.js";
import { Pictures, camera, receive } from "./pictures.js";
import { Search } from "./search.js";
import { address, ask, key, stream } from "./server.js";

const LOOK_SECONDS = 2;
const ASKING = { ask: "What do you want to know?", detect: "What to find, for example: cups", more: "Ask another question" };
const LOOKS = ["scene", "detect"]; // tasks with one request per picture, and boxes over it
const $ = (id) => document.getElementById(id);

let facts = { model: "", prompts: {} }; // about the server
let messages = []; // the conversation so far, as sent to the server
let shown = []; // the pictures in it
let last = null; // the last request
let running = null; // an AbortController while a request runs
const pictures = new Pictures($("pictures"), looked, fail);
const keys = new Keys($("key-dialog"), begin);
new Search($("search"), (pending) => keys.askFor(pending));

// Asking

async function submit(event) {
  event?.preventDefault();
  if (running) return;
  fail("");
  const words = $("question").value.trim();
  const question = wording(words);
  if (question === null) return;
  if (keys.missing) return keys.askFor(submit);
  const before = follows() ? messages : []; // other tasks start a new conversation
  if (before.length === 0) shown = [...pictures.all];
  running = new AbortController();
  busy(true);
  try {
    if (LOOKS.includes(question.task)) await lookAtEach(question);
    else messages = await answerTo(question, before, shown, question.title);
    $("question").value = "";
    // After a caption the user most likely asks about it; after scene or detect the task stays.
    if (question.task === "caption") $("form").elements.task.value = "ask";
  } catch (error) {
    if (error.status === 401) keys.askFor(submit);
    else if (error.name !== "AbortError") fail(error.message);
  } finally {
    running = null;
    busy(false);
    changed();
    ($("question").disabled ? $("go") : $("question")).focus();
  }
}

/** One request per picture, since a box does not say which picture it belongs to. */
async function lookAtEach(question) {
  const each = [...shown];
  messages = [];
  for (const picture of each) {
    const title = each.length > 1 ? `${question.title}: ${picture.name}` : question.title;
    try {
      const told = await answerTo(question, [], [picture], title);
      if (each.length === 1) messages = told; // with several, the next question starts anew about all of them
    } catch (error) {
      if (each.length > 1 && error.name !== "AbortError") error.message = `${picture.name}: ${error.message}`;
      throw error;
    }
  }
}

/** Sends the question, streams the answer, and returns the conversation including it. */
async function answerTo(question, before, seen, title) {
  const looks = LOOKS.includes(question.task);
  const asked = { role: "user", content: contentOf(question.text, before, seen) };
  const body = { model: $("models").value || facts.model, messages: [...before, asked], max_tokens: 1024 };
  if (looks) body.temperature = 0;
  last = { body, pictures: seen };
  const answer = new Answer($("answers"), title, seen.length === 1 ? seen[0] : null, looks);
  try {
    const found = await stream(body, running.signal, (piece) => answer.add(piece));
    answer.finish(found);
    return [...body.messages, { role: "assistant", content: found.text }];
  } catch (error) {
    answer.breakOff(error.name === "AbortError" ? "stopped" : "failed");
    throw error;
  }
}

/** The question as {task, title, text}; null, with an error shown, if something is missing. */
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

/** Whether the next question continues the conversation. */
const follows = () => messages.length > 0 && $("form").elements.task.value === "ask";

function contentOf(text, before, seen) {
  if (before.length > 0 || seen.length === 0) return text;
  const parts = seen.map((picture) => ({ type: "image_url", image_url: { url: picture.url } }));
  return [...parts, { type: "text", text }];
}

// Around it

/** The pictures have changed: start a new conversation. */
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
    $("copied").textContent = "this browser does not allow copying";
  }
}

// The server

/** Loads the page's facts, at first and again once a key is entered; then runs `pending`. */
async function begin(pending = null) {
  fail("");
  try {
    facts = await ask("page/facts.json");
    $("model").textContent = facts.model;
    showModels((facts.models ?? []).map((model) => ({ model })));
    keys.asked = facts.asks_key;
    $("search").hidden = !facts.searches;
  } catch (error) {
    fail(error.message);
  }
  changed();
  if (keys.missing) keys.askFor();
  await look();
  await pending?.();
}

/** Offers the models of a server of several, `rows` of its status; empty for a server of one. */
function showModels(rows) {
  const chosen = $("models").value;
  $("models").replaceChildren(...rows.map((row) => new Option(row.state ? `${row.model} (${row.state})` : row.model, row.model)));
  if (rows.some((row) => row.model === chosen)) $("models").value = chosen;
  $("models").hidden = rows.length < 2;
  $("model").hidden = rows.length > 1;
}

async function look() {
  if (document.hidden) return;
  if (keys.missing) {
    $("state").textContent = "API key required";
    return;
  }
  let status;
  try {
    status = await ask("v1/vlfit/status");
  } catch (error) {
    $("state").textContent = "not reachable";
    if (error.status === 401) keys.askFor();
    return;
  }
  const { running: now = 0, waiting = 0 } = status.requests ?? {};
  $("state").textContent = now || waiting ? `${status.state}, ${now} running, ${waiting} waiting` : status.state;
  $("sleep").hidden = !("sleep" in status); // null while awake
  $("sleep").textContent = status.state === "asleep" ? "Wake" : "Sleep";
  if (document.activeElement !== $("models")) showModels(status.models ?? []); // not while the list is open
  showMemory($("memory"), status);
}

async function sleepOrWake() {
  $("sleep").disabled = true;
  fail("");
  try {
    await ask($("sleep").textContent === "Wake" ? "v1/vlfit/wake" : "v1/vlfit/sleep", { method: "POST" });
  } catch (error) {
    if (error.status === 401) keys.askFor(sleepOrWake);
    else fail(error.message);
  }
  $("sleep").disabled = false;
  await look();
}

// Light or dark: the system's preference until the user chooses

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
receive($("drop"), $("file"), (files) => pictures.add(files));
camera($("camera"), $("camera-dialog"), (files) => pictures.add(files), fail);
document.addEventListener("visibilitychange", look);
setInterval(look, LOOK_SECONDS * 1000);
paint();
begin();
