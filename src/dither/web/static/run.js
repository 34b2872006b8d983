// One run: curves, privacy explained, noise, cohorts, ε of each client, the convergence bound, provenance.
import { ago, bytes, copy, epsilon, failed, get, h, number, partsOf, short, show, wait } from "./dom.js";
import { boundFigure, chart, draw, plain, referenceLines, scoreRange } from "./charts.js";

const id = new URLSearchParams(location.search).get("id") ?? "";
const curves = { accuracy: chart("Test accuracy against rounds"), loss: chart("Loss against rounds") };
const lazy = h("div", {}, wait("computing cohorts, noise and ε by round"));
const top = h("div", {}), privacy = h("div", {}), rest = h("div", {});
let shownRound = -1;

function tile(label, value, sub, kind = "") {
  return h("div", { class: "tile" }, h("div", { class: "label" }, label), h("div", { class: `value ${kind}` }, value), sub ? h("span", { class: "sub" }, sub) : null);
}

function overview(run) {
  const { row } = run;
  const main = row.proven;
  const attack = row.attacked;
  return [
    h("p", { class: "small" }, h("a", { href: "/" }, "All runs")),
    h("div", { class: "spread" }, h("h1", {}, row.name), h("span", { class: `chip ${row.state}` }, row.state)),
    h("p", { class: "muted" }, `${row.method} on ${row.data}, ${row.model}, seed ${row.seed} · last update ${ago(row.last_write)}`),
    ...run.advice.map((text) => h("div", { class: "note" }, h("p", {}, h("strong", {}, "Warning: "), text))),
    ...run.local_advice.map((text) => h("div", { class: "note" }, h("p", {}, h("strong", {}, "Warning (local, not private): "), text))),
    row.state_reason ? h("div", { class: row.state === "broken" ? "note bad" : "note" }, h("p", {}, row.state_reason),
      row.state === "stopped" ? h("p", {}, h("code", {}, run.resume)) : null) : null,
    h("div", { class: "tiles" },
      tile(`Test ${row.score}`, row.accuracy === null ? "–" : row.accuracy.toFixed(4), `loss ${short(row.loss, 4)}`),
      tile("Rounds", row.num_rounds ? `${row.round} / ${row.num_rounds}` : String(row.round), row.seconds === null ? "" : `${short(row.seconds)} s`),
      tile("Proven ε", main ? epsilon(main.value) : "–", main ? `${main.assumed ? "assumed; " : ""}per ${main.unit}, ${main.adjacency}${main.parts.length ? `; ${partsOf(main)}` : ""}` : "known when the run ends", "proven"),
      tile("Claimed ε", run.claimed ? epsilon(run.claimed.value, 0) : "–", run.claimed ? `per ${run.claimed.unit}, by the paper` : "known when the run ends", "claimed"),
      tile("Attacked ε", attack ? `≥ ${epsilon(attack.value, -1)}` : "–", attack ? attack.verdict : "not attacked yet: dither audit", "attacked"),
      row.budget && !row.budget.problem ? tile("Budget left", epsilon(row.budget.left, -1), `of ${Number(row.budget.budget)} for ${row.budget.data}`) : null),
  ];
}

function drawCurves(run) {
  const { round = [], loss = [] } = run.metrics;
  const score = run.metrics.test_r2 ?? run.metrics.test_accuracy ?? [];
  const local = run.local;
  if (run.row.state === "finished" && !score.some((value) => value !== null)) {
    curves.accuracy.figure.replaceChildren(h("p", { class: "muted" }, "Not scored: the test records are not public. `dither evaluate` scores a file for you alone."));
  } else draw(curves.accuracy.box, (c, style) => ({
    traces: [{ x: round, y: score, name: "this run", mode: round.length > 25 ? "lines" : "lines+markers", line: { color: c[0], width: 2.2 }, marker: { size: 5 }, hovertemplate: "round %{x}: %{y:.4f}<extra></extra>" }, ...referenceLines(run.references, round, style("--muted"))],
    layout: { showlegend: run.references.length > 0, xaxis: { title: "rounds" }, yaxis: { title: `test ${run.row.score}`, range: scoreRange([...score, ...run.references.map((one) => one.value)]) } },
  }));
  const proved = run.proven.find((row) => row.of_spec);
  curves.accuracy.caption.textContent = proved ? `Proven ε ${epsilon(run.row.proven.value)} per ${proved.unit}, ${proved.adjacency}; the adversary sees ${proved.sees}.` : "";
  draw(curves.loss.box, (c) => ({
    traces: [
      { x: round, y: loss, name: "test", mode: "lines", line: { color: c[1], width: 2.2 }, hovertemplate: "round %{x}: %{y:.4f}<extra>test</extra>" },
      { x: local.round ?? [], y: local.train_loss ?? [], name: "training (local, not private)", mode: "lines", line: { color: c[6], width: 2, dash: "dash" }, hovertemplate: "round %{x}: %{y:.4f}<extra>training</extra>" },
    ],
    layout: { showlegend: true, xaxis: { title: "rounds" }, yaxis: { title: "loss", rangemode: "tozero" } },
  }));
}

function privacySection(run) {
  if (!run.claimed && !run.proven.length) {
    return h("section", { class: "card" }, h("h2", {}, "Privacy"), h("p", { class: "muted" }, run.row.state === "broken" ? "The privacy table cannot be read." : "The privacy table is written when the run ends. ε of the completed rounds is below."));
  }
  const claim = run.claimed;
  const COLUMNS = ["", "ε", "Per", "The adversary sees", "Adjacency", "Source", "What it means"];
  const line = (kind, name, cells) => h("tr", {}, h("th", { scope: "row", class: kind }, name), cells.map((cell, i) => h("td", { "data-label": COLUMNS[i + 1], class: i === 0 ? `eps ${kind}` : i === 5 ? "small explanation" : "", title: cell?.title }, cell?.text ?? cell)));
  const table = h("table", { class: "stack" },
    h("caption", { class: "visually-hidden" }, "Claimed, proven and attacked ε"),
    h("thead", {}, h("tr", {}, COLUMNS.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {},
      claim ? line("claimed", "claimed", [epsilon(claim.value, 0), claim.unit, "–", claim.adjacency, claim.source, `If the paper's theorem held, this ${claim.explanation}.`]) : null,
      distinct(run.proven).map((row) => line("proven", row.assumed ? "assumed" : "proven", [epsilon(row.value), row.unit, row.seenBy.join(", "), row.adjacency, { text: row.recipe, title: row.proof }, row.explanation])),
      run.attacked.map((row) => line("attacked", "attacked", [`≥ ${epsilon(row.value, -1)}`, row.unit, row.sees, row.adjacency, row.form.split(":")[0],
        `Shown with ${short(100 * row.confidence, 4)}% confidence in ${short(row.trials)} trials: ${row.verdict}${row.refutes_claim ? "; it refutes the claim" : ""}.`]))));
  const failing = claim ? claim.conditions.filter((one) => !one.holds) : [];
  const recipes = [...new Set(run.proven.map((row) => row.proof).filter(Boolean))];
  const uncovered = [...new Set(run.proven.flatMap((row) => row.not_covered))];
  return h("section", { class: "card" }, h("h2", {}, "Privacy"),
    h("p", {}, "ε bounds what an adversary can learn about one record. Smaller is more private. ",
      h("span", { class: "claimed" }, "Claimed"), " is what the paper's formula says, ", h("span", { class: "proven" }, "proven"), " is an upper bound that a theorem guarantees, ",
      h("span", { class: "attacked" }, "attacked"), " is a lower bound that an attack has shown. All hold except with probability δ = ", short(run.claimed?.delta ?? run.proven[0]?.delta), "."),
    h("div", { class: "tablewrap" }, table),
    run.row.proven?.parts.length ? [h("h3", {}, "Spent on these records in all"), h("p", {}, `The table is of the training alone. These records were also counted: ${partsOf(run.row.proven)}. Together, proven ε is ${epsilon(run.row.proven.value)} at δ = ${epsilon(run.row.proven.delta)}. A ledger may know of more.`)] : null,
    run.why ? [h("h3", {}, "Why claimed and proven differ"), h("p", {}, sentence(run.why))] : null,
    failing.length ? [h("h3", {}, "Conditions of the claim that fail"), h("ul", {}, failing.map((one) => h("li", {}, one.text)))] : null,
    Object.keys(run.errata).length ? h("details", {}, h("summary", {}, "Errata mentioned above"), h("dl", { class: "facts" }, Object.entries(run.errata).flatMap(([name, text]) => [h("dt", {}, name), h("dd", {}, text)]))) : null,
    recipes.length ? h("details", {}, h("summary", {}, "How ε was proved"), h("ul", {}, recipes.map((text) => h("li", {}, text)), [...new Set(run.proven.map((row) => row.no_credit).filter(Boolean))].map((text) => h("li", {}, `The noise of other clients in a sum is not counted: ${text}.`)))) : null,
    uncovered.length ? [h("h3", {}, "Not covered by the proof"), h("ul", {}, uncovered.map((text) => h("li", {}, text.replace(/^not covered: /, "").replace("preprocessing not covered", "preprocessing"))))] : null,
    run.notes.length ? [h("h3", {}, "Notes"), h("ul", {}, run.notes.map((text) => h("li", {}, text)))] : null);
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (text.endsWith(".") ? "" : ".");

// Rows that are equal for several adversaries become one.
function distinct(rows) {
  const merged = new Map();
  for (const row of rows) {
    const key = `${row.adjacency} ${row.value} ${row.unit} ${row.recipe}`;
    if (merged.has(key)) merged.get(key).seenBy.push(row.sees);
    else merged.set(key, { ...row, seenBy: [row.sees] });
  }
  return [...merged.values()];
}

function provenance(run) {
  const button = h("button", { onclick: () => copy(run.spec, button) }, "Copy spec");
  return [
    h("div", { class: "grid" },
      h("section", { class: "card" }, h("h2", {}, "The run"), h("dl", { class: "facts" }, run.overview.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
        run.traffic?.upload_bytes ? [h("h3", {}, "Traffic"), h("p", {}, `Each round a client sends ${bytes(run.traffic.upload_bytes)} and receives ${bytes(run.traffic.download_bytes)}${run.traffic.lost ? `; ${run.traffic.lost} uploads were lost` : ""}.`)] : null),
      h("section", { class: "card" }, h("h2", {}, "Provenance"), h("dl", { class: "facts" }, Object.entries(run.provenance).flatMap(([name, value]) => [h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, value)])),
        h("h3", {}, "Downloads"), h("div", { class: "downloads" }, run.files.map((file) => h("a", { class: "button", href: `/api/file?${new URLSearchParams({ id, name: file.name })}`, title: file.description, download: true }, `${file.name} · ${bytes(file.bytes)}`))))),
    h("section", { class: "card" }, h("div", { class: "spread" }, h("h2", {}, "Spec"), button), h("pre", { tabindex: 0, "aria-label": "spec.toml" }, run.spec)),
  ];
}

// Metrics by scikit-learn on the public test records, beside a constant prediction.
function scoresSection(run) {
  const { scores } = run;
  if (!scores) return null;
  const table = (caption, head, rows) => h("div", { class: "tablewrap" }, h("table", {}, h("caption", {}, caption),
    h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, rows.map(([name, ...cells]) => h("tr", {}, h("th", { scope: "row" }, name), cells.map((cell) => h("td", {}, cell)))))));
  const { confusion } = scores;
  return h("section", { class: "card" }, h("h2", {}, "Scores"),
    table(`${scores.records.toLocaleString("en")} public test records`, ["", "model", scores.trivial], scores.rows.map(([name, ours, trivial]) => [name, short(ours, 4), trivial === null ? "–" : short(trivial, 4)])),
    confusion ? table("Confusion matrix", ["true class", ...confusion.classes.map((name) => `predicted ${name}`)], confusion.counts.map((row, i) => [confusion.classes[i], ...row.map((count) => count.toLocaleString("en"))])) : null,
    scores.calibration.length ? h("details", {}, h("summary", {}, "Calibration"), table("How often predictions are right", ["predicted", "observed", "records"],
      scores.calibration.map(([predicted, observed, records]) => [short(predicted, 3), short(observed, 3), records.toLocaleString("en")]))) : null);
}

async function computed() {
  let analysis;
  try {
    analysis = await get("/api/analysis", { id });
  } catch (error) {
    lazy.replaceChildren(h("section", { class: "card" }, h("h2", {}, "Noise, participation and ε by round"), failed(error)));
    return;
  }
  const byRound = chart("Proven ε against rounds", `Against ${analysis.epsilon.adversary}, ${analysis.epsilon.adjacency}.`);
  const noise = chart("Noise of each round", "Noise over sensitivity for the first client. Higher is more private.");
  const map = chart("Which client took part in which round", mapCaption(analysis.cohorts), analysis.cohorts.clients.length > 30);
  const everybody = analysis.cohorts.took_part.every((row) => row.every((value) => value === 1));
  const clients = analysis.clients && !sameForAll(analysis) ? chart("Proven ε of each client", "ε of each client, from the rounds it took part in.") : null;
  lazy.replaceChildren(h("div", { class: "grid" },
    h("section", { class: "card" }, h("h2", {}, "ε by round"), byRound.figure),
    h("section", { class: "card" }, h("h2", {}, "Noise schedule"), steadyNoise(analysis.noise) ?? noise.figure),
    h("section", { class: "card" }, h("h2", {}, "Participation"), everybody ? h("p", {}, "Every client took part in every round.") : map.figure),
    h("section", { class: "card" }, h("h2", {}, "ε by client"), clients ? clients.figure : sameForAll(analysis) ?? spreadOverClients())));
  const target = current.row.noise === "proven" ? number(current.row.target) : null;
  draw(byRound.box, (c, style) => ({
    traces: [
      { x: [0, ...analysis.epsilon.rounds], y: [0, ...analysis.epsilon.values.map(number)], mode: "lines+markers", line: { color: c[0], width: 2.2 }, marker: { size: 5 }, name: "proven", hovertemplate: "round %{x}: ε = %{y:.4g}<extra></extra>" },
      ...(target && Number.isFinite(target) ? [{ x: [0, analysis.rounds], y: [target, target], mode: "lines", name: "target", line: { color: style("--muted"), dash: "dot" }, hovertemplate: "target %{y:.3g}<extra></extra>" }] : []),
    ],
    layout: { showlegend: Boolean(target), xaxis: { title: "rounds", rangemode: "tozero" }, yaxis: { title: "proven ε", rangemode: "tozero" } },
  }));
  if (!steadyNoise(analysis.noise)) draw(noise.box, (c) => ({
    traces: Object.entries(analysis.noise).map(([channel, one], i) => ({ x: one.rounds, y: one.multiplier, name: channel, mode: "lines+markers", marker: { size: 4 }, line: { color: c[i + 2], width: 2.2 }, customdata: one.std, hovertemplate: `round %{x}: σ/Δ = %{y:.4g}, σ = %{customdata:.4g}<extra>${channel}</extra>` })),
    layout: { showlegend: Object.keys(analysis.noise).length > 1, xaxis: { title: "rounds" }, yaxis: { title: "noise multiplier σ/Δ", rangemode: "tozero" } },
  }));
  if (!everybody) draw(map.box, (c, style) => ({
    traces: [{ type: "heatmap", x: analysis.cohorts.rounds, y: analysis.cohorts.clients.map(plain), z: analysis.cohorts.took_part, colorscale: [[0, style("--soft")], [1, c[0]]], zmin: 0, zmax: 1, showscale: false, xgap: analysis.cohorts.rounds.length < 80 ? 1 : 0, ygap: analysis.cohorts.clients.length < 60 ? 1 : 0, hovertemplate: "%{y}, round %{x}<extra></extra>" }],
    layout: { xaxis: { title: "rounds", showgrid: false }, yaxis: { autorange: "reversed", showgrid: false, title: analysis.cohorts.clients.length > 30 ? "clients" : "", showticklabels: analysis.cohorts.clients.length <= 30, type: "category" } },
  }));
  if (clients) {
    draw(clients.box, (c, style) => ({
      traces: [{ type: "bar", x: analysis.clients.names.map(plain), y: analysis.clients.epsilon.map(number), customdata: analysis.clients.participations, marker: { color: c[0] }, hovertemplate: "%{x}: ε = %{y:.4g}, took part %{customdata} times<extra></extra>" }],
      layout: {
        xaxis: { showticklabels: analysis.clients.names.length <= 24, title: analysis.clients.names.length <= 24 ? "" : "clients", type: "category" }, yaxis: { title: "proven ε", rangemode: "tozero" },
        shapes: target && Number.isFinite(target) ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: target, y1: target, line: { color: style("--muted"), dash: "dot", width: 1.5 } }] : [],
      },
    }));
  }
  lazy.append(boundCard());
  lazy.dataset.ready = "yes";
}

function mapCaption(cohorts) {
  const parts = [];
  if (cohorts.clients.length < cohorts.of) parts.push(`the first ${cohorts.clients.length} of ${cohorts.of} clients`);
  if (cohorts.every > 1) parts.push(`every ${cohorts.every}th round`);
  return parts.length ? `Shown: ${parts.join(", ")}.` : "A filled cell means that the client took part in that round.";
}

// Bars of one height say no more than one number.
function sameForAll(analysis) {
  const values = [...new Set((analysis.clients?.epsilon ?? []).map((value) => epsilon(value)))];
  if (values.length !== 1) return null;
  return h("p", {}, `All ${analysis.clients.names.length} clients have the same proven ε, to three digits: `, h("strong", {}, values[0]), ".");
}

function steadyNoise(noise) {
  const channels = Object.entries(noise);
  const same = (values) => values.every((value) => short(value, 4) === short(values[0], 4));
  if (!channels.length || !channels.every(([, one]) => same(one.multiplier) && same(one.std))) return null;
  return h("div", {}, ...channels.map(([channel, one]) => h("p", {}, `The same in every round (${channel}): σ/Δ = ${short(one.multiplier[0], 4)}, σ = ${short(one.std[0], 4)}.`)),
    h("p", { class: "muted small" }, "σ is the noise's standard deviation, Δ the sensitivity. Higher σ/Δ is more private."));
}

function spreadOverClients() {
  const row = current.proven.find((one) => one.of_spec && one.clients);
  if (!row) return h("p", { class: "muted" }, "ε by client is known when the run ends.");
  const most = Math.max(...Object.values(row.clients).map((v) => number(v) ?? 0).filter(Number.isFinite), 1e-9);
  return h("div", {}, h("p", { class: "muted small" }, "There are too many different clients to list. The least exposed, the median and the most exposed client:"),
    h("table", {}, h("tbody", {}, ["min", "median", "max"].map((name) => h("tr", {}, h("th", { scope: "row" }, name), h("td", { class: "num" }, epsilon(row.clients[name])),
      h("td", { class: "meter" }, h("meter", { class: "bars", min: 0, max: most, value: Math.min(number(row.clients[name]) ?? 0, most), "aria-label": `ε of the ${name}` })))))));
}

function boundCard() {
  const inside = h("div", {});
  const button = h("button", { onclick: ask }, "Compute the bound");
  async function ask() {
    button.disabled = true;
    inside.replaceChildren(wait("estimating the constants of the loss on the public records; this can take a minute"));
    try {
      const bound = await get("/api/bound", { id });
      const { round = [], train_loss = [] } = current.local;
      const least = bound.least_loss;
      const measured = least === null ? null : { x: round, y: train_loss.map((value) => (value === null ? null : Math.max(value - least, 0))) };
      const figure = boundFigure(bound, measured);
      inside.replaceChildren(
        bound.vacuous ? h("div", { class: "note" }, h("p", {}, h("strong", {}, "Vacuous: "), `at best the theorem guarantees a loss ${short(Math.min(...bound.total.map(number).filter(Number.isFinite)))} above the minimum; the initial model is only ${short(bound.initial_gap)} above it.`)) : h("div", { class: "note info" }, h("p", {}, `The theorem guarantees ${short(number(bound.total.at(-1)))} above the minimum after the last round.`)),
        figure.figure,
        bound.failing.length ? h("p", { class: "small" }, `Conditions that fail: ${bound.failing.join("; ")}.`) : null,
        h("p", { class: "muted small" }, `${bound.source}, at the run's noise. The constants of the loss are estimated on the run's public records: a prediction, not a certificate. `,
          bound.rate ? `The bound uses the best learning rate that its theorem allows (${short(bound.rate)}); the run used ${short(bound.run_rate)}.` : ""));
      await figure.redraw();
      button.hidden = true;
      inside.dataset.ready = "yes";
    } catch (error) {
      inside.replaceChildren(failed(error));
      button.disabled = false;
    }
  }
  return h("section", { class: "card" }, h("div", { class: "spread" }, h("h2", {}, "Convergence: what the paper's theorem guarantees"), button), inside);
}

let current = null;

async function load() {
  current = await get("/api/run", { id });
  document.title = `${current.row.name} · Dither`;
  top.replaceChildren(...overview(current).filter(Boolean));
  privacy.replaceChildren(privacySection(current));
  rest.replaceChildren(...[scoresSection(current)].filter(Boolean), ...provenance(current));
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
