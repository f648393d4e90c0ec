// Samplers side by side: their points, their shares beside the truth, and how far they are from it.

import { $, drawn, element, speak } from "./dom.js";
import { Chart } from "./chart.js";
import { drawCells } from "./plane.js";
import { events } from "./stream.js";

const SAMPLERS = { svs: "SVS", "svs-paper": "SVS.paper", hmc: "HMC", langevin: "Langevin", mucola: "MuCoLa" };
const FLOOR = "floor"; // the divergence of as many independent draws

export function openRace(scene, shares) {
  const lines = Object.fromEntries(Object.entries(SAMPLERS).map(([name, label], i) => [name, { label, kind: i ? "" : "first" }]));
  lines[FLOOR] = { label: FLOOR, kind: "floor" };
  const chart = new Chart($("#curve"), {
    lines, x: { log: true, from: 1, empty: [1, 100] }, y: { log: true, empty: [1e-5, 0.1] }, height: 400, describe: "Divergence from the truth: nothing was run yet",
  });
  const minis = Object.fromEntries(Object.entries(SAMPLERS).map(([name, label]) => [name, new Mini(label)]));
  const words = element("p", { class: "hint mini-words" }, "Points: where 32 of the chains are. Bars: the share of each token among the draws. Lines: its probability.");
  $("#minis").replaceChildren(...Object.values(minis).map((mini) => mini.home), words);
  let running = null;

  function forget() {
    running?.abort();
    chart.clear();
    chart.tell("Divergence from the truth: nothing was run yet");
    $("#race-status").textContent = "";
    $("#race-problem").textContent = "";
    for (const mini of Object.values(minis)) mini.reset(scene.points, shares());
  }

  async function run() {
    forget();
    const { points, weights, walls, scale, turn, guidance, step_size, seed } = scene;
    const mine = (running = new AbortController());
    const form = { points, weights, walls, scale, turn, guidance, step_size, seed };
    $("#run").textContent = "Stop";
    $("#race-status").textContent = "setting out";
    speak("The samplers are running");
    let last = null;
    try {
      for await (const event of events("api/race", form, mine.signal)) {
        if (mine.signal.aborted) break;
        if (event.kind === "waiting") $("#race-status").textContent = `waiting for a turn, ${event.before} before this`;
        if (event.kind === "points") {
          $("#race-status").textContent = `step ${event.step} of ${event.steps}`;
          for (const [name, mini] of Object.entries(minis)) mini.move(event.points[name]);
        }
        if (event.kind === "divergence") {
          last = event;
          chart.add(event.step, { ...event.js, [FLOOR]: event.floor });
          for (const [name, mini] of Object.entries(minis)) mini.weigh(event.shares[name], event.js[name] / event.floor);
        }
      }
    } catch (error) {
      $("#race-problem").textContent = error.message;
    } finally {
      if (running === mine) {
        running = null;
        $("#run").textContent = "Run";
        if (last) {
          $("#race-status").textContent = `${mine.signal.aborted ? "stopped" : "done"} after ${last.draws.toLocaleString("en")} draws`;
          const each = Object.entries(SAMPLERS).map(([name, label]) => `${label} ${last.js[name].toExponential(1)}`);
          const said = `Divergence from the truth after ${last.step} steps: ${each.join(", ")}; independent draws ${last.floor.toExponential(1)}`;
          chart.tell(said);
          speak(said);
        }
      }
    }
  }

  $("#run").addEventListener("click", () => {
    if (running) running.abort();
    else run();
  });
  return { forget };
}

class Mini {
  constructor(label) {
    this.cells = drawn("g");
    this.dots = drawn("g");
    this.bars = drawn("svg", { class: "bars", viewBox: "0 0 120 40", "aria-hidden": "true" });
    this.number = element("span");
    this.home = element("div", { class: "mini" }, element("h3", {}, label, this.number),
      drawn("svg", { class: "field", viewBox: "-2.4 -2.4 4.8 4.8", "aria-hidden": "true" }, this.cells, this.dots), this.bars);
  }

  reset(points, truth) {
    drawCells(this.cells, points, truth);
    this.dots.replaceChildren();
    this.truth = truth;
    this.number.textContent = "–";
    this.weigh(truth.map(() => 0), null);
  }

  move(points) {
    while (this.dots.children.length < points.length) this.dots.append(drawn("circle", { class: "dot", r: 0.045 }));
    points.forEach(([x, y], i) => {
      this.dots.children[i].setAttribute("cx", x);
      this.dots.children[i].setAttribute("cy", -y);
    });
  }

  weigh(shares, times) {
    const most = Math.max(...this.truth, ...shares), width = 120 / shares.length;
    this.bars.replaceChildren(...shares.flatMap((share, i) => {
      const high = (value) => 38 * value / most;
      return [
        drawn("rect", { class: "share", x: i * width + 1, width: width - 2, y: 40 - high(share), height: high(share) }),
        drawn("line", { class: "truth", x1: i * width, x2: (i + 1) * width, y1: 40 - high(this.truth[i]), y2: 40 - high(this.truth[i]) }),
      ];
    }));
    if (times !== null) this.number.textContent = `${times < 10 ? times.toFixed(1) : Math.round(times).toLocaleString("en")} × floor`;
  }
}
