// The inspector: one trajectory, token by token, its rewards, its history event by event, and what to type to see more.
import { el } from "/charts/elements.js";
import { short, span } from "/charts/words.js";

const dialog = document.getElementById("inspector"), body = document.getElementById("ins-body"), title = document.getElementById("ins-title");
document.getElementById("ins-close").addEventListener("click", () => dialog.close());
dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
let asked = 0;

export async function inspect(name) {
  const number = (asked += 1);
  title.textContent = name;
  body.replaceChildren(el("p", { class: "empty" }, "reading the topics…"));
  if (!dialog.open) dialog.showModal();
  try {
    const answer = await fetch(`/api/trajectory?id=${encodeURIComponent(name)}`), life = await answer.json();
    if (number !== asked) return;
    if (!answer.ok) throw new Error(life.error);
    show(life);
  } catch (error) {
    if (number === asked) body.replaceChildren(el("p", { class: "empty" }, String(error.message)));
  }
}

function show(life) {
  title.textContent = life.id;
  const facts = [`sample ${life.sample}`, life.dataset, life.worker, `${life.length} tokens, ${life.predicted} predicted`, `bucket ${life.bucket}`, `ended by ${life.finish}`, ...life.records.map(([place, fate]) => `${place} · ${fate}`)];
  const tokens = el("div", { class: "tokens", tabindex: "0", role: "region", "aria-label": "Completion, token by token" });
  const modes = ["weights", "log-prob"].map((mode) => el("button", { type: "button", class: "plain", onclick: () => paint(mode) }, mode));
  const legend = el("small");
  function paint(mode) {
    modes.forEach((button) => button.setAttribute("aria-pressed", String(button.textContent === mode)));
    tokens.replaceChildren(...spelled(life, mode));
    legend.textContent = mode === "weights" ? life.spans.map(([version, from, to]) => `${version}: ${to - from}`).join(" · ") + " tokens" : "the redder, the less likely the policy held it";
  }
  paint("weights");
  body.replaceChildren(
    el("div", { class: "facts" }, ...facts.map((fact) => el("span", { class: "chip" }, fact))),
    el("h3", {}, "Prompt"), el("div", { class: "prompt", tabindex: "0", role: "region", "aria-label": "Prompt" }, life.prompt),
    el("h3", {}, "Completion, coloured by", ...modes, legend), tokens,
    el("h3", {}, "Reward"), rewards(life),
    el("h3", {}, "History"), events(life),
    el("h3", {}, "See more"), ...life.commands.map(command),
  );
  body.scrollTop = 0;
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

function rewards(life) {
  const rows = Object.entries(life.rewards).map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", { class: "num" }, value === null ? "–" : short(value)), el("td", { class: "text" }, life.reward_errors[name] ?? "")));
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
