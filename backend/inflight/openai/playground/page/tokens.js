// Text whose tokens are shaded by their probability, and a tooltip with other likely tokens.

/** Log prob (1 %) below which a token has the darkest shade. */
const DARKEST_LOG_PROB = Math.log(0.01);

/** The tokens of a shaded piece of text: several if each has only a part of a character. */
const tokensOfPiece = new WeakMap();

/** Return the tokens of an event, for both routes in the same form: {text, logProb, others: [{text, logProb}]}. */
function readTokens(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) return logprobs.content.map(readChatToken);
  return (logprobs.tokens ?? []).map((text, i) => ({
    text,
    logProb: logprobs.token_logprobs[i],
    others: Object.entries(logprobs.top_logprobs?.[i] ?? {}).map(([other, logProb]) => ({ text: other, logProb })),
  }));
}

function readChatToken({ token, logprob, top_logprobs: others = [] }) {
  return { text: token, logProb: logprob, others: others.map((o) => ({ text: o.token, logProb: o.logprob })) };
}

/**
 * The text of an element while it streams, divided into pieces that each show one token.
 *
 * Tokens and text may arrive at different times, and a token may have no text: it may be a part of a character, or
 * an end id. Text is shown at once, and divided into pieces when its tokens have arrived.
 */
class TokenText {
  constructor(element) {
    this.element = element;
    this.text = "";
    this.unmatched = "";
    this.tokens = [];
    this.tail = element.appendChild(new Text());
  }

  add(text, tokens) {
    this.text += text;
    this.unmatched += text;
    this.tokens.push(...tokens);
    while (this.unmatched && this.tokens.length && this.#match());
    this.tail.data = this.unmatched;
  }

  /** End the text: unmatched text becomes one piece. */
  finish() {
    if (this.unmatched && this.tokens.length) this.#addPiece(this.unmatched.length, this.tokens.length);
    this.tail.data = this.unmatched;
  }

  /** Make a piece of the first token; returns whether its text has arrived. */
  #match() {
    const { text } = this.tokens[0];
    if (text && this.unmatched.startsWith(text)) {
      this.#addPiece(text.length, 1);
      return true;
    }
    if (text.startsWith(this.unmatched)) return false; // the rest of it has not arrived yet
    for (let count = 1; count < this.tokens.length; count++) {
      const next = this.tokens[count].text;
      const length = next ? this.unmatched.indexOf(next) : -1;
      if (length >= 0) {
        this.#addPiece(length, count);
        return true;
      }
    }
    return false;
  }

  #addPiece(length, count) {
    const tokens = this.tokens.splice(0, count);
    const text = this.unmatched.slice(0, length);
    this.unmatched = this.unmatched.slice(length);
    if (!text) return; // tokens without text, such as an end id
    const piece = document.createElement("span");
    piece.className = "token";
    piece.textContent = text;
    const logProb = tokens.reduce((sum, token) => sum + (token.logProb ?? 0), 0);
    piece.style.setProperty("--surprise", Math.min(1, logProb / DARKEST_LOG_PROB).toFixed(3));
    tokensOfPiece.set(piece, tokens);
    this.tail.before(piece);
  }
}

/** Return spaces and line breaks as visible signs. */
function visible(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
}

function percent(logProb) {
  const share = 100 * Math.exp(logProb);
  if (share > 0 && share < 0.1) return "< 0.1 %";
  return `${share.toFixed(share > 99.9 || share < 10 ? 1 : 0)} %`;
}

class TokenTooltip {
  constructor(element, log) {
    this.element = element;
    this.piece = null;
    log.addEventListener("pointerover", (event) => this.show(event.target.closest(".token")));
    log.addEventListener("pointerleave", () => this.show(null));
    log.addEventListener("focusout", () => this.show(null));
    log.addEventListener("keydown", (event) => this.#move(event));
    document.addEventListener("scroll", () => this.show(null), { capture: true, passive: true });
  }

  /** Show a piece's tokens in the tooltip; null hides it. */
  show(piece) {
    if (piece && document.body.classList.contains("no-shades")) piece = null;
    if (piece === this.piece) return;
    this.piece?.classList.remove("current");
    this.piece = piece;
    this.element.hidden = !piece;
    if (!piece) return;
    piece.classList.add("current");
    this.element.replaceChildren(...tokensOfPiece.get(piece).map(describeToken));
    this.#place(piece.getClientRects()[0]);
  }

  #place(anchor) {
    const { width, height } = this.element.getBoundingClientRect();
    const left = Math.max(8, Math.min(anchor.left, innerWidth - width - 8));
    const below = anchor.bottom + 6;
    const top = below + height > innerHeight - 8 ? anchor.top - height - 6 : below;
    this.element.style.left = `${left}px`;
    this.element.style.top = `${Math.max(8, top)}px`;
  }

  /** Move between the tokens of the focused text with the left and right keys. */
  #move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const text = event.target.closest?.(".text");
    if (!step || !text) return;
    const pieces = [...text.querySelectorAll(".token")];
    const now = pieces.indexOf(this.piece);
    const next = pieces[now < 0 ? 0 : now + step];
    if (!next) return;
    event.preventDefault();
    next.scrollIntoView({ block: "nearest" });
    this.show(next);
  }
}

/** Return a list with bars: a token with its probability, and the other likely tokens at its position. */
function describeToken(token) {
  const block = copyTemplate("token-description");
  block.querySelector(".token-text").textContent = visible(token.text);
  const share = block.querySelector(".token-share");
  share.textContent = token.logProb == null ? "begins the prompt" : percent(token.logProb);
  const others = token.others.filter((other) => other.logProb != null);
  if (others.length && !others.some((other) => other.text === token.text)) others.push(token);
  others.sort((one, other) => other.logProb - one.logProb);
  for (const other of others) {
    const row = copyTemplate("token-alternative");
    row.classList.toggle("chosen", other.text === token.text);
    row.querySelector(".token-text").textContent = visible(other.text);
    row.querySelector("meter").value = Math.exp(other.logProb);
    row.querySelector(".token-share").textContent = percent(other.logProb);
    block.querySelector("ul").append(row);
  }
  return block;
}
