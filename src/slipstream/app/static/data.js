import {find, formatAge, make} from "./common.js";

const files = JSON.parse(find("#values").textContent);
const drop = find("#drop"), input = find("#upload"), limit = Number(drop.dataset.limit);
const units = [["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["bytes", 1]];
const formatSize = bytes => {
  const [unit, size] = units.find(([, size]) => bytes >= size) ?? units[3];
  return `${(bytes / size).toLocaleString("en", {maximumFractionDigits: size === 1 || bytes / size >= 100 ? 0 : 1})} ${unit}`;
};
let request = null;

function list() {
  const text = find("#search").value.toLowerCase();
  const matching = files.filter(file => file.name.toLowerCase().includes(text));
  find("#files tbody").replaceChildren(...matching.map(file => make("tr", {},
    make("th", {scope: "row"}, make("a", {href: `/data?file=${encodeURIComponent(file.name)}`}, file.files ? `${file.name}/` : file.name),
      file.files ? make("small", {}, `${file.files} files, one series each`) : ""),
    make("td", {class: "number"}, file.files ? "" : formatSize(file.bytes)),
    make("td", {class: "number"}, file.files ? "" : `${formatAge(Date.now() / 1000 - file.time)} ago`))));
  find("#count").textContent = text ? `${matching.length} of ${files.length} files` : "";
  find("#empty").hidden = files.length > 0;
  find("#files").hidden = !files.length;
}

function fail(message) {
  find("#problem").textContent = message;
  find("#problem").hidden = false;
  find("#uploading").hidden = true;
  request = null;
}

function send(file) {
  if (request || !file) return;
  find("#problem").hidden = true;
  if (file.size > limit) return fail(`${file.name} has ${formatSize(file.size)}; an upload has at most ${formatSize(limit)}. Copy the file into the folder instead.`);
  request = new XMLHttpRequest();
  request.open("POST", `/api/data/upload?name=${encodeURIComponent(file.name)}`);
  request.setRequestHeader("Content-Type", "application/octet-stream");
  request.upload.onprogress = event => {
    find("#share").value = event.loaded / Math.max(file.size, 1);
    find("#sent").textContent = `${formatSize(event.loaded)} of ${formatSize(file.size)}`;
  };
  request.onload = () => {
    let answer = {};
    try { answer = JSON.parse(request.responseText); } catch { answer = {error: request.responseText}; }
    if (request.status === 200) location.assign(`/data?file=${encodeURIComponent(answer.file)}`);
    else fail(`${file.name}: ${answer.error || `status ${request.status}`}`);
  };
  request.onerror = () => fail(`${file.name}: the upload was cut off.`);
  request.onabort = () => fail(`${file.name}: cancelled; nothing was kept.`);
  find("#uploading").hidden = false;
  request.send(file);
}

find("#limit").textContent = formatSize(limit);
find("#search").addEventListener("input", list);
find("#abort").addEventListener("click", () => request?.abort());
input.addEventListener("change", () => { send(input.files[0]); input.value = ""; });
for (const kind of ["dragenter", "dragover"]) document.addEventListener(kind, event => { event.preventDefault(); drop.classList.add("over"); });
document.addEventListener("dragleave", event => { if (!event.relatedTarget) drop.classList.remove("over"); });
document.addEventListener("drop", event => {
  event.preventDefault();
  drop.classList.remove("over");
  if (event.dataTransfer.files.length > 1) return fail("Drop one file at a time.");
  send(event.dataTransfer.files[0]);
});
list();
