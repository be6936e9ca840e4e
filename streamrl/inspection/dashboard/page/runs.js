// The list of the runs of a directory, each with a link to its page.
import { el, text } from "/charts/elements.js";
import { moment } from "/charts/words.js";

const EVERY_MS = 5000;
const $ = (id) => document.getElementById(id), figure = (value) => (value === null ? "–" : value.toFixed(3));

function row(run) {
  const time = (at, name) => el("td", { "data-name": name }, at ? moment(at) : "–"), number = (value, name) => el("td", { class: "num", "data-name": name }, value);
  const tone = { running: "good", finished: "good", stopped: "warn" }[run.state] ?? "";
  return el("tr", {}, el("td", {}, el("a", { href: `/runs/${encodeURIComponent(run.name)}/` }, run.name)), el("td", {}, el("span", { class: `chip ${tone}` }, run.state)),
    number(String(run.step), "step"), number(figure(run.reward), "reward"), number(figure(run.held_out), "held out"), time(run.started, "started"), time(run.at, "last step"));
}

async function show() {
  try {
    const answer = await fetch("/api/runs"), found = await answer.json();
    if (!answer.ok) throw new Error(found.error);
    text($("directory"), `${found.directory}/`);
    text($("count"), found.runs.length === 1 ? "1 run" : `${found.runs.length} runs`);
    $("runs").tBodies[0].replaceChildren(...found.runs.map(row));
  } catch (error) { text($("count"), String(error.message)); }
  setTimeout(show, EVERY_MS);
}
show();
