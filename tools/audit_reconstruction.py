"""What one upload shows of one record: reconstruction from the first layer's gradient, with and without noise.

One step on one record moves a dense layer by -η (p - e_y) ⊗ (x, 1): the weights' change is the record, scaled by
the bias's change (Phong et al. 2018; Geiping et al. 2020 for the general case). Nothing is optimised: the picture
is read off. For newcomers: an update is not an anonymous number.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dither import models
from dither.data import Dataset
from dither.errors import SpecError
from dither.experiment import plots
from dither.methods import prepare
from dither.simulation import engine
from dither.spec import Spec
from dither.types import Algorithm, ClientResult, Params, Prepared, Records, Round


class Leak(NamedTuple):
    """Reconstructions of the same records under one kind of noise, and how like them they are."""

    name: str
    pictures: np.ndarray  # [records, pixels]
    likeness: float  # mean correlation with the records


def reconstruct(
    dataset: Dataset, rows: Sequence[int], noises: Sequence[tuple[str, dict[str, Any]]], *, client_size: int = 325
) -> list[Leak]:
    """Each record alone in a batch of one, sent by Secure FedAvg's own client with each of the noises.

    `noises` are (name, keys of the spec). The adversary knows the model that was broadcast and reads the upload.
    """
    if not dataset.image_shape:
        raise SpecError("reconstruction draws pictures; choose a data set of images")
    features, classes = dataset.x_train.shape[1], len(dataset.classes)
    model = models.softmax(features, classes)
    leaks = []
    for name, values in noises:
        base = {"model.name": "softmax", "num_clients": 100, "local_steps": 1, "batch_size": 1, "model.l2": 0.0}
        spec = Spec.from_preset("secure-fedavg").with_values({**base, **values})
        sizes = np.full(spec.num_clients, client_size)
        prepared = _with_noise(spec, model, sizes, features * classes + classes)
        pictures = np.stack([_read(prepared, model, dataset, row, client_size) for row in rows])
        likeness = [np.corrcoef(p, dataset.x_train[row])[0, 1] for p, row in zip(pictures, rows, strict=True)]
        leaks.append(Leak(name, pictures, float(np.mean(likeness))))
    return leaks


def _with_noise(spec: Spec, model: models.Model, sizes: np.ndarray, num_params: int) -> Prepared:
    """The method; for noise="proven" with the multiplier for which one message has the target ε (R5)."""
    prepared = prepare(spec, model, client_sizes=sizes, num_params=num_params)
    if spec.privacy.noise != "proven":
        return prepared
    from dither import accounting
    from dither.types import RoundInfo

    release = prepared.releases(RoundInfo(0, 0, int(sizes[0]), spec.cohort_size))[0]
    wanted = accounting.message_noise_multiplier(spec.privacy.epsilon, release.sampling.rate, spec.privacy.delta)
    factor = wanted * release.sensitivity / release.noise_std
    hyper = {**prepared.hyper, "noise_multiplier": np.asarray(prepared.hyper["noise_multiplier"]) * factor}
    return prepared._replace(plan=prepared.plan._replace(hyper=hyper))


def _read(prepared: Prepared, model: models.Model, dataset: Dataset, row: int, size: int) -> np.ndarray:
    """The record in an upload: weights' change along the bias's, which is -η (p - e_y) in either."""
    algorithm = prepared.build({k: jnp.asarray(v, jnp.float32) for k, v in prepared.hyper.items()})
    start = model.init(jax.random.key(0))
    # The batch of one holds this record: the client has no other.
    x, y = (jnp.repeat(jnp.asarray(a[row : row + 1]), size, axis=0) for a in (dataset.x_train, dataset.y_train))
    records = Records(x, y, jnp.arange(size), jnp.int32(0), jnp.int32(size))
    result = first_result(algorithm, start, records, seed=row, cohort_size=50)
    change = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64) / float(result.weight), result.upload)["out"]
    # With noise the label is guessed: the class whose weights moved up most.
    label = int(np.argmax(change["w"].sum(axis=0)))
    pull = -np.full(change["b"].shape, 1 / len(change["b"]))
    pull[label] += 1
    return np.asarray(change["w"] @ pull / np.dot(pull, pull))


def first_result(
    algorithm: Algorithm, start: Params, records: Records, *, seed: int, cohort_size: int
) -> ClientResult:
    """What client 0 returns in round 0."""
    zero = jnp.int32(0)
    return algorithm.client(
        engine.client_keys(jnp.uint32(seed), zero, zero),
        algorithm.message(algorithm.init(start)),
        algorithm.client_init(start),
        records,
        Round(zero, zero, jnp.int32(cohort_size)),
    )


def draw(dataset: Dataset, rows: Sequence[int], leaks: Sequence[Leak], path: Path) -> None:
    """One row of pictures for the records and one for each kind of noise."""
    figure, axes = plots.new_figure(
        len(leaks) + 1, len(rows), width=1.05 * len(rows) + 2.2, height=1.12 * (len(leaks) + 1)
    )
    side = dataset.image_shape[:2]
    lines = [("the record", dataset.x_train[list(rows)]), *((leak.name, leak.pictures) for leak in leaks)]
    for line, (name, pictures) in zip(axes, lines, strict=True):
        for axis, picture in zip(line, pictures, strict=True):
            low, high = np.quantile(picture, [0.02, 0.98])
            axis.imshow(picture.reshape(side), cmap="gray_r", vmin=min(low, 0), vmax=max(high, 1e-9))
            axis.set(xticks=[], yticks=[])
            axis.grid(visible=False)
            axis.spines[:].set_visible(False)
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
    plots.save(figure, path)
