"use strict";
// Held-out samples: the answers to one prompt over the steps, or all prompts of one evaluation. All text is set with textContent.

const PROMPT_CHARACTERS = 60; // of a prompt in the choice

class HeldOutView {
  constructor(root, rows) {
    this.rows = rows;
    this.list = root.querySelector(".list");
    this.count = root.querySelector(".count");
    const prompts = new Map(rows.map((r) => [this.prompt(r), r]));
    const hasSets = new Set(rows.map((r) => r.source)).size > 1;
    const name = (r) => {
      const text = visible(r.prompt.replace(/\s+/g, " ").trim());
      const cut = text.length > PROMPT_CHARACTERS ? `… ${text.slice(-PROMPT_CHARACTERS)}` : text;
      return `${hasSets ? `${visible(r.source)} ` : ""}${r.item + 1}: ${cut}`;
    };
    const steps = [...new Set(rows.map((r) => r.step))].sort((a, b) => a - b);
    const change = () => this.draw();
    this.filters = {
      prompt: select("prompt", [["", "all"], ...[...prompts].map(([key, r]) => [key, name(r)])], change),
      step: select("step", [["", "all"], ...steps.map((step) => [String(step), String(step)])], change),
    };
    this.filters.prompt.value = prompts.keys().next().value; // one prompt over all steps
    root.querySelector(".controls").append(this.filters.prompt.node, this.filters.step.node);
    this.draw();
  }

  prompt(r) {
    return JSON.stringify([r.source, r.item]);
  }

  draw() {
    const { prompt, step } = this.filters;
    const rows = this.rows.filter((r) => (!prompt.value || this.prompt(r) === prompt.value) && (!step.value || String(r.step) === step.value));
    this.count.textContent = `${rows.length} of ${this.rows.length} are shown.`;
    let former = null; // a prompt is shown once where it stays the same
    this.list.replaceChildren(...rows.map((r) => {
      const isSame = former !== null && this.prompt(former) === this.prompt(r) && former.prompt === r.prompt;
      former = r;
      return this.card(r, !isSame);
    }));
  }

  card(r, hasPrompt) {
    const fact = (name, value) => (known(value) && value !== "" ? el("span", {}, `${name} `, el("b", { text: visible(String(value)) })) : null);
    const parts = Object.entries(r.parts).map(([name, value]) => `${name} ${number(value)}`).join(", ");
    const block = (name, text) => el("div", {}, el("h4", { text: name }), el("pre", { dir: "auto", tabindex: 0, text: visible(text) }));
    return el("article", { class: "sample" },
      el("div", { class: "head" }, fact("step", r.step), fact("score", known(r.score) ? number(r.score) : null),
        fact("reward", known(r.reward) && r.reward !== r.score ? number(r.reward) : null), fact("label", r.label), fact("status", r.status),
        fact("set", r.source), fact("item", r.item + 1), fact("tokens", r.num_tokens), parts ? fact("parts:", parts) : null),
      el("div", { class: "texts" }, hasPrompt ? block("prompt", r.prompt) : null, block("response", r.response)));
  }
}
