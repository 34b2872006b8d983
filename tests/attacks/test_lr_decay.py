"""Learning rates that fall inside a round: the others' early noise shrinks more, and their late noise is smaller.

64 parties train logistic regression on balanced records of the largest norm. The target holds one such record
among records of norm zero, and the neighbour has the other label. Losses are quadratic for noise this small, so
the sum of the uploads is Gaussian in both worlds, with moments known in closed form."""

import csv
import math

import numpy as np
import pytest

from dither import accounting
from dither.experiment import build
from dither.experiment.build import designs, engine_options
from dither.simulation import engine
from dither.spec import Spec

PARTIES, FEATURES, RATE, DECAY, CLIP = 64, 8, 0.888, 1.27, 1.53
CURVATURE = (FEATURES + 1) / 4  # of the logistic loss where both labels are equally likely


def _schema():
    head = 'name="t"\n[label]\ncolumn="y"\nclasses=["a","b"]\nclasses_from="public"\n'
    column = '[[columns]]\nname="x{}"\ntype="numeric"\nbounds=[0,1]\nbounds_from="public"\nstandard=[0,1]\n'
    column += 'standard_from="public"\nmissing=0\nmissing_from="public"\n'
    return head + "".join(column.format(i) for i in range(FEATURES))


def _write(path, target, records):
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["site", *(f"x{i}" for i in range(FEATURES)), "y"])
        for party in range(PARTIES):
            for record in range(records):
                label = target if (party, record) == (0, 0) else "ab"[(record + 1) % 2]
                reach = 1 if party or not record else 0
                rows.writerow([f"s{party:03d}", *[reach] * FEATURES, label])


def federation(folder, target="a", records=8, **values):
    """The spec of one world; its noise is set for a proven ε of 1 against one who sees sums."""
    for name, label, size in (("D.csv", target, records), ("test.csv", "a", 1)):
        _write(folder / name, label, size)
    (folder / "schema.toml").write_text(_schema())
    return Spec().with_values(
        {
            "method": "cpfed",
            "num_clients": PARTIES,
            "cohort_size": PARTIES,
            "num_rounds": 1,
            "local_steps": 2,
            "batch_size": records,
            "batch_sampling": "full",
            "client_lr": RATE,
            "lr_decay": DECAY,
            "eval_every": 1,
            "data.path": str(folder / "D.csv"),
            "data.test_path": str(folder / "test.csv"),
            "data.label": "y",
            "data.schema": str(folder / "schema.toml"),
            "data.encoding": "minmax",
            "data.partition": "column",
            "data.column": "site",
            "model.name": "logistic",
            "privacy.epsilon": 1.0,
            "privacy.delta": 1e-5,
            "privacy.unit": "run",
            "privacy.noise": "proven",
            "privacy.view": "sum",
            "privacy.adjacency": "replace-one",
            "privacy.clip": "example",
            "privacy.clip_norm": CLIP,
            "secagg.mode": "ideal",
            **values,
        }
    )


def sum_row(experiment):
    (row,) = [
        r
        for r in experiment.accountant().table()
        if (r.view, r.adjacency, r.unit) == ("sum", "replace-one", "run")
    ]
    return row


def linear_mu(experiment):
    """Exact distance of the two worlds' sums, with every gradient replaced by its linear part at the start."""
    (release,) = experiment.prepared.releases(_first(experiment))
    rates = [RATE / (1 + DECAY * step) for step in range(2)]
    gradient = math.sqrt(FEATURES + 1) / 2  # of the record at the start: below the clip
    distance = release.noise_std / accounting.step_multiplier(release, "replace-one")
    shift = distance * gradient / CLIP * sum(rates)
    others = rates[1] ** 2 + (1 - rates[1] * CURVATURE) ** 2 * rates[0] ** 2
    own = rates[1] ** 2 + rates[0] ** 2
    return shift / (release.noise_std * math.sqrt(own + (PARTIES - 1) * others))


def _first(experiment):
    from dither.types import RoundInfo

    return RoundInfo(0, 0, int(experiment.partition.size[0]), PARTIES)


def test_rates_that_fall_inside_a_round_are_charged(tmp_path):
    experiment = build.build_experiment(federation(tmp_path))
    row = sum_row(experiment)
    assert row.value <= 1.0
    assert row.recipe.startswith("R6")  # credit is taken, and must hold
    attacked = accounting.gaussian_epsilon(linear_mu(experiment), row.delta)
    assert attacked <= row.value
    assert attacked > 0.9 * row.value  # the attack is close to the bound: it can tell when the credit is too large


@pytest.mark.slow
def test_monte_carlo_of_the_whole_engine_stays_below_the_proof(tmp_path):
    """1,000 runs a world on the run's own compiled program, at 99% confidence."""
    runs, worlds, row = 1000, [], None
    for label in "ab":
        (tmp_path / label).mkdir()
        spec = federation(tmp_path / label, label, records=200, randomness="seeded")
        experiment = build.build_experiment(spec)
        row = sum_row(experiment)
        options = {**engine_options(experiment), "randomness": "seeded", "aggregation": None}
        options.pop("gradient_norm", None)
        ends = []
        for first in range(0, runs, 250):
            seeds = list(range(first, first + 250))
            found = engine.simulate(
                experiment.prepared.build,
                experiment.model,
                experiment.problem,
                num_rounds=1,
                cohort_size=experiment.prepared.cohort_size_at,
                seeds=seeds,
                hyper={k: np.stack([np.asarray(v)] * len(seeds)) for k, v in experiment.prepared.hyper.items()},
                cohorts=designs([experiment]),
                eval_every=1,
                **options,
            ).params["out"]
            ends.append(np.concatenate([np.asarray(found[k]).reshape(len(seeds), -1) for k in ("w", "b")], 1))
        worlds.append(np.concatenate(ends) @ np.full(FEATURES + 1, 1 / math.sqrt(FEATURES + 1)))
    first, second = worlds
    gap = abs(np.mean(first - second)) - 2.6 * np.std(first - second, ddof=1) / math.sqrt(runs)
    spread = math.sqrt((np.var(first, ddof=1) + np.var(second, ddof=1)) / 2) * (1 + 2.6 / math.sqrt(2 * runs))
    assert accounting.gaussian_epsilon(gap / spread, row.delta) <= row.value
