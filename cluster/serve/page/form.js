// What is asked: the form, the conversation, and where both are kept. The API key is in neither.

import { announce, byId, element } from "./dom.js";

const STORE = "outrider-playground";
const LINK = "#playground?";
const SAMPLING = [
  "temperature", "max_tokens", "seed", "top_p", "top_k", "min_p", "repetition_penalty",
  "presence_penalty", "frequency_penalty", "min_tokens",
];
const NUMBERS = [...SAMPLING, "max_draft_len"];
const TEXTS = ["kind", "system", "prompt", "stop", "extra"];
const CHOICES = ["model-choice", "drafter", "against"]; // whose options the server determines
const SWITCHES = ["ignore_eos", "shared"];
const EXAMPLES = {
  completion: "class Stack:\n    def __init__(self):\n        self.items =",
  chat: "Explain speculative decoding in three sentences.",
};
export const OFF = "off"; // the drafter of a request without speculation

export class Form {
  constructor() {
    this.models = [];
    this.turns = []; // of the conversation: {role, content}
    this.rows = []; // of the table of past requests: texts, newest first
    this.isKindChosen = false; // by the user, a link or an earlier visit
    this.wanted = {}; // choices whose options are not known yet
    this.#load();
    byId("kind").addEventListener("change", () => {
      this.isKindChosen = true;
      this.#showKind();
    });
    byId("model-choice").addEventListener("change", () => this.#describe());
    for (const kind of ["input", "change"]) {
      byId("form").addEventListener(kind, (event) => {
        delete this.wanted[event.target.id];
        this.save();
      });
    }
    byId("new").addEventListener("click", () => this.#converse([]));
    byId("undo").addEventListener("click", () => {
      const asked = this.turns.at(-2)?.content ?? "";
      this.#converse(this.turns.slice(0, -2));
      byId("prompt").value = asked;
      this.save();
    });
    byId("share").addEventListener("click", () => this.#share());
    window.addEventListener("hashchange", () => this.#open());
  }

  /** `models`: cards of `/v1/models`; where there are several, one is chosen. */
  setModels(models) {
    if (JSON.stringify(models) === JSON.stringify(this.models)) return;
    this.models = models;
    this.#offer("model-choice", models.map(({ id }) => [id, id]));
    byId("choice").hidden = models.length < 2;
    this.#describe();
  }

  /** What a request needs; fields that were left empty are null. Throws what cannot be read. */
  settings() {
    const value = (id) => (byId(id).value === "" ? null : Number(byId(id).value));
    return {
      ...Object.fromEntries(NUMBERS.map((id) => [id, value(id)])),
      model: this.models.length > 1 ? byId("model-choice").value : null,
      kind: byId("kind").value,
      prompt: byId("prompt").value,
      turns: this.#asked(),
      system: byId("system").value,
      stop: byId("stop").value.split("\n").filter((line) => line !== ""),
      ignore_eos: byId("ignore_eos").checked,
      drafter: byId("drafter").value,
      isolated: !byId("shared").checked,
      extra: extraFields(),
    };
  }

  /** An answer becomes a part of the conversation, and the message box is free for the next. */
  answered(settings, content) {
    byId("prompt").value = "";
    this.#converse([...settings.turns, { role: "assistant", content }]);
  }

  save() {
    try {
      localStorage.setItem(STORE, JSON.stringify({ ...this.#state(), rows: this.rows }));
    } catch {
      // No room, or no storage at all: the page works without.
    }
  }

  /** The conversation with the new message; an empty one repeats the last. */
  #asked() {
    const content = byId("prompt").value;
    if (content === "") return this.turns.slice(0, -1);
    return [...this.turns, { role: "user", content }];
  }

  #state() {
    const fields = {};
    for (const id of [...NUMBERS, ...TEXTS]) fields[id] = byId(id).value;
    for (const id of CHOICES) fields[id] = this.#choice(id);
    for (const id of SWITCHES) fields[id] = byId(id).checked;
    if (!this.isKindChosen) delete fields.kind;
    return { fields, turns: this.turns };
  }

  #load() {
    const kept = parsed(localStorage.getItem(STORE));
    const rows = Array.isArray(kept.rows) ? kept.rows : [];
    this.rows = rows.filter((row) => Array.isArray(row)).map((row) => row.map(String));
    this.#apply(kept);
    this.#open();
    this.#showKind();
  }

  /** Takes over what a link holds; it then has no more of it, so that a reload keeps changes. */
  #open() {
    if (!location.hash.startsWith(LINK)) return;
    let text = "";
    try {
      text = decodeURIComponent(location.hash.slice(LINK.length));
    } catch {
      // Cut off where it was pasted.
    }
    history.replaceState(null, "", "#playground");
    this.#apply(parsed(text));
    this.#describe();
    this.save();
  }

  #apply({ fields, turns }) {
    const given = (id, type) => typeof fields?.[id] === type;
    for (const id of [...NUMBERS, ...TEXTS]) if (given(id, "string")) byId(id).value = fields[id];
    for (const id of SWITCHES) if (given(id, "boolean")) byId(id).checked = fields[id];
    for (const id of CHOICES) if (given(id, "string")) this.wanted[id] = fields[id];
    if (given("kind", "string")) this.isKindChosen = true;
    if (byId("extra").value !== "") byId("more").open = true;
    const isTurn = (turn) => typeof turn?.role === "string" && typeof turn.content === "string";
    if (Array.isArray(turns)) this.#converse(turns.filter(isTurn), false);
  }

  /** The chosen model's drafters, and whether it chats. */
  #describe() {
    const model = this.models.find(({ id }) => id === byId("model-choice").value) ?? this.models[0];
    if (!model) return;
    const names = model.drafters.length > 1 ? model.drafters.map((name) => [name, name]) : [];
    const plain = [OFF, "none (plain)"];
    this.#offer("drafter", [["", "engine's"], ...names, plain]);
    this.#offer("against", [plain, ["", "engine's"], ...names]);
    const [, chat] = byId("kind").options;
    chat.disabled = !model.has_chat_template;
    if (chat.disabled) byId("kind").value = "completion";
    else if (!this.isKindChosen) byId("kind").value = "chat";
    this.#showKind();
  }

  #offer(id, options) {
    const select = byId(id);
    const wanted = this.#choice(id);
    select.replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
    const isThere = options.some(([value]) => value === wanted);
    if (isThere) delete this.wanted[id];
    select.value = isThere ? wanted : options[0]?.[0];
  }

  /** What was chosen; undefined: nothing, since there are no options yet. */
  #choice(id) {
    return this.wanted[id] ?? (byId(id).options.length ? byId(id).value : undefined);
  }

  #showKind() {
    const kind = byId("kind").value;
    for (const each of document.querySelectorAll(".chat-only")) each.hidden = kind !== "chat";
    const isExample = Object.values(EXAMPLES).includes(byId("prompt").value);
    const isFresh = byId("prompt").value === "" && !this.turns.length;
    if (isExample || isFresh) byId("prompt").value = EXAMPLES[kind];
    byId("conversation").hidden = kind !== "chat" || !this.turns.length;
  }

  #converse(turns, keep = true) {
    this.turns = turns;
    byId("conversation").hidden = byId("kind").value !== "chat" || !turns.length;
    byId("turns").replaceChildren(
      ...turns.map(({ role, content }) =>
        element("li", { class: role }, element("strong", {}, role), element("div", {}, content)),
      ),
    );
    byId("turns").scrollTop = byId("turns").scrollHeight;
    if (keep) this.save();
  }

  async #share() {
    const link = new URL(location.href);
    link.hash = LINK + encodeURIComponent(JSON.stringify(this.#state()));
    history.replaceState(null, "", link);
    await copy(link.href);
    announce("Link copied");
  }
}

/** Path and body of a request; fields that were left empty are left out. */
export function request(settings) {
  const speculation = {
    enabled: settings.drafter !== OFF,
    isolated: settings.isolated,
    trace: true,
  };
  if (settings.drafter && settings.drafter !== OFF) speculation.drafters = [settings.drafter];
  if (settings.max_draft_len !== null) speculation.max_draft_len = settings.max_draft_len;
  // The usage so far in every chunk: a request that is stopped has its drafter's figures too.
  const stream_options = { include_usage: true, continuous_usage_stats: true };
  const body = { speculation, stream_options };
  for (const name of ["model", ...SAMPLING]) {
    if (settings[name] !== null) body[name] = settings[name];
  }
  if (settings.stop.length) body.stop = settings.stop;
  if (settings.ignore_eos) body.ignore_eos = true;
  Object.assign(body, settings.extra);
  if (settings.kind !== "chat") return ["v1/completions", { ...body, prompt: settings.prompt }];
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  return ["v1/chat/completions", { ...body, messages: [...system, ...settings.turns] }];
}

/** Also where the browser keeps the clipboard from pages without TLS. */
export async function copy(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return;
    } catch {
      // Not allowed: the older way may be.
    }
  }
  const field = element("textarea", { class: "visually-hidden", "aria-hidden": "true" }, text);
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

function extraFields() {
  const text = byId("extra").value.trim();
  if (text === "") return {};
  const value = parsed(text, null);
  if (value === null) throw new Error("other fields: a JSON object is needed");
  return value;
}

/** The object that a text holds as JSON; `otherwise`: it holds none. */
function parsed(text, otherwise = {}) {
  try {
    const value = JSON.parse(text);
    return value !== null && typeof value === "object" && !Array.isArray(value) ? value : otherwise;
  } catch {
    return otherwise;
  }
}
