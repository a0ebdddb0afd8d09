// The live view: what the server reports, once a second, and its differences.

import { miniBars, sparkline } from "./charts.js";
import { byId, duration, element, number, percent, ratio, showRows, showTiles } from "./dom.js";

const SIZE = 120; // seconds on a chart
const SUMS = {
  output: (engine) => engine.requests?.num_output_tokens,
  lookedUp: (engine) => engine.requests?.num_looked_up_tokens,
  hits: (engine) => engine.requests?.num_hit_tokens,
  finished: (engine) => engine.requests?.num_finished,
  preemptions: (engine) => engine.requests?.num_preemptions,
  steps: (engine) => engine.steps?.num_steps,
  sequences: (engine) => engine.steps?.num_sequences,
  sampled: (engine) => engine.steps?.num_sampled,
  granted: (engine) => engine.steps?.num_granted_nodes,
  drafted: (engine) => engine.steps?.num_draft_nodes,
  blocks: (engine) => engine.kv?.num_blocks,
  free: (engine) => engine.kv?.num_free_blocks,
};

export class LiveView {
  constructor() {
    this.throughput = [];
    this.budget = [];
    this.before = null;
    this.show(null);
  }

  /** Takes an answer of `/stats`; null: there is none, the charts go on with zeros. */
  show(stats) {
    const now = { atS: performance.now() / 1e3, ...summed(stats?.engines ?? []) };
    const since = this.before ? difference(now, this.before) : null;
    const isRestarted = since !== null && (since.output < 0 || since.steps < 0);
    const recent = isRestarted ? null : since;
    if (stats) this.before = now;
    push(this.throughput, recent && stats ? ratio(recent.output, recent.atS) : 0);
    push(this.budget, recent && stats ? ratio(recent.granted, recent.sampled) || 0 : 0);
    sparkline(byId("spark-throughput"), this.throughput, SIZE, "tokens per second");
    sparkline(byId("spark-budget"), this.budget, SIZE, "draft nodes", 1);
    showTiles(byId("live-tiles"), this.#tiles(stats, now, recent));
    showRows(byId("drafters"), drafterRows(stats?.engines ?? []), "no drafter");
    showRows(byId("costs"), costRows(stats?.engines ?? []), "draft lengths do not follow costs");
    showRows(byId("requests"), requestRows(stats?.engines ?? []), "no request runs");
  }

  #tiles(stats, now, recent) {
    const emitted = recent?.sampled ? recent : now; // idle: since the start
    const when = recent?.sampled ? "in the last second" : "since the start";
    const switchedOff = stats?.engines.some((each) => each.speculation?.enabled === false);
    return [
      ["Running", number(stats?.running ?? NaN), `${number(now.finished)} finished`],
      ["Waiting", number(stats?.waiting ?? NaN), `${number(now.preemptions)} preemptions`],
      ["Batch size", number(ratio(emitted.sequences, emitted.steps), 1), `mean ${when}`],
      ["Tokens/s", number(this.throughput.at(-1), 1)],
      ["Tokens per step", number(ratio(emitted.output, emitted.sampled), 2), `per sequence, ${when}`],
      ["KV cache in use", percent(now.blocks - now.free, now.blocks), `${number(now.blocks)} blocks`],
      ["Prefix cache hits", percent(now.hits, now.lookedUp), "of looked-up tokens"],
      [
        "Draft budget",
        switchedOff ? "off" : number(ratio(emitted.granted, emitted.sampled), 1),
        switchedOff ? "switched off by user_config" : `nodes granted, ${when}`,
      ],
      ["Expected gain", number(gain(stats?.engines ?? []), 2), "of drafting, to plain decoding"],
      ["Drafted", number(ratio(emitted.drafted, emitted.sampled), 1), `nodes verified, ${when}`],
    ];
  }
}

function summed(engines) {
  const sum = (read) => engines.reduce((total, engine) => total + (read(engine) ?? 0), 0);
  return Object.fromEntries(Object.entries(SUMS).map(([name, read]) => [name, sum(read)]));
}

function difference(now, before) {
  return Object.fromEntries(Object.keys(now).map((name) => [name, now[name] - before[name]]));
}

function push(values, value) {
  values.push(value);
  if (values.length > SIZE) values.shift();
}

function drafterRows(engines) {
  return engines.flatMap((engine) =>
    Object.entries(engine.drafters ?? {})
      .filter(([name]) => name !== "none")
      .map(([name, each]) => [
        engines.length > 1 ? `${name} (${engine.replica})` : name,
        health(each),
        number(each.num_gen_drafts),
        number(ratio(each.num_gen_tokens, each.num_gen_drafts), 1),
        percent(each.num_acc_tokens, each.num_gen_tokens),
        miniBars(each.acc_tokens_per_pos.slice(0, 16).map((n) => ratio(n, each.num_gen_drafts) || 0)),
        duration(ratio(each.gen_ms, each.num_calls[1]) / 1e3),
        faults(each),
      ]),
  );
}

/** The mean of engines whose draft lengths follow what steps cost. */
function gain(engines) {
  const gains = engines.map((engine) => engine.speculation?.adaptive?.gain).filter(Number.isFinite);
  return ratio(gains.reduce((total, each) => total + each, 0), gains.length);
}

function costRows(engines) {
  return engines.flatMap((engine) =>
    Object.entries(engine.speculation?.adaptive?.step_ms ?? {}).map(([size, { 0: plain, ...drafted }]) => [
      engines.length > 1 ? `${size} (${engine.replica})` : size,
      duration(plain / 1e3),
      Object.entries(drafted).map(([nodes, ms]) => `${nodes}: ${number(ms / plain, 2)}`).join(" · "),
    ]),
  );
}

function health(drafter) {
  const { state, reason } = drafter.health ?? { state: "unknown", reason: "" };
  const pill = element("span", { class: `pill ${state}` }, state);
  const why = reason ? element("div", { class: "note" }, reason) : null;
  return element("div", {}, pill, ...(why ? [why] : []));
}

function faults(drafter) {
  const last = drafter.health?.last_fault;
  const note = last ? element("div", { class: "note" }, last) : null;
  return element("div", {}, number(drafter.faults), ...(note ? [note] : []));
}

function requestRows(engines) {
  return engines.flatMap((engine) =>
    (engine.newest_requests ?? []).map((each) => [
      element("code", { title: each.id }, shortened(each.id)),
      duration(each.age_s),
      number(each.num_prompt_tokens),
      number(each.num_output_tokens),
      each.drafter,
      number(ratio(each.num_draft_tokens, each.num_drafts), 1),
      number(ratio(each.num_steps + each.num_accepted_tokens, each.num_steps), 2),
      percent(each.num_accepted_tokens, each.num_draft_tokens),
    ]),
  );
}

const shortened = (id) => (id.length > 20 ? `${id.slice(0, 19)}…` : id);
