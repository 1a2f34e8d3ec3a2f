import {ask, find, findAll, formatNumber, formatSeconds, make, notify} from "./common.js";
import {askUntilDone, formatTime, Plots} from "./data_plots.js";

const PAGE = 20, MAX_PLOTS = 4, MAX_CHIPS = 60, MAX_READ = 400e6, MAX_LISTED = 200;
const content = find("#content"), query = new URLSearchParams(location.search);
const count = number => number.toLocaleString("en");
const url = (what, more = {}) => {
  const all = new URLSearchParams(query);
  for (const [name, value] of Object.entries(more)) all.set(name, value);
  return `/api/data/${what}?${all}`;
};
let table = null, plots = null, begin = 0;

function fail(message) {
  find("#state").hidden = true;
  find("#problem").textContent = message;
  find("#problem").hidden = false;
  find("#reading").open = true;
}

function setFigures(values) {
  find("#figures").replaceChildren(...values.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}

// rows

async function showRows(from) {
  const page = await ask(url("rows", {begin: Math.max(from, 0), count: PAGE}));
  begin = page.begin;
  find("#rows thead").replaceChildren(make("tr", {}, make("th", {scope: "col", class: "number"}, "Row"), ...page.names.map(name => make("th", {scope: "col", title: name}, name))));
  find("#rows tbody").replaceChildren(...page.rows.map((cells, at) => make("tr", {}, make("th", {scope: "row"}, count(begin + at + 1)),
    ...cells.map(cell => make("td", {class: cell === null ? "none" : null, title: cell}, cell ?? "–")))));
  const last = begin + page.rows.length;
  const more = table.columns.length > page.names.length ? `, ${page.names.length} of ${count(table.columns.length)} columns` : "";
  find("#page").textContent = `rows ${count(begin + 1)} to ${count(last)} of ${count(table.rows)}${more}`;
  find("#row").value = begin + 1;
}

async function turn(action) {
  const last = Math.max(table.rows - PAGE, 0);
  const goal = {first: 0, back: begin - PAGE, next: Math.min(begin + PAGE, last), last}[action];
  try { await showRows(goal); } catch (problem) { notify(problem.message); }
}

// columns

function drawBars(counts, label) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const most = Math.max(...counts, 1), width = 160 / counts.length;
  const set = (node, values) => { for (const [name, value] of Object.entries(values)) node.setAttribute(name, value); return node; };
  set(svg, {class: "bars", viewBox: "0 0 160 32", role: "img", "aria-label": label});
  counts.forEach((number, at) => {
    const height = number ? Math.max(30 * number / most, 1) : 0;
    svg.append(set(document.createElementNS(svg.namespaceURI, "rect"), {x: at * width, y: 32 - height, width: Math.max(width - 0.5, 0.5), height}));
  });
  return svg;
}

const formatValue = (value, type) => value == null ? "–" : type === "time" ? formatTime(value) : formatNumber(value);

function describeTexts(facts) {
  if (facts.distinct == null) return "many different texts";
  const shown = facts.texts.slice(0, 3).map(([text, number]) => `${text} (${count(number)})`).join(", ");
  return `${count(facts.distinct)} different: ${shown}${facts.distinct > 3 ? " …" : ""}`;
}

function fillColumn(number, facts) {
  const cells = find(`#columns tr[data-column="${number}"]`)?.children;
  if (!cells) return;
  const {type} = table.columns[number];
  const share = 100 * facts.missing / Math.max(facts.rows, 1);
  cells[3].textContent = facts.missing ? `${formatNumber(share, 2)} %` : "0";
  cells[3].title = `${count(facts.missing)} rows`;
  for (const [at, name] of [[4, "low"], [5, "mean"], [6, "high"]]) cells[at].textContent = formatValue(facts[name], type);
  const range = `histogram from ${formatValue(facts.low, type)} to ${formatValue(facts.high, type)}`;
  cells[7].replaceChildren(facts.histogram ? drawBars(facts.histogram, range) : facts.texts ? make("div", {class: "common clip"}, describeTexts(facts)) : "");
}

function listColumns() {
  find("#columns tbody").replaceChildren(...table.columns.slice(0, MAX_LISTED).map((column, number) => make("tr", {"data-column": String(number)},
    make("th", {scope: "row"}, make("span", {class: "clip", title: column.name}, column.name), column.unit ? make("small", {}, column.unit) : ""),
    make("td", {}, column.type), make("td", {class: "muted"}, ""), ...["", "", "", ""].map(() => make("td", {class: "number"}, "")), make("td", {}, ""))));
}

async function readColumns() {
  if (table.rows * table.columns.length > MAX_READ) {
    find("#gaps").textContent = "The table is large: plot a column to see its values.";
    return;
  }
  for (let number = 0; number < Math.min(table.columns.length, MAX_LISTED); number++) {
    try { fillColumn(number, await askUntilDone(url("column", {column: number}))); } catch { /* the plot says why */ }
  }
  await showMatrix();
}

// correlations

async function showMatrix() {
  const {columns, values} = await askUntilDone(url("correlations"));
  if (columns.length < 2) return;
  const names = columns.map(number => table.columns[number].name);
  const label = (scope, name) => make("th", {scope, title: name}, name);
  find("#matrix").replaceChildren(
    make("thead", {}, make("tr", {}, make("td"), ...names.map(name => label("col", name)))),
    make("tbody", {}, ...values.map((row, at) => make("tr", {}, label("row", names[at]), ...row.map((value, other) => {
      if (value === null) return make("td", {class: "muted"}, "–");
      const size = Math.abs(value);
      const cell = make("td", {class: `${value < 0 ? "down" : "up"}${size > 0.6 ? " strong" : ""}`, title: `${names[at]} and ${names[other]}: ${value.toFixed(4)}`}, value.toFixed(2));
      cell.style.setProperty("--strength", `${Math.round(size > 0.6 ? 60 + 40 * size : 70 * size)}%`);
      return cell;
    })))));
  const pairs = values.flatMap((row, at) => row.slice(0, at).map((value, other) => ({value, text: `${names[other]} and ${names[at]} ${value?.toFixed(2)}`})))
    .filter(pair => pair.value !== null).sort((a, b) => Math.abs(b.value) - Math.abs(a.value)).slice(0, 3);
  find("#strongest").textContent = pairs.length ? `The strongest: ${pairs.map(pair => pair.text).join(", ")}.` : "";
  find("#matrix-section").hidden = false;
}

// plots

function toggle(button, number) {
  const isShown = plots.plots.has(number);
  button.setAttribute("aria-pressed", String(!isShown));
  if (isShown) plots.hide(number);
  else plots.show(number, label(table.columns[number]));
}

const label = column => column.unit ? `${column.name} [${column.unit}]` : column.name;

function drawRange() {
  const [low, high] = plots.range;
  const format = plots.isDate ? formatTime : plots.axis === "row" ? value => count(Math.round(value) + 1) : value => formatNumber(value, 8);
  find("#range").textContent = plots.extent ? `${plots.axis === "row" ? "rows " : ""}${format(low)} to ${format(high)}` : "";
}

function offerPlots() {
  const times = table.time?.columns ?? [];
  const usable = table.columns.map((column, number) => ({column, number}))
    .filter(({column}) => !times.includes(column.name) && ["number", "boolean", "time"].includes(column.type));
  plots = new Plots(find("#plots"), {query, hasDates: Boolean(table.time?.is_date), onChange: () => drawRange()});
  if (table.time) plots.axis = "time";
  find("#chosen").replaceChildren(...usable.slice(0, MAX_CHIPS).map(({column, number}) => {
    const button = make("button", {type: "button", "aria-pressed": "false"}, label(column));
    button.addEventListener("click", () => toggle(button, number));
    return button;
  }));
  findAll("#chosen button").slice(0, MAX_PLOTS).forEach(button => button.click());
  for (const button of findAll("[data-zoom]")) button.addEventListener("click", () => plots.act(button.dataset.zoom));
  for (const button of findAll("[data-axis]")) button.addEventListener("click", () => setAxis(button.dataset.axis));
  find("#series").addEventListener("change", event => plots.restart({series: event.target.value}));
}

function setAxis(axis) {
  for (const button of findAll("[data-axis]")) button.setAttribute("aria-pressed", String(button.dataset.axis === axis));
  plots.restart({axis});
}

async function showTime() {
  if (!table.time) return;
  const time = await askUntilDone(url("column", {column: "time"}));
  const unit = table.time.is_date ? formatSeconds : formatNumber;
  if (time.ordered) find("#axis").hidden = false;
  else if (plots.axis === "time" && plots.series === "") setAxis("row");
  const [longest] = time.longest;
  const where = longest ? table.time.is_date ? formatTime(longest.begin) : formatNumber(longest.begin, 8) : "";
  const most = longest ? `; the longest is ${unit(longest.length)} after ${where} (row ${count(longest.row)})` : "";
  find("#gaps").textContent = `Time: ${table.time.columns.join(" and ")}, usual step ${unit(time.step)}, ${count(time.gaps)} ${time.gaps === 1 ? "gap" : "gaps"}${most}.`;
  return time;
}

async function showFindings() {
  const found = await askUntilDone(url("findings"));
  for (const column of found.columns) {
    const number = table.columns.findIndex(one => one.name === column.name);
    const cells = find(`#columns tr[data-column="${number}"]`)?.children;
    if (cells) cells[2].textContent = column.role === "ignored" ? "" : column.role;
  }
  const remarks = found.problems.map(one => one.column ? `${one.column}: ${one.message}` : one.message);
  find("#remarks ul").replaceChildren(...remarks.slice(0, 50).map(text => make("li", {}, text)));
  find("#remarks").hidden = !remarks.length;
  find("#toml").textContent = found.toml;
  const {series, by, more} = await askUntilDone(url("series"));
  if (!series.length) return;
  find("#series").append(...series.map((one, at) => make("option", {value: String(at)}, `${one.name} (${count(one.rows)} rows)`)));
  find("#series-label").title = `by ${by.join(" and ")}${more ? `; ${count(more)} more are not listed` : ""}`;
  find("#series-label").hidden = false;
  if (table.time) find("#axis").hidden = false;
  // times start again with every series: the first one is shown
  if (plots.axis === "row" && table.time) {
    find("#series").value = "0";
    plots.series = "0";
    setAxis("time");
  }
}

async function open() {
  const state = find("#state");
  table = await askUntilDone(url("table"), share => {
    find("progress", state).value = share;
    find("span", state).textContent = `Reading … ${Math.round(100 * share)} %`;
  });
  state.hidden = true;
  content.hidden = false;
  find("#actions").hidden = false;
  setFigures([["Rows", count(table.rows)], ["Columns", count(table.columns.length)], ["Format", table.format || "folder"], ["Time", table.time ? table.time.columns.join(", ") : "none"]]);
  listColumns();
  const quietly = promise => promise.catch(problem => notify(problem.message));
  quietly(showRows(0)); // before the plots, which may take longer
  offerPlots();
  await quietly(showTime());
  quietly(showFindings());
  quietly(readColumns());
}

find("#pager").addEventListener("submit", event => {
  event.preventDefault();
  const row = Number.parseInt(find("#row").value.replaceAll(",", ""), 10);
  if (row > 0) showRows(row - 1).catch(problem => notify(problem.message));
});
for (const button of findAll("[data-page]")) button.addEventListener("click", () => turn(button.dataset.page));
try { await open(); } catch (problem) { fail(problem.message); }
