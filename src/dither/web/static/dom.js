// Elements are made from text alone: nothing here ever parses HTML, so no field of a run can become markup.

export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const main = document.getElementById("main");

export function show(...children) {
  main.replaceChildren(...children.flat(Infinity).filter(Boolean));
}

export async function get(address, parameters = {}, options = {}) {
  const query = new URLSearchParams(parameters).toString();
  const answer = await fetch(query ? `${address}?${query}` : address, options);
  let value = {};
  try { value = await answer.json(); } catch { /* an error page */ }
  if (value.refused) throw new Error(value.refused);
  if (!answer.ok) throw new Error(value.error || value.detail || `the server answered ${answer.status}`);
  return value;
}

export function number(value) {
  if (value === "inf") return Infinity;
  if (value === "-inf") return -Infinity;
  return typeof value === "number" ? value : null;
}

// A proven ε is rounded up, since it is an upper bound; one that was attacked, or is left of a budget, down (-1); one
// that is claimed to the nearest (0).
export function epsilon(value, rounded = 1) {
  let x = number(value);
  if (x === null) return "–";
  if (!Number.isFinite(x)) return "∞";
  if (x > 0 && rounded) {
    const three = Number(x.toPrecision(3));
    const step = 10 ** (Math.floor(Math.log10(x)) - 2);
    x = (three - x) * rounded < 0 ? Number((three + rounded * step).toPrecision(3)) : three;
  }
  if (x !== 0 && (x >= 1e5 || x < 1e-3)) return scientific(x);
  return x >= 1000 ? Number(x.toPrecision(3)).toLocaleString("en") : String(Number(x.toPrecision(3)));
}

// What a proven ε is made of, where the same records were also counted.
export function partsOf(proven) {
  return proven.parts.map((part) => `${part.what} ${epsilon(part.epsilon)}`).join(", ");
}

export function scientific(x) {
  const power = Math.floor(Math.log10(Math.abs(x)));
  const digits = Number((x / 10 ** power).toPrecision(3));
  return digits === 1 ? `10${raised(power)}` : `${digits}·10${raised(power)}`;
}

function raised(power) {
  const signs = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
  return [...String(power)].map((sign) => signs[sign]).join("");
}

export function short(x, digits = 3) {
  if (x === null || x === undefined) return "–";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "–";
  if (x !== 0 && (Math.abs(x) >= 1e6 || Math.abs(x) < 1e-3)) return scientific(x);
  return Math.abs(x) >= 1000 ? Math.round(x).toLocaleString("en") : String(Number(x.toPrecision(digits)));
}

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  const names = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (count >= 1000 && power < names.length - 1) { count /= 1000; power += 1; }
  return `${Number(count.toPrecision(3))} ${names[power]}`;
}

export function ago(seconds) {
  const past = Date.now() / 1000 - seconds;
  for (const [size, word] of [[86400, "day"], [3600, "hour"], [60, "minute"]]) {
    if (past >= size) { const n = Math.floor(past / size); return `${n} ${word}${n > 1 ? "s" : ""} ago`; }
  }
  return "just now";
}

export function wait(text) {
  return h("p", { class: "wait", role: "status" }, text);
}

export function failed(error) {
  return h("div", { class: "note", role: "alert" }, h("p", {}, error.message || String(error)));
}

export async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // no clipboard outside a secure context: the old way
    const area = h("textarea", { class: "visually-hidden", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = before; }, 1500);
}
