// Tables and lists: trajectories, workers, lag, time split, events, dead letters. Rows are reused, not created again.
import { el, text } from "/charts/elements.js";
import { KINDS } from "/charts/lanes.js";
import { bytes, clock, moment, short, span } from "/charts/words.js";
import { inspect } from "./inspector.js";

const $ = (id) => document.getElementById(id);

function rowsOf(body, count, make) {
  while (body.children.length < count) body.append(make());
  while (body.children.length > count) body.lastElementChild.remove();
  return [...body.children];
}

let held = false;
export function holdWhileLookedAt() {
  const box = $("traj-scroll");
  const update = () => { held = box.matches(":hover") || (box.contains(document.activeElement) && document.activeElement !== box); $("held").hidden = !held; };
  for (const event of ["pointerenter", "pointerleave", "focusin", "focusout"]) box.addEventListener(event, () => setTimeout(update));
  box.addEventListener("click", (event) => { const id = event.target.closest("button.id"); if (id) inspect(id.dataset.place); });
  $("find").addEventListener("submit", (event) => { event.preventDefault(); const id = $("find-id").value.trim(); if (id) inspect(id); });
}

function trajectoryRow() {
  const cells = Array.from({ length: 7 }, (_, index) => el("td", { class: index === 1 ? "num" : index === 6 ? "text" : "" }));
  cells[0].append(el("button", { type: "button", class: "id" }));
  cells[2].append(el("span", { class: "gauge", "aria-hidden": "true" }, el("b"), el("i")), el("span"));
  cells[5].append(el("span", { class: "chip" }));
  return el("tr", {}, ...cells);
}

export function trajectories(found) {
  if (held) return;
  const most = Math.max(1, ...found.map((each) => Math.max(each.length, each.predicted)));
  rowsOf($("trajectories").tBodies[0], found.length, trajectoryRow).forEach((row, index) => {
    const each = found[index], [id, reward, length, weights, worker, fate, words] = row.cells;
    const button = id.firstChild;
    text(button, each.id); button.dataset.place = each.place;
    text(reward, each.reward === null ? "–" : each.reward.toFixed(2));
    const [bar, tick] = length.firstChild.children;
    bar.style.width = `${((100 * each.length) / most).toFixed(1)}%`; tick.style.left = `${((97 * each.predicted) / most).toFixed(1)}%`;
    text(length.lastChild, `${each.length}, ${each.predicted}`);
    text(weights, each.versions.join(" → ")); text(worker, each.worker); text(words, each.text);
    const chip = fate.firstChild;
    text(chip, each.fate);
    chip.className = `chip ${each.fate.startsWith("trained") ? "good" : each.fate.startsWith("skipped") ? "warn" : ""}`;
  });
}

export function workers(found, over) {
  card("workers", found.length || !over);
  const make = () => el("tr", {}, el("td"), el("td"), el("td", {}, el("span", { class: "gauge", "aria-hidden": "true" }, el("b")), el("span")), el("td", { class: "num" }));
  rowsOf($("workers").tBodies[0], found.length, make).forEach((row, index) => {
    const each = found[index], [name, weights, slots, speed] = row.cells;
    text(name, each.state === "ready" ? each.id : `${each.id} · ${each.state}`);
    name.className = { ready: "", stopped: "quiet", silent: "bad" }[each.state] ?? "warn";
    text(weights, each.behind ? `${each.version}  (−${each.behind})` : each.version);
    slots.firstChild.firstChild.style.width = `${(100 * Math.min(1, each.running / Math.max(1, each.capacity))).toFixed(0)}%`;
    text(slots.lastChild, `${each.running}/${each.capacity}${each.waiting ? ` +${each.waiting}` : ""}`);
    text(speed, short(each.tokens_per_s));
  });
}

export function instances(found) {
  $("instances").hidden = !found.length;
  const make = () => el("tr", {}, el("td"), el("td"), ...[0, 1, 2].map(() => el("td", { class: "num" })));
  rowsOf($("instances").tBodies[0], found.length, make).forEach((row, index) => {
    const each = found[index], [name, weights, ...figures] = row.cells;
    const mode = each.silent ? "served, silent" : each.mode === "run" ? (each.served ? "served" : "") : each.mode === "pause" ? "paused" : each.mode;
    text(name, mode ? `${each.name} · ${mode}` : each.name);
    name.className = each.silent ? "bad" : each.mode === "run" ? "" : "warn";
    text(weights, each.version ?? "–");
    [each.reward, each.age, each.lag].forEach((value, at) => text(figures[at], value === null ? "–" : short(value)));
  });
}

export function arms(found) {
  $("arms").hidden = !found.length;
  const make = () => el("tr", {}, ...[0, 1, 2].map(() => el("td")), ...[0, 1].map(() => el("td", { class: "num" })));
  rowsOf($("arms").tBodies[0], found.length, make).forEach((row, index) => {
    const each = found[index], [name, share, workers, sampled, reward] = row.cells;
    text(name, each.name);
    text(share, `${+(100 * each.share).toFixed(1)}%`);
    text(workers, each.workers === null ? "others" : `${each.workers}`);
    text(sampled, short(each.sampled));
    text(reward, each.reward === null ? "–" : short(each.reward));
  });
}

function barRow() { return el("div", { class: "row" }, el("span", { class: "label" }), el("span", { class: "bar", "aria-hidden": "true" }), el("span", { class: "end" })); }

function fill(row, label, shares, end) {
  const [name, bar, last] = row.children;
  text(name, label); text(last, end);
  rowsOf(bar, shares.length, () => el("b")).forEach((part, index) => { part.style.width = `${(100 * shares[index][1]).toFixed(1)}%`; part.style.background = `var(--${shares[index][0]})`; });
}

export function lag(found) {
  const most = Math.max(64, ...found.lag);
  rowsOf($("lag"), found.buckets.length, barRow).forEach((row, index) => {
    fill(row, `bucket ${found.buckets[index]}`, [["generate", found.lag[index] / most]], short(found.lag[index]));
    row.title = `${found.lag[index]} trajectories that the trainer has not finished`;
  });
}

const plainTable = (id, rows, numbers) => rowsOf($(id).tBodies[0], rows.length, () => el("tr", {}, ...rows[0].map((_, at) => el("td", { class: at < numbers ? "" : "num" }))))
  .forEach((row, index) => rows[index].forEach((value, at) => text(row.cells[at], value)));
const card = (id, shown) => { $(id).closest(".card").hidden = !shown; };
const percent = (share) => (share === null ? "not known" : `${Math.round(100 * share)}%`);

export function rewards({ trajectories: count, bars, prompts, hardest }) {
  card("rewards", bars.length);
  text($("rewards-of"), `of ${short(count)} recent trajectories`);
  const most = Math.max(1, ...bars.map((bar) => bar[2]));
  rowsOf($("rewards"), bars.length, barRow).forEach((row, index) => {
    const [low, high, of] = bars[index];
    fill(row, low === high ? short(low) : `${short(low)} – ${short(high)}`, [["generate", of / most]], percent(of / count));
  });
  const all = Object.values(prompts).reduce((sum, each) => sum + each, 0), tones = { always: "good", sometimes: "publish", never: "bad" };
  card("prompts", all);
  rowsOf($("prompts"), 3, barRow).forEach((row, index) => {
    const [word, of] = Object.entries(prompts)[index];
    fill(row, word, [[tones[word], of / Math.max(1, all)]], `${short(of)} prompts`);
  });
  $("hardest").hidden = !hardest.length;
  plainTable("hardest", hardest.map(([name, mean, solved, samples]) => [name, short(mean), `${solved} of ${samples}`]), 1);
}

export function usage({ machines, processes }, loop) {
  card("machines", machines.length);
  const bars = machines.flatMap(({ host, cores, busy, used, total, gpus }) => [
    [`${host}: processors`, busy, `${percent(busy)} of ${cores} cores`], [`${host}: memory`, used / total, `${bytes(used)} of ${bytes(total)}`],
    ...(gpus ?? []).flatMap(([name, share, taken, room]) => [[`${name}`, share, share === null ? "load not known" : `${percent(share)} busy`],
      [`${name}: memory`, taken === null ? null : taken / room, taken === null ? "not known" : `${bytes(taken)} of ${bytes(room)}`]]),
    ...(gpus?.length ? [] : [[`${host}: GPU`, null, gpus ? "no GPU" : "not known"]])]);
  rowsOf($("machines"), bars.length, barRow).forEach((row, index) => {
    const [name, share, end] = bars[index];
    fill(row, name, [["accent", share ?? 0]], end); row.title = `${name}: ${end}`;
    row.children[1].style.visibility = share === null ? "hidden" : "";  // an empty bar would say zero
  });
  plainTable("processes", processes.map(([name, host, cores, size]) => [name, host, cores.toFixed(2), bytes(size)]), 2);
  const { "perf/limit_tok/s": limit, "perf/mfu": share, "perf/matmul_tflops": rate } = loop?.metrics ?? {};
  text($("speed"), share === undefined ? "" : `Trainer: ${short(share * limit)} tokens/s while it computes, ${percent(share)} of the device's limit of ${short(limit)} (matrix products at ${short(rate)} TFLOP/s, measured at the trainer's first step; attention not counted).`);
}

export function split(found) {
  rowsOf($("split"), found.length, barRow).forEach((row, index) => {
    const each = found[index], shares = Object.entries(each.shares);
    fill(row, each.name, shares, `waits ${Math.round(each.wait * 100)}%`);
    row.title = shares.map(([kind, share]) => `${kind} ${Math.round(share * 100)}%`).join(", ");
  });
}

export function events(found) {
  const newest = found.slice().reverse();
  rowsOf($("events"), newest.length, () => el("li", {}, el("time"), el("span", { class: "dot", "aria-hidden": "true" }), el("span"))).forEach((row, index) => {
    const [, at, level, said, times] = newest[index], [time, dot, words] = row.children;
    text(time, moment(at)); dot.className = `dot ${level}`; text(words, times > 1 ? `${said} × ${times}` : said);
  });
}

export async function letters() {
  const box = $("dlq");
  try {
    const answer = await fetch("api/dead-letters"), found = await answer.json();
    if (!answer.ok) throw new Error(found.error);
    text($("dlq-count"), found.total ? String(found.total) : "");
    box.replaceChildren(...(found.letters.length ? found.letters.map(letter) : [el("p", { class: "empty" }, "None. Every record was decoded.")]));
  } catch (error) { box.replaceChildren(el("p", { class: "empty" }, String(error.message))); }
}

function letter(each) {
  const said = el("span", { class: "quiet all", role: "status" });
  const retry = el("button", { type: "button", class: "plain", "aria-label": `Retry dead letter ${each.offset}`, onclick: async () => {
    retry.disabled = true; said.textContent = "sending…";
    try {
      const answer = await fetch(`api/dead-letters/${each.offset}/retry`, { method: "POST", headers: { "Content-Type": "application/json" }, body: "{}" });
      const done = await answer.json();
      said.textContent = answer.ok ? [done.action, done.detail].filter(Boolean).join(": ") : done.error;
    } catch (error) { said.textContent = String(error.message); }
    retry.disabled = false;
  } }, "Retry");
  const where = each.topic ? `${each.partition}@${each.origin_offset}` : "from an unknown position";
  return el("div", { class: "letter" }, el("span", {}, el("b", {}, each.error_class || "refused"), ` · ${where} · ${clock(each.timestamp)} · ${short(each.size)} bytes`), retry,
    el("span", { class: "all" }, each.reason), el("code", { class: "all" }, each.head), said);
}

export function tiles(state) {
  const { loop, curves: known } = state, metrics = loop.metrics, rewards = known?.reward.filter((value) => value !== null) ?? [];
  const ended = loop.over, whole = loop.whole, mean = (amount) => (whole.seconds ? `${short(amount / whole.seconds)}/s in ${span(whole.seconds)} of steps` : "");
  // The curve's newest value, so that both always agree: the figure itself may be one step ahead.
  const reward = rewards.at(-1) ?? loop.reward;
  const before = rewards.at(-Math.min(rewards.length, 20)), change = rewards.length > 1 ? rewards.at(-1) - before : null;
  const all = [
    ["Step", short(loop.step), loop.max_steps === null ? "" : `of ${short(loop.max_steps)}`, loop.step_age_s === null ? "no step yet" : ended ? `the last, at ${moment(loop.step_at)}` : [loop.time_left_s ? `${span(loop.time_left_s)} left` : `last ${span(loop.step_age_s)} ago`, `${short(loop.steps_per_min)}/min`].join(" · ")],
    ["Reward", reward === null ? "–" : reward.toFixed(3), "", change === null ? "" : `${change < 0 ? "−" : "+"}${Math.abs(change).toFixed(3)} against ${Math.min(rewards.length, 20) - 1} steps before`],
    ended ? ["Trained", short(whole.trajectories), "trajectories", mean(whole.trajectories)]
      : ["Trained", short(loop.trajectories_per_s), "/s", `trajectories · ${short(loop.sampled_per_s)} sampled/s`],
    ended ? ["Sampled", short(whole.tokens), "tokens", mean(whole.tokens)]
      : ["Sampling", short(loop.sampled_tokens_per_s), "tokens/s", `${short(loop.running)} running · ${short(loop.waiting)} waiting`],
    ["Staleness", loop.staleness_mean === null ? "–" : loop.staleness_mean.toFixed(2), "steps", `at most ${short(loop.staleness_max)} in the last step`],
    ["Trainer computes", metrics["time/train_share"] === undefined ? "–" : String(Math.round(metrics["time/train_share"] * 100)), "%", `of a step${metrics["time/step"] === undefined ? "" : ` of ${span(metrics["time/step"])}`}`],
  ];
  rowsOf($("tiles"), all.length, () => el("div", { class: "tile" }, el("div", { class: "k" }), el("div", { class: "v" }, el("span"), el("i")), el("div", { class: "s" }))).forEach((tile, index) => {
    const [name, value, unit, more] = all[index];
    text(tile.children[0], name); text(tile.children[1].firstChild, value); text(tile.children[1].lastChild, unit); text(tile.children[2], more);
  });
}

export function legend() {
  const { other, ...told } = KINDS;  // a live run has no activity of kind "other"
  $("legend").replaceChildren(...Object.entries({ ...told, adopt: "adopts weights" }).map(([kind, name]) => { const b = el("b"); b.style.background = `var(--${kind})`; return el("span", {}, b, name); }));
}
