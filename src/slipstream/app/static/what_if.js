import {Chart} from "./charts.js";
import {act, ask, encodePath, find, findAll, formatNumber, formatSeconds, make, notify} from "./common.js";

const {base, sliders} = JSON.parse(find("#values").textContent);
const session = find("#what-if").dataset.session, api = `/api/what-if/${encodeURIComponent(session)}`;
const KIND = "model.kind", WAIT_MS = 350;
const stops = new Map(sliders.map(one => [one.setting, one.stops]));
const labels = new Map([[KIND, "Model"], ...sliders.map(one => [one.setting, one.label])]);
const fields = new Map(findAll(".slider").map(node => [node.dataset.setting, node]));
const chart = new Chart(find("#loss"), {log: true, height: 180, lines: [{name: "training", colour: "ink"}, {name: "validation", colour: "blue"}]});
let tries = [], flight = null, watched = 0, error = "val";

// The values of the form

const nearest = (list, value) => list.reduce((best, one, at) => Math.abs(one - value) < Math.abs(list[best] - value) ? at : best, 0);

function show(setting, value) {
  const node = fields.get(setting);
  if (setting === KIND) find("select", node).value = value;
  else {
    const number = find("input[type=number]", node);
    if (Number(number.value) !== value || number.value === "") number.value = String(value);
    const range = find("input[type=range]", node);
    range.value = String(nearest(stops.get(setting), value));
    range.setAttribute("aria-valuetext", formatNumber(value));
  }
  node.classList.toggle("changed", value !== base[setting]);
}

function read() {
  const values = {};
  for (const [setting, node] of fields) {
    const text = find("select, input[type=number]", node).value;
    values[setting] = setting === KIND ? text : text.trim() === "" ? null : Number(text);
  }
  return values;
}

const restore = values => { for (const [setting, value] of Object.entries(values)) if (fields.has(setting)) show(setting, value); };
const isSame = (one, other) => one && [...fields.keys()].every(setting => one[setting] === other[setting]);
const findTry = values => tries.find(one => isSame(one.values, values));

function showProblems(problems) {
  for (const [setting, node] of fields) {
    const place = find(".problem", node), message = problems[setting];
    node.classList.toggle("wrong", Boolean(message));
    find("select, input[type=number]", node).setAttribute("aria-invalid", String(Boolean(message)));
    place.textContent = message ?? "";
    place.hidden = !message;
  }
  const rest = Object.entries(problems).filter(([setting]) => !fields.has(setting)).map(([, message]) => message);
  find("#problem").textContent = rest.join("\n");
  find("#problem").hidden = !rest.length;
}

// One try: start it, watch it, take its result

let waiting;
function changed() {
  clearTimeout(waiting);
  showProblems({});
  draw();
  if (find("#auto").checked) waiting = setTimeout(begin, WAIT_MS);
}

async function begin() {
  clearTimeout(waiting);
  const values = read();
  const number = ++watched;
  flight?.close();
  flight = {values, state: "starts", close: () => {}};
  chart.set([[], [], []]);
  draw();
  try {
    const answer = await ask(`${api}/try`, {values});
    if (number !== watched) return;
    find("#command").textContent = answer.command;
    if (answer.run) { flight = null; await refresh(); } else await watch(answer.job, values, number);
  } catch (problem) {
    if (number !== watched) return;
    flight = null;
    showProblems(problem.body?.problems ?? {"": problem.message});
    draw();
  }
}

async function watch(job, values, number) {
  const losses = {train: new Map(), val: new Map()};
  flight = {values, job, state: "starts", close: () => {}};
  let now;
  do {
    now = await ask(`/api/job/${job}?wait=2`);
    if (number !== watched) return;
    flight.state = now.state === "queued" ? `waits for its turn${now.position > 1 ? `, number ${now.position}` : ""}` : "reads the data";
    draw();
  } while (!now.run && ["queued", "running"].includes(now.state));
  if (!now.run) { await finish(number, now); return; }
  const source = new EventSource(`/events?run=${encodeURIComponent(now.run)}`);
  flight.close = () => source.close();
  source.onopen = () => { find("#connection").hidden = true; };
  source.onerror = () => { find("#connection").hidden = false; };
  source.addEventListener("lines", event => {
    if (number !== watched) return source.close();
    for (const line of JSON.parse(event.data)) follow(line, losses);
    const xs = [...new Set([...losses.train.keys(), ...losses.val.keys()])].sort((a, b) => a - b);
    chart.set([xs, xs.map(at => losses.train.get(at) ?? null), xs.map(at => losses.val.get(at) ?? null)]);
    if (flight.state === "finished") { source.close(); finish(number, {}); } else draw();
  });
  source.addEventListener("run", event => {
    const run = JSON.parse(event.data);
    if (number === watched && (run.state === "missing" || (run.state !== "running" && run.job_state !== "running"))) { source.close(); finish(number, {}); }
  });
}

function follow(line, losses) {
  if (line.event === "log" && line.loss != null && line.epoch != null) { losses.train.set(line.epoch, line.loss); flight.state = `trains, epoch ${formatNumber(line.epoch, 2)}`; }
  else if (line.event === "epoch") { losses.val.set(line.epoch, line.val_loss); flight.loss = line.val_loss; }
  else if (line.event === "scoring") flight.state = `scores ${line.what}`;
  else if (line.event === "end") flight.state = "finished";
}

async function finish(number, now) {
  if (number !== watched) return;
  if (now.error) showProblems({"": now.error});
  const values = flight?.values;
  flight = null;
  await refresh();
  if (!now.error && values && !findTry(values)) find("#state").textContent = "stopped";
}

async function refresh() {
  const answer = await ask(api);
  tries = answer.tries;
  draw();
  return answer;
}

// The page

function draw() {
  const values = read(), now = findTry(values), inFlight = Boolean(flight);
  for (const [setting, value] of Object.entries(values)) fields.get(setting).classList.toggle("changed", value !== base[setting]);
  const state = find("#state");
  state.className = `state ${inFlight ? "running" : now ? "finished" : ""}`;
  state.textContent = inFlight ? flight.state : now ? (now.is_best ? "the best so far" : "finished") : "not tried";
  const set = (name, text) => { find(`#f-${name}`).textContent = text; };
  const any = now ?? tries[0];
  for (const [id, title] of [["test", "Test"], ["val", "Validation"]]) find(`#n-${id}`).textContent = any ? `${title} ${any.metric_name}` : `${title} error`;
  find("#n-baseline").textContent = any?.baseline ? `Best baseline, ${any.baseline}` : "Best baseline";
  set("test", now ? formatNumber(now.test) : "–");
  set("val", now ? formatNumber(now.val) : flight?.loss != null ? `loss ${formatNumber(flight.loss)}` : "–");
  set("baseline", any ? formatNumber(any.baseline_error) : "–");
  set("seconds", now ? formatSeconds(now.seconds) : "–");
  find("#stop").hidden = !inFlight;
  find("#go").hidden = inFlight || Boolean(now) || (find("#auto").checked && tries.length > 0 && find("#problem").hidden === false);
  find("#make").disabled = !now;
  find("#open").hidden = !now;
  if (now) find("#command").textContent = now.command;
  find("#command").classList.toggle("stale", !now && !inFlight);
  if (now) find("#open").href = `/run/${encodePath(now.run)}`;
  drawHistory(now);
  drawPlots(now);
}

function drawHistory(now) {
  const names = [...fields.keys()];
  const varied = new Set(names.filter(name => new Set(tries.map(one => one.values[name])).size > 1));
  const severalWindows = new Set(tries.map(one => one.test_windows)).size > 1;
  find("#empty").hidden = tries.length > 0;
  const heading = (text, number = true) => make("th", {scope: "col", class: number ? "number" : null}, text);
  const metric = tries[0]?.metric_name ?? "error";
  find("#history thead tr").replaceChildren(...tries.length ? [heading("Try", false), heading(`Validation ${metric}`), heading(`Test ${metric}`), heading("vs. baseline"),
    ...severalWindows ? [heading("Test windows")] : [], ...names.map(name => heading(labels.get(name), name !== KIND)), heading("Seconds")] : []);
  const rows = tries.map((one, at) => {
    const row = make("tr", {class: one === now ? "chosen" : null, "data-try": String(at + 1), onclick: () => choose(one)},
      make("th", {scope: "row"}, make("button", {type: "button", class: "quiet", "aria-label": `Restore the settings of try ${at + 1}`}, `try ${at + 1}`),
        one.is_best ? make("span", {class: "best-mark"}, " best") : ""),
      make("td", {class: "number"}, formatNumber(one.val)), make("td", {class: "number"}, formatNumber(one.test)), make("td", {class: "number"}, one.against),
      ...severalWindows ? [make("td", {class: "number"}, (one.test_windows ?? 0).toLocaleString("en"))] : [],
      ...names.map(name => make("td", {class: [name === KIND ? "" : "number", varied.has(name) && one.values[name] !== base[name] ? "varied" : ""].join(" ").trim() || null},
        typeof one.values[name] === "number" ? formatNumber(one.values[name]) : String(one.values[name] ?? "–"))),
      make("td", {class: "number"}, one.seconds == null ? "–" : one.seconds.toFixed(1), one.is_cut ? make("small", {}, "cut by the time limit") : ""));
    return row;
  });
  find("#history tbody").replaceChildren(...rows.reverse());
  find("#note").textContent = "The best is the one with the lowest validation error; the test error is for judging it." +
    (severalWindows ? " A longer context leaves fewer windows: compare such tries window by window with `slipstream runs compare`." : "");
}

function choose(one) {
  clearTimeout(waiting);
  showProblems({});
  restore(one.values);
  if (flight) { watched++; flight.close(); flight = null; ask(`${api}/stop`, {}).catch(problem => notify(problem.message)); }
  draw();
}

// Error against each setting: a dot for each try, the best marked, the baseline as a dashed line.
const svg = (tag, values, ...children) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(values)) node.setAttribute(name, value);
  node.append(...children);
  return node;
};

function drawPlots(now) {
  const scored = tries.filter(one => Number.isFinite(one[error]));
  const varied = [...fields.keys()].filter(name => new Set(scored.map(one => one.values[name])).size > 1);
  if (!varied.length) {
    find("#plots").replaceChildren(make("p", {class: "muted"}, "A picture for each setting that was varied appears here."));
    return;
  }
  find("#plots").replaceChildren(...varied.map(name => drawPlot(name, scored, now)));
}

function drawPlot(name, scored, now) {
  const width = 260, height = 150, left = 46, right = 12, top = 8, bottom = 22;
  const shown = [...new Set(scored.map(one => one.values[name]))].sort((a, b) => typeof a === "number" ? a - b : String(a).localeCompare(String(b)));
  const x = value => left + (width - left - right) * (shown.length > 1 ? (shown.indexOf(value) + 0.5) / shown.length : 0.5);
  const baseline = error === "test" ? scored[0].baseline_error : null;
  const errors = scored.map(one => one[error]);
  const low = Math.min(...errors), high = Math.max(...errors), margin = (high - low || Math.abs(high) || 1) * 0.1;
  const y = value => top + (height - top - bottom) * (1 - (value - low + margin) / (high - low + 2 * margin));
  const picture = svg("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${labels.get(name)}: ${shown.length} values, lowest error at ${scored.reduce((a, b) => b[error] < a[error] ? b : a).values[name]}`});
  for (const value of new Set([low, high])) {
    picture.append(svg("line", {class: "axis", x1: left, x2: width - right, y1: y(value), y2: y(value)}),
      svg("text", {x: left - 6, y: y(value) + 4, "text-anchor": "end"}, formatNumber(value, 3)));
  }
  if (baseline != null && baseline > low - margin && baseline < high + margin) picture.append(svg("line", {class: "baseline", x1: left, x2: width - right, y1: y(baseline), y2: y(baseline)}));
  const every = Math.ceil(shown.length / 6);
  shown.forEach((value, at) => { if (at % every === 0) picture.append(svg("text", {x: x(value), y: height - 6, "text-anchor": "middle"}, typeof value === "number" ? formatNumber(value, 3) : String(value))); });
  for (const one of [...scored].sort((a, b) => Number(Boolean(a.is_best)) - Number(Boolean(b.is_best)))) {
    const number = tries.indexOf(one) + 1;
    const dot = svg("circle", {class: ["dot", one.is_best ? "best" : "", one === now ? "now" : ""].join(" ").trim(), cx: x(one.values[name]), cy: y(one[error]), r: one.is_best ? 6.5 : 5},
      svg("title", {}, `try ${number}: ${formatNumber(one[error])}${one.is_best ? ", the best" : ""}`));
    dot.addEventListener("click", () => choose(one));
    picture.append(dot);
  }
  return make("figure", {}, make("figcaption", {}, labels.get(name)), picture);
}

// Events of the page

for (const [setting, node] of fields) {
  if (setting === KIND) { find("select", node).addEventListener("change", changed); continue; }
  const number = find("input[type=number]", node), range = find("input[type=range]", node);
  range.addEventListener("input", () => { show(setting, stops.get(setting)[Number(range.value)]); changed(); });
  number.addEventListener("input", () => { if (number.value.trim() !== "" && Number.isFinite(Number(number.value))) { show(setting, Number(number.value)); changed(); } });
}
for (const button of findAll("[data-error]")) {
  button.addEventListener("click", () => {
    for (const one of findAll("[data-error]")) one.setAttribute("aria-pressed", String(one === button));
    error = button.dataset.error;
    draw();
  });
}
find("#reset").addEventListener("click", () => { restore(base); changed(); });
find("#auto").addEventListener("change", draw);
act(find("#go"), begin);
act(find("#stop"), () => ask(`${api}/stop`, {}));
act(find("#make"), async () => {
  const {start} = await ask(`${api}/config`, {values: read()});
  location.assign(`/new?start=${encodeURIComponent(start)}`);
});

restore(base);
try {
  const {current} = await refresh();
  if (current?.is_open && current.values) {
    restore(current.values);
    await watch(current.id, current.values, ++watched);
  } else if (tries.length) { restore(tries.at(-1).values); draw(); }
} catch (problem) { notify(problem.message); }
