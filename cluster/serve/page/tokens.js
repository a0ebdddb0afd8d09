// The output: one element per token, coloured by origin; the draft of a step on hover and focus.

import { byId, count, element, setText } from "./dom.js";
import { TARGET, depthsOf } from "./record.js";

const MAX_ORIGINS = 6; // colours; further drafters share the last

/** `suffix`: of the ids of its elements; `colours`: of origins, which views share. */
export class TokenView {
  constructor(suffix = "", colours = new Map([[TARGET, 0]])) {
    this.output = byId(`output${suffix}`);
    this.details = byId(`details${suffix}`);
    this.legend = byId(`legend${suffix}`);
    this.title = byId(`output-title${suffix}`);
    this.colours = colours;
    this.record = null;
    this.thoughts = null; // where reasoning goes, once there is any
    this.isOpen = true;
    this.numShown = 0;
    this.output.addEventListener("pointerover", (event) => this.#show(event.target));
    this.output.addEventListener("pointerleave", () => this.#hideUnlessFocused());
    this.output.addEventListener("focusin", (event) => this.#show(event.target));
    this.output.addEventListener("focusout", () => this.#hide());
    this.output.addEventListener("click", (event) => event.target.closest?.(".token")?.focus());
    this.output.addEventListener("keydown", (event) => this.#move(event));
  }

  start(record) {
    this.record = record;
    this.thoughts = null;
    this.numShown = 0;
    setText(this.title, record.title);
    this.output.replaceChildren();
    this.output.setAttribute("aria-busy", "true");
    this.#hide();
    this.#showLegend();
  }

  add(steps) {
    const atEnd = this.output.scrollHeight - this.output.scrollTop - this.output.clientHeight < 40;
    const tokens = steps.flatMap((step) => step.tokens.map((token, index) => [step, token, index]));
    if (this.record.numThoughts && !this.thoughts) this.#think();
    for (const each of tokens) {
      const isThought = this.numShown < this.record.numThoughts;
      (isThought ? this.thoughts.lastElementChild : this.output).append(this.#token(...each));
      this.numShown += 1;
    }
    if (this.thoughts) this.#showThinking();
    if (steps.length) this.#showLegend();
    if (atEnd) this.output.scrollTop = this.output.scrollHeight;
  }

  finish() {
    setText(this.title, `${this.record.title}: ${this.record.summary}`);
    // An unfinished character at the end, or what has no trace, belongs to no token.
    const rest = this.record.text.startsWith(this.record.shown)
      ? this.record.text.slice(this.record.shown.length)
      : "";
    if (rest) this.output.append(element("span", { class: "muted" }, rest));
    this.output.removeAttribute("aria-busy");
  }

  /** A part of the output that can be folded; what has come before it were marks. */
  #think() {
    const marks = [...this.output.childNodes];
    const text = element("div", { class: "thoughts" }, ...marks);
    this.thoughts = element("details", { class: "thinking" }, element("summary"), text);
    this.thoughts.open = this.isOpen;
    this.thoughts.addEventListener("toggle", () => {
      this.isOpen = this.thoughts?.open ?? this.isOpen;
      const tokens = this.#visible();
      for (const each of this.output.querySelectorAll(".token")) each.tabIndex = -1;
      if (tokens.length) tokens[0].tabIndex = 0;
    });
    this.output.prepend(this.thoughts);
  }

  #showThinking() {
    const name = this.record.isThinking ? "Thinking" : "Reasoning";
    const shown = `${name}: ${count(this.record.numThoughts, "token")}`;
    setText(this.thoughts.firstElementChild, shown);
  }

  /** Tokens that are not folded away. */
  #visible() {
    return [...this.output.querySelectorAll(".token")].filter((each) => each.checkVisibility());
  }

  colour(origin) {
    if (!this.colours.has(origin)) {
      this.colours.set(origin, Math.min(this.colours.size, MAX_ORIGINS - 1));
    }
    return this.colours.get(origin);
  }

  #token(step, token, index) {
    const isFirst = !this.output.querySelector(".token");
    const span = element("span", {
      class: `token origin-${this.colour(token.origin)}`,
      tabindex: isFirst ? 0 : -1,
      "data-step": step.step,
      "aria-describedby": this.details.id,
    });
    span.textContent = token.text;
    if (token.text === "") span.classList.add("empty");
    if (token.text.startsWith("\n")) span.classList.add("newline");
    if (index === 0) span.classList.add("first");
    return span;
  }

  #showLegend() {
    const counts = [...(this.record?.origins ?? [])];
    counts.sort(([left], [right]) => (left === TARGET ? -1 : right === TARGET ? 1 : 0));
    const items = counts.map(([origin, count]) =>
      element(
        "li",
        {},
        element("span", { class: `swatch origin-${this.colour(origin)}`, "aria-hidden": "true" }),
        `${origin} ${count}`,
      ),
    );
    if (this.record?.numRejected) {
      const swatch = element("span", { class: "swatch rejected", "aria-hidden": "true" });
      items.push(element("li", {}, swatch, `rejected ${this.record.numRejected}`));
    }
    this.legend.replaceChildren(...items);
  }

  #show(target) {
    const token = target.closest?.(".token");
    if (!token || !this.record) return;
    const step = this.record.steps.find((each) => String(each.step) === token.dataset.step);
    if (!step) return;
    for (const each of this.output.querySelectorAll(".token.same")) each.classList.remove("same");
    for (const each of this.output.querySelectorAll(`[data-step="${step.step}"]`)) {
      each.classList.add("same");
    }
    this.details.replaceChildren(...this.#describe(step));
    this.details.hidden = false;
    this.#place(token);
  }

  #place(token) {
    const card = this.details.offsetParent.getBoundingClientRect();
    const box = token.getClientRects()[0] ?? token.getBoundingClientRect();
    const left = Math.min(box.left - card.left, card.width - this.details.offsetWidth - 8);
    const below = box.bottom - card.top + 6;
    const above = box.top - card.top - this.details.offsetHeight - 6;
    const fits = box.bottom + this.details.offsetHeight + 12 < window.innerHeight || above < 0;
    this.details.style.setProperty("left", `${Math.max(8, left)}px`);
    this.details.style.setProperty("top", `${fits ? below : above}px`);
  }

  #describe(step) {
    const accepted = step.tokens.filter((token) => token.origin !== TARGET).length;
    const head = element("strong", {}, `Step ${step.step}: ${count(step.tokens.length, "token")}`);
    if (!step.draft.length) return [head, element("p", {}, "No draft: the target's own token.")];
    const depths = depthsOf(step.draft);
    const isTree = step.draft.some((guess, node) => guess.parent !== node - 1);
    const items = step.draft.map((guess, node) => {
      const mark = guess.accepted ? "accepted" : "rejected";
      const item = element(
        "li",
        { class: `${mark} depth-${isTree ? Math.min(depths[node], 7) : 0}` },
        element("span", { class: "mark", "aria-hidden": "true" }, guess.accepted ? "✓" : "✗"),
        element("code", {}, visible(guess.text)),
        element("span", { class: "muted" }, ` ${guess.origin}`),
        element("span", { class: "visually-hidden" }, ` ${mark}`),
      );
      return item;
    });
    const summary = element("p", {}, `${accepted} of ${count(step.draft.length, "draft token")} accepted`);
    const last = step.tokens.at(-1);
    const own =
      last?.origin === TARGET
        ? element("p", {}, "then the target's own ", element("code", {}, visible(last.text)))
        : null;
    return [head, summary, element("ol", {}, ...items), ...(own ? [own] : [])];
  }

  #hide() {
    this.details.hidden = true;
    for (const each of this.output.querySelectorAll(".token.same")) each.classList.remove("same");
  }

  #hideUnlessFocused() {
    const focused = document.activeElement;
    if (focused && this.output.contains(focused) && focused !== this.output) this.#show(focused);
    else this.#hide();
  }

  #move(event) {
    const tokens = this.#visible();
    const at = tokens.indexOf(event.target);
    if (at < 0) return;
    const step = Number(event.target.dataset.step);
    const moves = {
      ArrowRight: at + 1,
      ArrowLeft: at - 1,
      ArrowDown: tokens.findIndex((each) => Number(each.dataset.step) > step),
      ArrowUp: tokens.findIndex((each) => Number(each.dataset.step) === step - 1),
      Home: 0,
      End: tokens.length - 1,
    };
    const next = tokens[moves[event.key] ?? -1];
    if (event.key === "Escape") this.#hide();
    if (!next) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
    setText(byId("announcer"), "");
  }
}

/** White space as signs, since a guess of blanks would be invisible. */
export function visible(text) {
  if (text === "") return "(none)";
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣");
}
