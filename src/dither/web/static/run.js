// One run: curves, privacy in words, noise, who took part, what each client spent, the bound, where it comes from.
import { ago, bytes, copy, epsilon, failed, get, h, number, short, show, wait } from "./dom.js";
import { boundFigure, chart, draw } from "./charts.js";
import { plain } from "./compare.js";

const id = new URLSearchParams(location.search).get("id") ?? "";
const curves = { accuracy: chart("Test accuracy against rounds"), loss: chart("Loss against rounds") };
const lazy = h("div", {}, wait("asking the accountant: cohorts, noise and ε by round"));
const top = h("div", {}), privacy = h("div", {}), rest = h("div", {});
let shownRound = -1;

function tile(label, value, sub, kind = "") {
  return h("div", { class: "tile" }, h("div", { class: "label" }, label), h("div", { class: `value ${kind}` }, value), sub ? h("span", { class: "sub" }, sub) : null);
}

function overview(run) {
  const { row } = run;
  const own = run.proven.find((one) => one.own) ?? run.proven[0];
  const attack = row.attacked;
  return [
    h("p", { class: "small" }, h("a", { href: "/" }, "All runs")),
    h("div", { class: "spread" }, h("h1", {}, row.name), h("span", { class: `chip ${row.state}` }, row.state)),
    h("p", { class: "muted" }, `${row.method} on ${row.data}, ${row.model}, seed ${row.seed} · last news ${ago(row.last_write)}`),
    row.state_reason ? h("div", { class: row.state === "broken" ? "note bad" : "note" }, h("p", {}, row.state_reason),
      row.state === "stopped" ? h("p", {}, h("code", {}, run.resume)) : null) : null,
    h("div", { class: "tiles" },
      tile("Test accuracy", row.accuracy === null ? "–" : row.accuracy.toFixed(4), `loss ${short(row.loss, 4)}`),
      tile("Rounds", row.num_rounds ? `${row.round} / ${row.num_rounds}` : String(row.round), row.seconds === null ? "" : `${short(row.seconds)} s`),
      tile("Claimed ε", run.claimed ? epsilon(run.claimed.value) : "–", run.claimed ? `per ${run.claimed.unit}, by the paper` : "known when it is done", "claimed"),
      tile("Proven ε", own ? epsilon(own.value) : "–", own ? `${own.assumed ? "assumed; " : ""}per ${own.unit}, ${own.adjacency}` : "known when it is done", "proven"),
      tile("Attacked ε", attack ? `≥ ${epsilon(attack.value)}` : "–", attack ? attack.verdict : "not attacked: dither audit", "attacked"),
      row.budget && !row.budget.problem ? tile("Budget left", epsilon(row.budget.left), `of ${epsilon(row.budget.budget)} for this data`) : null),
  ];
}

function drawCurves(run) {
  const { round = [], test_accuracy = [], loss = [] } = run.metrics;
  const local = run.local;
  draw(curves.accuracy.box, (c) => ({
    traces: [{ x: round, y: test_accuracy, mode: round.length > 25 ? "lines" : "lines+markers", line: { color: c[0], width: 2.2 }, marker: { size: 5 }, hovertemplate: "round %{x}: %{y:.4f}<extra></extra>" }],
    layout: { xaxis: { title: "rounds" }, yaxis: { title: "test accuracy" } },
  }));
  draw(curves.loss.box, (c) => ({
    traces: [
      { x: round, y: loss, name: "test", mode: "lines", line: { color: c[1], width: 2.2 }, hovertemplate: "round %{x}: %{y:.4f}<extra>test</extra>" },
      { x: local.round ?? [], y: local.train_loss ?? [], name: "training (local, not private)", mode: "lines", line: { color: c[6], width: 2, dash: "dash" }, hovertemplate: "round %{x}: %{y:.4f}<extra>training</extra>" },
    ],
    layout: { showlegend: true, xaxis: { title: "rounds" }, yaxis: { title: "loss" } },
  }));
}

function privacySection(run) {
  if (!run.claimed && !run.proven.length) {
    return h("section", { class: "card" }, h("h2", {}, "Privacy"), h("p", { class: "muted" }, "The privacy table is written when the run ends. The accountant's ε of the rounds made so far is below."));
  }
  const claim = run.claimed;
  const COLUMNS = ["", "ε", "Per", "Seen by the adversary", "Neighbours", "By", "In words"];
  const line = (kind, name, cells) => h("tr", {}, h("th", { scope: "row", class: kind }, name), cells.map((cell, i) => h("td", { "data-label": COLUMNS[i + 1], class: i === 0 ? `eps ${kind}` : i === 5 ? "small words" : "", title: cell?.title }, cell?.text ?? cell)));
  const table = h("table", { class: "stack" },
    h("caption", { class: "visually-hidden" }, "Claimed, proven and attacked ε"),
    h("thead", {}, h("tr", {}, COLUMNS.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {},
      claim ? line("claimed", "claimed", [epsilon(claim.value), claim.unit, "–", claim.adjacency, claim.source, `If the paper's theorem held, this ${claim.words}.`]) : null,
      distinct(run.proven).map((row) => line("proven", row.assumed ? "assumed" : "proven", [epsilon(row.value), row.unit, row.seenBy.join(", "), row.adjacency, { text: row.recipe, title: row.recipe_words }, row.words])),
      run.attacked.map((row) => line("attacked", "attacked", [`≥ ${epsilon(row.value)}`, row.unit, row.seen, row.adjacency, row.form.split(":")[0],
        `Shown with ${short(100 * row.confidence, 4)}% confidence in ${short(row.trials)} trials: ${row.verdict}${row.refutes_claim ? "; it refutes the claim" : ""}.`]))));
  const failing = claim ? claim.conditions.filter((one) => !one.holds) : [];
  const recipes = [...new Set(run.proven.map((row) => row.recipe_words).filter(Boolean))];
  const uncovered = [...new Set(run.proven.flatMap((row) => row.not_covered))];
  return h("section", { class: "card" }, h("h2", {}, "Privacy"),
    h("p", {}, "ε bounds what anybody can learn about one record from what they see: the smaller, the better hidden. ",
      h("span", { class: "claimed" }, "Claimed"), " is the paper's formula, ", h("span", { class: "proven" }, "proven"), " is an upper bound by a theorem, ",
      h("span", { class: "attacked" }, "attacked"), " is a lower bound found by an attack. All of it holds but for a probability δ = ", short(run.claimed?.delta ?? run.proven[0]?.delta), "."),
    h("div", { class: "tablewrap" }, table),
    run.why ? [h("h3", {}, "Why claimed and proven differ"), h("p", {}, sentence(run.why))] : null,
    failing.length ? [h("h3", {}, "Conditions of the claim that fail here"), h("ul", {}, failing.map((one) => h("li", {}, one.text)))] : null,
    Object.keys(run.errata).length ? h("details", {}, h("summary", {}, "Errata named here"), h("dl", { class: "facts" }, Object.entries(run.errata).flatMap(([name, text]) => [h("dt", {}, name), h("dd", {}, text)]))) : null,
    recipes.length ? h("details", {}, h("summary", {}, "How it was proved"), h("ul", {}, recipes.map((text) => h("li", {}, text)), [...new Set(run.proven.map((row) => row.no_credit).filter(Boolean))].map((text) => h("li", {}, `No credit for the others' noise in sums: ${text}.`)))) : null,
    uncovered.length ? [h("h3", {}, "Not covered by the proof"), h("ul", {}, uncovered.map((text) => h("li", {}, text.replace(/^not covered: /, ""))))] : null,
    run.notes.length ? [h("h3", {}, "Notes"), h("ul", {}, run.notes.map((text) => h("li", {}, text)))] : null);
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (text.endsWith(".") ? "" : ".");

// Rows that say the same of several adversaries become one.
function distinct(rows) {
  const found = new Map();
  for (const row of rows) {
    const key = `${row.adjacency} ${row.value} ${row.unit} ${row.recipe}`;
    if (found.has(key)) found.get(key).seenBy.push(row.seen);
    else found.set(key, { ...row, seenBy: [row.seen] });
  }
  return [...found.values()];
}

function provenance(run) {
  const button = h("button", { onclick: () => copy(run.spec, button) }, "Copy spec");
  return [
    h("div", { class: "grid" },
      h("section", { class: "card" }, h("h2", {}, "The run"), h("dl", { class: "facts" }, run.facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
        run.traffic.upload_bytes ? [h("h3", {}, "Traffic"), h("p", {}, `A client sends ${bytes(run.traffic.upload_bytes)} a round and gets ${bytes(run.traffic.download_bytes)}${run.traffic.lost ? `; ${run.traffic.lost} uploads were lost` : ""}.`)] : null),
      h("section", { class: "card" }, h("h2", {}, "Where it was made"), h("dl", { class: "facts" }, Object.entries(run.provenance).flatMap(([name, value]) => [h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, value)])),
        h("h3", {}, "Downloads"), h("div", { class: "downloads" }, run.files.map((file) => h("a", { class: "button", href: `/api/file?${new URLSearchParams({ id, name: file.name })}`, title: file.what, download: true }, `${file.name} · ${bytes(file.bytes)}`))))),
    h("section", { class: "card" }, h("div", { class: "spread" }, h("h2", {}, "Spec"), button), h("pre", { tabindex: 0, "aria-label": "spec.toml" }, run.spec)),
  ];
}

async function computed() {
  let found;
  try {
    found = await get("/api/analysis", { id });
  } catch (error) {
    lazy.replaceChildren(h("section", { class: "card" }, h("h2", {}, "Noise, cohorts and ε by round"), failed(error)));
    return;
  }
  const byRound = chart("Proven ε against rounds", `For one who sees ${found.epsilon.view === "upload" ? "every upload" : found.epsilon.view}, ${found.epsilon.adjacency}.`);
  const noise = chart("Noise of each round", "Noise over sensitivity of what the first client releases: the higher, the better hidden.");
  const map = chart("Which client took part in which round", mapWords(found.cohorts), found.cohorts.clients.length > 30);
  const clients = found.clients ? chart("Proven ε of each client", "Each client's own ε, from the rounds it took part in.") : null;
  lazy.replaceChildren(h("div", { class: "grid" },
    h("section", { class: "card" }, h("h2", {}, "ε as it was spent"), byRound.figure),
    h("section", { class: "card" }, h("h2", {}, "Noise schedule"), noise.figure),
    h("section", { class: "card" }, h("h2", {}, "Who took part when"), map.figure),
    h("section", { class: "card" }, h("h2", {}, "What each client spent"), clients ? clients.figure : spreadOverClients())));
  const target = current.row.noise === "proven" ? number(current.row.target) : null;
  draw(byRound.box, (c, style) => ({
    traces: [
      { x: [0, ...found.epsilon.rounds], y: [0, ...found.epsilon.values.map(number)], mode: "lines+markers", line: { color: c[0], width: 2.2 }, marker: { size: 5 }, name: "proven", hovertemplate: "round %{x}: ε = %{y:.4g}<extra></extra>" },
      ...(target && Number.isFinite(target) ? [{ x: [0, found.rounds], y: [target, target], mode: "lines", name: "target", line: { color: style("--muted"), dash: "dot" }, hovertemplate: "target %{y:.3g}<extra></extra>" }] : []),
    ],
    layout: { showlegend: Boolean(target), xaxis: { title: "rounds", rangemode: "tozero" }, yaxis: { title: "proven ε", rangemode: "tozero" } },
  }));
  draw(noise.box, (c) => ({
    traces: Object.entries(found.noise).map(([channel, one], i) => ({ x: one.rounds, y: one.multiplier, name: channel, mode: "lines+markers", marker: { size: 4 }, line: { color: c[i + 2], width: 2.2 }, customdata: one.std, hovertemplate: `round %{x}: σ/Δ = %{y:.4g}, σ = %{customdata:.4g}<extra>${channel}</extra>` })),
    layout: { showlegend: Object.keys(found.noise).length > 1, xaxis: { title: "rounds" }, yaxis: { title: "noise multiplier σ/Δ", rangemode: "tozero" } },
  }));
  draw(map.box, (c, style) => ({
    traces: [{ type: "heatmap", x: found.cohorts.rounds, y: found.cohorts.clients.map(plain), z: found.cohorts.took_part, colorscale: [[0, style("--soft")], [1, c[0]]], zmin: 0, zmax: 1, showscale: false, xgap: found.cohorts.rounds.length < 80 ? 1 : 0, ygap: found.cohorts.clients.length < 60 ? 1 : 0, hovertemplate: "%{y}, round %{x}<extra></extra>" }],
    layout: { xaxis: { title: "rounds", showgrid: false }, yaxis: { autorange: "reversed", showgrid: false, title: found.cohorts.clients.length > 30 ? "clients" : "", showticklabels: found.cohorts.clients.length <= 30, type: "category" } },
  }));
  if (clients) {
    draw(clients.box, (c, style) => ({
      traces: [{ type: "bar", x: found.clients.names.map(plain), y: found.clients.epsilon.map(number), customdata: found.clients.participations, marker: { color: c[0] }, hovertemplate: "%{x}: ε = %{y:.4g}, took part %{customdata} times<extra></extra>" }],
      layout: {
        xaxis: { showticklabels: found.clients.names.length <= 24, title: found.clients.names.length <= 24 ? "" : "clients", type: "category" }, yaxis: { title: "proven ε", rangemode: "tozero" },
        shapes: target && Number.isFinite(target) ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: target, y1: target, line: { color: style("--muted"), dash: "dot", width: 1.5 } }] : [],
      },
    }));
  }
  lazy.append(boundCard());
  lazy.dataset.ready = "yes";
}

function mapWords(cohorts) {
  const parts = [];
  if (cohorts.clients.length < cohorts.of) parts.push(`the first ${cohorts.clients.length} of ${cohorts.of} clients`);
  if (cohorts.every > 1) parts.push(`every ${cohorts.every}th round`);
  return parts.length ? `Shown: ${parts.join(", ")}.` : "A filled cell: the client took part in that round.";
}

function spreadOverClients() {
  const row = current.proven.find((one) => one.own && one.clients);
  if (!row) return h("p", { class: "muted" }, "The table of the finished run will say what clients spent.");
  const most = Math.max(...Object.values(row.clients).map((v) => number(v) ?? 0).filter(Number.isFinite), 1e-9);
  return h("div", {}, h("p", { class: "muted small" }, "Clients differ in too many ways to list each; the least, the median and the most exposed:"),
    h("table", {}, h("tbody", {}, ["min", "median", "max"].map((name) => h("tr", {}, h("th", { scope: "row" }, name), h("td", { class: "num" }, epsilon(row.clients[name])),
      h("td", { class: "meter" }, h("meter", { class: "bars", min: 0, max: most, value: Math.min(number(row.clients[name]) ?? 0, most), "aria-label": `ε of the ${name}` })))))));
}

function boundCard() {
  const inside = h("div", {});
  const button = h("button", { onclick: ask }, "Compute the bound");
  async function ask() {
    button.disabled = true;
    inside.replaceChildren(wait("estimating the loss's constants on the public records; this can take a minute"));
    try {
      const bound = await get("/api/bound", { id });
      const { round = [], train_loss = [] } = current.local;
      const least = bound.least_loss;
      const measured = least === null ? null : { x: round, y: train_loss.map((value) => (value === null ? null : Math.max(value - least, 0))) };
      const found = boundFigure(bound, measured);
      inside.replaceChildren(
        bound.vacuous ? h("div", { class: "note" }, h("p", {}, h("strong", {}, "Vacuous: "), `at its best the theorem promises a loss ${short(Math.min(...bound.total.map(number).filter(Number.isFinite)))} above the minimum; the initial model is only ${short(bound.initial_gap)} above it.`)) : h("div", { class: "note info" }, h("p", {}, `The theorem promises ${short(number(bound.total.at(-1)))} above the minimum after the last round.`)),
        found.figure,
        bound.failing.length ? h("p", { class: "small" }, `Conditions that fail: ${bound.failing.join("; ")}.`) : null,
        h("p", { class: "muted small" }, `${bound.source}, at the noise that was added. Constants of the loss are estimated on the run's records: a prediction, not a certificate. `,
          bound.rate ? `The bound takes the best rate its theorem allows (${short(bound.rate)}); the run used ${short(bound.own_rate)}.` : ""));
      await found.redraw();
      button.hidden = true;
      inside.dataset.ready = "yes";
    } catch (error) {
      inside.replaceChildren(failed(error));
      button.disabled = false;
    }
  }
  return h("section", { class: "card" }, h("div", { class: "spread" }, h("h2", {}, "Convergence: what the paper's theorem promises"), button), inside);
}

let current = null;

async function load() {
  current = await get("/api/run", { id });
  document.title = `${current.row.name} · Dither`;
  top.replaceChildren(...overview(current).filter(Boolean));
  privacy.replaceChildren(privacySection(current));
  rest.replaceChildren(...provenance(current));
  if (current.row.round !== shownRound) { shownRound = current.row.round; drawCurves(current); }
}

show(wait("reading the run"));
try {
  await load();
  show(top, h("div", { class: "grid" }, h("section", { class: "card" }, h("h2", {}, "Accuracy"), curves.accuracy.figure), h("section", { class: "card" }, h("h2", {}, "Loss"), curves.loss.figure)), privacy, lazy, rest);
  drawCurves(current);
  if (current.row.state === "broken") lazy.replaceChildren();
  else computed();
  const events = new EventSource(`/api/events?${new URLSearchParams({ since: current.position })}`);
  let again = null;
  events.addEventListener("runs", (event) => {
    if (!JSON.parse(event.data).rows.some((row) => row.id === id)) return;
    clearTimeout(again);
    again = setTimeout(async () => {
      const before = current.row.state;
      await load();
      if (before === "running" && current.row.state !== "running") computed();
    }, 200);
  });
} catch (error) {
  show(h("p", { class: "small" }, h("a", { href: "/" }, "All runs")), failed(error));
}
