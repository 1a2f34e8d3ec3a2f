// What a run predicts on a few validation series, redrawn as it trains.
import {Chart} from "./charts.js";
import {find, formatNumber, make} from "./common.js";

const place = find("#preview");
let values = null, chart = null, shape = "";

const isSeries = one => Array.isArray(one?.at) && Array.isArray(one.predicted) && Array.isArray(one.actual);
const isPreview = one => Array.isArray(one?.series) && one.series.length && one.series.every(isSeries) && Array.isArray(one.targets);

function fillOptions(select, names, hidden) {
  if ([...select.options].map(option => option.textContent).join("\n") !== names.join("\n")) {
    select.replaceChildren(...names.map((name, at) => make("option", {value: String(at)}, name)));
  }
  select.closest("label").hidden = hidden;
}

// The lines depend on what is predicted: numbers, numbers with quantiles, or classes.
function makeChart(kind) {
  const predicted = {name: "predicted", colour: "blue"}, hidden = {colour: "blue", hidden: true};
  const lines = {
    numbers: [{name: "actual", colour: "ink"}, predicted],
    quantiles: [{name: "actual", colour: "ink"}, {...predicted, band: [4, 3]}, hidden, hidden],
    classes: [{name: "probability of the true class", colour: "blue"}],
  }[kind];
  find("#preview-chart").replaceChildren();
  return new Chart(find("#preview-chart"), {height: 260, lines, time: values.time === "date", steps: null});
}

function draw() {
  const names = values.series.map(one => String(one.name)), targets = values.classes.length ? [] : values.targets;
  fillOptions(find("#preview-series"), names, names.length < 2);
  fillOptions(find("#preview-target"), targets, targets.length < 2);
  const series = values.series[Number(find("#preview-series").value)] ?? values.series[0];
  const target = Number(find("#preview-target").value) || 0;
  const kind = values.classes.length ? "classes" : series.low ? "quantiles" : "numbers";
  const key = [kind, values.time, names, targets].join("\n");
  if (key !== shape) { chart = makeChart(kind); shape = key; }
  const columns = kind === "classes" ? ["predicted"] : kind === "quantiles" ? ["actual", "predicted", "low", "high"] : ["actual", "predicted"];
  chart.set([series.at, ...columns.map(name => series[name][target] ?? [])]);
  const axis = {date: "over time", time: "over time", row: "over rows"}[values.time] ?? "";
  find("#preview-note").textContent = `${targets[target] ?? "classes"} ${axis}, after epoch ${formatNumber(values.epoch, 3)}${values.lane ? `, model ${values.lane}` : ""}`;
  place.dataset.step = String(values.step);
  place.hidden = false;
}

for (const select of [find("#preview-series"), find("#preview-target")]) {
  select.addEventListener("change", () => { shape = ""; draw(); });
}

export function showPreview(next) {
  if (!isPreview(next)) return;
  values = {classes: [], ...next};
  draw();
}
