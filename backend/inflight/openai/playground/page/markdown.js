// Markdown as elements. `vendor/marked.js` divides a text into tokens; this makes an element of each, and never HTML
// of a text: what is HTML in an answer is shown as it is written.

const LINK_PROTOCOLS = ["http:", "https:", "mailto:"];

/** HTML entities that models write, as characters. */
const ENTITIES = { __proto__: null, amp: "&", lt: "<", gt: ">", quot: '"', "#39": "'", nbsp: "\u00a0" };

/** Elements of tokens that need nothing but their content. */
const MARKDOWN_ELEMENTS = { paragraph: "p", blockquote: "blockquote", strong: "strong", em: "em", del: "del" };

const INDENTED_LINE = /^(?: {4}|\t)(?!\s*(?:[-*+]|\d+[.)])\s)/;

/** Return whether a text is code without a fence: at least half of its lines are indented, as code of a base model is. */
function isBareCode(text) {
  if (/^\s*(?:```|~~~)/m.test(text)) return false;
  const lines = text.split("\n").filter((line) => line.trim());
  return lines.length > 0 && 2 * lines.filter((line) => INDENTED_LINE.test(line)).length >= lines.length;
}

/** Return the blocks of a text; one block of plain text if it cannot be read, as it may be nested too deeply. */
function readMarkdown(text) {
  if (isBareCode(text)) return [{ type: "code", raw: text, text: text.replace(/^\n+/, "").trimEnd(), lang: "" }];
  try {
    return [...marked.lexer(text, { gfm: true, breaks: true })];
  } catch {
    return [{ type: "plain", raw: text }];
  }
}

/** A text in Markdown, shown while it streams: only blocks that have changed are made again. */
class MarkdownText {
  constructor(element) {
    this.element = element;
    this.text = "";
    this.shown = []; // the source of each block on the page
    this.timer = null;
    this.tookMs = 0;
  }

  /** Show a longer text soon. The longer the last one took, the later. */
  show(text) {
    this.text = text;
    this.timer ??= setTimeout(() => this.#draw(), Math.max(16, 4 * this.tookMs));
  }

  /** Show the whole text now. References may be defined at its end, so all blocks are made again. */
  finish(text) {
    this.text = text;
    this.shown = [];
    this.#draw();
  }

  #draw() {
    clearTimeout(this.timer);
    this.timer = null;
    const startedAt = performance.now();
    const blocks = readMarkdown(this.text);
    const isOneNodeEach = this.element.childNodes.length === this.shown.length;
    let same = 0;
    while (isOneNodeEach && same < this.shown.length && this.shown[same] === blocks[same]?.raw) same++;
    const kept = [...this.element.childNodes].slice(0, same);
    this.element.replaceChildren(...kept, ...blocks.slice(same).map(markdownNode));
    this.shown = blocks.map((block) => block.raw);
    this.tookMs = performance.now() - startedAt;
    followEnd();
  }
}

/** Return the element or the text of a token. */
function markdownNode(token) {
  const make = MARKDOWN_NODES[token.type];
  if (make) return make(token);
  const name = MARKDOWN_ELEMENTS[token.type];
  if (name) return elementOf(name, token.tokens);
  const source = elementWithText("span", token.raw); // HTML, and what could not be read
  source.className = "source";
  return source;
}

function elementOf(name, tokens) {
  const element = document.createElement(name);
  element.append(...(tokens ?? []).map(markdownNode));
  return element;
}

function elementWithText(name, text) {
  const element = document.createElement(name);
  element.textContent = text;
  return element;
}

const MARKDOWN_NODES = {
  space: () => new Text(""),
  def: () => new Text(""),
  escape: ({ text }) => new Text(text),
  br: () => document.createElement("br"),
  hr: () => document.createElement("hr"),
  codespan: ({ text }) => elementWithText("code", text),
  heading: ({ depth, tokens }) => elementOf(`h${Math.min(6, depth + 2)}`, tokens), // below the page's own headings
  text: ({ text, tokens }) => {
    if (!tokens) return new Text(text.replace(/&([a-z]+|#39);/g, (entity, name) => ENTITIES[name] ?? entity));
    const nodes = document.createDocumentFragment();
    nodes.append(...tokens.map(markdownNode));
    return nodes;
  },
  checkbox: ({ checked }) => new Text(checked ? "☑ " : "☐ "),
  list: ({ ordered, start, items }) => {
    const list = document.createElement(ordered ? "ol" : "ul");
    if (ordered && start !== 1) list.start = Number(start);
    list.append(...items.map((item) => elementOf("li", item.tokens)));
    return list;
  },
  link: ({ href, tokens }) => linkTo(href, elementOf("span", tokens)),
  image: ({ href, text }) => linkTo(href, new Text(text || href)), // the page loads nothing from other hosts
  table: ({ header, rows }) => {
    const wrapper = elementWithText("div", "");
    const table = wrapper.appendChild(document.createElement("table"));
    const row = (cells, name) => {
      const line = document.createElement("tr");
      line.append(...cells.map((cell) => Object.assign(elementOf(name, cell.tokens), { align: cell.align ?? "" })));
      return line;
    };
    wrapper.className = "table";
    table.append(row(header, "th"), ...rows.map((cells) => row(cells, "td")));
    return wrapper;
  },
  code: ({ text, lang }) => {
    const block = copyTemplate("code-block");
    block.querySelector(".language").textContent = lang?.split(/\s/)[0] ?? "";
    block.querySelector("code").textContent = text;
    block.querySelector("button").addEventListener("click", () => copyText(text, block));
    return block;
  },
};

/** Return a link, or the content alone if the address is not one of the web or of mail. */
function linkTo(href, content) {
  if (!URL.canParse(href) || !LINK_PROTOCOLS.includes(new URL(href).protocol)) return content;
  const link = document.createElement("a");
  Object.assign(link, { href, target: "_blank", rel: "noopener noreferrer", title: href });
  link.append(content);
  return link;
}
