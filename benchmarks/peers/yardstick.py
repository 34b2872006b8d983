"""The yardstick: each workload as one hand-written JAX loop, no library around it. Runs in Dither's environment.

    python yardstick.py A1 A32 B1 B2 C [--seconds S]
    python yardstick.py B1 B2 C --scored    # with the evaluations that Dither makes, every 5 rounds

No ledger, no accounting, no metrics, no finite checks, shapes and methods welded together: what a person would
write who wants this one workload as fast as JAX makes it on a CPU. Rounds are one `fori_loop` with a traced
bound. Logistic regression: clients side by side. The network and C: clients one after the other, half of them on
each of two host devices. Random words come from threefry written out as array operations (XLA fuses them; JAX's
own lowering on a CPU is a rolled loop).
"""

from __future__ import annotations

import os
import sys

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np
import workloads
from jax.sharding import Mesh, PartitionSpec
from workloads import Workload

SEED = 1
SCORED = workloads.flag("--scored")
EVERY = 5  # rounds between evaluations; of B and C, as in benchmarks/specs


# Random words


def threefry(key, counts):
    """Threefry-2x32, 20 rounds, on the pairs (counts, stream): two words a count."""
    ks = (key[0], key[1], key[0] ^ key[1] ^ np.uint32(0x1BD11BDA))
    x0, x1 = counts + ks[0], ks[1] + jnp.zeros_like(counts)
    turns = ((13, 15, 26, 6), (17, 29, 16, 24))
    for group in range(5):
        for turn in turns[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << np.uint32(turn)) | (x1 >> np.uint32(32 - turn))
            x1 = x0 ^ x1
        x0 = x0 + ks[(group + 1) % 3]
        x1 = x1 + ks[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1


def fold(key, number):
    """Another key."""
    return jnp.stack(threefry(key, jnp.asarray(number, jnp.uint32)))


def words(key, count):
    """That many random words, one a count: with both, the halves' concatenation keeps XLA from vectorising."""
    return threefry(key, jnp.arange(count, dtype=jnp.uint32))[0]


def normals(bits):
    """N(0, 1) by inversion (Giles 2012), one a word."""
    u = jax.lax.bitcast_convert_type((bits >> np.uint32(9)) | np.uint32(0x3F800000), jnp.float32) * 2 - 3
    u = jnp.maximum(u, -1 + 2**-24)
    w = -jnp.log((1 - u) * (1 + u))
    near = (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087)
    near += (-0.00125372503, -0.00417768164, 0.246640727, 1.50140941)
    far = (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773)
    far += (-0.0076224613, 0.00943887047, 1.00167406, 2.83297682)
    small = w < 5
    t = jnp.where(small, w - 2.5, jnp.sqrt(w) - 3)
    p = jnp.where(small, near[0], far[0])
    for a, b in zip(near[1:], far[1:], strict=True):
        p = jnp.where(small, a, b) + p * t
    return np.float32(2**0.5) * p * u


def below(bits, bound):
    """Uniform in 0..bound-1 (bound far below 2^16: the bias is below 2^-16)."""
    return ((bits >> np.uint32(16)) * jnp.asarray(bound, jnp.uint32) >> np.uint32(16)).astype(jnp.int32)


def subsets(bits, size):
    """Rows of distinct numbers below `size`, one a row of `bits`: Floyd's algorithm, one entry after the other
    with a mark on what is taken, or, for short rows, solved as a fixed point."""
    count = bits.shape[1]
    fresh = size - count + jnp.arange(count)
    draws = below(bits, fresh + 1)
    if count == 1:
        return draws
    if count > 48:
        row = jnp.arange(bits.shape[0])

        def choose(taken, entry):
            chosen = jnp.where(taken[row, entry[0]], entry[1], entry[0])
            return taken.at[row, chosen].set(True), chosen

        return jax.lax.scan(choose, jnp.zeros((len(row), size), bool), (draws.T, fresh))[1].T
    earlier = jnp.tril(jnp.ones((count, count), bool), -1)

    def settle(chosen):
        repeats = jnp.any((chosen[:, None, :] == draws[:, :, None]) & earlier, axis=2)
        return jnp.where(repeats, fresh, draws)

    return jax.lax.while_loop(
        lambda pair: jnp.any(pair[0] != pair[1]), lambda pair: (pair[1], settle(pair[1])), (draws, settle(draws))
    )[1]


def orders(bits):
    """Each row a random order of its positions: the position rides in the low bits of the word that is sorted."""
    low = np.uint32((1 << (bits.shape[1] - 1).bit_length()) - 1)
    packed = (bits & ~low) | jnp.arange(bits.shape[1], dtype=jnp.uint32)
    return (jnp.sort(packed, axis=1) & low).astype(jnp.int32)


# A: logistic regression, clients side by side


def logistic(w: Workload, x, y):
    x1 = np.concatenate([x, np.ones((*x.shape[:2], 1), np.float32)], 2).reshape(-1, w.features + 1)
    norms = np.sqrt(np.sum(x1**2, 1))  # an example's gradient is (p - y) x: its norm needs no gradient
    x1, norms, y1 = jnp.asarray(x1), jnp.asarray(norms), jnp.asarray(y.reshape(-1), jnp.float32)
    width = w.features + 1

    def one(index, params):
        draws = w.cohort * w.local_steps * w.batch
        bits = words(fold(jnp.array([0, SEED], jnp.uint32), index), w.clients + draws + w.cohort * width)
        cohort = jnp.argsort(bits[: w.clients])[: w.cohort]
        rows = subsets(bits[w.clients : w.clients + draws].reshape(-1, w.batch), w.records)
        rows = rows.reshape(w.cohort, w.local_steps, w.batch) + (cohort * w.records)[:, None, None]
        rows = jnp.swapaxes(rows, 0, 1)

        def step(local, rows):
            xs = x1[rows]
            error = jax.nn.sigmoid(jnp.einsum("cbf,cf->cb", xs, local)) - y1[rows]
            error = error * jnp.minimum(1, w.clip / (jnp.abs(error) * norms[rows] + 1e-12))
            return local - w.lr / w.batch * (error[:, None, :] @ xs)[:, 0], None  # the order without a copy

        start = jnp.broadcast_to(params, (w.cohort, width))
        local, _ = jax.lax.scan(step, start, rows)
        noise = normals(bits[w.clients + draws : w.clients + draws + w.cohort * width])
        return jnp.mean(local + w.upload_noise * noise.reshape(local.shape), 0)

    advance = jax.jit(lambda params, start, stop: jax.lax.fori_loop(start, stop, one, params))
    weight, bias = workloads.initial(w)[0]
    state = jnp.asarray(np.concatenate([weight, bias[None]])[:, 0])
    return advance, state, lambda params: [(np.asarray(params)[:-1, None], np.asarray(params)[-1:])]


# B and C: clients one after the other, on two devices


def clipped_gradient(w: Workload, params, x, y):
    """Mean gradient of a ReLU network's cross-entropy, each example's clipped by its factorised norm."""
    inputs, value = [], x
    for i, (weight, bias) in enumerate(params):
        inputs.append(value)
        value = value @ weight + bias
        if i < len(params) - 1:
            value = jnp.maximum(value, 0)
    d = (jax.nn.softmax(value) - jax.nn.one_hot(y, w.classes)) / w.batch
    ds = [d]
    for (weight, _), a in zip(params[:0:-1], inputs[:0:-1], strict=True):
        d = (d @ weight.T) * (a > 0)
        ds.insert(0, d)
    if w.clip:
        squared = sum(jnp.sum(d * d, 1) * (1 + jnp.sum(a * a, 1)) for a, d in zip(inputs, ds, strict=True))
        scale = jnp.minimum(1, w.clip / w.batch * jax.lax.rsqrt(squared + 1e-30))
        ds = [d * scale[:, None] for d in ds]
    # The left factor of a product is copied into its order: let it be the smaller one.
    products = [(d.T @ a).T if w.batch > d.shape[1] else a.T @ d for a, d in zip(inputs, ds, strict=True)]
    return [(product, jnp.sum(d, 0)) for product, d in zip(products, ds, strict=True)]


def noise_like(key, params):
    leaves, structure = jax.tree.flatten(params)
    noise = [normals(words(fold(key, i), leaf.size)).reshape(leaf.shape) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, noise)


def deep(w: Workload, x, y):
    mesh = Mesh(np.array(jax.devices()[:2]), ("half",))
    tree, halves = jax.tree.map, 2

    def batches(key):
        if w.epoch:
            return orders(words(key, w.records)[None]).reshape(w.local_steps, w.batch)
        return subsets(words(key, w.local_steps * w.batch).reshape(w.local_steps, -1), w.records)

    def client(state, index, number, x, y):
        params, control, controls = state
        key = fold(fold(jnp.array([0, SEED], jnp.uint32), index), number)
        own_x, own_y = x[number], y[number]
        correction = tree(lambda c, each: c - each[number], control, controls) if w.control else ()

        def step(local, item):
            number, rows = item
            gradient = clipped_gradient(w, local, own_x[rows], own_y[rows])
            if w.step_noise:
                noise = noise_like(fold(key, number + 2), gradient)
                gradient = tree(lambda g, z: g + w.step_noise * z, gradient, noise)
            if w.control:
                gradient = tree(jnp.add, gradient, correction)
            return tree(lambda p, g: p - w.lr * g, local, gradient), None

        local, _ = jax.lax.scan(step, params, (jnp.arange(w.local_steps), batches(fold(key, 0))))
        if w.param_clip:
            norm = jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(local)))
            local = tree(lambda leaf: leaf * jnp.minimum(1, w.param_clip / norm), local)
        if w.upload_noise:
            local = tree(lambda p, z: p + w.upload_noise * z, local, noise_like(fold(key, 1), local))
        if not w.control:
            return local, ()
        return local, tree(lambda a, b, c: (a - b) / (w.local_steps * w.lr) - c, params, local, correction)

    def rounds(state, x, y, start, stop):
        def one(index, state):
            params, control, controls = state
            bits = words(fold(jnp.array([1, SEED], jnp.uint32), index), w.clients)
            cohort = jnp.arange(w.clients) if w.cohort == w.clients else jnp.argsort(bits)[: w.cohort]
            mine = cohort.reshape(halves, -1)[jax.lax.axis_index("half")]

            def add(total, number):
                local, own = client(state, index, number, x, y)
                return tree(jnp.add, total, local), own

            total, own = jax.lax.scan(add, tree(jnp.zeros_like, params), mine)
            params = tree(lambda leaf: jax.lax.psum(leaf, "half") / w.cohort, total)
            if w.control:
                own = tree(lambda leaf: jax.lax.all_gather(leaf, "half", tiled=True), own)
                change = tree(lambda new, each: jnp.sum(new - each[cohort], 0) / w.clients, own, controls)
                control = tree(jnp.add, control, change)
                controls = tree(lambda each, new: each.at[cohort].set(new), controls, own)
            return params, control, controls

        return jax.lax.fori_loop(start, stop, one, state)

    everywhere = PartitionSpec()
    sharded = jax.shard_map(rounds, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
    compiled = jax.jit(sharded, donate_argnums=0)
    params = [tuple(map(jnp.asarray, layer)) for layer in workloads.initial(w)]
    state = (params, (), ())
    if w.control:
        zeros = tree(jnp.zeros_like, params)
        state = (params, zeros, tree(lambda leaf: jnp.zeros((w.clients, *leaf.shape)), params))
    state, x, y = jax.device_put((state, x, y), jax.sharding.NamedSharding(mesh, everywhere))

    def advance(state, start, stop):
        return compiled(state, x, y, start, stop)

    return advance, state, lambda state: [tuple(map(np.asarray, layer)) for layer in state[0]]


def evaluation(w: Workload, x, y, block=512):
    """Loss over all records, loss and accuracy over every tenth (the test records of `workloads.write`), in
    blocks; half of them on each of two devices."""
    x, y = x.reshape(-1, w.features), y.reshape(-1)
    count, tests = len(y), len(y[::10])
    blank = np.zeros((-(count + tests) % (2 * block), w.features), np.float32)
    weights = np.zeros((count + tests + len(blank), 2), np.float32)
    weights[:count, 0], weights[count : count + tests, 1] = 1 / count, 1 / tests
    x, y = np.concatenate([x, x[::10], blank]), np.concatenate([y, y[::10], np.zeros(len(blank), y.dtype)])
    mesh = Mesh(np.array(jax.devices()[:2]), ("half",))

    def scores(params, x, y, weights):
        def part(rows):
            x, y, weights = rows
            for i, (weight, bias) in enumerate(params):
                x = (jnp.maximum(x, 0) if i else x) @ weight + bias
            losses = jax.nn.logsumexp(x, 1) - jnp.take_along_axis(x, y[:, None], 1)[:, 0]
            return jnp.stack([losses, jnp.argmax(x, 1) == y]) @ weights

        blocks = jax.tree.map(lambda a: a.reshape(-1, block, *a.shape[1:]), (x, y, weights))
        return jax.lax.psum(jnp.sum(jax.lax.map(part, blocks), 0), "half")

    specs = (PartitionSpec(), *[PartitionSpec("half")] * 3)
    compiled = jax.jit(
        jax.shard_map(scores, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
    )
    placed = jax.device_put((x, y, weights), jax.sharding.NamedSharding(mesh, PartitionSpec("half")))
    return lambda state: np.asarray(compiled(state[0], *placed))


def timed(w: Workload, seconds: float) -> None:
    x, y = workloads.data(w)
    advance, state, layers = (deep if w.hidden or w.control else logistic)(w, x, y)
    evaluate, done = evaluation(w, x, y) if SCORED else None, 0

    def rounds(count):
        nonlocal state, done
        end = done + count
        while done < end:
            stop = min(end, done + EVERY - done % EVERY) if evaluate else end
            state = jax.block_until_ready(advance(state, np.int32(done), np.int32(stop)))
            done = stop
            if evaluate and not done % EVERY:
                evaluate(state)

    versions = {"python": sys.version.split()[0], "jax": jax.__version__}
    name = "yardstick-scored" if SCORED else "yardstick"
    workloads.measure(w, name, versions, rounds, lambda: layers(state), seconds=seconds)


if __name__ == "__main__":
    workloads.each(timed)
