// The room of texts: a form, chains that move, and a table of what was drawn.

import { Chart } from "./chart.js";
import { $, copy, element, later, readAddress, speak, toast, writeAddress } from "./dom.js";
import { events } from "./stream.js";

const FIELDS = ["model", "prompt", "n", "max_tokens", "sampler", "finish", "stop", "system", "seed", "warmup"];
const STAGES = { loading: "Loading the model", texts: "Drawing texts", weighted_texts: "Drawing weighted texts" }; // shown for the codes of the server
const FIRST_CONTROL = { kind: "food", value: "Italian", weight: 1, negated: false };

export function openText(offering) {
  const form = $("#asking");
  let about = null, running = null;
  const run = new Run();

  const remember = later(() => {
    if (!$("[data-home=text]").hidden) writeAddress("text", written());
  }, 150);

  // ---- the form

  function written() {
    const settings = {};
    for (const name of FIELDS) {
      if (form[name].value !== "") settings[name] = form[name].value;
    }
    if (form.chat.checked) settings.chat = "yes";
    settings.controls = JSON.stringify(controls().map(({ kind, value, weight, negated }) => [kind, value, weight, negated ? 1 : 0]));
    return settings;
  }

  function read(given) {
    const missing = [];
    for (const name of FIELDS.filter((field) => given.has(field))) {
      const value = given.get(name), { options } = form[name];
      if (options && ![...options].some((option) => option.value === value)) missing.push(`the ${name} ${value}`);
      else form[name].value = value;
    }
    form.chat.checked = given.get("chat") === "yes";
    let asked = [];
    try {
      asked = JSON.parse(given.get("controls") ?? "[]").map(([kind, value, weight, negated]) => ({ kind, value, weight, negated: Boolean(negated) }));
    } catch {
      missing.push("its controls, for it was cut");
    }
    $("#controls").replaceChildren();
    for (const control of asked) {
      if (control.kind in about.classifiers || control.kind in about.patterns) addControl(control);
      else missing.push(`the control ${control.kind}`);
    }
    if (missing.length) $("#problem").textContent = `The link asks for what is not here: ${missing.join(", ")}.`;
  }

  const controls = () => [...$("#controls").children].map((row) => ({
    kind: $("[name=kind]", row).value,
    value: $("[name=value]", row).value,
    negated: $("[name=negated]", row).checked,
    weight: asNumber($("[name=weight]", row).value),
  }));

  function asked() {
    const number = (name) => asNumber(form[name].value);
    return {
      model: form.model.value, prompt: form.prompt.value, chat: form.chat.checked, system: form.system.value,
      finish: form.finish.value, stop: form.stop.value ? [form.stop.value] : [], max_tokens: number("max_tokens"), n: number("n"),
      sampler: form.sampler.value, warmup: form.warmup.value === "" ? null : number("warmup"), seed: number("seed"),
      controls: controls(),
    };
  }

  function addControl({ kind, value, weight, negated }) {
    const kinds = element("select", { name: "kind" });
    kinds.append(
      element("optgroup", { label: "says the classifier" }, ...Object.keys(about.classifiers).map((name) => element("option", {}, name))),
      element("optgroup", { label: "says the text" }, ...Object.keys(about.patterns).map((name) => element("option", {}, name))),
    );
    kinds.value = kind;
    const home = element("span");
    const weights = element("input", { name: "weight", inputmode: "decimal" });
    weights.value = weight;
    const not = element("input", { type: "checkbox", name: "negated" });
    not.checked = negated;
    const problem = element("p", { class: "problem", role: "status" });
    const remove = element("button", { type: "button", class: "quiet" }, "Remove");
    const row = element("fieldset", { class: "control" }, element("legend", { class: "unseen" }, "Control"),
      element("div", { class: "fields" }, element("label", {}, "what", kinds), element("label", {}, "which", home), element("label", {}, "weight", weights)),
      element("div", { class: "tail" }, element("label", {}, not, "not"), remove), problem);

    let checking = null;
    const check = later(async () => {
      checking?.abort();
      checking = new AbortController();
      const mine = checking.signal, [field] = home.children;
      const asked = { kind: kinds.value, value: field.value, negated: not.checked, weight: asNumber(weights.value) };
      let words = asked.value === "" ? "give a value" : "";
      try {
        if (!words) for await (const _ of events("api/check", asked, mine));
      } catch (error) {
        words = error.message;
      }
      if (mine.aborted) return;
      problem.textContent = words;
      const isWeight = /weight/.test(words);
      field.setAttribute("aria-invalid", String(Boolean(words) && !isWeight));
      weights.setAttribute("aria-invalid", String(isWeight));
    }, 300);

    function offer(value) {
      const labels = about.classifiers[kinds.value];
      const field = labels
        ? element("select", { name: "value" }, ...labels.map((label) => element("option", {}, label)))
        : element("input", { name: "value", maxlength: 200, spellcheck: "false", placeholder: about.patterns[kinds.value].split(": ").at(-1) });
      if (value !== undefined && (!labels || labels.includes(value))) field.value = value;
      home.replaceChildren(field);
      not.disabled = Boolean(labels);
      if (labels) not.checked = false;
    }
    offer(value);
    kinds.addEventListener("change", () => offer());
    row.addEventListener("input", () => {
      remember();
      check();
    });
    remove.addEventListener("click", () => {
      row.remove();
      remember();
      $("#add-control").focus();
    });
    $("#controls").append(row);
    return row;
  }

  function explain() {
    $("#model-words").textContent = capital(about.models[form.model.value]);
    $("#sampler-words").textContent = capital(about.samplers[form.sampler.value].words);
  }

  // ---- the run

  async function draw() {
    const mine = (running = new AbortController());
    $("#draw").disabled = true;
    $("#stop").disabled = false;
    $("#problem").textContent = "";
    const settings = asked();
    run.begin(settings);
    try {
      for await (const event of events("api/text", settings, mine.signal)) {
        if (mine.signal.aborted) break;
        run.hear(event);
      }
      run.end(mine.signal.aborted);
    } catch (error) {
      $("#problem").textContent = error.message;
      run.end(true);
    } finally {
      running = null;
      $("#draw").disabled = false;
      $("#stop").disabled = true;
    }
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) draw();
  });
  form.addEventListener("input", remember);
  form.addEventListener("change", explain);
  $("#stop").addEventListener("click", () => running?.abort());
  $("#add-control").addEventListener("click", () => {
    addControl({ kind: "keyword", value: "", weight: 1, negated: false }).querySelector("select").focus();
    remember();
  });

  async function load() {
    about = await offering;
    form.model.replaceChildren(...Object.keys(about.models).map((name) => element("option", {}, name)));
    form.sampler.replaceChildren(...Object.entries(about.samplers).map(([name, { is_exact: isExact }]) => element("option", { value: name }, isExact ? name : `${name} (not exact)`)));
    arrive();
  }

  function arrive() {
    if (!about) return;
    const given = readAddress("text");
    if (given) read(given);
    else if (!$("#controls").children.length) addControl(FIRST_CONTROL);
    explain();
    remember();
  }

  load().catch((error) => {
    $("#problem").textContent = `The server cannot say what it offers: ${error.message}`;
  });
  return { arrive, leave() {} };
}

// One run: what was drawn so far, and how it is shown.
class Run {
  constructor() {
    this.lines = [];
    $("#copy").addEventListener("click", () => copy(this.lines.map((line) => this.before(line.prompt) + line.text).join("\n\n"), `${this.lines.length} texts copied`));
    $("#download").addEventListener("click", () => this.download());
  }

  begin(settings) {
    Object.assign(this, { settings, lines: [], names: [], moving: null, offset: 0, began: performance.now() });
    $("#texts thead").replaceChildren();
    $("#texts tbody").replaceChildren();
    $("#said").replaceChildren();
    $("#chains").replaceChildren();
    $("#verdict").textContent = "";
    for (const id of ["figures", "chains-section", "probability"]) $(`#${id}`).hidden = true;
    $("#no-texts").hidden = false;
    $("#copy").disabled = $("#download").disabled = true;
    this.tell("Asking the server", null);
    $("#step").textContent = "";
  }

  hear(event) {
    const { kind } = event;
    if (kind === "waiting") this.tell(`Waiting for a turn, ${event.before} before this`, null);
    if (kind === "phase") this.tell(STAGES[event.stage] ?? event.stage, null);
    if (kind === "progress") this.tell(STAGES[event.stage] ?? capital(event.stage), event.share, left(event.left));
    if (kind === "note") this.tell(this.told, null, `: ${event.words}`);
    if (kind === "said") $("#said").append(element("li", {}, capital(event.words)));
    if (kind === "planned") this.plan(event);
    if (kind === "moving") this.move(event);
    if (kind === "texts") this.add(event.texts);
    if (kind === "probability") this.tellProbability(event);
  }

  // A text goes on from its prompt; what a model answers in a chat does not.
  before(prompt) {
    return this.settings.chat ? `${prompt} → ` : prompt;
  }

  plan({ sampler, is_exact: isExact, controls }) {
    this.names = controls;
    this.tell(`Drawing with ${sampler}${isExact ? "" : ", which is not exact"}`, null);
    const lines = { log_prob: { label: "mean", kind: "first" } };
    this.logProbs = new Chart($("#log-probs"), { lines, x: { from: 0, isWhole: true }, width: 360, height: 150, describe: "Mean log p of the chains by step" });
    const tags = Object.fromEntries(controls.map((name, i) => [name, { label: shortened(name), kind: i ? "" : "first" }]));
    this.probabilities = new Chart($("#probabilities"), { lines: tags, x: { from: 0, isWhole: true }, y: { from: 0, to: 1 }, width: 360, height: 150, describe: "Mean probability of each control by step" });
    $("#probabilities").parentElement.hidden = !controls.length;
  }

  move(event) {
    const home = $("#chains");
    $("#figures").hidden = $("#chains-section").hidden = false;
    if (this.moving && this.moving.first !== event.first) {
      this.offset += this.moving.steps;
      home.replaceChildren();
    }
    this.moving = event;
    while (home.children.length > event.pieces.length) home.lastChild.remove();
    while (home.children.length < event.pieces.length) home.append(element("li", {}, element("p"), element("small")));
    event.pieces.forEach((pieces, i) => {
      const [text, note] = home.children[i].children;
      relight(text, pieces, this.before(this.settings.prompt));
      const scores = Object.entries(event.controls).map(([name, values]) => `${shortened(name)} ${share(values[i])}`);
      note.textContent = [...scores, `log p ${short(event.log_probs[i])}`].join(" · ");
    });
    const heights = [...home.children].map((chain) => chain.offsetHeight);
    heights.forEach((height, i) => (home.children[i].style.minHeight = `${height}px`)); // cards grow with their texts, and stay
    $("#step").textContent = `: step ${event.step} of ${event.steps}`;
    const step = this.offset + event.step;
    this.logProbs.add(step, { log_prob: mean(event.log_probs) });
    this.probabilities.add(step, Object.fromEntries(Object.entries(event.controls).map(([name, values]) => [name, mean(values)])));
  }

  add(texts) {
    if (this.moving && texts.some((text) => text.index === this.moving.first)) {
      this.offset += this.moving.steps;
      this.moving = null; // these chains are done
    }
    const controls = this.names, heads = ["log p", ...controls];
    if (!$("#texts thead").children.length) {
      const cells = heads.map((name) => element("th", { scope: "col", class: "number" }, name));
      $("#texts thead").append(element("tr", {}, element("th", { scope: "col" }, "Text"), ...cells));
    }
    for (const line of texts) {
      this.lines.push(line);
      const words = element("td", { class: "words" }, element("span", { class: "asked" }, this.before(line.prompt)), line.text);
      if (line.stopped_at !== undefined) words.append(element("small", {}, `stopped at step ${line.stopped_at} of ${line.steps}`));
      const numbers = [short(line.log_prob), ...controls.map((name) => share(line[name]))];
      $("#texts tbody").append(element("tr", {}, words, ...numbers.map((value, i) => element("td", { class: "number", "data-name": heads[i] }, value))));
    }
    $("#no-texts").hidden = true;
    $("#copy").disabled = $("#download").disabled = false;
    if (this.lines.length < this.settings.n) this.tell(`${this.lines.length} of ${this.settings.n} texts`, this.lines.length / this.settings.n);
  }

  tellProbability({ words, effective_share: worth, verdict }) {
    const entries = { "How probable the model makes this: P(controls)": words, "Effective share of the texts weighed": share(worth) };
    $("#probability").replaceChildren(...Object.entries(entries).map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
    $("#probability").hidden = false;
    $("#verdict").textContent = capital(verdict);
  }

  // Chains that were stopped on their way are kept, and say so.
  end(isStopped) {
    const { moving } = this;
    if (isStopped && moving) {
      this.moving = null;
      this.add(moving.pieces.map((pieces, i) => ({
        index: moving.first + i, prompt: this.settings.prompt, text: pieces.join(""), log_prob: moving.log_probs[i],
        ...Object.fromEntries(Object.entries(moving.controls).map(([name, values]) => [name, values[i]])),
        stopped_at: moving.step, steps: moving.steps,
      })));
    }
    $("#chains-section").hidden = true;
    const seconds = ((performance.now() - this.began) / 1000).toFixed(1);
    const count = `${this.lines.length} text${this.lines.length === 1 ? "" : "s"}`;
    if (isStopped && !this.lines.length) this.tell("Nothing was drawn.", 0);
    else this.tell(`${isStopped ? "Stopped" : "Done"}: ${count} in ${seconds} s`, isStopped ? 0 : 1);
  }

  // What is being done, how much of it is (null: nobody knows), and what is added on the screen alone.
  tell(words, part, added = "") {
    this.told = words;
    $("#status").textContent = words + added;
    speak(words);
    const bar = $("#progress");
    if (part === null) bar.removeAttribute("value");
    else bar.value = part;
  }

  download() {
    const lines = this.lines.map((line) => `${JSON.stringify(line)}\n`).join("");
    const address = URL.createObjectURL(new Blob([lines], { type: "application/jsonl" }));
    element("a", { href: address, download: "texts.jsonl" }).click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
    toast(`${this.lines.length} texts downloaded`);
  }
}

// Tokens that are not what they were at their position light up.
function relight(home, pieces, prompt) {
  if (!home.children.length) home.append(element("span", { class: "asked" }, prompt));
  while (home.children.length > pieces.length + 1) home.lastChild.remove();
  const isFirst = home.children.length === 1;
  pieces.forEach((piece, i) => {
    const old = home.children[i + 1];
    if (old?.textContent === piece) return;
    const token = element("span", { class: isFirst ? null : "lit" }, piece);
    if (old) old.replaceWith(token);
    else home.append(token);
  });
}

// What is no number is sent as it was written: the server says what is wrong with it.
const asNumber = (written) => (written.trim() !== "" && Number.isFinite(Number(written)) ? Number(written) : written);
const capital = (words) => words.charAt(0).toUpperCase() + words.slice(1);
const shortened = (name) => (name.length > 14 ? `${name.slice(0, 13)}…` : name);
const short = (value) => (value === null || value === undefined ? "–" : value.toFixed(2));
const share = (value) => (value === null || value === undefined ? "–" : value > 0 && value < 0.001 ? value.toExponential(1) : value.toFixed(3));

function mean(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((a, b) => a + b) / known.length : null;
}

function left(seconds) {
  if (seconds === null || seconds === undefined) return "";
  return seconds < 90 ? `, about ${Math.max(1, Math.round(seconds))} s left` : `, about ${Math.round(seconds / 60)} min left`;
}
