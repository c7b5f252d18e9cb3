// Search in the folder of --search: words in, small pictures out. Shown only if the server has such a folder.

import { ask, fetchBlob } from "./server.js";

export class Search {
  /** `section` has the form and the results; `needsKey(pending)` is called if the key is missing or wrong. */
  constructor(section, needsKey) {
    this.section = section;
    this.needsKey = needsKey;
    this.input = section.querySelector("input");
    this.said = section.querySelector("[role=status]");
    this.found = section.querySelector("ol");
    this.urls = [];
    this.latest = 0; // only the newest search is shown
    section.querySelector("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.look();
    });
  }

  async look() {
    const words = this.input.value.trim();
    if (!words) return this.input.focus();
    const number = ++this.latest;
    this.said.textContent = "searching ...";
    let told;
    try {
      told = await ask(`v1/vlfit/search?n=24&q=${encodeURIComponent(words)}`);
    } catch (error) {
      if (number !== this.latest) return;
      this.said.textContent = error.status === 401 ? "" : error.message;
      if (error.status === 401) this.needsKey(() => this.look());
      return;
    }
    if (number !== this.latest) return;
    this.said.textContent = told.results.length ? `${told.results.length} pictures, best first` : "nothing is indexed";
    for (const url of this.urls) URL.revokeObjectURL(url);
    this.urls = [];
    this.found.replaceChildren(...told.results.map((hit) => this.#item(hit, number)));
  }

  #item(hit, number) {
    const item = document.createElement("li");
    const image = new Image();
    const name = document.createElement("span");
    image.alt = "";
    name.textContent = hit.key;
    name.title = `${hit.key} (${hit.score.toFixed(3)})`;
    item.append(image, name);
    const path = `v1/vlfit/search/picture?path=${encodeURIComponent(hit.path)}&key=${encodeURIComponent(hit.key)}`;
    this.#show(image, path, number);
    return item;
  }

  async #show(image, path, number) {
    try {
      const blob = await fetchBlob(path); // an <img> by itself would send no key
      if (number !== this.latest) return;
      const url = URL.createObjectURL(blob);
      this.urls.push(url);
      image.src = url;
    } catch {
      image.hidden = true; // the name stays
    }
  }
}
