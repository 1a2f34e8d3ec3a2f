"use strict";
// Draws the plots that can be zoomed. Each has two panels, values and errors; those of one series
// share their zoom and their cursor.
(() => {
  const source = document.getElementById("plot-data");
  if (!source) return;
  const plots = JSON.parse(source.textContent);
  const FONT = '13px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';
  const DAY = 86400;
  const DATES = [
    [360 * DAY, "{YYYY}", null, null, null, null, null, null, 1],
    [28 * DAY, "{YYYY}-{MM}", null, null, null, null, null, null, 1],
    [DAY, "{YYYY}-{MM}-{DD}", null, null, null, null, null, null, 1],
    [60, "{HH}:{mm}", "\n{YYYY}-{MM}-{DD}", null, "\n{YYYY}-{MM}-{DD}", null, null, null, 1],
    [1, "{HH}:{mm}:{ss}", "\n{YYYY}-{MM}-{DD}", null, "\n{YYYY}-{MM}-{DD}", null, null, null, 1],
    [0.001, "{ss}.{fff}", "\n{HH}:{mm}", null, "\n{HH}:{mm}", null, "\n{HH}:{mm}", null, 1],
  ];
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const faint = (name, share) => colour(name) + Math.round(255 * share).toString(16).padStart(2, "0");
  const format = value => value == null ? "–" : Number(value.toPrecision(5)).toLocaleString("en", {maximumSignificantDigits: 5});
  const minus = (values, others) => values.map((value, i) => value == null || others[i] == null ? null : value - others[i]);

  function build(place, plot) {
    let at = 0;
    const x = plot.x.map(step => at += step);
    const unit = plot.unit ? ` ${plot.unit}` : "";
    const axes = (height, last) => [
      {show: true, stroke: colour("muted"), size: last ? (plot.dates ? 40 : 24) : 8, gap: 4, font: FONT, labelFont: FONT, labelSize: 20, label: last && plot.xName ? plot.xName : null, space: plot.dates ? 90 : 60,
       values: last ? (plot.dates ? DATES : (_, ticks) => ticks.map(format)) : (_, ticks) => ticks.map(() => ""),
       grid: {stroke: colour("grid"), width: 1}, ticks: {show: false}},
      {stroke: colour("muted"), font: FONT, size: 58, gap: 4, space: height / 5,
       grid: {stroke: colour("grid"), width: 1}, ticks: {show: false}, values: (_, ticks) => ticks.map(format)},
    ];
    const shared = {
      width: place.clientWidth,
      tzDate: seconds => uPlot.tzDate(new Date(seconds * 1e3), "Etc/UTC"),
      scales: {x: {time: plot.dates}},
      legend: {show: false},
      cursor: {sync: {key: `series-${plot.group}`, scales: ["x", null]}, drag: {x: true, y: false}, y: false, bind: uPlot.followDrag()},
    };
    const legend = place.appendChild(document.createElement("div"));
    legend.className = "legend";
    const entry = (shape, name, text) => {
      const item = legend.appendChild(document.createElement("span"));
      const mark = item.appendChild(document.createElement("i"));
      mark.className = shape;
      mark.style.setProperty("--colour", `var(--${name})`);
      item.append(text, " ");
      return item.appendChild(document.createElement("b"));
    };
    const errors = minus(plot.predicted, plot.true);
    const parts = [["line", "ink", "true", plot.true], ["line", "blue", "predicted", plot.predicted]];
    const readers = [...parts, ["line", "red", "error (predicted - true)", errors]].map(
      ([shape, name, text, values]) => [entry(shape, name, text), values]);
    plot.bands.forEach((band, i) => entry(i ? "box inner" : "box", "blue", band.label));
    const where = legend.appendChild(document.createElement("span"));
    const read = chart => {
      const i = chart.cursor.idx;
      for (const [item, values] of readers) item.textContent = i == null || values[i] == null ? "" : format(values[i]) + unit;
      where.textContent = i == null ? "" : plot.dates
        ? new Date(x[i] * 1e3).toISOString().slice(0, 19).replace("T", " ") : `${plot.xName} ${format(x[i])}`;
    };
    const points = {show: x.length < 80, size: 4};
    const hidden = {stroke: "transparent", width: 0, points: {show: false}};
    const upper = new uPlot({
      ...shared,
      height: 230,
      axes: axes(230, false),
      padding: [8, 14, 0, 0],
      hooks: {setCursor: [read]},
      series: [
        {},
        {stroke: colour("ink"), width: 1.5, points},
        {stroke: colour("blue"), width: 1.5, points},
        ...plot.bands.flatMap(() => [hidden, hidden]),
      ],
      bands: plot.bands.map((_, i) => ({series: [4 + 2 * i, 3 + 2 * i], fill: faint("blue", 0.2)})),
    }, [x, plot.true, plot.predicted, ...plot.bands.flatMap(band => [band.low, band.high])], place);
    const lower = new uPlot({
      ...shared,
      height: plot.dates ? 126 : plot.xName ? 132 : 112,
      axes: axes(90, true),
      padding: [6, 14, 0, 0],
      series: [{}, {stroke: colour("red"), fill: faint("red", 0.15), width: 1.2, points}],
    }, [x, errors], place);
    return [upper, lower];
  }

  const live = new Map();
  const draw = place => {
    if (!place.clientWidth) return;
    const existing = live.get(place);
    if (existing) existing.forEach(one => one.setSize({width: place.clientWidth, height: one.height}));
    else live.set(place, build(place, plots[place.dataset.plot]));
  };
  const watcher = new ResizeObserver(entries => entries.forEach(entry => draw(entry.target)));
  document.querySelectorAll("[data-plot]").forEach(place => watcher.observe(place));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const [place, drawn] of live) {
      drawn.forEach(one => one.destroy());
      place.replaceChildren();
      live.set(place, build(place, plots[place.dataset.plot]));
    }
  });
})();
