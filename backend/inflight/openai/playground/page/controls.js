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

function readJson(text, name) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new SettingError(`${name} cannot be read: ${error.message}`);
  }
}

/** Return the tools in OpenAI's form: a function alone is put into its envelope. */
function readTools(text, name) {
  const read = readJson(text, name);
  return (Array.isArray(read) ? read : [read]).map((tool) => (tool?.type ? tool : { type: "function", function: tool }));
}

const NUMBER = { read: readNumber };

/** Return a setting that is shown, and must have a value, while the answer's form is `form`. */
function ofForm(form, setting) {
  return { ...setting, kind: "lines", isRequired: true, isShown: () => settingValue("response_format") === form };
}

const TOOL_EXAMPLE = `[{
  "name": "get_weather",
  "description": "The weather of a city",
  "parameters": {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"]
  }
}]`;

/**
 * The settings in groups. An empty setting is not sent, so that the server's default applies.
 *
 * field: name of the request's field; label and hint: texts on the page; usual: the server's default, shown in an empty
 * input; start: initial value; modes: modes that have the setting (default: both); isShown: whether the other settings
 * leave it a meaning, otherwise it is neither shown nor sent; isRequired: whether it must not be empty when it is shown;
 * read: converts the input's text to the value; isDisplay: whether it changes only the page, and is never sent.
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
        options: [["", "Free text"], ["json_object", "A JSON object"], ["json_schema", "JSON after a schema"],
          ["regex", "A regular expression"], ["choice", "One of several texts"], ["grammar", "A grammar"]],
        hint: "Only tokens that keep the answer in this form can be chosen." },
      ofForm("json_schema", { field: "schema", label: "JSON schema", rows: 5, read: readJson,
        hint: "The answer is JSON that this schema allows.", placeholder: '{"type": "object"}' }),
      ofForm("regex", { field: "regex", label: "Regular expression",
        hint: "The whole answer matches it.", placeholder: "[0-9]{4}-[0-9]{2}" }),
      ofForm("choice", { field: "choice", label: "Texts to choose from", rows: 3, read: readLines,
        hint: "One a line: the answer is exactly one of them.", placeholder: "yes\nno" }),
      ofForm("grammar", { field: "grammar", label: "Grammar", rows: 5,
        hint: "The answer follows the rule root of this grammar in EBNF.", placeholder: 'root ::= "yes" | "no"' }),
    ],
  },
  ...SAMPLING_GROUPS.map(({ title, settings }) => ({
    title,
    settings: settings.map((setting) => ({ ...setting, ...NUMBER })),
  })),
  {
    title: "Tools",
    settings: [
      { field: "tools", label: "Tools", kind: "lines", rows: 5, read: readTools, modes: ["chat"], placeholder: TOOL_EXAMPLE,
        hint: "A JSON list of functions that the model may call. A call is shown in the answer, and you write its result." },
      { field: "tool_choice", label: "Calls", kind: "choice", modes: ["chat"], isShown: () => settingValue("tools") !== "",
        options: [["", "The model decides"], ["required", "It must call one"], ["none", "It calls none"]],
        hint: "Whether the model calls a tool." },
    ],
  },
  {
    title: "Display",
    settings: [
      { field: "theme", label: "Theme", kind: "choice", isDisplay: true,
        options: [["", "The system’s"], ["light", "Light"], ["dark", "Dark"]], hint: "The page’s colours." },
      { field: "markdown", label: "Markdown", kind: "switch", start: "on", modes: ["chat"], isDisplay: true,
        isShown: () => !settingValue("logprobs"),
        hint: "Headings, lists, tables and code in answers of a chat are shown as such." },
      { field: "logprobs", label: "Shade tokens", kind: "switch",
        hint: "The less likely the model found a token, the darker its shade; point at it for the others." },
      { field: "top_logprobs", label: "Alternatives", start: "5", ...NUMBER, isShown: () => settingValue("logprobs"),
        hint: "With each token come so many of the likeliest ones in its place." },
      { field: "echo", label: "Prompt’s tokens too", kind: "switch", modes: ["completion"],
        hint: "The answer begins with the prompt, shaded by how likely the model found it." },
      { field: "monospace", label: "Equal widths", kind: "switch", isDisplay: true,
        hint: "All letters have one width, as code has." },
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

/** Return a setting's value for a request; undefined if it is empty. Raises SettingError if it is invalid. */
function settingForRequest(field) {
  const value = settingValue(field);
  const { read, label, isRequired } = SETTINGS.find((setting) => setting.field === field);
  if (value === "" && isRequired) throw new SettingError(`${label} is empty: write one, or choose another form`);
  if (value === "" || value === false) return undefined;
  return read ? read(value, label) : value;
}

/** Return whether a setting has a meaning in a mode, beside the other settings. */
function hasMeaning({ modes, isShown }, mode) {
  return (!modes || modes.includes(mode)) && (!isShown || Boolean(isShown()));
}

/** Return the request fields of the settings; raises SettingError if a setting is invalid. */
function settingsForRequest(mode) {
  const body = {};
  for (const setting of SETTINGS) {
    const { field, isDisplay } = setting;
    if (isDisplay || !hasMeaning(setting, mode)) continue;
    const write = SPECIAL_FIELDS[field] ?? ((request, value) => (request[field] = value));
    const value = settingForRequest(field);
    if (value !== undefined) write(body, value, mode);
  }
  return body;
}

/** Show the settings that have a meaning in a mode, and hide the others and groups without any. */
function showSettingsOf(mode) {
  for (const setting of SETTINGS) {
    document.querySelector(`[data-setting=${setting.field}]`).hidden = !hasMeaning(setting, mode);
  }
  for (const group of document.querySelectorAll("fieldset.group")) {
    group.hidden = !group.querySelector(".setting:not([hidden])");
  }
}

/** Settings whose request field has another name or form. */
const SPECIAL_FIELDS = {
  max_tokens: (body, value, mode) => (body[mode === "chat" ? "max_completion_tokens" : "max_tokens"] = value),
  response_format: (body, value) => {
    if (value === "json_object") body.response_format = { type: value };
  },
  schema: (body, schema) => {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  },
  regex: (body, regex) => (body.structured_outputs = { regex }),
  choice: (body, choice) => (body.structured_outputs = { choice }),
  grammar: (body, grammar) => (body.structured_outputs = { grammar }),
  logprobs: (body, _, mode) => {
    const count = settingForRequest("top_logprobs") ?? 0;
    Object.assign(body, mode === "chat" ? { logprobs: true, top_logprobs: count } : { logprobs: count });
  },
  top_logprobs: () => {},
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
  const row = copyTemplate(`setting-row-${kind}`);
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

/** Return the present settings as plain values. */
function saveSettings() {
  return Object.fromEntries(SETTINGS.map(({ field }) => [field, settingValue(field)]));
}

/** Return saved settings without those that change only the page. */
function withoutDisplay(saved) {
  return Object.fromEntries(SETTINGS.filter((each) => !each.isDisplay).map(({ field }) => [field, saved[field]]));
}

/** Set settings to saved values; unknown ones, as of another version of the page, are left out. */
function restoreSettings(saved) {
  for (const [field, value] of Object.entries(saved ?? {})) {
    const input = settingInputs.get(field);
    if (!input || value === undefined) continue;
    if (input.type === "checkbox") input.checked = value;
    else input.value = value;
  }
}
