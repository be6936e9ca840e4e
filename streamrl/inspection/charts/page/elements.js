// Elements whose text is never parsed as markup, and the colours of the page's scheme.

/** An element with attributes, listeners and children. */
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

/** Set a node's text, unless it is the same already. */
export function text(node, value) { if (node.textContent !== value) node.textContent = value; }

const colours = new Map();

/** The current value of a custom property of the style sheet. A canvas cannot use properties itself. */
export function colour(name) {
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return colours.get(name);
}

/** Call this when the scheme has changed. */
export function forgetColours() { colours.clear(); }
