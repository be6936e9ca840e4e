// The live timeline. It follows the present until the user moves it. Wheel, dragging and keys zoom and move it.
import { text } from "/charts/elements.js";
import { AXIS, Lanes } from "/charts/lanes.js";
import { TIMES } from "/charts/plot.js";
import { clock } from "/charts/words.js";

const HEIGHT = 230, SHOWN_S = 60, MOST_S = 86400, NEAR_PRESENT = 0.93, MEANT = 3, LOWEST = 16, HIGHEST = 30, SCROLL = 24;
const ticks = { incrs: TIMES, values: (_chart, found, _axis, _space, apart) => found.map((at) => clock(at) + (apart < 1 ? (at % 1).toFixed(2).slice(1) : "")) };

export class Timeline extends Lanes {
  following = true;
  visible = true;

  constructor(box, tip, onFollow) {
    super(box, { height: HEIGHT, view: [-SHOWN_S, 0], most: MOST_S, label: "Timeline of every process", ticks });
    Object.assign(this, { tip, onFollow });
    box.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    box.addEventListener("pointerdown", (event) => { box.setPointerCapture(event.pointerId); this.drag = [event.clientX, event.clientY, this.begin, this.top]; });
    box.addEventListener("pointerup", () => { this.drag = null; });
    box.addEventListener("pointermove", (event) => { if (this.drag) this.pull(event, ...this.drag); });
    new IntersectionObserver(([entry]) => { this.visible = entry.isIntersecting; }).observe(box);
  }

  get laneHeight() { return Math.max(LOWEST, Math.min(HIGHEST, (HEIGHT - AXIS) / Math.max(1, this.lanes.length))); }
  /** Of each process the newest stretches are kept: what it did before the oldest of them is not known. */
  hold(lanes) {
    super.hold(lanes.map((lane) => ({ ...lane, rest: lane.name === "coordinator" ? null : "wait", since: lane.stretches[0]?.[0] ?? Infinity })));
  }
  follow(wanted) { this.following = wanted; this.onFollow(wanted); }
  /** Follow the present. Nothing is drawn while the timeline is not visible. */
  advance(now) { if (this.following && this.visible) this.show(now - this.width, now); }

  zoom(factor, at) { super.zoom(factor, this.following ? 1 : at); }
  shift(part) { this.follow(false); super.shift(part); }
  all() {
    const times = this.lanes.flatMap(({ stretches, marks }) => [stretches[0]?.[0], stretches.at(-1)?.[1], marks[0]?.[0]]).filter(Boolean);
    if (!times.length) return;
    this.follow(false);
    this.show(Math.min(...times), Math.max(...times));
  }
  scrollTo(pixels) {
    this.top = Math.max(0, Math.min(pixels, this.lanes.length * this.laneHeight + AXIS - HEIGHT));
    this.plot.redraw();
  }
  keys() {
    return { ...super.keys(), End: () => this.follow(true), ArrowUp: () => this.scrollTo(this.top - SCROLL), ArrowDown: () => this.scrollTo(this.top + SCROLL) };
  }
  wheel(event) {
    event.preventDefault();
    const { left, width } = this.plot.over.getBoundingClientRect();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) { this.shift((event.deltaX || event.deltaY) / width); return; }
    const at = Math.max(0, Math.min(1, (event.clientX - left) / width));
    if (at < NEAR_PRESENT) this.follow(false);
    this.zoom(Math.exp(event.deltaY / 400), at);
  }
  pull(event, x, y, begin, top) {
    const moved = event.clientX - x, from = begin - (moved / this.plot.over.clientWidth) * this.width;
    this.scrollTo(top + y - event.clientY);
    if (this.following && Math.abs(moved) > MEANT) this.follow(false);
    if (!this.following) this.show(from, from + this.width);
  }

  moment(at) { return clock(at); }
  tell(words, x, y) {
    this.tip.hidden = !words;
    if (!words) return;
    text(this.tip, words);
    this.tip.style.left = `${Math.min(x + 12, this.box.clientWidth - this.tip.offsetWidth - 4)}px`;
    this.tip.style.top = `${Math.max(0, y - 30)}px`;
  }
}
