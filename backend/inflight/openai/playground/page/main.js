// The page itself: helpers that all parts use, and its buttons and keys.

const byId = (id) => document.getElementById(id);

/** Return a copy of a template's content. */
function copyTemplate(id) {
  return byId(id).content.firstElementChild.cloneNode(true);
}

/** Show a short message at the edge of the page. */
function announce(text) {
  const toast = byId("toast");
  toast.textContent = text;
  clearTimeout(announce.timer);
  announce.timer = setTimeout(() => (toast.textContent = ""), 1500);
}

/** Set a text field's height to the height of its text, within the limits of its style. */
function fitHeight(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + field.offsetHeight - field.clientHeight}px`;
}

/** Return whether a key event is Enter without modifiers, and does not end the composition of a character. */
function isSendKey(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing;
}

// ---------------------------------------------------------------- scrolling: stay at the end until the user scrolls up

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

// ---------------------------------------------------------------- state of a page that is loaded again

const SAVED = "inflight-playground";
const SAVED_KEY = "inflight-playground-key";

function save() {
  const saved = { settings: saveSettings(), system: byId("system").value, ...saveConversation() };
  // Too large for the browser's storage: a reloaded page starts empty.
  if (!store(SAVED, JSON.stringify(saved))) store(SAVED, "null");
}

/** Return the value stored in the browser under a name; null if there is no value or no storage. */
function stored(name) {
  try {
    return sessionStorage.getItem(name);
  } catch {
    return null;
  }
}

/** Store a value in the browser; return false if that is not possible. */
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
    // Saved by another version of the page: start empty.
    restoreSettings(initialSettings);
    clearConversation();
    byId("system").value = "";
    mode = "chat";
  }
  beginWithCompletions();
}

/** Switch to completions if the model has no chat template, unless the user has already started. */
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

/** Show the field for the API key, after an answer 401. */
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

// ---------------------------------------------------------------- the page's present state

function showMode() {
  document.querySelector(`input[name=mode][value=${mode}]`).checked = true;
  byId("chat").hidden = mode !== "chat";
  byId("completion").hidden = mode !== "completion";
  byId("input").placeholder = MODES[mode].placeholder;
  document.body.dataset.mode = mode;
  followEnd();
  showSettings();
}

/** Show the settings that apply with the values of the other settings. */
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
