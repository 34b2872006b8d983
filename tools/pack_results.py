"""Make `results/` from a full reproduction: pictures, compressed drawings and numbers, the table of findings.

python -m dither.reproduction all --scale full --robust robust --cache CACHE --jobs 16 --out REPORT
python tools/pack_results.py REPORT results [NOTE]

NOTE says how the runs were made, where that was not by the one command.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
import textwrap
from collections import Counter
from pathlib import Path

from PIL import Image

from dither.experiment.report import decode
from dither.reproduction.drawing import DPI
from dither.reproduction.figure import VIEW_TITLES, paper
from dither.reproduction.judging import JudgedCriterion
from dither.reproduction.report import counts


def main(report: Path, out: Path, note: str = "") -> None:
    content = json.loads((report / "report.json").read_text())
    out.mkdir(exist_ok=True)
    pack_pictures(report, out)
    command = re.sub(r"(--cache|--out) \S+", r"\1 FOLDER", content["made"]["command"])
    content["made"]["command"] = re.sub(r" --minutes \S+", "", command)
    (out / "report.json").write_text(json.dumps(content, ensure_ascii=False) + "\n")
    (out / "README.md").write_text(page(content, note))


def pack_pictures(report: Path, out: Path) -> None:
    """Pictures without losses, drawings and numbers compressed."""
    for path in sorted(report.glob("*.png")):
        Image.open(path).convert("RGB").save(out / path.name, optimize=True, dpi=(DPI, DPI))
    for path in sorted([*report.glob("*.csv"), *report.glob("*.svg")]):
        text = path.read_text()
        if path.suffix == ".svg":  # a tenth of a point is finer than any screen
            text = re.sub(r"-?\d+\.\d{2,}", lambda match: f"{float(match[0]):.1f}", text)
        # No name and no time inside: the same numbers give the same bytes.
        with open(out / f"{path.name}.gz", "wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
            packed.write(text.encode())


def page(content: dict, note: str) -> str:
    made, figures = content["made"], content["figures"]
    devices = Counter(name for figure in figures for name in figure["devices"])
    versions = sorted({version for figure in figures for version in figure["versions"]})
    tally = counts(decode(JudgedCriterion, claim) for figure in figures for claim in figure["claims"])
    verdicts = ", ".join(f"{number} {status}" for status, number in tally.items())
    runs = f"""
        Runs: `python -m dither.reproduction all --scale {content["scale"]} --robust robust --cache CACHE --jobs 16
        --only-compute` on {", ".join(sorted(devices))} ({"; ".join(versions)}): {made["runs"]:,} runs,
        {made["missing"]} missing. {note} Drawn by the same command without `--only-compute` and packed by
        `python tools/pack_results.py`. Five seeds and up to 30, the papers' grids (each figure's entry in
        `report.json` says how many, with settings, numbers, ε and devices). EMNIST ByMerge stands in for EMNIST
        Balanced. `*.csv.gz` hold every point of every figure: `view,panel,line,metric,x,seed,value`. Pictures
        (one a view, as wide as a column) can be drawn again from them by `python tools/redraw.py`. `*.svg.gz`
        are the pictures as drawings (`gunzip -k results/*.svg.gz`)."""
    criteria = f"""
        Criteria as printed: {verdicts}. "As deployed" is Dither's own form of the method, where it differs; "at
        equal proven ε" the same criterion with noise set by the accountant; – where that is not judged. The column
        after these says how the criterion fares where a setting that the paper leaves open is changed, at the
        smaller scale `robust`. `docs/reproduction.md` discusses the results.
        A criterion that fails is a result: the last column says what is known about the reason, with errata.
        `dither reproduce all` makes the same report at a smaller scale in minutes."""
    lines = [
        f"# The {len(figures)} figures at {content['scale']} scale",
        "",
        wrapped(runs),
        "",
        wrapped(criteria),
        "",
        f"| criterion | figure | what it finds | {' | '.join(VIEW_TITLES.values())} | open settings | notes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for figure in figures:
        for claim in figure["claims"]:
            judged = decode(JudgedCriterion, claim)
            text = judged.claim + (f" ({judged.variant})" if judged.variant else "")
            notes = "; ".join(filter(None, [judged.note, ", ".join(judged.errata)]))
            where = f"{paper(figure['paper']).title} Fig. {figure['number']}"
            views = [judged.status(view) for view in VIEW_TITLES]
            lines.append(f"| {' | '.join([judged.id, where, text, *views, judged.robust_text, notes])} |")
    return "\n".join(lines) + "\n"


def wrapped(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 115, break_on_hyphens=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
