import {Chart} from "./charts.js";
import {showPreview} from "./preview.js";
import {act, ask, find, findAll, formatNumber, formatSeconds, listen, make, notify} from "./common.js";
import {bindMore, openMore} from "./more.js";

const page = find("#run"), run = page.dataset.run, url = page.dataset.url;
let state = page.dataset.state;

const charts = {
  loss: new Chart(find("#loss"), {log: true, height: 290, label: "epoch", lines: [
    {name: "training, mean of the epoch", colour: "ink"}, {name: "validation", colour: "blue", band: [5, 4]},
    {name: "training, mean of the last steps", colour: "orange", dots: true}, {colour: "blue", hidden: true}, {colour: "blue", hidden: true}]}),
  lr: new Chart(find("#lr"), {height: 140, label: "epoch", lines: [{name: "learning rate", colour: "blue"}]}),
  speed: new Chart(find("#speed"), {height: 140, label: "epoch", lines: [{name: "steps a second", colour: "blue"}]}),
};

// All that the log has said so far; a reset begins anew.
let log;
const begin = () => { log = {train: new Map(), logged: new Map(), lanes: new Map(), laneStarts: new Map(), lr: [], speed: [], epoch: null, epochs: Number(page.dataset.epochs) || null, best: null, epochSeconds: [], expected: null, trained: false, startedAt: null, lastAt: 0, count: 0}; find("#events").replaceChildren(); page.dataset.lines = "0"; };
begin();

// Errors in the unit of the target, where the log says how large one scaled unit is.
let inUnits = true;
const NAMES = {mse: "RMSE", mae: "MAE", quantile: "pinball loss"};
const isConvertible = () => inUnits && log.scale && NAMES[log.scale.train] && NAMES[log.scale.val];
const convert = (set, loss) => loss == null || !isConvertible() ? loss : log.scale.size * (log.scale[set] === "mse" ? Math.sqrt(loss) : loss);

function nameLosses() {
  find("#units").hidden = !(log.scale && NAMES[log.scale.train] && NAMES[log.scale.val]);
  const {train, val, target} = log.scale ?? {}, own = isConvertible();
  find("#f-train-name").textContent = own ? `Training ${NAMES[train]}` : "Training loss";
  find("#f-val-name").textContent = own ? `Validation ${NAMES[val]}` : "Validation loss";
  find("#f-best-name").textContent = own ? `Lowest validation ${NAMES[val]}` : "Lowest validation loss";
  find("#loss-title").textContent = own ? `${NAMES[val]} of ${target}` : "Loss";
}

const mean = values => values.reduce((sum, value) => sum + value, 0) / values.length;

function addEpoch(event) {
  const {epoch, lane = 0} = event;
  log.epoch = Math.max(log.epoch ?? 0, epoch);
  if (event.train_loss != null) log.train.set(epoch, [...log.train.get(epoch) ?? [], event.train_loss]);
  const lanes = log.lanes.get(epoch) ?? new Map();
  lanes.set(lane, event.val_loss);
  log.lanes.set(epoch, lanes);
  if (event.val_loss != null && (log.best == null || event.val_loss < log.best.loss)) log.best = {epoch, loss: event.val_loss};
  if (event.seconds) log.epochSeconds.push(event.seconds);
}

// Several models log their losses by step alone: the epoch and the speed follow from it.
function completeLog(event) {
  const before = log.lastLog;
  for (const lane of Object.keys(event.losses ?? {})) if (!log.laneStarts.has(lane)) log.laneStarts.set(lane, before?.step ?? 0);
  const first = Math.min(...Object.keys(event.losses ?? {}).map(lane => log.laneStarts.get(lane)));
  event.epoch ??= log.steps ? (event.step - first) / log.steps : null; // models may train one after another
  if (event.steps_per_s == null && before && event.at_s > before.at_s) event.steps_per_s = (event.step - before.step) / (event.at_s - before.at_s);
  log.lastLog = event;
}

const describe = {
  start: event => `begins: ${Object.entries(event.windows ?? {}).map(([name, count]) => `${count.toLocaleString("en")} ${name}`).join(", ")} windows, ${event.parameters?.toLocaleString("en") ?? "?"} parameters`,
  resume: event => `resumed from step ${event.step?.toLocaleString("en") ?? "?"}${event.differs ? `; ${event.differs}` : ""}`,
  checkpoint: event => `checkpoint at step ${event.step.toLocaleString("en")}`,
  recovery: event => `${event.what}; ${event.remedy}`,
  fallback: event => `${event.what}: ${event.why}`,
  trouble: event => event.what,
  estimate: event => `${formatNumber(event.ms_per_step, 3)} ms a step, ${formatSeconds(event.expected_s)} expected`,
  review: event => `continues with ${event.threads} threads`,
  exploit: event => `low learning rate from epoch ${event.epoch}`,
  lane: event => `model ${event.lane}: ${event.stopped}`,
  trained: event => event.stopped ? `training ended: ${event.stopped}` : "training ended",
  scoring: event => `scoring ${event.what}`,
  trial: event => `trial ${event.trial}: ${event.state}, ${formatNumber(event.value)}${event.best ? ", the best so far" : ""}`,
  end: event => `finished after ${formatSeconds(event.seconds)}`,
};

function addLine(event) {
  log.lastAt = event.at_s ?? log.lastAt;
  if (event.event === "epoch" && event.trial == null) addEpoch(event);
  else if (event.event === "log") {
    completeLog(event);
    if (event.lr != null && event.epoch != null) log.lr.push([event.epoch, event.lr]);
    if (event.steps_per_s != null && event.epoch != null) log.speed.push([event.losses ? event.step / log.steps : event.epoch, event.steps_per_s]);
    if (event.epoch != null) log.now = event.epoch;
    const losses = event.losses ? Object.values(event.losses).filter(value => value != null) : [];
    const loss = event.loss ?? (losses.length ? mean(losses) : null);
    if (loss != null && event.epoch != null) log.logged.set(event.epoch, loss);
  } else if (event.event === "start") { log.epochs = event.epochs ?? log.epochs; log.steps = event.steps_per_epoch; log.expected = event.expected_s; log.startedAt = event.at_s; log.scale = event.scale ?? null; nameLosses(); }
  else if (event.event === "estimate") log.expected = event.expected_s;
  else if (event.event === "trained" || event.event === "end") { log.trained = true; log.duration = event.seconds ?? log.duration; }
  else if (event.event === "resume") { log.trained = false; log.duration = null; log.lastLog = null; }
  const text = describe[event.event]?.(event);
  if (text) {
    const warn = ["recovery", "fallback", "trouble"].includes(event.event);
    find("#events").prepend(make("li", {}, make("time", {}, formatSeconds(event.at_s)), make("span", {class: warn ? "warn" : null}, text)));
    if (++log.count > 500) find("#events").lastElementChild.remove();
  }
}

function drawFigures() {
  const epochs = [...log.lanes.keys()].sort((a, b) => a - b), last = epochs.at(-1);
  const set = (name, text) => { find(`#f-${name}`).textContent = text; };
  const now = log.lastLog?.losses && !log.trained ? log.now : Math.max(log.now ?? 0, last ?? 0);
  set("epoch", now ? `${formatNumber(now, 3)}${log.epochs ? ` of ${log.epochs}` : ""}` : "–");
  // the mean of the last epoch, or of the last steps where they are newer
  const epoch = Math.max(...log.train.keys(), 0), step = Math.max(...log.logged.keys(), 0);
  const isEpoch = epoch >= step && epoch > 0;
  const trained = isEpoch ? mean(log.train.get(epoch)) : log.logged.get(step);
  set("train", formatNumber(trained == null ? null : convert("train", trained)));
  find("#f-train-note").textContent = trained == null ? "" : isEpoch ? `mean of epoch ${formatNumber(epoch, 3)}` : "mean of the last steps";
  set("val", formatNumber(last == null ? null : convert("val", mean([...log.lanes.get(last).values()]))));
  set("best", log.best ? formatNumber(convert("val", log.best.loss)) : "–");
  find("#f-best-note").textContent = log.best ? `at epoch ${formatNumber(log.best.epoch, 3)}` : "";
  set("lr", formatNumber(log.lr.at(-1)?.[1], 3));
  set("speed", formatNumber(log.speed.at(-1)?.[1], 3));
  const recent = log.epochSeconds.slice(-5);
  const left = log.trained ? 0 : recent.length && log.epochs ? Math.max(log.epochs - now, 0) * mean(recent) : log.expected && Math.max(log.expected - (log.lastAt - (log.startedAt ?? 0)), 0);
  const ended = state !== "running";
  find("#f-time-name").textContent = ended ? "Duration" : log.trained ? "Now" : "Time left, at most";
  set("left", ended ? formatSeconds(log.duration ?? log.lastAt) : log.trained ? "scoring" : formatSeconds(left));
}

function draw() {
  const xs = [...new Set([...log.train.keys(), ...log.logged.keys(), ...log.lanes.keys()])].sort((a, b) => a - b);
  const values = (at, pick) => { const lanes = log.lanes.get(at); const all = lanes ? [...lanes.values()].filter(value => value != null) : []; return all.length ? convert("val", pick(all)) : null; };
  const severalAt = at => (log.lanes.get(at)?.size ?? 0) > 1;
  charts.loss.set([xs, xs.map(at => log.train.has(at) ? convert("train", mean(log.train.get(at))) : null), xs.map(at => values(at, mean)), xs.map(at => log.logged.has(at) ? convert("train", log.logged.get(at)) : null),
    xs.map(at => severalAt(at) ? values(at, all => Math.min(...all)) : null), xs.map(at => severalAt(at) ? values(at, all => Math.max(...all)) : null)]);
  charts.lr.set([log.lr.map(pair => pair[0]), log.lr.map(pair => pair[1])]);
  charts.speed.set([log.speed.map(pair => pair[0]), log.speed.map(pair => pair[1])]);
  if (!log.lr.length && log.lastLog?.losses) find("#lr").replaceChildren(make("p", {class: "muted"}, "Several models train, each with a rate of its own."));
  drawFigures();
}

let due = false;
function drawSoon() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => { due = false; draw(); });
}

// Takes the parts of the page that depend on the run's state from the server again.
async function refresh() {
  const text = await (await fetch(location.pathname)).text();
  const fresh = new DOMParser().parseFromString(text, "text/html");
  for (const id of ["verdict", "result", "plan", "files", "texts"]) {
    const next = fresh.getElementById(id);
    if (next) find(`#${id}`).replaceWith(document.adoptNode(next));
  }
  bind();
  drawFigures();
}

function bind() {
  act(find("#stop"), async () => { await ask(`/api/stop/${url}`, {}); find("#note").textContent = "Saves a checkpoint and stops …"; });
  act(find("#resume"), () => resume({}));
  find("#longer")?.addEventListener("click", () => openMore(Math.max(2 * (log.epochs ?? 10), 1)));
}

async function resume(body) {
  await ask(`/api/resume/${url}`, body);
  find("#note").textContent = "Starts …";
}

bindMore(total => resume({epochs: total}));
for (const button of findAll("[data-axis]")) {
  button.addEventListener("click", () => {
    for (const one of findAll("[data-axis]")) one.setAttribute("aria-pressed", String(one === button));
    charts.loss.setLog(button.dataset.axis === "log");
  });
}
for (const button of findAll("[data-unit]")) {
  button.addEventListener("click", () => {
    for (const one of findAll("[data-unit]")) one.setAttribute("aria-pressed", String(one === button));
    inUnits = button.dataset.unit === "own";
    nameLosses();
    draw();
  });
}

// The GPU that does most, or else the cores.
function showLoad(load) {
  find("#f-load").closest("div").hidden = state !== "running";
  const gpu = load.gpus.toSorted((a, b) => b.percent - a.percent)[0];
  find("#f-load-name").textContent = gpu ? "GPU" : "CPU";
  find("#f-load").textContent = gpu ? `${gpu.percent} %, ${formatNumber(gpu.memory_used / 1e9, 3)} GB` : `${Math.round(load.cpu_percent)} %`;
}

let jobState = null;
bind();
listen(run, {
  preview: values => { if (state !== "finished") showPreview(values); }, // the finished model's are in Result
  load: showLoad,
  reset: () => { begin(); drawSoon(); },
  lines: events => {
    events.forEach(addLine);
    page.dataset.lines = String(Number(page.dataset.lines) + events.length);
    if (!find("#plan dl") && events.some(event => event.event === "start" || event.event === "epoch")) refresh().catch(() => {});
    drawSoon();
  },
  run: now => {
    if (now.state === "missing") { notify(now.note); return; }
    const note = find("#note");
    if (note && now.state === "running") note.textContent = now.note;
    const changed = now.state !== state || (jobState !== null && now.job_state !== jobState);
    jobState = now.job_state;
    state = now.state;
    page.dataset.state = state;
    find("#state").textContent = state;
    find("#state").className = `state ${state}`;
    if (state === "finished") find("#preview").hidden = true;
    if (changed) refresh().catch(problem => notify(problem.message));
  },
});
