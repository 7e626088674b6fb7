// The page itself: what its parts share, and what its buttons and keys do.

const byId = (id) => document.getElementById(id);

/** A copy of what a template of the page holds. */
function copyTemplate(id) {
  return byId(id).content.firstElementChild.cloneNode(true);
}

/** Say something for a moment, at the edge of the page. */
function announce(text) {
  const toast = byId("toast");
  toast.textContent = text;
  clearTimeout(announce.timer);
  announce.timer = setTimeout(() => (toast.textContent = ""), 1500);
}

/** Make a field for text as high as its text, within what its style allows. */
function fitHeight(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + field.offsetHeight - field.clientHeight}px`;
}

/** Enter alone, but not the Enter that ends the input of a letter of several keys. */
function isSendKey(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing;
}

// ---------------------------------------------------------------- scrolling: stay at the end until somebody scrolls up

let followsEnd = true;

function followEnd() {
  if (followEnd.isDue) return;
  followEnd.isDue = true;
  requestAnimationFrame(() => {
    followEnd.isDue = false;
    if (followsEnd) byId("scroller").scrollTop = byId("scroller").scrollHeight;
  });
}

function startFollowing() {
  const scroller = byId("scroller");
  scroller.addEventListener("scroll", () => {
    followsEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 60;
  });
}

// ---------------------------------------------------------------- what a page that is loaded again finds

const SAVED = "inflight-playground";
const SAVED_KEY = "inflight-playground-key";

function save() {
  const saved = { settings: saveSettings(), system: byId("system").value, ...saveConversation() };
  // More than a browser keeps: a new page begins anew.
  if (!store(SAVED, JSON.stringify(saved))) store(SAVED, "null");
}

/** What the browser keeps under a name; null without it, or where it keeps nothing. */
function stored(name) {
  try {
    return sessionStorage.getItem(name);
  } catch {
    return null;
  }
}

/** Have the browser keep something; false if it does not. */
function store(name, text) {
  try {
    sessionStorage.setItem(name, text);
    return true;
  } catch {
    return false;
  }
}

function saveLater() {
  clearTimeout(saveLater.timer);
  saveLater.timer = setTimeout(save, 200);
}

function restore() {
  apiKey = stored(SAVED_KEY) ?? "";
  try {
    const saved = JSON.parse(stored(SAVED) ?? "null");
    if (saved) {
      restoreSettings(saved.settings);
      byId("system").value = saved.system;
      byId("system").closest("details").open = Boolean(saved.system);
      restoreConversation(saved);
      return;
    }
  } catch {
    // A page of another version has saved it: this one begins anew.
    restoreSettings(initialSettings);
    clearConversation();
    byId("system").value = "";
    mode = "chat";
  }
  beginWithCompletions();
}

/** Begin with completions if the model cannot chat, unless somebody has begun by then. */
async function beginWithCompletions() {
  const response = await fetchFromServer("playground/model").catch(() => null);
  if (!response || (await response.json()).has_chat_template) return;
  if (chat.length || completions.length || byId("input").value) return;
  mode = "completion";
  showMode();
}

// ---------------------------------------------------------------- models and the key

async function showModels() {
  const select = byId("model");
  try {
    const models = await listModels();
    const chosen = select.value;
    const name = ({ id, parent }) => (parent ? `${id} (adapter of ${parent})` : id);
    select.replaceChildren(...models.map((model) => new Option(name(model), model.id)));
    if (models.some((model) => model.id === chosen)) select.value = chosen;
  } catch (error) {
    if (error.status === 401) askForKey();
    else if (!select.options.length) select.replaceChildren(new Option("no models", ""));
    select.title = error.message;
  }
}

/** Show the field for the API key, because the server has answered 401. */
function askForKey() {
  if (!byId("key-form").hidden) return;
  byId("key-form").hidden = false;
  byId("key").focus();
}

function useKey(event) {
  event.preventDefault();
  apiKey = byId("key").value.trim();
  store(SAVED_KEY, apiKey);
  byId("key-form").hidden = true;
  showModels();
  beginWithCompletions();
  engine.poll();
}

// ---------------------------------------------------------------- what the page looks like now

function showMode() {
  document.querySelector(`input[name=mode][value=${mode}]`).checked = true;
  byId("chat").hidden = mode !== "chat";
  byId("completion").hidden = mode !== "completion";
  byId("input").placeholder = MODES[mode].placeholder;
  document.body.dataset.mode = mode;
  followEnd();
  showSettings();
}

/** Show those settings that matter with the others as they are. */
function showSettings() {
  const isNeeded = {
    schema: () => settingValue("response_format") === "json_schema",
    top_logprobs: () => settingValue("logprobs"),
    echo: () => mode === "completion",
  };
  for (const [field, isShown] of Object.entries(isNeeded)) {
    document.querySelector(`[data-setting=${field}]`).hidden = !isShown();
  }
  document.body.classList.toggle("no-shades", !settingValue("logprobs"));
  document.body.classList.toggle("monospace", settingValue("monospace"));
}

function showRunning() {
  byId("stop").hidden = !running;
  byId("send").hidden = Boolean(running);
  document.body.classList.toggle("generating", Boolean(running));
}

function openSettings(isOpen) {
  byId("open-settings").setAttribute("aria-expanded", String(isOpen));
  byId("open-settings").textContent = isOpen && isNarrow.matches ? "Close" : "Settings";
  document.body.classList.toggle("with-settings", isOpen);
}

// ---------------------------------------------------------------- start

function submitInput() {
  const text = byId("input").value;
  if (!text.trim() || running) return;
  followsEnd = true;
  send(text);
  fitHeight(byId("input"));
}

function listen() {
  byId("composer").addEventListener("submit", (event) => (event.preventDefault(), submitInput()));
  byId("input").addEventListener("input", () => fitHeight(byId("input")));
  byId("input").addEventListener("keydown", (event) => {
    if (!isSendKey(event)) return;
    event.preventDefault();
    submitInput();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || byId("code").open) return;
    tooltip.show(null);
    if (isNarrow.matches) openSettings(false);
    stop();
  });
  byId("stop").addEventListener("click", stop);
  byId("clear").addEventListener("click", () => (clearConversation(), saveLater()));
  byId("show-code").addEventListener("click", showCode);
  byId("code").addEventListener("click", ({ target }) => {
    if (target.dataset.copies) copyText(byId(target.dataset.copies).textContent, byId("code"));
  });
  byId("key-form").addEventListener("submit", useKey);
  byId("system").addEventListener("input", saveLater);
  byId("reset").addEventListener("click", () => (restoreSettings(initialSettings), showSettings(), saveLater()));
  byId("open-settings").addEventListener("click", () => openSettings(!document.body.classList.contains("with-settings")));
  byId("modes").addEventListener("change", ({ target }) => {
    stop();
    mode = target.value;
    showMode();
    saveLater();
  });
}

buildSettings(byId("setting-groups"), () => (showSettings(), saveLater()));
const initialSettings = saveSettings();
const isNarrow = matchMedia("(max-width: 60rem)");
const tooltip = new TokenTooltip(byId("tooltip"), byId("scroller"));
const engine = new EngineStrip(byId("engine"));
listen();
startFollowing();
restore();
showMode();
openSettings(!isNarrow.matches);
isNarrow.addEventListener("change", () => openSettings(!isNarrow.matches));
document.addEventListener("visibilitychange", () => document.hidden || showModels());
addEventListener("pagehide", save);
showModels();
engine.poll();
