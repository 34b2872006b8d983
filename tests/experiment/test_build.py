"""What a proof for sums may use of model and data (the gate of R6')."""

import numpy as np
import pytest

from dither import data
from dither.data.dataset import LoadOptions, dataset_from_tables
from dither.errors import SpecError
from dither.experiment.build import aggregation, build_experiment, engine_options, large_delta
from dither.experiment.plan.records import synthetic_data
from dither.spec import Spec


def stays(label: data.Label):
    """40 patients with two public features, and how long they stayed or whether they came back."""
    pd = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    days = rng.uniform(0, 40, 40)
    frame = pd.DataFrame({"age": rng.uniform(0, 100, 40), "bmi": rng.uniform(10, 50, 40), "days": days})
    frame["back"] = np.where(days > 20, "yes", "no")
    columns = tuple(data.Numeric(name, (0, 100), (50, 25), 50) for name in ("age", "bmi"))
    schema = data.Schema(label=label, columns=columns)
    return dataset_from_tables("stays", frame, None, schema, LoadOptions())


STAY, BACK = data.Label("days", bounds=(0, 40)), data.Label("back", ("no", "yes"))
SPEC = {"method": "cpfed", "num_clients": 4, "cohort_size": 4, "num_rounds": 2, "local_steps": 3, "batch_size": 4}


@pytest.mark.parametrize(
    ("label", "values", "smoothness"),
    [
        (STAY, {"model.name": "linear"}, 3.0),  # R² = 1 + 1 + 1, and squares have curvature 1
        (STAY, {"model.name": "linear", "model.loss": "huber"}, 3.0),
        (STAY, {"model.name": "linear", "privacy.clip": "batch"}, None),
        (STAY, {"model.name": "mlp"}, None),
        (BACK, {"model.name": "logistic"}, 3 / 4),
        (BACK, {"model.name": "logistic", "model.class_weight": [0.5, 6.0]}, 6 * 3 / 4),
        (BACK, {"model.name": "softmax"}, 3 / 2),
    ],
)
def test_only_one_linear_score_clipped_by_record_gets_a_bound_on_its_smoothness(label, values, smoothness):
    spec = Spec.from_any(
        {**SPEC, "data.name": "adult", "privacy.noise": "given", "privacy.noise_std": 1.0, **values}
    )
    plan = build_experiment(spec, dataset=stays(label)).plan
    assert plan.convex == (smoothness is not None)
    assert plan.smoothness == (None if smoothness is None else pytest.approx(smoothness))


@pytest.mark.parametrize(
    ("values", "records", "words"),
    [
        (
            {"data.path": "t.csv", "data.label": "y", "privacy.delta": 0.5},
            1800,
            "fail for 900 of 1,800 records: set privacy.delta=0.0001",
        ),
        (
            {"data.path": "t.csv", "data.label": "y", "privacy.delta": 1e-5},
            200_000,
            "set privacy.delta=1e-06 or smaller",
        ),
        ({"data.path": "t.csv", "data.label": "y", "privacy.delta": 1e-5}, 99_999, ""),
        ({"privacy.delta": 1e-4}, 32_561, ""),  # as papers do, on public records
        ({"privacy.delta": 0.5}, 32_561, "set privacy.delta=1e-05"),
    ],
)
def test_a_large_delta_is_named_beside_every_epsilon(values, records, words):
    warnings = large_delta(Spec().with_values(values), records, False)
    assert bool(warnings) == bool(words)
    assert words in "".join(warnings)


def test_wide_vectors_are_for_large_models_whose_products_are_of_two_matrices():
    """A product with a vector (one score, or one record), or a convolution, would be added in another order."""

    def wide(classes=3, **values):
        large = {"num_clients": 4, "cohort_size": 4, "num_rounds": 2, "batch_size": 4, "randomness": "seeded"}
        large |= {"model.name": "mlp", "model.hidden": [6000]}
        dataset = synthetic_data(200, 10, num_classes=classes).dataset
        spec = Spec.from_preset("cpfed").with_values({**large, **values})
        return engine_options(build_experiment(spec, dataset=dataset))["wide_vectors"]

    assert wide()
    assert not wide(classes=2)
    assert not wide(batch_size=1)
    assert not wide(**{"model.hidden": [8]})  # the noise of a small model takes no time


@pytest.mark.parametrize(
    ("rate", "modulus", "said"), [(6e13, 64, "at most 5.5e.11 can be drawn"), (1e4, 32, "noise of a sum reaches")]
)
def test_discrete_noise_that_cannot_be_drawn_or_summed_is_refused_before_a_round(rate, modulus, said):
    values = {"method": "secure-fedavg", "num_clients": 4, "cohort_size": 4, "num_rounds": 1, "local_steps": 1}
    values |= {"data.name": "breast-cancer", "privacy.clip": "batch", "privacy.epsilon": 1.0, "client_lr": rate}
    values |= {"secagg.mode": "ideal", "secagg.noise": "discrete", "secagg.modulus_bits": modulus}
    experiment = build_experiment(Spec().with_values({**values, "secagg.scale_bits": 20}))
    with pytest.raises(SpecError, match=said):
        aggregation(experiment)
