// Tabs, theme, key, and the poll of `/stats` that both views live on.

import { ApiError, get, setKey } from "./api.js";
import { byId, setText } from "./dom.js";
import { LiveView } from "./live.js";
import { Playground } from "./playground.js";

const POLL_MS = 1000;
const TABS = ["playground", "live"];
const THEMES = { automatic: "◐", light: "☀", dark: "☾" };

let polling = false;
const playground = new Playground(() => byId("key").focus());
const live = new LiveView();

function showTab(name, focus = false) {
  for (const each of TABS) {
    const tab = byId(`tab-${each}`);
    const isShown = each === name;
    tab.setAttribute("aria-selected", String(isShown));
    tab.tabIndex = isShown ? 0 : -1;
    byId(each).hidden = !isShown;
    if (isShown && focus) tab.focus();
  }
  history.replaceState(null, "", `#${name}`);
  if (name === "live") poll();
}

for (const name of TABS) {
  byId(`tab-${name}`).addEventListener("click", () => showTab(name));
  byId(`tab-${name}`).addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowLeft: -1 };
    if (!(event.key in steps)) return;
    const next = (TABS.indexOf(name) + steps[event.key] + TABS.length) % TABS.length;
    showTab(TABS[next], true);
  });
}
function showTabOfLink() {
  const name = location.hash.slice(1).split("?")[0]; // after it: what a shared link holds
  if (TABS.includes(name) && byId(name).hidden) showTab(name);
}
window.addEventListener("hashchange", showTabOfLink);
showTabOfLink();

function setTheme(theme) {
  if (theme === "automatic") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  setText(byId("theme"), THEMES[theme]);
  byId("theme").setAttribute("aria-label", `Theme: ${theme}`);
  byId("theme").title = `Theme: ${theme}`;
}

let theme = localStorage.getItem("outrider-theme") ?? "automatic";
if (!(theme in THEMES)) theme = "automatic";
setTheme(theme);
byId("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  theme = names[(names.indexOf(theme) + 1) % names.length];
  localStorage.setItem("outrider-theme", theme);
  setTheme(theme);
});

byId("key").addEventListener("input", () => {
  setKey(byId("key").value);
  poll();
});

function showState(kind, text) {
  const state = byId("state");
  state.className = `pill ${kind}`;
  setText(state, text);
}

function stateOf(stats) {
  const recovering = stats.engines.filter((engine) => engine.recovering);
  if (!stats.engines.length) return ["down", "no engine"];
  if (recovering.length === stats.engines.length) return ["late", "workers restart"];
  return ["active", "ready"];
}

/** A client's key may use the models, but only an administrator's may see the statistics. */
async function withoutStats(error) {
  const status = error instanceof ApiError ? error.status : 0;
  const isClient = status === 403;
  setText(byId("live-note"), isClient ? "The live view needs an administrator's key." : "");
  byId("live-note").hidden = !isClient;
  if (status === 401) showState("late", "API key needed");
  else if (!isClient) showState("down", "unreachable");
  else {
    try {
      showModels((await get("v1/models")).data);
      showState("active", "ready");
    } catch {
      showState("down", "not ready");
    }
  }
}

let described = ""; // models whose drafters and templates are known

function showModels(models) {
  described = models.map(({ id }) => id).join(", ");
  setText(byId("model"), described);
  playground.setModels(models.map(({ created, ...model }) => model));
}

/** Asks for what the models have, once: while workers restart, none is listed. */
async function showNames(names) {
  if (names.join(", ") === described) return;
  setText(byId("model"), names.join(", "));
  try {
    showModels((await get("v1/models")).data);
  } catch {
    // Asked again with the next poll.
  }
}

async function poll() {
  if (polling) return;
  polling = true;
  try {
    const stats = await get("stats");
    byId("live-note").hidden = true;
    await showNames(stats.models);
    showState(...stateOf(stats));
    live.show(stats);
    const longest = stats.engines.map((engine) => engine.speculation?.max_draft_len ?? 0);
    playground.setLimits(Math.max(0, ...longest));
  } catch (error) {
    await withoutStats(error);
    live.show(null);
  } finally {
    polling = false;
  }
}

poll();
setInterval(() => {
  if (document.visibilityState === "visible") poll();
}, POLL_MS);
