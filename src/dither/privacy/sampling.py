"""Who and what is drawn: cohorts of clients and batches of records, each with its privacy meaning.

Kinds of batches (spec key `batch_sampling`):

fixed         a fresh uniform subset of exactly `batch_size` records at every local step
disjoint      the local steps of a round use disjoint batches, drawn anew each round
shuffled      epochs: the records are shuffled and cut into batches, the partial last one dropped; an epoch
              carries over from round to round
poisson       each record enters each batch independently with probability `sampling_rate` (default: batch_size /
              size); the batch is cut at a cap that is exceeded with probability below 1e-12, which is reported and
              charged to δ
poisson-full  the same without a cap: all records with a 0/1 weight (slower)
full          all records at every step

All samplers draw a whole round's batches at once, as positions and 0/1 weights; a position with weight 0
is padding. The divisor of the mean is fixed (never the number that happened to be drawn).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import bdtrc

from dither.errors import SpecError, did_you_mean
from dither.privacy import noise
from dither.types import Array, Key, Keys, Sampling

ZERO_OUT = "zero-out"
REPLACE_ONE = "replace-one"
ADD_REMOVE = "add/remove"

_ORDER_BITS = 62  # random bits an entry by which a permutation is sorted
_SORTED = 1024  # numbers in a subset up to which several at once are not sorted
_MARKS = 2**22  # of clients in rounds that are planned at a time
_TRUNCATION = 1e-12  # probability per batch that a capped Poisson batch would have been longer


class Batches(NamedTuple):
    """A round's batches: `positions` and 0/1 `weights`, both `[local_steps, width]`."""

    positions: Array
    weights: Array


class BatchSampler(NamedTuple):
    """Draws a round's batches for a client of `size` records.

    `draw(keys, steps_done, size)`; `divisor(size)` is what a sum over the batch is divided by;
    `sampling(size)` is the privacy meaning of one batch; `width` the padded length of a batch.
    """

    draw: Callable[[Keys, Array, Array], Batches]
    divisor: Callable[[Array], Array]
    sampling: Callable[[int], Sampling]
    width: int
    kind: str


def make(
    kind: str, *, batch_size: int, local_steps: int, client_sizes: np.ndarray, sampling_rate: float = 0.0
) -> BatchSampler:
    """The batch sampler of that kind, checked against the clients' sizes.

    `sampling_rate` is the coin of Poisson batches, the same for all clients. Without it the coin is batch_size
    over the client's own count: an added record then changes everybody's coin, and no theorem covers add/remove.
    """
    if kind not in _SAMPLERS:
        raise SpecError(f"unknown batch_sampling={kind!r}{did_you_mean(kind, _SAMPLERS)}")
    smallest, largest = int(client_sizes.min()), int(client_sizes.max())
    if sampling_rate and kind not in ("poisson", "poisson-full"):
        raise SpecError(f"sampling_rate={sampling_rate:g} is for Poisson batches, not for batch_sampling={kind!r}")
    if kind != "full":
        if batch_size < 1:
            raise SpecError(f"batch_size={batch_size} must be at least 1")
        if batch_size > smallest and not sampling_rate:
            client = int(client_sizes.argmin())
            raise SpecError(
                f"batch_size={batch_size} exceeds the {smallest} records of client {client}; "
                f"use at most {smallest} or batch_sampling='full'"
            )
    if kind in ("poisson", "poisson-full"):
        poisson = _poisson if kind == "poisson" else _poisson_full
        sampler = poisson(batch_size, local_steps, smallest, largest, sampling_rate)
    else:
        sampler = _SAMPLERS[kind](batch_size, local_steps, smallest, largest)
    return sampler._replace(draw=jax.named_scope("sampling")(sampler.draw))  # a name for benchmarks/profiling.py


def _fixed(batch_size: int, local_steps: int, smallest: int, largest: int) -> BatchSampler:
    def draw(keys: Keys, steps_done: Array, size: Array) -> Batches:
        del steps_done
        positions = subset(keys.batch, size, batch_size, largest=largest, rows=local_steps)
        return Batches(positions, jnp.ones((local_steps, batch_size), jnp.float32))

    return _without_replacement("fixed", batch_size, draw)


def _disjoint(batch_size: int, local_steps: int, smallest: int, largest: int) -> BatchSampler:
    if local_steps * batch_size > smallest:
        raise SpecError(
            f"batch_sampling='disjoint' needs local_steps*batch_size={local_steps * batch_size} records a "
            f"round but the smallest client has {smallest}"
        )

    def draw(keys: Keys, steps_done: Array, size: Array) -> Batches:
        del steps_done
        order = permutation(keys.batch, size, largest=largest)[: local_steps * batch_size]
        positions = order.reshape(local_steps, batch_size)
        return Batches(positions, jnp.ones((local_steps, batch_size), jnp.float32))

    return _without_replacement("disjoint", batch_size, draw)


def _shuffled(batch_size: int, local_steps: int, smallest: int, largest: int) -> BatchSampler:
    # A round may touch several epochs; how many at most is known from the smallest client.
    shortest_epoch = smallest // batch_size
    epochs = (local_steps + shortest_epoch - 2) // shortest_epoch + 1

    def draw(keys: Keys, steps_done: Array, size: Array) -> Batches:
        batches_per_epoch = size // batch_size  # the partial last batch is dropped (errata D2)
        step = steps_done + jnp.arange(local_steps)
        first = steps_done // batches_per_epoch
        orders = jax.vmap(lambda epoch: permutation(jax.random.fold_in(keys.epoch, epoch), size, largest=largest))(
            first + jnp.arange(epochs)
        )
        row = step // batches_per_epoch - first
        column = (step % batches_per_epoch)[:, None] * batch_size + jnp.arange(batch_size)
        positions = orders[row[:, None], column]
        return Batches(positions, jnp.ones((local_steps, batch_size), jnp.float32))

    return _without_replacement("shuffled", batch_size, draw)


def _without_replacement(
    kind: str, batch_size: int, draw: Callable[[Keys, Array, Array], Batches]
) -> BatchSampler:
    """Batches of exactly `batch_size` different records."""

    def sampling(size: int) -> Sampling:
        return Sampling(kind, batch_size / size, REPLACE_ONE, 0.0, batch_size, size)

    return BatchSampler(draw, _constant(batch_size), sampling, batch_size, kind)


def _poisson(
    batch_size: int, local_steps: int, smallest: int, largest: int, sampling_rate: float = 0.0
) -> BatchSampler:
    # The tail of Bin(size, rate) grows with size, at a fixed rate and at batch_size/size: the largest decides.
    cap = min(largest, _rarely_above(largest, sampling_rate or batch_size / largest) + 1)
    full = _poisson_full(batch_size, local_steps, smallest, largest, sampling_rate)

    def draw(keys: Keys, steps_done: Array, size: Array) -> Batches:
        included = full.draw(keys, steps_done, size).weights > 0
        positions = jax.vmap(lambda row: jnp.nonzero(row, size=cap, fill_value=largest)[0])(included)
        return Batches(positions.astype(jnp.int32), (positions < largest).astype(jnp.float32))

    def sampling(size: int) -> Sampling:
        plain = full.sampling(size)
        return plain._replace(truncation=float(bdtrc(cap, size, plain.rate)) if cap < size else 0.0)

    return BatchSampler(draw, full.divisor, sampling, cap, "poisson")


def _rarely_above(trials: int, rate: float) -> int:
    """The least k with P(Bin(trials, rate) > k) <= _TRUNCATION. (scipy.stats has it, and takes long to import.)"""
    low, high = 0, trials
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if bdtrc(middle, trials, rate) <= _TRUNCATION else (middle + 1, high)
    return low


def _poisson_full(
    batch_size: int, local_steps: int, smallest: int, largest: int, sampling_rate: float = 0.0
) -> BatchSampler:
    def draw(keys: Keys, steps_done: Array, size: Array) -> Batches:
        del steps_done
        # Rounded down by a relative 2^-21, more than float32 can err: the true rate never exceeds the stated.
        rate = jnp.float32(sampling_rate) if sampling_rate else jnp.float32(batch_size) / size.astype(jnp.float32)
        threshold = (rate * np.float32(2.0**32 * (1 - 2.0**-21))).astype(jnp.uint32)
        words = jax.random.bits(keys.batch, (local_steps, largest), jnp.uint32)
        positions = jnp.arange(largest, dtype=jnp.int32)
        included = (words < threshold) & (positions < size)
        return Batches(jnp.broadcast_to(positions, included.shape), included.astype(jnp.float32))

    def sampling(size: int) -> Sampling:
        rate = sampling_rate or batch_size / size
        return Sampling("poisson", rate, ADD_REMOVE, 0.0, batch_size, size, fixed_rate=bool(sampling_rate))

    return BatchSampler(draw, _constant(batch_size), sampling, largest, "poisson-full")


def _full(batch_size: int, local_steps: int, smallest: int, largest: int) -> BatchSampler:
    del batch_size, smallest

    def draw(keys: Keys, steps_done: Array, size: Array) -> Batches:
        del keys, steps_done
        positions = jnp.arange(largest, dtype=jnp.int32)
        shape = (local_steps, largest)
        weights = (positions < size).astype(jnp.float32)
        return Batches(jnp.broadcast_to(positions, shape), jnp.broadcast_to(weights, shape))

    def sampling(size: int) -> Sampling:
        return Sampling("full", 1.0, REPLACE_ONE, 0.0, size, size)

    def divisor(size: Array) -> Array:
        return size.astype(jnp.float32)

    return BatchSampler(draw, divisor, sampling, largest, "full")


_SAMPLERS: dict[str, Callable[[int, int, int, int], BatchSampler]] = {
    "fixed": _fixed,
    "disjoint": _disjoint,
    "shuffled": _shuffled,
    "poisson": _poisson,
    "poisson-full": _poisson_full,
    "full": _full,
}
KINDS = tuple(_SAMPLERS)


def _constant(batch_size: int) -> Callable[[Array], Array]:
    return lambda size: jnp.float32(batch_size)


def used_in_round(sampling: Sampling, local_steps: int) -> float:
    """Probability that one given record is used at all in a round of `local_steps` batches."""
    if sampling.kind in ("disjoint", "shuffled"):
        return min(1.0, local_steps * sampling.rate)
    return 1.0 - (1.0 - sampling.rate) ** local_steps


def of_round(one_batch: Sampling, local_steps: int) -> Sampling:
    """The sampling of one release at the end of a round of `local_steps` batches: how likely it is that a record
    was used at all (R5). Only the distance between any two ends of a round is known: that of a replacement."""
    population = one_batch.population
    if one_batch.kind == "poisson":  # so that the rate of one batch, and with it their number, can be told from it
        population = math.ceil(one_batch.batch_size / one_batch.rate - 1e-6)
    return one_batch._replace(
        kind=f"{one_batch.kind}-round",
        rate=used_in_round(one_batch, local_steps),
        adjacency=REPLACE_ONE,
        population=population,
    )


# Subsets


def cohort(key: Key, num_clients: int, cohort_size: int) -> Array:
    """A uniform subset of the clients, without replacement."""
    if cohort_size > num_clients:
        raise SpecError(f"cohort_size={cohort_size} exceeds num_clients={num_clients}")
    if cohort_size == num_clients:
        return jnp.arange(num_clients, dtype=jnp.int32)
    return subset(key, num_clients, cohort_size, largest=num_clients, rows=1)[0]


def planned_cohorts(seed: int, rounds: np.ndarray, num_clients: int, cohort_size: int) -> np.ndarray:
    """The cohorts that `cohort` draws in these rounds of a run, `[rounds, cohort_size]`, in NumPy: who takes part
    is known before anything is compiled."""
    at_a_time = max(1, _MARKS // num_clients)
    parts = [rounds[start : start + at_a_time] for start in range(0, len(rounds), at_a_time)]
    draw = _host_order if _sorts(cohort_size, num_clients, rows=1) else _host_subsets
    return np.concatenate(
        [draw(noise.host_keys(seed, "cohort", part), num_clients, cohort_size) for part in parts]
    )


def _host_subsets(keys: noise.HostKeys, population: int, count: int) -> np.ndarray:
    """`subset` for each key, by Floyd's algorithm."""
    halves = noise.host_words(keys, np.arange(2))
    high, low = (
        np.bitwise_xor(*noise.host_words((halves[0][:, at], halves[1][:, at]), np.arange(count))) for at in (0, 1)
    )
    fresh = np.arange(population - count, population)
    draws: np.ndarray = _below(high, low, (fresh + 1).astype(np.uint32), population).astype(np.int32)
    row, taken = np.arange(len(draws)), np.zeros((len(draws), population), bool)
    for at in range(count):
        draws[:, at] = np.where(taken[row, draws[:, at]], fresh[at], draws[:, at])
        taken[row, draws[:, at]] = True
    return draws


def _host_order(keys: noise.HostKeys, population: int, count: int) -> np.ndarray:
    """The first `count` of a `permutation` for each key."""
    first, second = noise.host_words(keys, np.arange(1))
    rank_bits, passes = _order_bits(population)
    words = np.bitwise_xor(*noise.host_words((first[:, 0], second[:, 0]), np.arange(passes * population)))
    order = np.broadcast_to(np.arange(population, dtype=np.int32), (len(words), population))
    for drawn in np.split(words >> np.uint32(rank_bits + 1) << np.uint32(rank_bits), passes, axis=1):
        ranked = np.sort(drawn | np.arange(population, dtype=np.uint32), axis=1)
        order = np.take_along_axis(order, (ranked & np.uint32(2**rank_bits - 1)).astype(int), axis=1)
    return order[:, :count]


def _below(high: Array, low: Array, span: Array, largest: int) -> Array:
    """Numbers below `span`, at most `largest`, from two random words each, in JAX or NumPy: high · 2^32 + low
    modulo `span`."""
    if largest <= 2**16:
        wrapped = np.uint32(2**16) % span
        return (high % span * (wrapped * wrapped % span) + low % span) % span
    if largest > 2**28:
        raise SpecError(f"a client has {largest} records; batches are drawn from at most {2**28}")
    rest = high * np.uint32(0)  # that product would overflow, and some numbers come too often: four bits at a time
    for word in (high, low):
        for shift in range(28, -1, -4):
            rest = (rest * np.uint32(16) + (word >> np.uint32(shift) & np.uint32(15))) % span
    return rest


def _sorts(count: int, largest: int, *, rows: int) -> bool:
    """Whether a subset is the head of a permutation: where it is large."""
    return count > 1 and (rows == 1 or count > _SORTED) and count * count > 12 * largest * math.log2(largest + 1)


def subset(key: Key, population: Array | int, count: int, *, largest: int, rows: int) -> Array:
    """`rows` independent uniform subsets of `count` numbers below `population`, `[rows, count]`.

    `population` may be traced; `largest` bounds it. The order inside a subset carries no meaning.
    Floyd's algorithm, or a sort of random words where the subsets are large. (The device decides how Floyd's rule
    is computed, never what is drawn.)
    """
    if _sorts(count, largest, rows=rows):
        keys = jax.random.split(key, rows)
        return jax.vmap(lambda k: permutation(k, population, largest=largest)[:count])(keys)
    fresh = (population - count + jnp.arange(count)).astype(jnp.int32)
    high, low = (jax.random.bits(half, (rows, count), jnp.uint32) for half in jax.random.split(key))
    draws = _below(high, low, jnp.maximum(fresh + 1, 1).astype(jnp.uint32), largest).astype(jnp.int32)
    if count == 1:
        return draws
    if largest <= 64 * count and jax.default_backend() == "cpu":
        return _floyd_in_turn(draws, fresh, largest)
    return jax.vmap(lambda row: _floyd(row, fresh))(draws)


_USUAL_DOUBLINGS = 4  # chains of up to 8 links


def _floyd(draws: Array, fresh: Array) -> Array:
    """Floyd's subset (Bentley and Floyd 1987): `draws[j]` uniform in 0..fresh[j]; where it repeats an earlier
    choice, `fresh[j]` is taken. It repeats one where an earlier draw is the same, or where it is the `fresh[i]` of
    an earlier entry that repeats: that entry is linked, and a chain of links is followed in steps that double."""
    position = jnp.arange(draws.shape[0])
    repeats = jnp.any((draws[None, :] == draws[:, None]) & (position[None, :] < position[:, None]), axis=1)
    link = jnp.where(draws < fresh[0], position, draws - fresh[0])  # to itself: the end of a chain

    def follow(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        repeats, link, _ = state
        further = link.at[link].get(mode="promise_in_bounds")
        return repeats | repeats.at[link].get(mode="promise_in_bounds"), further, jnp.any(further != link)

    state = repeats, link, jnp.array(True)
    for _ in range(_USUAL_DOUBLINGS):  # without asking whether chains go on, for which a GPU stops and waits
        state = follow(state)
    repeats, _, _ = jax.lax.while_loop(lambda state: state[2], follow, state)
    return jnp.where(repeats, fresh, draws)


def _floyd_in_turn(draws: Array, fresh: Array, largest: int) -> Array:
    """`_floyd` of each row, one entry after the other with a mark on every number that is taken: no squares of
    `count`, so that a CPU draws 500 of 2,500 many times faster. An accelerator would wait at every entry."""
    row = jnp.arange(draws.shape[0])

    def choose(taken: Array, entry: tuple[Array, Array]) -> tuple[Array, Array]:
        drawn, otherwise = entry
        chosen = jnp.where(taken[row, drawn], otherwise, drawn)
        return taken.at[row, chosen].set(True), chosen

    nothing = jnp.zeros((draws.shape[0], largest), bool)
    return jax.lax.scan(choose, nothing, (draws.T, fresh))[1].T


def permutation(key: Key, population: Array | int, *, largest: int) -> Array:
    """A uniform order of 0..population-1 in the first `population` of `largest` entries.

    Sorts by at least 62 random bits an entry: two of `largest` entries tie with probability below largest²/2^63.
    A word holds an entry's rank so far below as many random bits as fit, so that one plain sort of words is a pass
    of a radix sort: later passes decide, earlier ones break their ties. On a CPU, words alone sort many times
    faster than keys with a value beside them.
    """
    rank_bits, passes = _order_bits(largest)
    rank = jnp.arange(largest, dtype=jnp.uint32)
    order = jnp.arange(largest, dtype=jnp.int32)
    for row in jax.random.bits(key, (passes, largest), jnp.uint32):
        drawn = (row >> np.uint32(rank_bits + 1)) << np.uint32(rank_bits)
        outside = (order >= population).astype(jnp.uint32) << np.uint32(31)
        ranked = jax.lax.sort(outside | drawn | rank)
        order = order[(ranked & np.uint32(2**rank_bits - 1)).astype(jnp.int32)]
    return order


def _order_bits(largest: int) -> tuple[int, int]:
    """(bits of a word for the rank, passes of the sort). The top bit puts what is outside the population last."""
    rank_bits = max(1, (largest - 1).bit_length())
    random_bits = 31 - rank_bits
    if random_bits < 4:
        raise SpecError(f"a client has {largest} records; an order of more than {2**27} cannot be drawn")
    return rank_bits, math.ceil(_ORDER_BITS / random_bits)
