"use strict";
// Brings the page to life: every figure names its chart, every view its block.

// What fails leaves the rest of the page alive.
function attempt(root, make) {
  try {
    make();
  } catch (error) {
    console.error(error);
    root.append(el("p", { class: "missing", text: `This could not be drawn: ${error}` }));
  }
}

for (const figure of document.querySelectorAll("figure[data-chart]")) {
  attempt(figure, () => new LineChart(figure, DATA.charts[figure.dataset.chart]));
}
const views = { timeline: TimelineView, mismatch: MismatchView, samples: SamplesView, held_out: HeldOutView };
for (const [name, View] of Object.entries(views)) {
  const root = document.getElementById(`view-${name}`);
  if (root) attempt(root, () => new View(root, DATA[name]));
}
const smoothing = document.getElementById("smoothing");
if (smoothing) {
  smoothing.addEventListener("input", () => { view.smoothing = Number(smoothing.value); redraw(); });
  document.getElementById("reset-zoom").addEventListener("click", () => { view.zoom = {}; redraw(); });
}
