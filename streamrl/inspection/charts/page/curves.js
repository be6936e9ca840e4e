// Lines over steps or over time, with gaps where values are missing, and the values under the cursor.
import { colour } from "./elements.js";
import { axis, moments, paint, plot, TIMES, WHOLE } from "./plot.js";
import { short, span } from "./words.js";

const AXES = {
  step: { incrs: WHOLE, values: (_chart, ticks) => ticks.map(short), named: (at) => `step ${at}` },
  time: { incrs: TIMES, values: moments, named: (at) => `after ${span(at)}` },
};

/**
 * Draw lines into a box. Returns a function that draws other points of the same lines.
 * A line has `name`, `hue`, `x`, `y` and may have `smooth` (drawn boldly over `y`), `dash`, `width`, `filled`, `ends` (in a dot).
 * `marks`: vertical lines, each [x, hue].
 */
export function curves(box, lines, { label, height, over, marks = [] }) {
  const { incrs, values, named } = AXES[over];
  const options = {
    label, height, named: true,
    hooks: { draw: [(chart) => rule(chart, marks)] },
    scales: { x: { time: false }, y: { range: (_chart, low, high) => roomy(low, high) } },
    axes: [axis({ incrs, values, grid: { show: false } }), axis({ size: 46, values: (_chart, ticks) => ticks.map(short) })],
    series: [{ class: "at", value: (_chart, at) => (at === null ? "" : named(at)) }, ...lines.flatMap((line) => (line.smooth ? [pale(line), bold(line)] : [bold(line)]))],
  };
  const chart = plot(box, options, points(lines));
  return (found) => chart.setData(points(found));
}

/** The range of the vertical axis: from zero, unless that would leave the lower half empty. */
function roomy(low, high) {
  const margin = (high - low || Math.abs(high) || 1) * 0.06;
  return [low >= 0 && low <= high * 0.5 ? 0 : low - margin, high + margin];
}

/** Draw the vertical lines of the marks that the horizontal axis reaches. */
function rule(chart, marks) {
  const { top, height } = chart.bbox, { min, max } = chart.scales.x, up = (pixels) => pixels / uPlot.pxRatio;
  paint(chart, (g, across) => {
    g.setLineDash([4, 3]); g.lineWidth = 1.5;
    for (const [at, hue] of marks.filter(([at]) => at >= min && at <= max)) {
      g.strokeStyle = colour(hue);
      g.beginPath(); g.moveTo(across(at), up(top)); g.lineTo(across(at), up(top + height)); g.stroke();
    }
  });
}

const points = (lines) => uPlot.join(lines.map((line) => (line.smooth ? [line.x, line.y, line.smooth] : [line.x, line.y])));

function bold({ name, hue, dash, width = 1.8, filled, ends, smooth }) {
  return {
    label: name, hue, dash, width, class: smooth && "unnamed", value: (_chart, value) => (typeof value === "number" ? short(value) : ""),
    stroke: () => colour(hue), fill: filled && (() => `${colour(hue)}1f`),
    points: { show: false, size: 6, width: 0, fill: () => colour(hue), filter: (chart, at) => dots(chart.data[at], ends) },
  };
}

/** The line of the exact values. The legend shows these, so the smoothed line has no name. */
const pale = (line) => ({ ...bold({ ...line, filled: false, ends: false, smooth: null }), width: 1.1, alpha: 0.35 });

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
