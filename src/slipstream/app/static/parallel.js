// Parallel coordinates in SVG: an axis per setting and one for the score, a line per trial.
import {formatNumber, make} from "./common.js";

const SVG = "http://www.w3.org/2000/svg";
const TOP = 34, BOTTOM = 16, HEIGHT = 300, LEFT = 64, RIGHT = 72, STEP = 0.05, MIN_GAP = 92;
const shorten = (text, most) => text.length <= most ? text : `${text.slice(0, most - 1)}…`;

function draw(tag, values = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(values)) if (value != null) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// The part of an axis from 0 to 1 at which a value is; null for none.
function locate(axis, value) {
  if (value == null) return null;
  if (axis.choices) {
    const at = axis.choices.indexOf(typeof value === "string" ? value : JSON.stringify(value));
    return at < 0 ? null : (at + 0.5) / axis.choices.length;
  }
  const number = Number(value), scale = axis.log ? Math.log : Number;
  if (!Number.isFinite(number) || (axis.log && number <= 0)) return null;
  const [low, high] = [scale(axis.low), scale(axis.high)];
  return high > low ? Math.min(Math.max((scale(number) - low) / (high - low), 0), 1) : 0.5;
}

// Lines of one choice are a little apart.
function spread(axis, trial) {
  const part = locate(axis, axis.read(trial));
  return part == null || !axis.choices ? part : part + 0.4 * ((trial.trial * 0.618) % 1 - 0.5) / axis.choices.length;
}

const listTicks = axis => axis.choices ?
  axis.choices.map((choice, at) => [(at + 0.5) / axis.choices.length, shorten(choice, 14)]).filter((_, at) => axis.choices.length <= 12 || at % Math.ceil(axis.choices.length / 12) === 0) :
  [axis.low, axis.log ? Math.sqrt(axis.low * axis.high) : (axis.low + axis.high) / 2, axis.high].map((value, at) => [at / 2, formatNumber(value, 3)]);

export class ParallelCoordinates {
  // `select` is called with the set of selected trials, or null for all; `mark` with a trial or null.
  constructor(place, {select, mark}) {
    this.place = place;
    this.select = select;
    this.mark = mark;
    this.brushes = new Map();
    this.trials = [];
    this.isDragging = false;
    new ResizeObserver(() => this.place.clientWidth !== this.width && this.draw()).observe(place);
  }

  set(axes, trials, best) {
    [this.axes, this.trials, this.best] = [axes, trials, best];
    for (const name of this.brushes.keys()) if (!axes.some(axis => axis.name === name)) this.brushes.delete(name);
    this.draw();
  }

  clear() {
    this.brushes.clear();
    this.draw();
    this.report();
  }

  y(part) { return TOP + (1 - part) * (HEIGHT - TOP - BOTTOM); }

  part(event) {
    const box = this.svg.getBoundingClientRect();
    return Math.min(Math.max(1 - (event.clientY - box.top - TOP) / (HEIGHT - TOP - BOTTOM), 0), 1);
  }

  draw() {
    if (this.trials.length < 2 || !this.axes?.length || this.isDragging) return;
    const focus = document.activeElement?.closest?.("[data-axis-name]")?.dataset.axisName;
    this.width = this.place.clientWidth;
    const width = Math.max(this.width, LEFT + RIGHT + MIN_GAP * (this.axes.length - 1));
    const xs = this.axes.map((_, at) => this.axes.length > 1 ? LEFT + at * (width - LEFT - RIGHT) / (this.axes.length - 1) : width / 2);
    this.svg = draw("svg", {viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "group", "aria-label": "Settings and score of every trial; the table lists the same"});
    // the better a trial, the later and the stronger its line; of many trials only the best are strong
    const fall = 1 + Math.log2(this.trials.length);
    const order = [...this.trials].sort((a, b) => (a.trial === this.best) - (b.trial === this.best) || b.value - a.value);
    this.lines = new Map(order.map((trial, rank) => {
      const points = this.axes.map((axis, at) => [xs[at], spread(axis, trial)]).filter(([, part]) => part != null).map(([x, part]) => `${x.toFixed(1)},${this.y(part).toFixed(1)}`);
      const line = draw("polyline", {class: `line${trial.trial === this.best ? " best" : ""}`, points: points.join(" "), opacity: (0.08 + 0.92 * ((rank + 1) / order.length) ** fall).toFixed(2)});
      line.addEventListener("pointerenter", () => this.mark(trial.trial));
      line.addEventListener("pointerleave", () => this.mark(null));
      return [trial.trial, line];
    }));
    this.svg.append(...this.lines.values(), ...this.axes.map((axis, at) => this.drawAxis(axis, xs[at], at)));
    this.place.replaceChildren(this.svg);
    this.fade();
    if (focus != null) [...this.svg.querySelectorAll("[data-axis-name]")].find(node => node.dataset.axisName === focus)?.focus();
  }

  drawAxis(axis, x, at) {
    const last = at === this.axes.length - 1;
    const brush = draw("rect", {class: "brush", x: x - 7, width: 14, rx: 3, visibility: "hidden"});
    const node = draw("g", {class: "axis", tabindex: "0", role: "slider", "aria-label": axis.label, "aria-orientation": "vertical", "aria-valuemin": 0, "aria-valuemax": 100},
      draw("rect", {class: "hit", x: x - 14, y: TOP - 6, width: 28, height: HEIGHT - TOP - BOTTOM + 12, rx: 4}),
      draw("line", {x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM}), brush,
      ...listTicks(axis).map(([part, name]) => draw("text", {x: x + (last ? 10 : -10), y: this.y(part) + 4, "text-anchor": last ? "start" : "end"}, name)),
      draw("text", {class: "label", x, y: 16, "text-anchor": at === 0 ? "start" : last ? "end" : "middle", dx: at === 0 ? -LEFT + 12 : last ? RIGHT - 12 : 0}, shorten(axis.label, 18)));
    node.dataset.axisName = axis.name;
    const title = draw("title");
    title.textContent = axis.name;
    node.append(title);
    node.addEventListener("pointerdown", event => this.drag(event, axis, node));
    node.addEventListener("keydown", event => this.press(event, axis, node));
    this.showBrush(axis, node);
    return node;
  }

  showBrush(axis, node) {
    const range = this.brushes.get(axis.name), brush = node.querySelector(".brush");
    brush.setAttribute("visibility", range ? "visible" : "hidden");
    node.setAttribute("aria-valuenow", range ? Math.round(50 * (range[0] + range[1])) : 50);
    node.setAttribute("aria-valuetext", range ? `${Math.round(100 * range[0])} to ${Math.round(100 * range[1])} percent of the axis` : "all");
    if (!range) return;
    brush.setAttribute("y", this.y(range[1]));
    brush.setAttribute("height", Math.max(this.y(range[0]) - this.y(range[1]), 1));
  }

  drag(event, axis, node) {
    const from = this.part(event);
    this.isDragging = true;
    node.setPointerCapture(event.pointerId);
    const move = now => {
      const to = this.part(now);
      if (Math.abs(to - from) < 0.01) this.brushes.delete(axis.name); // a click clears
      else this.brushes.set(axis.name, [Math.min(from, to), Math.max(from, to)]);
      this.showBrush(axis, node);
      this.report();
    };
    const end = now => {
      this.isDragging = false;
      move(now);
      for (const [kind, handle] of [["pointermove", move], ["pointerup", end], ["pointercancel", end]]) node.removeEventListener(kind, handle);
    };
    for (const [kind, handle] of [["pointermove", move], ["pointerup", end], ["pointercancel", end]]) node.addEventListener(kind, handle);
  }

  press(event, axis, node) {
    const range = this.brushes.get(axis.name), up = {ArrowUp: STEP, ArrowDown: -STEP}[event.key];
    if (event.key === "Escape") this.brushes.delete(axis.name);
    else if (!up) return;
    else if (!range) this.brushes.set(axis.name, up > 0 ? [0.5, 1] : [0, 0.5]);
    else if (event.shiftKey) this.brushes.set(axis.name, [range[0], Math.min(Math.max(range[1] + up, range[0] + STEP), 1)]);
    else {
      const by = Math.min(Math.max(up, -range[0]), 1 - range[1]);
      this.brushes.set(axis.name, [range[0] + by, range[1] + by]);
    }
    event.preventDefault();
    this.showBrush(axis, node);
    this.report();
  }

  isSelected(trial) {
    return [...this.brushes].every(([name, [low, high]]) => {
      const axis = this.axes.find(one => one.name === name), part = locate(axis, axis.read(trial));
      return part != null && part >= low - 1e-9 && part <= high + 1e-9;
    });
  }

  fade() {
    for (const trial of this.trials) this.lines?.get(trial.trial)?.classList.toggle("faint", !this.isSelected(trial));
  }

  report() {
    this.fade();
    this.select(this.brushes.size ? new Set(this.trials.filter(trial => this.isSelected(trial)).map(trial => trial.trial)) : null);
  }

  highlight(number) {
    for (const [trial, line] of this.lines ?? []) line.classList.toggle("marked", trial === number);
  }
}
