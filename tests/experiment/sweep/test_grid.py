"""Which runs a grid asks for, and what it refuses, before anything is loaded."""

import pytest

from dither.errors import SpecError
from dither.experiment import sweep
from dither.experiment.sweep.run import differing, product
from dither.spec import Spec

BASE = Spec.from_preset("secure-fedavg")


def test_values_and_ranges():
    found = sweep.parse_vary(["privacy.epsilon=0.1,inf", "seed=0:3,7", "model.hidden=[8],[8, 4]", "method=a.b"])
    assert found == {
        "privacy.epsilon": [0.1, float("inf")],
        "seed": [0, 1, 2, 7],
        "model.hidden": [[8], [8, 4]],
        "method": ["a.b"],
    }
    assert sweep.parse_vary(["num_rounds=10:40:10"]) == {"num_rounds": [10, 20, 30]}


def test_the_product_has_every_combination_once_the_last_key_fastest():
    specs = product(BASE, {"privacy.epsilon": [0.5, 1], "seed": range(3)}, {"num_rounds": 5})
    assert [(s.privacy.epsilon, s.seed) for s in specs] == [(e, s) for e in (0.5, 1.0) for s in (0, 1, 2)]
    assert {spec.num_rounds for spec in specs} == {5}
    assert differing(specs) == ["seed", "privacy.epsilon"]


@pytest.mark.parametrize(
    ("vary", "values", "message"),
    [
        ({"privacy.epsilonn": [1]}, {}, "unknown key 'privacy.epsilonn'; did you mean 'privacy.epsilon'?"),
        ({"method_options.sensitivty": ["clip"]}, {}, "method_options.sensitivty"),
        ({"privacy.epsilon": [1, -1]}, {}, "privacy.epsilon=-1.0 must be above 0"),
        ({"seed": ["many"]}, {}, "seed='many' must be a whole number"),
        ({"cohort_size": [10, 101]}, {}, "cohort_size=101 exceeds num_clients=100"),
        ({}, {}, "nothing varies"),
        ({"seed": []}, {}, "seed has no value to take"),
        ({"seed": [1, 2, 1]}, {}, "runs 0 and 2 of the sweep are the same"),
        ({"privacy.epsilon": [1, 1.0]}, {}, "are the same"),
        ({"seed": [1]}, {"seed": 2}, "seed is both set and varied"),
    ],
)
def test_what_is_refused(vary, values, message):
    with pytest.raises(SpecError) as error:
        product(BASE, vary, values)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["seed"], "not of the form"),
        (["seed="], "not of the form"),
        (["seed=1,,2"], "an empty value"),
        (["seed=5:5"], "empty range"),
        (["seed=5:0"], "empty range"),
        (["seed=0:2", "seed=3"], "given twice"),
    ],
)
def test_what_vary_refuses(texts, message):
    with pytest.raises(SpecError) as error:
        sweep.parse_vary(texts)
    assert message in str(error.value)


def test_own_records_are_refused_before_anything_is_made(tmp_path):
    values = {"data.path": "mine.csv", "data.label": "y"}
    with pytest.raises(SpecError, match="not charged to a ledger"):
        sweep.sweep(BASE, {"seed": [0, 1]}, values=values, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
