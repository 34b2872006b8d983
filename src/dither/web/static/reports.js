// Reports of dither reproduce: listed, and shown in a frame that may run and load nothing.
import { ago, failed, get, h, show, wait } from "./dom.js";

show(wait("looking for reports"));
try {
  const { folder, reports } = await get("/api/reports");
  const frame = h("iframe", { class: "report", sandbox: "", title: "Report", referrerpolicy: "no-referrer" });
  const wanted = new URLSearchParams(location.search).get("name");
  const chosen = reports.find((report) => report.name === wanted) ?? reports[0];
  const address = (report) => `/report/${report.name.split("/").map(encodeURIComponent).join("/")}`;
  if (chosen) { frame.src = address(chosen); frame.title = `Report ${chosen.name}`; }
  show(
    h("h1", {}, "Reproduce"),
    h("p", { class: "muted" }, "The papers' figures, computed again, with a verdict on each claim. ", h("span", { class: "small" }, folder)),
    reports.length === 0
      ? h("section", { class: "card" }, h("h2", {}, "No report yet"), h("p", {}, "Create one with: ", h("code", {}, "dither reproduce all"), ". Reports in the reports folder appear here. To use another folder: ", h("code", {}, "dither web --reports FOLDER"), "."))
      : [h("section", { class: "card" }, h("ul", { class: "plain" }, reports.map((report) => h("li", {},
          h("a", { href: `/reports?${new URLSearchParams({ name: report.name })}`, "aria-current": report === chosen ? "true" : null }, report.name),
          h("span", { class: "muted small" }, ` · ${ago(report.time)}${report.scale ? ` · scale ${report.scale}` : ""}${report.figures ? ` · ${report.figures} figures` : ""} · `),
          h("a", { href: address(report), class: "small" }, "open alone"))))), frame]);
} catch (error) {
  show(failed(error));
}
