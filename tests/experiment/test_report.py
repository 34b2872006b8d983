"""Tests of `dither.experiment.report`: a run's outcome as typed values, to and from summary.json."""

import json
import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

import dither
from dither.accounting import ClientEpsilon, ClientRange, ProvenRow
from dither.errors import DamagedFile, RunExists, SpecError
from dither.experiment.folder import RunFolder
from dither.experiment.report import (
    DiskReads,
    Epsilon,
    Exclusion,
    FederationTotals,
    LedgerCharge,
    PartyTotals,
    Report,
    RoundingMargin,
    RunTraffic,
    SpentPart,
)
from dither.spec import Spec
from dither.types import Claim

NASTY = '<script>alert("x")</script> & 5% of a_b ^ {c} \\ $d$ ~ #1'


def rows(spec):
    for adjacency in ("zero-out", "replace-one", "add/remove"):
        for view in ("upload", "sum", "broadcast", "final"):
            value = math.inf if adjacency == "add/remove" else {"upload": 2.0, "sum": 1.0}.get(view, 0.5)
            yield ProvenRow(
                view, adjacency, value, 1e-5, "run", "R3", not_covered=("floats (H3)",), against="",
                clients=ClientRange(value, value, value), no_credit="" if view == "sum" else None,
            )  # fmt: skip
        yield ProvenRow("upload", adjacency, 0.1, 1e-5, "message", "R3")


@pytest.fixture
def report(tmp_path):
    spec = Spec.from_any(
        {"method": "cpfed", "data": {"name": "breast-cancer"}, "num_clients": 4, "cohort_size": 4}
    )
    folder = RunFolder.create(tmp_path / "run", spec, {})
    for round in (10, 20):
        folder.append_metrics({"round": round, "test_accuracy": 0.04 * round, "loss": 0.3, "seconds": 0.1 * round})
    claim = Claim(math.inf, "run", 1e-5, "Theorem 1", (("every client takes part", False),))
    return Report(
        folder=folder.path,
        spec=spec,
        evaluations=tuple(folder.metrics()),
        method="cpfed",
        data="breast-cancer",
        test_accuracy=0.8,
        loss=0.3,
        rounds=20,
        seconds=2.0,
        epsilon=Epsilon.of(spec, claim, list(rows(spec))),
        why="the paper sums differently",
        participation=ClientRange(20, 20.0, 20),
        randomness="seeded",
        notes=("a note",),
        num_clients=4,
        num_features=30,
        num_params=62,
        image_shape=(),
        classes=("benign", "malignant"),
    )


def everything(report):
    """The report with all that a run or a federation may add to it."""
    return replace(
        report,
        repeated_rounds=2,
        traffic=RunTraffic("real", 496, 248.5, 1, 1, 0, 64.0, 0.01, 0.02, 1.5, 0.3, RoundingMargin(0.5, 0.1, 1.1)),
        refused={"site 1": 2},
        stopped="the privacy budget ends after round 20 of 40",
        ledger=LedgerCharge("ledger.jsonl", "abcd"),
        test_accuracy_without_noise=0.9,
        streamed=DiskReads(1024, 3, 2000, 100, 0.25),
        timing={"rounds": 0.5},
        federation=FederationTotals(
            "id", "digest", {"north": PartyTotals(100, 20, 0, 0, 512, 256)}, {"south": Exclusion(3, "a lie")},
            "real", 1, 0, 0.4, 1, (SpentPart("statistics", 1.0, 1e-5), SpentPart("both", 2.0, 1e-5)),
        ),
    )  # fmt: skip


@pytest.mark.parametrize("more", [lambda report: report, everything])
def test_a_report_comes_back_from_its_folder_as_it_was(report, more):
    full = more(report)
    full.save()
    again = Report.read(full.folder)
    assert again == full
    assert json.loads(again.to_json()) == json.loads((full.folder / "summary.json").read_text())


def test_what_did_not_happen_is_left_out_of_summary_json(report):
    assert not {"traffic", "stopped", "refused", "ledger", "federation", "streamed"} & set(report.to_dict())
    assert {"traffic", "stopped", "refused", "ledger", "federation", "streamed"} <= set(
        everything(report).to_dict()
    )


def test_entries_of_a_later_version_are_ignored(report):
    report.save()
    folder = RunFolder(report.folder)
    folder.save_summary({**folder.summary(), "invented_later": 1})
    assert Report.read(report.folder) == report


@pytest.mark.parametrize(
    ("name", "value"),
    [("rounds", "20"), ("notes", "a note"), ("epsilon", []), ("classes", None), ("seconds", True)],
)
def test_a_summary_of_other_types_is_damage(report, name, value):
    report.save()
    folder = RunFolder(report.folder)
    folder.save_summary({**folder.summary(), name: value})
    with pytest.raises(DamagedFile, match=r"summary\.json"):
        Report.read(report.folder)


def test_a_run_that_is_not_finished_has_no_report(report):
    assert Report.read(report.folder) is None
    with pytest.raises(RunExists, match="--resume"):
        dither.load(report.folder)


def test_proven_rows_are_asked_for_by_adversary_adjacency_and_unit(report):
    epsilon = report.epsilon
    assert epsilon.proven().value == 2.0
    assert epsilon.proven("server sees uploads") == epsilon.proven("upload", "replace-one")
    assert epsilon.proven("sum").value == 1.0
    assert epsilon.proven(unit="message").value == 0.1
    assert epsilon.proven("final", "add/remove").value == math.inf
    with pytest.raises(SpecError, match="upload"):
        epsilon.proven("server sees all")
    with pytest.raises(SpecError, match="zero-out"):
        epsilon.proven("upload", "zero out")


def test_metrics_are_a_data_frame(report):
    assert list(report.metrics.columns) == ["round", "test_accuracy", "loss", "seconds"]
    assert list(report.metrics["round"]) == [10, 20]


def test_repr_fits_a_screen(report):
    long = replace(everything(report), data="x" * 300, stopped="why " * 100, notes=("note",) * 99)
    lines = repr(long).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    assert "proven ε" in repr(report)
    assert "∞" in repr(report)


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags = set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        assert not [name for name, _ in attrs if name.startswith("on")]


def test_html_holds_no_tag_of_what_a_run_says(report):
    found = Tags()
    found.feed(replace(report, data=NASTY, stopped=NASTY, folder=Path(NASTY))._repr_html_())
    assert found.tags == {"table", "caption", "tbody", "tr", "td"}


def test_latex_escapes_every_special_character(report):
    text = replace(report, method=NASTY).to_latex()
    assert r"\textless{}script\textgreater{}" in text
    assert r"\& 5\% of a\_b \textasciicircum{} \{c\} \textbackslash{} \$d\$ \textasciitilde{} \#1" in text
    assert text.count(r"\\") == 1 + len(report.epsilon.main)


def test_targets_of_clients_are_kept_and_told_by_target(report):
    clients = tuple(ClientEpsilon(f"c{n}", 0.5 + n % 2, math.inf, 0.49 + n % 2, 0.7) for n in range(6))
    report = replace(report, epsilon=replace(report.epsilon, clients=clients))
    report.save()
    again = Report.read(report.folder)
    assert again.epsilon.clients == clients
    assert [(who, row.target) for who, row in again.epsilon.by_target()] == [
        ("c0, c2, c4", 0.5),
        ("c1, c3, c5", 1.5),
    ]
    assert ("target ε 0.5", "c0, c2, c4: proven 0.49, claimed ∞, weight 0.7 (mean 1)") in again.main_lines()
