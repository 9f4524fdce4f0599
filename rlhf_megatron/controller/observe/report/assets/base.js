"use strict";
// What all parts of the page use. Text of a run goes into the page by textContent only: prompts and responses are not trusted.

const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const charts = []; // every drawn thing: {draw, axis, cursor?}
const view = { zoom: {}, smoothing: 0 }; // zoom: axis -> [first, last]

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children) if (child) node.append(child);
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const colour = (index) => `var(--c${index % 8})`;
const known = (value) => value !== null && value !== undefined;

function number(value) {
  if (!known(value) || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return "infinite";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace("e+", "e");
  if (Number.isInteger(value)) return String(value);
  return String(Number(value.toPrecision(size >= 1000 ? 5 : 4)));
}

// Characters that do not print, or that turn the direction of what follows, are shown by their code.
function visible(text) {
  // eslint-disable-next-line no-control-regex
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g,
    (c) => `\\u{${c.codePointAt(0).toString(16)}}`);
}

function linearTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999) || power;
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step);
  const size = Math.max(Math.abs(low), Math.abs(high));
  const decimals = Math.max(0, -Math.floor(Math.log10(step * 1.0001)) + (String(step / power) === "2.5" ? 1 : 0));
  const form = size >= 1e5 ? short : size < 1e-2 ? exponent : (v) => v.toFixed(Math.min(8, decimals));
  return ticks.map((v) => ({ value: v, text: Math.abs(v) < step * 1e-6 ? "0" : form(v) }));
}
const exponent = (v) => Number(v.toPrecision(3)).toExponential().replace("e+", "e");
const short = (v) => (Math.abs(v) >= 1e9 ? exponent(v) : Math.abs(v) >= 1e6 ? `${Number((v / 1e6).toPrecision(4))}M` : `${Number((v / 1e3).toPrecision(4))}k`);

function logTicks(low, high, count) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const ticks = [];
  const stride = Math.max(1, Math.ceil((last - first) / Math.max(1, count)));
  const decades = Math.log10(high / low), factors = decades <= 1.5 ? [1, 2, 5] : decades <= 3 ? [1, 3] : [1];
  for (let e = first; e <= last; e += stride) {
    for (const factor of factors) {
      const v = factor * 10 ** e;
      if (v >= low * 0.999 && v <= high * 1.001) ticks.push({ value: v, text: v >= 0.01 && v < 1e4 ? String(Number(v.toPrecision(3))) : exponent(v) });
    }
  }
  return ticks.length > 2 ? ticks : linearTicks(low, high, count).filter((tick) => tick.value > 0);
}

// Exponential mean without the pull of its start; holes stay holes.
function smooth(values, weight) {
  let sum = 0, norm = 0;
  return values.map((v) => {
    if (!known(v)) return null;
    sum = weight * sum + (1 - weight) * v;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

// A box beside the pointer; rows are [colour or null, name, value].
function makeTooltip(plot) {
  const box = el("div", { class: "tooltip", hidden: true });
  plot.append(box);
  return {
    show(left, top, heading, rows) {
      box.replaceChildren(el("div", {}, el("b", { text: heading })), ...rows.map(([c, name, value]) => el("div", {},
        c ? swatch(c) : null, el("span", { text: name }), el("span", { class: "number", text: value }))));
      box.hidden = false;
      const room = plot.clientWidth - box.offsetWidth - 4;
      const beside = left + 14 > room ? left - box.offsetWidth - 14 : left + 14;
      box.style.transform = `translate(${Math.max(Math.min(0, room), beside)}px, ${top}px)`;
    },
    hide() { box.hidden = true; },
  };
}

function swatch(c) {
  const node = el("span", { class: "swatch" });
  node.style.background = c;
  return node;
}

function redraw(axis) {
  for (const chart of charts) if (!axis || chart.axis === axis) chart.draw();
  const button = document.getElementById("reset-zoom");
  if (button) button.hidden = Object.keys(view.zoom).length === 0;
}

// Draws when there is room, and again when the room changes; a closed block has none until it is opened.
function whenSized(plot, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (plot.clientWidth && plot.clientWidth !== width) { width = plot.clientWidth; draw(); }
  }).observe(plot);
}

function table(headings, rows, caption) {
  const cell = (tag, value, i) => el(tag, { class: headings[i].number ? "number" : headings[i].class || null, scope: tag === "th" ? "col" : null }, value instanceof Node ? value : document.createTextNode(value));
  return el("table", {}, caption ? el("caption", { text: caption }) : null,
    el("thead", {}, el("tr", {}, ...headings.map((h, i) => cell("th", h.text, i)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((value, i) => cell("td", value, i))))));
}

function select(label, options, onchange) {
  const node = el("select", { onchange: () => onchange(node.value) }, ...options.map(([value, text]) => el("option", { value, text })));
  return { node: el("label", {}, label, node), get value() { return node.value; }, set value(v) { node.value = v; } };
}
