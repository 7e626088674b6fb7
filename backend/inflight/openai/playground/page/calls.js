// Calls of tools in an answer: shown, and answered by hand.

class ToolCall {
  constructor({ id = "", name = "", arguments: text = "", result = "" } = {}) {
    Object.assign(this, { id, name, arguments: text });
    this.element = copyTemplate("call");
    this.field = this.element.querySelector("textarea");
    this.field.value = result;
    this.field.addEventListener("input", () => (fitHeight(this.field), saveLater()));
    this.show();
  }

  get result() {
    return this.field.value;
  }

  /** Add a part of a streamed call. */
  add({ id, function: { name = "", arguments: text = "" } = {} }) {
    this.id ||= id ?? "";
    this.name += name ?? "";
    this.arguments += text ?? "";
    this.show();
  }

  show() {
    this.element.querySelector(".name").textContent = this.name;
    this.element.querySelector(".arguments").textContent = prettyJson(this.arguments);
    this.field.setAttribute("aria-label", `Result of ${this.name}`);
  }

  /** Return the call as an assistant's message has it. */
  get asRequest() {
    return { id: this.id, type: "function", function: { name: this.name, arguments: this.arguments } };
  }

  get plain() {
    return { id: this.id, name: this.name, arguments: this.arguments, result: this.result };
  }
}

/** The calls of one answer, in a form whose button sends their results. */
class ToolCalls {
  constructor(form, onSend) {
    this.form = form;
    this.list = [];
    this.areSent = false;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (running) return;
      this.areSent = true;
      onSend();
    });
  }

  /** Add the parts of one event. */
  add(parts) {
    for (const part of parts) (this.list[part.index ?? 0] ??= this.#append(new ToolCall())).add(part);
  }

  restore(calls, areSent) {
    this.list = calls.map((call) => this.#append(new ToolCall(call)));
    this.areSent = areSent;
  }

  #append(call) {
    this.form.hidden = false;
    this.form.lastElementChild.before(call.element);
    return call;
  }

  /** Return the messages that carry the calls and their results; none before the results were sent. */
  messages(text) {
    if (!this.list.length || !this.areSent) return [];
    const asking = { role: "assistant", ...(text && { content: text }), tool_calls: this.list.map((call) => call.asRequest) };
    return [asking, ...this.list.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result }))];
  }
}

function prettyJson(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // incomplete while it streams
  }
}
