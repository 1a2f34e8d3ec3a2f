// What every screen uses: requests, the event stream, notices, copy buttons and formats.
import {formatNumber, make} from "./charts.js";

export {formatNumber, make};

document.querySelector(".bar [aria-current]")?.scrollIntoView({block: "nearest", inline: "center"});

export const find = (selector, root = document) => root.querySelector(selector);
export const findAll = (selector, root = document) => [...root.querySelectorAll(selector)];

export class RequestProblem extends Error {
  constructor(message, body) { super(message); this.body = body; }
}

// Returns the answer of the server: JSON as an object, a file as a blob with its name.
export async function ask(path, body, signal) {
  const options = body === undefined ? {signal} :
    {method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(body), signal};
  let response;
  try {
    response = await fetch(path, options);
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    throw new RequestProblem("The server does not answer; start it again with: slipstream ui", {});
  }
  const type = response.headers.get("Content-Type") || "";
  const file = (response.headers.get("Content-Disposition") || "").match(/^attachment; filename="(.+)"$/);
  if (response.ok && file) return {name: file[1], blob: await response.blob()};
  const answer = type.startsWith("application/json") ? await response.json() : {error: await response.text()};
  if (!response.ok) throw new RequestProblem(answer.error || `status ${response.status}`, answer);
  return answer;
}

let hiding;
export function notify(text) {
  const box = find("#notice");
  box.textContent = text;
  box.hidden = false;
  clearTimeout(hiding);
  hiding = setTimeout(() => { box.hidden = true; }, 6000);
}

// Runs an action of a button: no second click meanwhile, and problems as a notice.
export const act = (button, action) => button?.addEventListener("click", async () => {
  button.disabled = true;
  try {
    await action();
  } catch (problem) {
    notify(problem.message);
  }
  button.disabled = false;
});

document.addEventListener("click", async event => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const source = document.getElementById(button.dataset.copy);
  try {
    await navigator.clipboard.writeText(source.textContent);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(source);
    button.textContent = "Selected";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
});

// One stream per tab. A hidden tab closes it, since browsers allow six connections to a server;
// when it is shown again, it goes on after the last message.
export function listen(run, handlers) {
  let source = null, last = "";
  const remember = event => { if (event.lastEventId) last = event.lastEventId; };
  const open = () => {
    if (source) return;
    const query = new URLSearchParams();
    if (run) query.set("run", run);
    if (last) query.set("last", last);
    source = new EventSource(`/events?${query}`);
    for (const [kind, handle] of Object.entries(handlers)) {
      source.addEventListener(kind, event => { remember(event); handle(JSON.parse(event.data)); });
    }
    source.onopen = () => { find("#connection").hidden = true; };
    source.onerror = () => {
      find("#connection").hidden = false;
      if (source.readyState === EventSource.CLOSED) { close(); setTimeout(open, 2000); }
    };
  };
  const close = () => { source?.close(); source = null; };
  document.addEventListener("visibilitychange", () => document.hidden ? close() : open());
  addEventListener("pagehide", close);
  if (!document.hidden) open();
}

export const encodePath = path => path.split("/").map(encodeURIComponent).join("/");

export function formatSeconds(seconds) {
  if (seconds == null || !Number.isFinite(seconds)) return "–";
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function formatAge(seconds) {
  for (const [least, unit, name] of [[172800, 86400, "d"], [7200, 3600, "h"], [120, 60, "min"]]) {
    if (seconds >= least) return `${Math.floor(seconds / unit)} ${name}`;
  }
  return `${Math.max(0, Math.floor(seconds))} s`;
}

export const formatBytes = bytes => bytes == null ? "–" : `${formatNumber(bytes / 1e9, 3)} GB`;
