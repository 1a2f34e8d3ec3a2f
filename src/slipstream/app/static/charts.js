// Line charts with uPlot, in the colours of the page.
import {formatNumber, make} from "./common.js";

export const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';
export const WHOLE = [0, 1, 2, 3, 4, 5].flatMap(power => [1, 2, 5].map(one => one * 10 ** power));
const EPOCHS = (_, at, low, high) => high - low > 1 ? WHOLE : [0.1, 0.2, 0.5, ...WHOLE];

// Ticks of a logarithmic axis. uPlot's own never end where the range begins just below a power of ten.
function listPowers(_, at, low, high) {
  const factors = Math.log10(high / low) < 2.5 ? [1, 2, 5] : [1], ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    ticks.push(...factors.map(factor => factor * 10 ** power).filter(tick => tick >= low && tick <= high));
  }
  if (ticks.length > 1) return ticks;
  // a narrow range has hardly a round number in it: ticks at even distances
  const rough = (high - low) / 4, size = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].find(one => one * size >= rough) * size;
  const first = Math.ceil(low / step);
  return Array.from({length: Math.max(Math.floor(high / step) - first + 1, 0)}, (_, i) => (first + i) * step);
}
export const colour = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const faint = name => `${colour(name)}33`;

// The dashes of up to eight lines, beside the colours --c1 ... --c8, so that colour is never all that tells them apart.
export const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [16, 4], [4, 4], [2, 6], [10, 3, 2, 3, 2, 3]];

// Dates as ISO 8601 has them, in the time zone of the data, which is not the browser's.
export const DATES = [
  [360 * 86400, "{YYYY}", null, null, null, null, null, null, 1], [28 * 86400, "{YYYY}-{MM}", null, null, null, null, null, null, 1],
  [86400, "{YYYY}-{MM}-{DD}", null, null, null, null, null, null, 1],
  [60, "{HH}:{mm}", "\n{YYYY}-{MM}-{DD}", null, "\n{YYYY}-{MM}-{DD}", null, null, null, 1],
  [1, "{HH}:{mm}:{ss}", "\n{YYYY}-{MM}-{DD}", null, "\n{YYYY}-{MM}-{DD}", null, null, null, 1],
  [0.001, "{ss}.{fff}", "\n{HH}:{mm}", null, "\n{HH}:{mm}", null, "\n{HH}:{mm}", null, 1],
];
export const tzDate = seconds => uPlot.tzDate(new Date(seconds * 1e3), "Etc/UTC");

// What stands for a line in a legend or a table.
export function makeKey(colour, dash = []) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  for (const [name, value] of Object.entries({viewBox: "0 0 28 8", class: "line-key", "aria-hidden": "true"})) svg.setAttribute(name, value);
  for (const [name, value] of Object.entries({x1: 0, x2: 28, y1: 4, y2: 4, "stroke-width": 2.5, "stroke-dasharray": dash.join(" "), class: `line-${colour}`})) line.setAttribute(name, value);
  svg.append(line);
  return svg;
}

// A chart of lines over x: {lines: [{name, colour, dash?, band: [low, high]?, hidden?, dots?: no line, stepped?}], log, height,
// label?: names the x axis, values?: formats its numbers, steps?: the distances of its ticks, time?: x in seconds since 1970,
// onZoom?: gets the range that was dragged over, and nulls after a double click,
// gaps?: leave missing values out of the lines, regions?: [{from, to, colour}] behind the lines}.
export class Chart {
  constructor(place, options) {
    this.place = place;
    this.options = options;
    this.columns = [[]];
    this.plot = null;
    new ResizeObserver(() => this.plot?.setSize({width: this.width, height: options.height})).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.rebuild());
  }

  get width() { return Math.max(this.place.clientWidth - 26, 100); }

  set(columns) {
    this.columns = columns;
    if (!columns[0].length) return;
    if (!this.plot) return this.rebuild();
    const {min, max} = this.plot.scales.x, before = this.plot.data[0];
    const isZoomed = min > before[0] || max < before.at(-1);
    this.plot.setData(columns);
    if (isZoomed) this.plot.setScale("x", {min, max});
  }

  setLog(log) {
    this.options.log = log;
    this.rebuild();
  }

  rebuild() {
    this.plot?.destroy();
    this.plot = null;
    if (!this.columns[0].length) return;
    this.place.replaceChildren();
    const {lines, height, log} = this.options;
    const legend = this.place.appendChild(make("div", {class: "legend", "aria-hidden": "true"}));
    const readers = lines.filter(line => line.name).map(line => {
      const value = make("b");
      legend.append(make("span", {}, line.dash ? makeKey(line.colour, line.dash) : make("i", {class: line.colour}), `${line.name} `, value));
      return [lines.indexOf(line) + 1, value];
    });
    const bands = lines.flatMap((line, at) => line.band ? [{series: line.band, fill: faint(line.colour)}] : []);
    const axis = {stroke: colour("muted"), font: FONT, grid: {stroke: colour("grid"), width: 1}, ticks: {show: false}};
    const values = (_, ticks) => ticks.map(tick => tick == null ? "" : formatNumber(tick, 3));
    this.plot = new uPlot({
      width: this.width, height, tzDate,
      scales: {x: {time: Boolean(this.options.time)}, y: {distr: log ? 3 : 1, ...(log ? {range: (_, low, high) => low > 0 ? [low / 1.15, high * 1.15] : [1e-6, 1]} : {})}},
      axes: [this.options.time ? {...axis, values: DATES, space: 90, size: 40, gap: 4} : {...axis, values: this.options.values ?? values, size: 28, gap: 4, ...(this.options.label ? {label: this.options.label, labelSize: 18, labelGap: 0, labelFont: FONT} : {}), incrs: this.options.steps === undefined ? EPOCHS : this.options.steps ?? undefined}, {...axis, values, size: 62, gap: 4, ...(log ? {splits: listPowers, filter: (_, ticks) => ticks} : {})}],
      series: [{}, ...lines.map(line => ({
        stroke: line.hidden ? "transparent" : colour(line.colour === "ink" ? "muted" : line.colour),
        width: line.hidden || line.dots ? 0 : 1.75, spanGaps: !this.options.gaps, dash: line.dash, ...(line.stepped ? {paths: uPlot.paths.stepped({align: 1})} : {}),
        points: line.dots ? {show: true, size: this.columns[0].length > 150 ? 4 : 6, width: 1.5, stroke: colour(line.colour === "ink" ? "muted" : line.colour)} : {show: !line.hidden && !line.stepped && this.columns[0].length < 60, size: 5},
      }))],
      bands,
      ...(this.options.time ? {tzDate: seconds => uPlot.tzDate(new Date(seconds * 1000), "UTC")} : {}), // as the file has them
      legend: {show: false},
      cursor: {drag: {x: true, y: false, setScale: !this.options.onZoom}, y: false, bind: uPlot.followDrag()},
      hooks: {drawClear: [plot => {
        for (const {from, to, colour: name} of this.options.regions ?? []) {
          const {left, top, width, height} = plot.bbox;
          const ends = [from, to].map(x => Math.min(Math.max(plot.valToPos(x, "x", true), left), left + width));
          plot.ctx.fillStyle = faint(name);
          plot.ctx.fillRect(ends[0], top, Math.max(ends[1] - ends[0], 0), height);
        }
      }], setSelect: this.options.onZoom ? [plot => { if (plot.select.width > 2) this.options.onZoom(plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")); }] : [], setCursor: [plot => {
        for (const [at, value] of readers) {
          const i = plot.cursor.idx;
          value.textContent = i == null ? "" : formatNumber(this.columns[at][i]);
        }
      }]},
    }, this.columns, this.place);
    if (this.options.onZoom) this.plot.over.addEventListener("dblclick", () => this.options.onZoom(null, null));
  }
}
