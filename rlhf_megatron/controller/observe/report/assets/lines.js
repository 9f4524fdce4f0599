"use strict";
// Curves over steps, drawn by uPlot: values under the pointer, a zoom that all charts of an axis share, smoothing, stacks.

const MARGIN = { left: 62, right: 14, top: 10, bottom: 38 };
const paint = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

class LineChart {
  constructor(figure, spec) {
    this.figure = figure;
    this.spec = spec;
    this.axis = spec.axis;
    this.hidden = new Set();
    this.focus = null; // index of the curve that the legend points at
    this.isShare = spec.kind === "stack" && spec.unit !== "share"; // shares are drawn as they are
    this.steps = [...new Set(spec.series.flatMap((s) => DATA.axes[s.x]))].sort((a, b) => a - b);
    this.series = spec.series.map((s, i) => {
      const place = new Map(DATA.axes[s.x].map((x, k) => [x, k]));
      const full = (values) => values && this.steps.map((x) => (place.has(x) ? values[place.get(x)] : undefined));
      return { ...s, y: full(s.y), lo: full(s.lo), hi: full(s.hi), index: i, c: `c${(known(s.group) ? s.group : i) % 8}` };
    });
    this.plot = figure.querySelector(".plot");
    this.tooltip = makeTooltip(this.plot);
    this.legend();
    this.values();
    charts.push(this);
    whenSized(this.plot, () => this.draw());
    this.plot.addEventListener("keydown", (event) => this.key(event));
  }

  legend() {
    const named = this.series.filter((s) => !s.faint), isStack = this.spec.kind === "stack";
    if (named.length < 2 && !isStack) return;
    const buttons = named.map((s) => el("button", {
      type: "button", "aria-pressed": "true", title: [s.meaning, s.key].filter(Boolean).join(" – "),
      onclick: (event) => this.toggle(s, event.currentTarget),
      onpointerenter: () => { this.focus = s; this.draw(); },
      onpointerleave: () => { this.focus = null; this.draw(); },
    }, swatch(`var(--${s.c})`), visible(s.label)));
    if (isStack && this.spec.unit !== "share") {
      buttons.push(el("button", { type: "button", text: "show absolute values", onclick: (event) => {
        this.isShare = !this.isShare;
        event.currentTarget.textContent = this.isShare ? "show absolute values" : "show shares";
        this.draw();
      } }));
    }
    this.plot.before(el("div", { class: "legend" }, ...buttons));
  }

  toggle(s, button) {
    const isHidden = !this.hidden.has(s);
    for (const o of this.series) if (o === s || (o.faint && o.group === s.group)) this.hidden[isHidden ? "add" : "delete"](o);
    button.setAttribute("aria-pressed", String(!isHidden));
    this.draw();
  }

  values() {
    const details = this.figure.querySelector("details.values");
    details.addEventListener("toggle", () => {
      if (!details.open || details.querySelector("table")) return;
      const stride = Math.ceil(this.steps.length / 200), last = this.steps.length - 1;
      const rows = this.steps.map((step, i) => [String(step), ...this.series.map((s) => (s.y[i] === undefined ? "" : this.text(s, i)))]);
      const headings = [this.axis, ...this.series.map((s) => visible(s.label))].map((text) => ({ text, number: true }));
      details.append(el("div", { class: "scroll" }, table(headings, rows.filter((_, i) => i % stride === 0 || i === last), stride > 1 ? `One row in ${stride}.` : null)));
    });
  }

  text(s, i) { return number(s.y[i]) + (s.lo && known(s.lo[i]) ? ` [${number(s.lo[i])}, ${number(s.hi[i])}]` : ""); }

  // What is drawn of each curve: smoothed, stacked, or as it is.
  curves() {
    const shown = this.series.filter((s) => !this.hidden.has(s)), isLines = this.spec.kind === "lines";
    if (this.spec.kind !== "stack") return shown.map((s) => ({ s, y: view.smoothing && isLines ? smooth(s.y, view.smoothing) : s.y, raw: view.smoothing && isLines && !s.faint ? s.y : null, lo: s.lo, hi: s.hi }));
    let lo = this.steps.map(() => 0);
    const sums = lo.map((_, i) => (this.isShare ? shown.reduce((sum, s) => sum + s.y[i], 0) || 1 : 1));
    return shown.map((s) => {
      const hi = lo.map((base, i) => base + s.y[i] / sums[i]), curve = { s, y: null, raw: null, lo, hi };
      lo = hi;
      return curve;
    });
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!width) return;
    const data = [this.steps], series = [{}], bands = [], isStack = this.spec.kind === "stack";
    const withRuns = new Set(this.series.filter((s) => s.faint).map((s) => s.group)); // the band of a few runs may go far beyond
    const add = (values, options) => series.push({ points: { show: false }, ...options }) && data.push(this.spec.log ? values.map((v) => (v > 0 ? v : v && null)) : values);
    for (const { s, y, raw, lo, hi } of this.curves()) {
      const isDim = this.focus && this.focus !== s && !(s.faint && s.group === this.focus.group), colour = paint(s.c), alpha = isDim ? 0.2 : 1;
      if (lo) {
        const auto = isStack || !withRuns.has(s.group);
        add(hi, { auto, alpha }), add(lo, { auto, alpha });
        bands.push({ series: [data.length - 2, data.length - 1], fill: colour + (isStack ? "d9" : isDim ? "10" : "2e") });
      }
      if (raw) add(raw, { stroke: colour, width: 1, alpha: 0.3 * alpha });
      if (y) add(y, { stroke: colour, width: s.faint ? 1 : 1.7, alpha: (s.faint ? 0.35 : 1) * alpha,
        points: { show: !s.faint && (this.steps.length < 40 || this.spec.kind === "points"), size: this.spec.kind === "points" ? 6 : 4, fill: colour } });
    }
    const hasFocus = this.plot.contains(document.activeElement);
    if (this.chart) this.chart.destroy();
    this.chart = new uPlot(this.options(width, series, bands), data, this.plot);
    fill(this.chart.root, { role: "img", tabindex: 0, "aria-label": this.description() }, []);
    if (hasFocus) this.chart.root.focus();
    this.tooltip.hide();
  }

  options(width, series, bands) {
    const { spec } = this, [first, last] = view.zoom[this.axis] || [this.steps[0], this.steps[this.steps.length - 1]];
    const axis = { stroke: paint("muted"), font: "11px system-ui", labelFont: "11px system-ui", labelSize: 16, ticks: { show: false } };
    const unit = this.isShare ? "share" : spec.unit === "1" ? "no unit" : spec.unit;
    const label = spec.log ? (unit ? `${unit}, log` : "log scale") : unit || " ";
    const logAxis = spec.log ? { splits: (_, __, low, high) => logTicks(low, high, 5).map((tick) => tick.value), filter: (_, ticks) => ticks } : {};
    return {
      width, height: spec.wide && width > 600 ? 300 : 215, series, bands, legend: { show: false },
      cursor: { y: false, points: { size: 7 }, sync: { key: this.axis, setSeries: false, filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } }, drag: { setScale: false }, bind: { dblclick: () => () => this.zoom(null) } },
      scales: { x: { time: false, range: first === last ? [first - 1, last + 1] : [first, last] }, y: { distr: spec.log ? 3 : 1, range: (_, low, high) => this.range(low, high) } },
      axes: [{ ...axis, grid: { show: false }, label: this.axis, size: 22, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5, 1e6], values: (_, ticks) => ticks.map(number) },
        { ...axis, ...logAxis, size: 46, label, grid: { stroke: paint("grid"), width: 1 }, values: (_, ticks) => ticks.map(tickText) }],
      hooks: { setSelect: [(u) => u.select.width > 7 && queueMicrotask(() => this.zoom([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]))], setCursor: [(u) => this.point(u)], draw: [(u) => this.rules(u)] },
    };
  }

  range(low, high) {
    const { spec } = this;
    if (!known(low)) return spec.log ? [0.1, 1] : [0, 1];
    if (this.isShare) return [0, 1];
    for (const [value] of spec.rules) [low, high] = [Math.min(low, value), Math.max(high, value)];
    if (spec.log) { const pad = Math.max((high / low) ** 0.06, 1.15); return [low / pad, high * pad]; }
    const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1, fromZero = (spec.zero || spec.kind === "stack") && low >= 0;
    const top = spec.unit === "share" && high > 0.995 ? 1 : high; // shares are rounded, and 1 has a tick
    return [fromZero ? 0 : low - pad, spec.kind === "stack" ? top : high + pad];
  }

  description() {
    const parts = this.series.slice(0, 4).map((s) => `${s.label} from ${number(s.y[0])} to ${number(s.y[s.y.length - 1])}`);
    return `${this.spec.title}: ${parts.join("; ")}. Arrow keys read values.`;
  }

  rules({ ctx, bbox, valToPos }) {
    ctx.save();
    Object.assign(ctx, { strokeStyle: paint("muted"), fillStyle: paint("muted"), textAlign: "right", textBaseline: "bottom", font: `${11 * devicePixelRatio}px system-ui` });
    ctx.setLineDash([5, 4]);
    for (const [value, label] of this.spec.rules) {
      const y = valToPos(value, "y", true);
      ctx.beginPath(); ctx.moveTo(bbox.left, y); ctx.lineTo(bbox.left + bbox.width, y); ctx.stroke();
      ctx.fillText(`${label}: ${number(value)}`, bbox.left + bbox.width - 4, y - 2);
    }
    ctx.restore();
  }

  zoom(ends) {
    if (!ends) delete view.zoom[this.axis];
    else if (ends[1] - ends[0] >= 1) view.zoom[this.axis] = ends;
    redraw(this.axis);
  }

  key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (event.key === "Escape") this.zoom(null);
    if (!move) return;
    event.preventDefault();
    this.place = Math.min(this.steps.length - 1, Math.max(0, (known(this.place) ? this.place : -1) + move));
    this.chart.setCursor({ left: this.chart.valToPos(this.steps[this.place], "x"), top: 20 }, true, true);
  }

  // Values only where the pointer, or the keyboard, is: the others show the line.
  point(u) {
    const i = u.cursor.idx;
    if (!known(i) || u.cursor.left < 0 || !(u.cursor.event || this.plot.contains(document.activeElement))) { this.tooltip.hide(); return; }
    const rows = this.curves().filter(({ s }) => known(s.y[i])).map(({ s, raw, y, lo, hi }) => [`var(--${s.c})`, visible(this.series.length > 1 ? s.label : this.spec.title),
      (this.spec.kind === "stack" ? number(s.y[i]) : this.text(s, i)) + (this.isShare ? ` (${Math.round(100 * (hi[i] - lo[i]))} %)` : "") + (raw ? ` (smoothed ${number(y[i])})` : "")]);
    if (this.spec.kind === "stack") rows.reverse();
    const unit = this.spec.unit && this.spec.unit !== "1" ? ` (${this.spec.unit})` : "";
    this.tooltip.show(u.valToPos(this.steps[i], "x") + u.bbox.left / devicePixelRatio, MARGIN.top, `${this.axis} ${this.steps[i]}${unit}`, rows);
  }
}

const tickText = (v) => (Math.abs(v) >= 1e5 ? short(v) : v !== 0 && Math.abs(v) < 1e-3 ? exponent(v) : String(Number(v.toPrecision(4))));
for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", () => redraw());
