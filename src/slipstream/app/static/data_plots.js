// Plots of columns of any length: the server sends what is seen, as the lowest and highest of stretches.
import {drawPanel, formatNumber, make} from "./charts.js";
import {ask} from "./common.js";

const HEIGHT = 180;
const pause = milliseconds => new Promise(done => setTimeout(done, milliseconds));

// Asks until the answer is there; a task that takes longer is answered with its progress.
export async function askUntilDone(path, report = () => {}) {
  for (;;) {
    const answer = await ask(path);
    if (answer.progress === undefined) return answer;
    report(answer.progress);
    await pause(250);
  }
}

export const formatTime = seconds => new Date(seconds * 1000).toISOString().replace("T", " ").replace(/(\.000)?Z$/, "");

class Plot {
  constructor(plots, column, name) {
    this.plots = plots;
    this.column = column;
    this.reading = make("span", {});
    this.area = make("div", {});
    this.box = make("div", {class: "plot waiting", "data-column": String(column)}, make("div", {class: "name"}, make("b", {title: name}, name), this.reading), this.area);
    this.plot = null;
    this.answer = null;
    this.number = 0;
    new ResizeObserver(() => this.plot?.setSize({width: this.width, height: HEIGHT})).observe(this.box);
  }

  get width() { return Math.max(this.box.clientWidth - 24, 100); }

  async load() {
    const number = ++this.number;
    this.box.classList.add("waiting");
    try {
      const report = share => { if (!this.plot) this.reading.textContent = `reading … ${Math.round(100 * share)} %`; };
      const answer = await askUntilDone(this.plots.describe(this.column, this.width), report);
      if (number !== this.number || !this.box.isConnected) return;
      this.answer = answer;
      this.plots.setExtent(answer.first, answer.last);
      this.draw();
      this.box.dataset.rows = answer.rows;
      this.reading.textContent = "";
    } catch (problem) {
      if (number === this.number) this.area.replaceChildren(make("p", {class: "message bad"}, problem.message));
    }
    if (number === this.number) this.box.classList.remove("waiting");
  }

  arrange() {
    const {x, low, high} = this.answer;
    if (!high) return [x, low];
    const xs = [], ys = [];
    for (let i = 0; i < x.length; i++) {
      const next = i + 1 < x.length ? x[i + 1] : this.answer.last;
      xs.push(x[i], (x[i] + Math.max(next, x[i])) / 2);
      ys.push(low[i], high[i]);
    }
    return [xs, ys];
  }

  draw() {
    const data = this.arrange();
    if (this.plot) {
      this.plot.setData(data, false);
      this.rescale();
      return;
    }
    this.area.replaceChildren();
    const rows = (_, ticks) => ticks.map(tick => Number.isInteger(tick) ? tick.toLocaleString("en") : "");
    const only = kind => kind === "mousemove" || kind === "mouseleave";
    this.plot = drawPanel(this.area, data, {
      width: this.width, height: HEIGHT,
      lines: [{colour: "blue", width: 1, points: {show: (plot, _, first, last) => !this.answer.high && last - first < this.width / 8, size: 4}}],
      x: {dates: this.plots.isDate, values: this.plots.axis === "row" ? rows : undefined, scale: {auto: false, range: (_, low, high) => [low, high]}},
      y: {size: 66, range: (_, low, high) => low == null ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true)},
      cursor: {
        drag: {x: true, y: false, setScale: false}, y: true, sync: {key: "data", filters: {pub: only, sub: only}},
        bind: uPlot.followDrag({dblclick: () => this.plots.setView(null, null), mousedown: event => event.shiftKey && this.pan(event)}),
      },
      hooks: {
        setSelect: [plot => {
          const {left, width} = plot.select;
          if (width > 3) this.plots.setView(plot.posToVal(left, "x"), plot.posToVal(left + width, "x"));
          plot.setSelect({left: 0, width: 0, top: 0, height: 0}, false);
        }],
        setCursor: [plot => this.read(plot.cursor.idx)],
      },
    });
    this.rescale();
    this.plot.over.addEventListener("wheel", event => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      const at = this.plot.posToVal(event.offsetX, "x");
      this.plots.zoom(event.deltaY < 0 ? 0.7 : 1 / 0.7, at);
    }, {passive: false});
  }

  rescale() {
    const [min, max] = this.plots.range;
    this.plot.batch(() => this.plot.setScale("x", {min, max: max > min ? max : min + 1}));
  }

  pan(event) {
    event.preventDefault();
    const [low, high] = this.plots.range, start = event.clientX;
    const perPixel = (high - low) / Math.max(this.plot.over.clientWidth, 1);
    const move = next => { this.plots.setView(low - (next.clientX - start) * perPixel, high - (next.clientX - start) * perPixel); };
    const end = () => { removeEventListener("mousemove", move); removeEventListener("mouseup", end); };
    addEventListener("mousemove", move);
    addEventListener("mouseup", end);
    return true;
  }

  read(index) {
    if (index == null || !this.answer) { this.reading.textContent = ""; return; }
    const {x, low, high} = this.answer, i = high ? index >> 1 : index;
    const value = high && high[i] !== low[i] ? `${formatNumber(low[i])} to ${formatNumber(high[i])}` : formatNumber(low[i]);
    const where = this.plots.isDate ? formatTime(x[i]) : this.plots.axis === "row" ? `row ${(x[i] + 1).toLocaleString("en")}` : formatNumber(x[i], 8);
    this.reading.textContent = `${where}: ${value}`;
  }

  rebuild() {
    this.plot?.destroy();
    this.plot = null;
    if (this.answer) this.draw();
  }
}

export class Plots {
  constructor(place, {query, hasDates, onChange}) {
    Object.assign(this, {place, query, hasDates, onChange});
    this.axis = "row";
    this.series = "";
    this.view = [null, null];
    this.extent = null;
    this.plots = new Map();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.plots.forEach(plot => plot.rebuild()));
    place.addEventListener("keydown", event => {
      const action = {"+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", "0": "all"}[event.key];
      if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      this.act(action);
    });
  }

  get isDate() { return this.axis === "time" && this.hasDates; }

  get range() {
    const [first, last] = this.extent ?? [0, 1];
    return [this.view[0] ?? first, this.view[1] ?? last];
  }

  describe(column, width) {
    const query = new URLSearchParams(this.query);
    query.set("column", column);
    query.set("axis", this.axis);
    query.set("width", Math.round(width));
    if (this.series !== "") query.set("series", this.series);
    if (this.view[0] !== null) { query.set("begin", this.view[0]); query.set("end", this.view[1]); }
    return `/api/data/plot?${query}`;
  }

  setExtent(first, last) {
    if (this.extent?.[0] === first && this.extent?.[1] === last) return;
    this.extent = [first, last];
    this.onChange();
  }

  show(column, name) {
    const plot = new Plot(this, column, name);
    this.plots.set(column, plot);
    const after = [...this.plots.keys()].filter(one => one > column).sort((a, b) => a - b)[0];
    this.place.insertBefore(plot.box, after === undefined ? null : this.plots.get(after).box);
    plot.load();
  }

  hide(column) {
    const plot = this.plots.get(column);
    plot?.plot?.destroy();
    plot?.box.remove();
    this.plots.delete(column);
  }

  // Another axis or series: everything is drawn anew.
  restart({axis = this.axis, series = this.series}) {
    Object.assign(this, {axis, series, view: [null, null], extent: null});
    for (const plot of this.plots.values()) {
      plot.answer = null;
      plot.rebuild();
      plot.load();
    }
  }

  setView(begin, end) {
    if (!this.extent) return;
    const [first, last] = this.extent;
    if (begin !== null) {
      const size = Math.min(Math.max(end - begin, (last - first) * 1e-9, this.axis === "row" ? 4 : 0), last - first);
      begin = Math.min(Math.max(begin, first), last - size);
      end = begin + size;
      if (size >= last - first) [begin, end] = [null, null];
    }
    this.view = [begin, end];
    // what is there is shown at once, at the new scale; what is asked for replaces it
    for (const plot of this.plots.values()) plot.plot && plot.rescale();
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => { for (const plot of this.plots.values()) plot.load(); });
    this.onChange();
  }

  zoom(factor, at) {
    const [low, high] = this.range, centre = at ?? (low + high) / 2;
    this.setView(centre - (centre - low) * factor, centre + (high - centre) * factor);
  }

  act(action) {
    const [low, high] = this.range, part = (high - low) / 4;
    if (action === "in") this.zoom(0.5);
    else if (action === "out") this.zoom(2);
    else if (action === "left") this.setView(low - part, high - part);
    else if (action === "right") this.setView(low + part, high + part);
    else this.setView(null, null);
  }
}
