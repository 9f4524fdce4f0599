"use strict";
// Stages of chosen steps as bars over time, a lane each.

class TimelineView {
  constructor(root, data) {
    this.data = data;
    this.axis = null;
    this.plot = root.querySelector(".plot");
    this.tooltip = makeTooltip(this.plot);
    this.from = data.open; // a step of typical length
    this.byStep = new Map(data.steps.map(([step]) => [step, []]));
    for (const bar of data.bars) this.byStep.get(bar[1]).push(bar);
    const last = data.steps.length - 1;
    this.slider = el("input", { type: "range", min: 0, max: last, value: data.open, "aria-label": "first step shown", oninput: () => this.go(Number(this.slider.value)) });
    this.count = select("steps", [1, 2, 5, 10, 25].map((n) => [n, String(n)]), () => this.draw());
    this.count.value = "2";
    this.label = el("span", {});
    const slowest = data.steps.reduce((best, s, i) => (s[2] > data.steps[best][2] ? i : best), 0);
    root.querySelector(".controls").append(
      el("button", { type: "button", text: "‹", "aria-label": "earlier step", onclick: () => this.go(this.from - 1) }), this.slider,
      el("button", { type: "button", text: "›", "aria-label": "later step", onclick: () => this.go(this.from + 1) }), this.label, this.count.node,
      el("button", { type: "button", text: "slowest step", onclick: () => this.go(slowest) }));
    charts.push(this);
    whenSized(this.plot, () => this.draw());
  }

  go(index) {
    this.from = Math.max(0, Math.min(this.data.steps.length - 1, index));
    this.slider.value = this.from;
    this.draw();
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!width) return;
    const steps = this.data.steps.slice(this.from, this.from + Number(this.count.value));
    const begin = Math.min(...steps.map((s) => s[1])), end = Math.max(...steps.map((s) => s[1] + s[2]), ...steps.flatMap((s) => this.byStep.get(s[0]).map((b) => b[2] + b[3])));
    const lane = 26, longest = Math.max(...this.data.stages.map((name) => name.length)), left = Math.min(14 + 6.2 * longest, width * 0.4), right = width - 14, lanes = this.data.stages.length + 1;
    const bottom = 8 + lane * lanes, height = bottom + 38;
    const x = (s) => left + ((s - begin) / Math.max(1e-9, end - begin)) * (right - left);
    const image = svg("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `stages of ${steps.length} step(s) from step ${steps[0][0]}` });
    for (const tick of linearTicks(begin, end, width / 110)) {
      image.append(svg("line", { x1: x(tick.value), x2: x(tick.value), y1: 8, y2: bottom, stroke: "var(--grid)" }),
        svg("text", { x: x(tick.value), y: bottom + 15, "text-anchor": "middle", text: tick.text }));
    }
    image.append(svg("text", { x: (left + right) / 2, y: bottom + 32, "text-anchor": "middle", text: "s since the trace began" }));
    ["step", ...this.data.stages].forEach((name, i) => image.append(
      svg("text", { class: "lane", x: left - 8, y: 8 + lane * i + lane / 2 + 4, "text-anchor": "end", text: name }),
      svg("line", { x1: left, x2: right, y1: 8 + lane * (i + 1), y2: 8 + lane * (i + 1), stroke: "var(--grid)" })));
    for (const [step, start, seconds] of steps) {
      image.append(this.bar(x(start), x(start + seconds), 0, lane, "var(--c7)", `step ${step}`, "step", start, seconds, 0.35));
      const room = x(start + seconds) - x(start);
      if (room > 30) image.append(svg("text", { class: "lane", x: x(start) + room / 2, y: 8 + lane / 2 + 4, "text-anchor": "middle", "pointer-events": "none", text: step }));
      for (const [stage, , from, took] of this.byStep.get(step)) {
        image.append(this.bar(x(from), x(from + took), stage + 1, lane, stage < this.data.stages.length - this.data.num_calls ? colour(stage % 7) : "var(--c7)", `step ${step}`, this.data.stages[stage], from, took, 0.9));
      }
    }
    this.label.textContent = steps.length > 1 ? `steps ${steps[0][0]} to ${steps[steps.length - 1][0]}` : `step ${steps[0][0]}`;
    const old = this.plot.querySelector("svg");
    if (old) old.replaceWith(image); else this.plot.prepend(image);
  }

  bar(from, to, row, lane, fillColour, heading, name, start, seconds, opacity) {
    const top = 8 + lane * row + 4;
    return svg("rect", {
      x: from, y: top, width: Math.max(1.5, to - from), height: lane - 8, rx: 2, fill: fillColour, opacity,
      onpointermove: () => this.tooltip.show((from + to) / 2, top + lane, heading, [[fillColour, name, `${number(seconds)} s`], [null, "begins at", `${number(start)} s`]]),
      onpointerleave: () => this.tooltip.hide(),
    });
  }
}
