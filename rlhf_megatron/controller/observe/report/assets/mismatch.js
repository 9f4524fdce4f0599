"use strict";
// Histogram of |log-prob of trainer - of engine| per token, by policy version and finish reason; the same over steps.

class MismatchView {
  constructor(root, data) {
    this.data = data;
    this.root = root;
    this.axis = null;
    this.isLog = false;
    this.numBins = Math.max(...data.cells.map((c) => c.offset + c.counts.length));
    this.column = null; // of the map, when one is chosen
    const all = (names) => [["", "all"], ...names.map((name, i) => [i, visible(name) || "(none)"])];
    const change = () => this.draw();
    this.version = select("policy version", all(data.versions), change);
    this.reason = select("finish reason", all(data.reasons), change);
    const scale = select("count", [["", "linear"], ["log", "log"]], (value) => { this.isLog = value === "log"; this.draw(); });
    this.clear = el("button", { type: "button", text: "all steps", hidden: true, onclick: () => { this.column = null; this.draw(); } });
    root.querySelector(".controls").append(this.version.node, this.reason.node, scale.node, this.clear);
    this.histogram = root.querySelector(".histogram");
    this.map = root.querySelector(".map");
    this.tips = [makeTooltip(this.histogram), makeTooltip(this.map)];
    charts.push(this);
    whenSized(this.histogram, () => this.draw());
  }

  // The cells of the chosen version and reason.
  cells(withColumn) {
    return this.data.cells.filter((c) => (this.version.value === "" || c.version === Number(this.version.value))
      && (this.reason.value === "" || c.reason === Number(this.reason.value)) && (!withColumn || this.column === null || c.column === this.column));
  }

  sums(cells) {
    const counts = new Array(this.numBins).fill(0);
    for (const c of cells) c.counts.forEach((n, i) => { counts[c.offset + i] += n; });
    return counts;
  }

  // The first bin begins at 0, which a log axis has no place for: it gets the width of its neighbour.
  edge(i) {
    const edges = this.data.edges;
    return i === 0 ? Math.log10(edges[1]) - (edges.length > 2 ? Math.log10(edges[2] / edges[1]) : 1) : Math.log10(edges[i]);
  }

  binText(i) {
    const edges = this.data.edges;
    return i === edges.length - 2 ? `${number(edges[i])} or more` : `${number(edges[i])} to ${number(edges[i + 1])}`;
  }

  draw() {
    if (!this.histogram.clientWidth) return;
    const cells = this.cells(true), counts = this.sums(cells), total = counts.reduce((a, b) => a + b, 0);
    this.clear.hidden = this.column === null;
    this.drawStats(cells, counts, total);
    this.drawHistogram(counts, total);
    this.drawMap();
    this.drawWorst();
  }

  drawStats(cells, counts, total) {
    const tokens = cells.reduce((sum, c) => sum + c.tokens, 0);
    const mean = cells.reduce((sum, c) => sum + infinite(c.mean) * c.tokens, 0) / Math.max(1, tokens);
    const top = cells.length ? Math.max(...cells.map((c) => infinite(c.max))) : null;
    const quantile = (q) => {
      let sum = 0;
      const bin = counts.findIndex((n) => (sum += n) >= q * total);
      return total ? `${this.binText(Math.max(0, bin))}` : "–";
    };
    const columns = cells.map((c) => this.data.columns[c.column]);
    const steps = columns.length ? range([Math.min(...columns.map((c) => c[0])), Math.max(...columns.map((c) => c[1]))]) : "–";
    const facts = [["steps", steps], ["tokens", number(tokens)],
      ["mean", `${number(tokens ? mean : null)} nats`], ["median in", quantile(0.5)], ["99th percentile in", quantile(0.99)], ["largest", `${number(top)} nats`]];
    this.root.querySelector(".stats").replaceChildren(...facts.map(([name, value]) => el("span", {}, `${name} `, el("b", { text: value }))));
  }

  drawHistogram(counts, total) {
    const width = this.histogram.clientWidth, height = 240, right = width - MARGIN.right, bottom = height - MARGIN.bottom;
    const low = this.edge(0), high = this.edge(this.numBins), most = Math.max(1, ...counts);
    const x = (v) => MARGIN.left + ((v - low) / (high - low)) * (right - MARGIN.left);
    const y = this.isLog ? (n) => bottom - (Math.log10(Math.max(n, 0.5) / 0.5) / Math.log10(most / 0.5)) * (bottom - MARGIN.top)
      : (n) => bottom - (n / most) * (bottom - MARGIN.top);
    const image = svg("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `histogram of ${total} tokens by log-prob difference` });
    for (const tick of this.isLog ? logTicks(0.5, most, 4) : linearTicks(0, most, 4)) {
      image.append(svg("line", { x1: MARGIN.left, x2: right, y1: y(tick.value), y2: y(tick.value), stroke: "var(--grid)" }),
        svg("text", { x: MARGIN.left - 7, y: y(tick.value) + 4, "text-anchor": "end", text: tick.text }));
    }
    counts.forEach((n, i) => {
      const from = x(this.edge(i)), to = x(this.edge(i + 1));
      if (n) image.append(svg("rect", { x: from + 0.5, y: y(n), width: Math.max(1, to - from - 1), height: bottom - y(n), fill: "var(--c0)" }));
      image.append(svg("rect", { x: from, y: MARGIN.top, width: to - from, height: bottom - MARGIN.top, fill: "transparent",
        onpointermove: () => this.tips[0].show(to, MARGIN.top, `${this.binText(i)} nats`, [["var(--c0)", "tokens", number(n)], [null, "share", total ? number(n / total) : "–"]]),
        onpointerleave: () => this.tips[0].hide() }));
    });
    this.xAxis(image, x, low, high, right, bottom, width > 500 ? "|log-prob of trainer − of engine|, nats (the first bin begins at 0)" : "nats (the first bin begins at 0)");
    image.append(svg("text", { transform: `translate(12 ${(MARGIN.top + bottom) / 2}) rotate(-90)`, "text-anchor": "middle", text: this.isLog ? "tokens, log" : "tokens" }));
    swap(this.histogram, image);
  }

  xAxis(image, x, low, high, right, bottom, text) {
    const stride = Math.max(1, Math.ceil((high - low) / ((right - MARGIN.left) / 60)));
    for (let e = Math.ceil(low); e <= high; e += stride) {
      image.append(svg("line", { x1: x(e), x2: x(e), y1: bottom, y2: bottom + 4, stroke: "var(--line)" }),
        svg("text", { x: x(e), y: bottom + 16, "text-anchor": "middle", text: `1e${e}` }));
    }
    image.append(svg("line", { x1: MARGIN.left, x2: right, y1: bottom, y2: bottom, stroke: "var(--line)" }),
      svg("text", { x: (MARGIN.left + right) / 2, y: bottom + 32, "text-anchor": "middle", text }));
  }

  // Steps from left to right, bins from below; how dark a field is says the share of the tokens of its steps.
  drawMap() {
    const width = this.map.clientWidth, height = 260, right = width - MARGIN.right, bottom = height - MARGIN.bottom;
    const low = this.edge(0), high = this.edge(this.numBins), columns = this.data.columns, cells = this.cells(false);
    const wide = (right - MARGIN.left) / columns.length;
    const y = (v) => bottom - ((v - low) / (high - low)) * (bottom - MARGIN.top);
    const image = svg("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "log-prob differences over steps" });
    const perColumn = columns.map((_, i) => this.sums(cells.filter((c) => c.column === i)));
    const totals = perColumn.map((counts) => counts.reduce((a, b) => a + b, 0));
    const most = Math.max(1e-9, ...perColumn.flatMap((counts, i) => counts.map((n) => (totals[i] ? n / totals[i] : 0))));
    for (let e = Math.ceil(low); e <= high; e += Math.max(1, Math.ceil((high - low) / 6))) {
      image.append(svg("text", { x: MARGIN.left - 7, y: y(e) + 4, "text-anchor": "end", text: `1e${e}` }));
    }
    perColumn.forEach((counts, i) => {
      const from = MARGIN.left + wide * i;
      counts.forEach((n, bin) => {
        if (n) image.append(svg("rect", { x: from, y: y(this.edge(bin + 1)), width: wide, height: y(this.edge(bin)) - y(this.edge(bin + 1)), "shape-rendering": "crispEdges", fill: "var(--c0)", opacity: (0.06 + 0.94 * Math.sqrt(n / totals[i] / most)).toFixed(3) }));
      });
      if (i === this.column) image.append(svg("rect", { x: from, y: MARGIN.top, width: wide, height: bottom - MARGIN.top, fill: "none", stroke: "var(--c1)", "stroke-width": 2 }));
      image.append(svg("rect", { x: from, y: MARGIN.top, width: wide, height: bottom - MARGIN.top, fill: "transparent", cursor: "pointer",
        onclick: () => { this.column = this.column === i ? null : i; this.draw(); },
        onpointermove: () => this.tips[1].show(from + wide, MARGIN.top, `steps ${range(columns[i])}`, [[null, "tokens", number(totals[i])], [null, "click", "histogram of these steps"]]),
        onpointerleave: () => this.tips[1].hide() }));
    });
    for (const tick of linearTicks(columns[0][0], Math.max(columns[columns.length - 1][1], columns[0][0] + 1), width / 90)) {
      const i = columns.findIndex(([, last]) => last >= tick.value);
      if (i >= 0 && Number.isInteger(tick.value)) image.append(svg("text", { x: MARGIN.left + wide * (i + 0.5), y: bottom + 16, "text-anchor": "middle", text: tick.value }));
    }
    image.append(svg("line", { x1: MARGIN.left, x2: right, y1: bottom, y2: bottom, stroke: "var(--line)" }),
      svg("text", { x: (MARGIN.left + right) / 2, y: bottom + 32, "text-anchor": "middle", text: "step" }),
      svg("text", { transform: `translate(12 ${(MARGIN.top + bottom) / 2}) rotate(-90)`, "text-anchor": "middle", text: "nats, log" }));
    swap(this.map, image);
  }

  drawWorst() {
    const reason = this.reason.value === "" ? null : this.data.reasons[Number(this.reason.value)];
    const bounds = this.version.value === "" ? null : this.data.version_ranges[Number(this.version.value)];
    const steps = this.data.columns[this.column];
    const rows = this.data.worst.filter((w) => (reason === null || w.finish_reason === reason) && (!steps || (w.step >= steps[0] && w.step <= steps[1]))
      && (!bounds || (known(w.policy_version) && w.policy_version >= bounds[0] && w.policy_version <= bounds[1])));
    const headings = [["difference, nats", 1], ["trainer", 1], ["engine", 1], ["token, after its context", 0], ["id", 1], ["position", 1], ["step", 1], ["version", 1], ["ended by", 0], ["sample", 0]].map(([text, isNumber]) => ({ text, number: Boolean(isNumber), class: text.startsWith("token") ? "break" : null }));
    const quoted = (text) => visible(text).replace(/\n/g, "⏎");
    const body = rows.slice(0, 30).map((w) => [number(infinite(w.difference)), number(w.trainer), number(w.engine),
      el("span", { class: "mono" }, el("span", { class: "muted", text: (w.context.length > 80 ? "…" : "") + quoted(w.context.slice(-80)) }), el("mark", { text: quoted(w.token) || "(empty)" })),
      known(w.token_id) ? String(w.token_id) : "", known(w.position) ? String(w.position) : "", String(w.step), known(w.policy_version) ? String(w.policy_version) : "", w.finish_reason, String(w.sample_id)]);
    const node = body.length ? table(headings, body, "The largest differences of the selection that were kept; log-probs in nats.") : el("p", { class: "muted", text: "No worst token was kept for this selection." });
    this.root.querySelector(".worst").replaceChildren(node);
  }
}

const infinite = (value) => (known(value) ? value : Infinity); // JSON has no number for it
const range = ([first, last]) => (first === last ? String(first) : `${first} to ${last}`);

function swap(plot, image) {
  const old = plot.querySelector("svg");
  if (old) old.replaceWith(image); else plot.prepend(image);
}
