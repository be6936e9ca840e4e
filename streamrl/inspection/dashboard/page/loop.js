// Draws the loop: five stations, the pipes between them, and the rate in each pipe.
import { el } from "/charts/elements.js";
import { short } from "/charts/words.js";

const NS = "http://www.w3.org/2000/svg";
const STATIONS = {
  dispatcher: { x: 20, y: 40, w: 170, h: 110, name: "Dispatcher" },
  workers: { x: 340, y: 16, w: 264, h: 158, name: "Workers" },
  log: { x: 764, y: 16, w: 190, h: 158, name: "Trajectory log" },
  trainer: { x: 1064, y: 40, w: 156, h: 110, name: "Trainer" },
  coordinator: { x: 664, y: 214, w: 190, h: 76, name: "Coordinator" },
};
const PIPES = {
  orders: { d: "M190 95 H340", tone: "accent", at: [265, 80], unit: "ordered/s" },
  trajectories: { d: "M604 95 H764", tone: "generate", at: [684, 80], unit: "sampled/s" },
  trained: { d: "M954 95 H1064", tone: "train", at: [1009, 80], unit: "trained/s" },
  steps: { d: "M1142 150 V222 Q1142 252 1112 252 H854", tone: "train", at: [996, 240], unit: "steps/min", inline: true },
  weights: { d: "M664 242 H502 Q472 242 472 212 V174", tone: "publish", at: [576, 230], unit: "weights/min", inline: true },
  room: { d: "M664 272 H135 Q105 272 105 242 V150", tone: "accent", at: [214, 262], unit: "room for new prompts", thin: true },
};
const TALL = 19;
let parts = null;

function svg(tag, attributes, parent, content) {
  const node = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") node.style.cssText = value; else node.setAttribute(name, value);  // the page's policy forbids style attributes
  }
  if (content !== undefined) node.textContent = content;
  parent.append(node);
  return node;
}

function build(root) {
  parts = { flows: {}, rates: {}, text: {}, cells: [], bars: [], nodes: {} };
  for (const [name, pipe] of Object.entries(PIPES)) {
    svg("path", { class: "pipe", d: pipe.d, style: pipe.thin ? "stroke-width:4" : "" }, root);
    parts.flows[name] = svg("path", { class: "flow still", d: pipe.d, style: `stroke: var(--${pipe.tone})` }, root);
  }
  for (const [name, { x, y, w, h, name: label }] of Object.entries(STATIONS)) {
    parts.nodes[name] = svg("rect", { class: "node", x, y, width: w, height: h, rx: 14 }, root);
    svg("text", { class: "name", x: x + 14, y: y + 25 }, root, label);
    parts.text[name] = [0, 1].map((line) => svg("text", { class: "dim", x: x + 14, y: y + 47 + 19 * line }, root, ""));
  }
  for (const [name, pipe] of Object.entries(PIPES)) {
    const [x, y] = pipe.at, line = svg("text", { x, y, "text-anchor": "middle" }, root);
    if (!pipe.thin) parts.rates[name] = svg("tspan", { class: "rate" }, line, "0");
    svg("tspan", pipe.inline || pipe.thin ? { class: "unit", dx: pipe.thin ? 0 : 6 } : { class: "unit", x, dy: 38 }, line, pipe.unit);
  }
  parts.fleet = svg("g", {}, root);
  parts.lag = svg("g", {}, root);
}

const set = (node, value) => { if (node.textContent !== value) node.textContent = value; };

function flow(name, rate) {
  const node = parts.flows[name], still = !(rate > 0), seconds = Math.min(20, Math.max(1.6, 12 / Math.log2(2 + rate))).toFixed(0);
  node.classList.toggle("still", still);
  if (node.dataset.seconds !== seconds) { node.dataset.seconds = seconds; node.style.animationDuration = `${seconds}s`; }
}

function fleet(workers) {
  const shown = workers.filter((worker) => worker.state !== "stopped").slice(0, 36), columns = 12;
  while (parts.cells.length < shown.length) {
    const index = parts.cells.length, x = 356 + (index % columns) * 19.6, y = 98 + Math.floor(index / columns) * 23;
    const back = svg("rect", { x, y, width: 16, height: TALL, rx: 4, style: "fill: var(--wait)" }, parts.fleet);
    parts.cells.push([back, svg("rect", { x, y, width: 16, height: TALL, rx: 4 }, parts.fleet), y]);
  }
  parts.cells.forEach(([back, fill, y], index) => {
    const worker = shown[index];
    back.style.visibility = fill.style.visibility = worker ? "visible" : "hidden";
    if (!worker) return;
    const share = Math.min(1, worker.running / Math.max(1, worker.capacity)), bad = worker.state === "silent";
    fill.setAttribute("height", (TALL * (bad ? 1 : share)).toFixed(1));
    fill.setAttribute("y", (y + TALL * (1 - (bad ? 1 : share))).toFixed(1));
    fill.style.fill = `var(--${bad ? "bad" : worker.behind > 1 ? "publish" : "generate"})`;
  });
}

function lag(found) {
  const count = found.buckets.length, most = Math.max(64, ...found.lag), room = 162;
  while (parts.bars.length < count) {
    parts.bars.push([svg("rect", { rx: 2, style: "fill: var(--wait)" }, parts.lag), svg("rect", { rx: 2, style: "fill: var(--generate)" }, parts.lag)]);
  }
  parts.bars.forEach(([back, bar], index) => {
    const w = room / Math.max(1, count), h = index < count ? Math.max(2, (found.lag[index] / most) * 56) : 0;
    const place = (node, height) => {
      for (const [name, value] of Object.entries({ x: 780 + index * w, width: Math.max(2, w - 5), y: 160 - height, height })) node.setAttribute(name, value.toFixed(1));
    };
    place(back, index < count ? 56 : 0); place(bar, h);
  });
}

/** Draw the loop into an image, and write it into a list for screens too narrow for the image. */
export function drawLoop(root, inWords, state) {
  if (!parts) build(root);
  const loop = state.loop, ended = loop.over, served = state.instances?.find((each) => each.served);
  const shown = ended ? {} : { orders: loop.ordered_per_s, trajectories: loop.sampled_per_s, trained: loop.trajectories_per_s, steps: loop.steps_per_min, weights: loop.weights_per_min };
  for (const name of Object.keys(parts.rates)) { set(parts.rates[name], short(shown[name])); flow(name, shown[name]); }
  flow("room", shown.orders);
  const say = (name, first, second) => { set(parts.text[name][0], first); set(parts.text[name][1], second); };
  say("dispatcher", "prompts to orders", ended || loop.health === "paused" ? loop.health : "trajectories ordered");
  if (ended) say("workers", loop.health, `${short(loop.whole.tokens)} tokens trained`);
  else say("workers", `${loop.workers} · ${short(loop.running)} of ${short(loop.capacity)} slots busy`, `${short(loop.sampled_tokens_per_s)} tokens/s`);
  if (ended) say("log", `${short(loop.lag)} left over`, "sampled, not trained");
  else say("log", `lag ${short(loop.lag)}`, "not finished, by bucket");
  say("trainer", `step ${loop.step}${loop.max_steps === null ? "" : ` of ${loop.max_steps}`}`, served ? `${served.name} is served` : loop.algorithm || "–");
  say("coordinator", `weights ${loop.announced}`, loop.health);
  for (const [name, node] of Object.entries(parts.nodes)) node.classList.toggle("on", (shown[{ dispatcher: "orders", workers: "trajectories", log: "trajectories", trainer: "trained", coordinator: "weights" }[name]] ?? 0) > 0);
  const words = Object.keys(STATIONS).map((name) => [STATIONS[name].name, ...parts.text[name].map((line) => line.textContent)]);
  const flows = Object.keys(parts.rates).map((name) => `${parts.rates[name].textContent} ${PIPES[name].unit}`).join(" · ");
  inWords.replaceChildren(...words.map(([name, ...told]) => el("li", {}, el("b", {}, name), ` ${told.join(", ")}`)), el("li", {}, flows));
  if (state.workers) fleet(state.workers);
  if (state.lag) lag(state.lag);
}
