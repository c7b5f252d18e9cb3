// The API key dialog; it accepts only a key that the server accepts.

import { ask, key } from "./server.js";

export class Keys {
  /** `known(pending)` is called once the key is valid, with the argument of `askFor`. */
  constructor(dialog, known) {
    this.dialog = dialog;
    this.known = known;
    this.asked = false; // the server requires a key
    this.pending = null;
    this.input = dialog.querySelector("input");
    this.wrong = dialog.querySelector("[role=alert]");
    dialog.querySelector("form").addEventListener("submit", (event) => this.#take(event));
    dialog.addEventListener("close", () => (this.pending = null));
  }

  get missing() {
    return this.asked && !key.get();
  }

  /** Opens the dialog, as the key is missing or wrong. `pending`: what to do with a valid key. */
  askFor(pending = null) {
    const kept = key.get();
    key.set("");
    this.asked = true;
    this.pending = pending ?? this.pending;
    if (this.dialog.open) return;
    this.#say(kept ? "The previous key is wrong." : "");
    this.dialog.showModal();
  }

  async #take(event) {
    event.preventDefault(); // the dialog closes when the key is valid
    key.set(this.input.value);
    try {
      await ask("v1/models");
    } catch (error) {
      key.set("");
      this.#say(error.status === 401 ? "That key is wrong." : error.message);
      this.input.select();
      return;
    }
    const pending = this.pending;
    this.input.value = "";
    this.#say("");
    this.dialog.close();
    this.known(pending);
  }

  #say(words) {
    this.wrong.textContent = words;
    this.wrong.hidden = !words;
  }
}
