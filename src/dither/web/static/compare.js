// Runs beside one another: accuracy and loss against rounds, proven ε or bytes; runs that differ in their seed alone
// become one line, with a band of ± one standard error.
import { epsilon, failed, get, h, number, wait } from "./dom.js";
import { chart, draw, faded, plain, referenceLines, scoreRange } from "./charts.js";

const AXES = { round: "rounds", epsilon: "proven ε", bytes: "bytes uploaded" };
let latest = 0;

export async function compare(panel, rows) {
  const mine = ++latest;
  let axis = panel.dataset.axis || "round";
  const accuracy = chart("Test accuracy of the selected runs"), loss = chart("Test loss of the selected runs");
  const note = h("p", { class: "muted small", role: "status" });
  const trouble = h("div", {});
  const radios = Object.entries(AXES).map(([key, text]) => {
    const radio = h("input", { type: "radio", name: "axis", value: key, onchange: () => { axis = panel.dataset.axis = key; redraw(); } });
    radio.checked = key === axis;
    return h("label", {}, radio, text);
  });
  panel.replaceChildren(h("div", { class: "card" },
    h("div", { class: "spread" }, h("h2", {}, "Comparison"),
      h("fieldset", { class: "choice" }, h("legend", {}, "Against"), radios),
      h("button", { onclick: () => { panel.hidden = true; panel.replaceChildren(); latest += 1; } }, "Close")),
    trouble, h("div", { class: "grid plain" }, h("div", {}, h("h3", {}, "Accuracy"), accuracy.figure), h("div", {}, h("h3", {}, "Loss"), loss.figure)), note));

  const runs = new Map();
  async function load(row) {
    const answer = await get("/api/run", { id: row.id });
    runs.set(row.id, { ...answer, row, epsilon: runs.get(row.id)?.epsilon });
  }

  async function needEpsilon() {
    const waiting = [...runs.values()].filter((run) => !run.epsilon || run.epsilon.at !== run.row.round);
    if (!waiting.length) return;
    note.textContent = "computing ε by round …";
    await Promise.all(waiting.map(async (run) => {
      try {
        run.epsilon = { ...(await get("/api/epsilon", { id: run.row.id })), at: run.row.round };
      } catch (error) {
        run.epsilon = { rounds: [], values: [], problem: error.message, at: run.row.round };
      }
    }));
  }

  // [{ x, y, round }] of one run on the axis of the moment
  function points(run, name) {
    const { round = [], [name]: values = [] } = run.metrics;
    const rounds = run.epsilon?.rounds ?? [];
    const result = [];
    round.forEach((t, i) => {
      let x = t;
      if (axis === "bytes") x = run.bytes === null ? null : run.bytes * t;
      if (axis === "epsilon") {
        const at = rounds.indexOf(t);
        x = at >= 0 ? number(run.epsilon.values[at]) : null;
        const last = i === round.length - 1 && run.row.proven;
        if (x === null && last && run.epsilon?.problem) x = number(run.row.proven.value);
      }
      if (x !== null && Number.isFinite(x) && values[i] !== null && values[i] !== undefined) result.push({ x, y: values[i], round: t });
    });
    return result;
  }

  function groups() {
    const bySpec = new Map();
    for (const run of runs.values()) {
      const key = run.row.group;
      bySpec.set(key, [...(bySpec.get(key) ?? []), run]);
    }
    return [...bySpec.values()];
  }

  function label(group) {
    const [first] = group;
    const name = group.length > 1 ? `${common(group.map((run) => run.row.name))} (${group.length} seeds)` : first.row.name;
    return first.row.proven ? `${name}, proven ε ${epsilon(first.row.proven.value)}` : name;
  }

  // The trivial predictor's score, where the runs share one.
  function trivial() {
    const lines = [...runs.values()].map((run) => run.references.find((one) => one.name !== "without noise"));
    return lines[0] && lines.every((line) => line?.value === lines[0].value) ? [lines[0]] : [];
  }

  function figure(name, title, percent) {
    return (palette, style) => {
      const traces = [];
      groups().forEach((group, i) => {
        const colour = palette[i % palette.length];
        const dash = ["solid", "dash", "dot", "dashdot"][Math.floor(i / palette.length) % 4];
        const lines = group.map((run) => points(run, name)).filter((line) => line.length);
        if (!lines.length) return;
        const by = new Map();
        for (const line of lines) for (const point of line) by.set(point.round, [...(by.get(point.round) ?? []), point]);
        const full = [...by.values()].filter((same) => same.length === lines.length).sort((a, b) => a[0].round - b[0].round);
        const x = full.map((same) => mean(same.map((p) => p.x)));
        const y = full.map((same) => mean(same.map((p) => p.y)));
        if (lines.length > 1) {
          const error = full.map((same) => standardError(same.map((p) => p.y)));
          const low = y.map((value, i) => value - error[i]), high = y.map((value, i) => value + error[i]);
          traces.push({
            x: [...x, ...x.slice().reverse()], y: [...high, ...low.slice().reverse()], fill: "toself", mode: "lines",
            line: { width: 0 }, fillcolor: faded(colour, 0.18), hoverinfo: "skip", showlegend: false,
          });
        }
        traces.push({
          x, y, name: label(group), mode: full.length > 25 ? "lines" : "lines+markers", line: { color: colour, width: 2.2, dash }, marker: { size: 5, color: colour },
          hovertemplate: `%{y:.4f}<br>${AXES[axis]} %{x:.4s}<extra>%{fullData.name}</extra>`,
        });
      });
      for (const trace of traces) if (trace.name) trace.name = plain(trace.name);
      if (percent && traces.length) traces.push(...referenceLines(trivial(), traces.flatMap((trace) => trace.x), style("--muted")));
      return { traces, layout: { showlegend: true, xaxis: { title: AXES[axis], exponentformat: "SI" }, yaxis: percent ? { title, tickformat: ".3", range: scoreRange(traces.flatMap((trace) => trace.y)) } : { title, rangemode: "tozero" } } };
    };
  }

  async function redraw() {
    try {
      if (axis === "epsilon") await needEpsilon();
      if (mine !== latest) return;
      await Promise.all([draw(accuracy.box, figure("test_accuracy", "test accuracy", true)), draw(loss.box, figure("loss", "test loss", false))]);
      const many = groups().some((group) => group.length > 1);
      const missing = [...runs.values()].filter((run) => points(run, "test_accuracy").length === 0);
      const refused = [...new Set([...runs.values()].map((run) => run.epsilon?.problem).filter(Boolean))];
      note.textContent = [
        many ? "A line is the mean over the seeds of one spec. The band is ± one standard error." : "",
        axis === "epsilon" ? "ε is proven for the view and adjacency of each run's spec." : "",
        missing.length ? `Not shown on this axis: ${missing.map((run) => run.row.name).join(", ")}.` : "",
        axis === "epsilon" && refused.length ? refused.join(" ") : "",
      ].filter(Boolean).join(" ");
      panel.dataset.ready = axis;
    } catch (error) {
      trouble.replaceChildren(failed(error));
    }
  }

  panel.onchange_rows = async (event) => {
    const changed = event.detail.filter((row) => runs.has(row.id));
    if (mine !== latest || !changed.length) return;
    await Promise.all(changed.map(load));
    await redraw();
  };
  panel.addEventListener("changed", panel.onchange_rows);

  note.replaceChildren(wait("reading the runs"));
  try {
    await Promise.all(rows.map(load));
    if (mine === latest) await redraw();
  } catch (error) {
    trouble.replaceChildren(failed(error));
  }
}

const standardError = (values) => {
  const middle = mean(values);
  const variance = values.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (values.length - 1);
  return Math.sqrt(variance / values.length);
};
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

function common(names) {
  let start = names[0];
  for (const name of names) while (!name.startsWith(start)) start = start.slice(0, -1);
  start = start.replace(/[-_ ]?(seed)?[-_ ]?$/i, "");
  return start || names[0];
}
