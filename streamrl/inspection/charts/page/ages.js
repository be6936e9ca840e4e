// Trained trajectories by their age in steps: shares as columns, with several runs side by side.
import { colour } from "./elements.js";
import { axis, paint, plot, WHOLE } from "./plot.js";

const LEAST = 4, ROOM = 0.76, NARROW = 24;
const percent = (share) => (share < 0.005 ? "<1%" : `${Math.round(share * 100)}%`);

/** Draw runs, each with `name`, `hue` and `counts` by age, into a box. Returns a function that draws new counts. */
export function ages(box, runs, { label, height }) {
  const options = {
    label, height, named: runs.length > 1,
    scales: { x: { time: false, range: (_chart, first, last) => [first - 0.5, last + 0.5] }, y: { range: (_chart, _least, most) => [0, (most || 1) * 1.15] } },
    axes: [axis({ incrs: WHOLE, grid: { show: false }, border: { show: true } }), { show: false }],
    series: [{}, ...runs.map((run, place) => column(run, place, runs.length))],
    legend: { live: false },
    cursor: { show: false },
    hooks: { draw: [(chart) => paint(chart, (g, x, y) => shares(chart, g, x, y))] },
  };
  const chart = plot(box, options, columns(runs));
  return (found) => chart.setData(columns(found));
}

function columns(runs) {
  const most = Math.max(LEAST, ...runs.flatMap((run) => run.counts.map(([age]) => age))), all = [...Array(most + 1).keys()];
  return [all, ...runs.map(({ counts }) => {
    const total = counts.reduce((sum, [, count]) => sum + count, 0), found = new Map(counts);
    return all.map((age) => ((found.get(age) ?? 0) / total || null));
  })];
}

function column({ name, hue }, place, runs) {
  const wide = ROOM / runs, left = place * wide - ROOM / 2;
  const where = (chart) => chart.data[0].map((age) => age + left), size = (chart) => chart.data[0].map(() => wide * 0.92);
  return {
    label: name, hue, left, wide, width: 0, fill: () => colour(hue), points: { show: false },
    paths: uPlot.paths.bars({ radius: 0.06, disp: { x0: { unit: 1, values: where }, size: { unit: 1, values: size } } }),
  };
}

/** Write the share above each column, if columns are wide enough. */
function shares(chart, g, x, y) {
  g.fillStyle = colour("text");
  g.textAlign = "center";
  chart.series.slice(1).forEach(({ left, wide }, place) => {
    if (x(wide) - x(0) < NARROW) return;
    chart.data[place + 1].forEach((share, age) => { if (share) g.fillText(percent(share), x(age + left + wide / 2), y(share) - 8); });
  });
}
