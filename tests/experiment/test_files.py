"""One file for each institution: simulated as deployed, and each file charged by itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import dither
from dither import data
from dither.accounting.ledger.runs import Budget, Ledger, data_id
from dither.errors import BudgetExhausted, DataError
from dither.experiment import build, train
from tests.federation.parties import NAMES, Parties, server_bits, simulated, small_spec

SETTINGS = {
    "method": "cpfed",
    "num_clients": 0,
    "cohort_size": 2,
    "num_rounds": 4,
    "batch_size": 8,
    "batch_sampling": "poisson",
    "sampling_rate": 0.2,
    "eval_every": 2,
    "data.label": "ill",
    "method_options.aggregation_credit": False,
}


def write(path: Path, count: int, seed: int, delimiter: str = ",") -> Path:
    rng = np.random.default_rng(seed)
    rows = [f"{rng.normal():.6f}{delimiter}{'yes' if rng.random() < 0.5 else 'no'}" for _ in range(count)]
    path.write_text("\n".join([f"age{delimiter}ill", *rows]) + "\n")
    return path


@pytest.fixture
def hospitals(tmp_path: Path) -> Path:
    folder = tmp_path / "hospitals"
    folder.mkdir()
    write(folder / "north.csv", 60, 1)
    write(folder / "south.csv", 40, 2, ";")
    return folder


def test_a_folder_a_pattern_and_a_list_are_one_client_a_file(hospitals: Path) -> None:
    files = [str(hospitals / "south.csv"), str(hospitals / "north.csv")]
    by_name = ("north", "south")
    for path, names in ((str(hospitals), by_name), (f"{hospitals}/*.csv", by_name), (files, ("south", "north"))):
        spec = dither.Spec.from_any({**SETTINGS, "data.path": path})
        experiment = build.build_experiment(spec)
        assert experiment.partition.names == names
        assert dict(zip(names, experiment.partition.size.tolist(), strict=True)) == {"north": 48, "south": 32}
        assert dither.Spec.from_toml(spec.to_toml()) == spec


@pytest.mark.parametrize("one", [True, False])
def test_a_file_that_changed_after_it_was_read_is_not_charged(hospitals: Path, *, one: bool) -> None:
    file = hospitals / "north.csv"
    values = {"data.path": str(file), "num_clients": 2} if one else {"data.path": str(hospitals)}
    experiment = build.build_experiment(dither.Spec.from_any({**SETTINGS, **values}))
    with file.open("a") as table:
        table.write("0.5,yes\n")
    with pytest.raises(DataError, match=r"north\.csv' changed after it was read; start again"):
        train._identified(experiment, Ledger(hospitals.parent / "ledger.json"), new_ledger=True)


@pytest.mark.slow
def test_files_are_simulated_as_parties_read_them(tmp_path: Path) -> None:
    """A simulation of the parties' files gives the bits of the federation in which each party reads its own."""
    parties = Parties(tmp_path, small_spec())
    (tmp_path / "schema.toml").write_text(parties.experiment.dataset.schema.to_toml())
    spec = small_spec().with_values(
        {
            "data.path": [str(parties.file(name)) for name in NAMES],
            "data.schema": str(tmp_path / "schema.toml"),
            "data.records_per_client": 0,
            "data.test_fraction": 0.0,
            "privacy.adjacency": "replace-one",
        }
    )
    files = build.build_experiment(spec)
    assert files.partition.names == NAMES
    coordinator = parties.coordinator()
    coordinator.run()
    for ours, theirs in zip(simulated(files, "loop"), server_bits(coordinator), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_each_file_is_charged_by_itself(hospitals: Path, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.sqlite"
    settings = {**SETTINGS, "data.path": str(hospitals)}
    dither.run(settings, out=tmp_path / "run", ledger=ledger)
    book = Ledger(ledger)
    north, south = (data_id(book, path=str(hospitals / f"{name}.csv")) for name in ("north", "south"))
    assert set(book.datasets()) == {north, south}
    for dataset in (north, south):
        (spent,) = book.spent(dataset)
        assert 0.9 < spent.epsilon <= 1.001
    # One file alone is the same data set: it goes on where the folder left it.
    dither.run(
        {**SETTINGS, "data.path": str(hospitals / "north.csv"), "num_clients": 2},
        out=tmp_path / "one",
        ledger=ledger,
    )
    assert book.spent(north)[0].epsilon > 1.2 > book.spent(south)[0].epsilon
    # A changed file is noticed.
    changed = (hospitals / "south.csv").read_text().splitlines()
    (hospitals / "south.csv").write_text("\n".join(changed[:-3]) + "\n")
    with pytest.raises(DataError, match=r"south\.csv"):
        dither.run(settings, out=tmp_path / "again", ledger=ledger)


def test_nothing_is_charged_where_one_file_cannot_pay(hospitals: Path, tmp_path: Path) -> None:
    book = Ledger(tmp_path / "ledger.sqlite")
    north, south = (data_id(book, path=str(hospitals / f"{name}.csv")) for name in ("north", "south"))
    book.set_budget(south, Budget(1e-3, 1e-5, "upload", "zero-out"))
    settings = {**SETTINGS, "data.path": str(hospitals)}
    with pytest.raises(BudgetExhausted):
        dither.run(settings, out=tmp_path / "run", ledger=tmp_path / "ledger.sqlite")
    assert {entry.kind for entry in book.history(north)} == {"data"}
    book.set_budget(south, Budget(0.8, 1e-5, "upload", "zero-out"), raising=True)
    report = dither.run({**settings, "eval_every": 1}, out=tmp_path / "run", ledger=tmp_path / "ledger.sqlite")
    assert 0 < report.rounds < 4
    assert [entry.rounds for entry in book.history(north) if entry.kind == "charge"] == [
        (number, number + 1) for number in range(report.rounds)
    ]


def test_files_that_do_not_fit_together(hospitals: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="num_clients=3, but there are 2 files"):
        build.build_experiment(dither.Spec.from_any({**SETTINGS, "data.path": str(hospitals), "num_clients": 3}))
    (hospitals / "west.csv").write_text("age,sick\n1,yes\n")
    with pytest.raises(DataError, match=r"'west\.csv' has no column 'ill', which 'north\.csv' has"):
        data.load(path=hospitals, label="ill")
    with pytest.raises(DataError, match="partition 'files' needs several files"):
        data.partition(data.load(path=hospitals / "north.csv", label="ill"), kind="files", num_clients=0, seed=0)
