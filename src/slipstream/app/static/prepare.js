// Prepare: the server changes the draft, checks it and computes what is shown; this page draws it.
import {act, ask, find, findAll, formatNumber, make, notify} from "./common.js";
import {Chart} from "./charts.js";

const ROLES = JSON.parse(find("#roles").textContent);
const MAX_COLUMNS = 60, COLOURS = {train: "blue", val: "orange", test: "green"};
const SPLIT = ["train", "val", "test", "rows", "by", "folders", "stratified", "walk_forward", "window", "purge", "embargo"];
const SHOWN = {shares: ["train", "val", "test", "stratified"], rows: ["rows"], dates: ["rows"], walk: ["walk_forward", "val", "test", "window", "purge", "embargo"], by: [], folders: []};
const PRESETS = {shares: {train: "0.7", val: "0.1", test: "0.2"}, walk: {walk_forward: "5"}, folders: {folders: "true"}};
const work = find("#work");
let state = null, draft = null, updates = 0, allColumns = false, splitKind = null, setsOf = {}, splitAnswer = null;

// ---- the draft

// One change after the other, each on the draft that the one before has left: none is lost.
let queue = Promise.resolve(), edits = [];
function update(change = [], options = {}) {
  const number = ++updates;
  const sent = queue.then(() => send(number, change, options));
  queue = sent.catch(() => {});
  return sent;
}

async function send(number, change, {redraw = true}) {
  if (!change.length && draft && number !== updates) return; // the next one has these edits too
  edits = [];
  const body = draft ? {draft, change} : {file: work.dataset.file, start: work.dataset.start};
  let answer;
  try {
    answer = await ask("/api/prepare/draft", body);
  } catch (problem) {
    if (!state) { find("#loading").textContent = problem.message; find("#loading").className = "message bad"; } else notify(problem.message);
    return;
  }
  state = answer;
  if (redraw) {
    draft = answer.draft; // otherwise the fields go on writing into this one
    for (const edit of edits) edit(); // what was typed meanwhile
    if (edits.length) edited();
  }
  find("#loading").hidden = true;
  work.hidden = false;
  if (redraw) drawForms();
  drawChecks();
  refresh();
}

let waiting;
// Writes what a person types into the draft, again where an answer replaces the draft meanwhile.
function type(write) {
  edits.push(write);
  write();
  edited();
}
const edited = () => { clearTimeout(waiting); waiting = setTimeout(() => update([], {redraw: false}), 250); };

function drawForms() {
  find("#about").textContent = `${draft.settings["data.path"] ?? ""}${state.rows ? `: ${state.rows.toLocaleString("en")} rows, ${state.series}` : ""}`;
  find("#columns-list").replaceChildren(...state.columns.map(column => make("option", {value: column.name})));
  drawSteps();
  for (const control of findAll("[data-setting]")) setValue(control, draft.settings[control.dataset.setting] ?? "");
  drawSplitForm();
  if (!find("#save-name").value && state.name) find("#save-name").value = `${state.name}.toml`;
}

function setValue(control, value) {
  if (control.tagName === "SELECT" && ![...control.options].some(option => option.value === value)) control.append(make("option", {value}, value));
  control.value = value;
}

function drawChecks() {
  drawColumns();
  for (const control of findAll("[data-setting]")) mark(control.closest(".field"), control, state.wrong[control.dataset.setting]);
  const message = state.step ? state.wrong["data.prepare"] : "";
  findAll("#steps > li").forEach((node, at) => {
    const mine = at + 1 === state.step ? message : "";
    node.classList.toggle("wrong", Boolean(mine));
    const place = find(":scope > .problem", node);
    place.textContent = mine;
    place.hidden = !mine;
  });
  drawProblems();
  for (const [id, text] of [["#toml", state.toml], ["#command", state.command]]) {
    if (text) find(id).textContent = text;
    find(id).classList.toggle("stale", !text);
  }
  find("#unused").textContent = (state.unused ?? []).join("\n");
  find("#continue").disabled = find("#save").disabled = !state.ready;
  findAll("[data-rows]").forEach(button => { button.disabled = !state.ready; });
  const set = findAll("details.advanced [data-setting]").filter(control => control.value.trim()).length;
  find("#rows-count").textContent = set ? `${set} set` : "";
}

function mark(field, control, message) {
  field.classList.toggle("wrong", Boolean(message));
  control.setAttribute("aria-invalid", String(Boolean(message)));
  const place = find(".problem", field);
  place.textContent = message ?? "";
  place.hidden = !message;
}

const makeFixes = fixes => fixes.length ? make("div", {class: "buttons"}, ...fixes.map(fix => make("button", {type: "button", class: "fix", onclick: () => update(fix.change)}, fix.title))) : "";

// What training would say about the draft and its data; null while that is not known.
let verdict = null, comparing = null;
async function compare() {
  comparing?.abort();
  verdict = null;
  find("#ready").textContent = state.ready ? "Compares the draft with the data …" : "";
  if (!state.ready) return;
  const mine = comparing = new AbortController();
  try {
    verdict = await ask("/api/prepare/ready", {draft}, mine.signal);
  } catch (problem) {
    if (problem.name !== "AbortError") find("#ready").textContent = problem.message;
    return;
  }
  if (mine !== comparing) return;
  const {windows, sample_rows: sample, rows, unchecked} = verdict;
  const parts = [verdict.error ? "Not ready: see Problems." : unchecked ? "Not all of it could be compared with the data." : "Ready."];
  if (sample) parts.push(`Columns were compared on the first ${sample.toLocaleString("en")} rows${rows ? `, lengths on all ${rows.toLocaleString("en")}` : ""}.`);
  if (windows) parts.push(`${["train", "val", "test"].map(name => `${(windows[name] ?? 0).toLocaleString("en")} ${name}`).join(", ")} windows.`);
  if (unchecked) parts.push(`${unchecked}.`);
  find("#ready").textContent = parts.join(" ");
  drawProblems();
}

function drawProblems() {
  const said = verdict?.error ? [{message: verdict.error, fixes: verdict.fixes, kind: "error"}] : [];
  const open = [...said, ...state.problems.filter(one => !one.answer)], answered = state.problems.filter(one => one.answer);
  const describe = one => [one.column ? make("b", {}, `${one.column.slice(0, 80)} `) : "", one.message];
  find("#problems").replaceChildren(...(open.length ? open.map(one => make("li", {class: one.kind}, ...describe(one), makeFixes(one.fixes))) : [make("li", {class: "muted"}, "None that the draft leaves open.")]));
  const details = find("#answers");
  details.hidden = !answered.length;
  find("summary", details).textContent = `${answered.length} that the draft answers`;
  find("ul", details).replaceChildren(...answered.map(one => make("li", {}, ...describe(one), make("span", {class: "muted"}, ` (${one.answer})`))));
}

// ---- columns

function describeColumn(column) {
  const parts = [column.made_by ? `made by step ${column.made_by}` : column.type];
  if (column.unit) parts[0] += `, ${column.unit}`;
  if (column.low != null) parts.push(`${formatNumber(column.low)} to ${formatNumber(column.high)}`);
  if (column.distinct != null) parts.push(`${column.distinct} values`);
  if (column.missing) parts.push(`${formatNumber(100 * column.missing, 2)} % missing`);
  return parts.join(" · ");
}

function drawColumns() {
  const text = find("#filter").value.toLowerCase();
  const matching = state.columns.filter(column => column.name.toLowerCase().includes(text));
  const some = allColumns ? matching : matching.slice(0, MAX_COLUMNS);
  find("#filter").hidden = state.columns.length < 15;
  find("#more-columns").hidden = some.length === matching.length;
  const focused = document.activeElement?.closest?.(".roles")?.dataset.column;
  const rows = some.map((column, at) => make("tr", {},
    make("th", {scope: "row", title: column.name.slice(0, 300)}, make("span", {class: "clip"}, column.name.slice(0, 300)), make("small", {}, describeColumn(column))),
    make("td", {}, column.course ? make("span", {class: "course", "aria-hidden": "true"}, column.course) : ""),
    make("td", {}, makeRoles(column, at))));
  find("#columns").replaceChildren(make("table", {class: "compact"}, make("thead", {}, make("tr", {}, ...["Column", "Course", "Role"].map(title => make("th", {}, title)))), make("tbody", {}, ...rows)));
  if (focused != null) findAll(".roles").find(node => node.dataset.column === focused)?.querySelector("input:checked")?.focus();
}

function makeRoles(column, at) {
  const roles = column.role === "target" || column.role === "output" ? [...ROLES.slice(0, 4), "output", ...ROLES.slice(4)] : ROLES;
  const group = make("div", {class: "roles", role: "radiogroup", "aria-label": `Role of ${column.name.slice(0, 100)}`}, ...roles.map(role =>
    make("label", {class: role}, make("input", {type: "radio", name: `role-${at}`, value: role, checked: role === column.role, onchange: () => update([{role: [column.name, role]}])}), make("span", {}, role))));
  group.dataset.column = column.name;
  return group;
}

find("#filter").addEventListener("input", drawColumns);
find("#more-columns").addEventListener("click", () => { allColumns = true; drawColumns(); });

// ---- steps

function drawSteps() {
  find("#no-steps").hidden = draft.steps.length > 0;
  find("#steps").replaceChildren(...draft.steps.map(makeStep));
  const chosen = find("#p-step").value;
  find("#p-step").replaceChildren(make("option", {value: "0"}, "rows of the file"), ...draft.steps.map((step, at) => make("option", {value: String(at + 1)}, `${at + 1} ${step.step}`)));
  find("#p-step").value = Number(chosen) <= draft.steps.length && chosen ? chosen : String(draft.steps.length);
}

function makeStep(step, at) {
  const button = (title, label, action, disabled = false) => make("button", {type: "button", class: "quiet", "aria-label": `${label} step ${at + 1}`, disabled, onclick: action}, title);
  const node = make("li", {}, make("div", {class: "head"}, make("b", {}, `${at + 1} ${step.step}`),
    button("Preview", "Preview", () => { find("#p-step").value = String(at + 1); find("#p-column").value = ""; preview(); find("#h-preview").scrollIntoView({block: "start"}); }),
    button("Up", "Move up", () => move(at, at - 1), at === 0), button("Down", "Move down", () => move(at, at + 1), at === draft.steps.length - 1),
    button("Remove", "Remove", () => update([{remove: at}]))),
    make("p", {class: "problem", hidden: true}), find(`#step-${step.step}`).content.cloneNode(true));
  node.addEventListener("keydown", event => {
    const way = {ArrowUp: -1, ArrowDown: 1}[event.key];
    if (!event.altKey || !way) return;
    event.preventDefault();
    move(at, at + way);
  });
  for (const control of findAll("[data-key]", node)) {
    setValue(control, step[control.dataset.key] ?? "");
    control.addEventListener("input", () => type(() => writeStep(at, step.step, control.dataset.key, control.value)));
    if (["columns", "several"].includes(control.dataset.kind)) makeChips(control, step, at);
  }
  return node;
}

function writeStep(at, kind, key, value) {
  if (draft.steps[at]?.step === kind) draft.steps[at][key] = value;
}

async function move(from, to) {
  if (to < 0 || to >= draft.steps.length) return;
  await update([{move: [from, to]}]);
  find(`#steps > li:nth-child(${to + 1}) button`)?.focus();
}

const parseList = text => { try { const list = JSON.parse(text || "[]"); return Array.isArray(list) ? list.map(String) : []; } catch { return []; } };

function makeChips(control, step, at) {
  const numeric = state.columns.filter(column => ["number", "boolean"].includes(column.type));
  const names = control.dataset.choices ? control.dataset.choices.split(" ") : numeric.map(column => column.name);
  if (names.length > 200) return; // names are typed
  control.hidden = true;
  find(".chips", control.closest(".field")).replaceChildren(...names.map(name => make("button", {
    type: "button", "aria-pressed": String(parseList(control.value).includes(name)),
    onclick: event => {
      const list = parseList(control.value);
      const next = names.filter(one => (one === name) !== list.includes(one));
      control.value = next.length ? JSON.stringify(next) : "";
      event.currentTarget.setAttribute("aria-pressed", String(next.includes(name)));
      const text = control.value;
      type(() => writeStep(at, step.step, control.dataset.key, text));
    },
  }, name.slice(0, 100))));
}

act(find("#add"), () => update([{add: {step: find("#kind").value}}]));

// ---- before and after

const pChart = new Chart(find("#p-chart"), {height: 240, gaps: true, steps: null, lines: []});
let previews = 0;

async function preview() {
  const number = ++previews;
  find("#p-chart").classList.add("stale");
  const body = {draft, number: Number(find("#p-step").value || 0), column: find("#p-column").value, series: find("#p-series").value, file: find("#p-file").value, begin: Number(find("#p-begin").value) || 0, count: Number(find("#p-count").value) || 20000};
  let answer;
  try { answer = await ask("/api/prepare/preview", body); } catch (problem) { answer = {error: problem.message, fixes: []}; }
  if (number !== previews) return;
  showError("#p-problem", answer);
  if (answer.error) return;
  find("#p-chart").classList.remove("stale");
  fillOptions("#p-column", answer.columns, answer.column);
  fillOptions("#p-series", answer.series, answer.shown);
  fillOptions("#p-file", answer.files, answer.file);
  find("#p-file").closest(".field").hidden = answer.files.length < 2;
  const {before, after} = answer;
  const parts = [before && {...before, name: after ? "before" : "as in the file", colour: after ? "ink" : "blue"}, after && {...after, name: "after", colour: "blue"}].filter(Boolean);
  pChart.options.lines = parts.map(({name, colour}) => ({name, colour}));
  pChart.options.time = answer.dates;
  pChart.columns = parts.length > 1 ? uPlot.join(parts.map(part => [part.x, part.y])) : [parts[0].x, parts[0].y];
  pChart.rebuild();
  const [first, last] = answer.range;
  const count = (part, name) => part ? `${part.num_rows.toLocaleString("en")} rows ${name}${part.num_missing ? `, ${part.num_missing.toLocaleString("en")} without a value` : ""}` : "";
  const classes = (after ?? before).classes;
  find("#p-about").textContent = [`Computed on rows ${first.toLocaleString("en")} to ${(last - 1).toLocaleString("en")} of ${answer.file}${state.rows ? ` (of ${state.rows.toLocaleString("en")} in all)` : ""}; series ${answer.shown.slice(0, 100)}: ${[count(before, "before"), count(after, "after")].filter(Boolean).join(", ")}.`,
    classes.length ? `Classes: ${classes.map((name, at) => `${at} ${name}`).join(", ")}.` : "", ...answer.notes].filter(Boolean).join(" ");
}

function fillOptions(selector, names, value) {
  find(selector).replaceChildren(...names.map(name => make("option", {value: name}, name.slice(0, 100))));
  find(selector).value = value;
}

function showError(selector, answer) {
  const place = find(selector);
  place.hidden = !answer.error;
  place.replaceChildren(answer.error ?? "", answer.error ? makeFixes(answer.fixes ?? []) : "");
}

find("#p-step").addEventListener("change", () => { find("#p-column").value = ""; preview(); });
for (const id of ["#p-column", "#p-series", "#p-file", "#p-begin", "#p-count"]) find(id).addEventListener("change", preview);

// ---- split

const sChart = new Chart(find("#s-chart"), {height: 240, gaps: true, steps: null, lines: []});
let splits = 0;
const splitOf = name => draft.settings[`data.split.${name}`] ?? "";

function drawSplitForm() {
  const kind = splitOf("walk_forward") ? "walk" : splitOf("by") ? "by" : splitOf("folders") === "true" ? "folders" : splitOf("rows") ? "rows" : "shares";
  if (!(splitKind === "dates" && ["rows", "shares"].includes(kind)) && !(splitKind === "by" && kind === "shares")) splitKind = kind;
  find("#split-kind").value = splitKind;
  for (const name of SPLIT) {
    const field = find(`[data-of="data.split.${name}"]`);
    if (field) field.hidden = !SHOWN[splitKind].includes(name) || (name === "stratified" && draft.settings["data.task"] !== "classify");
  }
  findAll("[data-dates]").forEach(node => { node.hidden = splitKind !== "dates"; });
  findAll("[data-by]").forEach(node => { node.hidden = splitKind !== "by"; });
  if (splitKind === "by") {
    const names = ["series", ...state.columns.map(column => column.name).filter(name => name !== "series")];
    fillOptions("#by-column", names, splitOf("by") || "series");
    loadGroups();
  }
}

const setSplit = values => update([{set: {...Object.fromEntries(SPLIT.map(name => [`data.split.${name}`, ""])), ...Object.fromEntries(Object.entries(values).map(([name, text]) => [`data.split.${name}`, text]))}}]);

find("#split-kind").addEventListener("change", () => {
  splitKind = find("#split-kind").value;
  if (PRESETS[splitKind]) return setSplit(PRESETS[splitKind]);
  if (splitKind === "rows" && splitAnswer) return setSplit({rows: JSON.stringify(["train", "val", "test"].map(name => Math.max(Math.floor((splitAnswer.folds[0].rows[name] ?? 1) / splitAnswer.num_series), 1)))});
  drawSplitForm();
});

act(find("#use-dates"), async () => {
  const answer = await ask("/api/prepare/dates", {draft, borders: ["#date-val", "#date-test", "#date-end"].map(id => find(id).value)});
  showError("#s-problem", answer);
  if (!answer.error) await setSplit({rows: JSON.stringify(answer.rows)});
});

async function loadGroups() {
  const column = find("#by-column").value;
  const answer = await ask("/api/prepare/groups", {draft, column}).catch(problem => ({error: problem.message, fixes: []}));
  if (answer.error) return showError("#s-problem", answer);
  const val = parseList(splitOf("val")), test = parseList(splitOf("test"));
  const values = answer.values;
  setsOf = Object.fromEntries(values.map((value, at) => [value, splitOf("by") === column && (val.length || test.length) ? (val.includes(value) ? "val" : test.includes(value) ? "test" : "train") : at === values.length - 1 ? "test" : at === values.length - 2 ? "val" : "train"]));
  find("#by-values").replaceChildren(...values.map(value => make("button", {type: "button", class: `set-${setsOf[value]}`, "aria-label": `${value.slice(0, 100)}: ${setsOf[value]}`, onclick: () => {
    setsOf[value] = {train: "val", val: "test", test: "train"}[setsOf[value]];
    return useGroups(column);
  }}, make("i"), `${value.slice(0, 60)}: ${setsOf[value]}`)));
  if (splitOf("by") !== column) return useGroups(column);
}

function useGroups(column) {
  const list = which => JSON.stringify(Object.keys(setsOf).filter(value => setsOf[value] === which));
  return setSplit({by: column, val: list("val"), test: list("test")});
}

find("#by-column").addEventListener("change", () => { draft.settings["data.split.by"] = ""; loadGroups(); });

async function showSplit() {
  const number = ++splits;
  find("#s-chart").classList.add("stale");
  const body = {draft, series: find("#s-series").value};
  const answer = await ask("/api/prepare/split", body).catch(problem => ({error: problem.message, fixes: []}));
  if (number !== splits) return;
  showError("#s-problem", answer);
  find("#sets").classList.toggle("stale", Boolean(answer.error));
  if (answer.error) return;
  find("#s-chart").classList.remove("stale");
  splitAnswer = answer;
  fillOptions("#s-series", answer.series, answer.shown);
  const fold = Math.min(Number(find("#s-fold").value || answer.folds.length - 1), answer.folds.length - 1);
  find("#fold-field").hidden = answer.folds.length < 2;
  find("#s-fold").replaceChildren(...answer.folds.map((one, at) => make("option", {value: String(at)}, `${at + 1}: ${one.label}`)));
  find("#s-fold").value = String(fold);
  drawFold();
}

function drawFold() {
  const answer = splitAnswer, one = answer.folds[Number(find("#s-fold").value || 0)];
  sChart.options.lines = [{name: answer.target.slice(0, 60), colour: "ink"}];
  sChart.options.time = answer.dates;
  sChart.options.regions = one.spans.map(([from, to, name]) => ({from, to, colour: COLOURS[name]}));
  sChart.columns = [answer.plot.x, answer.plot.y];
  sChart.rebuild();
  const format = x => answer.dates ? new Date(x * 1000).toISOString().slice(0, 16).replace("T", " ") : formatNumber(x, 8);
  find("#sets tbody").replaceChildren(...["train", "val", "test"].map(name => {
    const mine = one.spans.filter(span => span[2] === name);
    const left = one.left_out[name] ? ` (${one.left_out[name].toLocaleString("en")} without a target left out)` : "";
    return make("tr", {}, make("th", {scope: "row", class: `set-${name}`}, make("i"), name), make("td", {class: "number"}, one.rows[name].toLocaleString("en")), make("td", {class: "number"}, `${one.windows[name].toLocaleString("en")}${left}`),
      make("td", {}, mine.length ? `${format(mine[0][0])} to ${format(mine.at(-1)[1])}${mine.length > 1 ? `, in ${mine.length} parts` : ""}` : "none"));
  }));
  drawFolds();
  find("#s-about").textContent = [`Over all ${answer.rows.toLocaleString("en")} rows of ${answer.num_series.toLocaleString("en")} series${answer.gaps ? `, with ${answer.gaps.toLocaleString("en")} gaps that no window crosses` : ""}.`, ...answer.notes].join(" ");
}

function drawFolds() {
  const answer = splitAnswer, place = find("#folds");
  if (answer.folds.length < 2) return place.replaceChildren();
  const space = "http://www.w3.org/2000/svg", [low, high] = [answer.plot.x[0], answer.plot.x.at(-1)];
  const node = (tag, values) => { const one = document.createElementNS(space, tag); for (const [name, value] of Object.entries(values)) one.setAttribute(name, value); return one; };
  const place_x = x => 60 + 640 * (x - low) / (high - low || 1);
  const svg = node("svg", {viewBox: `0 0 700 ${18 * answer.folds.length}`, role: "img", "aria-label": `${answer.folds.length} folds`});
  answer.folds.forEach((fold, at) => {
    const group = node("g", {});
    const text = node("text", {x: 0, y: 18 * at + 12});
    text.textContent = `fold ${at + 1}`;
    group.append(text, node("rect", {x: 60, y: 18 * at + 2, width: 640, height: 12, class: "back"}), ...fold.spans.map(([from, to, name]) => node("rect", {x: place_x(from), y: 18 * at + 2, width: Math.max(place_x(to) - place_x(from), 0.5), height: 12, class: name})));
    group.addEventListener("click", () => { find("#s-fold").value = String(at); drawFold(); });
    svg.append(group);
  });
  place.replaceChildren(svg);
}

find("#s-series").addEventListener("change", showSplit);
find("#s-fold").addEventListener("change", drawFold);

// ---- all of it

let lastDraft = "";
function refresh() {
  const now = JSON.stringify(draft);
  if (now === lastDraft) return;
  lastDraft = now;
  preview();
  showSplit();
  compare();
}

for (const control of findAll("[data-setting]")) control.addEventListener("input", () => { const text = control.value; type(() => { draft.settings[control.dataset.setting] = text; }); });

act(find("#continue"), async () => { location.assign((await ask("/api/prepare/continue", {draft})).url); });
findAll("[data-rows]").forEach(button => act(button, async () => {
  const file = await ask("/api/prepare/rows", {draft, ending: button.dataset.rows});
  const link = make("a", {href: URL.createObjectURL(file.blob), download: file.name});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}));

act(find("#save"), async () => {
  const body = {draft, name: find("#save-name").value};
  let answer;
  try { answer = await ask("/api/prepare/save", body); } catch (problem) {
    if (!problem.body?.exists) throw problem;
    if (!confirm(`${body.name} exists. Replace it?`)) return;
    answer = await ask("/api/prepare/save", {...body, replace: true});
  }
  find("#saved").textContent = `Saved; run it with: ${answer.command}`;
});
find("#file").addEventListener("change", () => { if (find("#file").value) location.assign(`/prepare?file=${encodeURIComponent(find("#file").value)}`); });

if (work.dataset.file || work.dataset.start) await update();
