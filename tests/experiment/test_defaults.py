"""What Dither chooses for a user's own records, and records that are given in Python."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import dither
from dither.accounting.ledger.runs import Ledger
from dither.data import Label, Numeric, Schema
from dither.errors import DataError, SpecError
from dither.experiment.build import build_experiment, choose
from dither.experiment.defaults import defaults_for, federated_defaults


def table(count: int, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    age, weight = rng.normal(50, 15, count).round(2), rng.normal(80, 12, count).round(2)
    ill = np.where(age + rng.normal(0, 10, count) > 55, "yes", "no")
    return pd.DataFrame({"age": age, "weight": weight, "smoker": rng.choice(["y", "n"], count), "ill": ill})


def test_defaults_follow_from_public_facts() -> None:
    small, large = (defaults_for([count] * 6, 100, 1.0) for count in (500, 50_000))
    assert small["client_lr"] < large["client_lr"]  # more records carry a larger step
    assert large["batch_size"] == round(large["sampling_rate"] * 50_000)
    assert defaults_for([500] * 6, 100, 8.0)["sampling_rate"] > small["sampling_rate"]
    assert defaults_for([500] * 6, 400, 1.0)["privacy.clip_norm"] == pytest.approx(
        2 * small["privacy.clip_norm"], rel=0.05
    )
    assert all(math.isfinite(value) for value in defaults_for([500] * 6, 100, math.inf).values())
    sums = defaults_for([500] * 6, 100, 1.0, summed=6)  # noise once a round: the credit is exact
    assert sums["local_steps"] == 1
    assert sums["num_rounds"] == small["num_rounds"] * small["local_steps"]
    assert sums["client_lr"] >= small["client_lr"]


def test_only_what_is_not_given_is_chosen(tmp_path: Path) -> None:
    table(300).to_csv(tmp_path / "patients.csv", index=False)
    source = {"data.path": str(tmp_path / "patients.csv"), "data.label": "ill"}
    chosen = choose({**source, "num_rounds": 7}, {"privacy.clip_norm": 3.0})
    spec = chosen.spec
    assert (spec.method, spec.num_rounds, spec.privacy.clip_norm) == ("cpfed", 7, 3.0)
    assert (spec.num_clients, spec.cohort_size, spec.model.name) == (10, 10, "logistic")
    assert "client_lr" in chosen.note
    assert "num_rounds" not in chosen.note
    assert build_experiment(spec, dataset=chosen.dataset).proven_epsilon() <= 1.0
    named = choose({**source, "method": "cpfed", "num_clients": 3, "cohort_size": 3})
    assert (named.dataset, named.note, named.spec.num_rounds) == (None, "", 200)
    sums = choose({**source, "secagg.mode": "ideal", "privacy.view": "sum"}).spec
    assert (sums.local_steps, sums.cohort_size) == (1, 10)
    path = tmp_path / "spec.toml"
    path.write_text(f'[data]\npath = "{tmp_path}/patients.csv"\nlabel = "ill"\n')
    assert choose(path).spec == choose(source).spec
    assert choose("adult").spec == dither.Spec.from_preset("adult")


def test_the_records_do_not_change_what_is_chosen(tmp_path: Path) -> None:
    """Two tables of the same size and schema, whatever they hold, give one spec."""
    dither.data.draft(table(300), "ill", name="t").schema.save(tmp_path / "schema.toml")
    others = table(300).assign(age=0.0, smoker="", ill="no")
    source = {"data.schema": str(tmp_path / "schema.toml")}
    specs = [choose(source, records=[frame, frame.iloc[:100]]).spec for frame in (table(300), others)]
    assert specs[0] == specs[1]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (table(0), "'data' has a header but no rows"),
        ({"north": table(120), "south": table(0)}, "'south' has a header but no rows"),
        ({"north": table(120), "south": table(120)[::-1]}, "'north' and 'south' hold the same records"),
        (pd.concat([table(120), table(120)[["age"]]], axis=1), "'data' has two columns called 'age'"),
        (table(120).assign(scans=[[1, 2]] * 120), "column 'scans' of 'data' holds lists"),
        (
            table(120).assign(ill=[None, "yes", "no"] * 40),
            "is empty in row 1 and 39 more; remove rows without a label",
        ),
        ((np.zeros((9, 2)), np.arange(9) % 2 * 2 - 1), "labels run from -1 to 1, .*number them 0 to 1"),
    ],
)
def test_what_is_wrong_with_records_given_in_python_is_said(records: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        choose({"data.label": "ill"}, records=records)


def test_few_records_are_dealt_out_to_few_clients() -> None:
    spec = choose(
        {"data.label": "ill", "data.test_fraction": 0}, records=table(6).assign(ill=["yes", "no"] * 3)
    ).spec
    assert (spec.num_clients, spec.cohort_size) == (6, 6)


def test_frames_and_arrays_in_place_of_a_file() -> None:
    frames = {"north": table(120, 1), "south": table(80, 2)}
    by_name = choose({"data.label": "ill"}, records=frames)
    assert build_experiment(by_name.spec, dataset=by_name.dataset).partition.names == ("north", "south")
    listed = choose({"data.label": "ill"}, records=list(frames.values()))
    assert build_experiment(listed.spec, dataset=listed.dataset).partition.names == ("client 0", "client 1")
    x, y = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 2
    grouped = choose({}, records=(x, y, np.repeat(["a", "b", "c"], 20)))
    assert build_experiment(grouped.spec, dataset=grouped.dataset).partition.names == ("a", "b", "c")
    assert choose({}, records=(x, y)).spec.num_clients == 10
    for records, words in (
        ("patients", "data is a str; give a pandas DataFrame"),
        ((x, y, y, y), "data is a tuple of 4"),
        ((x, y[:3]), r"\(60, 3\)"),
        (table(30), "no label column is given"),
    ):
        with pytest.raises(DataError, match=words):
            choose({}, records=records)


@pytest.mark.slow
def test_frames_are_charged_and_known_again(tmp_path: Path) -> None:
    settings = {"data.label": "ill", "num_rounds": 2, "eval_every": 2}
    ledger = tmp_path / "ledger.sqlite"
    frames = {"north": table(120, 1), "south": table(80, 2)}
    report = dither.run(settings, data=frames, out=tmp_path / "one", ledger=ledger)
    assert report.rounds == 2
    assert any(note.startswith("chosen by Dither") for note in report.notes)
    shuffled = {name: frame.sample(frac=1, random_state=0) for name, frame in frames.items()}
    dither.run(settings, data=shuffled, out=tmp_path / "two", ledger=ledger)
    book = Ledger(ledger)
    assert len(book.datasets()) == 2
    assert all(len(book.spent(dataset)[0].runs) == 2 for dataset in book.datasets())
    with pytest.raises(SpecError, match="given in Python; give them again"):
        dither.account(tmp_path / "one", values={"num_rounds": 3})


def test_a_spec_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text("seed = 1\n")
    with pytest.raises(SpecError, match=r"no spec file .*my\.tml'; did you mean 'my\.toml'"):
        dither.Spec.from_any(str(tmp_path / "my.tml"))


@pytest.mark.parametrize("bounds", [[0.0, 15.0], [0.0, 40.0]])
def test_the_choice_for_a_number_learns_it(tmp_path: Path, bounds: list[float]) -> None:
    """Steps fit for the logistic loss grow without end on the squared one: R² was below -10."""
    rng = np.random.default_rng(0)
    age, ward = rng.integers(18, 95, 6000), rng.choice(["surgery", "medicine", "intensive"], 6000)
    stay = np.clip(2 + 0.06 * (age - 40) + 2 * (ward == "intensive") + rng.normal(0, 1, 6000), 0.1, 40)
    pd.DataFrame({"age": age, "ward": ward, "stay": stay.round(1)}).to_csv(tmp_path / "stays.csv", index=False)
    given = {"data.path": str(tmp_path / "stays.csv"), "data.label": "stay", "data.label_bounds": bounds}
    made_up = {"data.public": True, "data.test_public": True, "randomness": "seeded", "compare": False}
    report = dither.run({**given, **made_up}, out=tmp_path / "run")
    assert report.scores is not None
    assert report.scores.model["r2"] > 0.5


def test_steps_on_a_number_stay_below_its_curvature_in_a_federation_too() -> None:
    columns = tuple(Numeric(f"c{number}", (0.0, 1.0), (0.5, 0.5), 0.5) for number in range(20))
    chosen = {
        label.column: federated_defaults(Schema(label, columns, "made up"), [5000] * 4, 1.0, 1e-5)
        for label in (Label("stay", bounds=(0.0, 30.0)), Label("ill", ("no", "yes")))
    }
    assert chosen["stay"]["client_lr"] * (1 + len(columns)) <= 1.0
    assert chosen["ill"]["client_lr"] * (1 + len(columns)) > 4.0  # the logistic loss is flatter
    assert [chosen[name]["model.name"] for name in ("stay", "ill")] == ["linear", "logistic"]
