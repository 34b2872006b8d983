"""H3: float32 noise has a lattice. Added to a value, it leaves the value's last bits in the upload.

Near zero a float32 is much finer than near the value g that a record adds. So an upload fl(g + fl(σz)) that comes
near zero is a multiple of ulp(g), while the same upload without the record has finer bits: seen on the client
function of the default job. Noise on a lattice of its own will close it; until then no row may hide it
(`test_every_float_row_says_so`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dither import models
from dither.core import Keys, Records, Round
from dither.privacy import noise
from dither.spec import Spec, prepare

TRIALS = 50_000
G = np.float32(-0.5) / np.float32(128)  # coordinate 0 of the record's clipped gradient, over the divisor


def first_coordinates(*, blank: bool) -> np.ndarray:
    """Coordinate 0 of noisy first-round gradients of the default job's client, one a trial."""
    spec = Spec.from_preset("adult").with_values(
        {"local_steps": 1, "sampling_rate": 1.0, "privacy.noise": "given", "privacy.noise_std": 0.0375}
    )
    x = np.zeros((64, 3), np.float32)
    x[:, 1] = 1.0
    x[0] = (0.0 if blank else 1.0, 0.3, 0.0)
    y = (np.arange(64) % 2).astype(np.int32)
    y[0] = 1
    model = models.make("logistic", num_features=3, num_classes=2, hidden=(), image_shape=())
    prepared = prepare(spec, model, client_sizes=np.full(16, 64), num_params=4)
    method = prepared.build({name: jnp.asarray(value, jnp.float32) for name, value in prepared.hyper.items()})
    start = model.init(jax.random.key(0))
    records = Records(jnp.asarray(x), jnp.asarray(y), jnp.arange(64), jnp.int32(0), jnp.int32(64))

    def one(number):
        keys = Keys(
            *(noise.for_client(noise.stream(7 + blank, name), number) for name in ("batch", "epoch", "noise"))
        )
        round = Round(jnp.int32(0), jnp.int32(0), jnp.int32(16))
        return method.client(keys, start, method.client_init(start), records, round).upload["out"]["w"][0, 0]

    uploads = np.asarray(jax.jit(jax.vmap(one))(jnp.arange(TRIALS)), np.float64)
    return uploads / (-2.0 / 16)  # the learning rate over the cohort: a power of two, so exact


@pytest.mark.xfail(strict=True, reason="H3: the noise is float32, not on a lattice of its own")
def test_an_uploads_low_bits_do_not_tell_whether_a_record_is_there():
    near = abs(float(G)) / 16
    shares, counts = [], []
    for blank in (False, True):
        seen = first_coordinates(blank=blank)
        seen = seen[np.abs(seen) < near]
        shares.append(float(np.mean(seen % float(np.spacing(abs(G))) == 0)))
        counts.append(len(seen))
    assert min(counts) > 150
    # 8 standard deviations of a difference of shares; measured: 0.70 against 0.02
    assert abs(shares[0] - shares[1]) <= 8 * np.sqrt(0.5 / min(counts))
