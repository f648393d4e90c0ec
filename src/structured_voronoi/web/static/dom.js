// Helpers for elements, messages, the clipboard and the address.

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

// A message for screen readers: the start and the end of work, not each number.
export function announce(message) {
  if ($("#announcement").textContent !== message) $("#announcement").textContent = message;
}

let toastTimer;
export function toast(message) {
  const node = $("#toast");
  node.textContent = message;
  node.classList.add("shown");
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => node.classList.remove("shown"), 2500);
}

export async function copy(text, message) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // not permitted, or not a secure context
    const area = element("textarea", { readonly: true });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  toast(message);
}

export function debounce(work, milliseconds) {
  let timer;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => work(...args), milliseconds);
  };
}

// The settings of a tab are kept in the fragment of the address, so that a link restores them.
export function readAddress(tab) {
  const [name, query] = location.hash.slice(1).split("?");
  return name === tab && query ? new URLSearchParams(query) : null;
}

export function writeAddress(tab, settings) {
  const query = new URLSearchParams(settings).toString();
  history.replaceState(null, "", `#${tab}${query ? `?${query}` : ""}`);
}

export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
