// Numbers, durations and times as text for people.

export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  if (size >= 1e3) return Math.round(value).toLocaleString("en");
  if (size > 0 && size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  return String(+value.toPrecision(3));
}

export function bytes(size) { return size >= 1e9 ? `${short(size / 1e9)} GB` : `${short(size / 1e6)} MB`; }

export function span(seconds) {
  if (seconds > 0 && seconds < 0.0995) return `${+(seconds * 1000).toPrecision(2)} ms`;
  if (seconds < 120) return `${+seconds.toPrecision(3)} s`;
  return seconds < 7200 ? parts(seconds, "min", "s") : parts(seconds / 60, "h", "min");
}

function parts(amount, whole, sixtieth) {
  const rounded = Math.round(amount), rest = rounded % 60;
  return `${Math.floor(rounded / 60)} ${whole}${rest ? ` ${rest} ${sixtieth}` : ""}`;
}

/** The time of day, with the date if it is not today, from seconds since the epoch. */
export function moment(at) {
  const day = new Date(at * 1000);
  return day.toDateString() === new Date().toDateString() ? clock(at) : `${day.toLocaleDateString("en-GB", { day: "numeric", month: "short" })}, ${clock(at)}`;
}

/** The time of day, from seconds since the epoch. */
export const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");
