// The report's timeline: one or more runs below each other, in seconds since each run's start; and the shares of the time.
import { el } from "/charts/elements.js";
import { AXIS, KINDS, LANE, Lanes } from "/charts/lanes.js";
import { moments, TIMES } from "/charts/plot.js";
import { span } from "/charts/words.js";

const HELP = "Timeline. Plus and minus zoom, arrows move, Home shows all.";

export class Timeline extends Lanes {
  constructor(place, runs) {
    const lanes = runs.flatMap((run) => [...(runs.length > 1 ? [heading(run)] : []), ...run.lanes.map(unpacked)]);
    const said = el("div", { class: "legend" }), box = el("div", { tabindex: 0, role: "application", "aria-roledescription": "timeline", "aria-label": HELP });
    place.append(said, box);
    const end = Math.max(...runs.map((run) => run.end)) / 1000, label = `Timeline of ${lanes.map((lane) => lane.title ?? lane.name).join(", ")}`;
    super(box, { height: lanes.length * LANE + AXIS, label, ticks: { incrs: TIMES, values: moments }, view: [0, end], first: 0, last: end, drags: true });
    this.said = said;
    this.hold(lanes);
    box.addEventListener("dblclick", () => this.all());
    place.append(el("div", { class: "tools" }, ...this.buttons(), el("small", {}, "drag over a range of time to zoom in")));
    this.tell(null);
  }
  buttons() {
    const actions = [["−", "zoom out", "-"], ["+", "zoom in", "+"], ["←", "earlier", "ArrowLeft"], ["→", "later", "ArrowRight"], ["all", "show all", "Home"]];
    return actions.map(([word, label, key]) => el("button", { "aria-label": label, onclick: this.keys()[key] }, word));
  }
  moment(at) { return `after ${span(at)}`; }
  tell(words) { this.said.replaceChildren(...(words ? [el("b", {}, words)] : this.legend())); }
  legend() {
    const lanes = this.lanes.filter((lane) => !lane.title), drawn = new Set(lanes.flatMap((lane) => [lane.rest, ...lane.stretches.map(([, , kind]) => kind)]));
    const kinds = Object.entries(KINDS).filter(([kind]) => drawn.has(kind));
    if (lanes.some((lane) => lane.marks.length)) kinds.push(["adopt", "adopts weights"]);
    return kinds.map(([kind, words]) => el("span", {}, el("i", { class: `swatch k-${kind}` }), words));
  }
}

const heading = (run) => ({ title: run.name });

/** A lane from packed data: each kind has start, length, start, length ... in milliseconds. */
function unpacked({ name, kinds, marks }) {
  const stretch = (packed, at) => [packed[at] / 1000, (packed[at] + packed[at + 1]) / 1000];
  const stretches = Object.entries(kinds).flatMap(([kind, packed]) => Array.from({ length: packed.length / 2 }, (_, place) => [...stretch(packed, 2 * place), kind]));
  return {
    name, rest: name === "trainer" ? "other" : "wait", stretches: stretches.sort(([one], [other]) => one - other),
    marks: marks.map(([at, version]) => [at / 1000, "adopt", `adopts weights ${version}`]),
  };
}

/** Draw a bar per process with the shares of its time. */
export function shareBars(place, runs) {
  for (const run of runs) {
    if (runs.length > 1 && run.bars.length) place.append(el("h4", {}, run.name));
    for (const { name, parts } of run.bars) place.append(el("div", { class: "shares" }, el("span", {}, name), el("div", {}, ...parts.map(part))));
  }
}
function part([kind, share]) {
  const node = el("span", { class: `k-${kind}`, title: `${KINDS[kind]} ${(share * 100).toFixed(1)} %` }, share < 0.035 ? "" : `${Math.round(share * 100)}%`);
  node.style.width = `${share * 100}%`;
  return node;
}
