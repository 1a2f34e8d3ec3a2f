// Plots that can be zoomed, drawn with uPlot in the colours of the page: for the app, and inside report.html, which
// contains this file. `drawPanel` is the only place that calls uPlot; `Chart` draws lines that change, `drawPredictions`
// predicted and true values with the errors below.

export const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';
export const WHOLE = [0, 1, 2, 3, 4, 5].flatMap(power => [1, 2, 5].map(factor => factor * 10 ** power));
const EPOCHS = (_, axis, low, high) => high - low > 1 ? WHOLE : [0.1, 0.2, 0.5, ...WHOLE];
const FEW = 80; // up to so many values each has a dot

// The dashes of up to eight lines, beside the colours --c1 ... --c8, so that colour is never all that tells them apart.
export const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [16, 4], [4, 4], [2, 6], [10, 3, 2, 3, 2, 3]];

// Dates as ISO 8601 has them, in the time zone of the data, which is not the browser's.
const DATES = [
  [360 * 86400, "{YYYY}", null, null, null, null, null, null, 1], [28 * 86400, "{YYYY}-{MM}", null, null, null, null, null, null, 1],
  [86400, "{YYYY}-{MM}-{DD}", null, null, null, null, null, null, 1],
  [60, "{HH}:{mm}", "\n{YYYY}-{MM}-{DD}", null, "\n{YYYY}-{MM}-{DD}", null, null, null, 1],
  [1, "{HH}:{mm}:{ss}", "\n{YYYY}-{MM}-{DD}", null, "\n{YYYY}-{MM}-{DD}", null, null, null, 1],
  [0.001, "{ss}.{fff}", "\n{HH}:{mm}", null, "\n{HH}:{mm}", null, "\n{HH}:{mm}", null, 1],
];
const tzDate = seconds => uPlot.tzDate(new Date(seconds * 1e3), "Etc/UTC");

export const colour = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const faint = (name, share) => colour(name) + Math.round(255 * share).toString(16).padStart(2, "0");

export function make(tag, values = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(values)) {
    if (value == null || value === false) continue;
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && typeof value !== "string") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter(child => child != null && child !== ""));
  return node;
}

export function formatNumber(value, digits = 4) {
  if (value == null || !Number.isFinite(value)) return "–";
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)) return value.toExponential(digits - 2);
  return Number(value.toPrecision(digits)).toLocaleString("en", {maximumSignificantDigits: digits});
}

export const formatX = (x, dates, name) => x == null || !Number.isFinite(x) ? "" : dates ? new Date(x * 1e3).toISOString().slice(0, 19).replace("T", " ") : `${name} ${formatNumber(x, 7)}`;

// Ticks of a logarithmic axis. uPlot's own never end where the range begins just below a power of ten.
function listPowers(_, axis, low, high) {
  const factors = Math.log10(high / low) < 2.5 ? [1, 2, 5] : [1], ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    ticks.push(...factors.map(factor => factor * 10 ** power).filter(tick => tick >= low && tick <= high));
  }
  if (ticks.length > 1) return ticks;
  // a narrow range has hardly a round number in it: ticks at even distances
  const rough = (high - low) / 4, size = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].find(factor => factor * size >= rough) * size;
  const first = Math.ceil(low / step);
  return Array.from({length: Math.max(Math.floor(high / step) - first + 1, 0)}, (_, i) => (first + i) * step);
}

// What stands for a line in a legend or a table.
export function makeKey(name, dash = []) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  for (const [key, value] of Object.entries({viewBox: "0 0 28 8", class: "line-key", "aria-hidden": "true"})) svg.setAttribute(key, value);
  for (const [key, value] of Object.entries({x1: 0, x2: 28, y1: 4, y2: 4, "stroke-width": 2.5, "stroke-dasharray": dash.join(" "), class: `line-${name}`})) line.setAttribute(key, value);
  svg.append(line);
  return svg;
}

// An entry of a legend: a shape ("line", "box" or "box inner") in a colour and a text; returns the place of its value.
function addEntry(legend, shape, name, text, key = make("i", {class: `${shape} ${name}`})) {
  key.style.setProperty("--colour", `var(--${name})`);
  const value = make("b");
  legend.append(make("span", {}, key, `${text} `, value));
  return value;
}

// Draws columns, x first, into a place and returns uPlot's object:
// {width, height, lines: [{colour, width?, dash?, fill?: opacity, stepped?, dots?: no line, hidden?, points?}],
//  bands?: [{series: [high, low], colour, opacity?}], regions?: () => [{from, to, colour, width?: at least}] behind the lines,
//  x?: {dates?, label?, values?: formats its numbers, steps?: distances of ticks, scale?: of uPlot, space?, isBare?: without labels},
//  y?: {log?, range?, values?, size?, space?, digits?}, gaps?: leave missing values out of the lines, cursor?, hooks?, padding?}
export function drawPanel(place, columns, panel) {
  const {width, height, lines, bands = [], regions = () => [], x = {}, y = {}, gaps = true, cursor = {}, hooks = {}, padding} = panel;
  const axis = {stroke: colour("muted"), font: FONT, labelFont: FONT, labelSize: 18, labelGap: 0, grid: {stroke: colour("grid"), width: 1}, ticks: {show: false}, gap: 4};
  const write = digits => (_, ticks) => ticks.map(tick => tick == null ? "" : formatNumber(tick, digits));
  const below = x.isBare ? {size: 6, values: (_, ticks) => ticks.map(() => "")}
    : x.dates ? {values: DATES, space: 90, size: 40}
    : {values: x.values ?? write(4), size: 26, label: x.label || null, incrs: x.steps ?? undefined};
  const stroke = line => line.hidden ? "transparent" : colour(line.colour);
  return new uPlot({
    width, height, tzDate, ...(padding ? {padding} : {}),
    scales: {
      x: {time: Boolean(x.dates), ...x.scale},
      y: {distr: y.log ? 3 : 1, ...(y.range ? {range: y.range} : y.log ? {range: (_, low, high) => low > 0 ? [low / 1.15, high * 1.15] : [1e-6, 1]} : {})},
    },
    axes: [
      {...axis, ...below, ...(x.space ? {space: x.space} : {})},
      {...axis, values: y.values ?? write(y.digits ?? 4), size: y.size ?? 62, ...(y.space ? {space: y.space} : {}), ...(y.log ? {splits: listPowers, filter: (_, ticks) => ticks} : {})},
    ],
    series: [{}, ...lines.map(line => ({
      stroke: stroke(line), width: line.hidden || line.dots ? 0 : line.width ?? 1.5, spanGaps: !gaps, dash: line.dash,
      ...(line.fill ? {fill: faint(line.colour, line.fill)} : {}), ...(line.stepped ? {paths: uPlot.paths.stepped({align: 1})} : {}),
      points: line.points ?? (line.dots ? {show: true, size: columns[0].length > 150 ? 4 : 6, width: 1.5, stroke: stroke(line)} : {show: !line.hidden && !line.stepped && columns[0].length < FEW, size: 4}),
    }))],
    bands: bands.map(band => ({series: band.series, fill: faint(band.colour, band.opacity ?? 0.2)})),
    legend: {show: false},
    cursor: {drag: {x: true, y: false}, y: false, bind: uPlot.followDrag(), ...cursor},
    hooks: {...hooks, drawClear: [plot => regions().forEach(region => shade(plot, region))]},
  }, columns, place);
}

// Shades a range of x behind the lines.
function shade(plot, {from, to, colour: name, width: least = 0}) {
  const {left, top, width, height} = plot.bbox;
  const [begin, end] = [from, to].map(x => Math.min(Math.max(plot.valToPos(x, "x", true), left), left + width));
  plot.ctx.save();
  plot.ctx.fillStyle = faint(name, 0.2);
  plot.ctx.fillRect(begin, top, Math.max(end - begin, least), height);
  plot.ctx.restore();
}

// A chart of lines over x: {lines: [{name, colour, dash?, band: [high, low]?, hidden?, dots?: no line, stepped?}], log, height,
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
    const {lines, height, log, label, values, steps, time, gaps, onZoom} = this.options;
    const legend = this.place.appendChild(make("div", {class: "legend", "aria-hidden": "true"}));
    const readers = lines.filter(line => line.name).map(line =>
      [lines.indexOf(line) + 1, addEntry(legend, "line", line.colour, line.name, line.dash ? makeKey(line.colour, line.dash) : undefined)]);
    const select = plot => { if (plot.select.width > 2) onZoom(plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")); };
    const read = plot => {
      const i = plot.cursor.idx;
      for (const [column, value] of readers) value.textContent = i == null ? "" : formatNumber(this.columns[column][i]);
    };
    this.plot = drawPanel(this.place, this.columns, {
      width: this.width, height, gaps,
      lines: lines.map(line => ({...line, colour: line.colour === "ink" ? "muted" : line.colour, width: 1.75})),
      bands: lines.filter(line => line.band).map(line => ({series: line.band, colour: line.colour})),
      regions: () => this.options.regions ?? [],
      x: {dates: time, label, values, steps: steps === undefined ? EPOCHS : steps}, y: {log, digits: 3},
      cursor: {drag: {x: true, y: false, setScale: !onZoom}},
      hooks: {setSelect: onZoom ? [select] : [], setCursor: [read]},
    });
    if (onZoom) this.plot.over.addEventListener("dblclick", () => onZoom(null, null));
  }
}

// Draws predicted and true values, and below them the errors, or of classes the probability, on one axis; returns the plots.
// The data: {x, dates, x_name, true, predicted, bands, error}, of classes also {classes, probability}; all but x may have nulls.
// The options: {width, heights: [alone, above, below], sync: plots of one name move together, unit?, range?: of x, marks?: regions,
// onSelect?: gets the plot in which a range was chosen, onReset?}
export function drawPredictions(place, data, {width, heights, sync, unit = "", range, marks, onSelect, onReset}) {
  const {classes, bands} = data, known = values => values.some(value => value != null);
  const lower = classes ? {name: known(data.true) ? "probability of the true class" : "probability of the predicted class", values: data.probability, colour: "blue"}
    : {name: "error (predicted - true)", values: data.error, colour: "red"};
  const hasLower = known(lower.values);
  const legend = make("div", {class: "legend", "aria-hidden": "true"});
  place.replaceChildren(legend);
  const readers = [];
  if (known(data.true)) readers.push([addEntry(legend, "line", "ink", "true"), data.true, classes]);
  readers.push([addEntry(legend, "line", "blue", "predicted"), data.predicted, classes]);
  if (hasLower) readers.push([addEntry(legend, "line", lower.colour, lower.name), lower.values]);
  bands.forEach((band, i) => addEntry(legend, i ? "box inner" : "box", "blue", band.label));
  const where = legend.appendChild(make("span"));
  const read = plot => {
    const i = plot.cursor.idx;
    for (const [value, values, names] of readers) value.textContent = i == null || values[i] == null ? "" : names ? names[values[i]] ?? "" : formatNumber(values[i], 5) + unit;
    where.textContent = i == null ? "" : formatX(data.x[i], data.dates, data.x_name);
  };
  const label = data.dates ? "" : data.x_name;
  const draw = (height, isLast, lines, columns, more) => drawPanel(place, [data.x, ...columns], {
    width, height: height + (isLast && label ? 16 : 0), lines, regions: marks, padding: [8, 14, 0, 0],
    x: {dates: data.dates, label, isBare: !isLast, scale: range ? {range} : {}, space: data.dates ? 90 : 60},
    cursor: {sync: {key: sync, scales: ["x", null]}, drag: {x: true, y: false, setScale: !onSelect}, bind: uPlot.followDrag(onReset ? {dblclick: onReset} : {})},
    hooks: {setCursor: [read], setSelect: onSelect ? [onSelect] : []}, ...more, y: {space: height / 6, size: classes ? 92 : 62, ...more.y},
  });
  const [alone, above, below] = heights;
  const line = name => ({colour: name, stepped: Boolean(classes)}), hidden = {colour: "blue", hidden: true};
  const names = (_, ticks) => ticks.map(tick => Number.isInteger(tick) ? (classes[tick] ?? "").slice(0, 12) : "");
  const plots = [draw(hasLower ? above : alone, !hasLower, [line("ink"), line("blue"), ...bands.flatMap(() => [hidden, hidden])], [data.true, data.predicted, ...bands.flatMap(band => [band.low, band.high])], {
    bands: bands.map((_, i) => ({series: [4 + 2 * i, 3 + 2 * i], colour: "blue", opacity: 0.18})),
    y: classes ? {range: () => [-0.5, classes.length - 0.5], values: names} : {},
  })];
  if (hasLower) plots.push(draw(below, true, [{colour: lower.colour, fill: 0.12, width: 1.2}], [lower.values], {y: classes ? {range: () => [0, 1.02]} : {}}));
  return plots;
}
