// Line charts with labels at the ends of the lines.

import { drawn } from "./dom.js";

const LEFT = 46, RIGHT = 96, TOP = 8, BOTTOM = 26;

export class Chart {
  // lines: {name: {label, kind}}; x and y: {log, from, to, empty, isWhole}, where a missing limit follows the data.
  constructor(container, { lines, x = {}, y = {}, width = 500, height = 200, description }) {
    Object.assign(this, { lines, x, y, width, height });
    this.svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": description });
    this.axes = drawn("g");
    this.paths = Object.fromEntries(Object.entries(lines).map(([name, { kind }]) => [name, drawn("path", { class: `line ${kind}` })]));
    this.tags = Object.fromEntries(Object.entries(lines).map(([name, { label, kind }]) => [name, drawn("text", { class: `tag ${kind}` }, label)]));
    this.svg.append(this.axes, ...Object.values(this.paths), ...Object.values(this.tags));
    container.replaceChildren(this.svg);
    this.clear();
  }

  clear() {
    this.data = Object.fromEntries(Object.keys(this.lines).map((name) => [name, []]));
    this.draw();
  }

  add(x, values) {
    for (const [name, value] of Object.entries(values)) {
      if (value !== null && Number.isFinite(value) && name in this.data) this.data[name].push([x, value]);
    }
    this.draw();
  }

  range(axis, which) {
    const seen = Object.values(this.data).flat().map((point) => point[which]).filter((value) => !axis.log || value > 0);
    let from = axis.from ?? Math.min(...seen, Infinity), to = axis.to ?? Math.max(...seen, -Infinity);
    if (!Number.isFinite(from) || !Number.isFinite(to)) [from, to] = axis.empty ?? [0, 1];
    if (axis.log) return [Math.log10(from), Math.log10(Math.max(to, from * 1.001))];
    const room = axis.from === undefined ? 0.05 * (to - from || 1) : 0;
    return [from - room, to + room || 1];
  }

  draw() {
    const [x0, x1] = this.range(this.x, 0), [y0, y1] = this.range(this.y, 1);
    const px = (value) => LEFT + ((this.x.log ? Math.log10(value) : value) - x0) / (x1 - x0) * (this.width - LEFT - RIGHT);
    const py = (value) => this.height - BOTTOM - (Math.max(y0, this.y.log ? Math.log10(value) : value) - y0) / (y1 - y0) * (this.height - TOP - BOTTOM);
    this.axes.replaceChildren(...this.marks(this.x, x0, x1, 5).flatMap((value) => [
      drawn("text", { x: px(value), y: this.height - 6, "text-anchor": "middle" }, format(value)),
    ]), ...this.marks(this.y, y0, y1, 6).flatMap((value) => [
      drawn("line", { class: "axis", x1: LEFT, x2: this.width - RIGHT, y1: py(value), y2: py(value) }),
      drawn("text", { x: LEFT - 6, y: py(value) + 4, "text-anchor": "end" }, format(value)),
    ]));
    const ends = [];
    for (const [name, points] of Object.entries(this.data)) {
      const shown = points.filter(([x, y]) => (!this.x.log || x > 0) && (!this.y.log || y > 0));
      this.paths[name].setAttribute("d", shown.map(([x, y], i) => `${i ? "L" : "M"}${px(x).toFixed(1)},${py(y).toFixed(1)}`).join(""));
      this.tags[name].setAttribute("visibility", shown.length ? "visible" : "hidden");
      if (shown.length) ends.push({ name, x: px(shown.at(-1)[0]) + 7, y: py(shown.at(-1)[1]) + 4 });
    }
    ends.sort((a, b) => a.y - b.y);
    ends.forEach((end, i) => { // labels must not overlap
      if (i) end.y = Math.max(end.y, ends[i - 1].y + 15);
      this.tags[end.name].setAttribute("x", end.x);
      this.tags[end.name].setAttribute("y", end.y);
    });
  }

  marks(axis, from, to, count) {
    if (axis.log) {
      const every = Math.max(1, Math.ceil((to - from) / count)), marks = [];
      for (let power = Math.ceil(from - 1e-9); power <= to + 1e-9; power += every) marks.push(10 ** power);
      return marks;
    }
    const rough = (to - from) / count, unit = 10 ** Math.floor(Math.log10(rough));
    const step = Math.max(axis.isWhole ? 1 : 0, [1, 2, 5, 10].map((times) => times * unit).find((size) => size >= rough));
    const marks = [];
    for (let value = Math.ceil(from / step) * step; value <= to + 1e-9; value += step) marks.push(Number(value.toPrecision(6)));
    return marks;
  }

  describe(description) {
    this.svg.setAttribute("aria-label", description);
  }
}

function format(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 10000)) {
    const power = Math.round(Math.log10(size));
    return `${value < 0 ? "−" : ""}10${[...String(power)].map((digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit] ?? "⁻").join("")}`;
  }
  return String(value);
}
