// The two rooms, which one is shown, and light or dark.

import { $, copy } from "./dom.js";
import { openPlayground } from "./playground.js";
import { openText } from "./text.js";

const about = fetch("api/about").then(async (answer) => {
  const offered = await answer.json();
  if (!answer.ok) throw new Error(offered.error);
  $("#version").textContent = `structured-voronoi ${offered.version}`;
  return offered;
});
about.catch(() => {}); // the room of texts says so
const rooms = { playground: openPlayground, text: () => openText(about) };
const opened = {};

function show() {
  const name = location.hash.slice(1).split("?")[0];
  const shown = name in rooms ? name : "playground";
  for (const room of Object.keys(rooms)) {
    $(`[data-home=${room}]`).hidden = room !== shown;
    const link = $(`[data-room=${room}]`);
    if (room === shown) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${shown === "text" ? "Texts under control" : "Playground"} · Structured Voronoi sampling`;
  if (opened[shown]) opened[shown].arrive();
  else opened[shown] = rooms[shown]();
  for (const room of Object.keys(opened)) if (room !== shown) opened[room].leave();
}

function kept(key, value) {
  try {
    if (value !== undefined) localStorage.setItem(key, value);
    return localStorage.getItem(key);
  } catch { // storage is switched off
    return null;
  }
}

const root = document.documentElement;
if (kept("theme")) root.dataset.theme = kept("theme");
$("#theme").addEventListener("click", () => {
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  kept("theme", root.dataset.theme);
});
for (const button of document.querySelectorAll(".copy-link")) {
  button.addEventListener("click", () => copy(location.href.replace(/[?]token=[^#]*/, ""), "Link copied"));
}
$(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names the room
  $("#room").focus();
});
addEventListener("hashchange", () => {
  show();
  scrollTo(0, 0);
});
show();
