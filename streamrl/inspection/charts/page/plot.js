// Code that all charts share: uPlot in a box of the page, as wide as the box, in the colours of the page's scheme.
import { colour, forgetColours } from "./elements.js";
import { span } from "./words.js";

const LEGEND = 22;  // height of a legend's line in pixels
export const FONT = "11px ui-sans-serif, system-ui, sans-serif";
export const WHOLE = [...Array(8).keys()].flatMap((power) => [1, 2, 5].map((unit) => unit * 10 ** power));
export const TIMES = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400];
const charts = new Map();
const watcher = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const chart = charts.get(target);
    if (chart.width !== target.clientWidth) chart.setSize({ width: target.clientWidth, height: chart.height });
  }
});

/**
 * Draw a chart in `box`, in place of an earlier one. `label`: the description for screen readers; `height`: including
 * the legend, which names the lines if `named`. Other options are uPlot's.
 */
export function plot(box, { label, height, named = false, ...options }, data) {
  charts.get(box)?.destroy();
  const common = {
    width: box.clientWidth, height: height - (named ? LEGEND : 0), padding: [8, 14, 0, 0], cursor: { y: false, drag: { x: false } },
    legend: { show: named, markers: { width: 0, fill: (chart, at) => `var(--${chart.series[at].hue})` }, mount: (chart, legend) => chart.root.prepend(legend) },
  };
  const chart = new uPlot(uPlot.assign(common, options), data, box);
  chart.ctx.canvas.setAttribute("role", "img");
  chart.ctx.canvas.setAttribute("aria-label", label);
  charts.set(box, chart);
  watcher.observe(box);
  return chart;
}

export function axis(options) {
  const line = () => ({ stroke: () => colour("grid"), width: 1 });
  const common = { stroke: () => colour("muted"), font: FONT, ticks: { show: false }, size: 24, grid: line(), border: line() };
  return uPlot.assign(common, options);
}

/** Labels for the ticks of a time axis, as exact as the ticks' distance. */
export const moments = (_chart, ticks, _axis, _space, apart) => ticks.map((at) => (apart < 1 ? `${+at.toFixed(2)} s` : span(at)));

/** Paint on a chart's canvas, in CSS pixels, and restore the context's state. */
export function paint(chart, draw) {
  const g = chart.ctx;
  g.save();
  g.scale(uPlot.pxRatio, uPlot.pxRatio);
  g.font = FONT; g.textAlign = "left"; g.textBaseline = "middle";
  draw(g, (at) => chart.valToPos(at, "x", true) / uPlot.pxRatio, (at) => chart.valToPos(at, "y", true) / uPlot.pxRatio);
  g.restore();
}

/** Draw all charts again, in new colours. It sets their data again, because uPlot keeps columns' colours with their paths. */
export function repaint() {
  forgetColours();
  for (const chart of charts.values()) chart.setData(chart.data);
}
for (const media of ["(prefers-color-scheme: dark)", "print"]) matchMedia(media).addEventListener("change", repaint);
