// The engine's activity, requested once a second while the page is visible.

const POLL_MS = 1000;
const NUM_POINTS = 30;

class EngineStrip {
  constructor(element) {
    this.element = element;
    this.rates = [];
    this.timer = null;
    document.addEventListener("visibilitychange", () => this.poll());
  }

  /** Request the activity now, and repeat while the page is visible. */
  async poll() {
    clearTimeout(this.timer);
    if (document.hidden) return;
    try {
      const response = await fetchFromServer("playground/state");
      this.#show(await response.json());
      if (!byId("model").value) showModels(); // the list of models was not available before
    } catch (error) {
      this.#fail(error);
      if (error.status === 401) return; // it is requested again when a key is set
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.poll(), POLL_MS);
  }

  #show(state) {
    this.element.classList.remove("away");
    this.element.classList.toggle("busy", state.running > 0);
    this.element.title = state.problem || `${state.slots} sequences can run at a time`;
    this.#fill("running", state.running ?? "–");
    this.#fill("waiting", state.waiting ?? "–");
    const share = state.kv_blocks ? state.kv_blocks_used / state.kv_blocks : 0;
    this.#fill("kv", `${Math.round(100 * share)} %`);
    this.element.querySelector("meter").value = share;
    this.#fill("rate", state.tokens_per_second == null ? "–" : rounded(state.tokens_per_second));
    this.#fill("problem", state.problem);
    this.rates = [...this.rates, state.tokens_per_second ?? 0].slice(-NUM_POINTS);
    this.#draw();
  }

  #fail(error) {
    this.element.classList.add("away");
    this.element.classList.remove("busy");
    this.element.title = error.message;
    this.#fill("problem", error.status === 401 ? "" : error.message);
    if (error.status === 401) askForKey();
  }

  #fill(name, value) {
    this.element.querySelector(`[data-figure=${name}]`).textContent = value;
  }

  /** Draw the tokens per second of the last half minute as a line. */
  #draw() {
    const highest = Math.max(1, ...this.rates);
    const first = NUM_POINTS - this.rates.length;
    const points = this.rates.map((rate, i) => `${first + i},${19 - (18 * rate) / highest}`);
    this.element.querySelector("polyline").setAttribute("points", points.join(" "));
  }
}
