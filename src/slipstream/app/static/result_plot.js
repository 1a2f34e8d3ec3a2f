// Predicted and true values of a series with the errors below, on one axis; zooming asks the server for the rows.
import {colour, DATES, FONT, tzDate} from "./charts.js";
import {ask, formatNumber, make} from "./common.js";

const faint = (name, share) => colour(name) + Math.round(255 * share).toString(16).padStart(2, "0");
export const formatX = (x, dates, name) => x == null || !Number.isFinite(x) ? "" : dates ? new Date(x * 1e3).toISOString().slice(0, 19).replace("T", " ") : `${name} ${formatNumber(x, 7)}`;

export class Explorer {
  // `address` gives the URL of a view; `onDraw` gets what was drawn.
  constructor(place, address, onDraw) {
    Object.assign(this, {place, address, onDraw, plots: [], data: null, range: null, full: null, marks: null, asked: 0});
    new ResizeObserver(() => { for (const one of this.plots) one.setSize({width: this.width, height: one.height}); }).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  get width() { return Math.max(this.place.clientWidth - 26, 100); }

  // Shows a range of x, or the whole series.
  async show(range = null) {
    const number = ++this.asked;
    this.place.classList.add("stale");
    try {
      const data = await ask(this.address(range, Math.round(this.width * 1.5)));
      if (number !== this.asked) return;
      Object.assign(this, {data, range});
      if (!range) this.full = data.x.length ? [data.x[0], data.x.at(-1)] : null;
      this.draw();
      this.onDraw(data, range);
    } finally {
      if (number === this.asked) this.place.classList.remove("stale");
    }
  }

  get ends() { return this.range ?? this.full; }
  get span() { return this.ends ? this.ends[1] - this.ends[0] : 0; }

  // Moves by a share of what is shown, or zooms by a factor.
  move(share) { if (this.ends) return this.show(this.ends.map(end => end + share * this.span)); }
  zoom(factor) {
    if (!this.ends) return null;
    const centre = (this.ends[0] + this.ends[1]) / 2, half = Math.max(this.span * factor / 2, 1e-6);
    const wanted = [centre - half, centre + half];
    const covers = this.full && wanted[0] <= this.full[0] && wanted[1] >= this.full[1];
    return this.show(covers ? null : wanted);
  }

  draw() {
    for (const one of this.plots) one.destroy();
    this.plots = [];
    const {data} = this;
    if (!data) return;
    if (!data.x.length) {
      this.place.replaceChildren(make("p", {class: "muted errors-none"}, "There are no rows here."));
      return;
    }
    const classes = data.classes;
    const lower = classes ? {name: data.true.some(one => one != null) ? "probability of the true class" : "probability of the predicted class", values: data.probability, colour: "blue"} : {name: "error (predicted - true)", values: data.error, colour: "red"};
    const hasLower = lower.values.some(one => one != null);
    const legend = make("div", {class: "legend", "aria-hidden": "true"});
    this.place.replaceChildren(legend);
    const entry = (kind, text, values, named) => {
      const value = make("b");
      legend.append(make("span", {}, make("i", {class: kind}), `${text} `, value));
      return [value, values, named];
    };
    const readers = [];
    if (data.true.some(one => one != null)) readers.push(entry("ink", "true", data.true, classes));
    readers.push(entry("blue", "predicted", data.predicted, classes));
    if (hasLower) readers.push(entry(lower.colour, lower.name, lower.values));
    data.bands.forEach((band, i) => entry(i ? "blue box inner" : "blue box", band.label, null));
    const where = legend.appendChild(make("span"));
    const read = chart => {
      const i = chart.cursor.idx;
      for (const [value, values, named] of readers) value.textContent = i == null || !values || values[i] == null ? "" : named ? named[values[i]] ?? "" : formatNumber(values[i], 5);
      where.textContent = i == null ? "" : formatX(data.x[i], data.dates, data.x_name);
    };
    const hidden = {stroke: "transparent", width: 0, points: {show: false}};
    const line = (name, width = 1.5) => ({stroke: colour(name), width, points: {show: data.points < 80, size: 4}, ...(classes ? {paths: uPlot.paths.stepped({align: 1})} : {})});
    const names = (_, ticks) => ticks.map(tick => Number.isInteger(tick) ? (classes[tick] ?? "").slice(0, 12) : "");
    this.plots.push(this.build(hasLower ? 280 : 360, !hasLower, [line("ink"), line("blue"), ...data.bands.flatMap(() => [hidden, hidden])], [data.true, data.predicted, ...data.bands.flatMap(band => [band.low, band.high])], {
      bands: data.bands.map((_, i) => ({series: [4 + 2 * i, 3 + 2 * i], fill: faint("blue", 0.18)})), read,
      ...(classes ? {y: [-0.5, classes.length - 0.5], values: names, size: 92} : {}),
    }));
    if (hasLower) this.plots.push(this.build(150, true, [{stroke: colour(lower.colour), fill: faint(lower.colour, 0.12), width: 1.2, points: {show: data.points < 80, size: 4}}], [lower.values], {read, size: classes ? 92 : 62, ...(classes ? {y: [0, 1.02]} : {})}));
  }

  build(height, last, series, columns, {bands = [], read, y, values, size = 62}) {
    const {data} = this, axis = {stroke: colour("muted"), font: FONT, labelFont: FONT, grid: {stroke: colour("grid"), width: 1}, ticks: {show: false}, gap: 4};
    const numbers = (_, ticks) => ticks.map(tick => tick == null ? "" : formatNumber(tick, 4));
    const [low, high] = this.ends ?? [data.x[0], data.x.at(-1)];
    return new uPlot({
      width: this.width, height: height + (last && data.x_name && !data.dates ? 16 : 0), tzDate, bands,
      scales: {x: {time: data.dates, range: () => low < high ? [low, high] : [low - 1, low + 1]}, ...(y ? {y: {range: () => y}} : {})},
      axes: [{...axis, size: last ? data.dates ? 40 : 26 : 6, space: data.dates ? 90 : 60, label: last && data.x_name && !data.dates ? data.x_name : null, labelSize: 18, values: last ? data.dates ? DATES : numbers : (_, ticks) => ticks.map(() => "")},
        {...axis, size, space: height / 6, values: values ?? numbers}],
      series: [{}, ...series], legend: {show: false},
      cursor: {sync: {key: "result", scales: ["x", null]}, drag: {x: true, y: false, setScale: false}, y: false, bind: uPlot.followDrag({dblclick: () => this.show()})},
      hooks: {setCursor: [read], setSelect: [plot => this.select(plot)], draw: [plot => this.drawMarks(plot)]},
    }, [data.x, ...columns], this.place);
  }

  select(plot) {
    const {left, width} = plot.select;
    if (width < 4) return;
    const range = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    for (const one of this.plots) one.setSelect({left: 0, width: 0, top: 0, height: 0}, false);
    this.show(range);
  }

  // The worst window that was chosen is shaded.
  drawMarks(plot) {
    if (!this.marks) return;
    const [from, to] = this.marks.map(x => plot.valToPos(x, "x", true)), {left, top, width, height} = plot.bbox;
    const begin = Math.max(Math.min(from, left + width), left), end = Math.max(Math.min(to, left + width), left);
    plot.ctx.save();
    plot.ctx.fillStyle = faint("orange", 0.16);
    plot.ctx.fillRect(begin, top, Math.max(end - begin, 3), height);
    plot.ctx.restore();
  }
}
