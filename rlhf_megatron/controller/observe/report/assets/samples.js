"use strict";
// Samples with filters. All text is set with textContent: nothing of it can become markup.

const PAGE = 12;

// "3", or of which policy version which response tokens are: "3: tokens 0–15, 4: 16–40".
function versions(r) {
  if (new Set(r.version_spans.map(([version]) => version)).size < 2) return r.policy_version;
  return r.version_spans.map(([version, start, end], i) => `${version}: ${i ? "" : "tokens "}${start}–${end - 1}`).join(", ");
}

class SamplesView {
  constructor(root, rows) {
    this.rows = rows;
    this.limit = PAGE;
    this.list = root.querySelector(".list");
    this.count = root.querySelector(".count");
    const options = (field, all) => [["", all], ...[...new Set(rows.map((r) => String(r[field])))].filter(Boolean).map((v) => [v, visible(v)])];
    const change = () => { this.limit = PAGE; this.draw(); };
    this.filters = {
      step: select("step", options("step", "all"), change),
      kind: select("kind", options("kind", "all"), change),
      source: select("source", options("source", "all"), change),
      status: select("status", options("status", "all"), change),
      finish_reason: select("ended by", options("finish_reason", "all"), change),
    };
    this.filters.step.value = String(rows[rows.length - 1].step);
    this.search = el("input", { type: "search", placeholder: "text", "aria-label": "text in prompt or response", oninput: change });
    const order = [["", "step"], ["up", "reward, lowest first"], ["down", "reward, highest first"]];
    this.order = select("order", order, change);
    root.querySelector(".controls").append(...Object.entries(this.filters).filter(([name]) => name === "step" || options(name, "").length > 2).map(([, f]) => f.node), this.order.node, this.search);
    this.more = el("button", { type: "button", text: "show more", onclick: () => { this.limit += PAGE; this.draw(); } });
    this.list.after(el("p", {}, this.more));
    this.draw();
  }

  draw() {
    const text = this.search.value.toLowerCase();
    let rows = this.rows.filter((r) => Object.entries(this.filters).every(([field, f]) => !f.value || String(r[field]) === f.value)
      && (!text || r.prompt.toLowerCase().includes(text) || r.response.toLowerCase().includes(text) || r.talk.some((p) => p.text.toLowerCase().includes(text))));
    if (this.order.value) {
      const sign = this.order.value === "up" ? 1 : -1;
      const place = (r) => (known(r.reward) ? sign * r.reward : Infinity);
      rows = rows.slice().sort((a, b) => place(a) - place(b) || 0);
    }
    this.count.textContent = `${Math.min(this.limit, rows.length)} of ${rows.length} that match are shown.`;
    this.list.replaceChildren(...rows.slice(0, this.limit).map((r) => this.card(r)));
    this.more.hidden = rows.length <= this.limit;
  }

  card(r) {
    const fact = (name, value) => (known(value) && value !== "" ? el("span", {}, `${name} `, el("b", { text: visible(String(value)) })) : null);
    const parts = Object.entries(r.parts).map(([name, value]) => `${name} ${number(value)}`).join(", ");
    return el("article", { class: "sample" },
      el("div", { class: "head" }, el("span", { class: `tag ${["best", "worst"].includes(r.kind) ? r.kind : ""}`, text: r.kind }), fact("step", r.step),
        fact("reward", known(r.reward) ? number(r.reward) : null), fact("label", r.label), fact("status", r.status), fact("source", r.source),
        fact("ended by", known(r.episode_end) ? r.episode_end : r.finish_reason), fact("turns", r.talk.filter((p) => p.is_sampled).length || null), fact("tokens", r.num_tokens), fact("version", versions(r)),
        fact("cached tokens", r.num_cached_tokens), fact("retractions", r.num_retractions || null), parts ? fact("parts:", parts) : null),
      el("div", { class: "texts" },
        el("div", {}, el("h4", { text: "prompt" }), el("pre", { dir: "auto", tabindex: 0, text: visible(r.prompt) })),
        el("div", {}, el("h4", { text: r.talk.length ? "episode; what trains is marked" : "response" }), this.answer(r))));
  }

  // The response, or the turns of an episode with what the environment said between them.
  answer(r) {
    if (!r.talk.length) return el("pre", { dir: "auto", tabindex: 0, text: visible(r.response) });
    const piece = (p) => [el(p.is_sampled ? "mark" : "span", { text: visible(p.text) }), known(p.reward) ? el("b", { text: ` reward ${number(p.reward)} ` }) : null];
    return el("pre", { dir: "auto", tabindex: 0 }, ...r.talk.flatMap(piece));
  }
}
