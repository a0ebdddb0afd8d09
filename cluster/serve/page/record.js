// What is known of one request: its tokens by origin, and counts over its steps.

import { number } from "./dom.js";
import { OFF } from "./form.js";

export const TARGET = "target";

export class RequestRecord {
  constructor(settings) {
    this.settings = settings;
    this.steps = [];
    this.text = "";
    this.reasoning = "";
    this.shown = ""; // text of the tokens in `steps`
    this.numThoughts = 0; // tokens before the content, where the model reasons first
    this.origins = new Map(); // name -> emitted tokens
    this.numRejected = 0;
    this.drafted = []; // by depth: guesses of the first branch's depth, and those accepted
    this.accepted = [];
    this.usage = null;
    this.finishReason = null;
    this.startS = performance.now() / 1e3;
    this.firstS = this.lastS = NaN;
    this.numInFirst = 0; // tokens that came with the first chunk
  }

  /** Takes one chunk of the stream; the steps that it brought. */
  push(event) {
    if (event.usage) this.usage = event.usage;
    const choice = event.choices.find((each) => each.index === 0); // of several, the first
    if (!choice) return [];
    const content = choice.text ?? choice.delta?.content ?? "";
    this.text += content;
    this.reasoning += choice.delta?.reasoning ?? "";
    this.finishReason = choice.finish_reason ?? this.finishReason;
    const steps = choice.speculation_trace ?? [];
    for (const step of steps) this.add(step);
    this.#countThoughts(steps, content);
    return steps;
  }

  /** Marks around reasoning count as such: they are in neither text. */
  #countThoughts(steps, content) {
    if (this.reasoning === "" || this.text !== content) return;
    const tokens = steps.flatMap((step) => step.tokens);
    let left = content.length;
    let numContent = 0;
    while (left > 0 && numContent < tokens.length) {
      numContent += 1;
      left -= tokens.at(-numContent).text.length;
    }
    this.numThoughts = this.numTokens - numContent;
  }

  add(step) {
    this.steps.push(step);
    this.lastS = performance.now() / 1e3;
    if (Number.isNaN(this.firstS)) {
      this.firstS = this.lastS;
      this.numInFirst = step.tokens.length;
    }
    for (const token of step.tokens) {
      this.shown += token.text;
      this.origins.set(token.origin, (this.origins.get(token.origin) ?? 0) + 1);
    }
    const depths = depthsOf(step.draft);
    const seen = new Set();
    step.draft.forEach((guess, node) => {
      const depth = depths[node];
      if (!guess.accepted) this.numRejected += 1;
      if (!seen.has(depth)) {
        seen.add(depth);
        this.drafted[depth] = (this.drafted[depth] ?? 0) + 1;
      }
      if (guess.accepted) this.accepted[depth] = (this.accepted[depth] ?? 0) + 1;
    });
  }

  /** Whether nothing but reasoning has come so far. */
  get isThinking() {
    return this.reasoning !== "" && this.text === "";
  }

  get numTokens() {
    return this.steps.reduce((sum, step) => sum + step.tokens.length, 0);
  }

  get numDraftTokens() {
    return this.steps.reduce((sum, step) => sum + step.draft.length, 0);
  }

  get numAccepted() {
    return this.numTokens - (this.origins.get(TARGET) ?? 0);
  }

  get tokensPerStep() {
    return this.steps.length ? this.numTokens / this.steps.length : NaN;
  }

  /** Tokens per second after the first chunk. */
  get rate() {
    const seconds = this.lastS - this.firstS;
    return seconds > 0 ? (this.numTokens - this.numInFirst) / seconds : NaN;
  }

  get isPlain() {
    return this.settings.drafter === OFF;
  }

  /** What the request was asked to draft with. */
  get title() {
    return this.isPlain ? "Plain decoding" : this.settings.drafter || "Output";
  }

  get summary() {
    const stopped = this.finishReason === "stopped" ? ", stopped" : "";
    const steps = `${number(this.tokensPerStep, 2)} tokens per step`;
    return `${steps}, ${number(this.rate, 1)} tokens/s${stopped}`;
  }

  get drafter() {
    return this.isPlain ? "off" : (this.usage?.speculation?.drafter ?? "–");
  }

  /** Share of drafts that reached each depth, and were accepted there. */
  get acceptanceByPosition() {
    return this.drafted.map((drafted, depth) => ({
      drafted,
      accepted: this.accepted[depth] ?? 0,
    }));
  }
}

export function depthsOf(draft) {
  const depths = [];
  draft.forEach((guess, node) => {
    depths[node] = guess.parent < 0 ? 0 : depths[guess.parent] + 1;
  });
  return depths;
}
