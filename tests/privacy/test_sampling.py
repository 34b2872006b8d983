"""Batches and cohorts: uniform, without replacement, never padding, and with the stated privacy meaning."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dither.errors import SpecError
from dither.privacy import noise, sampling
from dither.types import Keys


def keys(seed: int) -> Keys:
    return Keys(*(jax.random.fold_in(jax.random.key(seed), i) for i in range(3)))


def draw_many(sampler, size, rounds, steps_done=0):
    draw = jax.jit(
        lambda key: sampler.draw(Keys(key, jax.random.key(7), key), jnp.int32(steps_done), jnp.int32(size))
    )
    many = jax.vmap(draw)(jax.random.split(jax.random.key(1), rounds))
    return np.asarray(many.positions), np.asarray(many.weights)


def python_floyd(draws, fresh):
    chosen = []
    for t, last in zip(draws, fresh, strict=True):
        chosen.append(last if t in chosen else t)
    return chosen


@pytest.mark.parametrize(("population", "count"), [(5, 3), (10, 9), (40, 7), (12, 12)])
def test_floyd_by_links_equals_the_loop(population, count):
    rng = np.random.default_rng(0)
    fresh = population - count + np.arange(count)
    draws = rng.integers(0, fresh + 1, size=(200, count))
    draws, fresh = jnp.asarray(draws, jnp.int32), jnp.asarray(fresh, jnp.int32)
    found = jax.jit(jax.vmap(lambda row: sampling._floyd(row, fresh)))(draws)
    in_turn = jax.jit(lambda: sampling._floyd_in_turn(draws, fresh, population + 3))()
    np.testing.assert_array_equal(in_turn, found)
    for row, chosen in zip(draws.tolist(), np.asarray(found), strict=True):
        assert chosen.tolist() == python_floyd(row, fresh.tolist())


@pytest.mark.parametrize("links", [1, 7, 8, 9, 16, 17, 200])
def test_floyd_follows_chains_of_any_length(links):
    """The second draw repeats the first, and each further one what the one before it takes."""
    fresh = jnp.arange(300, 300 + links + 2)
    draws = jnp.concatenate([jnp.array([7, 7]), fresh[1:-1]])
    assert sampling._floyd(draws, fresh).tolist() == [7, *fresh[1:].tolist()]


@pytest.mark.parametrize("clients", [None, 3])
def test_large_batches_are_distinct_records_and_all_records_alike(clients):
    size, count, rows = 200, 60, 400  # by the rule for a CPU: one entry after the other

    def draw(key):
        return sampling.subset(key, jnp.int32(size), count, largest=250, rows=rows)

    if clients:
        found = jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(5), clients)).reshape(-1, count)
    else:
        found = jax.jit(draw)(jax.random.key(5))
    found = np.asarray(found)
    assert found.min() >= 0
    assert found.max() < size
    assert all(len(set(row)) == count for row in found.tolist())
    # Each record is in a subset with probability 60/200, and two subsets are independent.
    counts = np.bincount(found.ravel(), minlength=size)
    expected, variance = len(found) * count / size, len(found) * (count / size) * (1 - count / size)
    chi2 = np.sum((counts - expected) ** 2) / variance * (size - 1) / size
    assert 1e-4 < stats.chi2.sf(chi2, size - 1) < 1 - 1e-4


@pytest.mark.parametrize("largest", [6, 40])  # 40: the population is smaller than the padded length
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_subsets_are_uniform(count, largest):
    population, rows = 6, 30_000
    found = np.asarray(
        sampling.subset(jax.random.key(3), jnp.int32(population), count, largest=largest, rows=rows)
    )
    subsets = [tuple(sorted(row)) for row in found.tolist()]
    possible = list(itertools.combinations(range(population), count))
    counts = [subsets.count(each) for each in possible]
    assert sum(counts) == rows
    assert stats.chisquare(counts).pvalue > 1e-4


def test_large_subsets_by_sorting_are_uniform_too():
    population, count, rows = 5, 4, 20_000
    assert count**2 > 4 * 1.5 * np.log2(2.5)  # the sorting branch is meant
    order = jax.vmap(lambda key: sampling.permutation(key, population, largest=8))(
        jax.random.split(jax.random.key(0), rows)
    )
    found = [tuple(row) for row in np.asarray(order)[:, :population].tolist()]
    counts = [found.count(each) for each in itertools.permutations(range(population))]
    assert sum(counts) == rows
    assert stats.chisquare(counts).pvalue > 1e-4


def test_cohort_is_a_subset_and_refuses_too_many():
    chosen = np.asarray(sampling.cohort(jax.random.key(0), 1000, 500))
    assert len(set(chosen.tolist())) == 500
    assert chosen.max() < 1000
    with pytest.raises(SpecError, match="cohort_size=11 exceeds num_clients=10"):
        sampling.cohort(jax.random.key(0), 10, 11)


# Floyd's algorithm, a sort, one client, spans beyond 16 bits, and rounds planned five or one at a time
@pytest.mark.parametrize(
    ("clients", "size", "marks"),
    [(16, 10, 80), (16, 10, 15), (3, 2, 15), (300, 299, 1500), (50, 1, 250), (80_000, 3, 400_000)],
)
def test_cohorts_planned_on_the_host_are_those_of_the_compiled_rounds(monkeypatch, clients, size, marks):
    monkeypatch.setattr(sampling, "_MARKS", marks)
    rounds = np.array([0, 1, 2, 7, 100_000, 2**31 - 1, 3])
    draw = jax.jit(
        jax.vmap(
            lambda seed, index: sampling.cohort(
                noise.for_round(noise.stream(seed, "cohort"), index), clients, size
            ),
            in_axes=(None, 0),
        )
    )
    for seed in (0, 2**32 - 1):
        planned = sampling.planned_cohorts(seed, rounds, clients, size)
        np.testing.assert_array_equal(planned, draw(np.uint32(seed), rounds.astype(np.int32)))


@pytest.mark.parametrize("kind", sampling.KINDS)
def test_padding_never_enters_a_batch(kind):
    sizes = np.array([9, 20, 13])
    sampler = sampling.make(kind, batch_size=3, local_steps=2, client_sizes=sizes)
    for size in sizes:
        positions, weights = draw_many(sampler, size, 50)
        assert positions.shape == weights.shape == (50, 2, sampler.width)
        used = positions[weights > 0]
        assert used.min() >= 0
        assert used.max() < size
        assert set(np.unique(weights)) <= {0.0, 1.0}


def test_fixed_batches_are_fresh_and_have_the_stated_rate():
    sampler = sampling.make("fixed", batch_size=4, local_steps=3, client_sizes=np.array([20]))
    positions, _ = draw_many(sampler, 20, 4000)
    assert all(len(set(row)) == 4 for row in positions.reshape(-1, 4).tolist())
    meaning = sampler.sampling(20)
    hits = (positions == 0).any(-1)
    assert meaning.rate == 0.2
    assert hits.mean() == pytest.approx(0.2, abs=4 * np.sqrt(0.16 / hits.size))
    # independent from step to step
    both = (hits[:, 0] & hits[:, 1]).mean()
    assert both == pytest.approx(0.04, abs=4 * np.sqrt(0.04 / len(hits)))
    used = hits.any(1).mean()
    assert used == pytest.approx(sampling.used_in_round(meaning, 3), abs=0.03)


def test_disjoint_batches_of_a_round_do_not_overlap():
    sampler = sampling.make("disjoint", batch_size=4, local_steps=5, client_sizes=np.array([20]))
    positions, _ = draw_many(sampler, 20, 30)
    assert all(sorted(row) == list(range(20)) for row in positions.reshape(30, 20).tolist())
    with pytest.raises(SpecError, match="24 records a round but the smallest client has 20"):
        sampling.make("disjoint", batch_size=4, local_steps=6, client_sizes=np.array([20]))


def test_shuffled_epochs_carry_over_from_round_to_round():
    size, batch, steps = 23, 4, 3  # 5 batches an epoch, 3 records left over and dropped
    sampler = sampling.make("shuffled", batch_size=batch, local_steps=steps, client_sizes=np.array([size]))
    rows = [np.asarray(sampler.draw(keys(0), jnp.int32(r * steps), jnp.int32(size)).positions) for r in range(10)]
    batches = np.concatenate(rows).reshape(-1, batch)
    epochs = batches.reshape(6, 5 * batch)
    for epoch in epochs.tolist():
        assert len(set(epoch)) == 5 * batch
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 6  # a fresh order every epoch
    assert len({rec for epoch in epochs.tolist() for rec in epoch}) == size  # the dropped ones change


def test_poisson_coins_have_the_stated_rate_and_are_independent():
    sampler = sampling.make("poisson-full", batch_size=5, local_steps=2, client_sizes=np.array([50]))
    _, weights = draw_many(sampler, 50, 4000)
    assert weights.mean() == pytest.approx(0.1, abs=4 * np.sqrt(0.09 / weights.size))
    lengths = weights.sum(-1).ravel()
    assert lengths.var() == pytest.approx(50 * 0.09, rel=0.1)  # a fixed size would have variance 0
    assert np.corrcoef(weights[:, 0, 0], weights[:, 0, 1])[0, 1] == pytest.approx(0, abs=0.07)


def test_capped_poisson_is_the_same_batch_and_states_its_truncation():
    sizes = np.array([400, 90])
    capped = sampling.make("poisson", batch_size=8, local_steps=3, client_sizes=sizes)
    full = sampling.make("poisson-full", batch_size=8, local_steps=3, client_sizes=sizes)
    assert capped.width < 60
    a = capped.draw(keys(1), jnp.int32(0), jnp.int32(400))
    b = full.draw(keys(1), jnp.int32(0), jnp.int32(400))
    for step in range(3):
        short = np.asarray(a.positions[step])[np.asarray(a.weights[step]) > 0]
        assert short.tolist() == np.flatnonzero(np.asarray(b.weights[step])).tolist()
    meaning = capped.sampling(400)
    assert meaning.adjacency == "add/remove"
    assert 0 < meaning.truncation < 1e-12
    assert meaning.truncation == pytest.approx(stats.binom.sf(capped.width, 400, 8 / 400))


@pytest.mark.parametrize(("trials", "rate"), [(400, 0.02), (7, 0.5), (3, 1e-14), (5, 1.0)])
def test_the_cap_is_the_least_that_is_rarely_exceeded(trials, rate):
    least = sampling._rarely_above(trials, rate)
    assert stats.binom.sf(least, trials, rate) <= 1e-12
    assert least == 0 or stats.binom.sf(least - 1, trials, rate) > 1e-12


def test_a_public_rate_is_the_coin_of_every_client_whatever_its_count():
    sizes = np.array([100, 400])
    sampler = sampling.make("poisson-full", batch_size=20, local_steps=2, client_sizes=sizes, sampling_rate=0.1)
    for size in sizes:
        _, weights = draw_many(sampler, size, 600)
        inside = weights[..., :size]
        assert inside.mean() == pytest.approx(0.1, abs=5 * np.sqrt(0.09 / inside.size))
        meaning = sampler.sampling(int(size))
        assert (meaning.rate, meaning.fixed_rate) == (0.1, True)
        assert float(sampler.divisor(jnp.int32(size))) == 20
    follows = sampling.make("poisson", batch_size=20, local_steps=2, client_sizes=sizes)
    assert not follows.sampling(100).fixed_rate
    with pytest.raises(SpecError, match="is for Poisson batches"):
        sampling.make("fixed", batch_size=20, local_steps=2, client_sizes=sizes, sampling_rate=0.1)


def test_batch_larger_than_a_client_is_refused_with_both_numbers():
    with pytest.raises(SpecError, match="batch_size=11 exceeds the 10 records of client 1"):
        sampling.make("fixed", batch_size=11, local_steps=1, client_sizes=np.array([12, 10]))
    with pytest.raises(SpecError, match="did you mean 'poisson'"):
        sampling.make("poison", batch_size=1, local_steps=1, client_sizes=np.array([12]))
    with pytest.raises(SpecError, match="batch_size=0 must be at least 1"):
        sampling.make("fixed", batch_size=0, local_steps=1, client_sizes=np.array([12]))
    whole = sampling.make("fixed", batch_size=10, local_steps=1, client_sizes=np.array([12, 10]))
    assert whole.sampling(10).rate == 1.0  # all of the smallest client's records


@pytest.mark.parametrize("span", [3, 2**16, 2**16 + 1, 1_000_000, 2**27 - 1])
def test_numbers_below_a_span_are_those_of_64_bits(span):
    """Beyond 2^16 a product of two words overflowed: of a million records some were drawn 0.02% too often."""
    high, low = np.random.default_rng(0).integers(0, 2**32, (2, 200), dtype=np.uint32)
    expected = [(int(a) << 32 | int(b)) % span for a, b in zip(high, low, strict=True)]
    for kind in (np, jnp):
        drawn = sampling._below(kind.asarray(high), kind.asarray(low), kind.full(200, span, kind.uint32), span)
        np.testing.assert_array_equal(drawn, expected)


@pytest.mark.parametrize("kind", ["disjoint", "shuffled"])
def test_batches_without_overlap_use_a_record_as_often_as_there_are_batches(kind):
    one = sampling.Sampling(kind, 0.25, "zero-out")
    assert [sampling.used_in_round(one, steps) for steps in (1, 3, 5)] == [0.25, 0.75, 1.0]
    assert sampling.used_in_round(one._replace(kind="poisson"), 3) == pytest.approx(1 - 0.75**3)


def test_more_records_than_can_be_drawn_from_are_refused():
    high, low, span = (np.full(1, word, np.uint32) for word in (1, 2, 7))
    assert sampling._below(high, low, span, 2**28).tolist() == [(2**32 + 2) % 7]
    with pytest.raises(SpecError, match="at most 268435456"):
        sampling._below(high, low, span, 2**28 + 1)
    rank_bits, passes = sampling._order_bits(2**27)
    assert (rank_bits, passes) == (27, 16)  # four random bits a pass
    with pytest.raises(SpecError, match="more than 134217728 cannot be drawn"):
        sampling._order_bits(2**27 + 1)


@pytest.mark.parametrize(
    ("largest", "bits"), [(1, (1, 3)), (2, (1, 3)), (3, (2, 3)), (2**10, (10, 3)), (2**16, (16, 5))]
)
def test_an_order_has_sixty_two_random_bits_an_entry(largest, bits):
    rank_bits, passes = sampling._order_bits(largest)
    assert (rank_bits, passes) == bits
    assert 2**rank_bits >= largest
    assert passes * (31 - rank_bits) >= 62 > (passes - 1) * (31 - rank_bits)


@pytest.mark.parametrize(
    ("kind", "rate"), [("fixed", 0.3), ("poisson", 0.3), ("poisson", 0.07), ("shuffled", 0.5)]
)
def test_a_round_of_batches_keeps_what_one_batch_can_be_told_from(kind, rate):
    one = sampling.Sampling(kind, rate, "add/remove", 1e-13, 6, 1000)
    whole = sampling.of_round(one, 4)
    assert (whole.kind, whole.adjacency, whole.truncation) == (f"{kind}-round", "replace-one", 1e-13)
    assert whole.rate == sampling.used_in_round(one, 4)
    assert whole.population == (1000 if kind != "poisson" else {0.3: 20, 0.07: 86}[rate])
    if kind == "poisson":  # no rate of one batch is told that is larger than it was
        assert 6 / whole.population <= rate


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_a_coin_never_falls_more_often_than_is_stated(monkeypatch, rate):
    """Of 2^32 equally likely words those below the stated share count, less two in a million of them."""
    sampler = sampling.make(
        "poisson-full", batch_size=3, local_steps=1, client_sizes=np.array([10]), sampling_rate=rate
    )
    stated = int(0.3 * 2**32)
    words = [0, int(stated * (1 - 2.0**-20)), stated, stated + 2**8, 2**32 - 1]
    monkeypatch.setattr(sampling.jax.random, "bits", lambda *_: jnp.array([[*words, *words]], jnp.uint32))
    weights = sampler.draw(keys(0), jnp.int32(0), jnp.int32(10)).weights
    assert weights.tolist() == [[1, 1, 0, 0, 0] * 2]
    fewer = sampler.draw(keys(0), jnp.int32(0), jnp.int32(7)).weights
    assert fewer[0, 7:].tolist() == [0, 0, 0]  # places without a record


@pytest.mark.parametrize("steps", [1, 4, 5, 6, 11, 13])
def test_a_round_may_hold_parts_of_many_epochs(steps):
    """The batches of a round are those of its steps one by one, wherever in an epoch of five it begins."""
    sizes = np.array([23, 31])
    whole, single = (
        sampling.make("shuffled", batch_size=4, local_steps=count, client_sizes=sizes) for count in (steps, 1)
    )
    one = jax.jit(lambda done, size: single.draw(keys(3), done, size).positions[0])
    for size, start in itertools.product((23, 31), (0, 3, 4, 12)):
        positions = jax.jit(whole.draw)(keys(3), jnp.int32(start), jnp.int32(size)).positions
        expected = [one(jnp.int32(start + step), jnp.int32(size)) for step in range(steps)]
        np.testing.assert_array_equal(positions, np.stack(expected))


def test_a_sampler_says_what_one_batch_means():
    """What the accountant is told of one batch, and what a sum over it is divided by."""
    values = {"batch_size": 4, "local_steps": 2, "client_sizes": np.array([20, 9])}
    for kind in ("fixed", "disjoint", "shuffled"):
        sampler = sampling.make(kind, **values)
        assert sampler.sampling(20) == (kind, 0.2, "replace-one", 0.0, 4, 20, True)
        assert (float(sampler.divisor(jnp.int32(20))), sampler.width, sampler.kind) == (4.0, 4, kind)
    full = sampling.make("full", **values)
    assert full.sampling(9) == ("full", 1.0, "replace-one", 0.0, 9, 9, True)
    assert (float(full.divisor(jnp.int32(9))), full.width) == (9.0, 20)
    every = sampling.make("poisson-full", **values)
    assert every.sampling(20) == ("poisson", 0.2, "add/remove", 0.0, 4, 20, False)
    assert (every.width, every.kind) == (20, "poisson-full")
    capped = sampling.make("poisson", **values)
    assert capped.sampling(20)[:3] == ("poisson", 0.2, "add/remove")
    assert capped.kind == "poisson"
