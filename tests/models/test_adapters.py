"""Models of your own: every framework's module becomes a `Model`, and what mixes records is refused."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dither import Model, Spec, models
from dither.errors import SpecError
from dither.models import adapters
from dither.spec import code

IMAGES = adapters.Shape((6, 5, 1), 3)
TABLE = adapters.Shape((4,), 2)
X = np.random.default_rng(0).random((3, 30), np.float32)


def flat(x):
    return x.reshape(-1)


def equinox_net(input_shape, num_outputs, key, width=4):
    first, last = jax.random.split(key)
    layers = [
        eqx.nn.Conv2d(input_shape[-1], width, 3, padding=1, key=first),
        eqx.nn.Lambda(jax.nn.relu),
        eqx.nn.Dropout(0.5),
        eqx.nn.Lambda(flat),
        eqx.nn.Linear(width * 30, num_outputs, key=last),
    ]
    return eqx.nn.Sequential(layers)


def equinox_mixing(num_outputs, key):
    inner = eqx.nn.Sequential([eqx.nn.BatchNorm(4, axis_name="batch", mode="batch")])
    return eqx.nn.Sequential([eqx.nn.Lambda(flat), eqx.nn.Linear(30, 4, key=key), inner])


class NnxNet(nnx.Module):
    def __init__(this, input_shape, num_outputs, rngs, norm=""):  # by whatever name
        self = this
        self.conv = nnx.Conv(input_shape[-1], 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs) if norm == "batch" else nnx.GroupNorm(4, 2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(120, num_outputs, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(self.norm(self.conv(x))).reshape(x.shape[0], -1))


class LinenNet(nn.Module):
    num_outputs: int
    norm: bool = False
    random: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(4, (3, 3))(x))
        if self.norm:
            x = nn.BatchNorm(use_running_average=False)(x)
        x = nn.Dropout(0.5, deterministic=not self.random)(x)
        return nn.Dense(self.num_outputs)(x.reshape(x.shape[0], -1))


@pytest.mark.parametrize("source", [equinox_net, NnxNet, LinenNet])
def test_a_module_of_each_framework_gives_every_record_its_scores(source):
    model = adapters.adapted(source, IMAGES, {})
    params = model.init(jax.random.key(0))
    assert all(isinstance(name, str) and leaf.dtype == jnp.float32 for name, leaf in params.items())
    assert any(np.any(params[name] != leaf) for name, leaf in model.init(jax.random.key(1)).items())
    scores = jax.jit(model.apply)(params, X)
    assert scores.shape == (3, 3)
    # The channel of a pixel is last in a record: the same numbers for a record alone and among others.
    np.testing.assert_allclose(model.apply(params, X[1:2])[0], scores[1], rtol=1e-5)


def test_equinox_and_flax_read_an_image_alike():
    """Channels first or last: with the same weights both frameworks' convolutions give the same scores."""
    ours, theirs = (adapters.adapted(each, IMAGES, {}) for each in (equinox_net, LinenNet))
    params = ours.init(jax.random.key(0))
    turned = {
        "Conv_0.kernel": params["layers.0.weight"].transpose(2, 3, 1, 0),
        "Conv_0.bias": params["layers.0.bias"].reshape(-1),
        "Dense_0.kernel": params["layers.4.weight"].reshape(3, 4, 30).transpose(2, 1, 0).reshape(120, 3),
        "Dense_0.bias": params["layers.4.bias"],
    }
    np.testing.assert_allclose(ours.apply(params, X), theirs.apply(turned, X), rtol=1e-4, atol=1e-5)


def mixing(num_outputs):
    def apply(params, x):
        return (x - x.mean(0))[:, :num_outputs] * params["w"]

    return Model(lambda key: {"w": jnp.ones(())}, apply)


def checked(num_outputs):
    """It stops at a record that is too large, and so tells of it."""

    def apply(params, x):
        return eqx.error_if(x, jnp.any(x > 10), "too large")[:, :num_outputs] * params["w"]

    return Model(lambda key: {"w": jnp.ones(())}, apply)


def printing(num_outputs):
    """It prints the derivatives of what it gives."""

    @jax.custom_vjp
    def shown(x):
        return x

    def backward(_, derivative):
        jax.debug.print("{}", derivative)
        return (derivative,)

    shown.defvjp(lambda x: (x, None), backward)
    return Model(lambda key: {"w": jnp.ones(())}, lambda params, x: shown(x[:, :num_outputs] * params["w"]))


def printing_scores(num_outputs):
    """It prints what it gives; its derivatives are other code, without a print."""

    @jax.custom_jvp
    def shown(x):
        jax.debug.print("{}", x)
        return x

    shown.defjvp(lambda x, tangents: (x[0], tangents[0]))
    return Model(lambda key: {"w": jnp.ones(())}, lambda params, x: shown(x[:, :num_outputs] * params["w"]))


@pytest.mark.parametrize(
    ("source", "given", "message"),
    [
        (printing_scores, {}, r"calls Python while it computes \(debug_"),
        (checked, {}, r"calls Python while it computes \(pure_callback"),
        (printing, {}, r"calls Python while it computes \(debug_"),
        (equinox_mixing, {}, "BatchNorm, which mixes the records.*Use GroupNorm or LayerNorm"),
        (NnxNet, {"norm": "batch"}, "BatchNorm, which mixes"),
        (LinenNet, {"norm": True}, "BatchNorm, which mixes"),
        (LinenNet, {"random": True}, "draws random numbers"),
        (mixing, {}, "depend on the other records.*GroupNorm"),
        (equinox_net, {"widht": 3}, "unknown key 'model.options.widht'; did you mean 'width'"),
        (lambda depth: None, {}, "needs 'depth'; set model.options.depth"),
        (lambda: 3, {}, "returned int; return a dither.Model"),
        ("mlp", {}, "model='mlp' is not a model"),
        (Model(lambda key: {}, lambda params, x: x[:, :3]), {}, "no parameters to train"),
        (lambda num_outputs: models.softmax(30, num_outputs + 1), {}, r"scores of shape \(3, 4\).*\(3, 3\)"),
        (models.softmax(30, 3), {"width": 3}, "are for a factory"),
        (
            Model(lambda key: {"w": jnp.ones(3)}, lambda params, x: (x, params["w"])),
            {},
            "gives a tuple for a batch",
        ),
        (
            Model(lambda key: {"w": jnp.ones(3, jnp.bfloat16)}, lambda params, x: x[:, :3] * params["w"]),
            {},
            "type bfloat16",
        ),
    ],
)
def test_what_cannot_be_trained_is_named(source, given, message):
    with pytest.raises(SpecError, match=message):
        adapters.adapted(source, IMAGES, given)


def test_one_score_a_record_is_the_log_odds():
    model = adapters.adapted(lambda key: eqx.nn.Linear(4, 1, key=key), TABLE, {})
    assert model.apply(model.init(jax.random.key(0)), X[:, :4]).shape == (3,)


def test_a_finished_module_starts_from_its_own_weights():
    module = equinox_net((6, 5, 1), 3, jax.random.key(7))
    model = adapters.adapted(module, IMAGES, {})
    np.testing.assert_array_equal(model.init(jax.random.key(0))["layers.4.weight"], module.layers[4].weight)


def test_the_digest_of_a_model_is_that_of_what_it_computes():
    def scaled(factor):
        constant = jnp.full((30, 3), 1.0).at[7, 1].set(factor)
        return Model(lambda key: {"w": jnp.ones((30, 3))}, lambda params, x: x @ (params["w"] * constant))

    assert models.program_digest(scaled(2.0), 30) == models.program_digest(scaled(2.0), 30)
    assert models.program_digest(scaled(2.0), 30) != models.program_digest(scaled(2.0000002), 30)


def test_a_name_finds_its_file_or_its_object(tmp_path):
    (tmp_path / "own.py").write_text(
        "from dither import models\ndef net(num_outputs, width=2): return models.mlp(4, num_outputs, [width])\n"
    )
    spec = Spec().with_values({"model.name": f"{tmp_path / 'own.py'}:net", "model.options.width": 5})
    assert Spec.from_toml(spec.to_toml()) == spec
    model = models.from_spec(spec.model, 4, 3, ())
    assert models.count_params(model.init(jax.random.key(0))) == 4 * 5 + 5 + 5 * 3 + 3
    before = spec.digest()
    (tmp_path / "own.py").write_text("from dither import models\ndef net():\n    return models.softmax(4, 3)\n")
    assert spec.digest() != before
    with pytest.raises(SpecError, match="not a model file: it has no nett"):
        models.from_spec(spec.with_values({"model.name": f"{tmp_path / 'own.py'}:nett"}).model, 4, 3, ())
    (tmp_path / "own.py").write_text(
        "import equinox as eqx\ndef net(key): return eqx.nn.Linear(5, 3, key=key)\ndef none():\n    return 1 / 0\n"
    )
    for name, message in (
        ("net", r"'\S*own.py' fails: .*\(it gets records of shape \(4,\) and must give 3 scores each\)"),
        ("none", r"line 4 of '\S*own.py' fails: ZeroDivisionError"),
    ):
        with pytest.raises(SpecError, match=message):
            models.from_spec(Spec().with_values({"model.name": f"{tmp_path / 'own.py'}:{name}"}).model, 4, 3, ())
    with pytest.raises(SpecError, match=r"no file 'gone.py'"):
        models.from_spec(spec.with_values({"model.name": "gone.py:net"}).model, 4, 3, ())
    given = Spec().with_values({"model.name": models.softmax(4, 3)})
    assert given.model.name.startswith("object:")
    found = models.from_spec(given.model, 4, 3, ())
    assert found.apply is code.registered_model(given.model.name).apply
    assert not found.convex  # what proofs rest on is not taken from a user's word
    assert not found.layers
    with pytest.raises(SpecError, match="given as a Python object"):
        models.from_spec(Spec().with_values({"model.name": "object:Gone"}).model, 4, 3, ())
