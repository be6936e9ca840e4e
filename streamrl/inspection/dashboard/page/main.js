// Receives updates, keeps the newest version of each section, and draws changed sections, at most once a frame.
import { ages } from "/charts/ages.js";
import { curves, kindsOf, smoothed } from "/charts/curves.js";
import { el, text } from "/charts/elements.js";
import { lengths } from "/charts/lengths.js";
import { repaint } from "/charts/plot.js";
import { moment, short } from "/charts/words.js";
import * as lists from "./lists.js";
import { drawLoop } from "./loop.js";
import { Timeline } from "./timeline.js";

const $ = (id) => document.getElementById(id);
const HUES = ["train", "publish", "generate", "checkpoint", "optimizer", "accent"];
/** Charts of how the policy learns: id, title, description, and lines by name and metric. */
const LEARNING = [
  ["loss", "Loss", "Loss", () => [["loss", "loss"]]],
  ["grad", "Gradient norm", "Gradient norm before clipping", () => [["norm", "grad_norm"]]],
  ["entropy", "Entropy", "Entropy of the policy in nats a token", () => [["entropy", "entropy"]]],
  ["kl", "KL", "Divergences of the policy in nats a token", () => [["to the reference", "kl"], ["to the behaviour policy", "mismatch_kl/all/mean"]]],
  ["clip", "Tokens clipped", "Share of tokens clipped", () => [["of the tokens", "clip_ratio/region_mean"]]],
  ["cut", "Completions cut", "Share of completions cut at the length limit", () => [["of the completions", "completions/clipped_ratio"]]],
  ["flat", "Groups without advantage", "Share of groups whose rewards are all equal", () => [["of the groups", "frac_reward_zero_std"]]],
  ["passed", "Held-out prompts passed", "pass@k of held-out prompts", (told) => Object.keys(told).filter((key) => key.includes("/pass@")).map((key) => [key.slice(5), key])],
  ["parts", "Parts of the reward", "Mean of each reward function", (curves) => Object.keys(curves).filter((key) => key.startsWith("rewards/")).map((key) => [key.slice(8, -5), key])],
];
$("h-time").closest("section").before(...LEARNING.map(([id, title, said]) => el("section", { class: "card third", "aria-labelledby": `h-${id}`, hidden: "" },
  el("h2", { id: `h-${id}` }, title, " ", el("small", { id: `${id}-now` })), el("div", { class: "chart", id, "data-said": `${said}, over optimizer steps` }))));
const state = {}, dirty = new Set(), charts = {};
const REDRAW_MS = 100, PATIENCE_MS = 2000, TALL = 190, SMOOTHED = 4;
let pace = 1, heardAt = 0, skew = 0, drawnAt = 0, letterCount = -1;

const timeline = new Timeline($("timeline"), $("tip"), (on) => $("follow").setAttribute("aria-pressed", String(on)));
const present = () => performance.now() / 1000 + skew - pace;  // one update behind, because current activity comes with the next one

const DRAW = {
  loop() {
    const { run, health, dead_letters: letters } = state.loop;
    text($("run-name"), run); text($("health"), health);
    $("health").className = `pill ${{ running: "good", finished: "good", stalled: "bad" }[health] ?? "warn"}`;
    document.title = `${state.loop.step} · ${run} · StreamRL`;
    document.body.classList.toggle("over", state.loop.over);
    lists.tiles(state); drawLoop($("loop"), $("loop-words"), state);
    if (letters !== letterCount) { letterCount = letters; lists.letters(); }
  },
  curves() {
    const { step: x, reward, marks, "completions/mean_length": length, "completions/max_length": longest } = state.curves;
    if (state.loop) lists.tiles(state);
    if (x.length < 2) return;
    const drawn = (id, lines) => chart(id, curves, lines, marks.filter(([step]) => step >= x[0]));
    LEARNING.forEach(([id, , , lines]) => {
      const from = id === "passed" ? state.curves.evaluations : state.curves;
      const named = lines(from).map(([name, key], at) => ({ name, hue: HUES[at % HUES.length], x: from.step, y: from[key], width: 1.4, ends: true }));
      const told = named.filter(({ y }) => y?.some((value) => value !== null)), card = $(id).closest(".card");
      card.hidden = !told.length;
      if (told.length) drawn(id, told);
      text($(`${id}-now`), told.map(({ name, y }) => `${told.length > 1 ? `${name} ` : ""}${short(y.findLast((value) => value !== null))}`).join(", "));
    });
    drawn("reward", [{ name: "reward", hue: "generate", x, y: reward, smooth: smoothed(reward, SMOOTHED), filled: true, ends: true }]);
    drawn("length", [{ name: "longest", hue: "publish", x, y: longest, width: 1 }, { name: "mean", hue: "train", x, y: length, filled: true, ends: true }]);
    text($("reward-now"), short(reward.at(-1)));
    text($("length-now"), `mean ${short(length.at(-1))}, longest ${short(longest.at(-1))} tokens`);
  },
  lag() { lists.lag(state.lag); },
  workers() { lists.workers(state.workers, state.loop?.over); },
  instances() { lists.instances(state.instances); },
  arms() { lists.arms(state.arms); },
  split() { lists.split(state.split); },
  rewards() { lists.rewards(state.rewards); },
  usage() { lists.usage(state.usage, state.loop); },
  lengths() {
    const { cells, close } = state.lengths;
    if (cells.length) chart("lengths", lengths, cells);
    text($("close"), close === null ? "" : `${Math.round(close * 100)}% within ×1.5`);
  },
  staleness() { if (state.staleness.counts.length) chart("staleness", ages, [{ name: "", hue: "train", counts: state.staleness.counts }]); },
  timeline() {
    timeline.hold(state.timeline);
    // Nothing comes after the end, so the whole past is shown once instead of an empty present.
    if (state.loop?.over && timeline.following) timeline.all();
  },
  trajectories() { lists.trajectories(state.trajectories); },
  events() { lists.events(state.events); },
};

/** Draw a chart when it has its first data, then update it. If it has other lines or kinds of marks, it is drawn again. */
function chart(id, make, data, marks = []) {
  const lines = make === curves ? [...data.map((line) => line.name), ...kindsOf(marks)].join() : "";
  if (charts[id]?.lines === lines) charts[id].draw(data, marks);
  else charts[id] = { lines, draw: make($(id), data, { label: $(id).dataset.said, height: TALL, over: "step", marks }) };
}

function frame(time) {
  for (const name of dirty) DRAW[name]?.();
  dirty.clear();
  if (time - drawnAt > REDRAW_MS) { drawnAt = time; timeline.advance(present()); }
  requestAnimationFrame(frame);
}

function connect() {
  const source = new EventSource("api/updates");
  source.onmessage = ({ data }) => {
    const found = JSON.parse(data), offset = found.now - performance.now() / 1000;
    skew = heardAt && Math.abs(offset - skew) < 2 ? skew + (offset - skew) * 0.1 : offset;
    heardAt = performance.now(); pace = found.pace;
    for (const [name, section] of Object.entries(found)) if (!["now", "pace"].includes(name)) { state[name] = section; dirty.add(name); }
  };
}

setInterval(() => {
  const quiet = performance.now() - heardAt, { over, step, max_steps: most, step_at: at } = state.loop ?? {};
  if (over) { text($("link"), `last step ${step}${most === null ? "" : ` of ${most}`}, ${at === null ? "" : moment(at)}`); return; }
  text($("link"), !heardAt ? "connecting…" : quiet < pace * 1000 + PATIENCE_MS ? "live" : `no update for ${Math.round(quiet / 1000)} s`);
}, 500);

const SCHEMES = { "": ["◐", "the system's"], light: ["☀", "light"], dark: ["☾", "dark"] };
function showScheme() {
  const [sign, name] = SCHEMES[document.documentElement.dataset.theme ?? ""];
  text($("theme"), sign); $("theme").setAttribute("aria-label", `Colour scheme: ${name}`); $("theme").title = `Colour scheme: ${name}`;
}
$("theme").addEventListener("click", () => {
  const names = Object.keys(SCHEMES), next = names[(names.indexOf(document.documentElement.dataset.theme ?? "") + 1) % names.length];
  if (next) document.documentElement.dataset.theme = next; else delete document.documentElement.dataset.theme;
  try { localStorage.setItem("streamrl-theme", next); } catch { /* forgotten at the next visit */ }
  settleScheme(); showScheme(); repaint();
});
$("zoom-in").addEventListener("click", () => timeline.zoom(0.6));
$("zoom-out").addEventListener("click", () => timeline.zoom(1.6));
$("zoom-all").addEventListener("click", () => timeline.all());
$("follow").addEventListener("click", () => timeline.follow(!timeline.following));
$("dlq-refresh").addEventListener("click", lists.letters);

showScheme(); lists.legend(); lists.holdWhileLookedAt(); connect(); requestAnimationFrame(frame);
