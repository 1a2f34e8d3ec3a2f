// Predicted and true values of a series with the errors below, on one axis; zooming asks the server for the rows.
import {drawPredictions, make} from "./charts.js";
import {ask} from "./common.js";

export class Explorer {
  // `address` gives the URL of a view; `onDraw` gets what was drawn.
  constructor(place, address, onDraw) {
    Object.assign(this, {place, address, onDraw, plots: [], data: null, range: null, full: null, marks: null, asked: 0});
    new ResizeObserver(() => { for (const plot of this.plots) plot.setSize({width: this.width, height: plot.height}); }).observe(place);
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
    for (const plot of this.plots) plot.destroy();
    this.plots = [];
    const {data} = this;
    if (!data) return;
    if (!data.x.length) {
      this.place.replaceChildren(make("p", {class: "muted errors-none"}, "There are no rows here."));
      return;
    }
    const [low, high] = this.ends ?? [data.x[0], data.x.at(-1)];
    this.plots = drawPredictions(this.place, data, {
      width: this.width, heights: [360, 280, 150], sync: "result", range: () => low < high ? [low, high] : [low - 1, low + 1],
      // the worst window that was chosen is shaded
      marks: () => this.marks ? [{from: this.marks[0], to: this.marks[1], colour: "orange", width: 3}] : [],
      onSelect: plot => this.select(plot), onReset: () => this.show(),
    });
  }

  select(plot) {
    const {left, width} = plot.select;
    if (width < 4) return;
    const range = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    for (const panel of this.plots) panel.setSelect({left: 0, width: 0, top: 0, height: 0}, false);
    this.show(range);
  }
}
