// Compare: loss curves and predictions of several runs, in the same colours and dashes everywhere.
import {Chart, DASHES} from "./charts.js";
import {ask, find, findAll, formatNumber, formatSeconds, make, notify} from "./common.js";

const page = find("#compare"), runs = JSON.parse(page.dataset.runs);
const query = values => new URLSearchParams([...runs.map(run => ["run", run]), ...Object.entries(values).filter(([, value]) => value != null && value !== "")]);
const style = (run, more) => ({name: run.split("/").at(-1), colour: `c${runs.indexOf(run) + 1}`, dash: DASHES[runs.indexOf(run)], ...more});

function press(name, act) {
  for (const button of findAll(`[data-${name}]`)) {
    button.addEventListener("click", () => {
      for (const one of findAll(`[data-${name}]`)) one.setAttribute("aria-pressed", String(one === button));
      act(button.dataset[name]);
    });
  }
}

// Curves: one line per run, and a band from the lowest to the highest of several models.
let curves = {}, x = "epoch";
const curveChart = new Chart(find("#curves"), {log: true, height: 300, lines: []});

function drawCurves() {
  const shown = runs.filter(run => curves[run]?.length);
  if (!shown.length) { find("#curves").replaceChildren(make("p", {class: "muted"}, "No validation was logged yet.")); return; }
  const xs = [...new Set(shown.flatMap(run => curves[run].map(point => point[x])))].sort((a, b) => a - b);
  const place = new Map(xs.map((value, at) => [value, at]));
  const spread = (run, name) => { const column = xs.map(() => null); for (const point of curves[run]) column[place.get(point[x])] = point[name]; return column; };
  const banded = shown.filter(run => curves[run].some(point => point.low != null));
  const first = shown.length + 1;
  curveChart.options.lines = [
    ...shown.map(run => style(run, banded.includes(run) ? {band: [first + 2 * banded.indexOf(run) + 1, first + 2 * banded.indexOf(run)]} : {})),
    ...banded.flatMap(() => [{colour: "c1", hidden: true}, {colour: "c1", hidden: true}])];
  curveChart.options.values = x === "seconds" ? (_, ticks) => ticks.map(tick => formatSeconds(tick)) : undefined;
  curveChart.options.steps = x === "seconds" ? null : undefined;
  curveChart.options.label = x === "seconds" ? "" : "epoch";
  curveChart.columns = [xs, ...shown.map(run => spread(run, "val")), ...banded.flatMap(run => [spread(run, "low"), spread(run, "high")])];
  curveChart.rebuild();
}

async function loadCurves() {
  curves = (await ask(`/api/compare/curves?${query({})}`)).curves;
  drawCurves();
}

press("x", value => { x = value; drawCurves(); });
press("axis", value => curveChart.setLog(value === "log"));

// Predictions of one series; the server sends the extremes of every interval of what is shown.
const view = {series: "", target: "", step: "", show: "values", from: null, to: null};
const predictionChart = new Chart(find("#predictions"), {height: 320, steps: null, lines: [], onZoom: (from, to) => { view.from = from; view.to = to; load(); }});

function fill(name, values, chosen) {
  const box = find(`#${name}`);
  if (box.options.length !== values.length) box.replaceChildren(...values.map(value => make("option", {value: String(value)}, String(value).slice(0, 100))));
  box.value = String(chosen);
  box.closest("label").hidden = values.length < 2;
}

let latest = 0;
async function loadPredictions() {
  const number = ++latest;
  find("#predictions").classList.add("stale");
  const answer = await ask(`/api/compare/predictions?${query(view)}`);
  if (number !== latest) return;
  find("#predictions").classList.remove("stale");
  if (!answer.x.length) {
    find("#pick").hidden = true;
    find("#predictions").replaceChildren(make("p", {class: "muted"}, "No run has predictions on a test set yet."));
    return;
  }
  fill("series", answer.series, answer.chosen.series);
  fill("target", answer.targets, answer.chosen.target);
  fill("step", Array.from({length: answer.steps}, (_, at) => at + 1), answer.chosen.step);
  const names = runs.filter(run => answer.lines[run]);
  const truth = answer.truth.length > 0;
  predictionChart.options.lines = [...(truth ? [{name: answer.truth_of ? `true value of ${answer.truth_of.split("/").at(-1)}` : "true value", colour: "ink"}] : []), ...names.map(run => style(run, {}))];
  predictionChart.options.time = answer.kind === "date";
  predictionChart.columns = [answer.x, ...(truth ? [answer.truth] : []), ...names.map(run => answer.lines[run])];
  predictionChart.rebuild();
  find("#whole").hidden = view.from == null;
  find("#drawn").textContent = `${answer.rows.toLocaleString("en")} rows${answer.x.length < answer.rows ? `, ${formatNumber(answer.x.length)} of them drawn` : ""}`;
}

const load = () => loadPredictions().catch(problem => notify(problem.message));
for (const name of ["series", "target", "step"]) {
  find(`#${name}`).addEventListener("change", event => {
    view[name] = event.target.value;
    if (name === "series") view.from = view.to = null;
    load();
  });
}
press("show", value => { view.show = value; load(); });
find("#whole").addEventListener("click", () => { view.from = view.to = null; load(); find("#series").focus(); });

loadCurves().catch(problem => notify(problem.message));
load();
if (page.dataset.running) setInterval(() => { if (!document.hidden) loadCurves().catch(() => {}); }, 5000);
