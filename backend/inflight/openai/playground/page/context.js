// The number of tokens of the next prompt, and how much of the model's context they take.

const COUNT_AFTER_MS = 300;

class ContextMeter {
  constructor(element) {
    this.element = element;
    this.timer = null;
    this.counting = null; // the AbortController of the request that counts
  }

  /** Count the tokens soon; called after each change of the prompt. */
  update() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.#count(), COUNT_AFTER_MS);
  }

  async #count() {
    this.counting?.abort();
    if (mode === "chat" && (draftPictures.length || havePictures(chatMessages()))) {
      this.element.hidden = true; // the server counts texts alone
      return;
    }
    const body = this.#body();
    if (!body) return this.#show(0, longestOfModel());
    this.counting = new AbortController();
    try {
      const response = await fetchFromServer("tokenize", { body, signal: this.counting.signal });
      const { count, max_model_len: longest } = await response.json();
      this.#show(count, longest);
    } catch (error) {
      if (error.name !== "AbortError") this.element.hidden = true; // the request itself will show the error
    }
  }

  /** Return the request; null for an empty prompt. */
  #body() {
    const draft = byId("input").value;
    if (mode === "completion") return draft ? { prompt: draft } : null;
    const messages = [...systemMessages(), ...chatMessages()];
    if (draft.trim()) messages.push({ role: "user", content: draft });
    if (!messages.length || chatProblem) return null;
    return { messages, add_generation_prompt: messages.at(-1).role !== "assistant", ...toolsToCount() };
  }

  #show(count, longest) {
    this.element.hidden = !longest;
    this.element.querySelector("meter").value = longest ? count / longest : 0;
    this.element.querySelector("b").textContent = count.toLocaleString("en");
    this.element.querySelector("[data-figure=longest]").textContent = (longest ?? 0).toLocaleString("en");
    this.element.classList.toggle("full", count >= longest);
  }
}

/** Return the tools of a chat, which are part of its prompt; nothing if they cannot be read. */
function toolsToCount() {
  try {
    const tools = settingForRequest("tools");
    return tools ? { tools } : {};
  } catch {
    return {};
  }
}

/** Return the longest sequence of the chosen model, as its list says. */
function longestOfModel() {
  return Number(byId("model").selectedOptions[0]?.dataset.longest ?? 0);
}
