"""A run under secure aggregation, as its spec asks for it: what it reports and what it proves."""

import numpy as np
import pytest

import dither
from dither import accounting
from dither.accounting import accountant
from dither.accounting.ledger.runs import Ledger
from dither.errors import SpecError
from dither.experiment.account import account
from dither.experiment.build import build_experiment, engine_options, tolerated
from dither.experiment.sweep.batches import program
from dither.spec import Spec
from dither.types import RoundInfo

SMALL = {
    "data.name": "breast-cancer",
    "data.features": "all",
    "data.split": "given",
    "num_clients": 8,
    "cohort_size": 6,
    "num_rounds": 4,
    "batch_size": 8,
    "local_steps": 2,
    "eval_every": 4,
}
END_OF_ROUND = {"method": "secure-fedavg", "privacy.view": "sum", "privacy.noise": "proven", "privacy.unit": "run"}


def cpfed(**changes):
    return Spec.from_preset("cpfed").with_values({**SMALL, **changes})


def test_methods_of_the_papers_that_have_it_aggregate_by_default():
    assert cpfed().aggregation == "ideal"
    assert Spec.from_preset("concentrated").aggregation == "ideal"
    assert Spec.from_preset("nbafl").aggregation == Spec.from_preset("secure-fedavg").aggregation == "off"
    assert cpfed(**{"secagg.mode": "off"}).aggregation == "off"
    assert cpfed(**{"method_options.aggregation_credit": False}).aggregation == "off"
    assert cpfed(cohort_size=1).aggregation == "off"
    with pytest.raises(SpecError, match="the sum of one upload is the upload"):
        cpfed(cohort_size=1, **{"secagg.mode": "ideal"})
    with pytest.raises(SpecError, match=r"secagg.modulus_bits=16 is not one of 32, 64"):
        cpfed(**{"secagg.modulus_bits": 16})


def test_a_sum_that_could_overflow_is_refused_with_the_numbers():
    experiment = build_experiment(cpfed(**{"secagg.bound": 1000.0}))
    with pytest.raises(SpecError, match="a sum of 6 values up to 1000 at 20 fractional bits"):
        engine_options(experiment)
    wide = build_experiment(cpfed(**{"secagg.bound": 1000.0, "secagg.modulus_bits": 64}))
    assert engine_options(wide)["aggregation"].how.bound == 1000.0


@pytest.mark.parametrize("mode", ["off", pytest.param("ideal", marks=pytest.mark.slow), "real"])
def test_every_run_reports_what_it_sends(tmp_path, mode):
    changes = {"secagg.mode": mode, "federation.dropout": 0.2, "num_rounds": 6, "eval_every": 6}
    seen = dither.run(cpfed(**changes), out=tmp_path / "run").summary["traffic"]
    assert seen["aggregation"] == mode
    num_params = 2 * 31
    assert seen["lost"] > 0
    assert seen["most_missing"] > 0
    if mode == "off":
        assert (seen["upload_bytes"], seen["download_bytes"]) == (4 * num_params, 4 * num_params)
        return
    assert seen["upload_bytes"] > 4 * num_params + 126
    assert "clamped" not in seen  # exact, and so local
    assert seen["rounding"]["margin"] > 0
    if mode == "real":
        assert seen["attempts"] > 1
        assert seen["mask_seconds"] > 0


@pytest.mark.parametrize("bound", [1e-3, 0.0])
def test_clamps_are_said_and_take_the_credit(bound, tmp_path):
    """Where a client's step may be cut there is no credit; where only loud noise may be, the row says so."""
    values = {**SMALL, **END_OF_ROUND, "privacy.delta": 1e-3, "secagg.mode": "ideal", "secagg.bound": bound}
    made = dither.run(Spec().with_values(values), out=tmp_path / "run")
    assert (made.local.clamped > 0) == (
        bound > 0
    )  # how many is exact, and so local; that there is a limit is public
    assert "clamped" not in made.summary["traffic"]
    rows = {r.view: r for r in made.epsilon.table if r.adjacency == "replace-one" and r.unit == "run"}
    assert (rows["sum"].value == rows["upload"].value) == (bound > 0)
    assert any("are clamped" in text for text in rows["sum"].not_covered) == (bound == 0)


def test_noise_is_set_for_the_fewest_clients_that_open_a_sum():
    """With lost clients the credit is that of the smallest sum; the run then proves at most what was asked."""
    values = {**SMALL, **END_OF_ROUND, "privacy.delta": 1e-3, "privacy.epsilon": 3.0, "secagg.mode": "ideal"}
    whole = build_experiment(Spec().with_values(values))
    lossy_spec = Spec().with_values({**values, "federation.dropout": 0.1})
    lossy = build_experiment(lossy_spec)
    assert tolerated(lossy_spec) == 6 - 4  # 4 of 6 is the least safe threshold
    ratio = np.max(lossy.prepared.hyper["noise_multiplier"]) / np.max(whole.prepared.hyper["noise_multiplier"])
    assert ratio == pytest.approx(np.sqrt(6 / 4), rel=0.01)
    (row,) = [
        r for r in account(lossy_spec).epsilon.table
        if (r.view, r.adjacency, r.unit) == ("sum", "replace-one", "run")
    ]  # fmt: skip
    assert 2.99 < row.value <= 3.0


def test_rounding_counts_only_where_the_sum_is_what_protects(tmp_path):
    """To a server that sees uploads rounding is post-processing; CPFed's proof is of that kind here."""
    run = dither.run(cpfed(), out=tmp_path / "run")
    rows = {(r.view, r.adjacency, r.unit): r.value for r in run.epsilon.table}
    assert run.traffic.rounding.epsilon <= rows["upload", "replace-one", "run"] * (1 + 1e-9)


DISCRETE = {
    **SMALL, "method": "secure-fedavg", "privacy.view": "sum", "privacy.noise": "proven", "privacy.unit": "run",
    "privacy.delta": 1e-3, "privacy.epsilon": 3.0, "secagg.mode": "ideal", "secagg.noise": "discrete",
}  # fmt: skip


def test_discrete_noise_on_the_integers_is_proved_without_a_gap(tmp_path):
    """The noise comes after the rounding, so nothing is left uncovered; the price is the sampling's credit."""
    ideal = dither.run(Spec().with_values(DISCRETE), out=tmp_path / "ideal")
    real = dither.run(Spec().with_values({**DISCRETE, "secagg.mode": "real"}), out=tmp_path / "real")
    assert (tmp_path / "ideal" / "model.safetensors").read_bytes() == (
        tmp_path / "real" / "model.safetensors"
    ).read_bytes()
    for run in (ideal, real):
        rows = {(r.view, r.adjacency, r.unit): r for r in run.epsilon.table}
        row = rows["sum", "replace-one", "run"]
        assert row.recipe == "R6 discrete"
        assert 2.99 < row.value <= 3.0
        assert not any("G8" in text for text in row.not_covered)
        assert "rounding" not in run.summary["traffic"]
        assert rows["upload", "replace-one", "run"].value > row.value


def test_discrete_noise_is_charged_to_a_ledger(tmp_path):
    file = tmp_path / "ledger.sqlite"
    report = dither.run(Spec().with_values(DISCRETE), out=tmp_path / "x", ledger=file)
    ledger = Ledger(file)
    (spent,) = ledger.spent(ledger.datasets()[0], delta=1e-3, view="sum", adjacency="replace-one")
    assert spent.epsilon == pytest.approx(report.epsilon.proven("sum", "replace-one").value, rel=1e-9)
    assert not any("G8" in text for text in spent.numbers)


def test_discrete_noise_is_refused_where_it_means_nothing():
    with pytest.raises(SpecError, match="noise on integers"):
        Spec().with_values({**DISCRETE, "secagg.mode": "off"})
    with pytest.raises(SpecError, match="not for cpfed"):
        build_experiment(cpfed(**{"secagg.noise": "discrete"}))
    with pytest.raises(SpecError, match=r"lower secagg\.scale_bits"):
        engine_options(build_experiment(Spec().with_values({**DISCRETE, "privacy.epsilon": 1e-4})))


def test_discrete_noise_ranks_rounds_with_their_grid():
    """With a falling rate Δ/σ stays and the grid weighs more: the last message reveals most, and is shown."""
    falling = {**DISCRETE, "num_rounds": 12, "lr_decay": 0.5, "secagg.scale_bits": 9, "cohort_size": 4}
    experiment = build_experiment(Spec().with_values(falling))
    rows = {(r.view, r.adjacency, r.unit): r for r in experiment.accountant().table()}
    shown = rows["upload", "replace-one", "message"].value
    releases, known = experiment.prepared.releases, experiment.plan.conditions()
    each = [
        accounting.proven(
            [(releases(RoundInfo(index, int(client), int(experiment.partition.size[client]), 4)), 1)],
            1e-3, known, view="upload", adjacency="replace-one",
        ).value
        for index in range(1, 12) for client in experiment.cohorts[index]
    ]  # fmt: skip
    assert each[-1] > 1.05 * each[0]  # else nothing is tested
    assert shown >= max(each) * (1 - 1e-9)
    groups = accountant.classes(
        releases, experiment.partition.size, experiment.cohorts, joint=True, lattice=known.lattice
    )
    worst = accounting.proven(groups[0].most, 1e-3, known, view="sum", adjacency="replace-one").value
    for client in range(8):
        own = [
            releases(RoundInfo(index, client, int(experiment.partition.size[client]), len(cohort)))
            for index, cohort in enumerate(experiment.cohorts) if client in cohort
        ]  # fmt: skip
        value = accounting.proven([(r, 1) for r in own], 1e-3, known, view="sum", adjacency="replace-one").value
        assert value <= worst * (1 + 1e-9)


def test_every_table_counts_on_the_fewest_clients_alike():
    values = {**SMALL, **END_OF_ROUND, "privacy.delta": 1e-3, "privacy.epsilon": 3.0, "secagg.mode": "ideal"}
    for changes in ({"federation.dropout": 0.1}, {"federation.refused": "continue"}):
        found = account(Spec().with_values({**values, **changes}), every_recipe=True)
        tried = [r.value for r in found.tried if (r.view, r.adjacency) == ("sum", "replace-one")]
        shown = [r.value for r in found.epsilon.table if (r.view, r.adjacency) == ("sum", "replace-one")]
        assert min(tried) == pytest.approx(min(shown))
        assert 2.99 < min(shown) <= 3.0


def test_a_broadcasts_noise_counts_the_uploads_so_rounding_is_said_there_too():
    values = {
        **SMALL, "method": "nbafl", "cohort_size": 8, "privacy.noise": "given", "privacy.noise_std": 20.0,
        "privacy.delta": 1e-3, "batch_sampling": "full",
    }  # fmt: skip
    for mode, flagged in (("ideal", True), ("off", False)):
        rows = account(Spec().with_values({**values, "secagg.mode": mode})).epsilon.table
        some = [r for r in rows if r.recipe.endswith((" downlink", " joint"))]
        assert some
        assert all(any("G8" in text for text in r.not_covered) == flagged for r in some)


def test_what_the_protocol_would_refuse_is_refused_before_the_run():
    for changes, words in (
        ({"privacy.colluders": 5}, "at least 7 must answer"),
        ({"secagg.threshold": 2}, "too low for a cohort of 6"),
        ({"secagg.neighbours": 3}, "must be 0 .all. or an even number"),
    ):
        with pytest.raises(SpecError, match=words):
            engine_options(build_experiment(cpfed(**changes)))


def test_specs_with_other_colluders_are_not_one_program():
    one, other = cpfed(num_rounds=1), cpfed(num_rounds=1, **{"privacy.colluders": 3})
    assert program(one) != program(other)
