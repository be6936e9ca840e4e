// Who did what when, of one run or several below each other on one scale; zoomed by dragging, buttons and keys.
const WORDS = { generate: "generates", train: "forward, backward", optimizer: "optimizer", publish: "publishes weights", checkpoint: "checkpoint", other: "other", wait: "waits" };
const WIDE = 1180, LABEL = 116, LANE = 20, GAP = 7, HEAD = 24;

class Timeline {
  constructor(node, runs) {
    this.said = html("div", "legend");
    this.runs = runs.filter((run) => run.lanes.length);
    this.whole = Math.max(...this.runs.map((run) => run.end));
    [this.begin, this.end] = [0, this.whole];
    this.rows = [];
    let y = 4;
    for (const run of this.runs) {
      if (this.runs.length > 1) { this.rows.push({ y, title: DATA.runs[run.run].name }); y += HEAD; }
      for (const lane of run.lanes) { this.rows.push({ y, lane, stretches: unpacked(lane) }); y += LANE + GAP; }
    }
    this.height = y + 20;
    this.svg = svg("svg", { viewBox: `0 0 ${WIDE} ${this.height}`, tabindex: 0, role: "application", "aria-roledescription": "timeline", "aria-label": "Timeline. Plus and minus zoom, arrows move, Home shows all." });
    for (const [name, action] of [["pointerdown", (e) => this.down(e)], ["pointermove", (e) => this.move(e)], ["pointerup", () => this.up()], ["pointerleave", () => this.tell(null)], ["dblclick", () => this.show(0, this.whole)], ["keydown", (e) => this.key(e)]]) this.svg.addEventListener(name, action);
    const tools = html("div", "tools", ...[["−", "zoom out", () => this.zoom(2)], ["+", "zoom in", () => this.zoom(0.5)], ["←", "earlier", () => this.shift(-0.25)], ["→", "later", () => this.shift(0.25)], ["all", "show all", () => this.show(0, this.whole)]].map(([word, label, action]) => {
      const button = html("button", "", word); button.setAttribute("aria-label", label); button.addEventListener("click", action); return button;
    }), html("small", "", "drag over a stretch of time to look closer"));
    node.append(this.said, this.svg, tools);
    this.show(0, this.whole);
    this.tell(null);
  }
  x(at) { return LABEL + ((at - this.begin) / (this.end - this.begin)) * (WIDE - LABEL - 8); }
  at(event) {
    const box = this.svg.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * WIDE;
    return [this.begin + ((x - LABEL) / (WIDE - LABEL - 8)) * (this.end - this.begin), ((event.clientY - box.top) / box.height) * this.height, x];
  }
  show(begin, end) {
    const width = Math.min(this.whole, Math.max(5, end - begin));
    this.begin = Math.max(0, Math.min(begin, this.whole - width)); this.end = this.begin + width;
    this.draw();
  }
  zoom(factor) { const half = ((this.end - this.begin) / 2) * factor, middle = (this.begin + this.end) / 2; this.show(middle - half, middle + half); }
  shift(part) { const by = (this.end - this.begin) * part; this.show(this.begin + by, this.end + by); }
  key(event) {
    const actions = { "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), ArrowLeft: () => this.shift(-0.25), ArrowRight: () => this.shift(0.25), Home: () => this.show(0, this.whole) };
    if (!actions[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault(); actions[event.key]();
  }
  down(event) { const [at, , x] = this.at(event); if (x >= LABEL && event.button === 0) { this.from = at; this.svg.setPointerCapture(event.pointerId); } }
  up() {
    const { from, to } = this;
    this.from = this.to = undefined;
    if (to !== undefined && Math.abs(this.x(to) - this.x(from)) > 6) this.show(Math.min(from, to), Math.max(from, to));
    else this.draw();
  }
  move(event) {
    const [at, y] = this.at(event);
    if (this.from !== undefined) { this.to = Math.max(this.begin, Math.min(this.end, at)); this.draw(); return; }
    const row = this.rows.find((each) => each.lane && y >= each.y - GAP / 2 && y < each.y + LANE + GAP / 2);
    if (!row || at < this.begin) { this.tell(null); return; }
    const near = ((this.end - this.begin) / WIDE) * 4, mark = row.lane.marks.find(([when]) => Math.abs(when - at) < near);
    const found = row.stretches.find((each) => each.start <= at && at <= each.start + each.length);
    const doing = found ? `${WORDS[found.kind]} for ${seconds(found.length / 1000, true)}` : row.lane.name === "trainer" ? "other" : "waits";
    this.tell(`${row.lane.name} · after ${seconds(at / 1000, true)} · ${doing}${mark ? ` · adopts weights ${mark[1]}` : ""}`);
  }
  tell(text) {
    if (text) { this.said.replaceChildren(html("b", "", text)); return; }
    const kinds = Object.keys(WORDS).filter((kind) => kind === "wait" || kind === "other" || this.rows.some((row) => row.lane?.kinds[kind]));
    const marks = this.rows.some((row) => row.lane?.marks.length) ? [html("span", "", html("i", "swatch k-mark"), "adopts weights")] : [];
    this.said.replaceChildren(...kinds.map((kind) => html("span", "", html("i", `swatch k-${kind}`), WORDS[kind])), ...marks);
  }
  draw() {
    this.svg.replaceChildren();
    const bottom = this.height - 20;
    for (const tick of timeTicks(this.begin / 1000, this.end / 1000, 10)) {
      const x = this.x(tick * 1000);
      this.svg.append(svg("line", { class: "grid-line", x1: x, x2: x, y1: 0, y2: bottom }), svg("text", { x: Math.min(x, WIDE - 18), y: this.height - 5, "text-anchor": "middle" }, seconds(tick, this.end - this.begin < 2e4)));
    }
    for (const row of this.rows) {
      if (row.title) { this.svg.append(svg("text", { class: "title", x: 2, y: row.y + 16 }, row.title)); continue; }
      const name = row.lane.name.length > 16 ? `${row.lane.name.slice(0, 15)}…` : row.lane.name;
      this.svg.append(svg("text", { class: "strong", x: 2, y: row.y + 14 }, name), svg("rect", { class: row.lane.name === "trainer" ? "k-other" : "k-wait", x: LABEL, y: row.y, width: WIDE - LABEL - 8, height: LANE }));
      for (const [kind, d] of this.paths(row)) this.svg.append(svg("path", { class: `k-${kind}`, d }));
      this.svg.append(svg("path", { class: "k-mark", d: this.marks(row) }));
    }
    if (this.to !== undefined) this.svg.append(svg("rect", { class: "select", x: Math.min(this.x(this.from), this.x(this.to)), width: Math.abs(this.x(this.to) - this.x(this.from)), y: 0, height: bottom }));
  }
  paths(row) {
    const seen = row.stretches.filter((each) => each.start + each.length >= this.begin && each.start <= this.end), found = new Map();
    const add = (kind, left, width, top, height) => found.set(kind, `${found.get(kind) ?? ""}M${left.toFixed(2)} ${top.toFixed(2)}h${width.toFixed(2)}v${height.toFixed(2)}h-${width.toFixed(2)}z`);
    if (seen.length > 2 * WIDE) { this.stacked(row, seen, add); return found; }
    for (const { kind, start, length } of seen) {
      const left = Math.max(LABEL, this.x(start)), right = Math.min(WIDE - 8, this.x(start + length));
      if (right > left) add(kind, left, right - left, row.y, LANE);
    }
    return found;
  }
  /** Where a pixel holds many stretches, it shows their shares, one above the other. */
  stacked(row, seen, add) {
    const columns = Array.from({ length: WIDE - LABEL - 8 }, () => ({})), unit = (this.end - this.begin) / columns.length;
    for (const { kind, start, length } of seen) {
      const first = Math.max(0, Math.floor((start - this.begin) / unit)), last = Math.min(columns.length - 1, Math.floor((start + length - this.begin) / unit));
      for (let at = first; at <= last; at += 1) {
        const inside = Math.min(start + length, this.begin + (at + 1) * unit) - Math.max(start, this.begin + at * unit);
        if (inside > 0) columns[at][kind] = (columns[at][kind] ?? 0) + inside / unit;
      }
    }
    columns.forEach((column, at) => {
      let top = row.y + LANE;
      for (const kind of Object.keys(WORDS)) if (column[kind]) { const height = Math.min(1, column[kind]) * LANE; top -= height; add(kind, LABEL + at, 1, top, height); }
    });
  }
  marks(row) {
    let d = "", last = -9;
    const places = row.lane.marks.map(([at]) => this.x(at)).filter((x) => x >= LABEL && x <= WIDE - 8);
    const roomy = places.length < (WIDE - LABEL) / 20;
    for (const x of places) {
      if (x - last < 1.5) continue;
      last = x;
      d += roomy ? `M${(x - 3.5).toFixed(1)} ${row.y - 3}h7l-2.8 5v${LANE - 2}h-1.4v-${LANE - 2}z` : `M${(x - 0.6).toFixed(1)} ${row.y - 4}h1.2v6h-1.2z`;
    }
    return d;
  }
}
function unpacked(lane) {
  return Object.entries(lane.kinds).flatMap(([kind, packed]) => Array.from({ length: packed.length / 2 }, (_, at) => ({ kind, start: packed[2 * at], length: packed[2 * at + 1] }))).sort((one, other) => one.start - other.start);
}

/** What each process did with its time. */
function shareBars(node, runs) {
  const rows = runs.flatMap((run) => [...(runs.length > 1 && run.bars.length ? [{ title: DATA.runs[run.run].name }] : []), ...run.bars]);
  const drawn = svg("svg", { viewBox: `0 0 ${WIDE} ${rows.length * 27 + 2}`, role: "img", "aria-label": "Shares of time" });
  rows.forEach((row, at) => {
    const y = at * 27 + 4;
    drawn.append(svg("text", { class: row.title ? "title" : "strong", x: 2, y: y + 14 }, row.title ?? (row.name.length > 16 ? `${row.name.slice(0, 15)}…` : row.name)));
    let x = LABEL;
    for (const [kind, share] of row.parts ?? []) {
      const width = share * (WIDE - LABEL - 8), bar = svg("rect", { class: `k-${kind}`, x, y, width, height: 20 });
      bar.append(svg("title", {}, `${WORDS[kind]} ${(share * 100).toFixed(1)} %`));
      drawn.append(bar);
      if (width > 38) drawn.append(svg("text", { class: kind === "wait" || kind === "other" ? "strong" : "on", x: x + width / 2, y: y + 14, "text-anchor": "middle" }, `${Math.round(share * 100)}%`));
      x += width;
    }
  });
  node.append(drawn);
}
