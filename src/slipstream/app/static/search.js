// The page of a search: what has been tried so far, drawn again as trials end.
import {Chart, WHOLE} from "./charts.js";
import {act, ask, find, findAll, formatNumber, formatSeconds, listen, make, notify} from "./common.js";
import {bindMore, openMore} from "./more.js";
import {ParallelCoordinates} from "./parallel.js";

const page = find("#search"), run = page.dataset.run, url = page.dataset.url;
const LOOK_MS = 2000; // between two looks at the trials in training
const COLUMNS = [
  {key: "trial", title: "Trial", read: one => one.trial, isNumber: true},
  {key: "state", title: "State", read: one => one.state},
  {key: "value", title: "Score", read: one => one.value, isNumber: true},
  {key: "epochs", title: "Epochs", read: one => one.epochs, isNumber: true},
];
let state = page.dataset.state, search = null, sorting = {key: "value", down: false}, selected = null;

const history = new Chart(find("#history"), {log: true, height: 240, label: "trial", steps: WHOLE, lines: [
  {name: "best score so far", colour: "orange", stepped: true}, {name: "score of a trial", colour: "blue", dots: true}, {name: "pruned, last loss", colour: "ink", dots: true}]});
const parallel = new ParallelCoordinates(find("#parallel"), {
  select: trials => { selected = trials; find("#clear").hidden = !trials; drawTable(); },
  mark: number => { for (const row of findAll("#trials tbody tr")) row.classList.toggle("marked", Number(row.dataset.trial) === number); parallel.highlight(number); },
});

const formatParam = value => typeof value === "number" ? formatNumber(value) : typeof value === "string" ? value : value == null ? "" : JSON.stringify(value);
const isScored = one => one.value != null && ["finished", "cut off"].includes(one.state);

function drawFigures() {
  const {counts, ended, total} = search, best = search.trials.find(one => one.trial === search.best);
  const set = (name, text) => { find(`#f-${name}`).textContent = text; };
  set("done", total === null ? `${ended}` : `${ended} of ${Math.max(total, ended)}`);
  set("best", search.answer ? formatNumber(search.answer.value) : best ? formatNumber(best.value) : "–");
  find("#f-best-note").textContent = search.answer ? search.answer.note : best ? `trial ${best.trial}, validation ${search.metric}` : "";
  if (search.answer) find("#f-best-name").textContent = "The model";
  const chosen = search.chosen ?? null;
  find("#f-chosen").closest("div").hidden = chosen === null;
  set("chosen", chosen === null ? "–" : `trial ${chosen}`);
  set("running", state === "running" && search.phase === "searching" ? counts.running ?? 0 : 0);
  set("pruned", (counts.pruned ?? 0) + (counts["cut off"] ?? 0));
  set("failed", counts.failed ?? 0);
  set("speed", search.per_hour == null ? "–" : formatNumber(search.per_hour, 3));
  const busy = state === "running";
  find("#f-left-name").textContent = !busy ? "Duration" : search.phase === "retraining" ? "Now" : "Time left";
  set("left", !busy ? formatSeconds(search.seconds) : search.phase === "retraining" ? "retraining" : formatSeconds(search.left_s));
  const link = find("#best");
  link.hidden = !best;
  link.textContent = chosen === null ? "Best trial's settings to a new run" : "Chosen settings to a new run";
  if (best) link.href = newRun(chosen ?? best.trial);
}

const newRun = trial => `/new?start=${encodeURIComponent(`trial:${trial}:${run}`)}`;

function drawHistory() {
  const shown = search.trials.filter(one => one.value != null && one.state !== "running");
  let lowest = null;
  const bests = shown.map(one => { if (isScored(one)) lowest = lowest == null ? one.value : Math.min(lowest, one.value); return lowest; });
  const pick = wanted => shown.map(one => wanted(one) ? one.value : null);
  history.set([shown.map(one => one.trial), bests, pick(isScored), pick(one => one.state === "pruned")]);
}

function drawImportances() {
  if (!search.importances.length) return;
  const labels = new Map(search.axes.map(axis => [axis.name, axis.label]));
  find("#importances").replaceChildren(make("ol", {}, ...search.importances.map(([name, share]) => make("li", {title: name},
    make("span", {}, labels.get(name) ?? name), make("b", {}, `${Math.round(100 * share)} %`),
    make("meter", {min: 0, max: 1, value: share, "aria-label": name})))), make("p", {class: "help"}, "How strongly each setting separates the best trials from the others (PED-ANOVA). With a dozen trials only a hint."));
}

function drawParallel() {
  const trials = search.trials.filter(isScored);
  if (trials.length < 2) return;
  const values = trials.map(one => one.value), low = Math.min(...values), high = Math.max(...values);
  const axes = search.axes.map(axis => ({...axis, read: one => one.params[axis.name]}));
  axes.push({name: "\0score", label: `validation ${search.metric}`, low, high, log: low > 0 && high > 3 * low, read: one => one.value});
  parallel.set(axes, trials, marked());
}

// The trial that stands out: the one that retraining chose, before that the one with the lowest score.
const marked = () => search.chosen ?? search.best;

const listColumns = () => [...COLUMNS, ...search.axes.map(axis => ({key: `p:${axis.name}`, title: axis.label, name: axis.name, read: one => one.params[axis.name], isNumber: !axis.choices})),
  {key: "stopped", title: "Ended", read: one => one.stopped ?? ""}];

function compare(a, b) {
  if (a == null || b == null) return (a == null) - (b == null); // what has no value comes last
  const sign = sorting.down ? -1 : 1;
  return sign * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", {numeric: true}));
}

function drawHead() {
  const columns = listColumns();
  const focus = document.activeElement?.closest?.("th")?.dataset.key;
  find("#trials thead tr").replaceChildren(...columns.map(column => {
    const cell = make("th", {scope: "col", class: column.isNumber ? "number" : null, title: column.name ?? null, "data-key": column.key,
      "aria-sort": column.key === sorting.key ? (sorting.down ? "descending" : "ascending") : null},
    make("button", {type: "button", onclick: () => { sorting = {key: column.key, down: sorting.key === column.key && !sorting.down}; drawTable(); }}, column.title));
    return cell;
  }), make("th", {scope: "col"}, make("span", {class: "hidden"}, "Use")));
  if (focus != null) findAll("#trials thead th").find(cell => cell.dataset.key === focus)?.firstChild.focus();
}

function drawTable() {
  drawHead();
  const columns = listColumns(), by = columns.find(column => column.key === sorting.key) ?? columns[2];
  // a pruned trial's value is only its last loss: with the scores it would be misleading
  const read = one => by.key === "value" && !isScored(one) ? null : by.read(one);
  const rows = search.trials.filter(one => !selected || selected.has(one.trial)).sort((a, b) => compare(read(a), read(b)) || a.trial - b.trial);
  find("#selected").textContent = selected ? `${rows.length} of ${search.trials.length} selected` : `${search.trials.length}`;
  const focus = document.activeElement?.closest?.("#trials tbody tr")?.dataset.trial;
  find("#trials tbody").replaceChildren(...rows.map(one => make("tr", {class: one.trial === marked() ? "best" : null, "data-trial": String(one.trial),
    onpointerenter: () => parallel.highlight(one.trial), onpointerleave: () => parallel.highlight(null)},
  ...columns.map(column => makeCell(one, column)),
  make("td", {}, make("a", {href: newRun(one.trial), "aria-label": `New run from trial ${one.trial}`}, "New run")))));
  if (focus != null) findAll("#trials tbody tr").find(row => row.dataset.trial === focus)?.querySelector("a").focus();
}

function makeCell(one, column) {
  if (column.key === "trial") return make("th", {scope: "row", class: "number"}, String(one.trial));
  if (column.key === "state") return make("td", {}, make("span", {class: `state ${one.state}`}, one.state === "running" && state !== "running" ? "not finished" : one.trial === search.chosen ? `${one.state}, chosen` : one.state));
  const value = column.read(one), text = column.key === "stopped" ? value : formatParam(value);
  const isOnlyLast = column.key === "value" && one.value != null && !isScored(one);
  return make("td", {class: column.isNumber ? "number" : null, title: text.length > 30 ? text : null}, isOnlyLast ? make("span", {class: "muted"}, `(${text})`) : text);
}

function draw() {
  drawFigures();
  drawHistory();
  drawImportances();
  drawParallel();
  drawTable();
  page.dataset.ended = String(search.ended);
}

let looking = false, again = false, drawn = "";
async function look() {
  if (looking) { again = true; return; }
  looking = true;
  try {
    const answer = await ask(`/api/trials/${url}`), text = `${state} ${JSON.stringify(answer)}`;
    if (text !== drawn) {
      search = answer;
      draw();
      drawn = text;
    }
  } catch (problem) {
    notify(problem.message);
  }
  looking = false;
  if (again) { again = false; setTimeout(look, 300); }
}

// Takes the parts of the page that depend on the state from the server again.
async function refresh() {
  const fresh = new DOMParser().parseFromString(await (await fetch(location.pathname)).text(), "text/html");
  for (const id of ["verdict", "result", "texts"]) {
    const next = fresh.getElementById(id);
    if (next) find(`#${id}`).replaceWith(document.adoptNode(next));
  }
  bind();
  drawn = "";
  await look();
}

function bind() {
  act(find("#stop"), async () => { await ask(`/api/stop/${url}`, {}); find("#note").textContent = "Saves a checkpoint and stops …"; });
  act(find("#resume"), () => resume({}));
  find("#more")?.addEventListener("click", () => openMore(search ? Math.max(Math.ceil(2 * (search.total ?? search.minutes ?? 5)), 1) : 64));
}

async function resume(body) {
  await ask(`/api/search/resume/${url}`, body);
  find("#note").textContent = "Starts …";
}

bindMore(total => resume(search?.total === null ? {minutes: total} : {trials: total}));
find("#clear").addEventListener("click", () => parallel.clear());

let jobState = null;
bind();
await look();
const ENDS = ["search", "resume", "trial", "searched", "retraining", "retrained", "end"];
listen(run, {
  reset: look,
  lines: events => { if (events.some(event => ENDS.includes(event.event))) look(); },
  run: now => {
    if (now.state === "missing") { notify(now.note); return; }
    const changed = now.state !== state || (jobState !== null && now.job_state !== jobState);
    jobState = now.job_state;
    state = now.state;
    page.dataset.state = state;
    find("#state").textContent = state;
    find("#state").className = `state ${state}`;
    if (changed) refresh().catch(problem => notify(problem.message));
  },
});
setInterval(() => { if (state === "running" && !document.hidden) look(); }, LOOK_MS);
