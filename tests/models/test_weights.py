"""Initial weights from a file, and parameters that stay as they are."""

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import dither
from dither import Spec, models
from dither.errors import SpecError
from dither.experiment.folder import RunFolder

VALUES = {"data.name": "breast-cancer", "num_clients": 3, "cohort_size": 3, "num_rounds": 1, "batch_size": 8}
VALUES |= {"eval_every": 1, "compare": False, "model.name": "mlp", "model.hidden": [4]}


def model_of(**values):
    return models.from_spec(Spec().with_values({**VALUES, **values}).model, 30, 2, ())


def test_a_file_gives_the_weights_that_a_model_starts_from(tmp_path):
    file = tmp_path / "public.safetensors"
    save_file({"dense0/w": np.full((30, 4), 0.5, np.float32)}, file)
    plain, started = model_of(), model_of(**{"model.weights": str(file)})
    params, before = started.init(jax.random.key(3)), plain.init(jax.random.key(3))
    np.testing.assert_array_equal(params["dense0"]["w"], np.full((30, 4), 0.5))
    np.testing.assert_array_equal(params["dense1"]["w"], before["dense1"]["w"])
    assert started.layers  # the rule for dense layers stays
    spec = Spec().with_values({"model.weights": str(file)})
    digest = spec.digest()
    save_file({"dense0/w": np.zeros((30, 4), np.float32)}, file)
    assert spec.digest() != digest  # another start is another run


def test_only_trainable_parameters_are_trained_counted_and_sent(tmp_path):
    model = model_of(**{"model.trainable": ["dense1/*"]})
    params = model.init(jax.random.key(0))
    assert list(params) == ["dense1/b", "dense1/w"]
    assert not model.convex
    x = np.random.default_rng(0).random((5, 30), np.float32)
    np.testing.assert_allclose(
        model.apply(params, x), model_of().apply(model_of().init(jax.random.key(0)), x), 1e-5
    )
    report = dither.run("adult", values={**VALUES, "model.trainable": "dense1/*"}, out=tmp_path / "run")
    assert report.num_params == 4 * 2 + 2
    loaded = dither.load(tmp_path / "run")
    assert loaded.predict(x).shape == (5,)
    # A run's file holds all parameters, and starts another run.
    whole = model_of(**{"model.weights": str(tmp_path / "run" / "model.safetensors")}).init(jax.random.key(9))
    np.testing.assert_array_equal(whole["dense1"]["w"], report.params["dense1/w"])
    np.testing.assert_array_equal(whole["dense0"]["w"], model_of().init(jax.random.key(0))["dense0"]["w"])


@pytest.mark.parametrize(
    ("arrays", "trainable", "message"),
    [
        ({"dense9/w": (3,)}, [], "holds 'dense9/w', which the model has not; it has dense0/b, dense0/w"),
        ({"dense0/w": (3,)}, [], r"of shape \(3,\); the model's is \(30, 4\)"),
        ({}, ["head*"], r"model.trainable='head\*' fits no parameter; there are dense0/b"),
        (None, [], "is not a safetensors file"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, arrays, trainable, message):
    file = tmp_path / "w.safetensors"
    file.write_bytes(b"no tensors")
    if arrays is not None:
        save_file({name: np.zeros(shape, np.float32) for name, shape in arrays.items()}, file)
    with pytest.raises(SpecError, match=message):
        model_of(**{"model.weights": str(file), "model.trainable": trainable})


def test_a_model_of_an_earlier_version_is_read(tmp_path):
    np.savez(tmp_path / "model.npz", **{"dense0/w": np.ones(3)})
    np.testing.assert_array_equal(RunFolder(tmp_path).load_model()["dense0/w"], np.ones(3))
