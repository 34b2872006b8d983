"""FedJAX: `for_each_client` over the cohort, FedAvg's server step.

    python fedjax_loop.py A1 A32 B1 B2 [--factorised] [--seconds S]

Per-example gradients by `jax.vmap(jax.grad)`, as its users write them; --factorised takes the norms of dense
layers from their factors instead, which is not FedJAX's doing but shows what its loop costs beside a good
gradient.
"""

from __future__ import annotations

import sys
from importlib.metadata import version

import fedjax
import jax
import jax.numpy as jnp
import numpy as np
import workloads
from workloads import Workload

FACTORISED = workloads.flag("--factorised")


def scores(params, x):
    for i, (weight, bias) in enumerate(params):
        x = x @ weight + bias
        x = jnp.maximum(x, 0) if i < len(params) - 1 else x
    return x


def loss(w: Workload, params, x, y):
    found = scores(params, x)
    if w.outputs == 1:
        return jnp.mean(jax.nn.softplus(found[:, 0]) - y * found[:, 0])
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(found), y[:, None], 1))


def clipped_naive(w: Workload, params, x, y):
    each = jax.vmap(jax.grad(lambda p, x, y: loss(w, p, x[None], y[None])), (None, 0, 0))(params, x, y)
    norms = jnp.sqrt(sum(jnp.sum(g.reshape(len(x), -1) ** 2, 1) for g in jax.tree.leaves(each)))
    scale = jnp.minimum(1, w.clip / (norms + 1e-12))
    return jax.tree.map(lambda g: jnp.mean(g * scale.reshape(-1, *[1] * (g.ndim - 1)), 0), each)


def clipped_factorised(w: Workload, params, x, y):
    inputs = [x]
    for weight, bias in params[:-1]:
        inputs.append(jnp.maximum(inputs[-1] @ weight + bias, 0))
    found = inputs[-1] @ params[-1][0] + params[-1][1]
    d = (
        jax.nn.softmax(found) - jax.nn.one_hot(y, w.classes)
        if w.outputs > 1
        else jax.nn.sigmoid(found) - y[:, None]
    )
    ds = [d]
    for (weight, _), a in zip(params[:0:-1], inputs[:0:-1], strict=True):
        d = (d @ weight.T) * (a > 0)
        ds.insert(0, d)
    squared = sum(jnp.sum(d * d, 1) * (1 + jnp.sum(a * a, 1)) for a, d in zip(inputs, ds, strict=True))
    scale = jnp.minimum(1, w.clip / jnp.sqrt(squared + 1e-24)) / len(x)
    return [(a.T @ (d * scale[:, None]), jnp.sum(d * scale[:, None], 0)) for a, d in zip(inputs, ds, strict=True)]


def add_noise(key, tree, std):
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(key, len(leaves))
    noisy = [leaf + std * jax.random.normal(k, leaf.shape) for k, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, noisy)


def make(w: Workload):
    def client_init(server, key):
        return {"params": server, "key": key}

    def client_step(state, batch):
        key, use = jax.random.split(state["key"])
        x, y = batch["x"], batch["y"]
        if w.clip:
            gradient = (clipped_factorised if FACTORISED else clipped_naive)(w, state["params"], x, y)
        else:
            gradient = jax.grad(lambda p: loss(w, p, x, y))(state["params"])
        if w.step_noise:
            gradient = add_noise(use, gradient, w.step_noise)
        return {"params": jax.tree.map(lambda p, g: p - w.lr * g, state["params"], gradient), "key": key}

    def client_final(server, state):
        params = state["params"]
        if w.param_clip:
            params = fedjax.tree_util.tree_clip_by_global_norm(params, w.param_clip)
        return add_noise(state["key"], params, w.upload_noise) if w.upload_noise else params

    return fedjax.for_each_client(client_init, client_step, client_final)


def timed(w: Workload, seconds: float) -> None:
    x, y = workloads.data(w)
    clients = [fedjax.ClientDataset({"x": x[i], "y": y[i]}) for i in range(w.clients)]
    run, rng, done = make(w), np.random.default_rng(1), 0
    server = [tuple(map(jnp.asarray, layer)) for layer in workloads.initial(w)]

    def batches(number):
        return clients[number].shuffle_repeat_batch(
            batch_size=w.batch, num_epochs=None, num_steps=w.local_steps, seed=rng.integers(2**31)
        )

    def rounds(count):
        nonlocal server, done
        for _ in range(count):
            keys = jax.random.split(jax.random.PRNGKey(done), w.cohort)
            cohort = rng.permutation(w.clients)[: w.cohort]
            batched = ((number, batches(number), key) for number, key in zip(cohort, keys, strict=True))
            server = fedjax.tree_util.tree_mean((local, 1.0) for _, local in run(server, batched))
            done += 1
        jax.block_until_ready(server)

    def layers():
        return [tuple(map(np.asarray, layer)) for layer in server]

    versions = {name: version(name) for name in ("fedjax", "jax")} | {"python": sys.version.split()[0]}
    name = "fedjax-factorised" if FACTORISED else "fedjax"
    workloads.measure(w, name, versions, rounds, layers, seconds=seconds)


if __name__ == "__main__":
    workloads.each(timed)
