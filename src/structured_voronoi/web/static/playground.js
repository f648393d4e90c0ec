// The playground: draggable points in the plane and a particle on trajectories computed by the server.

import { $, debounce, drawn, element, readAddress, set, writeAddress } from "./dom.js";
import { bisector, drawCells, letter, onScreen } from "./plane.js";
import { openRace } from "./race.js";
import { events } from "./stream.js";

const DEFAULT_SCENE = {
  points: [[-1.2, 0.9], [0.1, 1.3], [1.4, 0.4], [0.3, -0.2], [-0.7, -1.1], [1.1, -1.3]],
  weights: [5, 20, 30, 8, 25, 12],
  walls: "open", scale: 0.6, turn: 2, guidance: 0, step_size: 1, seed: 0,
};
const NUMBERS = ["scale", "turn", "guidance", "step_size", "seed"];
const MIN_POINTS = 3, MAX_POINTS = 12, MAX_COORDINATE = 1.92, MIN_DISTANCE = 0.08;
const MAX_TRAILS = 3; // trajectories that stay visible
const VISIBLE_EXTENT = 2.34; // largest coordinate at which the particle is drawn
const WALLS = {
  open: "With too little energy, the particle passes the wall and the token stays the same. Exact.",
  closed: "With too little energy, the particle is reflected. Exact up to the error of the estimated cell masses.",
  equal: "With too little energy, the particle is reflected. All cells are taken as equally large, as in the paper: biased.",
};

const EVENTS = {
  refraction: (leg) => `Enough energy: the particle refracts at the wall between ${letter(leg.cell)} and ${letter(leg.wall)}. The token changes to ${letter(leg.wall)}.`,
  reflection: (leg) => `Too little energy for ${letter(leg.wall)}: the wall reflects the particle. The token stays ${letter(leg.cell)}.`,
  passage: (leg) => `Too little energy for ${letter(leg.wall)}: the particle passes the open wall. The token stays ${letter(leg.cell)}.`,
  end: (leg, walls) => `The trajectory ends; the draw is ${letter(leg.cell)}. Next: ${walls === "open" ? `a new point near ${letter(leg.cell)} and a new momentum` : "a new momentum"}.`,
};

export function openPlayground() {
  const scene = structuredClone(DEFAULT_SCENE);
  const layers = Object.fromEntries(["cells", "outline", "gate", "trails", "knobs", "particle"].map((name) => [name, drawn("g")]));
  const svg = $("#plane"), form = $("#scene");
  svg.append(...Object.values(layers));
  const particle = drawn("circle", { class: "particle", r: 0.055 });
  layers.particle.append(particle);
  layers.outline.append(drawn("polygon", { class: "outline" }));

  const shares = () => scene.weights.map((weight) => weight / scene.weights.reduce((a, b) => a + b));
  const animation = new Animation(scene, layers, particle);
  const race = openRace(scene, shares);

  const restart = debounce(() => {
    writeAddress("playground", serialize(scene));
    animation.restart();
  }, 60);

  function changed() {
    drawCells(layers.cells, scene.points, shares());
    drawKnobs();
    drawWeights();
    $("#count").textContent = `${scene.points.length} tokens`;
    $("#fewer").disabled = scene.points.length <= MIN_POINTS;
    $("#more").disabled = scene.points.length >= MAX_POINTS;
    form.walls.value = scene.walls;
    $("#walls-help").textContent = WALLS[scene.walls];
    for (const name of ["scale", "turn", "guidance", "step_size"]) {
      (name === "step_size" ? $("#step-size") : form[name]).value = scene[name];
      $(`[data-of=${name}]`).textContent = scene[name].toFixed(2).replace(/0$/, "");
    }
    animation.clear();
    race.reset();
    restart();
  }

  function drawKnobs() {
    while (layers.knobs.children.length > scene.points.length) layers.knobs.lastChild.remove();
    while (layers.knobs.children.length < scene.points.length) layers.knobs.append(makeKnob(layers.knobs.children.length));
    scene.points.forEach(([x, y], i) => {
      const knob = layers.knobs.children[i], percent = `${(100 * shares()[i]).toFixed(0)} %`;
      set(knob, { transform: `translate(${x} ${-y})`, "aria-label": `${letter(i)} ${percent}, token at ${x.toFixed(2)}, ${y.toFixed(2)}` });
      knob.lastChild.textContent = `${letter(i)} ${percent}`;
    });
  }

  function makeKnob(i) {
    const knob = drawn("g", { class: "knob", tabindex: 0, role: "button", "data-token": i },
      drawn("circle", { class: "halo", r: 0.15 }), drawn("circle", { r: 0.035 }), drawn("text", { y: -0.09 }));
    const moveTo = (x, y) => {
      const point = [x, y].map((value) => Math.round(100 * Math.min(MAX_COORDINATE, Math.max(-MAX_COORDINATE, value))) / 100);
      if (scene.points.some((other, j) => j !== i && Math.hypot(other[0] - point[0], other[1] - point[1]) < MIN_DISTANCE)) return;
      scene.points[i] = point;
      changed();
    };
    knob.addEventListener("pointerdown", (event) => {
      knob.setPointerCapture(event.pointerId);
      event.preventDefault();
      knob.focus({ preventScroll: true, focusVisible: false });
    });
    knob.addEventListener("pointermove", (event) => {
      if (!knob.hasPointerCapture(event.pointerId)) return;
      const place = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      moveTo(place.x, -place.y);
    });
    knob.addEventListener("keydown", (event) => {
      const direction = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
      if (!direction) return;
      event.preventDefault();
      const length = event.shiftKey ? 0.25 : 0.05, [x, y] = scene.points[i];
      moveTo(x + direction[0] * length, y + direction[1] * length);
    });
    return knob;
  }

  function drawWeights() {
    const list = $("#weights");
    while (list.children.length > scene.weights.length) list.lastChild.remove();
    while (list.children.length < scene.weights.length) {
      const i = list.children.length;
      const slider = element("input", { type: "range", min: 0, max: 3, step: 0.01, "aria-label": `Weight of token ${letter(i)}` });
      slider.addEventListener("input", () => {
        scene.weights[i] = Number((10 ** (Number(slider.value) - 1)).toPrecision(3));
        changed();
      });
      list.append(element("label", {}, element("b", {}, letter(i)), slider, element("output")));
    }
    scene.weights.forEach((weight, i) => {
      const [, slider, output] = list.children[i].children;
      if (document.activeElement !== slider) slider.value = Math.log10(weight) + 1;
      output.textContent = `${(100 * shares()[i]).toFixed(1)} %`;
      slider.setAttribute("aria-valuetext", output.textContent);
    });
  }

  function findFreePlace() { // the farthest from the other points of 40 random places
    let best, largest = -1;
    for (let i = 0; i < 40; i++) {
      const place = [0, 1].map(() => Math.round(100 * (Math.random() * 3.4 - 1.7)) / 100);
      const gap = Math.min(...scene.points.map((other) => Math.hypot(other[0] - place[0], other[1] - place[1])), 9);
      if (gap > largest) [best, largest] = [place, gap];
    }
    return best;
  }

  $("#more").addEventListener("click", () => {
    scene.points.push(findFreePlace());
    scene.weights.push(10);
    changed();
  });
  $("#fewer").addEventListener("click", () => {
    scene.points.pop();
    scene.weights.pop();
    changed();
  });
  $("#scatter").addEventListener("click", () => {
    const count = scene.points.length;
    scene.points = [];
    while (scene.points.length < count) scene.points.push(findFreePlace());
    scene.weights = scene.weights.map(() => Number((10 ** (Math.random() * 1.3 + 0.3)).toPrecision(2)));
    changed();
  });
  $("#reset").addEventListener("click", () => {
    Object.assign(scene, structuredClone(DEFAULT_SCENE));
    changed();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.walls.addEventListener("change", () => {
    scene.walls = form.walls.value;
    changed();
  });
  for (const name of ["scale", "turn", "guidance"]) {
    form[name].addEventListener("input", () => {
      scene[name] = Number(form[name].value);
      changed();
    });
  }
  $("#step-size").addEventListener("input", (event) => {
    scene.step_size = Number(event.target.value);
    $("[data-of=step_size]").textContent = scene.step_size.toFixed(1);
    race.reset();
    writeAddress("playground", serialize(scene));
  });

  function open() {
    const given = readAddress("playground");
    if (!given) writeAddress("playground", serialize(scene));
    else if (given.toString() !== new URLSearchParams(serialize(scene)).toString()) {
      Object.assign(scene, structuredClone(DEFAULT_SCENE), parse(given));
      changed();
    }
    animation.play(animation.isWanted);
  }
  changed();
  open();
  return { open, close: () => animation.play(false, true) };
}

// The particle, its trails and the description of the last event.
class Animation {
  constructor(scene, layers, particle) {
    Object.assign(this, { scene, layers, particle, isWanted: !matchMedia("(prefers-reduced-motion: reduce)").matches });
    this.isPlaying = false;
    this.clear();
    $("#play").addEventListener("click", () => this.play((this.isWanted = !this.isPlaying)));
    $("#next").addEventListener("click", () => {
      this.play((this.isWanted = false));
      this.finishLeg();
    });
  }

  clear() {
    this.controller?.abort();
    this.isReady = false;
    this.queue = [];
    this.trajectory = null;
    this.layers.trails.replaceChildren();
    this.layers.gate.replaceChildren();
    this.layers.outline.firstChild.setAttribute("points", "");
    this.particle.setAttribute("visibility", "hidden");
  }

  restart() {
    this.clear();
    this.isReady = true;
    this.cell = Math.min(this.cell ?? 0, this.scene.points.length - 1);
    this.seed = this.scene.seed;
    $("#story").textContent = this.isWanted ? "…" : "Press Play or Next event.";
    this.fetch();
  }

  async fetch() {
    const controller = (this.controller = new AbortController());
    const { points, weights, walls, scale, turn, guidance } = this.scene;
    const form = { points, weights, walls, scale, turn, guidance, seed: this.seed++, start: this.cell, count: 12 };
    try {
      for await (const event of events("api/trajectories", form, controller.signal)) {
        if (controller.signal.aborted || event.kind !== "trajectory") continue;
        this.cell = event.cell;
        if (event.legs.length) this.queue.push(event.legs);
        if (!this.trajectory) this.begin();
      }
    } catch (error) {
      $("#story").textContent = `No trajectories: ${error.message}`;
    } finally {
      if (this.controller === controller) this.controller = null;
    }
  }

  begin() {
    if (this.isReady && this.queue.length < 5 && !this.controller) this.fetch();
    this.trajectory = this.queue.shift() ?? null;
    if (!this.trajectory) return;
    [this.leg, this.angle] = [0, 0];
    this.path = "";
    this.trail = drawn("g", {}, drawn("path", { class: "trail" }));
    for (const old of this.layers.trails.children) {
      old.classList.add("old");
      old.firstChild.classList.add("old");
    }
    this.layers.trails.append(this.trail);
    while (this.layers.trails.children.length > MAX_TRAILS) this.layers.trails.firstChild.remove();
    this.particle.setAttribute("visibility", "visible");
    this.draw();
  }

  place(leg, angle) {
    return [0, 1].map((k) => leg.centre[k] + leg.a[k] * Math.cos(angle) + leg.b[k] * Math.sin(angle));
  }

  draw() {
    const leg = this.trajectory[this.leg], at = this.place(leg, this.angle);
    const visible = at.map((value) => Math.max(-VISIBLE_EXTENT, Math.min(VISIBLE_EXTENT, value))); // it may leave the picture
    set(this.particle, { cx: visible[0].toFixed(3), cy: (-visible[1]).toFixed(3) });
    this.particle.classList.toggle("beyond", visible.some((value, k) => value !== at[k]));
    this.path += `${this.path ? "L" : "M"}${onScreen(at)}`;
    this.trail.firstChild.setAttribute("d", this.path);
    this.layers.outline.firstChild.setAttribute("points", this.layers.cells.children[leg.cell].getAttribute("points"));
  }

  // Moves on by an angle, through one or more legs.
  advance(angle) {
    while (this.trajectory) {
      const leg = this.trajectory[this.leg], left = leg.angle - this.angle, step = Math.min(angle, left, 0.05);
      this.angle += step;
      angle -= step;
      this.draw();
      if (this.angle >= leg.angle - 1e-12) this.showEvent(leg);
      if (angle <= 1e-12) return;
    }
    this.begin();
  }

  finishLeg() {
    if (!this.trajectory) this.begin();
    if (!this.trajectory) return;
    const leg = this.trajectory[this.leg];
    while (this.angle < leg.angle) {
      this.angle = Math.min(leg.angle, this.angle + 0.05);
      this.draw();
    }
    this.showEvent(leg);
  }

  showEvent(leg) {
    const at = this.place(leg, leg.angle);
    $("#story").textContent = leg.wall < 0 && leg.meets !== "end" ? "The edge of the plane reflects the particle." : EVENTS[leg.meets](leg, this.scene.walls);
    this.layers.gate.replaceChildren();
    if (leg.meets !== "end") {
      this.trail.append(mark(leg.meets, at));
      if (leg.wall >= 0) {
        const [from, to] = bisector(this.scene.points[leg.cell], this.scene.points[leg.wall]);
        this.layers.gate.append(drawn("line", { class: "gate", x1: from[0], y1: -from[1], x2: to[0], y2: -to[1] }));
      }
    }
    [this.leg, this.angle] = [this.leg + 1, 0];
    if (this.leg >= this.trajectory.length) this.begin();
    else this.draw();
  }

  play(isPlaying, isClosing = false) {
    this.isPlaying = isPlaying;
    if (!isClosing) $("#play").textContent = isPlaying ? "Pause" : "Play";
    $("#story").setAttribute("aria-live", isPlaying ? "off" : "polite"); // screen readers read each event
    cancelAnimationFrame(this.frame);
    let previous = null;
    const tick = (now) => {
      const elapsed = previous === null ? 0 : Math.min(0.1, (now - previous) / 1000);
      previous = now;
      if (this.trajectory) this.advance(elapsed * 2 ** Number($("#speed").value));
      else if (!this.controller) this.begin();
      if (this.isPlaying) this.frame = requestAnimationFrame(tick);
    };
    if (isPlaying) this.frame = requestAnimationFrame(tick);
  }
}

function mark(kind, [x, y]) {
  if (kind === "reflection") return drawn("rect", { class: "event reflection", x: x - 0.03, y: -y - 0.03, width: 0.06, height: 0.06 });
  return drawn("circle", { class: `event ${kind}`, cx: x, cy: -y, r: kind === "refraction" ? 0.038 : 0.025 });
}

function serialize(scene) {
  const settings = { points: scene.points.map((point) => point.join(",")).join(";"), weights: scene.weights.join(","), walls: scene.walls };
  for (const name of NUMBERS) settings[name] = scene[name];
  return settings;
}

function parse(given) {
  const found = {};
  const points = given.get("points")?.split(";").map((pair) => pair.split(",").map(Number));
  const weights = given.get("weights")?.split(",").map(Number);
  const isScene = points && weights?.length === points.length && points.length >= MIN_POINTS && points.length <= MAX_POINTS
    && points.every((pair) => pair.length === 2 && pair.every((value) => Math.abs(value) <= 2)) && weights.every((weight) => weight > 0);
  if (isScene) Object.assign(found, { points, weights });
  if (given.get("walls") in WALLS) found.walls = given.get("walls");
  for (const name of NUMBERS) {
    if (given.has(name) && Number.isFinite(Number(given.get(name)))) found[name] = Number(given.get(name));
  }
  return found;
}
