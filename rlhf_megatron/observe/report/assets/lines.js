"use strict";
// Curves over steps: values under the pointer, a zoom that all charts of an axis share, smoothing, log axes, stacks.

const MARGIN = { left: 62, right: 14, top: 10, bottom: 38 };

class LineChart {
  constructor(figure, spec) {
    this.figure = figure;
    this.spec = spec;
    this.axis = spec.axis;
    this.hidden = new Set();
    this.focus = null; // index of the curve that the legend points at
    this.isShare = spec.kind === "stack" && spec.unit !== "share"; // shares are drawn as they are
    this.series = spec.series.map((s, i) => ({ ...s, index: i, x: DATA.axes[s.x], colour: colour(known(s.group) ? s.group : i) }));
    this.plot = figure.querySelector(".plot");
    this.tooltip = makeTooltip(this.plot);
    this.legend();
    this.values();
    charts.push(this);
    whenSized(this.plot, () => this.draw());
  }

  legend() {
    const named = this.series.filter((s) => !s.faint);
    if (named.length < 2 && this.spec.kind !== "stack") return;
    const buttons = named.map((s) => el("button", {
      type: "button", "aria-pressed": "true", title: [s.meaning, s.key].filter(Boolean).join(" – "),
      onclick: (event) => this.toggle(s, event.currentTarget),
      onpointerenter: () => { this.focus = s.index; this.draw(); },
      onpointerleave: () => { this.focus = null; this.draw(); },
    }, swatch(s.colour), visible(s.label)));
    if (this.spec.kind === "stack" && this.spec.unit !== "share") {
      buttons.push(el("button", { type: "button", text: "show absolute values", onclick: (event) => {
        this.isShare = !this.isShare;
        event.currentTarget.textContent = this.isShare ? "show absolute values" : "show shares";
        this.draw();
      } }));
    }
    this.plot.before(el("div", { class: "legend" }, ...buttons));
  }

  toggle(s, button) {
    const members = this.series.filter((o) => o === s || (o.faint && o.group === s.group));
    const isHidden = !this.hidden.has(s.index);
    for (const member of members) this.hidden[isHidden ? "add" : "delete"](member.index);
    button.setAttribute("aria-pressed", String(!isHidden));
    this.draw();
  }

  values() {
    const details = this.figure.querySelector("details.values");
    if (!details) return;
    details.addEventListener("toggle", () => {
      if (!details.open || details.querySelector("table")) return;
      const steps = [...new Set(this.series.flatMap((s) => s.x))].sort((a, b) => a - b);
      const stride = Math.ceil(steps.length / 200);
      const places = this.series.map((s) => new Map(s.x.map((x, i) => [x, i])));
      const rows = steps.filter((_, i) => i % stride === 0 || i === steps.length - 1).map((step) => [String(step), ...this.series.map((s, k) => {
        const i = places[k].get(step);
        return i === undefined ? "" : number(s.y[i]) + (s.lo && known(s.lo[i]) ? ` [${number(s.lo[i])}, ${number(s.hi[i])}]` : "");
      })]);
      const headings = [{ text: this.axis, number: true }, ...this.series.map((s) => ({ text: visible(s.label), number: true }))];
      details.append(el("div", { class: "scroll" }, table(headings, rows, stride > 1 ? `One row in ${stride}.` : null)));
    });
  }

  get shown() { return this.series.filter((s) => !this.hidden.has(s.index)); }

  xDomain() {
    const all = this.series.flatMap((s) => [s.x[0], s.x[s.x.length - 1]]);
    const [low, high] = view.zoom[this.axis] || [Math.min(...all), Math.max(...all)];
    return low === high ? [low - 1, high + 1] : [low, high];
  }

  // What is drawn of each curve: smoothed, stacked, or as it is.
  curves() {
    if (this.spec.kind !== "stack") {
      const isSmooth = view.smoothing > 0 && this.spec.kind === "lines";
      return this.shown.map((s) => ({ ...s, raw: s.y, y: isSmooth ? smooth(s.y, view.smoothing) : s.y, isSmooth }));
    }
    const shown = this.shown;
    const base = shown.length ? shown[0].x.map(() => 0) : [];
    const sums = base.map((_, i) => shown.reduce((sum, s) => sum + s.y[i], 0));
    return shown.map((s) => {
      const lo = base.slice();
      s.y.forEach((v, i) => { base[i] += this.isShare ? (sums[i] ? v / sums[i] : 0) : v; });
      return { ...s, raw: s.y, y: base.slice(), lo, hi: base.slice() };
    });
  }

  yDomain(curves, [first, last]) {
    let low = Infinity, high = -Infinity;
    const withRuns = Object.fromEntries(curves.filter((c) => c.faint).map((c) => [c.group, true])); // the band of two or three runs may go far beyond
    const take = (v) => { if (known(v) && (!this.spec.log || v > 0)) { low = Math.min(low, v); high = Math.max(high, v); } };
    for (const c of curves) {
      c.x.forEach((x, i) => {
        if (x < first || x > last) return;
        take(c.y[i]);
        if (c.isSmooth) take(c.raw[i]);
        if (c.lo && !(c.group in withRuns)) { take(c.lo[i]); take(c.hi[i]); }
      });
    }
    for (const [value] of this.spec.rules) take(value);
    if (low > high) [low, high] = this.spec.log ? [0.1, 1] : [0, 1];
    if (this.isShare) return [0, 1];
    if (this.spec.log) {
      const pad = Math.max((high / low) ** 0.06, 1.15);
      return [low / pad, high * pad];
    }
    if (this.spec.kind === "stack") return [0, high];
    if (this.spec.zero && low >= 0) low = 0;
    const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    return [this.spec.zero && low === 0 ? 0 : low - pad, high + pad];
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!width) return;
    const height = this.spec.wide && width > 600 ? 300 : 215;
    const domain = this.xDomain(), curves = this.curves(), [low, high] = this.yDomain(curves, domain);
    const right = width - MARGIN.right, bottom = height - MARGIN.bottom;
    const y = this.spec.log
      ? (v) => bottom - ((Math.log(v) - Math.log(low)) / (Math.log(high) - Math.log(low))) * (bottom - MARGIN.top)
      : (v) => bottom - ((v - low) / (high - low)) * (bottom - MARGIN.top);
    const x = (v) => MARGIN.left + ((v - domain[0]) / (domain[1] - domain[0])) * (right - MARGIN.left);
    this.scale = { x, y, domain, right, bottom, inverse: (px) => domain[0] + ((px - MARGIN.left) / (right - MARGIN.left)) * (domain[1] - domain[0]) };
    this.drawn = curves;
    const clip = `clip-${this.figure.id}`;
    this.cursorLine = svg("line", { y1: MARGIN.top, y2: bottom, stroke: "var(--muted)", "stroke-dasharray": "3 3", visibility: "hidden" });
    this.dots = svg("g", {});
    this.selection = svg("rect", { y: MARGIN.top, height: bottom - MARGIN.top, fill: "var(--accent)", opacity: 0.15, visibility: "hidden" });
    const image = svg("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0, "aria-label": this.description() },
      svg("clipPath", { id: clip }, svg("rect", { x: MARGIN.left, y: MARGIN.top - 4, width: right - MARGIN.left + 4, height: bottom - MARGIN.top + 8 })),
      this.axes(low, high, width), svg("g", { "clip-path": `url(#${clip})` }, ...curves.map((c) => this.curve(c)), this.rules(), this.dots),
      this.cursorLine, this.selection);
    this.listen(image);
    this.tooltip.hide(); // what it pointed at is gone
    const old = this.plot.querySelector("svg");
    if (old) old.replaceWith(image); else this.plot.prepend(image);
  }

  description() {
    const parts = this.series.slice(0, 4).map((s) => `${s.label} from ${number(s.y[0])} to ${number(s.y[s.y.length - 1])}`);
    return `${this.spec.title}: ${parts.join("; ")}. Arrow keys read values.`;
  }

  axes(low, high, width) {
    const { x, y, domain, right, bottom } = this.scale, group = svg("g", {});
    const ticks = this.spec.log ? logTicks(low, high, 5) : linearTicks(low, high, this.spec.wide ? 6 : 4);
    for (const tick of ticks) {
      group.append(svg("line", { x1: MARGIN.left, x2: right, y1: y(tick.value), y2: y(tick.value), stroke: "var(--grid)" }),
        svg("text", { x: MARGIN.left - 7, y: y(tick.value) + 4, "text-anchor": "end", text: tick.text }));
    }
    for (const tick of linearTicks(domain[0], domain[1], width / 70)) {
      if (!Number.isInteger(tick.value)) continue;
      group.append(svg("line", { x1: x(tick.value), x2: x(tick.value), y1: bottom, y2: bottom + 4, stroke: "var(--line)" }),
        svg("text", { x: x(tick.value), y: bottom + 16, "text-anchor": "middle", text: tick.value }));
    }
    const unit = this.isShare ? "share" : this.spec.unit;
    group.append(svg("line", { x1: MARGIN.left, x2: right, y1: bottom, y2: bottom, stroke: "var(--line)" }),
      svg("text", { x: (MARGIN.left + right) / 2, y: bottom + 32, "text-anchor": "middle", text: this.axis }),
      svg("text", { transform: `translate(12 ${(MARGIN.top + bottom) / 2}) rotate(-90)`, "text-anchor": "middle", text: (unit === "1" ? "" : unit) + (this.spec.log ? (unit && unit !== "1" ? ", log" : "log scale") : "") }));
    return group;
  }

  path(xs, ys) {
    const { x, y } = this.scale;
    let text = "", isOpen = false;
    ys.forEach((v, i) => {
      if (!known(v) || (this.spec.log && v <= 0)) { isOpen = false; return; }
      text += `${isOpen ? "L" : "M"}${x(xs[i]).toFixed(1)} ${y(v).toFixed(1)}`;
      isOpen = true;
    });
    return text;
  }

  area(c) {
    const { x, y } = this.scale, floor = (v) => (this.spec.log && v <= 0 ? this.scale.bottom : y(v));
    let text = "";
    for (let begin = 0; begin < c.x.length; begin++) {
      if (!known(c.lo[begin]) || !known(c.hi[begin])) continue;
      let end = begin;
      while (end + 1 < c.x.length && known(c.lo[end + 1]) && known(c.hi[end + 1])) end++;
      for (let i = begin; i <= end; i++) text += `${i === begin ? "M" : "L"}${x(c.x[i]).toFixed(1)} ${floor(c.hi[i]).toFixed(1)}`;
      for (let i = end; i >= begin; i--) text += `L${x(c.x[i]).toFixed(1)} ${floor(c.lo[i]).toFixed(1)}`;
      text += "Z";
      begin = end;
    }
    return text;
  }

  curve(c) {
    const isDim = this.focus !== null && this.focus !== c.index && !(c.faint && c.group === this.series[this.focus].group);
    const group = svg("g", { opacity: isDim ? 0.2 : 1 });
    if (this.spec.kind === "stack") {
      group.append(svg("path", { d: this.area(c), fill: c.colour, opacity: 0.85 }));
      return group;
    }
    if (c.lo) group.append(svg("path", { d: this.area(c), fill: c.colour, opacity: 0.18 }));
    if (c.isSmooth && !c.faint) group.append(svg("path", { d: this.path(c.x, c.raw), fill: "none", stroke: c.colour, "stroke-width": 1, opacity: 0.3 }));
    group.append(svg("path", { d: this.path(c.x, c.y), fill: "none", stroke: c.colour, "stroke-width": c.faint ? 1 : 1.7, "stroke-linejoin": "round", opacity: c.faint ? 0.35 : this.series.length > 1 ? 0.9 : 1 }));
    const isSparse = c.x.length < 40 || this.spec.kind === "points";
    c.y.forEach((v, i) => {
      const isAlone = known(v) && !known(c.y[i - 1]) && !known(c.y[i + 1]);
      if (known(v) && !(this.spec.log && v <= 0) && (isAlone || (isSparse && !c.faint))) {
        group.append(svg("circle", { cx: this.scale.x(c.x[i]), cy: this.scale.y(v), r: this.spec.kind === "points" ? 3 : 2, fill: c.colour }));
      }
    });
    return group;
  }

  rules() {
    const { y, right } = this.scale, group = svg("g", {});
    for (const [value, label] of this.spec.rules) {
      group.append(svg("line", { x1: MARGIN.left, x2: right, y1: y(value), y2: y(value), stroke: "var(--muted)", "stroke-dasharray": "5 4" }),
        svg("text", { x: right - 4, y: y(value) - 5, "text-anchor": "end", text: `${label}: ${number(value)}` }));
    }
    return group;
  }

  listen(image) {
    const place = (event) => event.clientX - image.getBoundingClientRect().left;
    let begin = null;
    image.addEventListener("pointermove", (event) => {
      if (begin !== null) {
        const [a, b] = [begin, place(event)].sort((m, n) => m - n);
        fill(this.selection, { x: a, width: b - a, visibility: "visible" }, []);
      } else point(this.axis, this.scale.inverse(place(event)), this);
    });
    image.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "mouse" && event.button === 0) { begin = place(event); image.setPointerCapture(event.pointerId); }
    });
    image.addEventListener("pointerup", (event) => {
      const from = begin, to = place(event);
      begin = null;
      fill(this.selection, { visibility: "hidden" }, []);
      if (from === null || Math.abs(to - from) < 8) return;
      const ends = [from, to].map((px) => Math.min(this.scale.domain[1], Math.max(this.scale.domain[0], this.scale.inverse(px)))).sort((m, n) => m - n);
      if (ends[1] - ends[0] >= 1) { view.zoom[this.axis] = ends; redraw(this.axis); }
    });
    image.addEventListener("pointerleave", () => { if (begin === null) point(this.axis, null, this); });
    image.addEventListener("dblclick", () => { delete view.zoom[this.axis]; redraw(this.axis); });
    image.addEventListener("blur", () => point(this.axis, null, this));
    image.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
      if (event.key === "Escape") { delete view.zoom[this.axis]; redraw(this.axis); }
      if (!move || !this.drawn.length) return;
      event.preventDefault();
      const xs = this.drawn[0].x;
      this.keyPlace = Math.min(xs.length - 1, Math.max(0, (this.keyPlace === undefined ? -1 : this.keyPlace) + move));
      point(this.axis, xs[this.keyPlace], this);
    });
  }

  // The line at `x` in every chart of the axis; values only where the pointer is.
  cursor(x, isHere) {
    if (!this.scale) return;
    this.dots.replaceChildren();
    if (x === null || !this.drawn.length || x < this.scale.domain[0] || x > this.scale.domain[1]) {
      this.cursorLine.setAttribute("visibility", "hidden");
      this.tooltip.hide();
      return;
    }
    const lead = this.drawn[0], step = lead.x[nearest(lead.x, x)], px = this.scale.x(step);
    fill(this.cursorLine, { x1: px, x2: px, visibility: "visible" }, []);
    if (!isHere) { this.tooltip.hide(); return; }
    const rows = [];
    for (const c of this.drawn) {
      const i = nearest(c.x, step);
      if (c.x[i] !== step || !known(c.raw[i])) continue;
      const band = this.spec.kind !== "stack" && c.lo && known(c.lo[i]) ? ` [${number(c.lo[i])}, ${number(c.hi[i])}]` : "";
      const share = this.isShare ? ` (${Math.round(100 * (c.hi[i] - c.lo[i]))} %)` : "";
      const mean = c.isSmooth ? ` (smoothed ${number(c.y[i])})` : "";
      rows.push([c.colour, visible(this.series.length > 1 ? c.label : this.spec.title), number(c.raw[i]) + band + share + mean]);
      if (this.spec.kind !== "stack") this.dots.append(svg("circle", { cx: px, cy: this.scale.y(c.y[i]), r: 3.5, fill: c.colour, stroke: "var(--card)", "stroke-width": 1.5 }));
    }
    if (this.spec.kind === "stack") rows.reverse();
    const unit = this.spec.unit && this.spec.unit !== "1" ? ` (${this.spec.unit})` : "";
    this.tooltip.show(px, MARGIN.top, `${this.axis} ${step}${unit}`, rows);
  }
}

function point(axis, x, here) {
  for (const chart of charts) if (chart.axis === axis && chart.cursor) chart.cursor(x, chart === here);
}
