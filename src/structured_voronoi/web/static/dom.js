// Elements, and the little that both rooms share.

export const $ = (selector, within = document) => within.querySelector(selector);

export function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function drawn(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

export function set(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
}

// Read out by screen readers: what begins and ends, not every number on the way.
export function speak(words) {
  if ($("#spoken").textContent !== words) $("#spoken").textContent = words;
}

let vanishing;
export function toast(words) {
  const node = $("#toast");
  node.textContent = words;
  node.classList.add("shown");
  clearTimeout(vanishing);
  vanishing = setTimeout(() => node.classList.remove("shown"), 2500);
}

export async function copy(text, words) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // not allowed, or no secure context
    const area = element("textarea", { readonly: true });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  toast(words);
}

export function later(work, milliseconds) {
  let timer;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => work(...given), milliseconds);
  };
}

// The settings of a room live in the part of the address after #, so that a link brings them back.
export function readAddress(room) {
  const [name, query] = location.hash.slice(1).split("?");
  return name === room && query ? new URLSearchParams(query) : null;
}

export function writeAddress(room, settings) {
  const query = new URLSearchParams(settings).toString();
  history.replaceState(null, "", `#${room}${query ? `?${query}` : ""}`);
}
