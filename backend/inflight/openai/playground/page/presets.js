// Presets: named values of the settings, with a system prompt if there was one.

const BUILT_IN_PRESETS = {
  __proto__: null,
  Defaults: {},
  "Likeliest tokens": { settings: { temperature: "0" } },
  "Three answers": { settings: { n: "3", temperature: "0.8" } },
};

/** Return the user's presets by name. */
function ownPresets() {
  const saved = storedJson("presets");
  return saved && typeof saved === "object" ? saved : {};
}

function showPresets(chosen = "") {
  const options = (names) => names.map((name) => new Option(name, name));
  const own = options(Object.keys(ownPresets()).sort());
  byId("preset").replaceChildren(new Option("Choose", ""), ...options(Object.keys(BUILT_IN_PRESETS)), ...own);
  byId("preset").value = chosen;
  byId("delete-preset").hidden = !Object.hasOwn(ownPresets(), chosen);
}

/** Set all settings to those of a preset; its system prompt replaces the present one if it has one. */
function usePreset(name) {
  const preset = Object.hasOwn(ownPresets(), name) ? ownPresets()[name] : BUILT_IN_PRESETS[name];
  if (!preset) return;
  restoreSettings({ ...withoutDisplay(initialSettings), ...preset.settings });
  if (preset.system) setSystem(preset.system);
  showPresets(name);
}

/** Keep the present settings under a name, which may be that of an own preset. */
function savePreset(name) {
  if (!name) return;
  if (name in BUILT_IN_PRESETS) return announce(`${name} is built in: choose another name`);
  const preset = { settings: withoutDisplay(saveSettings()), system: byId("system").value };
  const isKept = store("presets", JSON.stringify({ ...ownPresets(), [name]: preset }));
  announce(isKept ? "Saved" : "The browser has no room for it");
  showPresets(name);
}

function deletePreset(name) {
  const { [name]: _, ...others } = ownPresets();
  store("presets", JSON.stringify(others));
  showPresets();
}

/** Listen to the form of presets; `onChange` is called after the settings have changed. */
function listenToPresets(onChange) {
  byId("preset").addEventListener("change", ({ target }) => (usePreset(target.value), onChange()));
  byId("delete-preset").addEventListener("click", () => deletePreset(byId("preset").value));
  byId("preset-form").addEventListener("submit", (event) => {
    event.preventDefault();
    savePreset(byId("preset-name").value.trim());
    byId("preset-name").value = "";
  });
  showPresets();
}
