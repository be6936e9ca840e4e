// Draws the charts in their places, and handles the two switches above the curves.
import { ages } from "/charts/ages.js";
import { curves, smoothed } from "/charts/curves.js";
import { el } from "/charts/elements.js";
import { lengths } from "/charts/lengths.js";
import { short } from "/charts/words.js";
import { shareBars, Timeline } from "./timeline.js";

const DATA = JSON.parse(document.getElementById("data").textContent), HEIGHT = 190;
const COMPARED = DATA.runs.length > 1, PIECES = 40, HUES = 8, DASHES = [undefined, [6, 3], [2, 3]];
const state = { axis: "step", smooth: true }, redraws = [];
const place = (name) => document.getElementById(name), hue = (number) => `c${number % HUES}`, known = (value) => value !== null;
const named = (runs) => runs.map((each) => ({ ...each, name: DATA.runs[each.run].name }));

/** A figure whose curves are drawn again when a switch changes. */
function figure(spec) {
  const box = el("div", { class: "chart" });
  redraws.push(() => draw(box, spec));
  return el("figure", {}, el("figcaption", {}, el("h3", {}, spec.title), el("small", {}, spec.unit)), box);
}

function draw(box, spec) {
  const over = spec.axis ?? state.axis;
  const lines = spec.lines.map((line, number) => drawn(line, COMPARED ? line.run : number, over, spec.title));
  const label = `${spec.title}: ${lines.map(({ name, y }) => `${name} from ${short(y.find(known))} to ${short(y.findLast(known))}`).join(", ")}`;
  curves(box, lines, { label, over, height: HEIGHT, marks: DATA.marks.map(({ step, time, kind, text }) => [step, time, kind, text]) });
}

function drawn({ run, name, at, y }, number, over, title) {
  const reach = state.smooth ? Math.floor((y.length - 1) / PIECES) : 0;
  return {
    name: COMPARED ? DATA.runs[run].name : name || title.toLowerCase(), hue: hue(number), dash: DASHES[Math.min(2, Math.floor(number / HUES))],
    x: at ?? DATA.runs[run][over], y, smooth: reach ? smoothed(y, reach) : null,
  };
}

for (const group of DATA.curves) place("curves").append(el("h3", { class: "group" }, group.title), el("div", { class: "grid" }, ...group.curves.map(figure)));
for (const { run, cells } of DATA.lengths) lengths(place(`lengths-${run}`), cells, { label: place(`lengths-${run}`).dataset.said, height: 300 });
if (place("length-order")) place("length-order").append(...DATA.order.map(figure));
if (place("values")) place("values").append(...DATA.values.map(figure));
if (place("staleness")) ages(place("staleness"), named(DATA.staleness).map((each) => ({ ...each, hue: hue(each.run) })), { label: "Staleness of trained trajectories", height: HEIGHT });
if (place("timeline")) new Timeline(place("timeline"), named(DATA.timelines).filter((run) => run.lanes.length));
if (place("shares")) shareBars(place("shares"), named(DATA.shares));

function redraw() { for (const each of redraws) each(); }
for (const button of document.querySelectorAll("[data-axis]")) button.addEventListener("click", () => {
  state.axis = button.dataset.axis;
  for (const other of document.querySelectorAll("[data-axis]")) other.setAttribute("aria-pressed", String(other === button));
  redraw();
});
place("smooth")?.addEventListener("click", (event) => {
  state.smooth = !state.smooth;
  event.currentTarget.setAttribute("aria-pressed", String(state.smooth));
  redraw();
});
addEventListener("beforeprint", () => { for (const each of document.querySelectorAll("details")) each.open = true; });
redraw();
