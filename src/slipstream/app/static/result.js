import {Chart, DASHES, formatX} from "./charts.js";
import {act, ask, find, findAll, formatNumber, make, notify} from "./common.js";
import {Explorer} from "./result_plot.js";
import {watchJobs} from "./result_jobs.js";

const page = find("#result"), url = page.dataset.url;
const MAX_LISTED = 200, MANY_ROWS = 1e6;
const state = {source: "", target: 0, ahead: 0, series: 0, window: null, figures: null, sort: null, down: true};
const svgBar = (share, own) => {
  const make = (tag, values) => { const node = document.createElementNS("http://www.w3.org/2000/svg", tag); for (const [name, value] of Object.entries(values)) node.setAttribute(name, value); return node; };
  const svg = make("svg", {class: "error-bar", "aria-hidden": "true"});
  svg.append(make("rect", {width: `${Math.max(Math.min(share, 1), 0) * 100}%`, height: "100%", rx: 2, class: own ? "own" : ""}));
  return svg;
};
const query = values => new URLSearchParams(Object.entries(values).filter(([, value]) => value !== null && value !== "" && value !== undefined).map(([name, value]) => [name, String(value)]));
const errorKey = () => state.figures.classes.length ? "log_loss" : "mae";
const unit = () => state.figures.unit ? ` ${state.figures.unit}` : "";

const explorer = page.dataset.predictions ? new Explorer(find("#plot"), (range, points) => `/api/plot/${url}?${query({source: state.source, target: state.target, ahead: state.ahead, series: state.series, window: state.window, low: range?.[0], high: range?.[1], points})}`, describePlot) : null;

function describePlot(data, range) {
  const {figures} = state, name = figures.names[state.series] ?? "";
  find("#plot-title").textContent = name;
  const error = data.mean_error == null ? "" : figures.classes.length ? `${formatNumber(100 * data.mean_error, 3)} % wrong` : `mean absolute error ${formatNumber(data.mean_error)}${unit()}`;
  const thinned = data.rows > data.points ? `, the extremes of every stretch of ${data.rows.toLocaleString("en")} rows` : `, ${data.rows.toLocaleString("en")} rows`;
  const how = figures.steps > 1 && !state.ahead ? state.window == null ? "; forecasts end to end, without overlap" : "; the chosen window's forecast is shaded, others end to end with it" : "";
  find("#plot-note").textContent = `${range ? `${formatX(range[0], data.dates, data.x_name)} to ${formatX(range[1], data.dates, data.x_name)}: ` : "Whole series: "}${error}${thinned}${how}. Drag to zoom, double-click for the whole series.`;
  find("#plot").dataset.rows = String(data.rows);
}

// The figures of the test set or a test, of one target.
async function load() {
  const address = `/api/result/${url}?${query({source: state.source, target: state.target})}`;
  let figures = await ask(`${address}&brief=1`);
  if (figures.num_rows > MANY_ROWS) {
    Object.assign(state, {figures, series: 0});
    listSeries();
    find("#series-count").textContent += "; computing their errors …";
    await explorer.show();
  }
  if (figures.has_truth) figures = await ask(address);
  state.figures = figures;
  const select = find("#target");
  select.replaceChildren(...figures.targets.map((name, at) => make("option", {value: String(at)}, name.slice(0, 80))));
  select.value = String(state.target);
  find("#target-field").hidden = figures.targets.length < 2;
  const ahead = find("#ahead"), steps = figures.steps;
  const choices = [...new Set([1, 2, 3, 6, 12, 24, 48, 96, steps])].filter(one => one <= steps).sort((a, b) => a - b);
  ahead.replaceChildren(make("option", {value: "0"}, "forecasts end to end"), ...choices.map(one => make("option", {value: String(one)}, one === 1 ? "1 row ahead" : `${one} rows ahead`)));
  ahead.value = String(state.ahead);
  find("#ahead-field").hidden = steps < 2;
  if (!state.source && figures.targets.length < 2) showInterval();
  state.series = figures.has_truth ? rankSeries()[0] ?? 0 : 0;
  listSeries();
  listWorst();
  drawErrors();
  explorer.marks = null;
  state.window = null;
  await explorer.show();
}

function showInterval() {
  const {interval, unit: name, blocks} = state.figures, place = find("#interval");
  if (name) find("#unit").textContent = name;
  if (interval && !place.textContent) place.textContent = `95 % interval ${formatNumber(interval[0])} to ${formatNumber(interval[1])}`;
  if (interval) place.title = `By resampling ${blocks.toLocaleString("en")} stretches of test rows`;
}

const rankSeries = () => state.figures.names.map((_, at) => at).sort((a, b) => (state.figures.series?.[b]?.[errorKey()] ?? -1) - (state.figures.series?.[a]?.[errorKey()] ?? -1));

function listSeries() {
  const {figures} = state, text = find("#series-search").value.trim().toLowerCase();
  const matching = rankSeries().filter(at => !text || figures.names[at].toLowerCase().includes(text));
  const total = figures.names.length + figures.more_series;
  find("#series-count").textContent = `${text ? `${matching.length.toLocaleString("en")} of ` : ""}${total.toLocaleString("en")} series${figures.has_truth && total > 1 ? ", the worst first" : ""}${matching.length > MAX_LISTED ? `; the first ${MAX_LISTED} are listed` : ""}`;
  find("#series-list").replaceChildren(...matching.slice(0, MAX_LISTED).map(at => make("li", {}, make("button", {type: "button", "aria-pressed": String(at === state.series), "data-series": String(at), onclick: () => pickSeries(at)},
    make("span", {class: "clip"}, figures.names[at] || "(no name)"), figures.series ? make("b", {}, formatNumber(figures.series[at][errorKey()], 3)) : null))));
}

function mark(list, attribute, value) {
  for (const button of findAll("button", find(list))) button.setAttribute("aria-pressed", String(button.dataset[attribute] === String(value)));
}

function pickSeries(at, range = null) {
  state.series = at;
  mark("#series-list", "series", at);
  if (!range) { explorer.marks = null; state.window = null; mark("#worst", "place", ""); }
  run(explorer.show(range));
}

function listWorst() {
  const {figures} = state, list = find("#worst");
  find(".worst").hidden = !figures.worst?.length;
  list.replaceChildren(...(figures.worst ?? []).map((one, at) => make("li", {}, make("button", {type: "button", "aria-pressed": "false", "data-place": String(at), onclick: () => jump(one, at)},
    make("span", {}, make("span", {class: "clip"}, figures.names[one.series] ?? `series ${one.series}`), make("small", {}, formatX(one.low, figures.dates, figures.x_name))),
    make("b", {}, one.error == null ? "not finite" : formatNumber(one.error, 3))))));
}

function jump(one, at) {
  const step = (one.high - one.low) / Math.max(state.figures.steps - 1, 1);
  const least = state.figures.dates ? 60 : 1;
  const room = Math.max(3 * (one.high - one.low), 24 * (step || usualStep()), least);
  explorer.marks = [one.low, one.high];
  state.window = one.row;
  if (state.ahead) find("#ahead").value = state.ahead = 0; // only windows show the forecast that was this bad
  mark("#worst", "place", at);
  pickSeries(one.series, [one.low - room, one.high + room]);
  if (matchMedia("(max-width: 1080px)").matches) find("#plot").scrollIntoView({block: "center"});
}

// The most usual distance of two rows in what is drawn.
function usualStep() {
  const x = explorer.data?.x ?? [], steps = x.slice(1).map((one, i) => one - x[i]).filter(one => one > 0).sort((a, b) => a - b);
  return steps[Math.floor(steps.length / 2)] ?? 1;
}

// Errors over time, by rows ahead, by series; the calibration of classes.

const charts = new Map();
function drawChart(id, options, columns) {
  find(id).replaceChildren();
  charts.get(id)?.set([[]]);
  const chart = new Chart(find(id), options);
  charts.set(id, chart);
  chart.set(columns);
}

function drawErrors() {
  const {figures} = state, isClass = figures.classes.length > 0;
  find("#over-time-part").hidden = !figures.over_time;
  if (figures.over_time) {
    const known = figures.over_time.error.map((one, at) => [figures.over_time.x[at], one]).filter(pair => pair[1] != null);
    find("#over-time-title").textContent = isClass ? "Wrong predictions over time" : "Error over time";
    drawChart("#over-time", {height: 220, time: figures.dates, steps: null, lines: [{name: isClass ? "share that is wrong" : `mean absolute error${unit() && `,${unit()}`}`, colour: "blue"}]}, [known.map(pair => pair[0]), known.map(pair => pair[1])]);
  }
  const curves = Object.entries(figures.by_step ?? {}).slice(0, 8);
  find("#by-step-part").hidden = !curves.length;
  if (curves.length) {
    const metric = figures.by_step_metric ?? "Error";
    find("#by-step-title").textContent = `${metric} by rows ahead${figures.targets.length > 1 ? ", mean of all targets" : ""}`;
    drawChart("#by-step", {height: 230, label: "rows ahead", steps: [1, 2, 5, 10, 20, 50, 100, 200, 500], lines: curves.map(([name], at) => ({name, colour: `c${at + 1}`, dash: DASHES[at]}))}, [curves[0][1].map((_, at) => at + 1), ...curves.map(pair => pair[1])]);
  }
  const bins = figures.reliability ?? [];
  find("#reliability-part").hidden = !bins.length;
  if (bins.length) drawChart("#reliability", {height: 230, label: "probability of the predicted class", steps: null, lines: [{name: "share that is right", colour: "c1", dash: []}, {name: "ideal", colour: "c5", dash: [4, 4]}]}, [bins.map(one => one.confidence), bins.map(one => one.accuracy), bins.map(one => one.confidence)]);
  drawTable();
}

const HEADINGS = {mae: "MAE", rmse: "RMSE", bias: "bias", max_error: "max error", log_loss: "log-loss", windows: "windows"};
function drawTable() {
  const {figures} = state, part = find("#by-series-part");
  part.hidden = !figures.series || figures.names.length < 2;
  if (part.hidden) return;
  const keys = Object.keys(figures.series[0]), key = state.sort ?? errorKey();
  const head = (name, text, number) => make("th", {scope: "col", class: number ? "number" : null, "aria-sort": key === name ? state.down ? "descending" : "ascending" : null}, make("button", {type: "button", onclick: () => { state.down = state.sort === name || (!state.sort && name === errorKey()) ? !state.down : name !== "name"; state.sort = name; drawTable(); }}, text));
  find("#by-series thead").replaceChildren(make("tr", {}, head("name", "Series"), make("th", {scope: "col", class: "bar-cell"}, make("span", {class: "hidden"}, "Error as a bar")), ...keys.map(one => head(one, HEADINGS[one], true))));
  const value = at => key === "name" ? figures.names[at] : figures.series[at][key];
  const order = figures.names.map((_, at) => at).sort((a, b) => { const [one, other] = [value(a), value(b)]; const sign = key === "name" ? String(one).localeCompare(String(other)) : (one ?? -Infinity) - (other ?? -Infinity); return state.down ? -sign : sign; });
  const largest = Math.max(...figures.series.map(one => one[errorKey()] ?? 0), 1e-300);
  find("#by-series tbody").replaceChildren(...order.slice(0, MAX_LISTED).map(at => make("tr", {}, make("th", {scope: "row"}, make("button", {type: "button", class: "quiet", onclick: () => { pickSeries(at); find("#explore").scrollIntoView(); }}, make("span", {class: "clip"}, figures.names[at] || "(no name)"))),
    make("td", {class: "bar-cell"}, svgBar((figures.series[at][errorKey()] ?? 0) / largest, true)), ...keys.map(one => make("td", {class: "number"}, one === "windows" ? figures.series[at][one].toLocaleString("en") : formatNumber(figures.series[at][one]))))));
  find("#by-series-note").textContent = order.length > MAX_LISTED ? `The first ${MAX_LISTED} of ${order.length.toLocaleString("en")} series in this order.` : "";
}

const run = promise => promise?.catch(problem => notify(problem.message));
if (explorer) {
  find("#series-search").addEventListener("input", listSeries);
  find("#series-search").addEventListener("keydown", event => { if (event.key === "Enter") find("#series-list button")?.click(); });
  find("#target").addEventListener("change", event => { state.target = Number(event.target.value); run(load()); });
  find("#ahead").addEventListener("change", event => { state.ahead = Number(event.target.value); run(explorer.show(explorer.range)); });
  find("#source").addEventListener("change", event => { Object.assign(state, {source: event.target.value, target: 0}); run(load()); });
  const moves = {"#earlier": () => explorer.move(-0.5), "#later": () => explorer.move(0.5), "#closer": () => explorer.zoom(0.5), "#wider": () => explorer.zoom(2), "#whole": () => explorer.show()};
  for (const [id, move] of Object.entries(moves)) act(find(id), move);
  const keys = {ArrowLeft: "#earlier", ArrowRight: "#later", "+": "#closer", "=": "#closer", "-": "#wider", 0: "#whole"};
  find("#plot").addEventListener("keydown", event => { if (keys[event.key]) { event.preventDefault(); find(keys[event.key]).click(); } });
  run(load());
}

// What a test predicted is looked at like the test set.
function look(job) {
  if (![...find("#source").options].some(one => one.value === job)) return;
  find("#source").value = job;
  find("#source").dispatchEvent(new Event("change"));
  find("#explore").scrollIntoView();
}

function listSources(tests) {
  if (!explorer) return;
  const select = find("#source"), before = select.value;
  select.replaceChildren(make("option", {value: ""}, "the test set"), ...tests.filter(one => one.has_predictions && one.state === "finished").map(one => make("option", {value: one.job}, `${one.data.slice(-60)}, ${new Date(one.created_at * 1e3).toISOString().slice(0, 16).replace("T", " ")}`)));
  select.value = before;
}

if (find("#new-data")) watchJobs(page.dataset.run, url, {look, listSources});
