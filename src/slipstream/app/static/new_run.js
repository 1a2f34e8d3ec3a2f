import {ask, encodePath, find, findAll, formatNumber, formatSeconds, make, notify} from "./common.js";

const given = JSON.parse(find("#values").textContent);
const form = find("#form"), data = find("#data"), start = find("#start");
// The forms of searches and of pre-training are this one too, with parts and routes of their own.
const {path: here, api} = form.dataset;
const fields = new Map(findAll("[data-setting]").map(node => [node.dataset.setting, node]));
const controlOf = node => find("input, select", node);
const MAX_REMARKS = 12, READING = ["data.encoding", "data.decimal", "data.skip_rows", "data.names", "data.sheet", "data.variable"];
let columns = [], rows = 0, checks = 0, config = null;
// Settings that a person has touched: what is suggested never replaces them.
const touched = new Set(), ofPreset = new Set();
// Number of the last look into a file, and whether it goes on: nothing starts meanwhile.
let looks = 0, isReading = false;

const parseList = text => {
  try { const list = JSON.parse(text || "[]"); return Array.isArray(list) ? list.map(String) : []; } catch { return []; }
};

function drawColumns() {
  const names = columns.map(column => column.name);
  for (const [setting, node] of fields) {
    if (node.dataset.kind === "column") {
      find("datalist", node).replaceChildren(...names.map(value => make("option", {value})));
    } else if (node.dataset.kind === "columns") {
      const control = controlOf(node), chosen = parseList(control.value);
      control.hidden = names.length > 0;
      const usable = columns.filter(column => column.type === "number" || chosen.includes(column.name) || setting === "data.ignore" || (setting === "data.targets" && column.type !== "time"));
      find(".chips", node).replaceChildren(...usable.map(column => make("button", {
        type: "button", "aria-pressed": String(chosen.includes(column.name)),
        onclick: event => {
          const list = parseList(control.value);
          const next = list.includes(column.name) ? list.filter(name => name !== column.name) : names.filter(name => name === column.name || list.includes(name));
          control.value = next.length ? JSON.stringify(next) : "";
          touched.add(setting);
          event.currentTarget.setAttribute("aria-pressed", String(next.includes(column.name)));
          changed();
        },
      }, column.unit ? `${column.name} [${column.unit}]` : column.name)));
    }
  }
}

function setValues(values, {clear, isChosen = false}) {
  for (const [setting, node] of fields) {
    if (touched.has(setting) && !isChosen) continue;
    if (setting in values) {
      const control = controlOf(node), value = values[setting];
      if (control.tagName === "SELECT" && ![...control.options].some(option => option.value === value)) control.append(make("option", {value}, value));
      control.value = value;
    } else if (clear) controlOf(node).value = "";
  }
  drawColumns();
}

function collect() {
  const settings = {"data.path": data.value};
  for (const [setting, node] of fields) {
    const text = controlOf(node).value;
    if (text.trim()) settings[setting] = text;
  }
  return settings;
}

// What is sent: the settings, and what another module of the page adds to them.
function request() {
  const body = {settings: collect()};
  form.dispatchEvent(new CustomEvent("collect", {detail: body}));
  return body;
}

function showProblems(problems) {
  for (const [setting, node] of fields) {
    const message = problems[setting];
    node.classList.toggle("wrong", Boolean(message));
    controlOf(node).setAttribute("aria-invalid", String(Boolean(message)));
    const place = find(".problem", node);
    place.textContent = message ?? "";
    place.hidden = !message;
    if (message && node.closest("details")) node.closest("details").open = true;
  }
  const others = Object.entries(problems).filter(([setting]) => !fields.has(setting)).map(([, message]) => message);
  find("#problems").textContent = others.join("\n");
  find("#problems").hidden = !others.length || !data.value;
}

function markChanged() {
  for (const node of fields.values()) node.classList.toggle("changed", Boolean(controlOf(node).value.trim()));
  for (const group of findAll(".advanced")) {
    const count = findAll(".changed", group).length;
    find("[data-count]", group).textContent = count ? `${count} set` : "";
  }
}

async function check() {
  const number = ++checks;
  markChanged();
  let answer;
  try {
    answer = await ask(`${api}/check`, request());
  } catch (problem) {
    notify(problem.message);
    return;
  }
  if (number !== checks) return;
  const count = showState(answer);
  for (const place of findAll("#toml, #command, #auto-command")) place.classList.toggle("stale", count > 0);
  find("#unused").textContent = (answer.unused ?? []).join("\n");
  estimate(number);
  if (!count) {
    find("#toml").textContent = answer.toml;
    find("#command").textContent = answer.command;
    showAutoCommand();
    checkData(number);
  }
  form.dispatchEvent(new CustomEvent("checked", {detail: answer}));
}

// The command of the other button: the same config, with minutes and preference.
function showAutoCommand() {
  const place = find("#auto-command"), [, , rest] = /^(\S+ \S+) (.*)$/.exec(find("#command").textContent) ?? [];
  if (place && rest) place.textContent = `slipstream auto ${rest} --minutes ${find("#auto-minutes").value} --prefer ${find("#auto-prefer").value}${find("#auto-refit").checked ? " --refit" : ""}`;
}

// Shows what is wrong; the job can start only if nothing is. Returns how much is wrong.
function showState(answer, text = "Compares the settings with the data …") {
  const count = Object.keys(answer.problems).length;
  config = count ? null : answer.toml ?? config;
  showProblems(answer.problems);
  for (const button of findAll("#go, #auto-go")) button.disabled = count > 0 || isReading;
  find("#ready").textContent = !data.value ? "Choose the data first." : isReading ? "Reads the file …" : count ?
    `${count} ${count === 1 ? "setting has" : "settings have"} to be corrected.` : text;
  find("#counts").textContent = "";
  find("#fixes").replaceChildren(...(answer.fixes ?? []).map(fix => make("button", {type: "button", class: "fix", onclick: () => {
    for (const setting of Object.keys(fix.set)) touched.add(setting);
    setValues(fix.set, {clear: false, isChosen: true});
    changed();
  }}, fix.title)));
  return count;
}

// Compares the settings with the data, by the code of training: "Ready." means that they fit.
let comparing = null;
async function checkData(number) {
  comparing?.abort();
  if (isReading) return;
  comparing = new AbortController();
  let answer;
  try {
    answer = await ask(`${api}/ready`, request(), comparing.signal);
  } catch (problem) {
    if (number === checks && problem.name !== "AbortError") notify(problem.message);
    return;
  }
  if (number !== checks) return;
  if (showState(answer, answer.unchecked ? "Not all of it could be compared with the data." : "Ready.")) return;
  const parts = [];
  if (answer.windows) parts.push(`${["train", "val", "test"].map(name => `${(answer.windows[name] ?? 0).toLocaleString("en")} ${name}`).join(", ")} windows.`);
  if (answer.sample_rows) parts.push(`Columns were compared on the first ${answer.sample_rows.toLocaleString("en")} rows${answer.rows ? `, lengths on all ${answer.rows.toLocaleString("en")}` : ""}.`);
  if (answer.unchecked) parts.push(`${answer.unchecked}.`);
  find("#counts").textContent = parts.join(" ");
  if (answer.windows) estimate(number, answer.windows.train);
}

// How long the job will take, and how much memory: a range, and what it rests on.
async function estimate(number, windows = null) {
  if (!find("#estimate")) return; // searches use this form too
  let answer = {};
  try {
    const numbers = columns.filter(column => column.type === "number").length;
    answer = await ask("/api/estimate", {settings: collect(), rows, numbers, windows});
  } catch { /* the form says what is wrong */ }
  if (number !== checks) return;
  find("#estimate").hidden = !answer.seconds;
  find("#e-basis").textContent = answer.is_too_large ? `More than the memory that is free. ${answer.basis}` : answer.basis ?? "";
  if (!answer.seconds) return;
  const [least, most] = answer.seconds, size = bytes => bytes < 1e9 ? `${formatNumber(bytes / 1e6, 2)} MB` : `${formatNumber(bytes / 1e9, 2)} GB`;
  find("#e-time").textContent = `${formatSeconds(least)} – ${formatSeconds(most)}`;
  find("#e-memory").textContent = [...new Set(answer.bytes.map(size))].join(" – ");
  find("#e-basis").textContent += ` About ${answer.steps.toLocaleString("en")} steps, ${answer.parameters.toLocaleString("en")} parameters, ${answer.windows.toLocaleString("en")} training windows.`;
}

// Presets that do not fit the data are not offered: another task, too long a context, or a calendar without dates.
function offerPresets(values) {
  const task = values["data.task"] || "regress";
  for (const option of findAll("option[data-task]", start)) {
    const fits = (option.dataset.task || task) === task && (!rows || 4 * Number(option.dataset.context) <= rows) && (!("dates" in option.dataset) || columns.some(column => column.type === "time"));
    option.hidden = option.disabled = !fits && option.value !== start.value;
  }
}

let waiting;
function changed() {
  clearTimeout(waiting);
  if (!isReading) find("#ready").textContent = "Checks the settings …";
  waiting = setTimeout(check, 150);
}

async function inspect({suggest, preset = ""}) {
  const place = find("#findings"), number = ++looks, path = data.value;
  columns = [];
  rows = 0;
  isReading = Boolean(path) && !path.startsWith("simulated:") && !path.includes("\n");
  if (!isReading) {
    place.replaceChildren();
    drawColumns();
    if (preset) await usePreset(preset, number);
    return check();
  }
  place.replaceChildren(make("p", {class: "muted"}, "Reading …"));
  checks++; // an answer that is under way is about another file
  comparing?.abort();
  showState({problems: {}});
  const query = new URLSearchParams({path});
  for (const setting of READING) {
    const text = fields.has(setting) ? controlOf(fields.get(setting)).value.trim() : "";
    if (text) query.set(setting, text);
  }
  try {
    const found = await ask(`/api/inspect?${query}`);
    if (number !== looks) return;
    columns = found.columns;
    rows = found.rows;
    offerPresets(found.values);
    place.replaceChildren(make("p", {class: "muted"}, `${found.rows.toLocaleString("en")} rows, ${columns.length} columns`), listRemarks(found.problems, path));
    if (suggest) {
      forgetOtherColumns();
      setValues(found.values, {clear: true});
    } else drawColumns();
    if (preset) await usePreset(preset, number);
  } catch (problem) {
    if (number === looks) place.replaceChildren(make("p", {class: "message bad"}, problem.message));
  }
  if (number !== looks) return;
  isReading = false;
  return check();
}

function listRemarks(problems, path) {
  if (!problems.length) return "";
  const items = problems.slice(0, MAX_REMARKS).map(one => make("li", {}, one.column ? make("b", {}, `${one.column.slice(0, 80)} `) : "", one.message));
  const more = problems.length - MAX_REMARKS;
  return make("div", {}, make("ul", {}, ...items), make("p", {class: "help"}, more > 0 ? `${more} more. ` : "", make("a", {href: `/prepare?file=${encodeURIComponent(path)}`}, "Prepare the data")));
}

// Columns that were chosen in another file: where this one does not have them, they are suggested anew.
function forgetOtherColumns() {
  const names = new Set(columns.map(column => column.name));
  for (const setting of [...touched]) {
    const node = fields.get(setting);
    if (!node?.dataset.kind.startsWith("column")) continue;
    const text = controlOf(node).value.trim(), list = text.startsWith("[") ? parseList(text) : [text];
    if (text && !list.every(name => names.has(name))) touched.delete(setting);
  }
}

// The preset's settings on top of the data's; it was chosen last, so that it replaces what was touched before.
async function usePreset(preset, number) {
  const text = await (await fetch(`${here}?start=${encodeURIComponent(preset)}`)).text();
  if (number !== looks) return;
  const other = JSON.parse(new DOMParser().parseFromString(text, "text/html").getElementById("values").textContent);
  setValues(other.values, {clear: false, isChosen: true});
  for (const setting of Object.keys(other.values)) {
    touched.add(setting);
    ofPreset.add(setting);
  }
}

async function begin() {
  const chosen = start.value;
  for (const setting of ofPreset) touched.delete(setting);
  ofPreset.clear();
  if (chosen.startsWith("preset:") && data.value && !data.value.startsWith("simulated:")) return inspect({suggest: true, preset: chosen});
  if (!chosen) return inspect({suggest: true});
  location.assign(`${here}?start=${encodeURIComponent(chosen)}`);
}

data.addEventListener("change", () => {
  if (data.value.startsWith("simulated:")) return location.assign(`${here}?start=demo`);
  if (start.value === "demo") start.value = "";
  return start.value.startsWith("preset:") ? begin() : inspect({suggest: true});
});
start.addEventListener("change", begin);
form.addEventListener("changed", changed);
form.addEventListener("input", event => {
  if (event.target === data || event.target === start || event.target.closest("#auto")) return;
  const setting = event.target.closest("[data-setting]")?.dataset.setting;
  if (setting) {
    touched.add(setting);
    ofPreset.delete(setting);
  }
  changed();
});
// How the file is read has changed: it is looked into again.
form.addEventListener("change", event => {
  if (READING.includes(event.target.closest("[data-setting]")?.dataset.setting)) inspect({suggest: true});
});
async function submit(go, route, body) {
  if (isReading) return;
  go.disabled = true;
  try {
    const answer = await ask(route, body);
    const now = await ask(`/api/job/${answer.job}?wait=2`);  // the run's own page, without a detour
    location.assign(now.run && !now.error ? `/run/${encodePath(now.run)}` : `/job/${answer.job}`);
  } catch (problem) {
    if (problem.body?.problems) {
      showProblems(problem.body.problems);
      form.dispatchEvent(new CustomEvent("checked", {detail: problem.body}));
    }
    else notify(problem.message);
    go.disabled = config === null;
  }
}

form.addEventListener("submit", event => {
  event.preventDefault();
  submit(find("#go"), `${api}/start`, request());
});
find("#auto")?.addEventListener("input", showAutoCommand);
find("#auto-go")?.addEventListener("click", event =>
  submit(event.currentTarget, "/api/auto", {...request(), minutes: Number(find("#auto-minutes").value), prefer: find("#auto-prefer").value, refit: find("#auto-refit").checked}));

// What was typed while the page was loading.
for (const [setting, node] of fields) if (controlOf(node).value.trim()) touched.add(setting);
const linked = new URLSearchParams(location.search).get("data");
if (linked && ![...data.options].some(option => option.value === linked)) data.append(make("option", {value: linked}, linked));
const early = linked || data.value; // of a link, or chosen while the page was loading
data.value = given.data;
start.value = form.dataset.start;
setValues(given.values, {clear: true});
await inspect({suggest: false});
if (early && early !== given.data) {
  data.value = early;
  data.dispatchEvent(new Event("change"));
}
