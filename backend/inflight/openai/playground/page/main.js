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
  let lastTop = 0;
  scroller.addEventListener("scroll", () => {
    // Text may have been added since the page itself scrolled to the end, so only a step up is the user's.
    if (scroller.scrollTop < lastTop) followsEnd = false;
    if (scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 60) followsEnd = true;
    lastTop = scroller.scrollTop;
  });
}

// ---------------------------------------------------------------- state of a page that is loaded again

function save() {
  store("settings", JSON.stringify(saveSettings()));
  keepConversation();
}

function saveLater() {
  clearTimeout(saveLater.timer);
  saveLater.timer = setTimeout(save, 200);
}

function restore() {
  apiKey = stored("key", "sessionStorage") ?? "";
  const settings = storedJson("settings");
  if (settings && typeof settings === "object") restoreSettings(settings);
  reopenConversation();
}

/** Find out whether the model answers chats. If it does not, say why, and begin with completions. */
async function askAboutChats() {
  const response = await fetchFromServer("playground/model").catch(() => null);
  if (!response) return;
  const { has_chat_template: hasTemplate, reason, max_picture_bytes: mostBytes } = await response.json();
  offerPictures(mostBytes ?? 0);
  chatProblem = hasTemplate ? "" : reason;
  const isUnused = !chat.length && !completions.length && !byId("input").value;
  if (chatProblem && isUnused) mode = "completion";
  showMode();
}

// ---------------------------------------------------------------- models and the key

async function showModels() {
  const select = byId("model");
  try {
    const models = await listModels();
    const chosen = select.value;
    const name = ({ id, parent }) => (parent ? `${id} (adapter of ${parent})` : id);
    select.replaceChildren(
      ...models.map((model) => {
        const option = new Option(name(model), model.id);
        option.dataset.longest = model.max_model_len ?? "";
        return option;
      }),
    );
    if (models.some((model) => model.id === chosen)) select.value = chosen;
    contextMeter.update();
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
  store("key", apiKey, "sessionStorage");
  byId("key-form").hidden = true;
  showModels();
  askAboutChats();
  engine.poll();
}

// ---------------------------------------------------------------- the page's present state

function showMode() {
  document.querySelector(`input[name=mode][value=${mode}]`).checked = true;
  byId("chat").hidden = mode !== "chat";
  byId("completion").hidden = mode !== "completion";
  byId("input").placeholder = MODES[mode].placeholder;
  document.body.dataset.mode = mode;
  const radio = document.querySelector("input[name=mode][value=chat]");
  radio.disabled = Boolean(chatProblem);
  radio.closest("label").title = chatProblem;
  byId("no-chat").hidden = !chatProblem;
  byId("no-chat").textContent = `Chat is not available: ${chatProblem}`;
  byId("send").disabled = mode === "chat" && Boolean(chatProblem);
  followEnd();
  showSettings();
  contextMeter.update();
}

/** Show the settings that have a meaning, and the page as they say. */
function showSettings() {
  showSettingsOf(mode);
  document.documentElement.dataset.theme = settingValue("theme");
  document.body.classList.toggle("no-shades", !settingValue("logprobs"));
  document.body.classList.toggle("rendered", settingValue("markdown") && !settingValue("logprobs"));
  document.body.classList.toggle("monospace", settingValue("monospace"));
}

/** Show and keep the settings after a change. */
function settingsChanged() {
  showSettings();
  contextMeter.update();
  saveLater();
}

function showRunning() {
  byId("stop").hidden = !running;
  byId("send").hidden = Boolean(running);
  document.body.classList.toggle("generating", Boolean(running));
}

function openSettings(isOpen) {
  byId("open-settings").setAttribute("aria-expanded", String(isOpen));
  byId("open-settings").setAttribute("aria-label", isOpen && isNarrow.matches ? "Close settings" : "Settings");
  document.body.classList.toggle("with-settings", isOpen);
  if (isOpen && isNarrow.matches) openLibrary(false);
}

// ---------------------------------------------------------------- start

function submitInput() {
  const text = byId("input").value;
  const hasPictures = mode === "chat" && draftPictures.length;
  if (!(text.trim() || hasPictures) || running || byId("send").disabled) return;
  followsEnd = true;
  send(text);
  fitHeight(byId("input"));
}

function listen() {
  byId("composer").addEventListener("submit", (event) => (event.preventDefault(), submitInput()));
  byId("input").addEventListener("input", () => (fitHeight(byId("input")), contextMeter.update()));
  byId("input").addEventListener("keydown", (event) => {
    if (!isSendKey(event)) return;
    event.preventDefault();
    submitInput();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || byId("code").open) return;
    tooltip.show(null);
    if (isNarrow.matches) {
      openSettings(false);
      openLibrary(false);
    }
    stop();
  });
  byId("stop").addEventListener("click", stop);
  byId("new").addEventListener("click", () => (openConversation(null), byId("input").focus()));
  byId("show-code").addEventListener("click", showCode);
  byId("code").addEventListener("click", ({ target }) => {
    if (target.dataset.copies) copyText(byId(target.dataset.copies).textContent, byId("code"));
  });
  byId("key-form").addEventListener("submit", useKey);
  byId("system").addEventListener("input", () => (contextMeter.update(), saveLater()));
  byId("model").addEventListener("change", () => contextMeter.update());
  byId("open-settings").addEventListener("click", () => openSettings(!document.body.classList.contains("with-settings")));
  byId("modes").addEventListener("change", ({ target }) => {
    stop();
    mode = target.value;
    showMode();
    saveLater();
  });
}

buildSettings(byId("setting-groups"), settingsChanged);
const initialSettings = saveSettings();
const isNarrow = matchMedia("(max-width: 60rem)");
const tooltip = new TokenTooltip(byId("tooltip"), byId("scroller"));
const engine = new EngineStrip(byId("engine"));
const contextMeter = new ContextMeter(byId("context"));
listen();
listenToLibrary();
listenToPictures();
listenToPresets(settingsChanged);
startFollowing();
restore();
showMode();
openSettings(!isNarrow.matches);
isNarrow.addEventListener("change", () => openSettings(!isNarrow.matches));
document.addEventListener("visibilitychange", () => document.hidden || showModels());
addEventListener("pagehide", save);
showModels();
askAboutChats();
engine.poll();
