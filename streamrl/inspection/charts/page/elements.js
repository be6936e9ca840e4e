// What pages are made of: elements whose text is never read as markup, and the colours of the page's scheme.

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

/** Set a text, but leave the page alone where it is there already. */
export function text(node, value) { if (node.textContent !== value) node.textContent = value; }

const colours = new Map();

/** What a custom property of the style sheet means at present; a canvas knows no properties. */
export function colour(name) {
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return colours.get(name);
}

/** To be called when the scheme changed. */
export function forgetColours() { colours.clear(); }
