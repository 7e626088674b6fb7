// Answers, shown while they stream: their texts and figures, several answers side by side.

const WORDS_FOR_ENDS = {
  stop: "complete",
  length: "cut at the longest length",
  tool_calls: "calls a tool",
};

/** The largest n that the server accepts. */
const MAX_ANSWERS = 1024;

/** Milliseconds below which a rate of tokens is not meaningful. */
const SHORTEST_MS = 50;

/** One answer of a turn. Answers of a chat may have calls of tools, whose results `onResults` sends, and Markdown. */
class Answer {
  constructor(number, count, { isChat = false, onResults = () => {} } = {}) {
    this.element = copyTemplate("answer");
    this.markdown = isChat ? new MarkdownText(this.element.querySelector(".markdown")) : null;
    this.calls = new ToolCalls(this.element.querySelector(".calls"), onResults);
    this.content = new TokenText(this.element.querySelector(".flow .text"));
    this.reasoning = new TokenText(this.element.querySelector(".reasoning-text"));
    this.numTokens = 0;
    this.numLogProbs = 0;
    this.numAtFirst = 0; // number of tokens of the first event, which are not part of the rate
    this.end = "";
    this.firstAt = this.lastAt = 0;
    this.longestGap = 0;
    this.element.setAttribute("aria-label", count > 1 ? `Answer ${number} of ${count}` : "Answer");
    this.#button("copy", () => copyText(this.content.text, this.element));
  }

  /** Add a choice of an event that arrived at the time `now`, in milliseconds. */
  add(choice, now) {
    const tokens = readTokens(choice.logprobs);
    const reasoning = choice.delta?.reasoning_content ?? choice.delta?.reasoning ?? "";
    const text = choice.text ?? choice.delta?.content ?? "";
    const calls = choice.delta?.tool_calls ?? [];
    if (reasoning) {
      this.element.querySelector(".reasoning").hidden = false;
      this.reasoning.add(reasoning, tokens);
    }
    this.content.add(text, reasoning || calls.length ? [] : tokens);
    this.calls.add(calls);
    if (text) this.markdown?.show(this.content.text);
    this.numTokens += choice.token_ids?.length ?? 0;
    this.numLogProbs += tokens.length;
    if (choice.finish_reason) this.end = choice.finish_reason;
    if (!(text || reasoning || calls.length || tokens.length || choice.token_ids?.length)) return;
    if (!this.firstAt) this.numAtFirst = this.numTokens || this.numLogProbs || 1;
    if (this.firstAt) this.longestGap = Math.max(this.longestGap, now - this.lastAt);
    this.firstAt ||= now;
    this.lastAt = now;
  }

  /** Show the figures in a line. `startedAt`: when the request was sent; `usage`: the turn's token counts, once known. */
  showFigures(startedAt, usage) {
    const count = this.numTokens || this.numLogProbs || usage?.completion_tokens || 0;
    const parts = [];
    if (count) parts.push(`${count} ${count === 1 ? "token" : "tokens"}`);
    const gap = this.lastAt - this.firstAt;
    const numLater = count - this.numAtFirst;
    if (gap >= SHORTEST_MS) parts.push(`${rounded((1000 * numLater) / gap)} tokens/s`);
    if (this.firstAt) parts.push(`first after ${rounded((this.firstAt - startedAt) / 1000)} s`);
    if (gap >= SHORTEST_MS && numLater > 0) {
      parts.push(`then ${rounded(gap / numLater)} ms a token, ${rounded(this.longestGap)} at most`);
    }
    if (usage?.prompt_tokens) parts.push(`prompt of ${usage.prompt_tokens}`);
    if (this.end) parts.push(WORDS_FOR_ENDS[this.end] ?? this.end);
    this.element.querySelector(".figures").textContent = parts.join(" · ");
  }

  /** Return what is kept of the answer, as plain values. */
  get plain() {
    const figures = this.element.querySelector(".figures").textContent;
    const calls = this.calls.list.map((call) => call.plain);
    return { text: this.content.text, reasoning: this.reasoning.text, figures, calls, areSent: this.calls.areSent };
  }

  restore({ text, reasoning, figures, calls, areSent }) {
    this.reasoning.add(reasoning, []);
    this.element.querySelector(".reasoning").hidden = !reasoning;
    this.content.add(text, []);
    this.element.querySelector(".figures").textContent = figures;
    this.calls.restore(calls, areSent);
    this.finish();
  }

  finish() {
    this.reasoning.finish();
    this.content.finish();
    this.markdown?.finish(this.content.text);
    this.element.classList.remove("running");
  }

  #button(name, onClick) {
    this.element.querySelector(`[data-action=${name}]`).addEventListener("click", onClick);
  }
}

/** Format a number with three digits, without unneeded decimals. */
function rounded(number) {
  return number >= 100 || number === 0 ? number.toFixed(0) : number.toPrecision(number >= 1 ? 3 : 2);
}

/**
 * The answers to one prompt, one of which is chosen to continue.
 *
 * prompt: the text that a completion continues, shown before each answer; null in a chat. onResults: called when the
 * user sends the results of the chosen answer's calls.
 */
class Turn {
  constructor(prompt = null, onResults = () => {}) {
    this.prompt = prompt;
    this.onResults = onResults;
    this.element = copyTemplate("turn");
    this.grid = this.element.querySelector(".answers");
    this.answers = [];
    this.chosen = 0;
  }

  get text() {
    return this.answers[this.chosen]?.content.text ?? "";
  }

  /** Return the messages that this turn of a chat is in later requests. */
  get messages() {
    const calls = this.answers[this.chosen]?.calls.messages(this.text) ?? [];
    return calls.length || !this.text ? calls : [{ role: "assistant", content: this.text }];
  }

  /** Send the request and show its answers until they end or `signal` aborts it. Errors are shown, not raised. */
  async run(path, body, signal) {
    this.#begin(body);
    const startedAt = performance.now();
    let usage = null;
    try {
      for await (const event of streamFromServer(path, body, signal)) {
        const now = performance.now();
        for (const choice of event.choices) this.answers[choice.index].add(choice, now);
        if (event.usage) usage = this.answers.length === 1 ? event.usage : { prompt_tokens: event.usage.prompt_tokens };
        this.answers.forEach((answer) => answer.showFigures(startedAt, usage));
        followEnd();
      }
    } catch (error) {
      if (error.name === "AbortError") this.answers.forEach((answer) => (answer.end ||= "stopped"));
      else this.fail(error);
    }
    for (const answer of this.answers) {
      answer.finish();
      if (answer.firstAt || answer.end) answer.showFigures(startedAt, usage);
    }
    this.element.removeAttribute("aria-busy");
  }

  /** Restore kept answers. A request that was not sent has none. */
  restore(answers, chosen) {
    if (!answers.length) return;
    this.#begin({ n: answers.length });
    this.answers.forEach((answer, i) => answer.restore(answers[i]));
    this.choose(chosen);
    this.element.removeAttribute("aria-busy");
  }

  /** Show why an answer is missing or incomplete. */
  fail(error) {
    this.#forgetErrors();
    const box = copyTemplate("error");
    box.querySelector(".heading").textContent = error.heading ?? error.name;
    box.querySelector(".message").textContent = error.message;
    this.grid.after(box);
    for (const answer of this.answers) answer.element.hidden = !answer.content.text && !answer.reasoning.text && !answer.calls.list.length;
    this.grid.hidden = this.answers.every((answer) => answer.element.hidden);
    if (error.status === 401) askForKey();
    followEnd();
  }

  choose(index) {
    this.chosen = index;
    this.answers.forEach((answer, i) => {
      answer.element.classList.toggle("chosen", i === index && this.answers.length > 1);
      answer.element.querySelector("[data-action=choose]").setAttribute("aria-pressed", String(i === index));
    });
  }

  #forgetErrors() {
    this.element.querySelectorAll(".error").forEach((box) => box.remove());
  }

  #begin(body) {
    const count = Math.min(Math.max(1, Math.trunc(body.n ?? 1)), MAX_ANSWERS);
    this.answers = Array.from({ length: count }, (_, i) => {
      const onResults = () => (this.choose(i), this.onResults());
      return new Answer(i + 1, count, { isChat: this.prompt === null, onResults });
    });
    this.#forgetErrors();
    this.element.setAttribute("aria-busy", "true");
    this.grid.hidden = false;
    this.grid.classList.toggle("several", count > 1);
    this.answers.forEach((answer, i) => {
      const choose = answer.element.querySelector("[data-action=choose]");
      choose.hidden = count === 1;
      choose.addEventListener("click", () => (this.choose(i), saveLater()));
      if (this.prompt !== null && !body.echo) answer.element.querySelector(".prompt").textContent = this.prompt;
    });
    this.grid.replaceChildren(...this.answers.map((answer) => answer.element));
    this.choose(0);
  }
}
