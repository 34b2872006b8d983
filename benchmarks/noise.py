"""Random numbers: JAX's own draws against Dither's, the same work in one run.

    python benchmarks/noise.py

Normals of a model of 203,530 numbers added to an update; the same inside a loop that a compiler could have fused;
a model of an odd number of parameters as one block and leaf by leaf; orders and subsets of a client's records.
Times are the best of several, in milliseconds; ratios are what counts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import limits

from dither.privacy import noise, sampling
from dither.simulation import devices

COUNT = 203_530


def main() -> None:
    devices.set_up()
    theirs, ours = jax.random.key(0), noise.key(0)
    update = jnp.zeros(COUNT)

    def stock(key, x):
        return x + 0.1 * jax.random.normal(key, x.shape)

    def written_out(key, x):
        return noise.gaussian(key, x, noise_std=jnp.float32(0.1))

    compare(
        f"{COUNT:,} normals",
        {
            "jax.random.normal, JAX's key": best(stock, theirs, update),
            "jax.random.normal, Dither's key": best(stock, ours, update),
            "privacy.noise.gaussian": best(written_out, ours, update),
        },
    )

    def clients(draw):
        def each(key, x):
            keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(jnp.arange(50))
            return jax.lax.fori_loop(0, 100, lambda _, x: jax.vmap(draw)(keys, x), x)

        return each

    small = jnp.zeros((50, 114))
    compare(
        "100 rounds of 50 clients with 114 numbers",
        {
            "jax.random.normal, JAX's key": best(clients(stock), theirs, small),
            "privacy.noise.gaussian": best(clients(written_out), ours, small),
        },
    )
    compare("a step of softmax regression, 784 x 47 + 47 numbers", odd_model(ours))
    for size in (512, 2500, 60_000):
        compare(
            f"an order of {size:,} records",
            {
                "jax.random.permutation": best(lambda key, size=size: jax.random.permutation(key, size), theirs),
                "sort by two words": best(lambda key, size=size: by_two_words(key, size), theirs),
                "privacy.sampling.permutation": best(
                    lambda key, size=size: sampling.permutation(key, size, largest=size), ours
                ),
            },
        )

    compare("50 subsets of 500 out of 2,500", subsets(ours))


def odd_model(key) -> dict[str, float]:
    """100 steps with noise on a model of 36,895 numbers."""
    start = {"w": jnp.zeros((784, 47)), "b": jnp.zeros(47)}

    def steps(draw):
        def all_steps(key, params):
            def one(number, params):
                noise = draw(jax.random.fold_in(key, number), params)
                return jax.tree.map(lambda leaf, z: leaf - 0.1 * z, params, noise)

            return jax.lax.fori_loop(0, 100, one, params)

        return all_steps

    def one_block(key, params):
        block = noise.from_words(jax.random.bits(key, (36_895,), jnp.uint32))
        return {"w": block[47:].reshape(784, 47), "b": block[:47]}

    return {
        "one block": best(steps(one_block), key, start, repeats=5),
        "privacy.noise.standard_normal": best(steps(noise.standard_normal), key, start, repeats=5),
    }


def subsets(key) -> dict[str, float]:
    size, count, rows = 2500, 500, 50

    def sorted_(key):
        return jax.vmap(lambda k: sampling.permutation(k, size, largest=size)[:count])(jax.random.split(key, rows))

    def pairs(key):
        fresh = size - count + jnp.arange(count, dtype=jnp.int32)
        draws = jax.random.randint(key, (rows, count), 0, fresh + 1)
        return jax.vmap(lambda row: sampling._floyd(row, fresh))(draws)

    return {
        "orders cut short": best(sorted_, key),
        "Floyd's rule, all pairs compared": best(pairs, key),
        "privacy.sampling.subset": best(
            lambda key: sampling.subset(key, size, count, largest=size, rows=rows), key
        ),
    }


def by_two_words(key, size):
    """The plain way to 64 random bits an entry: two keys with the positions beside them."""
    words = jax.random.bits(key, (2, size), jnp.uint32)
    return jax.lax.sort((words[0], words[1], jnp.arange(size)), num_keys=2)[2]


def best(function, *values, repeats: int = 15) -> float:
    """Milliseconds."""
    return 1e3 * limits.best(jax.jit(function), *values, repeats=repeats)


def compare(what: str, found: dict[str, float]) -> None:
    last = list(found.values())[-1]
    print(what)
    for name, milliseconds in found.items():
        print(f"  {name:34} {milliseconds:9.3f} ms   {milliseconds / last:5.2f}x")


if __name__ == "__main__":
    main()
