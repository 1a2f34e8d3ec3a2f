// Tests on new data and exports: jobs of a finished run, started here and shown with what they found.
import {act, ask, find, formatNumber, listen, make, notify} from "./common.js";

const OPEN = ["queued", "running"];
const formatSize = bytes => bytes < 1e5 ? `${(bytes / 1e3).toFixed(1)} kB` : `${formatNumber(bytes / 1e6, 3)} MB`;
const command = (text, id) => make("details", {}, make("summary", {}, "Command"), make("div", {class: "copyable"}, make("div", {class: "head"}, make("span", {}, "Command"), make("button", {type: "button", class: "quiet", "data-copy": id}, "Copy")), make("pre", {id, tabindex: "0"}, text)));
const describeState = one => one.state === "queued" ? `waits${one.position ? `, number ${one.position} in the queue` : ""}` : one.state === "running" ? "runs …" : one.state;
const fresh = new Set();

// Uploads a file; `onShare` gets how much has arrived.
function upload(file, onShare) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", `/api/data/upload?name=${encodeURIComponent(file.name)}`);
    request.setRequestHeader("Content-Type", "application/octet-stream");
    request.upload.onprogress = event => onShare(event.loaded, file.size);
    request.onerror = () => reject(new Error(`${file.name}: the upload was cut off.`));
    request.onload = () => {
      let answer = {};
      try { answer = JSON.parse(request.responseText); } catch { answer = {error: request.responseText}; }
      if (request.status === 200) resolve(answer.file);
      else reject(new Error(`${file.name}: ${answer.error || `status ${request.status}`}`));
    };
    request.send(file);
  });
}

function showScores(test) {
  if (!test.scores?.length) return test.rows != null ? make("p", {}, `${test.rows.toLocaleString("en")} rows predicted.`) : null;
  const head = make("tr", {}, make("th", {scope: "col"}, "New data"), ...test.headings.map(one => make("th", {scope: "col", class: "number"}, one)));
  const rows = test.scores.map(one => make("tr", {class: one.name === "model" ? "own" : null}, make("th", {scope: "row"}, one.name), ...one.cells.map(cell => make("td", {class: "number"}, cell))));
  return make("div", {class: "sheet"}, make("table", {class: "compact"}, make("thead", {}, head), make("tbody", {}, ...rows)));
}

// The error beside that of the test set.
function compare(test) {
  const own = test.scores?.find(one => one.name === "model"), before = find("dl.figures dd")?.firstChild?.textContent.trim();
  if (!own || !before) return null;
  return make("p", {class: "verdict"}, `${test.headings[0]} ${own.cells[0]} on ${test.windows?.toLocaleString("en") ?? "?"} windows; ${before} on the test set.`);
}

function showTest(test, url, look) {
  const isOpen = OPEN.includes(test.state), done = test.state === "finished";
  return make("article", {class: "test", "data-state": test.state, "data-job": test.job},
    make("div", {class: "title"}, make("h3", {}, test.data), make("span", {class: `state ${test.state}`}, describeState(test)),
      isOpen ? make("button", {type: "button", class: "quiet", onclick: () => ask(`/api/job/${test.job}/stop`, {}).catch(problem => notify(problem.message))}, "Cancel") : null,
      done && test.has_predictions ? make("button", {type: "button", class: "quiet", onclick: () => look(test.job)}, "Show in the plot") : null,
      done && test.has_predictions ? make("a", {class: "button quiet", href: `/tested/${test.job}/${url}`, download: ""}, "Download the predictions") : null),
    test.error ? make("p", {class: "message bad"}, test.error) : null,
    done ? compare(test) : null, done ? showScores(test) : null,
    ...(test.notes ?? []).map(note => make("p", {class: "help"}, note)), command(test.command, `command-${test.job}`));
}

const OPTIONS = {
  int8: () => make("label", {class: "check"}, make("input", {type: "checkbox", name: "int8"}), "weights of 8 bits, if the test error allows it"),
  after_prepare: () => make("label", {class: "check"}, make("input", {type: "checkbox", name: "after_prepare"}), "leave data.prepare to the caller"),
  name: () => make("label", {class: "block"}, "Prefix of its names", make("input", {name: "name", placeholder: "slip", maxlength: "60"})),
  state: () => make("label", {class: "block"}, "What a step does", make("select", {name: "state"}, make("option", {value: ""}, "as the model can"), make("option", {value: "carried"}, "carries the state on"), make("option", {value: "windows"}, "predicts the last window"))),
  license: () => make("label", {class: "block"}, "Licence in the model card", make("input", {name: "license", placeholder: "apache-2.0", maxlength: "60"})),
};

function showExport(one, url, start) {
  const {export: written, state} = one, isOpen = OPEN.includes(state), parity = written?.parity;
  const facts = [];
  if (written) facts.push(["Size", `${formatSize(written.bytes)}, ${written.files?.length ?? 0} files`]);
  if (parity?.windows != null) facts.push(["Compared", `${parity.windows.toLocaleString("en")} windows`]);
  if (parity?.max_rel != null) facts.push(["Largest difference", `${formatNumber(parity.max_rel, 3)} relative, of ${formatNumber(parity.limit, 2)} allowed`]);
  const form = make("form", {}, ...one.settings.map(name => OPTIONS[name]?.()).filter(Boolean));
  const button = make("button", {type: "button", disabled: isOpen}, written ? "Export again" : "Export");
  button.addEventListener("click", () => start(one.to, Object.fromEntries([...form.elements].map(field => [field.name, field.type === "checkbox" ? field.checked : field.value]))));
  form.addEventListener("submit", event => { event.preventDefault(); button.click(); });
  return make("div", {class: "card", "data-format": one.to, "data-state": state ?? "", "data-written": written ? "yes" : ""},
    make("h3", {}, one.to), make("p", {class: "muted"}, one.what),
    isOpen ? make("p", {role: "status"}, make("span", {class: `state ${state}`}, describeState(one))) : null,
    one.error ? make("p", {class: "message bad"}, one.error) : null,
    facts.length ? make("dl", {class: "pairs"}, ...facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])) : null,
    written?.files ? make("details", {}, make("summary", {}, "Files"), make("ul", {}, ...written.files.map(file => make("li", {}, `${file.name}, ${formatSize(file.bytes)}`)), ...(written.notes ?? []).map(note => make("li", {}, note)))) : null,
    one.settings.length ? make("details", {}, make("summary", {}, "Options"), form) : null,
    make("div", {class: "buttons"}, button, written ? make("a", {class: "button", href: `/export/${one.to}/${url}`, download: ""}, "Download") : null),
    one.command ? command(one.command, `command-export-${one.to}`) : null);
}

// Lists the tests and exports of a run, starts them, and follows their jobs.
export function watchJobs(run, url, {look, listSources}) {
  const problem = find("#test-problem");
  const fail = text => { problem.textContent = text; problem.hidden = !text; };
  const listTests = async () => {
    const {tests} = await ask(`/api/tests/${url}`);
    find("#tests").replaceChildren(...tests.map(test => showTest(test, url, look)));
    listSources(tests);
    const ready = tests.find(test => fresh.has(test.job) && test.state === "finished" && test.has_predictions);
    if (ready) fresh.delete(ready.job);
    return tests;
  };
  const listExports = async () => {
    const {exports} = await ask(`/api/exports/${url}`);
    const open = new Set([...find("#formats").querySelectorAll("details[open] > summary")].map(one => `${one.closest("[data-format]").dataset.format} ${one.textContent}`));
    const typing = find("#formats").contains(document.activeElement) && document.activeElement.name;
    if (typing) return;
    find("#formats").replaceChildren(...exports.map(one => showExport(one, url, start)));
    for (const one of find("#formats").querySelectorAll("summary")) one.parentElement.open = open.has(`${one.closest("[data-format]").dataset.format} ${one.textContent}`);
  };
  const start = async (to, options) => {
    try {
      await ask(`/api/export/${url}`, {to, options});
      document.activeElement?.blur();
      await listExports();
    } catch (error) {
      notify(error.message);
    }
  };
  const test = async (data, score) => {
    fail("");
    const {job} = await ask(`/api/test/${url}`, {data, score});
    fresh.add(job);
    await listTests();
  };
  const send = async file => {
    if (!file) return;
    fail("");
    find("#uploading").hidden = false;
    try {
      const data = await upload(file, (sent, size) => { find("#share").value = sent / Math.max(size, 1); find("#sent").textContent = `${formatSize(sent)} of ${formatSize(size)}`; });
      await test(data, find("#score").checked);
    } catch (error) {
      fail(error.message);
    }
    find("#uploading").hidden = true;
  };
  act(find("#test"), async () => {
    const data = find("#table").value;
    if (!data) return fail("Choose a file first.");
    await test(data, find("#score").checked).catch(error => fail(error.message));
  });
  find("#upload").addEventListener("change", event => { send(event.target.files[0]); event.target.value = ""; });
  const drop = find("#drop");
  for (const kind of ["dragenter", "dragover"]) document.addEventListener(kind, event => { event.preventDefault(); drop.classList.add("over"); });
  document.addEventListener("dragleave", event => { if (!event.relatedTarget) drop.classList.remove("over"); });
  document.addEventListener("drop", event => {
    event.preventDefault();
    drop.classList.remove("over");
    const {files} = event.dataTransfer;
    if (files.length > 1) fail("Drop one file at a time.");
    else { find("#new-data").scrollIntoView(); send(files[0]); }
  });
  // the stream of jobs says when one begins or ends
  listen("", {jobs: () => { Promise.all([listTests(), listExports()]).catch(error => notify(error.message)); }});
}
