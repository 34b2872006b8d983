"""docs/reproduction.md says what results/report.json says; two reports are compared verdict by verdict."""

import importlib.util
import json
from pathlib import Path

from dither.reproduction.figure import select
from dither.reproduction.running import REFERENCE, judged_criteria

ROOT = Path(__file__).parents[2]


def load_tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def changed(report):
    """The report with another verdict on its first finding."""
    copy = json.loads(json.dumps(report))
    copy["figures"][0]["claims"][0]["printed"]["status"] = "not judged"
    return copy


def test_the_write_up_agrees_with_the_results():
    tool = load_tool("fill_reproduction")
    report = json.loads(tool.REPORT.read_text(encoding="utf-8"))
    page = tool.PAGE.read_text(encoding="utf-8")
    assert page.count("<!--/-->") > 30
    assert tool.filled(page, report) == page, "run python tools/fill_reproduction.py"
    assert tool.filled(page, changed(report)) != page


def test_the_results_have_the_texts_of_the_declarations():
    report = json.loads((ROOT / "results" / "report.json").read_text(encoding="utf-8"))
    for figure, stored in zip(select(), report["figures"], strict=True):
        assert (figure.title, figure.shows, list(figure.notes)) == tuple(
            stored[k] for k in ("title", "shows", "notes")
        )
        assert [setting.row() for setting in figure.open] == stored["open"], figure.id
        for criterion, claim in zip(figure.criteria, stored["claims"], strict=True):
            assert (criterion.text, criterion.why, list(criterion.errata)) == tuple(
                claim[key] for key in ("claim", "note", "errata")
            )
            judged = {row["setting"] for row in (claim["robustness"] or {"verdicts": []})["verdicts"]}
            wanted = {change.label for change in [REFERENCE, *figure.changes()]}
            assert judged == (wanted if criterion in judged_criteria(figure) else set()), criterion.id


def test_two_reports_are_compared_verdict_by_verdict(tmp_path, capsys):
    tool = load_tool("compare_reports")
    first, second = ROOT / "results" / "report.json", tmp_path / "report.json"
    report = json.loads(first.read_text(encoding="utf-8"))
    second.write_text(json.dumps(changed(report)), encoding="utf-8")
    assert tool.main(first, first) == tool.main(first, second) == 0
    same, differing, *_, row = capsys.readouterr().out.splitlines()
    number = same.split()[0]
    assert same == f"{number} of {number} verdicts are the same"
    assert differing == f"{int(number) - 1} of {number} verdicts are the same"
    assert row.startswith("| SF-A1 | as printed | holds: ")
    lacking = json.loads(json.dumps(report))
    lacking["figures"].pop()
    second.write_text(json.dumps(lacking), encoding="utf-8")
    assert tool.main(first, second) == 1


def test_seeds_are_added_to_what_a_report_has_not_decided(tmp_path, monkeypatch, capsys):
    """A setting that was undecided, and one that the report lacks, get their verdict; what is decided stays."""
    tool = load_tool("add_seeds")
    report = json.loads((ROOT / "results" / "report.json").read_text(encoding="utf-8"))
    (figure,) = [each for each in report["figures"] if each["id"] == "dp-scaffold/fig3"]
    first, _ = figure["claims"]  # formulas: nothing is trained
    reference, lower, higher = first["robustness"]["verdicts"]
    reference["verdict"] = "fails"  # not true, but decided
    first["robustness"]["verdicts"] = [reference, {**lower, "verdict": "inconclusive"}]
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report), encoding="utf-8")
    arguments = ["add_seeds.py", str(path), "dp-scaffold/fig3", "--cache", str(tmp_path / "cache")]
    monkeypatch.setattr("sys.argv", [*arguments, "--list"])
    tool.main()
    assert len(capsys.readouterr().out.splitlines()) == 2
    monkeypatch.setattr("sys.argv", arguments)
    tool.main()
    (figure,) = [each for each in json.loads(path.read_text())["figures"] if each["id"] == "dp-scaffold/fig3"]
    rows = figure["claims"][0]["robustness"]["verdicts"]
    assert [(row["setting"], row["verdict"]) for row in rows] == [
        (row["setting"], row["verdict"]) for row in (reference, lower, higher)
    ]
