"""A private evaluation counts what a model says of each record. One record must not change what it says of others,
and what it follows from besides the model is said.

A layer that scales a batch by its largest number passes the check of a new model, whose trial records lie in
[0, 1]. Training reads every record by itself. Scores read them together, so one record turned all of them round.
"""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

from dither.data import NOT_COVERED, Encoded, Label
from dither.experiment.evaluation import PrivateScores, evaluate_privately, scored_table
from dither.experiment.report import Report
from dither.models import Model, adapters
from dither.simulation.aggregation import seeded_words


def scaled_by_its_batch(params, x):
    x = x / jnp.maximum(1.0, jnp.max(jnp.abs(x)))
    return x @ params["w"] - 0.01


def test_one_record_moves_no_other_records_scores():
    model = Model(lambda key: {"w": jnp.ones((3, 1))}, scaled_by_its_batch)
    model = adapters.adapted(model, adapters.Shape((3,), 2), {})  # not refused
    tables = []
    for target in (0.5, 1e6):
        x, y = np.full((200, 3), 0.5, np.float32), np.arange(200) % 2
        x[0] = target
        trained = SimpleNamespace(
            model=model,
            params=model.init(None),
            classes=("a", "b"),
            _pieces=lambda features, labels, x=x, y=y: [Encoded(x, y, ())],
            _model_input=lambda x: x,
        )
        trained.outputs = lambda path, trained=trained: Report.outputs(trained, path)
        tables.append(scored_table(trained, "held.csv"))
    one, other = (table[["score", "predicted"]].to_numpy()[1:] for table in tables)
    assert np.array_equal(one, other)


def test_private_scores_say_that_bounds_were_read_from_the_training_records(tmp_path):
    """One training label moves the bounds by which errors are scaled: here MAE by a factor of more than 100,
    with the same file, predictions and noise. No ε of the evaluation covers that."""
    rng, shown = np.random.default_rng(0), []
    np.savez(tmp_path / "held.npz", x=rng.random((500, 2)), y=rng.random(500))
    for number, largest in enumerate((1.0, 1000.0)):
        trained = SimpleNamespace(
            model=SimpleNamespace(task="regression"),
            classes=(),
            label=Label("y", bounds=(0.0, largest)),
            notes=(f"{NOT_COVERED}: the bounds of the label were read from the data", "another note"),
        )
        trained.outputs = lambda path, largest=largest: (np.full(500, 0.5 / largest), np.full(500, 0.6 / largest))
        # noise that is above 0, below which no MAE is given
        ledger, words = tmp_path / f"{number}.sqlite", seeded_words(3)
        scores = evaluate_privately(
            trained, [tmp_path / "held.npz"], epsilon=1.0, ledger=ledger, new_ledger=True, words=words
        )
        assert scores.not_covered == trained.notes[:1]
        assert PrivateScores.from_json(scores.to_json()) == scores
        shown.append(abs(scores.model["mae"].value))
    assert shown[1] > 100 * shown[0]
