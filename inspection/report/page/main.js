// Puts the drawings into their places and follows the two switches above the curves.
const charts = [], state = { axis: "step", smooth: true };
const place = (name) => document.getElementById(name);

for (const group of DATA.curves) {
  const grid = html("div", "grid");
  for (const spec of group.curves) { const chart = new Chart(spec); charts.push(chart); grid.append(chart.node); }
  place("curves").append(html("h3", "group", group.title), grid);
}
if (place("lengths")) {
  for (const each of DATA.lengths) lengthGrid(place(`lengths-${each.run}`), each.cells);
  if (place("length-order")) for (const spec of DATA.order) { const chart = new Chart(spec); charts.push(chart); place("length-order").append(chart.node); }
}
if (place("staleness")) stalenessColumns(place("staleness"), DATA.staleness);
if (place("timeline")) new Timeline(place("timeline"), DATA.timelines);
if (place("shares")) shareBars(place("shares"), DATA.shares);

function redraw() { for (const chart of charts) chart.draw(state.axis, state.smooth); }
for (const button of document.querySelectorAll("[data-axis]")) button.addEventListener("click", () => {
  state.axis = button.dataset.axis;
  for (const other of document.querySelectorAll("[data-axis]")) other.setAttribute("aria-pressed", String(other === button));
  redraw();
});
place("smooth")?.addEventListener("click", (event) => {
  state.smooth = !state.smooth;
  event.currentTarget.setAttribute("aria-pressed", String(state.smooth));
  redraw();
});
addEventListener("beforeprint", () => { for (const each of document.querySelectorAll("details")) each.open = true; });
redraw();
