// The key that a server may ask for: a dialog that takes none but a right one. Knows no questions.

import { ask, key } from "./server.js";

export class Keys {
  /** `known(pending)` is called once there is a right key, with what was given to `askFor`. */
  constructor(dialog, known) {
    this.dialog = dialog;
    this.known = known;
    this.asked = false; // the server asks for one
    this.pending = null;
    this.input = dialog.querySelector("input");
    this.wrong = dialog.querySelector("[role=alert]");
    dialog.querySelector("form").addEventListener("submit", (event) => this.#take(event));
    dialog.addEventListener("close", () => (this.pending = null));
  }

  get missing() {
    return this.asked && !key.get();
  }

  /** The server takes no more without a key, or with the one that was kept. `pending`: what waits for another. */
  askFor(pending = null) {
    const kept = key.get();
    key.set("");
    this.asked = true;
    this.pending = pending ?? this.pending;
    if (this.dialog.open) return;
    this.#say(kept ? "The key that was used so far is wrong." : "");
    this.dialog.showModal();
  }

  async #take(event) {
    event.preventDefault(); // closes when the key is right
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
