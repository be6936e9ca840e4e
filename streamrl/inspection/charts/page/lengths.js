// Predicted against actual lengths in tokens: the more completions a cell holds, the darker it is.
import { colour } from "./elements.js";
import { axis, FONT, paint, plot } from "./plot.js";
import { short } from "./words.js";

/** The length at the middle of a class. There are two classes for each doubling. */
const tokens = (index) => 2 ** (index / 2);

/** Draw cells (predicted class, actual class, count) into a box. Returns a function that draws other cells. */
export function lengths(box, found, { label, height }) {
  let cells = found;
  const scale = { time: false, distr: 3, log: 2, range: (_chart, low, high) => [low, high] };
  const options = {
    label, height, padding: [8, 18, 0, 0],
    scales: { x: scale, y: scale },
    axes: [side("predicted tokens", 22, 34), side("actual tokens", 40, 20)],
    series: [{}, { stroke: () => colour("muted"), width: 1, dash: [3, 4], points: { show: false } }],
    cursor: { x: false, points: { show: false } },
    hooks: { drawAxes: [(chart) => paint(chart, (g, x, y) => fill(cells, g, x, y))], setCursor: [(chart) => { chart.over.title = told(chart, cells); }] },
  };
  const chart = plot(box, options, diagonal(cells));
  return (others) => { cells = others; chart.setData(diagonal(cells)); };
}

function side(label, size, space) {
  const values = (_chart, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick)));
  return axis({ label, labelFont: FONT, labelSize: 16, size, space, grid: { show: false }, splits: doublings, values });
}

/** A line from the shortest class to the longest, on which predictions are right. */
function diagonal(cells) {
  const all = cells.flatMap(([predicted, actual]) => [predicted, actual]), ends = [tokens(Math.min(...all) - 1), tokens(Math.max(...all) + 1)];
  return [ends, ends];
}

function doublings(_chart, _axis, low, high) {
  const first = Math.ceil(Math.log2(low)), last = Math.floor(Math.log2(high));
  return Array.from({ length: last - first + 1 }, (_, place) => 2 ** (first + place));
}

function fill(cells, g, x, y) {
  const most = Math.max(...cells.map(([, , count]) => count));
  g.fillStyle = colour("accent");
  for (const [predicted, actual, count] of cells) {
    const left = x(tokens(predicted - 0.5)), top = y(tokens(actual + 0.5));
    g.globalAlpha = 0.12 + 0.88 * Math.sqrt(count / most);
    g.beginPath();
    g.roundRect(left + 0.5, top + 0.5, Math.max(1, x(tokens(predicted + 0.5)) - left - 1), Math.max(1, y(tokens(actual - 0.5)) - top - 1), 2);
    g.fill();
  }
}

/** Describe the cell under the cursor in words. */
function told(chart, cells) {
  const { left, top } = chart.cursor;
  if (left < 0) return "";
  const [predicted, actual] = [chart.posToVal(left, "x"), chart.posToVal(top, "y")].map((length) => Math.round(2 * Math.log2(length)));
  const cell = cells.find((each) => each[0] === predicted && each[1] === actual);
  return cell ? `predicted about ${short(Math.round(tokens(predicted)))}, actually about ${short(Math.round(tokens(actual)))} tokens: ${cell[2]} completions` : "";
}
