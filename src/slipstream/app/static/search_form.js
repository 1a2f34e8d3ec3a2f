// The editor of a search space: a row per setting, with a range or a list of values.
import {find, findAll, make} from "./common.js";

const form = find("#form"), place = find("#space"), given = JSON.parse(find("#space-values").textContent);
const settings = new Map(given.settings.map(one => [one.name, one]));
let usual = [], touched = given.rows.length > 0, numbers = 0;

const readRow = row => Object.fromEntries(findAll("[data-key]", row).map(node =>
  [node.dataset.key, node.type === "checkbox" ? node.checked : node.value]));
const readRows = () => findAll(".space-row", place).map(readRow);
const announce = () => form.dispatchEvent(new CustomEvent("changed"));

function makeCell(label, control, kind) {
  const id = `space-${++numbers}`;
  control.id = id;
  return make("div", {class: `cell ${kind ?? ""}`}, make("label", {for: id}, label), control);
}

const makeText = (key, value, more = {}) => make("input", {"data-key": key, autocomplete: "off", spellcheck: "false", ...more, value: value ?? ""});

function makeRow(values) {
  const kind = make("select", {"data-key": "kind"}, make("option", {value: "range"}, "range"), make("option", {value: "choices"}, "list"));
  kind.value = values.kind;
  const log = make("input", {"data-key": "log", type: "checkbox"});
  log.checked = Boolean(values.log);
  const name = makeText("setting", values.setting, {list: "names", placeholder: "model.hidden.0"});
  const help = make("p", {class: "help"}), problem = make("p", {class: "problem", hidden: true});
  const row = make("div", {class: "space-row", role: "group"},
    makeCell("Setting", name, "name"), makeCell("Values", kind),
    makeCell("Lowest", makeText("low", values.low, {inputmode: "decimal"}), "range"),
    makeCell("Highest", makeText("high", values.high, {inputmode: "decimal"}), "range"),
    makeCell("Step", makeText("step", values.step, {inputmode: "decimal", placeholder: "none"}), "range short"),
    makeCell("Log scale", log, "range tick"),
    makeCell("Values, separated by commas", makeText("choices", values.choices), "choices"),
    make("button", {type: "button", class: "quiet remove", "aria-label": `Remove ${values.setting || "the row"}`, onclick: () => { row.remove(); touch(); find("#add").focus(); }}, "Remove"),
    problem, help);
  const show = () => {
    row.dataset.kind = kind.value;
    row.setAttribute("aria-label", name.value || "new setting");
    const about = settings.get(name.value);
    help.textContent = about ? [about.help, about.limits && `Takes ${about.limits}.`].filter(Boolean).join(" ") : "";
  };
  kind.addEventListener("change", show);
  name.addEventListener("change", () => {
    const filled = readRow(row);
    if (settings.has(name.value) && !filled.low && !filled.high && !filled.choices) row.replaceWith(makeRow(suggest(name.value)));
    else show();
    touch();
  });
  show();
  return row;
}

// What fits a setting: all of its choices, or numbers around its value in the form.
function suggest(setting) {
  const about = settings.get(setting) ?? {choices: [], default: ""};
  const control = find(`[data-setting="${CSS.escape(setting)}"] :is(input, select)`);
  const text = (control?.value || about.default || "").trim(), number = Number(text);
  if (about.choices.length && !(text && Number.isFinite(number))) return {setting, kind: "choices", choices: about.choices.join(", ")};
  if (!text || !Number.isFinite(number)) return {setting, kind: "choices", choices: text};
  if (/^\d+$/.test(text)) {
    if (setting === "model.hidden" || setting === "train.batch") return {setting, kind: "choices", choices: [...new Set([Math.max(1, number >> 1), number, number * 2])].join(", ")};
    return {setting, kind: "range", low: String(Math.max(number ? 1 : 0, number >> 1)), high: String(Math.max(number * 2, number + 1))};
  }
  return number > 0 ? {setting, kind: "range", low: String(Number((number / 10).toPrecision(6))), high: String(Number((number * 10).toPrecision(6))), log: true} :
    {setting, kind: "range", low: "0.0", high: "0.5"};
}

function setRows(rows) {
  place.replaceChildren(...rows.map(makeRow));
}

function touch() {
  touched = true;
  announce();
}

place.addEventListener("input", () => { touched = true; });
find("#add").addEventListener("change", event => {
  const setting = event.target.value === "other" ? "" : event.target.value;
  event.target.value = "";
  const row = place.appendChild(makeRow(setting ? suggest(setting) : {setting: "", kind: "range"}));
  find(setting ? "[data-key=kind]" : "[data-key=setting]", row).focus();
  touch();
});
// the select is no setting: a change of it is not one of the form
find("#add").addEventListener("input", event => event.stopPropagation());
find("#usual").addEventListener("click", () => {
  setRows(usual);
  touched = false;
  announce();
});

form.addEventListener("collect", event => { event.detail.space = readRows(); });
form.addEventListener("checked", ({detail: answer}) => {
  if (answer.usual) usual = answer.usual;
  const rows = findAll(".space-row", place);
  const inRows = answer.rows ?? {};
  rows.forEach((row, at) => {
    const message = inRows[at];
    row.classList.toggle("wrong", Boolean(message));
    find(".problem", row).textContent = message ?? "";
    find(".problem", row).hidden = !message;
  });
  const rest = Object.keys(inRows).length ? "" : answer.problems["tune.space"] ?? "";
  find("#space-problem").textContent = rest;
  find("#space-problem").hidden = !rest;
  if (!touched && answer.usual && JSON.stringify(answer.usual) !== JSON.stringify(shown)) {
    shown = answer.usual;
    setRows(shown);
    announce();
  }
});

let shown = given.rows;
setRows(given.rows);
