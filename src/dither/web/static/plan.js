// Sliders for a budget: the accountant answers while they move.
import { bytes, copy, epsilon, failed, get, h, number, scientific, short, show, wait } from "./dom.js";
import { boundFigure, chart, draw } from "./charts.js";

const LOG = new Set(["epsilon", "delta", "clients", "records", "rounds", "steps", "batch", "features"]);
const TEXTS = {
  epsilon: "ε of the whole run", delta: "δ", clients: "clients", records: "records in all", rounds: "rounds",
  share: "share of clients in a round", steps: "local steps a round", batch: "records in a batch", features: "parameters of the model",
};
const STEPS = 240;

show(wait("waking the accountant"));
try {
  start(await get("/api/plan/limits"));
} catch (error) {
  show(failed(error));
}

function start({ limits, methods, defaults }) {
  const wish = { ...defaults, ...Object.fromEntries([...new URLSearchParams(location.search)].filter(([name]) => name in defaults)) };
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
  const worded = (name) => (name === "share" ? `${Math.round(100 * wish.share)}%` : name === "delta" ? scientific(Number(wish.delta)) : Number(wish[name]).toLocaleString("en"));

  function slider(name) {
    outputs[name] = h("output", { id: `${name}-value`, for: `${name}-slider` }, worded(name));
    inputs[name] = h("input", { id: `${name}-slider`, type: "range", min: 0, max: STEPS, step: 1, "aria-valuetext": worded(name), oninput: () => {
      wish[name] = value(name, Number(inputs[name].value));
      moved(name);
    } });
    inputs[name].value = position(name, Number(wish[name]));
    return h("div", { class: "slider" }, h("label", { for: `${name}-slider` }, TEXTS[name]), outputs[name], inputs[name]);
  }

  const method = h("select", { id: "method", onchange: () => {
    wish.method = method.value;
    ask();
  } }, Object.entries(methods).map(([name, text]) => h("option", { value: name }, text)));
  const adjacency = h("select", { id: "adjacency", onchange: () => { wish.adjacency = adjacency.value; ask(); } },
    h("option", { value: "zero-out" }, "one record blanked"), h("option", { value: "replace-one" }, "one record replaced"));
  method.value = wish.method;
  adjacency.value = wish.adjacency;

  const answerBox = h("div", { role: "status", "aria-live": "polite" }, wait("computing"));
  const byEpsilon = chart("Required noise against ε", "Every point is solved by the accountant; the dot is the plan.");
  const byRounds = chart("Required noise against rounds", "More rounds reveal more, so each must be noisier.");
  const boundBox = h("div", {});
  const boundNote = h("div", {});
  const specBox = h("pre", { tabindex: 0, "aria-label": "spec as TOML" });
  const copyButton = h("button", { class: "primary", onclick: () => copy(specBox.textContent, copyButton) }, "Copy spec");

  show(
    h("h1", {}, "Plan"),
    h("p", { class: "muted" }, "How much noise does a privacy budget ask for? The proven accountant answers while you drag: for one who sees every upload, over the whole run."),
    h("div", { class: "side" },
      h("section", { class: "card sticky", "aria-label": "What you want" }, h("div", { class: "sliders" },
        h("label", { class: "field" }, "Method", method), h("label", { class: "field" }, "Neighbours", adjacency),
        ["epsilon", "delta", "clients", "records", "rounds"].map(slider),
        h("details", {}, h("summary", {}, "More"), h("div", { class: "sliders" }, ["share", "steps", "batch", "features"].map(slider))))),
      h("div", {},
        answerBox,
        h("div", { class: "grid" }, h("section", { class: "card" }, h("h2", {}, "Noise against the budget"), byEpsilon.figure), h("section", { class: "card" }, h("h2", {}, "Noise against rounds"), byRounds.figure)),
        h("section", { class: "card" }, h("h2", {}, "What the paper's theorem promises"), boundNote, boundBox),
        h("section", { class: "card" }, h("div", { class: "spread" }, h("h2", {}, "Spec"), copyButton),
          h("p", { class: "muted small" }, "Save it as my.toml and run: dither run my.toml. With noise = \"proven\" the run solves for its own noise, from the cohorts that it really draws. Put your own table in data.path."),
          specBox))));

  let asking = null, later = null, sent = 0;

  function moved(name) {
    outputs[name].textContent = worded(name);
    inputs[name].setAttribute("aria-valuetext", worded(name));
    ask();
  }

  const parameters = () => Object.fromEntries(Object.entries(wish).map(([name, one]) => [name, String(one)]));

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
    const w = plan.wish;
    answerBox.replaceChildren(
      h("div", { class: "tiles three" },
        tile("Noise multiplier", short(plan.multiplier, 4), "noise over sensitivity, in every release"),
        tile("Noise, std", short(plan.noise_std, 3), `on a coordinate, clip ${short(plan.clip)}; ${short(plan.averaged_std)} after averaging ${w.cohort}`),
        tile("Proven ε", epsilon(plan.proven), `${plan.recipe}; at most ${epsilon(w.epsilon)}`, "proven"),
        tile("The paper would claim", epsilon(plan.claimed.value), `per ${plan.claimed.unit}, for this noise`, "claimed"),
        tile("A client takes part", `${plan.participations}×`, plan.sure ? "in every run" : "at most, with 95% probability"),
        tile("Uploaded", bytes(plan.bytes), `${w.cohort} clients a round, ${w.each.toLocaleString("en")} records each`)),
      h("p", { class: "muted small" }, `Not covered: ${plan.not_covered.join("; ")}. ${plan.evaluations} evaluations of the accountant, ${Math.round(took)} ms`));
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
        draw(byEpsilon.box, line(curve.epsilon, curve.by_epsilon, plan.wish.epsilon, "ε")),
        draw(byRounds.box, line(curve.rounds, curve.by_rounds, plan.wish.rounds, "rounds"))]);
      const bound = await get("/api/plan/bound", asked);
      if (mine !== sent) return;
      const totals = bound.total.map(number).filter((v) => v !== null && Number.isFinite(v));
      boundNote.replaceChildren(
        bound.vacuous ? h("div", { class: "note" }, h("p", {}, h("strong", {}, "Vacuous here: "), `at its best it promises a loss ${short(Math.min(...totals))} above the minimum, the initial model is ${short(bound.initial_gap)} above it. Measuring tells more: dither plan --mode empirical.`))
          : h("div", { class: "note info" }, h("p", {}, `At its best it promises a loss ${short(Math.min(...totals))} above the minimum; the initial model is ${short(bound.initial_gap)} above it.`)));
      const figure = boundFigure(bound, null);
      figure.words.textContent = `${bound.source}; constants ${bound.constants}.`;
      boundBox.replaceChildren(figure.figure);
      await figure.redraw();
    } catch (error) {
      if (mine === sent) boundNote.replaceChildren(failed(error));
    }
  }

  ask();
}
