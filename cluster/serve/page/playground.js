// The playground: sends a request, shows its stream, and keeps the figures of past ones.

import { ApiError, get, stream } from "./api.js";
import { positionsChart, stepsChart } from "./charts.js";
import { Form, copy, request } from "./form.js";
import {
  announce,
  byId,
  count,
  duration,
  element,
  number,
  percent,
  ratio,
  showRows,
  showTiles,
} from "./dom.js";
import { RequestRecord } from "./record.js";
import { TokenView } from "./tokens.js";

const MAX_HISTORY = 50;

export class Playground {
  constructor(onUnauthorized) {
    this.form = new Form();
    const view = new TokenView();
    this.views = [view, new TokenView("-2", view.colours)];
    this.abort = null;
    this.onUnauthorized = onUnauthorized;
    byId("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#generate();
    });
    byId("stop-run").addEventListener("click", () => this.abort?.abort());
    byId("compare").addEventListener("click", () => this.#compare());
    byId("copy").addEventListener("click", async () => {
      await copy(this.views[0].record.text);
      announce("Output copied");
    });
    byId("clear").addEventListener("click", () => this.#showHistory([]));
    byId("form").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        this.#generate();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.abort?.abort();
    });
    this.#showHistory(this.form.rows);
    this.#figures(null);
  }

  /** The longest draft of the engines, from `/stats`. */
  setLimits(maxDraftLen) {
    const field = byId("max_draft_len");
    field.placeholder = maxDraftLen ? `engine's ${maxDraftLen}` : "no drafter";
  }

  setModels(models) {
    this.form.setModels(models);
  }

  async #generate() {
    const [record] = await this.#run([{}]);
    const isWhole = record?.finishReason && record.finishReason !== "stopped";
    if (isWhole && record.settings.kind === "chat") {
      this.form.answered(record.settings, record.text);
    }
  }

  /** The request as it is set, then with the other drafter. Both are isolated: a drafter that
   * stores past outputs would replay what it has stored of this prompt. */
  async #compare() {
    const isolated = true;
    const records = await this.#run([{ isolated }, { isolated, drafter: byId("against").value }]);
    this.#compared(records);
  }

  /** The records of these variants of the settings, one after the other; fewer where one failed. */
  async #run(variants) {
    const records = [];
    if (this.abort || !byId("form").reportValidity()) return records;
    this.abort = new AbortController();
    this.#busy(true);
    byId("pane-2").hidden = variants.length < 2;
    try {
      const settings = this.form.settings();
      for (const [index, changes] of variants.entries()) {
        const record = new RequestRecord({ ...settings, ...changes });
        await this.#one(record, this.views[index]);
        records.push(record);
        if (this.abort.signal.aborted) break;
      }
    } catch (error) {
      this.#failed(error);
    } finally {
      this.abort = null;
      this.#busy(false);
    }
    return records;
  }

  /** One request; stops quietly where it was aborted. */
  async #one(record, view) {
    announce("Generating");
    view.start(record);
    this.#figures(record);
    const before = await phases();
    const [path, body] = request(record.settings);
    try {
      for await (const event of stream(path, body, this.abort.signal)) {
        view.add(record.push(event));
        this.#draw(record);
      }
    } catch (error) {
      if (error.name !== "AbortError") throw error;
      record.finishReason = "stopped";
    } finally {
      view.finish();
      if (record.steps.length) this.#remember(record);
    }
    record.draftShare = shareOfDrafting(before, await phases());
    this.#figures(record);
    charts(record);
    announce(
      `Done: ${count(record.numTokens, "token")} in ${count(record.steps.length, "step")}, ` +
        `${number(record.tokensPerStep, 2)} tokens per step`,
    );
  }

  /** At most once a frame, however fast the tokens come. */
  #draw(record) {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.#figures(record);
      charts(record);
    });
  }

  /** What waits for a frame is older, so it is not drawn any more. */
  #figures(record) {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const measured = record?.measured;
    const share = record?.draftShare;
    const estimate = record ? record.tokensPerStep * (1 - (share ?? 0)) : NaN;
    const sameText = measured?.isSame ? "same text" : "the texts differ";
    showTiles(byId("figures"), [
      ["Tokens per step", number(record?.tokensPerStep, 2), "plain decoding: 1"],
      ["Tokens/s", number(record?.rate, 1), "after the first"],
      ["Time to first token", duration(record?.firstS - record?.startS)],
      ["Accepted", record ? percent(record.numAccepted, record.numDraftTokens) : "–", "of the draft tokens"],
      ["Tokens", number(record?.numTokens), record ? `in ${count(record.steps.length, "step")}` : ""],
      ["Drafter", (record?.drafter ?? "–").replaceAll("+", "+\u200b")], // may break there
      [
        "Estimated speedup",
        record && !record.isPlain ? times(estimate) : "–",
        "if verifying a draft costs as much as a plain step",
      ],
      [
        "Measured speedup",
        measured ? times(measured.speedup) : "–",
        measured ? `against ${measured.rival}, ${sameText}` : "Compare with plain",
      ],
    ]);
  }

  #compared([first, second]) {
    if (!first?.steps.length || !second?.steps.length) return;
    first.measured = {
      speedup: first.rate / second.rate,
      rival: second.isPlain ? "plain" : second.settings.drafter || "the engine's",
      isSame: first.text === second.text && first.reasoning === second.reasoning,
    };
    this.#figures(first);
    charts(first);
    const rival = second.isPlain ? "plain decoding" : first.measured.rival;
    announce(`${number(first.measured.speedup, 2)} times as fast as ${rival}`);
  }

  #remember(record) {
    const index = Number(this.form.rows[0]?.[0] ?? 0) + 1;
    const row = [
      String(index),
      record.drafter,
      number(ratio(record.numDraftTokens, record.steps.filter((step) => step.draft.length).length), 1),
      number(record.numTokens),
      number(record.steps.length),
      number(record.tokensPerStep, 2),
      percent(record.numAccepted, record.numDraftTokens),
      duration(record.firstS - record.startS),
      number(record.rate, 1),
    ];
    this.#showHistory([row, ...this.form.rows].slice(0, MAX_HISTORY));
  }

  #showHistory(rows) {
    this.form.rows = rows;
    this.form.save();
    byId("history-card").hidden = !rows.length;
    if (rows.length) showRows(byId("history"), rows);
    else byId("history").tBodies[0].replaceChildren();
  }

  #failed(error) {
    const problem = byId("problem");
    const isKey = error instanceof ApiError && (error.status === 401 || error.status === 403);
    const message = isKey ? `${error.message} (enter an API key above)` : error.message;
    problem.replaceChildren(element("strong", {}, "Failed: "), message);
    problem.hidden = false;
    if (isKey) this.onUnauthorized();
  }

  #busy(isBusy) {
    byId("run").disabled = byId("compare").disabled = isBusy;
    byId("stop-run").disabled = !isBusy;
    byId("copy").disabled = isBusy || !this.views[0].record;
    if (isBusy) byId("problem").hidden = true;
  }
}

const times = (factor) => (Number.isFinite(factor) ? `${number(factor, 2)}×` : "–");

function charts(record) {
  stepsChart(byId("chart-steps"), record);
  positionsChart(byId("chart-positions"), record.acceptanceByPosition);
}

/** Seconds that all engines have spent in steps, and on drafting; null where that is not told. */
async function phases() {
  try {
    const { engines } = await get("stats");
    const total = (key) => engines.reduce((sum, each) => sum + each.histograms[key].sum, 0);
    const [draft, verify, overhead] = ["draft", "verify", "overhead"].map(total);
    return { draft, all: draft + verify + overhead };
  } catch {
    return null;
  }
}

function shareOfDrafting(before, after) {
  if (!before || !after || after.all <= before.all) return null;
  return (after.draft - before.draft) / (after.all - before.all);
}
