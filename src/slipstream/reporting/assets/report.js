// The zoomable plots of report.html, which has charts.js above this; those of one series share their zoom and their cursor.
const plots = JSON.parse(document.getElementById("plot-data").textContent);
const drawn = new Map();

function build(place) {
  const plot = plots[place.dataset.plot];
  let sum = 0;
  const x = plot.steps.map(step => sum += step);
  const error = plot.predicted.map((value, i) => value == null || plot.true[i] == null ? null : value - plot.true[i]);
  return drawPredictions(place, {...plot, x, error}, {width: place.clientWidth, heights: [230, 230, plot.dates ? 126 : 112], sync: `series-${plot.group}`, unit: plot.unit ? ` ${plot.unit}` : ""});
}

function show(place) {
  if (!place.clientWidth) return; // folded away
  const panels = drawn.get(place);
  if (panels) panels.forEach(panel => panel.setSize({width: place.clientWidth, height: panel.height}));
  else drawn.set(place, build(place));
}

const watcher = new ResizeObserver(entries => entries.forEach(entry => show(entry.target)));
document.querySelectorAll("[data-plot]").forEach(place => watcher.observe(place));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const [place, panels] of drawn) {
    panels.forEach(panel => panel.destroy());
    drawn.set(place, build(place));
  }
});
