import {act, ask, encodePath, find, findAll, formatAge, formatBytes, listen, make, notify} from "./common.js";

const MAX_COMPARED = 8;
const state = {runs: [], jobs: [], sort: "age_s", down: false, chosen: new Set()};
const textOf = run => [run.name, run.id, run.data, run.model, run.kind, run.remark, ...run.tags].join("\n").toLowerCase();

function compare(one, other) {
  const [a, b] = [one[state.sort], other[state.sort]];
  if (a == null || b == null) return (a == null) - (b == null);
  const order = typeof a === "string" ? a.localeCompare(b) : a - b;
  return state.down ? -order : order;
}

function selectRuns() {
  const words = find("#search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const wanted = find("#state").value, kind = find("#kind").value, tag = find("#tag").value;
  return state.runs.filter(run => (!wanted || run.state === wanted) && (!kind || run.kind === kind) && (!tag || run.tags.includes(tag)) &&
    words.every(word => run.text.includes(word))).sort(compare);
}

function makeRow(run) {
  const better = ["better", "worse"].includes(run.verdict) ? run.verdict : "muted";
  const remark = run.remark ? make("small", {class: "clip"}, run.remark) : "";
  const chosen = state.chosen.has(run.id);
  const pick = make("input", {type: "checkbox", checked: chosen, "aria-label": `Choose ${run.name.slice(0, 100)}`, onchange: event => choose(run, event.target.checked)});
  return make("tr", {class: chosen ? "chosen" : "", "data-id": run.id},
    make("td", {class: "pick"}, pick),
    make("th", {scope: "row"}, make("a", {href: `/run/${encodePath(run.id)}`, class: "clip"}, run.name),
      run.kind === "train" ? "" : make("span", {class: "tag kind"}, run.kind), ...run.tags.map(tag => make("span", {class: "tag"}, tag)), remark),
    make("td", {class: "right"}, make("span", {class: `state ${run.state}`}, run.state), run.note ? make("small", {class: "clip"}, run.note) : ""),
    make("td", {class: "long"}, make("span", {class: "clip"}, run.data || "–"), make("small", {}, run.model ?? "")),
    make("td", {class: "number"}, run.error != null && run.state === "finished" ? make("a", {href: `/result/${encodePath(run.id)}`, "aria-label": `Result of ${run.name.slice(0, 100)}: ${run.error}`}, run.error) : run.error ?? "–", run.error_of ? make("small", {}, run.error_of) : ""),
    make("td", {class: "number right"}, run.against ? make("span", {class: better}, run.against) : "–"),
    make("td", {class: "number", title: run.at}, formatAge(run.age_s)),
    make("td", {class: "right"}, make("button", {type: "button", class: "quiet", "aria-label": `Tags and note of ${run.name.slice(0, 100)}`, onclick: () => annotate(run)}, "Tag")));
}

function draw() {
  const rows = selectRuns();
  const focus = document.activeElement.closest("#runs tbody tr")?.dataset.id, control = document.activeElement.tagName;
  find("#runs tbody").replaceChildren(...rows.map(makeRow));
  if (focus != null) find(control.toLowerCase(), findAll("#runs tbody tr").find(row => row.dataset.id === focus) ?? document.createElement("p"))?.focus();
  find("#runs").hidden = !rows.length;
  find("#nothing").hidden = !state.runs.length || rows.length > 0;
  drawChosen(rows);
  find("#empty").hidden = state.runs.length > 0;
  find("#count").textContent = !state.runs.length ? "" : rows.length === state.runs.length ?
    `${rows.length} ${rows.length === 1 ? "run" : "runs"}` : `${rows.length} of ${state.runs.length} runs`;
  for (const head of findAll("th[data-sort]")) {
    if (head.dataset.sort === state.sort) head.setAttribute("aria-sort", state.down ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
  }
}

// Chosen runs stay chosen when a filter hides them; the bar says how many there are.
function drawChosen(rows) {
  const known = new Set(state.runs.map(run => run.id));
  for (const id of state.chosen) if (!known.has(id)) state.chosen.delete(id);
  const count = state.chosen.size, listed = rows.filter(run => state.chosen.has(run.id)).length;
  find("#chosen").hidden = !count;
  find("#chosen-count").textContent = `${count} ${count === 1 ? "run" : "runs"} chosen${count === 1 ? "; choose another one to compare" : count > MAX_COMPARED ? `; at most ${MAX_COMPARED} can be compared` : ""}`;
  find("#compare").disabled = count < 2 || count > MAX_COMPARED;
  find("#all").checked = rows.length > 0 && listed === rows.length;
  find("#all").indeterminate = listed > 0 && listed < rows.length;
}

function choose(run, chosen) {
  if (chosen) state.chosen.add(run.id);
  else state.chosen.delete(run.id);
  const row = findAll("#runs tbody tr").find(one => one.dataset.id === run.id);
  row?.classList.toggle("chosen", chosen);
  if (row) find(".pick input", row).checked = chosen;
  drawChosen(selectRuns());
}

function compareChosen() {
  if (find("#compare").disabled || find("#chosen").hidden) return;
  location.assign(`/compare?${new URLSearchParams([...state.chosen].map(id => ["run", id]))}`);
}

function askRemoval() {
  const runs = state.runs.filter(run => state.chosen.has(run.id));
  find("#removal-runs").replaceChildren(...runs.map(run => make("li", {}, run.name)));
  find("#removal-command").textContent = `slipstream runs remove ${runs.map(run => /^[\w@%+=:,./-]+$/.test(run.run) ? run.run : `'${run.run.replaceAll("'", `'"'"'`)}'`).join(" ")}`;
  find("#removal-problem").hidden = true;
  find("#removal").showModal();
}

// Arrows move between rows, x chooses, c compares, / searches.
function moveBy(event, step) {
  const here = event.target.closest("#runs tbody tr");
  const rows = findAll("#runs tbody tr");
  const next = here ? rows[rows.indexOf(here) + step] : rows[0];
  if (!next) return;
  event.preventDefault();
  find(event.target.matches(".pick input") ? ".pick input" : "th a", next).focus();
}

function drawKinds() {
  const kinds = [...new Set(state.runs.map(run => run.kind))].sort();
  const box = find("#kind"), chosen = box.value;
  box.replaceChildren(make("option", {value: ""}, "all"), ...kinds.map(kind => make("option", {value: kind}, kind)));
  box.value = kinds.includes(chosen) ? chosen : "";
  box.closest("label").hidden = kinds.length < 2;
}

function drawTags() {
  const tags = [...new Set(state.runs.flatMap(run => run.tags))].sort();
  const box = find("#tag"), chosen = box.value;
  box.replaceChildren(make("option", {value: ""}, "all"), ...tags.map(tag => make("option", {value: tag}, tag)));
  box.value = tags.includes(chosen) ? chosen : "";
  box.closest("label").hidden = !tags.length;
}

function drawJobs(jobs) {
  const open = jobs.filter(job => job.state === "queued" || job.state === "running");
  const failed = jobs.filter(job => (job.state === "failed" || job.state === "killed") && Date.now() / 1e3 - (job.ended_at ?? job.created_at) < 600);
  find("#jobs").hidden = !open.length && !failed.length;
  find("#jobs ul").replaceChildren(...[...open, ...failed].map(job => {
    const stop = make("button", {type: "button"}, job.state === "queued" ? "Cancel" : "Stop");
    act(stop, () => ask(`/api/job/${job.id}/stop`, {}));
    const first = job.position > 1 ? make("button", {type: "button"}, "Move to the front") : "";
    if (first) act(first, () => ask(`/api/job/${job.id}/first`, {}));
    const href = job.run && job.state !== "failed" ? `/run/${encodePath(job.run)}` : `/job/${job.id}`;
    return make("li", {}, make("a", {href}, job.run?.split("/").at(-1) ?? job.name),
      make("span", {class: `state ${job.state}`}, job.state === "queued" && job.position ? `waits, number ${job.position} on ${job.device}` : job.state),
      job.error ? make("small", {class: "muted clip"}, job.error) : "",
      make("span", {class: "do"}, first, open.includes(job) ? stop : ""));
  }));
}

function drawLoad(load) {
  const meter = (name, text, share) => make("div", {}, make("span", {}, name, make("b", {}, text)),
    make("meter", {min: 0, max: 1, high: 0.92, value: share, "aria-label": `${name}: ${text}`}));
  const parts = [
    meter("CPU", `${Math.round(load.cpu_percent)} % of ${load.cores} cores`, load.cpu_percent / 100),
    meter("Memory", `${formatBytes(load.memory_total - load.memory_used)} free`, load.memory_used / load.memory_total),
    ...load.gpus.map(gpu => meter(gpu.name, `${gpu.percent} %, ${formatBytes(gpu.memory_used)}`, gpu.percent / 100)),
  ];
  if (load.disk_total) parts.push(meter("Disk", `${formatBytes(load.disk_free)} free`, 1 - load.disk_free / load.disk_total));
  find("#load").replaceChildren(...parts);
}

function annotate(run) {
  find("#annotate-run").textContent = run.name;
  find("#tags").value = run.tags.join(", ");
  find("#remark").value = run.remark;
  find("#annotate-problem").hidden = true;
  find("#annotate").showModal();
  find("#save").onclick = async () => {
    try {
      const tags = find("#tags").value.split(",").map(tag => tag.trim()).filter(Boolean);
      Object.assign(run, await ask(`/api/annotate/${encodePath(run.id)}`, {tags, remark: find("#remark").value}));
      run.text = textOf(run);
      drawTags();
      draw();
      find("#annotate").close();
    } catch (problem) {
      find("#annotate-problem").textContent = problem.message;
      find("#annotate-problem").hidden = false;
    }
  };
}

let loading = false;
async function load() {
  if (loading) return;
  loading = true;
  try {
    const answer = await ask("/api/runs");
    state.runs = answer.runs.map(run => ({...run, text: textOf(run)}));
    drawKinds();
    drawTags();
    draw();
    drawJobs(answer.jobs);
    drawLoad(answer.load);
  } catch (problem) {
    notify(problem.message);
  }
  loading = false;
}

find("#all").addEventListener("change", event => {
  for (const run of selectRuns()) event.target.checked ? state.chosen.add(run.id) : state.chosen.delete(run.id);
  draw();
});
find("#compare").addEventListener("click", compareChosen);
find("#clear").addEventListener("click", () => { state.chosen.clear(); draw(); find("#search").focus(); });
find("#remove").addEventListener("click", askRemoval);
find("#removal-go").addEventListener("click", async () => {
  try {
    await ask("/api/remove", {runs: [...state.chosen]});
    state.chosen.clear();
    find("#removal").close();
    await load();
  } catch (problem) {
    find("#removal-problem").textContent = problem.message;
    find("#removal-problem").hidden = false;
  }
});
act(find("#demo"), async () => location.assign(`/job/${(await ask("/api/demo", {})).job}`));
find("#reset").addEventListener("click", () => { for (const name of ["#search", "#state", "#kind", "#tag"]) find(name).value = ""; draw(); find("#search").focus(); });
for (const name of ["#search", "#state", "#kind", "#tag"]) find(name).addEventListener("input", draw);
for (const head of findAll("th[data-sort]")) {
  find("button", head).addEventListener("click", () => {
    state.down = state.sort === head.dataset.sort ? !state.down : false;
    state.sort = head.dataset.sort;
    draw();
  });
}
document.addEventListener("keydown", event => {
  const {key, target} = event;
  if (event.ctrlKey || event.metaKey || event.altKey || target.closest("dialog, textarea, select") || target.matches("input:not([type=checkbox]):not(#search)")) return;
  if (target.id === "search") { if (key === "ArrowDown") moveBy(event, 1); return; }
  const row = target.closest("#runs tbody tr");
  if (key === "/") { event.preventDefault(); find("#search").focus(); }
  else if (key === "ArrowDown" && (row || target === document.body)) moveBy(event, 1);
  else if (key === "ArrowUp" && row) moveBy(event, -1);
  else if (key === "x" && row) { const run = state.runs.find(one => one.id === row.dataset.id); choose(run, !state.chosen.has(run.id)); }
  else if (key === "c") compareChosen();
});
await load();
let first = true;
listen("", {
  jobs: jobs => { drawJobs(jobs); if (!first) load(); first = false; },
  load: drawLoad,
});
setInterval(() => { if (!document.hidden && state.runs.some(run => run.state === "running")) load(); }, 5000);
