// Lines over steps or over time, with gaps where values are missing, and the values under the cursor.
import { colour } from "./elements.js";
import { axis, moments, paint, plot, TIMES, WHOLE } from "./plot.js";
import { short, span } from "./words.js";

const AXES = {
  step: { incrs: WHOLE, values: (_chart, ticks) => ticks.map(short), named: (at) => `step ${at}` },
  share: { incrs: [0.05, 0.1, 0.2, 0.5], values: (_chart, ticks) => ticks.map(short), named: (at) => `predicted ${short(at)}` },
  time: { incrs: TIMES, values: moments, named: (at) => `after ${span(at)}` },
};

/** Kinds of marks: their word in the legend, and their colour. */
const SIGNS = { promotion: ["promotion", "publish"], restart: ["restart", "bad"], resumed: ["resumed", "good"], settings: ["settings changed", "checkpoint"] };
export const kindsOf = (marks) => Object.keys(SIGNS).filter((kind) => marks.some((mark) => mark[2] === kind));

/**
 * Draw lines into a box. Returns a function that draws other points of the same lines, and other marks of the same kinds.
 * `marks`: [step, seconds, kind, words], drawn across the lines; the words are shown under the cursor.
 * A line has `name`, `hue`, `x`, `y` and may have `smooth` (drawn boldly over `y`), `dash`, `width`, `filled`, `ends` (in a dot).
 */
export function curves(box, lines, { label, height, over, marks = [] }) {
  const { incrs, values, named } = AXES[over], kinds = kindsOf(marks), placed = over === "time" ? 1 : 0;
  const near = (chart, at) => marks.filter((mark) => chart.data[0][chart.valToIdx(mark[placed])] === at).map(([, , , words]) => words);
  const options = {
    label, height, named: true,
    scales: { x: { time: false }, y: { range: (_chart, low, high) => roomy(low, high) } },
    axes: [axis({ incrs, values, grid: { show: false } }), axis({ size: 46, values: (_chart, ticks) => ticks.map(short) })],
    series: [
      { class: "at", value: (chart, at) => (at === null ? "" : [named(at), ...near(chart, at)].join(" · ")) },
      ...lines.flatMap((line) => (line.smooth ? [pale(line), bold({ ...line, ends: false })] : [bold(line)])),
      ...kinds.map((kind) => ({ label: SIGNS[kind][0], hue: SIGNS[kind][1], class: "mark", value: () => "", points: { show: false } })),
    ],
    hooks: { draw: [(chart) => paint(chart, (g, x) => upright(chart, g, x, marks, placed))] },
  };
  const chart = plot(box, options, points(lines, kinds));
  return (found, others = []) => { marks = others; chart.setData(points(found, kinds)); };
}

/** Draw each mark as a dashed line over the height of the plot. */
function upright(chart, g, x, marks, placed) {
  const { left, top, width, height } = chart.bbox, unit = uPlot.pxRatio;
  g.setLineDash([3, 3]);
  for (const mark of marks) {
    const at = x(mark[placed]), kind = mark[2];
    if (at < left / unit || at > (left + width) / unit) continue;
    g.strokeStyle = colour(SIGNS[kind][1]);
    g.beginPath(); g.moveTo(at, top / unit); g.lineTo(at, (top + height) / unit); g.stroke();
  }
}

/** The range of the vertical axis: from zero, unless that would leave the lower half empty. */
function roomy(low, high) {
  const margin = (high - low || Math.abs(high) || 1) * 0.06;
  return [low >= 0 && low <= high * 0.5 ? 0 : low - margin, high + margin];
}

/** The points of all lines. A kind of mark has a line without points, for its place in the legend. */
function points(lines, kinds) {
  const all = uPlot.join(lines.map((line) => (line.smooth ? [line.x, line.y, line.smooth] : [line.x, line.y])));
  return [...all, ...kinds.map(() => all[0].map(() => null))];
}

function bold({ name, hue, dash, width = 1.8, filled, ends, smooth }) {
  return {
    label: name, hue, dash, width, class: smooth && "unnamed", value: (_chart, value) => (typeof value === "number" ? short(value) : ""),
    stroke: () => colour(hue), fill: filled && (() => `${colour(hue)}1f`),
    points: { show: false, size: 6, width: 0, fill: () => colour(hue), filter: (chart, at) => dots(chart.data[at], ends) },
  };
}

/** The line of the exact values. The legend shows these, so the smoothed line has no name. */
const pale = (line) => ({ ...bold({ ...line, filled: false, smooth: null }), width: 1.1, stroke: () => `${colour(line.hue)}59` });

/** Indices of single values between gaps, which no line shows, and of the last value if `ends`. */
function dots(values, ends) {
  const own = [...values.keys()].filter((at) => values[at] !== undefined), known = (place) => typeof values[own[place]] === "number";
  return own.filter((at, place) => known(place) && ((ends && place === own.length - 1) || !(known(place - 1) || known(place + 1))));
}

/** Means over `reach` neighbours on both sides. Both sides, so that no change is drawn later than it happened. */
export function smoothed(values, reach) {
  return values.map((value, at) => {
    if (value === null) return null;
    const near = values.slice(Math.max(0, at - reach), at + reach + 1).filter((each) => each !== null);
    return near.reduce((sum, each) => sum + each, 0) / near.length;
  });
}
