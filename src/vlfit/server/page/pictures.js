// The chosen pictures: dropped, pasted, picked or taken with the camera.

const MAX_BYTES = 40 * 1024 * 1024; // of one file: requests are limited to 64 MiB, and base64 adds a third
const SVG = "http://www.w3.org/2000/svg";

export class Pictures {
  /** Shows them in `place`; calls `changed()` when they change, `failed(message)` for files that are not pictures. */
  constructor(place, changed, failed) {
    this.place = place;
    this.changed = changed;
    this.failed = failed;
    this.all = [];
  }

  async add(files) {
    this.failed(""); // clear earlier errors
    for (const file of files) {
      try {
        this.all.push(await this.#read(file));
      } catch (error) {
        this.failed(error.message);
      }
    }
    this.changed();
  }

  clear() {
    for (const each of this.all) each.figure.remove();
    this.all = [];
    this.changed();
  }

  async #read(file) {
    const name = file.name || "pasted picture";
    if (file.size > MAX_BYTES) throw new Error(`${name} is larger than 40 MB; scale it down first`);
    const url = await new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(new Error(`${name} cannot be read`));
      reader.readAsDataURL(file);
    });
    const image = new Image();
    image.src = url;
    image.alt = name;
    try {
      await image.decode();
    } catch {
      throw new Error(`${name} is not a picture that this browser can show`);
    }
    const picture = { name, url, image };
    picture.figure = this.#frame(picture);
    this.place.append(picture.figure);
    return picture;
  }

  #frame(picture) {
    const figure = document.createElement("figure");
    const frame = document.createElement("div");
    frame.className = "frame";
    const overlay = document.createElementNS(SVG, "svg");
    overlay.setAttribute("viewBox", "0 0 1000 1000"); // boxes are in thousandths
    overlay.setAttribute("preserveAspectRatio", "none");
    overlay.setAttribute("aria-hidden", "true");
    frame.append(picture.image, overlay);
    const caption = document.createElement("figcaption");
    const words = document.createElement("span");
    words.className = "quiet";
    words.textContent = `${picture.name}, ${picture.image.naturalWidth} × ${picture.image.naturalHeight}`;
    const remove = document.createElement("button");
    remove.type = "button";
    remove.textContent = "Remove";
    remove.setAttribute("aria-label", `Remove ${picture.name}`);
    remove.addEventListener("click", () => {
      this.all = this.all.filter((each) => each !== picture);
      figure.remove();
      this.changed();
    });
    caption.append(words, remove);
    figure.append(frame, caption);
    return figure;
  }
}

/** Accepts files dropped on `target`, pasted anywhere, or picked with `input`. */
export function receive(target, input, take) {
  for (const name of ["dragenter", "dragover"]) {
    document.addEventListener(name, (event) => {
      event.preventDefault();
      target.classList.add("over");
    });
  }
  document.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) target.classList.remove("over");
  });
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    target.classList.remove("over");
    if (event.dataTransfer.files.length) take([...event.dataTransfer.files]);
  });
  document.addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files].filter((file) => file.type.startsWith("image/"));
    if (files.length) {
      event.preventDefault();
      take(files);
    }
  });
  input.addEventListener("change", () => {
    take([...input.files]);
    input.value = "";
  });
}

/** The camera dialog. */
export function camera(button, dialog, take, failed) {
  const video = dialog.querySelector("video");
  let live = null;
  const close = () => {
    live?.getTracks().forEach((track) => track.stop());
    live = null;
    video.srcObject = null;
  };
  button.addEventListener("click", async () => {
    if (!navigator.mediaDevices?.getUserMedia) {
      failed("the camera needs https, or a page served from this computer");
      return;
    }
    try {
      live = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
    } catch {
      failed("no camera was found, or this page may not use it");
      return;
    }
    video.srcObject = live;
    dialog.showModal();
    await video.play();
  });
  dialog.addEventListener("close", close);
  dialog.querySelector("#camera-close").addEventListener("click", () => dialog.close());
  dialog.querySelector("#camera-take").addEventListener("click", async () => {
    const canvas = document.createElement("canvas");
    canvas.width = video.videoWidth;
    canvas.height = video.videoHeight;
    canvas.getContext("2d").drawImage(video, 0, 0);
    dialog.close();
    const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.92));
    take([new File([blob], "camera.jpg", { type: "image/jpeg" })]);
  });
}
