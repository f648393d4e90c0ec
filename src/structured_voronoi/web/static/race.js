// Comparison of samplers: their points, the shares of their draws, and their divergence from the distribution.

import { $, announce, drawn, element } from "./dom.js";
import { Chart } from "./chart.js";
import { drawCells } from "./plane.js";
import { events } from "./stream.js";

const SAMPLERS = { svs: "SVS", "svs-paper": "SVS.paper", hmc: "HMC", langevin: "Langevin", mucola: "MuCoLa" };
const FLOOR = "floor"; // divergence of the same number of independent draws

export function openRace(scene, shares) {
  const lines = Object.fromEntries(Object.entries(SAMPLERS).map(([name, label], i) => [name, { label, kind: i ? "" : "first" }]));
  lines[FLOOR] = { label: FLOOR, kind: "floor" };
  const chart = new Chart($("#curve"), {
    lines, x: { log: true, from: 1, empty: [1, 100] }, y: { log: true, empty: [1e-5, 0.1] }, height: 400, description: "Divergence from the distribution: not run yet",
  });
  const minis = Object.fromEntries(Object.entries(SAMPLERS).map(([name, label]) => [name, new Mini(label)]));
  const help = element("p", { class: "hint mini-words" }, "Points: positions of 32 chains. Bars: share of each token among the draws. Lines: its probability.");
  $("#minis").replaceChildren(...Object.values(minis).map((mini) => mini.root), help);
  let running = null;

  function reset() {
    running?.abort();
    chart.clear();
    chart.describe("Divergence from the distribution: not run yet");
    $("#race-status").textContent = "";
    $("#race-problem").textContent = "";
    for (const mini of Object.values(minis)) mini.reset(scene.points, shares());
  }

  async function run() {
    reset();
    const { points, weights, walls, scale, turn, guidance, step_size, seed } = scene;
    const controller = (running = new AbortController());
    const form = { points, weights, walls, scale, turn, guidance, step_size, seed };
    $("#run").textContent = "Stop";
    $("#race-status").textContent = "starting";
    announce("The samplers are running");
    let last = null;
    try {
      for await (const event of events("api/race", form, controller.signal)) {
        if (controller.signal.aborted) break;
        if (event.kind === "waiting") $("#race-status").textContent = `waiting, ${event.before} jobs before this one`;
        if (event.kind === "points") {
          $("#race-status").textContent = `step ${event.step} of ${event.steps}`;
          for (const [name, mini] of Object.entries(minis)) mini.move(event.points[name]);
        }
        if (event.kind === "divergence") {
          last = event;
          chart.add(event.step, { ...event.js, [FLOOR]: event.floor });
          for (const [name, mini] of Object.entries(minis)) mini.drawShares(event.shares[name], event.js[name] / event.floor);
        }
      }
    } catch (error) {
      $("#race-problem").textContent = error.message;
    } finally {
      if (running === controller) {
        running = null;
        $("#run").textContent = "Run";
        if (last) {
          $("#race-status").textContent = `${controller.signal.aborted ? "stopped" : "done"} after ${last.draws.toLocaleString("en")} draws`;
          const each = Object.entries(SAMPLERS).map(([name, label]) => `${label} ${last.js[name].toExponential(1)}`);
          const summary = `Divergence from the distribution after ${last.step} steps: ${each.join(", ")}; independent draws ${last.floor.toExponential(1)}`;
          chart.describe(summary);
          announce(summary);
        }
      }
    }
  }

  $("#run").addEventListener("click", () => {
    if (running) running.abort();
    else run();
  });
  return { reset };
}

class Mini {
  constructor(label) {
    this.cells = drawn("g");
    this.dots = drawn("g");
    this.bars = drawn("svg", { class: "bars", viewBox: "0 0 120 40", "aria-hidden": "true" });
    this.number = element("span");
    this.root = element("div", { class: "mini" }, element("h3", {}, label, this.number),
      drawn("svg", { class: "field", viewBox: "-2.4 -2.4 4.8 4.8", "aria-hidden": "true" }, this.cells, this.dots), this.bars);
  }

  reset(points, truth) {
    drawCells(this.cells, points, truth);
    this.dots.replaceChildren();
    this.truth = truth;
    this.number.textContent = "–";
    this.drawShares(truth.map(() => 0), null);
  }

  move(points) {
    while (this.dots.children.length < points.length) this.dots.append(drawn("circle", { class: "dot", r: 0.045 }));
    points.forEach(([x, y], i) => {
      this.dots.children[i].setAttribute("cx", x);
      this.dots.children[i].setAttribute("cy", -y);
    });
  }

  drawShares(shares, ratio) {
    const largest = Math.max(...this.truth, ...shares), width = 120 / shares.length;
    this.bars.replaceChildren(...shares.flatMap((share, i) => {
      const height = (value) => 38 * value / largest;
      return [
        drawn("rect", { class: "share", x: i * width + 1, width: width - 2, y: 40 - height(share), height: height(share) }),
        drawn("line", { class: "truth", x1: i * width, x2: (i + 1) * width, y1: 40 - height(this.truth[i]), y2: 40 - height(this.truth[i]) }),
      ];
    }));
    if (ratio !== null) this.number.textContent = `${ratio < 10 ? ratio.toFixed(1) : Math.round(ratio).toLocaleString("en")} × floor`;
  }
}
