// The timeline: a lane for each process, zoomed and moved by wheel, drag and keys; it follows the present until moved.
import { clock, colour, pen, span } from "./draw.js";

const LABEL = 118, AXIS = 22, LEAST = 0.25, MOST = 86400;
export const KINDS = { generate: "generates", wait: "waits", train: "trains", optimizer: "optimizer", checkpoint: "checkpoint", publish: "publishes weights" };
const MARKS = { adopt: "adopt", announce: "publish", step: "train", refused: "bad", pause: "warn", drain: "warn", run: "good" };

export class Timeline {
  constructor(canvas, tip, onFollow) {
    Object.assign(this, { canvas, tip, onFollow, lanes: [], width: 60, end: 0, following: true, visible: true, scroll: 0 });
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); this.drag = [event.clientX, event.clientY, this.end, this.scroll]; });
    canvas.addEventListener("pointerup", () => { this.drag = null; });
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
    canvas.addEventListener("keydown", (event) => this.key(event));
    new IntersectionObserver(([entry]) => { this.visible = entry.isIntersecting; }).observe(canvas);
  }

  get room() { return Math.max(50, this.canvas.clientWidth - LABEL - 8); }
  laneHeight(height) { return Math.max(16, Math.min(30, (height - AXIS) / Math.max(1, this.lanes.length))); }
  follow(wanted) { this.following = wanted; this.onFollow(wanted); this.dirty = true; }

  zoom(factor, at = 1) {
    const width = Math.min(MOST, Math.max(LEAST, this.width * factor));
    if (!this.following) this.end += (this.width - width) * (at - 1);
    this.width = width; this.dirty = true;
  }
  shift(seconds) { this.follow(false); this.end += seconds; this.dirty = true; }
  all() {
    const times = this.lanes.flatMap((lane) => [lane.stretches[0]?.[0], lane.stretches.at(-1)?.[1], lane.marks[0]?.[0]]).filter(Boolean);
    if (!times.length) return;
    this.follow(false);
    this.end = Math.max(...times); this.width = Math.max(LEAST, this.end - Math.min(...times)) * 1.02; this.dirty = true;
  }

  wheel(event) {
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) return this.shift(((event.deltaX || event.deltaY) / this.room) * this.width);
    const at = Math.min(1, Math.max(0, (event.offsetX - LABEL) / this.room));
    const moment = this.end - this.width * (1 - at), width = Math.min(MOST, Math.max(LEAST, this.width * Math.exp(event.deltaY / 400)));
    if (at < 0.93) this.follow(false);
    if (!this.following) this.end = moment + width * (1 - at);
    this.width = width; this.dirty = true;
  }
  key(event) {
    const part = this.width / 8;
    const actions = {
      ArrowLeft: () => this.shift(-part), ArrowRight: () => this.shift(part), "+": () => this.zoom(0.7, 0.5), "=": () => this.zoom(0.7, 0.5),
      "-": () => this.zoom(1.4, 0.5), Home: () => this.all(), End: () => this.follow(true),
      ArrowUp: () => this.scrollBy(-24), ArrowDown: () => this.scrollBy(24),
    };
    if (!actions[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault(); actions[event.key]();
  }
  scrollBy(pixels) {
    const height = this.canvas.clientHeight, over = this.lanes.length * this.laneHeight(height) + AXIS - height;
    this.scroll = Math.max(0, Math.min(Math.max(0, over), this.scroll + pixels)); this.dirty = true;
  }
  move(event) {
    if (this.drag) {
      const [x, y, end, scroll] = this.drag;
      if (Math.abs(event.clientX - x) > 3 || !this.following) { if (this.following) this.follow(false); this.end = end - ((event.clientX - x) / this.room) * this.width; }
      this.scroll = scroll; this.scrollBy(y - event.clientY);
      this.dirty = true;
    }
    this.point(event.offsetX, event.offsetY);
  }
  point(x, y) {
    const h = this.laneHeight(this.canvas.clientHeight), lane = this.lanes[Math.floor((y + this.scroll) / h)];
    const at = this.end - this.width * (1 - (x - LABEL) / this.room), near = (this.width / this.room) * 4;
    let said = null;
    if (lane && x > LABEL) {
      const mark = lane.marks.find(([time]) => Math.abs(time - at) < near);
      const stretch = lane.stretches.find(([from, to]) => from <= at && at <= to);
      if (mark) said = `${mark[2]} · ${clock(mark[0])}`;
      else if (stretch) said = `${lane.name} ${KINDS[stretch[2]] ?? stretch[2]} ${span(stretch[1] - stretch[0])} · ${stretch[2] === "generate" ? "weights" : "step"} ${stretch[3]} · ${clock(stretch[0])}`;
    }
    this.tip.hidden = !said;
    if (!said) return;
    this.tip.textContent = said;
    this.tip.style.left = `${Math.min(x + 12, this.canvas.clientWidth - this.tip.offsetWidth - 4)}px`;
    this.tip.style.top = `${Math.max(0, y - 30)}px`;
  }

  draw(now) {
    if (this.following) this.end = now;
    if (!this.visible) return;
    this.dirty = false;
    const { g, width, height } = pen(this.canvas), begin = this.end - this.width, scale = this.room / this.width;
    const x = (at) => LABEL + (at - begin) * scale, h = this.laneHeight(height);
    this.axis(g, x, begin, height);
    g.save(); g.beginPath(); g.rect(0, 0, width, height - AXIS); g.clip();
    this.lanes.forEach((lane, index) => {
      const y = index * h - this.scroll;
      if (y > height || y + h < 0) return;
      g.textAlign = "left"; g.fillStyle = colour("text");
      g.fillText(lane.name.length > 16 ? `${lane.name.slice(0, 15)}…` : lane.name, 2, y + h / 2);
      g.save(); g.beginPath(); g.rect(LABEL, 0, this.room, height); g.clip();
      this.lane(g, lane, x, y + 3, h - 6, begin);
      g.restore();
    });
    g.restore();
  }
  lane(g, lane, x, y, h, begin) {
    if (lane.name !== "coordinator") { g.fillStyle = colour("wait"); g.globalAlpha = 0.45; g.fillRect(LABEL, y, this.room, h); g.globalAlpha = 1; }
    let drawn = -1;
    for (const [from, to, kind, tag] of lane.stretches) {
      if (to < begin || from > this.end || kind === "wait") continue;
      const left = Math.max(LABEL, x(from)), right = Math.max(left + 0.8, x(to));
      if (right - left < 1 && right < drawn) continue;
      g.fillStyle = colour(kind === "generate" && tag % 2 ? "generate-2" : kind);
      g.fillRect(left, y, right - left, h);
      drawn = right;
    }
    let last = -9;
    for (const [at, kind] of lane.marks) {
      if (at < begin || at > this.end || (kind === "step" && this.width > 5)) continue;
      const where = x(at);
      if (where - last < 2) continue;
      last = where;
      g.fillStyle = colour(MARKS[kind] ?? "muted");
      if (kind === "step") { g.fillRect(where, y, 1, h); continue; }
      g.beginPath(); g.moveTo(where - 4, y - 2); g.lineTo(where + 4, y - 2); g.lineTo(where + 0.8, y + 5); g.lineTo(where + 0.8, y + h); g.lineTo(where - 0.8, y + h); g.lineTo(where - 0.8, y + 5); g.fill();
    }
  }
  axis(g, x, begin, height) {
    const units = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200];
    const unit = units.find((each) => (this.room / this.width) * each > 84) ?? 86400;
    g.strokeStyle = colour("grid"); g.fillStyle = colour("muted"); g.lineWidth = 1; g.textAlign = "center";
    for (let at = Math.ceil(begin / unit) * unit; at <= this.end; at += unit) {
      const where = Math.round(x(at)) + 0.5;
      g.beginPath(); g.moveTo(where, 0); g.lineTo(where, height - AXIS + 4); g.stroke();
      if (where > LABEL + 20 && where < LABEL + this.room - 24) g.fillText(clock(at) + (unit < 1 ? (at % 1).toFixed(2).slice(1) : ""), where, height - 9);
    }
  }
}
