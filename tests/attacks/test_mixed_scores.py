"""A private evaluation counts what a model says of each record. One record must not change what it says of others.

A layer that scales a batch by its largest number passes the check of a new model, whose trial records lie in
[0, 1]. Training reads every record by itself. Scores read them together, so one record turned all of them round.
"""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

from dither.data import Encoded
from dither.experiment.evaluation import scored_table
from dither.experiment.report import Report
from dither.models import Model, adapters


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
