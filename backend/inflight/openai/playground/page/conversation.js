// The open conversation: the chat's messages and the completions, which are added, edited, generated again and kept.

const MODES = {
  chat: { path: "v1/chat/completions", log: "chat-log", placeholder: "Say something" },
  completion: { path: "v1/completions", log: "completion-log", placeholder: "Begin a text; the model goes on with it" },
};

/** The user's messages and the assistant's turns, in order; and the turns that continue a prompt. */
const chat = [];
const completions = [];

let mode = "chat";
let running = null; // the AbortController of the running request
let chatProblem = ""; // why the model answers no chats

class UserMessage {
  constructor(text, pictures = []) {
    this.text = text;
    this.pictures = pictures;
    this.element = copyTemplate("user-message");
    this.body = this.element.querySelector(".text");
    this.body.textContent = text;
    this.body.hidden = !text;
    showPictures(this.element.querySelector(".pictures"), pictures);
    this.element.querySelector("[data-action=edit]").addEventListener("click", () => this.#edit());
    this.element.querySelector("[data-action=copy]").addEventListener("click", () => copyText(this.text, this.element));
  }

  /** Edit the message, remove later messages, and generate its answer again. */
  #edit() {
    if (running || this.element.querySelector("form")) return;
    const form = copyTemplate("edit-form");
    const input = form.querySelector("textarea");
    const close = () => (form.remove(), (this.body.hidden = !this.text));
    input.value = this.text;
    this.body.hidden = true;
    this.body.after(form);
    fitHeight(input);
    input.focus();
    input.addEventListener("input", () => fitHeight(input));
    input.addEventListener("keydown", (event) => {
      if (isSendKey(event)) form.requestSubmit();
      if (event.key === "Escape") close();
      if (isSendKey(event) || event.key === "Escape") event.preventDefault();
    });
    form.querySelector("[data-action=cancel]").addEventListener("click", close);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!(input.value.trim() || this.pictures.length) || running) return;
      this.text = this.body.textContent = input.value;
      close();
      dropAfter(chat, this);
      answerChat();
    });
  }
}

/** Remove everything after an entry of the chat. */
function dropAfter(entries, entry) {
  for (const gone of entries.splice(entries.indexOf(entry) + 1)) gone.element.remove();
}

function append(entries, entry) {
  entries.push(entry);
  logElement().append(entry.element);
  followEnd();
  return entry;
}

function logElement() {
  return byId(MODES[mode].log);
}

/**
 * The messages of a request: the system prompt and everything up to the last message of the user.
 *
 * If the answer to a message has no text, because it failed or was stopped, and another message follows, the first one is
 * left out: many chat templates require that user and assistant alternate.
 */
function messagesForRequest(draft = "") {
  const messages = chatMessages();
  if (draft || draftPictures.length) messages.push({ role: "user", content: contentOf(draft, draftPictures) });
  else while (messages.at(-1)?.role === "assistant") messages.pop();
  const answered = messages.filter(({ role }, index) => role !== "user" || messages[index + 1]?.role !== "user");
  return [...systemMessages(), ...answered];
}

/** Return the messages of the user and of the chosen answers, with calls of tools and their results. */
function chatMessages() {
  return chat.flatMap((entry) => (entry instanceof UserMessage ? [{ role: "user", content: contentOf(entry.text, entry.pictures) }] : entry.messages));
}

function systemMessages() {
  const content = byId("system").value;
  return content.trim() ? [{ role: "system", content }] : [];
}

function setSystem(text) {
  byId("system").value = text;
  byId("system").closest("details").open = Boolean(text);
}

/** Return the request that the page sends next, without the fields that only a stream needs. */
function requestBody(promptOrMessages) {
  const text = mode === "chat" ? { messages: promptOrMessages } : { prompt: promptOrMessages };
  const model = byId("model").value; // empty until the list is loaded; a request without a model uses the model without adapter
  return { ...(model && { model }), ...text, ...settingsForRequest(mode) };
}

async function send(text) {
  if (running) return;
  if (mode === "chat") {
    append(chat, new UserMessage(text, takeDraftPictures()));
    byId("input").value = "";
    await answerChat();
  } else {
    await runTurn(append(completions, newTurn(completions, text)), text);
  }
}

async function answerChat() {
  await runTurn(append(chat, newTurn(chat)), messagesForRequest());
}

function newTurn(entries, prompt = null) {
  const turn = new Turn(prompt, () => {
    dropAfter(chat, turn);
    answerChat();
  });
  const goOn = turn.element.querySelector("[data-action=go-on]");
  goOn.hidden = prompt === null;
  goOn.addEventListener("click", () => goOnFrom(turn));
  turn.element.querySelector("[data-action=again]").addEventListener("click", () => {
    if (running) return;
    if (prompt === null) {
      dropAfter(chat, chat[chat.indexOf(turn) - 1]);
      answerChat();
    } else {
      runTurn(turn, prompt);
    }
  });
  return turn;
}

/** Put a prompt and its chosen answer into the input, to continue them. */
function goOnFrom(turn) {
  const input = byId("input");
  const isEcho = turn.text.startsWith(turn.prompt) && settingValue("echo");
  input.value = isEcho ? turn.text : turn.prompt + turn.text;
  fitHeight(input);
  input.focus();
}

/** Generate the answers of a turn. Only one turn can run at a time. */
async function runTurn(turn, promptOrMessages) {
  let body;
  try {
    body = requestBody(promptOrMessages);
  } catch (error) {
    turn.fail(error);
    return;
  }
  running = new AbortController();
  showRunning();
  await turn.run(MODES[mode].path, body, running.signal);
  running = null;
  showRunning();
  byId("spoken").textContent = turn.answers.map((answer) => answer.element.querySelector(".figures").textContent).join("; ");
  contextMeter.update();
  saveLater();
}

function stop() {
  running?.abort();
}

/** Return everything that is needed to restore the page, as plain values. */
function saveConversation() {
  const plain = (entry) =>
    entry instanceof UserMessage
      ? { text: entry.text, ...(entry.pictures.length && { pictures: entry.pictures }) }
      : { answers: entry.answers.map((answer) => answer.plain), chosen: entry.chosen, prompt: entry.prompt };
  return { chat: chat.map(plain), completions: completions.map(plain), mode };
}

function restoreConversation(saved) {
  for (const [name, entries] of [["chat", chat], ["completion", completions]]) {
    mode = name;
    for (const { text, pictures, answers, chosen, prompt } of saved[name === "chat" ? "chat" : "completions"]) {
      if (text !== undefined) append(entries, new UserMessage(text, pictures));
      else append(entries, newTurn(entries, prompt)).restore(answers, chosen);
    }
  }
  mode = saved.mode;
}

function clearConversation() {
  stop();
  for (const entries of [chat, completions]) dropAfter(entries, null);
}
