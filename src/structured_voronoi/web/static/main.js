// The two tabs, the choice between them, and the colour scheme.

import { $, copy } from "./dom.js";
import { openPlayground } from "./playground.js";
import { openText } from "./text.js";

const about = fetch("api/about").then(async (response) => {
  const choices = await response.json();
  if (!response.ok) throw new Error(choices.error);
  $("#version").textContent = `structured-voronoi ${choices.version}`;
  return choices;
});
about.catch(() => {}); // the text tab shows the error
const tabs = { playground: openPlayground, text: () => openText(about) };
const opened = {};

function show() {
  const name = location.hash.slice(1).split("?")[0];
  const shown = name in tabs ? name : "playground";
  for (const tab of Object.keys(tabs)) {
    $(`[data-tab-panel=${tab}]`).hidden = tab !== shown;
    const link = $(`[data-tab=${tab}]`);
    if (tab === shown) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${shown === "text" ? "Text" : "Playground"} · Structured Voronoi sampling`;
  if (opened[shown]) opened[shown].open();
  else opened[shown] = tabs[shown]();
  for (const tab of Object.keys(opened)) if (tab !== shown) opened[tab].close();
}

function stored(key, value) {
  try {
    if (value !== undefined) localStorage.setItem(key, value);
    return localStorage.getItem(key);
  } catch { // storage is disabled
    return null;
  }
}

const root = document.documentElement;
if (stored("theme")) root.dataset.theme = stored("theme");
$("#theme").addEventListener("click", () => {
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  stored("theme", root.dataset.theme);
});
for (const button of document.querySelectorAll(".copy-link")) {
  button.addEventListener("click", () => copy(location.href.replace(/[?]token=[^#]*/, ""), "Link copied"));
}
$(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the fragment of the address holds the tab
  $("#content").focus();
});
addEventListener("hashchange", () => {
  show();
  scrollTo(0, 0);
});
show();
