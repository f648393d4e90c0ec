// Cells in the plane: points lie between -2 and 2; the picture shows -2.4 to 2.4.

import { drawn } from "./dom.js";

const EDGE = 2.4;

// The polygon of each cell: the square cut along the bisectors with all other points.
export function cells(points) {
  return points.map((here, i) => {
    let polygon = [[-EDGE, -EDGE], [EDGE, -EDGE], [EDGE, EDGE], [-EDGE, EDGE]];
    points.forEach((there, j) => {
      if (i !== j) polygon = cut(polygon, here, there);
    });
    return polygon;
  });
}

function cut(polygon, [x, y], [u, v]) {
  const a = u - x, b = v - y, c = (u * u + v * v - x * x - y * y) / 2;
  const side = ([s, t]) => a * s + b * t - c;
  return polygon.flatMap((point, i) => {
    const next = polygon[(i + 1) % polygon.length], before = side(point), after = side(next);
    const inside = before <= 0 ? [point] : [];
    if (before * after < 0) {
      const share = before / (before - after);
      inside.push([point[0] + share * (next[0] - point[0]), point[1] + share * (next[1] - point[1])]);
    }
    return inside;
  });
}

// The bisector of two points, across the whole square.
export function bisector([x, y], [u, v]) {
  const length = Math.hypot(u - x, v - y), dx = -(v - y) / length, dy = (u - x) / length;
  const mx = (x + u) / 2, my = (y + v) / 2;
  return [[mx - 6 * dx, my - 6 * dy], [mx + 6 * dx, my + 6 * dy]];
}

// y points upwards in the plane, and downwards on the screen.
export const onScreen = ([x, y]) => `${x.toFixed(3)},${(-y).toFixed(3)}`;

export function drawCells(layer, points, shares) {
  while (layer.children.length > points.length) layer.lastChild.remove();
  while (layer.children.length < points.length) layer.append(drawn("polygon", { class: "cell" }));
  const largest = Math.max(...shares);
  cells(points).forEach((polygon, i) => {
    layer.children[i].setAttribute("points", polygon.map(onScreen).join(" "));
    layer.children[i].setAttribute("fill-opacity", (0.05 + 0.5 * (shares[i] / largest)).toFixed(3));
  });
}

export const letter = (i) => String.fromCharCode(65 + i);
