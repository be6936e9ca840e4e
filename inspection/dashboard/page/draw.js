// Small drawing tools: canvases at the screen's resolution, colours of the scheme, numbers as people read them.
const cache = new Map();
export const scheme = { revision: 0 };

export function colour(name) {
  if (!cache.has(name)) cache.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return cache.get(name);
}
export function forgetColours() { cache.clear(); scheme.revision += 1; }

const sizes = new WeakMap();
const watcher = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) sizes.set(target, [contentRect.width, contentRect.height]);
  dispatchEvent(new Event("redraw"));
});

/** A cleared context whose unit is a CSS pixel. */
export function pen(canvas) {
  if (!sizes.has(canvas)) { sizes.set(canvas, [canvas.clientWidth, canvas.clientHeight]); watcher.observe(canvas); }
  const [width, height] = sizes.get(canvas), scale = devicePixelRatio || 1;
  const w = Math.round(width * scale), h = Math.round(height * scale);
  if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; }
  const g = canvas.getContext("2d");
  g.setTransform(scale, 0, 0, scale, 0, 0);
  g.clearRect(0, 0, width, height);
  g.font = "11.5px ui-sans-serif, system-ui, sans-serif";
  g.textBaseline = "middle";
  return { g, width, height };
}

export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toFixed(size >= 1e7 ? 0 : 1)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(size >= 1e5 ? 0 : 1)}k`;
  if (size >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  if (size >= 10) return value.toFixed(1);
  return size >= 1 ? value.toFixed(2) : size === 0 ? "0" : value.toFixed(3);
}
export function span(seconds) {
  if (seconds < 0.0995) return `${(seconds * 1000).toFixed(seconds < 0.00995 ? 1 : 0)} ms`;
  if (seconds < 100) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  return seconds < 6000 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}
export const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");

/** An element with attributes, text and children; text is never read as markup. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
export function text(node, value) { if (node.textContent !== value) node.textContent = value; }

export function ticks(low, high, count) {
  const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
  const unit = [1, 2, 2.5, 5, 10].find((each) => each * power >= raw) * power, found = [];
  for (let at = Math.ceil(low / unit) * unit; at <= high + unit * 1e-6; at += unit) found.push(Number((Math.round(at / unit) * unit).toPrecision(12)));
  return found;
}
