"""Make `results/` from a full reproduction: pictures, compressed drawings and numbers, the table of findings.

python -m dither.reproduction all --scale full --robust robust --cache CACHE --jobs 16 --out REPORT
python tools/pack_results.py REPORT results [NOTE]

NOTE says how the runs were made, where that was not by the one command. The report keeps it: after
`tools/add_seeds.py results/report.json`, `python tools/pack_results.py results results` writes the page again.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import sys
import textwrap
from collections import Counter
from itertools import groupby
from pathlib import Path

from PIL import Image

from dither.experiment.report import decode
from dither.reproduction.drawing import DPI
from dither.reproduction.figure import VIEW_TITLES, paper
from dither.reproduction.judging import INCONCLUSIVE, LOOKS, JudgedCriterion
from dither.reproduction.report import counts

IMAGES = Path(__file__).parent.parent / "docs" / "images"
DISCUSSED = ("nbafl-fig10-printed", "dp-scaffold-fig4-printed", "cpfed-fig4-deployed")  # in docs/reproduction.md


def main(report: Path, out: Path, note: str = "") -> None:
    content = json.loads((report / "report.json").read_text())
    out.mkdir(exist_ok=True)
    pack_pictures(report, out)
    command = re.sub(r"(--cache|--out) \S+", r"\1 FOLDER", content["made"]["command"])
    content["made"]["command"] = re.sub(r" --minutes \S+", "", command)
    content["made"]["note"] = note or content["made"].get("note", "")
    (out / "report.json").write_text(json.dumps(content, ensure_ascii=False) + "\n")
    (out / "README.md").write_text(page(content))


def pack_pictures(report: Path, out: Path) -> None:
    """Pictures without losses, drawings and numbers compressed."""
    for path in sorted(report.glob("*.png")):
        Image.open(path).convert("RGB").save(out / path.name, optimize=True, dpi=(DPI, DPI))
    for name in DISCUSSED:
        shutil.copy(out / f"{name}.png", IMAGES / f"reproduction-{name.rpartition('-')[0]}.png")
    for path in sorted([*report.glob("*.csv"), *report.glob("*.svg")]):
        text = path.read_text()
        if path.suffix == ".svg":  # a tenth of a point is finer than any screen
            text = re.sub(r"-?\d+\.\d{2,}", lambda match: f"{float(match[0]):.1f}", text)
        # No name and no time inside: the same numbers give the same bytes.
        with open(out / f"{path.name}.gz", "wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
            packed.write(text.encode())


def page(content: dict) -> str:
    figures = content["figures"]
    devices = Counter(name for figure in figures for name in figure["devices"])
    versions = sorted({version for figure in figures for version in figure["versions"]})
    verdicts = counts(decode(JudgedCriterion, claim) for figure in figures for claim in figure["claims"])
    runs = f"""
        The runs are those of `{content["made"]["command"]}`
        on {", ".join(sorted(devices))} ({"; ".join(versions)}).
        {content["made"]["note"]}
        `python tools/pack_results.py` packed the figures.
        Each figure has the paper's grid and 5 to 30 seeds; its entry in `report.json` has the settings, numbers, ε
        and devices. EMNIST ByMerge replaces EMNIST Balanced."""
    files = """
        Each view of a figure is a picture as wide as a column of a paper, as `*.png` and `*.svg.gz` (`gunzip -k
        results/*.svg.gz`). `*.csv.gz` hold every point of every figure: `view,panel,line,metric,x,seed,value`.
        `python tools/redraw.py` draws all pictures again from these numbers, as PDF too."""
    criteria = f"""
        As printed, {verdicts}. "As deployed" is Dither's own form of the method, where it differs. "At
        equal proven ε" is the same criterion with noise set by the accountant; – means that it is not judged. The
        next column says whether the criterion still holds when a setting that the paper leaves open is changed, at
        the smaller scale `robust`. A criterion that fails is a result too: the last column gives the reason where
        it is known, with errata. `docs/reproduction.md` discusses the results. `dither reproduce all` makes the
        same report at a smaller scale."""
    lines = [
        f"# The {len(figures)} figures at {content['scale']} scale",
        "",
        wrapped(runs),
        "",
        wrapped(files),
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
    return "\n".join([*lines, "", *undecided(figures)]) + "\n"


def undecided(figures: list[dict]) -> list[str]:
    """The settings that are still undecided, by finding and by the number of their seeds."""
    cells: list[tuple[str, int, str]] = []
    for figure in figures:
        for claim in figure["claims"]:
            for row in (claim["robustness"] or {"verdicts": []})["verdicts"]:
                if row["verdict"] == INCONCLUSIVE:
                    cells.append((claim["id"], row.get("seeds", 0), row["setting"]))
    enough = sum(seeds >= LOOKS[-1] for _, seeds, _ in cells)
    judged = sum(len((c["robustness"] or {"verdicts": []})["verdicts"]) for f in figures for c in f["claims"])
    text = f"""
        Of {judged} verdicts with open settings changed, {len(cells)} are undecided: {enough} with all {LOOKS[-1]}
        seeds, {len(cells) - enough} with fewer. `python tools/add_seeds.py results/report.json --cache CACHE`
        continues with the latter."""
    lines = ["## Undecided settings", "", wrapped(text), "", "| criterion | seeds | settings |", "|---|---|---|"]
    for (name, seeds), group in groupby(sorted(cells), lambda cell: cell[:2]):
        lines.append(f"| {name} | {seeds or 'not recorded'} | {'; '.join(setting for *_, setting in group)} |")
    return lines


def wrapped(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 115, break_on_hyphens=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
