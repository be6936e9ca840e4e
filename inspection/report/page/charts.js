"use strict";
// Drawing in SVG: sharp on paper and in both schemes. Text from runs is set as text, never as markup.
const DATA = JSON.parse(document.getElementById("data").textContent);
const W = 400, H = 176, LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 22;

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
function html(tag, className = "", ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}
function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  if (size !== 0 && size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  return String(+value.toPrecision(size >= 1000 ? 4 : 3));
}
function seconds(value, fine = false) {
  if (value < 1 && fine) return `${Math.round(value * 1000)} ms`;
  if (value < 120) return `${+value.toFixed(fine ? 2 : 1)} s`;
  return value < 7200 ? `${+(value / 60).toFixed(1)} min` : `${+(value / 3600).toFixed(2)} h`;
}
function ticks(low, high, count) {
  const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
  const unit = [1, 2, 2.5, 5, 10].find((each) => each * power >= raw * 0.8) * power, found = [];
  for (let at = Math.ceil(low / unit - 1e-9) * unit; at <= high + unit * 1e-6; at += unit) found.push(+(Math.round(at / unit) * unit).toPrecision(12));
  return found;
}
const TIMES = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200];
/** Round moments, in seconds. */
function timeTicks(low, high, count) {
  const unit = TIMES.find((each) => each * count >= (high - low) * 0.8) ?? 86400 * Math.ceil((high - low) / count / 86400), found = [];
  for (let at = Math.ceil(low / unit - 1e-9); at * unit <= high + unit * 1e-6; at += 1) found.push(+(at * unit).toPrecision(12));
  return found;
}
/** A mean over neighbours on both sides, so that nothing is drawn later than it was. */
function smoothed(values) {
  const reach = Math.floor(values.length / 40);
  return values.map((value, at) => {
    if (value === null) return null;
    const near = values.slice(Math.max(0, at - reach), at + reach + 1).filter((each) => each !== null);
    return near.reduce((sum, each) => sum + each, 0) / near.length;
  });
}
const dash = (number) => (number < 8 ? "" : number < 16 ? " d1" : " d2");

class Chart {
  constructor(spec) {
    this.spec = spec;
    this.legend = html("div", "legend");
    this.svg = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img" });
    this.node = html("figure", "chart", html("figcaption", "", html("h3", "", spec.title), html("small", "", spec.unit)), this.legend, this.svg);
    this.lines = spec.lines.map((line, number) => ({ ...line, hue: DATA.runs.length > 1 ? line.run : number, label: DATA.runs.length > 1 ? DATA.runs[line.run].name : line.name }));
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.tell(null));
  }
  draw(axis, smooth) {
    this.axis = this.spec.axis ?? axis;
    for (const line of this.lines) {
      line.x = line.at ?? DATA.runs[line.run][this.axis];
      line.shown = smooth && line.y.length > 40 ? smoothed(line.y) : line.y;
    }
    const xs = this.lines.flatMap((line) => line.x), ys = this.lines.flatMap((line) => line.y.filter((value) => value !== null));
    let low = Math.min(...ys), high = Math.max(...ys);
    const margin = (high - low || Math.abs(high) || 1) * 0.06;
    low = low >= 0 && low <= high * 0.5 ? 0 : low - margin; high += margin;
    const first = Math.min(...xs), last = Math.max(...xs);
    this.x = (at) => LEFT + ((at - first) / (last - first || 1)) * (W - LEFT - RIGHT);
    this.y = (value) => H - BOTTOM - ((value - low) / (high - low)) * (H - BOTTOM - TOP);
    this.svg.replaceChildren();
    for (const tick of ticks(low, high, 4)) {
      this.svg.append(svg("line", { class: "grid-line", x1: LEFT, x2: W - RIGHT, y1: this.y(tick), y2: this.y(tick) }), svg("text", { x: LEFT - 6, y: this.y(tick) + 4, "text-anchor": "end" }, short(tick)));
    }
    for (const tick of this.axis === "step" ? ticks(first, last, 5) : timeTicks(first, last, 5)) {
      if (this.axis === "step" && !Number.isInteger(tick)) continue;
      const end = this.x(tick) > W - 24;
      this.svg.append(svg("text", { x: end ? W - RIGHT : this.x(tick), y: H - 7, "text-anchor": end ? "end" : "middle" }, this.axis === "step" ? short(tick) : seconds(tick)));
    }
    for (const line of this.lines) {
      if (line.shown !== line.y) this.svg.append(this.path(line, line.y, " raw"));
      this.svg.append(this.path(line, line.shown, ""));
    }
    this.cross = svg("line", { class: "cross", y1: TOP, y2: H - BOTTOM, visibility: "hidden" });
    this.svg.append(this.cross);
    this.svg.setAttribute("aria-label", `${this.spec.title}: ` + this.lines.map((line) => { const known = line.shown.filter((value) => value !== null); return `${line.label} from ${short(known[0])} to ${short(known.at(-1))}`; }).join(", "));
    this.tell(null);
  }
  path(line, values, extra) {
    let pen = "M", d = "";
    values.forEach((value, at) => {
      if (value === null) { pen = "M"; return; }
      d += `${pen}${this.x(line.x[at]).toFixed(1)} ${this.y(value).toFixed(1)}`; pen = "L";
    });
    return svg("path", { class: `curve s${line.hue % 8}${dash(line.hue)}${extra}`, d });
  }
  point(event) {
    const box = this.svg.getBoundingClientRect(), wanted = ((event.clientX - box.left) / box.width) * W;
    let best = null;
    for (const line of this.lines) for (const at of line.x) if (best === null || Math.abs(this.x(at) - wanted) < Math.abs(this.x(best) - wanted)) best = at;
    this.tell(best);
  }
  tell(at) {
    this.cross.setAttribute("visibility", at === null ? "hidden" : "visible");
    if (at !== null) for (const end of ["x1", "x2"]) this.cross.setAttribute(end, this.x(at));
    const items = this.lines.map((line) => {
      const value = at === null ? null : line.y[nearest(line.x, at)];
      return html("span", "", html("i", `swatch f${line.hue % 8}`), line.label || this.spec.title.toLowerCase(), ...(at === null ? [] : [" ", html("b", "", short(value))]));
    });
    if (at !== null) items.unshift(html("span", "", this.axis === "step" ? `step ${at}` : `after ${seconds(at)}`));
    this.legend.replaceChildren(...items);
  }
}
function nearest(sorted, wanted) {
  let best = 0;
  sorted.forEach((value, at) => { if (Math.abs(value - wanted) < Math.abs(sorted[best] - wanted)) best = at; });
  return best;
}

/** Predicted against actual lengths; both axes have two classes for each doubling of tokens. */
function lengthGrid(node, cells) {
  const all = cells.flatMap(([predicted, actual]) => [predicted, actual]), low = Math.min(...all) - 0.5, high = Math.max(...all) + 1.5;
  const most = Math.max(...cells.map((cell) => cell[2])), size = 252, left = 52, bottom = 34, unit = (size - 8) / (high - low);
  const x = (index) => left + (index - low) * unit, y = (index) => 8 + (high - index) * unit, drawn = svg("svg", { viewBox: `0 0 ${W} ${size + bottom + 8}`, role: "img", "aria-label": node.dataset.said });
  for (const [predicted, actual, count] of cells) {
    const cell = svg("rect", { class: "f0", x: x(predicted) + 0.5, y: y(actual + 1) + 0.5, width: unit - 1, height: unit - 1, rx: 2, "fill-opacity": 0.12 + 0.88 * Math.sqrt(count / most) });
    cell.append(svg("title", {}, `predicted about ${tokens(predicted)}, actually about ${tokens(actual)} tokens: ${count} completions`));
    drawn.append(cell);
  }
  drawn.append(svg("line", { class: "even", x1: x(low), y1: y(low), x2: x(high), y2: y(high) }));
  const every = Math.max(2, 2 * Math.ceil((high - low) / 16));
  for (let index = Math.ceil(low / 2) * 2; index < high; index += every) {
    drawn.append(svg("text", { x: x(index + 0.5), y: size + 16, "text-anchor": "middle" }, short(tokens(index))), svg("text", { x: left - 6, y: y(index + 0.5) + 4, "text-anchor": "end" }, short(tokens(index))));
  }
  drawn.append(svg("text", { x: left + size / 2, y: size + 33, "text-anchor": "middle" }, "predicted tokens"), svg("text", { x: 12, y: size / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${size / 2})` }, "actual tokens"));
  node.append(drawn);
}
const tokens = (index) => Math.round(2 ** (index / 2));

/** Trained trajectories by age; columns of several runs beside each other. */
function stalenessColumns(node, runs) {
  const most = Math.max(3, ...runs.flatMap((each) => each.counts.map(([age]) => age)));
  const totals = runs.map((each) => each.counts.reduce((sum, [, count]) => sum + count, 0));
  const peak = Math.max(...runs.flatMap((each, at) => each.counts.map(([, count]) => count / totals[at])));
  const room = (W - LEFT - RIGHT) / (most + 1), wide = (room * 0.76) / runs.length, full = H - BOTTOM - TOP - 16;
  const drawn = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": "Staleness of trained trajectories" });
  for (let age = 0; age <= most; age += 1) {
    drawn.append(svg("text", { x: LEFT + (age + 0.5) * room, y: H - 7, "text-anchor": "middle" }, String(age)));
    runs.forEach((each, at) => {
      const count = new Map(each.counts).get(age) ?? 0, share = count / totals[at], height = (share / peak) * full, left = LEFT + age * room + room * 0.12 + at * wide;
      if (!count) return;
      drawn.append(svg("rect", { class: `f${each.run % 8}`, x: left + 1, y: H - BOTTOM - height, width: Math.max(1, wide - 2), height, rx: 2 }));
      if (wide > 26) drawn.append(svg("text", { class: "strong", x: left + wide / 2, y: H - BOTTOM - height - 5, "text-anchor": "middle" }, share < 0.005 ? "<1%" : `${Math.round(share * 100)}%`));
    });
  }
  drawn.append(svg("line", { class: "grid-line", x1: LEFT, x2: W - RIGHT, y1: H - BOTTOM, y2: H - BOTTOM }));
  if (runs.length > 1) node.append(html("div", "legend", ...runs.map((each) => html("span", "", html("i", `swatch f${each.run % 8}`), DATA.runs[each.run].name))));
  node.append(drawn);
}
