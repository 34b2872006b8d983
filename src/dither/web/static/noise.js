// For newcomers: one record's gradient is clipped, noised and averaged. What is left for the server to see?
import { epsilon, get, h, scientific, short, show } from "./dom.js";
import { chart, draw, faded } from "./charts.js";

const state = { length: 2.4, clip: 1, noise: 1, clients: 8, delta: 1e-5 };
const ANGLE = 0.55;  // of the record's gradient
const LIMITS = { length: [0.2, 4, 0.1], clip: [0.2, 3, 0.1], noise: [0.1, 6, 0.1], clients: [1, 200, 1] };
const TEXTS = {
  length: ["length of the record's gradient", "how far this record would move the model without a clip"],
  clip: ["clip", "no record can move the model farther than this"],
  noise: ["noise, as a multiple of the clip", "standard deviation of the noise that each client adds"],
  clients: ["clients in the average", "each adds its own noise"],
};

// A fixed cloud of standard normals, so that a slider moves points instead of drawing new ones.
function cloud(count) {
  let seed = 20241;
  const uniform = () => { seed = (1664525 * seed + 1013904223) % 4294967296; return (seed + 0.5) / 4294967296; };
  return Array.from({ length: count }, () => {
    const radius = Math.sqrt(-2 * Math.log(uniform())), turn = 2 * Math.PI * uniform();
    return [radius * Math.cos(turn), radius * Math.sin(turn)];
  });
}
const points = cloud(260);

const outputs = {};
const clipPicture = chart("A record's gradient before and after clipping");
const cloudPicture = chart("What a client may send, with and without the record");
const curvePicture = chart("What the server sees of the average, along the record's direction");
const verdict = h("div", { class: "note info", role: "status", "aria-live": "polite" }, h("p", {}, "…"));

function slider(name) {
  const [low, high, step] = LIMITS[name];
  outputs[name] = h("output", { for: `${name}-slider` }, short(state[name]));
  const input = h("input", { id: `${name}-slider`, type: "range", min: low, max: high, step, oninput: () => {
    state[name] = Number(input.value);
    outputs[name].textContent = short(state[name]);
    redraw();
  } });
  input.value = state[name];
  return h("div", { class: "slider" }, h("label", { for: `${name}-slider` }, TEXTS[name][0], h("span", { class: "sub" }, TEXTS[name][1])), outputs[name], input);
}

show(
  h("h1", {}, "What the noise does"),
  h("p", { class: "muted" }, "Every record moves its client's model. One of them is yours. Three things happen before the server sees a result: the record's gradient is clipped, noise is added, and the clients are averaged."),
  h("div", { class: "side" },
    h("section", { class: "card sticky", "aria-label": "Try it" }, h("div", { class: "sliders" }, Object.keys(LIMITS).map(slider))),
    h("div", {},
      verdict,
      h("div", { class: "grid" },
        h("section", { class: "card" }, h("h2", {}, "1. Clip"), clipPicture.figure, h("p", { class: "small muted" }, "However unusual a record is, it cannot move the sum outside the circle. This bounds what the noise has to hide.")),
        h("section", { class: "card" }, h("h2", {}, "2. Add noise"), cloudPicture.figure, h("p", { class: "small muted" }, "Each dot is an upload that the client might send, in one colour with your record and in the other without it. Where the clouds overlap, nobody can tell which it is."))),
      h("section", { class: "card" }, h("h2", {}, "3. Average, and what the server sees"), curvePicture.figure,
        h("p", { class: "small muted" }, "The two curves show the average of all clients, with and without your record. Averaging K clients divides the noise by √K and the effect of one record by K, and keeps what all clients have in common: the model learns and the record stays hidden. A server that sees single uploads sees picture 2.")))));

let waiting = null;

function redraw() {
  const { length, clip, noise, clients } = state;
  const kept = Math.min(length, clip), sigma = noise * clip;
  const tip = (r) => [r * Math.cos(ANGLE), r * Math.sin(ANGLE)];
  const bare = { showticklabels: false, showgrid: false, zeroline: false, showline: false, linewidth: 0, linecolor: "rgba(0,0,0,0)" };
  const square = (half) => ({ xaxis: { ...bare, range: [-half, half] }, yaxis: { ...bare, range: [-half, half], scaleanchor: "x" }, margin: { l: 8, r: 8, t: 12, b: 8 } });
  draw(clipPicture.box, (c, style) => {
    const turn = Array.from({ length: 73 }, (_, i) => (i * Math.PI) / 36);
    return {
      traces: [
        { x: turn.map((t) => clip * Math.cos(t)), y: turn.map((t) => clip * Math.sin(t)), mode: "lines", name: "clip", line: { color: style("--muted"), dash: "dot" }, hoverinfo: "skip" },
        arrow([0, 0], tip(length), faded(c[1], 0.45), "the record's gradient"), arrow([0, 0], tip(kept), c[1], "after the clip"),
      ],
      layout: { showlegend: true, ...square(Math.max(1.8, clip + 0.2, 0.55 * length + 0.3)) },
    };
  });
  draw(cloudPicture.box, (c) => {
    const [dx, dy] = tip(kept);
    const dots = (x, y, colour, name) => ({ x: points.map((p) => x + sigma * p[0]), y: points.map((p) => y + sigma * p[1]), mode: "markers", name, marker: { size: 5, color: faded(colour, 0.55) }, hoverinfo: "skip" });
    return {
      traces: [dots(0, 0, c[0], "without your record"), dots(dx, dy, c[1], "with it"), arrow([0, 0], [dx, dy], c[1], "")],
      layout: { showlegend: true, ...square(Math.max(1.8, 2.6 * sigma + kept)) },
    };
  });
  const shift = kept / clients, spread = sigma / Math.sqrt(clients);
  draw(curvePicture.box, (c) => {
    const reach = 4 * spread + shift;
    const x = Array.from({ length: 201 }, (_, i) => -reach + ((2 * reach + shift) * i) / 200);
    const bell = (at) => x.map((v) => Math.exp(-0.5 * ((v - at) / spread) ** 2) / (spread * Math.sqrt(2 * Math.PI)));
    const line = (at, colour, name) => ({ x, y: bell(at), mode: "lines", name, line: { color: colour, width: 2.4 }, fill: "tozeroy", fillcolor: faded(colour, 0.14), hoverinfo: "skip" });
    return { traces: [line(0, c[0], "without your record"), line(shift, c[1], "with it")], layout: { showlegend: true, xaxis: { title: "average, along the record's direction" }, yaxis: { title: "density", rangemode: "tozero", showticklabels: false } } };
  });
  clearTimeout(waiting);
  waiting = setTimeout(() => ask(kept, sigma, clients), 60);
}

function arrow([x0, y0], [x1, y1], colour, name) {
  return { x: [x0, x1], y: [y0, y1], mode: "lines+markers", name, showlegend: Boolean(name), line: { color: colour, width: 3 }, marker: { symbol: ["circle", "arrow"], size: [1, 13], angleref: "previous", color: colour, line: { width: 0 } }, hoverinfo: "skip" };
}

async function ask(kept, sigma, clients) {
  try {
    const answer = await get("/api/noise", { multiplier: (sigma / state.clip).toPrecision(6), clients: String(clients), delta: String(state.delta) });
    verdict.replaceChildren(
      h("p", {}, "One release, one record added or removed, δ = ", scientific(state.delta), ": against a server that sees the upload, ", h("strong", { class: "proven" }, `ε = ${epsilon(answer.upload)}`),
        `, which ${answer.upload_odds}. Against a server that sees only the average of ${clients} honest client${clients > 1 ? "s" : ""}, `, h("strong", { class: "proven" }, `ε = ${epsilon(answer.average)}`), `, which ${answer.average_odds}.`),
      h("p", { class: "small" }, "ε depends on the clip, not on the length of this record's gradient, so it holds for the most unusual record too. A run makes many releases. The Plan page counts all of them."));
    verdict.dataset.upload = String(answer.upload);
  } catch (error) {
    verdict.replaceChildren(h("p", {}, error.message));
  }
}

redraw();
