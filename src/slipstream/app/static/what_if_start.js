import {ask, find} from "./common.js";

const base = find("#base"), go = find("#go"), problem = find("#problem"), status = find("#status");

async function open(start) {
  go.disabled = true;
  problem.hidden = true;
  try {
    let body = {start};
    if (start.startsWith("data:")) {
      const path = start.slice(5);
      status.textContent = "Reading the file …";
      const answer = await ask(`/api/inspect?path=${encodeURIComponent(path)}`);
      body = {settings: {...answer.values, "data.path": path}};
    }
    const {session} = await ask("/api/what-if", body);
    location.assign(`/what-if?session=${encodeURIComponent(session)}`);
  } catch (error) {
    problem.textContent = error.message;
    problem.hidden = false;
    status.textContent = "";
    go.disabled = false;
  }
}

find("#begin").addEventListener("submit", event => { event.preventDefault(); open(base.value); });
addEventListener("pageshow", () => { go.disabled = false; status.textContent = ""; });
const wanted = find("#starts").dataset.start;
if (wanted) {
  if ([...base.options].some(option => option.value === wanted)) base.value = wanted;
  open(wanted);
}
