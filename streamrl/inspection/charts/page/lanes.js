// A timeline: a lane of intervals and marks for each process on one time scale, zoomed and moved by keys.
import { colour } from "./elements.js";
import { axis, FONT, paint, plot } from "./plot.js";
import { span } from "./words.js";

export const KINDS = {
  generate: "generates", train: "forward, backward", optimizer: "optimizer", publish: "publishes weights",
  checkpoint: "checkpoint", other: "other", wait: "waits",
};
export const LANE = 27, LABEL = 116, AXIS = 22;
const MARKS = { adopt: "adopt", announce: "publish", step: "train", refused: "bad", pause: "warn", drain: "warn", run: "good" };
const RIGHT = 8, INSET = 3, NEAR = 4, LEAST_S = 0.5, STEPS_SHOWN_BELOW_S = 5;

/**
 * A lane has a `name`, `stretches` ([from, to, kind, tag], in order), `marks` ([at, kind, words]) and `rest`: the kind
 * of its activity outside all stretches, or null; before `since`, if it has that, nothing is known of it. A lane with a
 * `title` instead is a heading.
 */
export class Lanes {
  lanes = [];
  top = 0;

  /** `view`: the range shown at first; `first`, `last`, `most`: bounds of the range, and its largest width. */
  constructor(box, { height, label, ticks, view: [begin, end], first = -Infinity, last = Infinity, most = last - first, drags = false }) {
    Object.assign(this, { box, begin, end, first, last, most });
    this.plot = plot(box, {
      label, height, padding: [0, RIGHT, 0, LABEL],
      scales: { x: { time: false, range: () => [this.begin, this.end] } },
      axes: [axis({ size: AXIS, space: 84, border: { show: false }, ...ticks })],
      series: [{}],
      cursor: { x: false, drag: { x: drags, setScale: false, dist: 6 } },
      hooks: {
        draw: [(chart) => paint(chart, (g, x) => this.paint(g, x))],
        setCursor: [({ cursor }) => this.point(cursor.left, cursor.top)],
        setSelect: [(chart) => this.select(chart)],
      },
    }, [[0, 1]]);
    box.addEventListener("keydown", (event) => this.key(event));
  }

  /** Draw these lanes from now on. */
  hold(lanes) { this.lanes = lanes; this.plot.redraw(); }
  get width() { return this.end - this.begin; }
  get laneHeight() { return LANE; }
  bounded(width) { return Math.min(this.most, Math.max(LEAST_S, width)); }
  show(begin, end) {
    const width = this.bounded(end - begin);
    this.begin = Math.max(this.first, Math.min(begin, this.last - width));
    this.end = this.begin + width;
    this.plot.redraw();
  }
  all() { this.show(this.first, this.last); }
  /** `at`: the point of the view that does not move, from 0 to 1. */
  zoom(factor, at = 0.5) {
    const moment = this.begin + this.width * at, width = this.bounded(this.width * factor);
    this.show(moment - width * at, moment + width * (1 - at));
  }
  shift(part) { this.show(this.begin + this.width * part, this.end + this.width * part); }
  select(chart) {
    const { left, width } = chart.select;
    if (!width) return;
    chart.setSelect({ left: 0, width: 0 }, false);
    this.show(chart.posToVal(left, "x"), chart.posToVal(left + width, "x"));
  }
  keys() {
    return {
      "+": () => this.zoom(0.6), "=": () => this.zoom(0.6), "-": () => this.zoom(1.6),
      ArrowLeft: () => this.shift(-0.2), ArrowRight: () => this.shift(0.2), Home: () => this.all(),
    };
  }
  key(event) {
    const action = this.keys()[event.key];
    if (!action || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    action();
  }

  /** Show a description of a point of the plot. */
  point(x, y) {
    const lane = x < 0 ? undefined : this.lanes[Math.floor((y + this.top) / this.laneHeight)];
    this.tell(lane && !lane.title ? this.words(lane, this.plot.posToVal(x, "x")) : null, LABEL + x, y);
  }
  words(lane, at) {
    const near = (this.width / this.plot.over.clientWidth) * NEAR, mark = lane.marks.find(([when]) => Math.abs(when - at) < near);
    const stretch = lane.stretches.find(([from, to]) => from <= at && at <= to);
    const doing = stretch ? `${KINDS[stretch[2]] ?? stretch[2]} for ${span(stretch[1] - stretch[0])}` : at < lane.since ? null : KINDS[lane.rest];
    const tag = stretch?.[3] === undefined ? null : `${stretch[2] === "generate" ? "weights" : "step"} ${stretch[3]}`;
    return [lane.name, this.moment(at), doing, tag, mark?.[2]].filter(Boolean).join(" · ");
  }

  paint(g, x) {
    const height = this.plot.over.clientHeight, view = { left: LABEL, right: LABEL + this.plot.over.clientWidth, x };
    g.beginPath(); g.rect(0, 0, view.right, height); g.clip();
    this.lanes.forEach((lane, place) => {
      const y = place * this.laneHeight - this.top;
      if (y < height && y + this.laneHeight > 0) this.lane(g, lane, { ...view, y: y + INSET, height: this.laneHeight - 2 * INSET });
    });
  }
  lane(g, lane, view) {
    const name = lane.title ?? (lane.name.length > 16 ? `${lane.name.slice(0, 15)}…` : lane.name);
    g.fillStyle = colour("text");
    g.font = lane.title ? `600 ${FONT}` : FONT;
    g.fillText(name, 2, view.y + view.height / 2);
    if (lane.title) return;
    g.save(); g.beginPath(); g.rect(view.left, 0, view.right - view.left, this.plot.height); g.clip();
    if (lane.rest) {
      const from = lane.since === undefined ? view.left : Math.max(view.left, Math.min(view.right, view.x(lane.since)));
      g.fillStyle = colour(lane.rest);
      g.fillRect(from, view.y, view.right - from, view.height);
    }
    const seen = lane.stretches.filter(([from, to]) => to >= this.begin && from <= this.end);
    if (seen.length > view.right - view.left) this.stacked(g, seen, view); else this.stretches(g, seen, view);
    this.marks(g, lane.marks.filter(([at]) => at >= this.begin && at <= this.end), view);
    g.restore();
  }
  stretches(g, seen, { x, y, height }) {
    for (const [from, to, kind, tag] of seen) {
      g.fillStyle = colour(kind === "generate" && tag % 2 ? "generate-2" : kind);
      g.fillRect(x(from), y, Math.max(0.8, x(to) - x(from)), height);
    }
  }
  /** Draw many stretches per pixel: each pixel shows their shares, stacked. */
  stacked(g, seen, view) {
    const pixels = Array.from({ length: Math.ceil(view.right - view.left) }, () => ({})), unit = this.width / (view.right - view.left);
    for (const [from, to, kind] of seen) {
      const first = Math.max(0, Math.floor((from - this.begin) / unit)), last = Math.min(pixels.length - 1, Math.floor((to - this.begin) / unit));
      for (let at = first; at <= last; at += 1) {
        const inside = Math.min(to, this.begin + (at + 1) * unit) - Math.max(from, this.begin + at * unit);
        pixels[at][kind] = (pixels[at][kind] ?? 0) + inside / unit;
      }
    }
    pixels.forEach((shares, at) => {
      let bottom = view.y + view.height;
      for (const kind of Object.keys(KINDS)) if (shares[kind]) {
        bottom -= shares[kind] * view.height;
        g.fillStyle = colour(kind);
        g.fillRect(view.left + at, bottom, 1, shares[kind] * view.height);
      }
    });
  }
  marks(g, seen, { x, y, height }) {
    let last = -9;
    for (const [at, kind] of seen) {
      const where = x(at);
      if (where - last < 2 || (kind === "step" && this.width > STEPS_SHOWN_BELOW_S)) continue;
      last = where;
      g.fillStyle = colour(MARKS[kind] ?? "muted");
      if (kind === "step") g.fillRect(where, y, 1, height); else pin(g, where, y, height);
    }
  }
}

function pin(g, x, y, height) {
  g.beginPath();
  g.moveTo(x - 4, y - 2); g.lineTo(x + 4, y - 2); g.lineTo(x + 0.8, y + 5); g.lineTo(x + 0.8, y + height);
  g.lineTo(x - 0.8, y + height); g.lineTo(x - 0.8, y + 5);
  g.fill();
}
