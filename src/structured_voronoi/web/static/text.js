// The text tab: the form and its controls.

import { $, capital, debounce, element, readAddress, writeAddress } from "./dom.js";
import { Run } from "./run.js";
import { events } from "./stream.js";

const FIELDS = ["model", "prompt", "n", "max_tokens", "sampler", "finish", "stop", "system", "seed", "warmup"];
const DEFAULT_CONTROL = { kind: "food", value: "Italian", weight: 1, negated: false };

export function openText(choices) {
  const form = $("#request");
  let about = null, running = null;
  const run = new Run();

  const saveSettings = debounce(() => {
    if (!$("[data-tab-panel=text]").hidden) writeAddress("text", settingsOfForm());
  }, 150);

  // ---- the form

  function settingsOfForm() {
    const settings = {};
    for (const name of FIELDS) {
      if (form[name].value !== "") settings[name] = form[name].value;
    }
    if (form.chat.checked) settings.chat = "yes";
    settings.controls = JSON.stringify(controls().map(({ kind, value, weight, negated }) => [kind, value, weight, negated ? 1 : 0]));
    return settings;
  }

  function restore(saved) {
    const missing = [];
    for (const name of FIELDS.filter((field) => saved.has(field))) {
      const value = saved.get(name), { options } = form[name];
      if (options && ![...options].some((option) => option.value === value)) missing.push(`the ${name} ${value}`);
      else form[name].value = value;
    }
    form.chat.checked = saved.get("chat") === "yes";
    let restored = [];
    try {
      restored = JSON.parse(saved.get("controls") ?? "[]").map(([kind, value, weight, negated]) => ({ kind, value, weight, negated: Boolean(negated) }));
    } catch {
      missing.push("the controls (the link is incomplete)");
    }
    $("#controls").replaceChildren();
    for (const control of restored) {
      if (control.kind in about.classifiers || control.kind in about.patterns) addControl(control);
      else missing.push(`the control ${control.kind}`);
    }
    if (missing.length) $("#problem").textContent = `Not available here: ${missing.join(", ")}.`;
  }

  const controls = () => [...$("#controls").children].map((row) => ({
    kind: $("[name=kind]", row).value,
    value: $("[name=value]", row).value,
    negated: $("[name=negated]", row).checked,
    weight: asNumber($("[name=weight]", row).value),
  }));

  function requestOfForm() {
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
      element("optgroup", { label: "classifiers" }, ...Object.keys(about.classifiers).map((name) => element("option", {}, name))),
      element("optgroup", { label: "patterns" }, ...Object.keys(about.patterns).map((name) => element("option", {}, name))),
    );
    kinds.value = kind;
    const valueField = element("span");
    const weights = element("input", { name: "weight", inputmode: "decimal" });
    weights.value = weight;
    const not = element("input", { type: "checkbox", name: "negated" });
    not.checked = negated;
    const problem = element("p", { class: "problem", role: "status" });
    const remove = element("button", { type: "button", class: "quiet" }, "Remove");
    const row = element("fieldset", { class: "control" }, element("legend", { class: "visually-hidden" }, "Control"),
      element("div", { class: "fields" }, element("label", {}, "kind", kinds), element("label", {}, "value", valueField), element("label", {}, "weight", weights)),
      element("div", { class: "tail" }, element("label", {}, not, "not"), remove), problem);

    let checking = null;
    const check = debounce(async () => {
      checking?.abort();
      checking = new AbortController();
      const { signal } = checking, [field] = valueField.children;
      const control = { kind: kinds.value, value: field.value, negated: not.checked, weight: asNumber(weights.value) };
      let error = control.value === "" ? { message: "enter a value", field: "value" } : null;
      try {
        if (!error) for await (const _ of events("api/check", control, signal));
      } catch (caught) {
        error = caught;
      }
      if (signal.aborted) return;
      problem.textContent = error?.message ?? "";
      const isWeight = error?.field === "weight";
      field.setAttribute("aria-invalid", String(error !== null && !isWeight));
      weights.setAttribute("aria-invalid", String(isWeight));
    }, 300);

    function showValueField(value) {
      const labels = about.classifiers[kinds.value];
      const field = labels
        ? element("select", { name: "value" }, ...labels.map((label) => element("option", {}, label)))
        : element("input", { name: "value", maxlength: 200, spellcheck: "false", placeholder: about.patterns[kinds.value] });
      if (value !== undefined && (!labels || labels.includes(value))) field.value = value;
      valueField.replaceChildren(field);
      not.disabled = Boolean(labels);
      if (labels) not.checked = false;
    }
    showValueField(value);
    kinds.addEventListener("change", () => showValueField());
    row.addEventListener("input", () => {
      saveSettings();
      check();
    });
    remove.addEventListener("click", () => {
      row.remove();
      saveSettings();
      $("#add-control").focus();
    });
    $("#controls").append(row);
    return row;
  }

  function describeChoices() {
    $("#model-help").textContent = capital(about.models[form.model.value]);
    $("#sampler-help").textContent = capital(about.samplers[form.sampler.value].description);
  }

  // ---- the run

  async function draw() {
    const controller = (running = new AbortController());
    $("#draw").disabled = true;
    $("#stop").disabled = false;
    $("#problem").textContent = "";
    const settings = requestOfForm();
    run.begin(settings);
    try {
      for await (const event of events("api/text", settings, controller.signal)) {
        if (controller.signal.aborted) break;
        run.handle(event);
      }
      run.end(controller.signal.aborted);
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
  form.addEventListener("input", saveSettings);
  form.addEventListener("change", describeChoices);
  $("#stop").addEventListener("click", () => running?.abort());
  $("#add-control").addEventListener("click", () => {
    addControl({ kind: "keyword", value: "", weight: 1, negated: false }).querySelector("select").focus();
    saveSettings();
  });

  async function load() {
    about = await choices;
    form.model.replaceChildren(...Object.keys(about.models).map((name) => element("option", {}, name)));
    form.sampler.replaceChildren(...Object.entries(about.samplers).map(([name, { is_exact: isExact }]) => element("option", { value: name }, isExact ? name : `${name} (not exact)`)));
    open();
  }

  function open() {
    if (!about) return;
    const saved = readAddress("text");
    if (saved) restore(saved);
    else if (!$("#controls").children.length) addControl(DEFAULT_CONTROL);
    describeChoices();
    saveSettings();
  }

  load().catch((error) => {
    $("#problem").textContent = `The choices could not be loaded: ${error.message}`;
  });
  return { open, close() {} };
}

// Text that is not a number is sent unchanged: the server returns an error for the field.
const asNumber = (text) => (text.trim() !== "" && Number.isFinite(Number(text)) ? Number(text) : text);
