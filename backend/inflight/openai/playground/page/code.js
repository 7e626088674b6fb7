// The page's next request as a command and as a program.

const serverAddress = () => new URL(".", location.href).href.replace(/\/$/, "");

function asCurl(path, body) {
  const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
  const lines = [`curl ${quoted(`${serverAddress()}/${path}`)}`, `-H 'Content-Type: application/json'`];
  if (apiKey) lines.push(`-H "Authorization: Bearer $OPENAI_API_KEY"`);
  return [...lines, `-d ${quoted(JSON.stringify(body, null, 2))}`].join(" \\\n  ");
}

function asPython(path, body) {
  const isChat = path.endsWith("chat/completions");
  const fields = Object.entries(body);
  const isExtra = (name) => name === "structured_outputs" || EXTRA_FIELDS.includes(name);
  const own = fields.filter(([name]) => !isExtra(name));
  const extra = fields.filter(([name]) => isExtra(name));
  if (extra.length) own.push(["extra_body", Object.fromEntries(extra)]);
  const key = apiKey ? `os.environ["OPENAI_API_KEY"]` : `"none"`;
  return [
    ...(apiKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(`${serverAddress()}/v1`)}, api_key=${key})`,
    `answer = client.${isChat ? "chat.completions" : "completions"}.create(`,
    ...own.map(([name, value]) => `    ${name}=${asPythonValue(value, "    ")},`),
    ")",
    "for choice in answer.choices:",
    `    print(choice.${isChat ? "message.content" : "text"})`,
  ].join("\n");
}

/** Format a JSON value as Python; `indent` begins each of its lines. */
function asPythonValue(value, indent) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = `${indent}    `;
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const items = Array.isArray(value)
    ? value.map((each) => asPythonValue(each, inner))
    : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${asPythonValue(each, inner)}`);
  const line = open + items.join(", ") + close;
  if (line.length < 80 && !line.includes("\n")) return line;
  return `${open}\n${items.map((item) => `${inner}${item},\n`).join("")}${indent}${close}`;
}

/** Open the dialog with command and program, for the text in the input or the last request. */
function showCode() {
  const dialog = byId("code");
  const draft = byId("input").value;
  const { path } = MODES[mode];
  try {
    const body = requestBody(mode === "chat" ? messagesForRequest(draft) : draft || (completions.at(-1)?.prompt ?? ""));
    dialog.querySelector("#curl").textContent = asCurl(path, body);
    dialog.querySelector("#python").textContent = asPython(path, body);
  } catch (error) {
    dialog.querySelector("#curl").textContent = dialog.querySelector("#python").textContent = error.message;
  }
  dialog.showModal();
}

/** Copy to the clipboard, also on pages without TLS, where browsers restrict it; report the result in `place`. */
async function copyText(text, place) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const helper = document.createElement("textarea");
    helper.value = text;
    place.append(helper);
    helper.select();
    document.execCommand("copy");
    helper.remove();
  }
  announce("Copied");
}
