"""The trials of an audit are runs of the engine: the same functions, keys and sums give the same models."""

from dataclasses import replace

import numpy as np
import pytest

from dither.auditing import audit, neighbours, trials
from dither.auditing.report import report_row
from dither.experiment import build
from dither.experiment.build import build_experiment
from dither.models import Model
from dither.simulation import engine

from .grid import small_dataset, small_spec


@pytest.mark.parametrize("method", ["nbafl", pytest.param("cpfed", marks=pytest.mark.slow)])
def test_the_final_model_is_the_engines(method):
    """The same two datasets and seed through `Simulation`: the projections of the last model agree."""
    changes = {"batch_sampling": "full", "privacy__clip": "none"} if method == "nbafl" else {}
    if method == "nbafl":
        changes["method_options__param_clip"] = 1.0
    spec = small_spec(method, num_rounds=3, local_steps=2, **changes)
    experiment = build_experiment(spec, dataset=small_dataset())
    sizes = experiment.partition.size
    setting = neighbours.PairSetting("replace-one", movement=1.0, clip="none", clip_norm=1.0)
    pair = neighbours.neighbouring_pairs(experiment.model, experiment.problem.x.shape[1], setting)[0]
    schedule = trials.target_schedule(experiment.cohorts, sizes, view="final", rounds=None)
    paired = trials.PairedTrials(experiment, trials.CodeUnderAudit.of(experiment), "final", schedule)
    rows = int(sizes.max())
    dataset = pair.dataset(int(sizes[schedule.target]), rows, inside=True, positions=np.array([2]))
    direction = np.linspace(-1, 1, experiment.num_params)
    seeds = np.array([5, 77, 1234])
    inputs = paired.inputs(dataset, dataset, pair.start, direction, noise=1.0)
    ours = paired.observe(inputs, seeds, final=True).target[:, 0]

    # The same records for the engine: the target's rows, then rows that all other clients share.
    x = np.concatenate([np.asarray(dataset.x), np.asarray(dataset.other_x)])
    y = np.concatenate([np.asarray(dataset.y), np.asarray(dataset.other_y)])
    order = np.concatenate(
        [np.arange(size) + (0 if client == schedule.target else rows) for client, size in enumerate(sizes)]
    )
    federation = experiment.partition._replace(order=order.astype(np.int32))
    result = engine.simulate(
        experiment.prepared.build,
        Model(lambda key: pair.start, experiment.model.apply, experiment.model.layers),
        engine.problem(x, y, federation, x[:1], y[:1]),
        num_rounds=3,
        cohort_size=experiment.prepared.cohort_size_at,
        seeds=seeds.tolist(),
        hyper={k: np.stack([np.asarray(v)] * 3) for k, v in experiment.prepared.hyper.items()},
        cohorts=[np.stack(experiment.cohorts)],
    )
    leaves = [np.asarray(leaf).reshape(3, -1) for leaf in _leaves(result.params)]
    theirs = np.concatenate(leaves, axis=1) @ direction
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


def audited(method, view, **changes):
    experiment = build_experiment(small_spec(method, **changes), dataset=small_dataset())
    return audit(experiment, views=(view,), trials=2000)


def test_where_noise_bends_what_is_seen_nothing_gaussian_is_assumed():
    """The first steps' noise moves a network so far that the record moves it less in the later steps: 0.48
    standard deviations, not the 0.65 that are seen without noise (ε = 1.3 by 400,000 trials, not 1.8)."""
    network = {"model__name": "mlp", "model__hidden": (8,), "batch_sampling": "full", "client_lr": 1.0}
    (row,) = audited("cpfed", "upload", num_rounds=1, cohort_size=6, **network).rows
    assert [bound.form for bound in row.bounds] == ["counts"]


@pytest.mark.parametrize(
    "changes", [{"federation__max_norm": 0.01}, {"secagg__mode": "ideal", "secagg__bound": 0.001}]
)
def test_uploads_are_seen_as_they_leave(changes):
    """Projected or clamped, they are no Gaussian release, and no longer than that."""
    found = audited("cpfed", "sum", batch_sampling="full", num_rounds=1, privacy__view="sum", **changes)
    assert [bound.form for bound in found.rows[0].bounds] == ["counts"]
    experiment = build_experiment(
        small_spec("cpfed", batch_sampling="full", privacy__view="sum", **changes), dataset=small_dataset()
    )
    schedule = trials.target_schedule(experiment.cohorts, experiment.partition.size, view="sum", rounds=1)
    paired = trials.PairedTrials(experiment, trials.CodeUnderAudit.of(experiment), "sum", schedule)
    setting = neighbours.PairSetting("replace-one", movement=1.0, clip="example", clip_norm=1.0)
    pair = neighbours.neighbouring_pairs(experiment.model, experiment.problem.x.shape[1], setting)[0]
    rows = int(experiment.partition.size.max())
    dataset = pair.dataset(rows, rows, inside=True, positions=np.array([0]))
    direction = np.eye(experiment.num_params)[0]
    inputs = paired.inputs(dataset, dataset, pair.start, direction, noise=1.0)
    longest = len(experiment.cohorts[0]) * (changes.get("federation__max_norm") or changes["secagg__bound"])
    assert np.abs(paired.observe(inputs, np.arange(64)).target).max() < longest * (1 + 1e-6)  # float32


def test_sums_with_discrete_noise_are_attacked_with_the_longest_gradients():
    """Their proof rests on no bound of the records' norm."""
    changes = {"batch_sampling": "full", "num_rounds": 2, "privacy__clip": "batch", "privacy__view": "sum"}
    (row,) = audited("secure-fedavg", "sum", secagg__mode="ideal", secagg__noise="discrete", **changes).rows
    assert row.recipe == "R6 discrete"
    assert row.attacked.value > 0.5 * row.proven


def test_all_rows_hold_together():
    """Four rows at 95% each would be wrong together in up to one of five audits."""
    found = audited("cpfed", "upload", batch_sampling="full", num_rounds=1, local_steps=1)
    experiment = build_experiment(
        small_spec("cpfed", batch_sampling="full", num_rounds=1, local_steps=1), dataset=small_dataset()
    )
    both = audit(experiment, views=("upload", "final"), trials=2000)
    for report, count in ((found, 1), (both, 2)):
        for row in report.rows:
            spent = sum(1 - bound.confidence for bound in row.bounds)
            assert spent == pytest.approx(0.05 / count)


@pytest.mark.parametrize(("assumed", "verdict"), [(False, "VIOLATION"), (True, "beyond a proof")])
def test_an_attack_beyond_a_proof_is_not_called_within_it(assumed, verdict):
    experiment = build_experiment(
        small_spec("cpfed", batch_sampling="full", num_rounds=1, local_steps=1), dataset=small_dataset()
    )
    found = audit(experiment, views=("upload",), trials=2000)
    proofs = [replace(row, value=0.1, assumed=assumed) for row in experiment.accountant().table()]
    row = report_row(found.results[0], experiment, proofs, found.claimed, 0.95)
    assert row.verdict.startswith(verdict)
    assert row.violated is not assumed


def test_a_claim_at_a_larger_delta_is_not_refuted_by_an_attack_at_a_smaller_one():
    experiment = build_experiment(
        small_spec("cpfed", batch_sampling="full", num_rounds=1, local_steps=1), dataset=small_dataset()
    )
    found = audit(experiment, views=("final",), trials=2000)
    for delta, refuted in ((1e-3, True), (0.5, False)):
        claim = {**found.claimed, "value": 0.01, "delta": delta}
        row = report_row(found.results[0], experiment, experiment.accountant().table(), claim, 0.95)
        assert row.refutes_claim is refuted


def test_rows_that_other_code_found_are_not_taken_up(tmp_path, monkeypatch):
    experiment = build_experiment(
        small_spec("cpfed", batch_sampling="full", num_rounds=1, local_steps=1), dataset=small_dataset()
    )

    def found(stop=False):
        def on_row(row):
            if stop:
                raise KeyboardInterrupt

        return audit(experiment, views=("upload", "final"), trials=200, keep=tmp_path, on_row=on_row)

    with pytest.raises(KeyboardInterrupt):
        found(stop=True)
    kept = list(tmp_path.iterdir())
    assert len(kept) == 1
    with monkeypatch.context() as edited:
        edited.setattr(build, "_code", lambda: ("edited", 0.0))
        found()
    assert list(tmp_path.iterdir()) == kept
    found()
    assert not list(tmp_path.iterdir())


def _leaves(tree):
    import jax

    return jax.tree.leaves(tree)


def test_the_schedule_follows_the_busiest_client_and_drops_colluders():
    cohorts = [np.array([0, 1, 2]), np.array([1, 3, 2]), np.array([1, 0, 3])]
    sizes = np.array([10, 12, 9, 9])
    schedule = trials.target_schedule(cohorts, sizes, view="sum", rounds=None, colluders=1)
    assert schedule.target == 1
    assert schedule.rounds.tolist() == [0, 1, 2]
    assert schedule.cohorts.tolist() == [[1, 2], [1, 2], [1, 3]]
    schedule = trials.target_schedule(cohorts, sizes, view="final", rounds=2, target=0)
    assert schedule.cohorts.tolist() == [[0, 1, 2], [1, 3, 2]]
