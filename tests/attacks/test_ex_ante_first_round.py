"""Secure FedAvg's first round takes everyone: before the draw that participation is certain, not a chance."""

import pytest

import dither
from dither.spec import Spec


def accounts(rounds):
    spec = Spec.from_preset("secure-fedavg").with_values(
        {
            "data.name": "breast-cancer",
            "num_clients": 20,
            "cohort_size": 2,
            "num_rounds": rounds,
            "local_steps": 1,
            "batch_size": 8,
            "model.name": "logistic",
        }
    )
    report = dither.account(spec, ex_ante=True)

    def largest(rows):
        key = ("upload", "replace-one", "run")
        return max(r.value for r in rows if (r.view, r.adjacency, r.unit) == key)

    return largest(report.ex_ante), largest(report.epsilon.table)


def test_one_round_with_everyone_is_no_draw():
    drawn, happened = accounts(1)
    assert drawn == pytest.approx(happened, rel=1e-6)


def test_the_first_round_counts_in_full_beside_those_that_are_drawn():
    drawn, _ = accounts(2)
    _, certain = accounts(1)
    assert drawn > certain
