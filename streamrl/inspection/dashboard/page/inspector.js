// The inspector shows one trajectory with its tokens, rewards, history, and commands that show more, or a group with its
// samples. It is updated until its fate is known.
import { el } from "/charts/elements.js";
import { short, span } from "/charts/words.js";

const dialog = document.getElementById("inspector"), body = document.getElementById("ins-body"), title = document.getElementById("ins-title");
document.getElementById("ins-close").addEventListener("click", () => dialog.close());
dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
const AGAIN_MS = 2000;
let asked = 0, shown = "";
dialog.addEventListener("close", () => { asked += 1; });

export async function inspect(name) {
  shown = "";
  title.textContent = name;
  body.replaceChildren(el("p", { class: "empty", role: "status" }, "reading the topics…"));
  if (!dialog.open) dialog.showModal();
  await look(name, (asked += 1));
}

/** Ask the server again until the answer is final, or the user opens something else. */
async function look(name, number) {
  let again = true;
  try {
    const answer = await fetch(`api/trajectory?id=${encodeURIComponent(name)}`), found = await answer.json();
    if (number !== asked) return;
    if (answer.ok) { show(found); again = !found.settled; }
    else { again = Boolean(found.again); if (!shown) body.replaceChildren(el("p", { class: "empty", role: "status" }, found.error)); }
  } catch (error) {
    if (number !== asked) return;
    if (!shown) { again = false; body.replaceChildren(el("p", { class: "empty", role: "status" }, String(error.message))); }
  }
  if (again) setTimeout(() => { if (number === asked) look(name, number); }, AGAIN_MS);
}

/** Show an answer. The first draws everything; later ones only the changing parts, so that text does not move while it is read. */
function show(found) {
  const key = found.group && !found.id ? `group ${found.group}` : found.id;
  if (key === shown) return refresh(found);
  shown = key;
  title.textContent = found.id ?? found.group;
  body.replaceChildren(...(found.id ? trajectory(found) : group(found)));
  refresh(found);
  body.scrollTop = 0;
}

function refresh(found) {
  const put = (id, ...parts) => document.getElementById(id)?.replaceChildren(...parts);
  if (!found.id) return put("ins-samples", samples(found));
  put("ins-facts", ...facts(found).map((fact) => el("span", { class: `chip ${tone(fact)}` }, fact)), toGroup(found));
  put("ins-life", events(found));
  put("ins-commands", ...found.commands.map(command));
}

const tone = (fate) => fate.includes("trained in step") ? "good" : fate.includes("skipped") || fate.includes("left over") ? "warn" : "";
const facts = (life) => [...life.records.map(([place, fate]) => `${place} · ${fate}`), `sample ${life.sample}`, life.dataset, life.worker, `${life.length} tokens, ${life.predicted} predicted`, `bucket ${life.bucket}`, `ended by ${life.finish}`];
const toGroup = (life) => el("button", { type: "button", class: "plain", onclick: () => inspect(life.group) }, "Its group");

function group(found) {
  return [el("h3", {}, "Prompt"), el("div", { class: "prompt", tabindex: "0", role: "region", "aria-label": "Prompt" }, found.prompt),
    el("h3", {}, "Samples"), el("div", { id: "ins-samples" })];
}

function samples(found) {
  const rows = found.samples.map((each) => el("tr", {}, el("td", {}, el("button", { type: "button", class: "id", onclick: () => inspect(each.id) }, each.id)),
    el("td", { class: "num" }, each.length === undefined ? "–" : String(each.length)),
    el("td", {}, Object.entries(each.rewards ?? {}).map(([name, value]) => `${name} ${value === null ? "–" : short(value)}`).join(", ") || "–"),
    el("td", { class: "num" }, typeof each.advantage === "number" ? short(each.advantage) : "–"),
    el("td", {}, each.worker ?? "does not decode"), el("td", {}, el("span", { class: `chip ${tone(each.fate)}` }, each.fate))));
  const coming = found.awaited.map((id) => el("tr", {}, el("td", {}, id), el("td"), el("td"), el("td"), el("td", {}, found.workers.join(", ")), el("td", {}, el("span", { class: "chip" }, "ordered"))));
  const head = ["sample", "tokens", "reward", "advantage", "worker", "fate"].map((name) => el("th", { scope: "col" }, name));
  return el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows, ...coming));
}

function trajectory(life) {
  const tokens = el("div", { class: "tokens", tabindex: "0", role: "region", "aria-label": "Completion, token by token" });
  const modes = ["weights", "log-prob"].map((mode) => el("button", { type: "button", class: "plain", onclick: () => paint(mode) }, mode));
  const legend = el("small");
  function paint(mode) {
    modes.forEach((button) => button.setAttribute("aria-pressed", String(button.textContent === mode)));
    tokens.replaceChildren(...spelled(life, mode));
    legend.textContent = mode === "weights" ? life.spans.map(([version, from, to]) => `${version}: ${to - from}`).join(" · ") + " tokens" : "the redder, the less likely under the policy";
  }
  paint("weights");
  return [
    el("div", { class: "facts", id: "ins-facts", role: "status" }),
    el("h3", {}, "Prompt"), el("div", { class: "prompt", tabindex: "0", role: "region", "aria-label": "Prompt" }, life.prompt),
    el("h3", {}, "Completion, coloured by", ...modes, legend), tokens,
    ...(life.turns.length ? [el("h3", {}, `Turns of session ${life.session}`), turns(life)] : []),
    el("h3", {}, "Reward"), rewards(life),
    el("h3", {}, "History"), el("div", { id: "ins-life" }),
    el("h3", {}, "See more"), el("div", { id: "ins-commands" }),
  ];
}

function spelled(life, mode) {
  const order = [...new Set(life.spans.map(([version]) => version))];
  let index = 0;
  return life.spans.flatMap(([version, from, to]) => life.tokens.slice(from, to).map(([text, logprob, trained]) => {
    const node = el("span", { title: `${version} · log-prob ${logprob} · ${trained ? "trained" : "not trained"} · token ${index}` }, text);
    if (!trained) node.className = "off";
    const doubt = Math.min(1, -logprob / 4);
    node.style.background = mode === "weights" ? `var(--v${order.indexOf(version) % 6})` : `color-mix(in srgb, var(--bad) ${Math.round(doubt * 45)}%, transparent)`;
    index += 1;
    return node;
  }));
}

function turns(life) {
  const rows = life.turns.map(([from, to, given], index) => el("tr", {}, el("td", { class: "num" }, String(index + 1)), el("td", { class: "num" }, `${from} to ${to - 1}`),
    el("td", { class: "text" }, life.tokens.slice(from, to).map(([text]) => text).join("") || "–"),
    el("td", {}, Object.entries(given).map(([name, value]) => `${name} ${short(value)}`).join(", ") || "–")));
  const head = ["turn", "tokens", "sampled", "reward"].map((name) => el("th", { scope: "col" }, name));
  return el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows));
}

function rewards(life) {
  const rows = Object.entries(life.rewards).map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", { class: "num" }, value === null ? "–" : short(value)), el("td", { class: "text" }, life.reward_errors[name] ?? "")));
  if (life.advantage !== null) rows.push(el("tr", {}, el("th", { scope: "row" }, "advantage"), el("td", { class: "num" }, short(life.advantage)), el("td", { class: "text" }, "within its group")));
  return rows.length ? el("table", { class: "scores" }, el("tbody", {}, ...rows)) : el("p", { class: "empty" }, "no reward");
}

function events(life) {
  return el("ol", { class: "life" }, ...life.events.map(([at, since, what, detail]) => el("li", {}, el("b", {}, what), " ",
    el("span", { class: "quiet" }, `${new Date(at * 1000).toISOString().slice(11, 23)}${since === null ? "" : ` · +${span(since)}`} · ${detail}`))));
}

function command(line) {
  const button = el("button", { type: "button", class: "plain", "aria-label": `Copy: ${line}`, onclick: async () => {
    await navigator.clipboard.writeText(line); button.textContent = "Copied"; setTimeout(() => { button.textContent = "Copy"; }, 1200);
  } }, "Copy");
  return el("div", { class: "cmd" }, el("code", {}, line), button);
}
