import {act, ask, encodePath, find, listen} from "./common.js";

const job = find("#job").dataset.job;
act(find("#stop"), () => ask(`/api/job/${job}/stop`, {}));
act(find("#first"), () => ask(`/api/job/${job}/first`, {}));

if (["queued", "running"].includes(find("#job").dataset.state)) {
  // the answer comes once the run has a folder; the stream of jobs looks once a second
  const look = async () => {
    try {
      const now = await ask(`/api/job/${job}?wait=2`);
      if (now.run && !now.error) return location.replace(`/run/${encodePath(now.run)}`);
      if (!["queued", "running"].includes(now.state)) return location.reload();
      find("#state").textContent = now.state;
      find("#state").className = `state ${now.state}`;
      find("#progress").textContent = now.state === "queued" ? `Waits for its turn${now.position ? `, number ${now.position}` : ""}.` : "Starts …";
    } catch { /* the server is away; the stream says so */ }
    return setTimeout(look, 150);
  };
  look();
  listen("", {});
}
