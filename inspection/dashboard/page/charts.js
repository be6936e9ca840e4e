// Curves over steps, the grid of predicted against actual lengths, and the staleness columns.
import { colour, pen, short, ticks } from "./draw.js";

const LEFT = 40, BOTTOM = 20, TOP = 8, RIGHT = 8;

/** Lines over a shared horizontal axis. lines: [{values, colour, fill, width}] */
export function curves(canvas, steps, lines) {
  const { g, width, height } = pen(canvas);
  const known = lines.flatMap((line) => line.values.filter((value) => value !== null));
  if (steps.length < 2 || !known.length) return waiting(g, width, height);
  let low = Math.min(...known), high = Math.max(...known);
  const margin = (high - low || Math.abs(high) || 1) * 0.08;
  low = low >= 0 && low < high * 0.4 ? 0 : low - margin; high += margin;
  const first = steps[0], last = steps[steps.length - 1];
  const x = (step) => LEFT + ((step - first) / (last - first || 1)) * (width - LEFT - RIGHT);
  const y = (value) => height - BOTTOM - ((value - low) / (high - low)) * (height - BOTTOM - TOP);
  g.strokeStyle = colour("grid"); g.fillStyle = colour("muted"); g.lineWidth = 1;
  g.textAlign = "right";
  const levels = ticks(low, high, 4), places = Math.max(0, ...levels.map((tick) => (String(tick).split(".")[1] ?? "").length));
  for (const tick of levels) {
    g.beginPath(); g.moveTo(LEFT, y(tick)); g.lineTo(width - RIGHT, y(tick)); g.stroke();
    g.fillText(high < 1000 ? tick.toFixed(Math.min(4, places)) : short(tick), LEFT - 7, y(tick));
  }
  g.textAlign = "center";
  for (const tick of ticks(first, last, 5)) if (Number.isInteger(tick)) {
    const half = g.measureText(short(tick)).width / 2;
    g.fillText(short(tick), Math.min(x(tick), width - half), height - 7);
  }
  for (const line of lines) path(g, steps, line, x, y, height - BOTTOM);
}

function path(g, steps, line, x, y, floor) {
  const points = steps.map((step, index) => [x(step), line.values[index]]).filter((point) => point[1] !== null);
  if (!points.length) return;
  g.beginPath();
  points.forEach(([at, value], index) => (index ? g.lineTo(at, y(value)) : g.moveTo(at, y(value))));
  g.strokeStyle = line.colour; g.lineWidth = line.width ?? 2; g.lineJoin = "round"; g.stroke();
  if (line.fill) {
    g.lineTo(points[points.length - 1][0], floor); g.lineTo(points[0][0], floor); g.closePath();
    g.globalAlpha = 0.12; g.fillStyle = line.colour; g.fill(); g.globalAlpha = 1;
  }
  if (line.dot) {
    const [at, value] = points[points.length - 1];
    g.beginPath(); g.arc(at, y(value), 3.5, 0, 7); g.fillStyle = line.colour; g.fill();
  }
}

/** A running mean, for the bold line over the pale one. */
export function smooth(values, reach) {
  let mean = null;
  return values.map((value) => (value === null ? mean : (mean = mean === null ? value : mean + (value - mean) / reach)));
}

export function grid(canvas, cells) {
  const { g, width, height } = pen(canvas);
  if (!cells.length) return waiting(g, width, height);
  const all = cells.flatMap(([p, a]) => [p, a]), low = Math.max(0, Math.min(...all) - 1), high = Math.max(...all) + 2;
  const most = Math.max(...cells.map((cell) => cell[2])), w = (width - LEFT - RIGHT) / (high - low);
  const h = (height - BOTTOM - TOP) / (high - low);
  const x = (index) => LEFT + (index - low) * w, y = (index) => height - BOTTOM - (index - low) * h;
  const heat = colour("heat");
  g.strokeStyle = colour("muted"); g.setLineDash([3, 4]); g.globalAlpha = 0.6;
  g.beginPath(); g.moveTo(x(low), y(low)); g.lineTo(x(high), y(high)); g.stroke(); g.setLineDash([]); g.globalAlpha = 1;
  for (const [predicted, actual, count] of cells) {
    g.fillStyle = `rgba(${heat}, ${0.12 + 0.88 * Math.sqrt(count / most)})`;
    g.beginPath(); g.roundRect(x(predicted) + 1, y(actual + 1) + 1, Math.max(1, w - 2), Math.max(1, h - 2), 2); g.fill();
  }
  g.fillStyle = colour("muted");
  const every = Math.max(2, 2 * Math.ceil((high - low) / 12));
  for (let index = Math.ceil(low / 2) * 2; index < high; index += every) {
    const tokens = short(Math.round(2 ** (index / 2)));
    g.textAlign = "center"; g.fillText(tokens, x(index + 0.5), height - 7);
    g.textAlign = "right"; g.fillText(tokens, LEFT - 7, y(index + 0.5));
  }
  g.textAlign = "left"; g.fillText("actual ↑", LEFT + 4, TOP + 4);
  g.textAlign = "right"; g.fillText("predicted →", width - RIGHT - 2, height - BOTTOM - 8);
}

export function columns(canvas, counts) {
  const { g, width, height } = pen(canvas);
  const total = counts.reduce((sum, [, count]) => sum + count, 0);
  if (!total) return waiting(g, width, height);
  const most = Math.max(4, ...counts.map(([age]) => age)), peak = Math.max(...counts.map(([, count]) => count)) / total;
  const w = (width - LEFT - RIGHT) / (most + 1), full = height - BOTTOM - TOP - 16;
  g.strokeStyle = colour("grid");
  g.beginPath(); g.moveTo(LEFT, height - BOTTOM + 0.5); g.lineTo(width - RIGHT, height - BOTTOM + 0.5); g.stroke();
  g.textAlign = "center";
  const found = new Map(counts);
  for (let age = 0; age <= most; age += 1) {
    const share = (found.get(age) ?? 0) / total, h = (share / peak) * full, at = LEFT + age * w + w / 2;
    g.fillStyle = colour("train");
    g.beginPath(); g.roundRect(at - w * 0.34, height - BOTTOM - h, w * 0.68, h, [4, 4, 0, 0]); g.fill();
    g.fillStyle = colour("muted"); g.fillText(String(age), at, height - 7);
    if (share) { g.fillStyle = colour("text"); g.fillText(share < 0.005 ? "<1%" : `${Math.round(share * 100)}%`, at, height - BOTTOM - h - 8); }
  }
}

function waiting(g, width, height) {
  g.fillStyle = colour("muted"); g.textAlign = "center"; g.fillText("nothing yet", width / 2, height / 2);
}
