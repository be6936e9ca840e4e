// Receives updates, keeps the newest of each section, and draws what changed, at most once a frame.
import { columns, curves, grid, smooth } from "./charts.js";
import { colour, forgetColours, short, text } from "./draw.js";
import * as lists from "./lists.js";
import { drawLoop } from "./loop.js";
import { KINDS, Timeline } from "./timeline.js";

const $ = (id) => document.getElementById(id);
const state = {}, dirty = new Set();
const REDRAW_MS = 100, PATIENCE_MS = 2000;
let pace = 1, heardAt = 0, skew = 0, drawnAt = 0, letterCount = -1;

const timeline = new Timeline($("timeline"), $("tip"), (on) => $("follow").setAttribute("aria-pressed", String(on)));
const present = () => performance.now() / 1000 + skew - pace;  // what happens now is told with the next update

const DRAW = {
  loop() {
    const { run, health, totals } = state.loop;
    text($("run-name"), run); text($("health"), health);
    $("health").className = `pill ${{ running: "good", finished: "good", stalled: "bad" }[health] ?? "warn"}`;
    document.title = `${state.loop.step} · ${run} · StreamRL`;
    lists.tiles(state); drawLoop($("loop"), state);
    if (totals.dead_letters !== letterCount) { letterCount = totals.dead_letters; lists.letters(); }
  },
  curves() {
    const found = state.curves, steps = found.step, length = found["completions/mean_length"];
    curves($("reward"), steps, [{ values: found.reward, colour: colour("generate-2"), width: 1 }, { values: smooth(found.reward, 8), colour: colour("generate"), fill: true, dot: true }]);
    curves($("length"), steps, [{ values: found["completions/max_length"], colour: colour("publish"), width: 1 }, { values: length, colour: colour("train"), fill: true, dot: true }]);
    text($("reward-now"), found.reward.length ? short(found.reward.at(-1)) : "");
    text($("length-now"), length.length ? `mean ${short(length.at(-1))}, longest ${short(found["completions/max_length"].at(-1))} tokens` : "");
  },
  lag() { lists.lag(state.lag); },
  workers() { lists.workers(state.workers); },
  split() { lists.split(state.split); },
  lengths() {
    const { cells, close } = state.lengths;
    grid($("lengths"), cells);
    text($("close"), close === null ? "" : `${Math.round(close * 100)}% within ×1.5`);
  },
  staleness() { columns($("staleness"), state.staleness.counts); },
  timeline() { timeline.lanes = state.timeline; timeline.dirty = true; },
  trajectories() { lists.trajectories(state.trajectories); },
  events() { lists.events(state.events); },
};

function frame(time) {
  for (const name of dirty) DRAW[name]?.();
  dirty.clear();
  if (timeline.dirty || (timeline.following && time - drawnAt > REDRAW_MS)) { drawnAt = time; timeline.draw(present()); }
  requestAnimationFrame(frame);
}

function redraw() { forgetColours(); for (const name of Object.keys(state)) dirty.add(name); timeline.dirty = true; }

function connect() {
  const source = new EventSource("/api/updates");
  source.onmessage = ({ data }) => {
    const found = JSON.parse(data), offset = found.now - performance.now() / 1000;
    skew = heardAt && Math.abs(offset - skew) < 2 ? skew + (offset - skew) * 0.1 : offset;
    heardAt = performance.now(); pace = found.pace;
    for (const [name, section] of Object.entries(found)) if (!["now", "pace"].includes(name)) { state[name] = section; dirty.add(name); }
  };
}

setInterval(() => {
  const quiet = performance.now() - heardAt;
  text($("link"), !heardAt ? "connecting…" : quiet < pace * 1000 + PATIENCE_MS ? "live" : `no update for ${Math.round(quiet / 1000)} s`);
}, 500);

const SCHEMES = { "": ["◐", "as the system"], light: ["☀", "light"], dark: ["☾", "dark"] };
function showScheme() {
  const [sign, name] = SCHEMES[document.documentElement.dataset.theme ?? ""];
  text($("theme"), sign); $("theme").setAttribute("aria-label", `Colour scheme: ${name}`); $("theme").title = `Colour scheme: ${name}`;
}
$("theme").addEventListener("click", () => {
  const names = Object.keys(SCHEMES), next = names[(names.indexOf(document.documentElement.dataset.theme ?? "") + 1) % names.length];
  if (next) document.documentElement.dataset.theme = next; else delete document.documentElement.dataset.theme;
  try { localStorage.setItem("streamrl-theme", next); } catch { /* forgotten at the next visit */ }
  settleScheme(); showScheme(); redraw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("redraw", () => { for (const name of Object.keys(state)) dirty.add(name); timeline.dirty = true; });
$("zoom-in").addEventListener("click", () => timeline.zoom(0.6, 0.5));
$("zoom-out").addEventListener("click", () => timeline.zoom(1.7, 0.5));
$("zoom-all").addEventListener("click", () => timeline.all());
$("follow").addEventListener("click", () => timeline.follow(!timeline.following));
$("dlq-refresh").addEventListener("click", lists.letters);

showScheme(); lists.legend(KINDS); lists.holdWhileLookedAt(); connect(); requestAnimationFrame(frame);
