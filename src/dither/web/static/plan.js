// Sliders for a budget: the accountant answers while they move.
import { bytes, copy, epsilon, failed, get, h, number, scientific, short, show, wait } from "./dom.js";
import { boundFigure, chart, draw } from "./charts.js";

const LOG = new Set(["epsilon", "delta", "clients", "records", "rounds", "steps", "batch", "features"]);
const TEXTS = {
  epsilon: "ε of the whole run", delta: "δ", clients: "clients", records: "records in total", rounds: "rounds",
  share: "share of clients per round", steps: "local steps per round", batch: "batch size", features: "model parameters",
};
const STEPS = 240;

show(wait("starting the accountant"));
try {
  start(await get("/api/plan/limits"));
} catch (error) {
  show(failed(error));
}

function start({ limits, methods, defaults }) {
  const request = { ...defaults, ...Object.fromEntries([...new URLSearchParams(location.search)].filter(([name]) => name in defaults)) };
  const outputs = {}, inputs = {};
  const whole = (name) => !["epsilon", "delta", "share"].includes(name);
  const value = (name, position) => {
    const [low, high] = limits[name];
    const raw = LOG.has(name) ? low * (high / low) ** (position / STEPS) : low + ((high - low) * position) / STEPS;
    return whole(name) ? Math.round(raw) : Number(raw.toPrecision(3));
  };
  const position = (name, x) => {
    const [low, high] = limits[name];
    return Math.round(STEPS * (LOG.has(name) ? Math.log(x / low) / Math.log(high / low) : (x - low) / (high - low)));
  };
  const shown = (name) => (name === "share" ? `${Math.round(100 * request.share)}%` : name === "delta" ? scientific(Number(request.delta)) : Number(request[name]).toLocaleString("en"));

  function slider(name) {
    outputs[name] = h("output", { id: `${name}-value`, for: `${name}-slider` }, shown(name));
    inputs[name] = h("input", { id: `${name}-slider`, type: "range", min: 0, max: STEPS, step: 1, "aria-valuetext": shown(name), oninput: () => {
      request[name] = value(name, Number(inputs[name].value));
      moved(name);
    } });
    inputs[name].value = position(name, Number(request[name]));
    return h("div", { class: "slider" }, h("label", { for: `${name}-slider` }, TEXTS[name]), outputs[name], inputs[name]);
  }

  const method = h("select", { id: "method", onchange: () => {
    request.method = method.value;
    ask();
  } }, Object.entries(methods).map(([name, text]) => h("option", { value: name }, text)));
  const adjacency = h("select", { id: "adjacency", onchange: () => { request.adjacency = adjacency.value; ask(); } },
    h("option", { value: "zero-out" }, "zero-out: one record blanked"), h("option", { value: "replace-one" }, "replace-one: one record replaced"));
  method.value = request.method;
  adjacency.value = request.adjacency;

  const answerBox = h("div", { role: "status", "aria-live": "polite" }, wait("computing"));
  const byEpsilon = chart("Required noise against ε", "The accountant solves for every point. The dot is the plan.");
  const byRounds = chart("Required noise against rounds", "More rounds reveal more, so each round needs more noise.");
  const boundBox = h("div", {});
  const boundNote = h("div", {}, h("p", { class: "muted" }, "computing …"));
  const specBox = h("pre", { tabindex: 0, "aria-label": "spec as TOML" });
  const copyButton = h("button", { class: "primary", onclick: () => copy(specBox.textContent, copyButton) }, "Copy spec");

  show(
    h("h1", {}, "Plan"),
    h("p", { class: "muted" }, "How much noise does a privacy budget need? The accountant answers while you drag. ε is proven for the whole run, against a server that sees every upload."),
    h("div", { class: "side" },
      h("section", { class: "card sticky", "aria-label": "Settings" }, h("div", { class: "sliders" },
        h("label", { class: "field" }, "Method", method), h("label", { class: "field" }, "Adjacency", adjacency),
        ["epsilon", "delta", "clients", "records", "rounds"].map(slider),
        h("details", {}, h("summary", {}, "More"), h("div", { class: "sliders" }, ["share", "steps", "batch", "features"].map(slider))))),
      h("div", {},
        answerBox,
        h("div", { class: "grid" }, h("section", { class: "card" }, h("h2", {}, "Noise against the budget"), byEpsilon.figure), h("section", { class: "card" }, h("h2", {}, "Noise against rounds"), byRounds.figure)),
        h("section", { class: "card" }, h("h2", {}, "What the paper's theorem guarantees"), boundNote, boundBox),
        h("section", { class: "card" }, h("div", { class: "spread" }, h("h2", {}, "Spec"), copyButton),
          h("p", { class: "muted small" }, "Save it as my.toml and run: dither run my.toml. With noise = \"proven\" the run solves for the noise of the cohorts that it draws. To use your own table, set data.path."),
          specBox))));

  let asking = null, later = null, sent = 0;

  function moved(name) {
    outputs[name].textContent = shown(name);
    inputs[name].setAttribute("aria-valuetext", shown(name));
    ask();
  }

  const parameters = () => Object.fromEntries(Object.entries(request).map(([name, one]) => [name, String(one)]));

  // One question at a time: while the accountant answers, only the newest position of the sliders waits.
  function ask() {
    clearTimeout(later);
    if (asking) { asking = "again"; return; }
    asking = "now";
    answer();
  }

  async function answer() {
    const mine = ++sent;
    const asked = parameters();
    const began = performance.now();
    try {
      const plan = await get("/api/plan", asked);
      tell(plan, performance.now() - began);
      later = setTimeout(() => more(mine, asked, plan), 150);
    } catch (error) {
      answerBox.replaceChildren(failed(error));
      specBox.textContent = "";
    }
    if (asking === "again") { asking = "now"; answer(); } else asking = null;
  }

  function tell(plan, took) {
    const tile = (label, text, sub, kind = "") => h("div", { class: "tile" }, h("div", { class: "label" }, label), h("div", { class: `value ${kind}` }, text), h("span", { class: "sub" }, sub));
    const request = plan.request;
    answerBox.replaceChildren(
      h("div", { class: "tiles three" },
        tile("Noise multiplier", short(plan.multiplier, 4), "noise over sensitivity, in every release"),
        tile("Noise standard deviation", short(plan.noise_std, 3), `per coordinate, clip ${short(plan.clip)}; ${short(plan.averaged_std)} in the average of ${request.cohort}`),
        tile("Proven ε", epsilon(plan.proven), `${plan.recipe}; at most ${epsilon(request.epsilon, 0)}`, "proven"),
        tile("The paper's claim", epsilon(plan.claimed.value, 0), `per ${plan.claimed.unit}, at this noise`, "claimed"),
        tile("Rounds per client", String(plan.participations), plan.certain ? "for every client" : "at most, with 95% probability"),
        tile("Uploaded", bytes(plan.bytes), `${request.cohort} clients per round, ${request.each.toLocaleString("en")} records each`)),
      ...(plan.not_covered.length ? [h("p", { class: "muted small" }, `Not covered while this spec is seeded: ${plan.not_covered.join("; ")}. Noise for your own records (data.path) is drawn by the operating system and exact: this line does not apply to it.`)] : []),
      h("p", { class: "muted small" }, `${plan.evaluations} evaluations of the accountant, ${Math.round(took)} ms`));
    answerBox.dataset.multiplier = String(plan.multiplier);
    specBox.textContent = plan.spec;
  }

  async function more(mine, asked, plan) {
    try {
      const curve = await get("/api/plan/curve", asked);
      if (mine !== sent) return;
      const line = (x, y, at, title) => (c) => ({
        traces: [
          { x, y, mode: "lines+markers", line: { color: c[0], width: 2.2 }, marker: { size: 5 }, hovertemplate: `${title} %{x:.3g}: σ/Δ = %{y:.4g}<extra></extra>` },
          { x: [at], y: [plan.multiplier], mode: "markers", marker: { size: 12, color: c[1] }, hovertemplate: "the plan: σ/Δ = %{y:.4g}<extra></extra>" },
        ],
        layout: { xaxis: { title, type: "log", dtick: "D2" }, yaxis: { title: "noise multiplier σ/Δ", type: "log", dtick: "D2" } },
      });
      await Promise.all([
        draw(byEpsilon.box, line(curve.epsilon, curve.by_epsilon, plan.request.epsilon, "ε")),
        draw(byRounds.box, line(curve.rounds, curve.by_rounds, plan.request.rounds, "rounds"))]);
      const bound = await get("/api/plan/bound", asked);
      if (mine !== sent) return;
      const totals = bound.total.map(number).filter((v) => v !== null && Number.isFinite(v));
      boundNote.replaceChildren(
        bound.vacuous ? h("div", { class: "note" }, h("p", {}, h("strong", {}, "Vacuous here: "), `at best it guarantees a loss ${short(Math.min(...totals))} above the minimum; the initial model is ${short(bound.initial_gap)} above it. An empirical plan says more: dither plan --mode empirical.`))
          : h("div", { class: "note info" }, h("p", {}, `At best it guarantees a loss ${short(Math.min(...totals))} above the minimum; the initial model is ${short(bound.initial_gap)} above it.`)));
      const figure = boundFigure(bound, null);
      figure.caption.textContent = `${bound.source}; constants ${bound.constants}.`;
      boundBox.replaceChildren(figure.figure);
      await figure.redraw();
    } catch (error) {
      if (mine === sent) boundNote.replaceChildren(failed(error));
    }
  }

  ask();
}
