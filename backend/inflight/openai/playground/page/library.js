// The conversations that the browser keeps: listed, opened, renamed, deleted, exported and imported.

const CONVERSATIONS = "conversation/";
const FILE_MARK = "inflight_playground";
const TITLE_LENGTH = 60;

/** The open conversation: its id, and the title if the user gave it one. */
let current = newConversation();
let lastSaved = "";

function newConversation() {
  return { id: Array.from(crypto.getRandomValues(new Uint32Array(3)), (part) => part.toString(36)).join(""), title: "" };
}

/** Return the kept conversations, the one that was changed last first. */
function keptConversations() {
  const all = storedNames(CONVERSATIONS).map(storedJson).filter((each) => each?.id);
  return all.sort((one, other) => (other.changed ?? 0) - (one.changed ?? 0));
}

/** Keep the open conversation, if it is not empty and has changed. */
function keepConversation() {
  store("open", current.id, "sessionStorage");
  if (!chat.length && !completions.length) return;
  const plain = { ...current, system: byId("system").value, ...saveConversation() };
  const text = JSON.stringify(plain);
  if (text === lastSaved) return;
  const isKept = store(CONVERSATIONS + current.id, JSON.stringify({ ...plain, changed: Date.now() }));
  if (isKept) lastSaved = text;
  else announce("The browser has no room: this conversation is not kept");
  showLibrary();
}

/** Show a conversation in place of the open one, which stays kept; null begins an empty one. */
function openConversation(saved) {
  keepConversation();
  clearConversation();
  current = saved ? { id: saved.id, title: saved.title ?? "" } : newConversation();
  setSystem(saved?.system ?? "");
  if (saved) restoreConversation(saved);
  const { changed: _, ...plain } = saved ?? {};
  lastSaved = saved ? JSON.stringify(plain) : "";
  store("open", current.id, "sessionStorage");
  showMode();
  showLibrary();
}

/** Open the conversation that this tab had open before it was loaded again. */
function reopenConversation() {
  const saved = storedJson(CONVERSATIONS + stored("open", "sessionStorage"));
  if (!saved) return;
  try {
    openConversation(checkedConversation(saved));
  } catch {
    openConversation(null); // kept by another version of the page
  }
}

/** Return a conversation's title: the user's, or the beginning of its first text. */
function titleOf({ title, chat: entries, completions: turns }) {
  const first = entries?.find(({ text }) => text)?.text ?? turns?.[0]?.prompt ?? "";
  const line = title || first.trim().split("\n")[0];
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH)}…` : line || "Without a title";
}

function showLibrary() {
  const isRenaming = byId("library-list").querySelector("form"); // a title that is being written stays
  if (isRenaming || !document.body.classList.contains("with-library")) return;
  byId("library-list").replaceChildren(...keptConversations().map(libraryEntry));
}

function libraryEntry(saved) {
  const entry = copyTemplate("library-entry");
  const button = (name, onClick) => entry.querySelector(`[data-action=${name}]`).addEventListener("click", onClick);
  const title = entry.querySelector("[data-action=open]");
  title.textContent = titleOf(saved);
  if (saved.id === current.id) title.setAttribute("aria-current", "true");
  button("open", () => openFromLibrary(saved.id));
  button("rename", () => renameIn(entry, saved));
  button("export", () => exportConversations([saved], titleOf(saved)));
  button("delete", () => deleteConversation(saved));
  return entry;
}

function openFromLibrary(id) {
  keepConversation();
  const saved = storedJson(CONVERSATIONS + id); // another tab may have changed it
  try {
    openConversation(saved && checkedConversation(saved));
  } catch (error) {
    announce(error.message);
  }
  if (isNarrow.matches) openLibrary(false);
}

/** Put a field for the new title in the place of the old one. */
function renameIn(entry, saved) {
  const form = copyTemplate("rename-form");
  const field = form.querySelector("input");
  field.value = saved.title || titleOf(saved);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const title = field.value.trim();
    if (saved.id === current.id) current.title = title;
    store(CONVERSATIONS + saved.id, JSON.stringify({ ...(storedJson(CONVERSATIONS + saved.id) ?? saved), title }));
    field.blur();
  });
  field.addEventListener("blur", () => (form.remove(), showLibrary()));
  field.addEventListener("keydown", (event) => event.key === "Escape" && (event.stopPropagation(), field.blur()));
  entry.querySelector("[data-action=open]").replaceWith(form);
  field.select();
}

function deleteConversation(saved) {
  if (!confirm(`Delete “${titleOf(saved)}”?`)) return;
  if (saved.id === current.id) {
    clearConversation();
    openConversation(null);
  }
  forget(CONVERSATIONS + saved.id);
  showLibrary();
}

/** Have the browser download conversations as a JSON file. */
function exportConversations(conversations, name) {
  const text = JSON.stringify({ [FILE_MARK]: 1, conversations }, null, 2);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = `${name.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "conversation"}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

/** Add the conversations of an exported file to the kept ones, under new ids. */
async function importConversations(file) {
  try {
    const read = JSON.parse(await file.text());
    if (read?.[FILE_MARK] !== 1) throw new TypeError("it was not exported by a playground");
    const all = read.conversations.map(checkedConversation).map((each) => ({ ...each, id: newConversation().id }));
    const areKept = all.every((each) => store(CONVERSATIONS + each.id, JSON.stringify({ ...each, changed: Date.now() })));
    announce(areKept ? `Imported: ${all.length}` : "The browser has no room for all of them");
  } catch (error) {
    announce(`${file.name} cannot be imported: ${error.message}`);
  }
  showLibrary();
}

/** Return a conversation of a file or of the storage with exactly the page's fields; raises TypeError if it has others. */
function checkedConversation({ id, title = "", system = "", mode: kind, chat: entries, completions: turns, changed }) {
  if (!Object.hasOwn(MODES, kind)) throw new TypeError(`mode is ${JSON.stringify(kind)}`);
  const checked = { id: textOf(id), title: textOf(title), system: textOf(system) };
  return { ...checked, chat: entries.map(checkedEntry), completions: turns.map(checkedEntry), mode: kind, changed };
}

function checkedEntry({ text, pictures = [], answers, chosen = 0, prompt = null }) {
  if (text !== undefined) return { text: textOf(text), ...(pictures.length && { pictures: pictures.map(pictureOf) }) };
  const isChosen = Number.isInteger(chosen) && (answers.length ? chosen in answers : chosen === 0); // without answers if it was not sent
  if (!isChosen) throw new TypeError("an entry has no answer that is chosen");
  return { answers: answers.map(checkedAnswer), chosen, prompt: prompt === null ? null : textOf(prompt) };
}

function checkedAnswer({ text, reasoning = "", figures = "", calls = [], areSent = false }) {
  const call = (each) => ({
    id: textOf(each.id), name: textOf(each.name), arguments: textOf(each.arguments), result: textOf(each.result),
  });
  const [checked, thoughts, line] = [text, reasoning, figures].map(textOf);
  return { text: checked, reasoning: thoughts, figures: line, calls: calls.map(call), areSent: areSent === true };
}

function textOf(value) {
  if (typeof value !== "string") throw new TypeError(`expected a text, got ${JSON.stringify(value) ?? "nothing"}`);
  return value;
}

function pictureOf(url) {
  if (!textOf(url).startsWith("data:image/")) throw new TypeError("expected a picture as a data: URL");
  return url;
}

function openLibrary(isOpen) {
  byId("open-library").setAttribute("aria-expanded", String(isOpen));
  document.body.classList.toggle("with-library", isOpen);
  if (isOpen && isNarrow.matches) openSettings(false);
  showLibrary();
}

function listenToLibrary() {
  byId("open-library").addEventListener("click", () => openLibrary(!document.body.classList.contains("with-library")));
  byId("export").addEventListener("click", () => {
    keepConversation();
    exportConversations(keptConversations(), "conversations");
  });
  byId("import").addEventListener("click", () => byId("import-file").click());
  byId("import-file").addEventListener("change", async ({ target }) => {
    for (const file of target.files) await importConversations(file);
    target.value = "";
  });
  addEventListener("storage", showLibrary); // another tab has kept or deleted one
}
