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
  const words = h("figcaption", {}, caption);
  return { figure: h("figure", {}, box, words), box, words };
}

// The terms of a bound, stacked over rounds; the line above which it promises nothing.
export function stacked(bound, measured) {
  return (palette, style) => {
    const names = Object.keys(bound.terms);
    const traces = names.map((name, i) => ({
      x: bound.rounds, y: bound.terms[name].map((v) => (typeof v === "number" ? v : null)), name: name.replaceAll("_", " "),
      stackgroup: "terms", mode: "lines", line: { width: 0.6, color: palette[(i + 1) % palette.length] },
      fillcolor: faded(palette[(i + 1) % palette.length], 0.55),
      hovertemplate: "%{y:.3g}<extra>%{fullData.name}</extra>",
    }));
    if (measured) traces.push({ ...measured, name: "measured", mode: "lines+markers", line: { color: palette[0], width: 2.4 }, marker: { size: 5 } });
    const gap = bound.initial_gap;
    traces.push({
      x: [bound.rounds[0], bound.rounds.at(-1)], y: [gap, gap], mode: "lines", name: "initial model (vacuous above)",
      line: { color: style("--ink"), dash: "dot", width: 1.5 }, hovertemplate: "%{y:.3g}<extra>initial gap</extra>",
    });
    return {
      traces,
      layout: {
        showlegend: true, hovermode: "x unified",
        xaxis: { title: "rounds", type: bound.rounds.at(-1) > 40 ? "log" : "linear" },
        yaxis: { title: "loss above the minimum", rangemode: "tozero", exponentformat: "power" },
      },
    };
  };
}
