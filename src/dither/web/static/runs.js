// The table of runs: live, filtered, sorted, and a comparison of those that are picked.
import { ago, epsilon, failed, get, h, number, short, show, svg, wait } from "./dom.js";
import { compare } from "./compare.js";

const rows = new Map();      // id -> row
const elements = new Map();  // id -> <tr>
const picked = new Set(new URLSearchParams(location.hash.slice(1)).getAll("run"));
const sorting = { key: "last_write", down: true };
const live = h("span", { class: "live", role: "status" }, "connecting");
const count = h("span", { class: "muted small", role: "status" });
const body = h("tbody");
const panel = h("section", { "aria-label": "Comparison", hidden: true });
const pickedCount = h("span", { class: "muted small", role: "status" });
const compareButton = h("button", { class: "primary", onclick: openComparison }, "Compare");
const clearButton = h("button", { onclick: clearPicked }, "Clear selection");
const search = h("input", { type: "search", placeholder: "name, method, data …", oninput: list });
const filters = { method: select(), data: select(), state: select() };
const empty = h("div", {});

const COLUMNS = [
  ["", null], ["Run", "name"], ["State", "state"], ["Rounds", "round"], ["Accuracy", "accuracy"],
  ["Proven ε", "proven"], ["Claimed ε", "claimed"], ["Attacked ε", "attacked"], ["Budget left", "budget"], ["Last update", "last_write"],
];

function select() {
  return h("select", { onchange: list }, h("option", { value: "" }, "all"));
}

function heading() {
  return h("tr", {}, COLUMNS.map(([title, key], i) => {
    if (!key) return h("th", { scope: "col" }, h("span", { class: "visually-hidden" }, "Select for comparison"));
    const numeric = i >= 4 && i <= 8;
    const sort = sorting.key === key ? (sorting.down ? "descending" : "ascending") : "none";
    return h("th", { scope: "col", "aria-sort": sort, class: numeric ? "num" : "" },
      h("button", { onclick: () => sortBy(key) }, title));
  }));
}

const head = h("thead", {}, heading());

function sortBy(key) {
  sorting.down = sorting.key === key ? !sorting.down : key !== "name";
  sorting.key = key;
  head.replaceChildren(heading());
  list();
}

function value(row, key) {
  const field = row[key];
  if (field && typeof field === "object") return number(field.value ?? field.left) ?? -Infinity;
  return typeof field === "string" ? field.toLowerCase() : field ?? -Infinity;
}

function matches(row) {
  const wanted = search.value.trim().toLowerCase();
  const text = `${row.name} ${row.method} ${row.data} ${row.model} ${row.state}`.toLowerCase();
  return wanted.split(/\s+/).every((word) => text.includes(word)) &&
    Object.entries(filters).every(([key, box]) => !box.value || row[key] === box.value);
}

function list() {
  for (const [key, box] of Object.entries(filters)) {
    const known = [...new Set([...rows.values()].map((row) => row[key]))].sort();
    const chosen = box.value;
    if (known.join("\n") !== box.dataset.known) {
      box.dataset.known = known.join("\n");
      box.replaceChildren(h("option", { value: "" }, "all"), ...known.map((name) => h("option", { value: name }, name)));
      box.value = known.includes(chosen) ? chosen : "";
    }
  }
  const shown = [...rows.values()].filter(matches).sort((a, b) => {
    const [x, y] = [value(a, sorting.key), value(b, sorting.key)];
    return (x < y ? -1 : x > y ? 1 : a.id < b.id ? -1 : 1) * (sorting.down ? -1 : 1);
  });
  fill(shown);
  count.textContent = shown.length === rows.size ? `${rows.size} runs` : `${shown.length} of ${rows.size} runs`;
  const none = rows.size ? "No run matches these filters." : "No runs here yet. Start one with: dither run adult";
  empty.replaceChildren(...(shown.length ? [] : [h("p", { class: "wait-none muted" }, none)]));
  selection();
}

// The first screens at once, the rest right after: nobody waits for the thousandth row.
let filling = 0;

function fill(shown) {
  const mine = ++filling;
  const made = (part) => part.map((row) => elements.get(row.id) ?? make(row));
  const fresh = shown.some((row) => !elements.has(row.id));
  body.replaceChildren(...made(fresh ? shown.slice(0, 60) : shown));
  if (fresh && shown.length > 60) setTimeout(() => { if (mine === filling) body.append(...made(shown.slice(60))); }, 30);
}

function make(row) {
  const element = tr(row);
  elements.set(row.id, element);
  return element;
}

function cell(label, ...children) {
  return h("td", { class: "num", "data-label": label }, ...children);
}

function tr(row) {
  const box = h("input", { type: "checkbox", "aria-label": `Compare ${row.name}`, onchange: () => pick(row.id, box.checked) });
  box.checked = picked.has(row.id);
  const done = row.num_rounds ? `${row.round} / ${row.num_rounds}` : String(row.round);
  const claimed = row.claimed && [
    h("span", { class: "eps claimed" }, epsilon(row.claimed.value, 0)),
    h("span", { class: "sub" }, row.claimed.failing ? `per ${row.claimed.unit}, ${row.claimed.failing} condition${row.claimed.failing > 1 ? "s fail" : " fails"}` : `per ${row.claimed.unit}`),
  ];
  const proven = row.proven && [
    h("span", { class: "eps proven" }, epsilon(row.proven.value)),
    h("span", { class: "sub" }, `${row.proven.assumed ? "assumed, " : ""}${row.proven.adjacency}${row.proven.parts.length ? `; ${row.proven.parts.map((part) => part.what).join(", ")}` : ""}`),
  ];
  const attacked = row.attacked && [
    h("span", { class: "eps attacked" }, `≥ ${epsilon(row.attacked.value, -1)}`),
    h("span", { class: "sub" }, row.attacked.verdict === "VIOLATION" ? "exceeds the proof" : row.attacked.unit),
  ];
  const left = row.budget && (row.budget.problem
    ? h("span", { class: "chip bad", title: row.budget.problem }, "ledger")
    : [h("span", { class: "eps", title: row.budget.data }, epsilon(row.budget.left, -1)), h("span", { class: "sub" }, `of ${Number(row.budget.budget)}`)]);
  return h("tr", { class: picked.has(row.id) ? "picked" : "", "data-run": row.id },
    h("td", { class: "wide" }, box),
    h("td", { class: "wide" }, h("div", { class: "name" },
      h("a", { href: `/run?${new URLSearchParams({ id: row.id })}` }, row.name),
      h("span", { class: "sub" }, `${row.method} · ${row.data} · ${row.model} · seed ${row.seed}`))),
    h("td", { "data-label": "State" }, h("span", { class: `chip ${row.state}`, title: row.state_reason }, row.state)),
    h("td", { "data-label": "Rounds", class: "nowrap" }, h("span", {}, done,
      row.state === "running" && row.num_rounds ? h("progress", { value: row.round, max: row.num_rounds, "aria-label": "rounds done" }) : null)),
    cell("Accuracy", h("span", { class: "sparkcell" }, spark(row.spark), h("span", {}, row.accuracy === null ? "–" : row.accuracy.toFixed(4)))),
    cell("Proven ε", h("span", {}, proven ?? "–")),
    cell("Claimed ε", h("span", {}, claimed ?? "–")),
    cell("Attacked ε", h("span", {}, attacked ?? "–")),
    cell("Budget left", h("span", {}, left ?? "–")),
    h("td", { "data-label": "Last update", class: "nowrap muted small" }, ago(row.last_write)));
}

function spark(points) {
  const known = points.map((y, x) => [x, y]).filter(([, y]) => y !== null);
  const label = known.length ? `accuracy from ${short(known[0][1])} to ${short(known.at(-1)[1])}` : "no accuracy yet";
  const picture = svg("svg", { class: "spark", viewBox: "0 0 92 24", role: "img", "aria-label": label });
  if (!known.length) return picture;
  // The same scale for all rows, 0 to 1, so that they compare.
  const at = ([x, y]) => [3 + (points.length > 1 ? (86 * x) / (points.length - 1) : 43), 21 - 18 * Math.min(Math.max(y, 0), 1)];
  const end = at(known.at(-1));
  picture.append(
    svg("polyline", { points: known.map((point) => at(point).map((v) => v.toFixed(1)).join(",")).join(" ") }),
    svg("circle", { cx: end[0].toFixed(1), cy: end[1].toFixed(1), r: 2.2 }));
  return picture;
}

function pick(id, on) {
  if (on) picked.add(id); else picked.delete(id);
  elements.get(id)?.classList.toggle("picked", on);
  selection();
}

function selection() {
  const known = [...picked].filter((id) => rows.has(id));
  pickedCount.textContent = known.length ? `${known.length} selected` : "Select runs to compare";
  compareButton.disabled = known.length < 1;
  clearButton.hidden = known.length === 0;
  const hash = new URLSearchParams(known.map((id) => ["run", id])).toString();
  history.replaceState(null, "", hash && !panel.hidden ? `#${hash}` : location.pathname);
}

function clearPicked() {
  for (const id of picked) {
    const box = elements.get(id)?.querySelector("input");
    if (box) box.checked = false;
    elements.get(id)?.classList.remove("picked");
  }
  picked.clear();
  panel.hidden = true;
  panel.replaceChildren();
  selection();
}

function openComparison() {
  panel.hidden = false;
  compare(panel, [...picked].filter((id) => rows.has(id)).map((id) => rows.get(id)));
  selection();
  panel.scrollIntoView({ block: "start" });
}

function update({ rows: changed, removed, all }) {
  if (all) {  // the program was started again: what it does not name is gone
    const named = new Set(changed.map((row) => row.id));
    removed = [...rows.keys()].filter((id) => !named.has(id));
  }
  for (const id of removed) { rows.delete(id); elements.delete(id); picked.delete(id); }
  for (const row of changed) {
    const known = rows.has(row.id);
    rows.set(row.id, row);
    const element = tr(row);
    if (known || elements.size) element.classList.add("fresh");
    elements.set(row.id, element);
  }
  list();
  panel.dispatchEvent(new CustomEvent("changed", { detail: changed.filter((row) => picked.has(row.id)) }));
}

function listen(position) {
  const events = new EventSource(`/api/events?${new URLSearchParams({ since: position })}`);
  events.addEventListener("hello", () => { live.textContent = "live"; live.classList.add("on"); });
  events.addEventListener("runs", (event) => update(JSON.parse(event.data)));
  events.addEventListener("error", () => { live.textContent = "reconnecting"; live.classList.remove("on"); });
}

show(wait("reading the runs"));
try {
  const answer = await get("/api/runs");
  for (const row of answer.rows) rows.set(row.id, row);
  const labelled = (text, control) => h("label", { class: "field" }, text, control);
  show(
    h("div", { class: "spread" }, h("div", {}, h("h1", {}, "Runs"), h("p", { class: "muted small" }, answer.folder)), live),
    panel,
    h("section", { class: "card", "aria-label": "Runs" },
      h("div", { class: "row" }, labelled("Search", search), labelled("Method", filters.method), labelled("Data", filters.data),
        labelled("State", filters.state), h("span", { class: "row" }, compareButton, clearButton, pickedCount)),
      h("div", { class: "spread legend" }, count, h("span", { class: "small" },
        h("span", { class: "proven" }, "proven"), h("span", { class: "muted" }, ": an upper bound by a theorem · "),
        h("span", { class: "claimed" }, "claimed"), h("span", { class: "muted" }, ": the paper's formula · "),
        h("span", { class: "attacked" }, "attacked"), h("span", { class: "muted" }, ": a lower bound by an attack"))),
      h("div", { class: "tablewrap" }, h("table", { class: "runs" }, h("caption", { class: "visually-hidden" }, "Runs"), head, body)),
      empty));
  list();
  if (picked.size) openComparison();
  listen(answer.position);
  setInterval(() => {
    for (const [id, element] of elements) element.lastChild.textContent = ago(rows.get(id).last_write);
  }, 30000);
} catch (error) {
  show(failed(error));
}
