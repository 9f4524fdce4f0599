"use strict";
// Brings the page to life: every figure names its chart, every view its block.

for (const figure of document.querySelectorAll("figure[data-chart]")) {
  new LineChart(figure, DATA.charts[figure.dataset.chart]);
}
const views = { timeline: TimelineView, mismatch: MismatchView, samples: SamplesView };
for (const [name, View] of Object.entries(views)) {
  const root = document.getElementById(`view-${name}`);
  if (root) new View(root, DATA[name]);
}
const smoothing = document.getElementById("smoothing");
if (smoothing) {
  smoothing.addEventListener("input", () => { view.smoothing = Number(smoothing.value); redraw(); });
  document.getElementById("reset-zoom").addEventListener("click", () => { view.zoom = {}; redraw(); });
}
