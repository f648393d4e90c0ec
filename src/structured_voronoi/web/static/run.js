// One run: its progress, its chains and the table of its texts.

import { Chart } from "./chart.js";
import { $, announce, capital, copy, element, toast } from "./dom.js";

const STAGES = { loading: "Loading the model", texts: "Drawing texts", weighted_texts: "Drawing weighted texts" }; // messages by stage code

export class Run {
  constructor() {
    this.lines = [];
    $("#copy").addEventListener("click", () => copy(this.lines.map((line) => this.promptPrefix(line.prompt) + line.text).join("\n\n"), `${this.lines.length} texts copied`));
    $("#download").addEventListener("click", () => this.download());
  }

  begin(settings) {
    Object.assign(this, { settings, lines: [], controls: [], chains: null, offset: 0, began: performance.now() });
    $("#texts thead").replaceChildren();
    $("#texts tbody").replaceChildren();
    $("#messages").replaceChildren();
    $("#chains").replaceChildren();
    $("#verdict").textContent = "";
    for (const id of ["figures", "chains-section", "probability"]) $(`#${id}`).hidden = true;
    $("#no-texts").hidden = false;
    $("#copy").disabled = $("#download").disabled = true;
    this.showStatus("Sending the request", null);
    $("#step").textContent = "";
  }

  handle(event) {
    const { kind } = event;
    if (kind === "waiting") this.showStatus(`Waiting, ${event.before} jobs before this one`, null);
    if (kind === "stage") this.showStatus(STAGES[event.stage] ?? event.stage, null);
    if (kind === "progress") this.showStatus(STAGES[event.stage] ?? event.stage, event.share, timeLeft(event.seconds_left));
    if (kind === "note") this.showStatus(this.status, null, `: ${event.message}`);
    if (kind === "reason" || kind === "status") this.addMessage(event.message);
    if (kind === "warning") this.addMessage(`Warning: ${event.message}${event.remedy ? `; ${event.remedy}` : ""}`);
    if (kind === "planned") this.showPlan(event);
    if (kind === "chains") this.showChains(event);
    if (kind === "texts") this.add(event.texts);
    if (kind === "probability") this.showProbability(event);
  }

  // A text continues its prompt; the response of a chat does not.
  promptPrefix(prompt) {
    return this.settings.chat ? `${prompt} → ` : prompt;
  }

  addMessage(message) {
    $("#messages").append(element("li", {}, capital(message)));
  }

  showPlan({ sampler, is_exact: isExact, controls }) {
    this.controls = controls;
    this.showStatus(`Drawing with ${sampler}${isExact ? "" : " (not exact)"}`, null);
    const lines = { log_target: { label: "mean", kind: "first" } };
    this.logTargets = new Chart($("#log-targets"), { lines, x: { from: 0, isWhole: true }, width: 360, height: 150, description: "Mean log target of the chains by step" });
    const tags = Object.fromEntries(controls.map((name, i) => [name, { label: shortened(name), kind: i ? "" : "first" }]));
    this.probabilities = new Chart($("#probabilities"), { lines: tags, x: { from: 0, isWhole: true }, y: { from: 0, to: 1 }, width: 360, height: 150, description: "Mean probability of each control by step" });
    $("#probabilities").parentElement.hidden = !controls.length;
  }

  showChains(event) {
    const list = $("#chains");
    $("#figures").hidden = $("#chains-section").hidden = false;
    if (this.chains && this.chains.first !== event.first) {
      this.offset += this.chains.steps;
      list.replaceChildren();
    }
    this.chains = event;
    while (list.children.length > event.pieces.length) list.lastChild.remove();
    while (list.children.length < event.pieces.length) list.append(element("li", {}, element("p"), element("small")));
    event.pieces.forEach((pieces, i) => {
      const [text, note] = list.children[i].children;
      showPieces(text, pieces, this.promptPrefix(this.settings.prompt));
      const scores = Object.entries(event.controls).map(([name, values]) => `${shortened(name)} ${share(values[i])}`);
      note.textContent = [...scores, `log target ${short(event.log_target[i])}`].join(" · ");
    });
    const heights = [...list.children].map((card) => card.offsetHeight);
    heights.forEach((height, i) => (list.children[i].style.minHeight = `${height}px`)); // cards grow with their texts but do not shrink
    $("#step").textContent = `: step ${event.step} of ${event.steps}`;
    const step = this.offset + event.step;
    this.logTargets.add(step, { log_target: mean(event.log_target) });
    this.probabilities.add(step, Object.fromEntries(Object.entries(event.controls).map(([name, values]) => [name, mean(values)])));
  }

  add(texts) {
    if (this.chains && texts.some((text) => text.index === this.chains.first)) {
      this.offset += this.chains.steps;
      this.chains = null; // these chains are finished
    }
    const { controls } = this, heads = ["log p", ...controls];
    if (!$("#texts thead").children.length) {
      const cells = heads.map((name) => element("th", { scope: "col", class: "number" }, name));
      $("#texts thead").append(element("tr", {}, element("th", { scope: "col" }, "Text"), ...cells));
    }
    for (const line of texts) {
      this.lines.push(line);
      const cell = element("td", { class: "words" }, element("span", { class: "prompt" }, this.promptPrefix(line.prompt)), line.text);
      if (line.stopped_at !== undefined) cell.append(element("small", {}, `stopped at step ${line.stopped_at} of ${line.steps}`));
      const numbers = [short(line.log_prob), ...controls.map((name) => share(line[name]))];
      $("#texts tbody").append(element("tr", {}, cell, ...numbers.map((value, i) => element("td", { class: "number", "data-name": heads[i] }, value))));
    }
    $("#no-texts").hidden = true;
    $("#copy").disabled = $("#download").disabled = false;
    if (this.lines.length < this.settings.n) this.showStatus(`${this.lines.length} of ${this.settings.n} texts`, this.lines.length / this.settings.n);
  }

  showProbability({ estimate, effective_share: effectiveShare, verdict }) {
    const entries = { "Probability of the controls, P(controls)": estimate, "Effective share of the weighted texts": share(effectiveShare) };
    $("#probability").replaceChildren(...Object.entries(entries).map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
    $("#probability").hidden = false;
    $("#verdict").textContent = capital(verdict);
  }

  // The texts of interrupted chains are kept, with the step that they reached.
  end(isStopped) {
    const { chains } = this;
    if (isStopped && chains) {
      this.chains = null;
      this.add(chains.pieces.map((pieces, i) => ({
        index: chains.first + i, prompt: this.settings.prompt, text: pieces.join(""), log_prob: null, log_target: chains.log_target[i],
        ...Object.fromEntries(Object.entries(chains.controls).map(([name, values]) => [name, values[i]])),
        stopped_at: chains.step, steps: chains.steps,
      })));
    }
    $("#chains-section").hidden = true;
    const seconds = ((performance.now() - this.began) / 1000).toFixed(1);
    const count = `${this.lines.length} text${this.lines.length === 1 ? "" : "s"}`;
    if (isStopped && !this.lines.length) this.showStatus("No texts were drawn.", 0);
    else this.showStatus(`${isStopped ? "Stopped" : "Done"}: ${count} in ${seconds} s`, isStopped ? 0 : 1);
  }

  // Shows the status and the share of the work that is done (null: unknown); screen readers do not read the detail.
  showStatus(status, done, detail = "") {
    this.status = status;
    $("#status").textContent = status + detail;
    announce(status);
    const bar = $("#progress");
    if (done === null) bar.removeAttribute("value");
    else bar.value = done;
  }

  download() {
    const lines = this.lines.map((line) => `${JSON.stringify(line)}\n`).join("");
    const address = URL.createObjectURL(new Blob([lines], { type: "application/jsonl" }));
    element("a", { href: address, download: "texts.jsonl" }).click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
    toast(`${this.lines.length} texts downloaded`);
  }
}

// Shows the pieces of a text and highlights those that changed.
function showPieces(list, pieces, prompt) {
  if (!list.children.length) list.append(element("span", { class: "prompt" }, prompt));
  while (list.children.length > pieces.length + 1) list.lastChild.remove();
  const isFirst = list.children.length === 1;
  pieces.forEach((piece, i) => {
    const old = list.children[i + 1];
    if (old?.textContent === piece) return;
    const token = element("span", { class: isFirst ? null : "lit" }, piece);
    if (old) old.replaceWith(token);
    else list.append(token);
  });
}

const shortened = (name) => (name.length > 14 ? `${name.slice(0, 13)}…` : name);
const short = (value) => (value === null || value === undefined ? "–" : value.toFixed(2));
const share = (value) => (value === null || value === undefined ? "–" : value > 0 && value < 0.001 ? value.toExponential(1) : value.toFixed(3));

function mean(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((a, b) => a + b) / known.length : null;
}

function timeLeft(seconds) {
  if (seconds === null || seconds === undefined) return "";
  return seconds < 90 ? `, about ${Math.max(1, Math.round(seconds))} s left` : `, about ${Math.round(seconds / 60)} min left`;
}
