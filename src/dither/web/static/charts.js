// Plotly, loaded from this server when the first chart is drawn, in the page's colours.
import { h } from "./dom.js";

let loading = null;
const drawn = new Map();

function plotly() {
  loading ??= new Promise((done, fail) => {
    const script = h("script", { src: "/plotly.min.js" });
    script.addEventListener("load", () => done(window.Plotly));
    script.addEventListener("error", () => fail(new Error("the chart library could not be loaded")));
    document.head.append(script);
  });
  return loading;
}

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export const colours = () => ["--s1", "--s2", "--s3", "--s4", "--s5", "--s6", "--s7"].map(style);

export function faded(colour, share) {
  const value = Number.parseInt(colour.slice(1), 16);
  return `rgba(${value >> 16}, ${(value >> 8) & 255}, ${value & 255}, ${share})`;
}

function themed(layout) {
  const axis = { gridcolor: style("--line"), linecolor: style("--line"), zeroline: false, automargin: true, tickfont: { size: 12 } };
  const merged = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest",
    font: { family: "system-ui, sans-serif", size: 13, color: style("--ink") },
    margin: { l: 56, r: 16, t: 12, b: 46 }, showlegend: false, dragmode: false,
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 12 }, bgcolor: "rgba(0,0,0,0)" },
    hoverlabel: { bgcolor: style("--surface"), bordercolor: style("--line"), font: { color: style("--ink") } },
    ...layout,
  };
  for (const name of Object.keys(layout)) {
    if (/^[xy]axis\d*$/.test(name)) {
      const title = typeof layout[name].title === "string" ? { text: layout[name].title, font: { size: 13 }, standoff: 8 } : layout[name].title;
      merged[name] = { ...axis, ...layout[name], ...(title ? { title } : {}) };
    }
  }
  return merged;
}

// An axis of scores is at least 0.1 wide: what differs by less does not look like a climb.
export function scoreRange(values) {
  const known = values.filter((value) => typeof value === "number");
  if (!known.length) return [0, 1];
  const low = Math.min(...known), high = Math.max(...known);
  const pad = Math.max(0.05 * (high - low), (0.1 - (high - low)) / 2);
  const top = Math.min(high + pad, Math.max(1, high));
  return [Math.min(low - pad, top - 0.1), top];
}

// Plotly reads a little markup in names, so its brackets are written out.
export const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

// Dotted lines between which a score lies: the trivial predictor, and the same run without noise.
export const referenceLines = (references, x, colour) => references.map(({ name, value }, i) => ({
  x: [Math.min(...x), Math.max(...x)], y: [value, value], name: plain(name), mode: "lines", line: { color: colour, dash: ["dot", "dash"][i % 2], width: 1.5 },
  hovertemplate: "%{y:.4f}<extra>%{fullData.name}</extra>",
}));

// `make` gives { traces, layout } in the colours of the moment, so that a change of light and dark draws again.
export async function draw(box, make) {
  drawn.set(box, make);
  const Plotly = await plotly();
  if (drawn.get(box) !== make) return;
  const { traces, layout } = make(colours(), style);
  await Plotly.react(box, traces, themed(layout), { displaylogo: false, displayModeBar: false, responsive: true });
  box.dataset.drawn = String(Number(box.dataset.drawn || 0) + 1);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const [box, make] of drawn) if (box.isConnected) draw(box, make);
});

export function chart(label, caption = "", tall = false) {
  const box = h("div", { class: `chart${tall ? " tall" : ""}`, role: "img", "aria-label": label });
  const text = h("figcaption", {}, caption);
  return { figure: h("figure", {}, box, text), box, caption: text };
}

// The terms of a bound over rounds: stacked, or as lines on a logarithmic scale where the bound dwarfs what it bounds.
export function boundFigure(bound, measured) {
  const result = chart("The paper's convergence bound, term by term, over rounds", "", true);
  let scale = bound.vacuous ? "log" : "stacked";
  const group = `scale-${Math.random().toString(36).slice(2)}`;
  const radios = Object.entries({ stacked: "terms stacked", log: "logarithmic" }).map(([key, text]) => {
    const radio = h("input", { type: "radio", name: group, value: key, onchange: () => { scale = key; redraw(); } });
    radio.checked = key === scale;
    return h("label", {}, radio, text);
  });
  const redraw = () => draw(result.box, (scale === "log" ? lines : stacked)(bound, measured));
  result.figure.prepend(h("fieldset", { class: "choice small" }, h("legend", {}, "Scale"), radios));
  return { ...result, redraw };
}

const finite = (values) => values.map((v) => (typeof v === "number" ? v : null));

const BOUND_AXES = (bound, yaxis) => ({
  showlegend: true, hovermode: "x unified", xaxis: { title: "rounds", type: bound.rounds.at(-1) > 40 ? "log" : "linear", dtick: bound.rounds.at(-1) > 40 ? "D2" : undefined },
  yaxis: { title: "loss above the minimum", exponentformat: "power", ...yaxis },
});

function gapLine(bound, style) {
  return {
    x: [bound.rounds[0], bound.rounds.at(-1)], y: [bound.initial_gap, bound.initial_gap], mode: "lines", name: "initial model (vacuous above)",
    line: { color: style("--ink"), dash: "dot", width: 1.5 }, hovertemplate: "%{y:.3g}<extra>initial model</extra>",
  };
}

function measuredLine(measured, colour) {
  return { ...measured, name: "measured", mode: "lines+markers", line: { color: colour, width: 2.6 }, marker: { size: 5 }, hovertemplate: "%{y:.3g}<extra>measured</extra>" };
}

function stacked(bound, measured) {
  return (palette, style) => {
    const traces = Object.entries(bound.terms).map(([name, values], i) => ({
      x: bound.rounds, y: finite(values), name: name.replaceAll("_", " "), stackgroup: "terms", mode: "lines",
      line: { width: 0.6, color: palette[(i + 1) % palette.length] }, fillcolor: faded(palette[(i + 1) % palette.length], 0.55),
      hovertemplate: "%{y:.3g}<extra>%{fullData.name}</extra>",
    }));
    if (measured) traces.push(measuredLine(measured, palette[0]));
    traces.push(gapLine(bound, style));
    return { traces, layout: BOUND_AXES(bound, { rangemode: "tozero" }) };
  };
}

function lines(bound, measured) {
  return (palette, style) => {
    const traces = Object.entries(bound.terms).map(([name, values], i) => ({
      x: bound.rounds, y: finite(values), name: name.replaceAll("_", " "), mode: "lines", line: { width: 1.8, dash: "dash", color: palette[(i + 1) % palette.length] },
      hovertemplate: "%{y:.3g}<extra>%{fullData.name}</extra>",
    }));
    traces.push({ x: bound.rounds, y: finite(bound.total), name: "bound (sum of the terms)", mode: "lines", line: { color: style("--ink"), width: 2.4 }, hovertemplate: "%{y:.3g}<extra>bound</extra>" });
    if (measured) traces.push(measuredLine(measured, palette[0]));
    traces.push(gapLine(bound, style));
    return { traces, layout: BOUND_AXES(bound, { type: "log", dtick: 1 }) };
  };
}
