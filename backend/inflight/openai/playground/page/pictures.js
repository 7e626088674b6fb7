// Pictures of the next message: taken by drop, by paste and by a button, shown above the input, sent as data: URLs.

const PICTURE_TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];

/** The data: URLs of the next message's pictures. */
const draftPictures = [];

let mostPictureBytes = 0; // of one picture; 0: the model takes no pictures

/** Return a message's content: its text, or a list of its pictures and its text. */
function contentOf(text, pictures) {
  if (!pictures.length) return text;
  const parts = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

/** Return whether one of these messages has a picture. */
function havePictures(messages) {
  return messages.some(({ content }) => Array.isArray(content));
}

/** Show pictures in an element; `onRemove`, if given, is called with the index of a picture that is clicked away. */
function showPictures(element, pictures, onRemove = null) {
  element.hidden = !pictures.length;
  element.replaceChildren(
    ...pictures.map((url, index) => {
      const figure = copyTemplate("picture");
      figure.querySelector("img").src = url;
      figure.querySelector("button").hidden = !onRemove;
      figure.querySelector("button").addEventListener("click", () => onRemove(index));
      return figure;
    }),
  );
}

function showDraftPictures() {
  showPictures(byId("draft-pictures"), draftPictures, (index) => (draftPictures.splice(index, 1), showDraftPictures()));
  contextMeter.update();
}

/** Return the pictures of the next message, which are then sent. */
function takeDraftPictures() {
  const pictures = draftPictures.splice(0);
  showDraftPictures();
  return pictures;
}

/** Add files to the next message; those that cannot be sent are named. */
async function addPictures(files) {
  for (const file of files) {
    const problem = problemOfPicture(file);
    if (problem) announce(`${file.name} ${problem}`);
    else draftPictures.push(await readAsDataUrl(file));
  }
  showDraftPictures();
}

function problemOfPicture({ type, size }) {
  if (!PICTURE_TYPES.includes(type)) return "is not a picture that can be sent: expected PNG, JPEG, WebP, GIF or BMP";
  if (size > mostPictureBytes) return `has ${inMegabytes(size)}; the server takes pictures of up to ${inMegabytes(mostPictureBytes)}`;
  return "";
}

function inMegabytes(size) {
  return `${(size / 2 ** 20).toFixed(1)} MB`;
}

function readAsDataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

/** Offer pictures if the model takes them; `most` is the size in bytes of the largest one. */
function offerPictures(most) {
  mostPictureBytes = most;
  byId("add-picture").hidden = !most;
}

function canAddPictures() {
  return mostPictureBytes > 0 && mode === "chat";
}

function listenToPictures() {
  byId("add-picture").addEventListener("click", () => byId("picture-file").click());
  byId("picture-file").addEventListener("change", async ({ target }) => {
    await addPictures([...target.files]);
    target.value = "";
    byId("input").focus();
  });
  byId("input").addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files];
    if (!files.length || !canAddPictures()) return;
    event.preventDefault();
    addPictures(files);
  });
  document.addEventListener("dragover", (event) => {
    if (canAddPictures() && event.dataTransfer.types.includes("Files")) event.preventDefault();
  });
  document.addEventListener("drop", (event) => {
    if (!canAddPictures() || !event.dataTransfer.files.length) return;
    event.preventDefault();
    addPictures([...event.dataTransfer.files]);
  });
}
