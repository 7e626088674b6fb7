// The settings of a request: their names, their hints, and their conversion to request fields.

/** An invalid setting, found before a request is sent. */
class SettingError extends Error {
  heading = "Not sent";
}

function readNumber(text, name) {
  const number = Number(text);
  if (Number.isNaN(number)) throw new SettingError(`${name} is “${text}”, expected a number`);
  return number;
}

function readLines(text) {
  const escapes = { n: "\n", t: "\t", r: "\r", "\\": "\\" };
  const lines = text.split("\n").filter((line) => line !== "");
  return lines.map((line) => line.replace(/\\([ntr\\])/g, (_, letter) => escapes[letter]));
}

function readSchema(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new SettingError(`The JSON schema cannot be read: ${error.message}`);
  }
}

const NUMBER = { read: readNumber };

/**
 * The settings in groups. An empty setting is not sent, so that the server's default applies.
 *
 * field: name of the request's field; label and hint: texts on the page; usual: the server's default, shown in an empty
 * input; start: initial value; modes: modes that send the setting (default: both); read: converts the input's text to
 * the value.
 */
const SETTING_GROUPS = [
  {
    title: "Answers",
    settings: [
      { field: "max_tokens", label: "Longest answer", start: "256", ...NUMBER,
        hint: "The answer ends after so many tokens, finished or not." },
      { field: "n", label: "Answers", usual: "1", ...NUMBER,
        hint: "So many answers are generated from one prompt, and stand side by side." },
      { field: "stop", label: "Stop texts", kind: "lines", read: readLines,
        hint: "One a line: the answer ends before the first of them; \\n is a line break." },
      { field: "response_format", label: "Form", kind: "choice",
        options: [["", "Free text"], ["json_object", "A JSON object"], ["json_schema", "JSON after a schema"]],
        hint: "Only tokens that keep the answer in this form can be chosen." },
      { field: "schema", label: "JSON schema", kind: "lines", rows: 5, read: readSchema,
        hint: "The answer is JSON that this schema allows.", placeholder: '{"type": "object"}' },
    ],
  },
  ...SAMPLING_GROUPS.map(({ title, settings }) => ({
    title,
    settings: settings.map((setting) => ({ ...setting, ...NUMBER })),
  })),
  {
    title: "Display",
    settings: [
      { field: "logprobs", label: "Shade tokens", kind: "switch", start: "on",
        hint: "The less likely the model found a token, the darker its shade; point at it for the others." },
      { field: "top_logprobs", label: "Alternatives", start: "5", ...NUMBER,
        hint: "With each token come so many of the likeliest ones in its place." },
      { field: "echo", label: "Prompt’s tokens too", kind: "switch", modes: ["completion"],
        hint: "The answer begins with the prompt, shaded by how likely the model found it." },
      { field: "monospace", label: "Equal widths", kind: "switch",
        hint: "All letters have one width, as code has; nothing of this is sent." },
    ],
  },
];

const SETTINGS = SETTING_GROUPS.flatMap((group) => group.settings);
const settingInputs = new Map();

/** Return a setting's present input: text, or a boolean for a switch. */
function settingValue(field) {
  const input = settingInputs.get(field);
  return input.type === "checkbox" ? input.checked : input.value.trim();
}

/** Return a setting's value for a request; undefined if it is empty. */
function settingForRequest(field) {
  const value = settingValue(field);
  if (value === "" || value === false) return undefined;
  const { read, label } = SETTINGS.find((setting) => setting.field === field);
  return read ? read(value, label) : value;
}

/** Return the request fields of the settings; raises SettingError if a setting is invalid. */
function settingsForRequest(mode) {
  const body = {};
  for (const { field, modes } of SETTINGS) {
    const write = SPECIAL_FIELDS[field] ?? ((request, value) => (request[field] = value));
    const value = modes && !modes.includes(mode) ? undefined : settingForRequest(field);
    if (value !== undefined) write(body, value, mode);
  }
  return body;
}

/** Settings whose request field has another name or form. */
const SPECIAL_FIELDS = {
  max_tokens: (body, value, mode) => (body[mode === "chat" ? "max_completion_tokens" : "max_tokens"] = value),
  response_format: (body, value) => {
    body.response_format = { type: value };
    if (value === "json_schema") {
      const schema = settingForRequest("schema");
      if (schema === undefined) throw new SettingError("The JSON schema is empty; choose another form or write one.");
      body.response_format.json_schema = { name: "answer", schema };
    }
  },
  schema: () => {},
  logprobs: (body, _, mode) => {
    const count = settingForRequest("top_logprobs") ?? 0;
    Object.assign(body, mode === "chat" ? { logprobs: true, top_logprobs: count } : { logprobs: count });
  },
  top_logprobs: () => {},
  monospace: () => {},
};

/** Fill the panel with the settings; `onChange` is called after each change. */
function buildSettings(panel, onChange) {
  for (const { title, settings } of SETTING_GROUPS) {
    const group = copyTemplate("setting-group");
    group.querySelector("legend").textContent = title;
    for (const setting of settings) group.append(buildSetting(setting));
    panel.append(group);
  }
  panel.addEventListener("input", onChange);
}

function buildSetting(setting) {
  const { field, label, hint, kind = "text", usual, start, options, rows = 2, placeholder } = setting;
  const row = copyTemplate(`setting-${kind}`);
  const input = row.querySelector("input, textarea, select");
  input.id = `setting-${field}`;
  row.dataset.setting = field;
  const name = row.querySelector("label");
  name.htmlFor = input.id;
  name.querySelector("span").textContent = label;
  const help = row.querySelector(".hint");
  help.textContent = hint;
  help.id = `${input.id}-hint`;
  input.setAttribute("aria-describedby", help.id);
  if (kind === "lines") input.rows = rows;
  if (usual || placeholder) input.placeholder = usual ?? placeholder;
  for (const [value, text] of options ?? []) input.add(new Option(text, value));
  if (kind === "switch") input.checked = start === "on";
  else input.value = start ?? "";
  settingInputs.set(field, input);
  return row;
}

/** The present settings, and the saved ones. */
function saveSettings() {
  return Object.fromEntries(SETTINGS.map(({ field }) => [field, settingValue(field)]));
}

function restoreSettings(saved) {
  for (const [field, value] of Object.entries(saved)) {
    const input = settingInputs.get(field);
    if (!input) continue;
    if (input.type === "checkbox") input.checked = value;
    else input.value = value;
  }
}
