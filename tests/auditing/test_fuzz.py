"""`dither audit --fuzz`: random specs leak no more than is proved, and holes that were closed are found again."""

import json
import os
import subprocess
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from dither import spec
from dither.accounting import accountant, composition, views
from dither.auditing import fuzz, rounds
from dither.cli import app
from dither.errors import SpecError
from dither.experiment import build
from dither.methods import local
from dither.privacy import clipping, discrete, sampling
from dither.simulation.arrays import Shards
from dither.types import PrivacyPlan

FALLING_RATES, OVERFLOW, EVERYONE_FIRST = 78, 1, 147  # seeds of specs that show a hole best
CLAMPED, SIGNS, FEWER_LATER, NO_NOISE_LEFT, LARGE_CLIENT = 7, 19, 14, 34, 20
WHOLE_CLIENT, HIDDEN_COHORT, INTEGERS, COARSE_STEPS, TWO_DEVICES = 72, 43, 58, 0, 90007
ONE_LESS = 67  # of whose neighbours one has a record less


@pytest.fixture(autouse=True)
def fresh_answers():
    """No bound that a test has bent is remembered."""
    accountant._ANSWERS.clear()
    yield
    accountant._ANSWERS.clear()


def constant_rates(monkeypatch):
    """The credit for the others' noise as if every step had the rate of the first (H1)."""
    steps = views._steps

    def constant(group, adjacency):
        rates, multipliers = steps(group, adjacency)
        return (rates[0],) * len(rates), multipliers

    monkeypatch.setattr(views, "_steps", constant)


def unguarded_clip(monkeypatch):
    """A clip that lets through what is not finite (H2)."""
    everything = {**vars(jnp), "isfinite": lambda value: jnp.ones_like(value, bool)}
    monkeypatch.setattr(clipping, "jnp", types.SimpleNamespace(**everything))


def all_rounds_drawn(monkeypatch):
    """Bounds before the draw that take the first round for one with a cohort like any other's (H5)."""
    before = accountant.Accountant.before_the_draw

    def forgetful(self, cohort_size_at):
        return before(self, lambda index: self.plan.cohort_size)

    monkeypatch.setattr(accountant.Accountant, "before_the_draw", forgetful)


def credit_after_a_projection(monkeypatch):
    """The credit for the others' noise although their uploads are cut after it."""
    monkeypatch.setattr(PrivacyPlan, "noise_projected", property(lambda plan: False))


def credit_for_any_method(monkeypatch):
    """The credit for the others' noise although nobody knows what a method in a file does with it."""

    class Everything:
        def __contains__(self, name):
            return True

    monkeypatch.setattr(build, "METHODS", Everything())


def credit_of_the_first_cohort(monkeypatch):
    """The credit for as many others as the spec asks for, however few a method takes."""
    conditions = PrivacyPlan.conditions

    def of_the_spec(plan, unit="run"):
        return conditions(plan, unit)._replace(
            cohort_size=plan.cohort_size, others_noise=(plan.cohort_size - 1) * plan.noise_ratio**2
        )

    monkeypatch.setattr(PrivacyPlan, "conditions", of_the_spec)


def noise_that_float32_loses(monkeypatch):
    """Noise that falls below what float32 has."""
    monkeypatch.setattr(spec, "_check_falling", lambda spec: None)
    monkeypatch.setattr(composition, "_LEAST_NOISE", 0.0)


def products_of_32_bits(monkeypatch):
    """Batches of a large client, drawn by a product that overflows."""

    def below(high, low, span, largest):
        wrapped = np.uint32(2**16) % span
        return (high % span * (wrapped * wrapped % span) + low % span) % span

    monkeypatch.setattr(sampling, "_below", below)


def noise_that_is_rounded_away(monkeypatch):
    """The credit for the others' noise although a secure sum rounds it to nothing."""
    monkeypatch.setattr(build, "_noise_rounded", lambda experiment: False)


def half_the_noise_of_the_server(monkeypatch):
    """DP-FedAvg's noise, halved."""
    noisy = local.noisy_vector

    def quiet(*arguments, noise_std, **options):
        return noisy(*arguments, noise_std=noise_std / 2, **options)

    monkeypatch.setattr(local, "noisy_vector", quiet)


def whole_clients_without_a_clip(monkeypatch):
    """Updates of whole clients as long as they are."""
    monkeypatch.setattr(local, "clip_whole", lambda plan, update, bound: update)


def whole_clients_clipped_to_twice_the_bound(monkeypatch):
    """Updates of whole clients that are twice as long as is charged."""
    clip = local.clip_whole
    monkeypatch.setattr(local, "clip_whole", lambda plan, update, bound: clip(plan, update, 2 * bound))


def half_the_noise_of_a_hidden_cohort(monkeypatch):
    """The same noise, where nobody learns who takes part."""
    half_the_noise_of_the_server(monkeypatch)


def half_the_noise_on_integers(monkeypatch):
    """Discrete noise of half its std."""
    drawn = discrete.discrete_gaussian
    monkeypatch.setattr(
        discrete, "discrete_gaussian", lambda size, variance, words: drawn(size, variance / 4, words=words)
    )


def half_of_the_clients_twice(monkeypatch):
    """Two devices that both train the first half of a cohort: the others' noise is missing from the sum."""
    monkeypatch.setattr(Shards, "part", lambda shards, array: array[: len(array) // shards.clients])


def half_the_distance_of_an_absent_record(monkeypatch):
    """A record that may not be there, charged as if it had half the norm."""
    item = views.sampled_item

    def halved(release, adjacency, *, gain=1.0, **options):
        return item(release, adjacency, gain=gain * (2 if adjacency == "add/remove" else 1), **options)

    monkeypatch.setattr(views, "sampled_item", halved)


HOLES = {
    constant_rates: (FALLING_RATES, "linear sum"),
    unguarded_clip: (OVERFLOW, "totality"),
    all_rounds_drawn: (EVERYONE_FIRST, "ex ante"),
    credit_after_a_projection: (CLAMPED, "rounds"),
    credit_for_any_method: (SIGNS, "rounds"),
    credit_of_the_first_cohort: (FEWER_LATER, "rounds"),
    noise_that_float32_loses: (NO_NOISE_LEFT, "rounds"),
    products_of_32_bits: (LARGE_CLIENT, "batches"),
    noise_that_is_rounded_away: (COARSE_STEPS, "rounds"),
    half_the_noise_of_the_server: (WHOLE_CLIENT, "rounds"),
    whole_clients_without_a_clip: (WHOLE_CLIENT, "totality"),
    whole_clients_clipped_to_twice_the_bound: (WHOLE_CLIENT, "rounds"),
    half_the_noise_of_a_hidden_cohort: (HIDDEN_COHORT, "ex ante"),
    half_the_noise_on_integers: (INTEGERS, "rounds"),
    half_the_distance_of_an_absent_record: (ONE_LESS, "exhibited"),
    half_of_the_clients_twice: (TWO_DEVICES, "rounds"),
}
QUICK = (constant_rates, unguarded_clip, all_rounds_drawn, credit_of_the_first_cohort)  # of H1, H2 and H5


def test_random_specs_leak_no_more_than_is_proved():
    outcomes = [
        *fuzz.fuzz(5, seed=20005),
        *fuzz.fuzz(3, seed=20011),
    ]  # the one between them takes as long as these
    assert [outcome.command for outcome in outcomes if outcome.violated] == []
    assert [outcome.seed for outcome in outcomes] == [*range(20005, 20010), *range(20011, 20014)]
    attacks = {"totality", "rounds", "counts", "ex ante", "history", "choice"}
    assert {outcome.attack for outcome in outcomes} == attacks
    assert max(outcome.attacked / outcome.proven for outcome in outcomes) > 0.8  # and come near


def test_a_record_that_is_absent_leaves_the_count_one_lower(monkeypatch):
    counts = {}
    partition = rounds.Rounds._partition

    def counted(self, record, scene):
        made = partition(self, record, scene)
        counts[record == self.absent] = made.size[self.target], len(made.rows(self.target))
        return made

    monkeypatch.setattr(rounds.Rounds, "_partition", counted)
    outcome = fuzz.check(ONE_LESS)
    assert outcome.drawn.values["privacy.adjacency"] == "add/remove"
    assert counts[True] == (counts[False][0] - 1, counts[False][1] - 1)


@pytest.mark.parametrize("seed", [WHOLE_CLIENT, INTEGERS, ONE_LESS])
def test_whole_clients_and_integers_show_nearly_all_that_is_proved(seed):
    outcome = fuzz.check(seed)
    assert 0.85 * outcome.proven < outcome.attacked < outcome.proven


@pytest.mark.parametrize(
    "hole",
    [pytest.param(hole, marks=() if hole in QUICK else pytest.mark.slow) for hole in HOLES],
    ids=lambda hole: hole.__name__,
)
def test_a_hole_that_was_closed_is_found_when_it_is_opened_again(hole, monkeypatch):
    seed, attack = HOLES[hole]
    assert not fuzz.check(seed).violated
    accountant._ANSWERS.clear()
    hole(monkeypatch)
    outcome = fuzz.check(seed)
    assert outcome.violated
    assert outcome.attack == attack


def test_a_violation_ends_with_its_exit_code_and_the_command_that_shows_it_again(monkeypatch):
    unguarded_clip(monkeypatch)
    result = CliRunner().invoke(app, ["audit", "--fuzz", "1", "--seed", str(OVERFLOW), "--json"])
    assert result.exit_code == 5, result.output
    assert f"dither audit --fuzz 1 --seed {OVERFLOW}" in result.stderr
    (row,) = json.loads(result.stdout)
    assert row["violated"]
    assert row["attack"] == HOLES[unguarded_clip][1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--fuzz", "0"), "--fuzz 0"), (("cpfed", "--fuzz", "1"), "its own specs"), ((), "nothing to attack")],
)
def test_wrong_arguments_are_named(arguments, words):
    result = CliRunner().invoke(app, ["audit", *arguments])
    assert isinstance(result.exception, SpecError)
    assert words in str(result.exception)


@pytest.mark.slow
def test_three_hundred_specs_leak_no_more_than_is_proved():
    assert [outcome.command for outcome in fuzz.fuzz(300, seed=1000) if outcome.violated] == []


@pytest.mark.slow
@pytest.mark.parametrize("hole", HOLES, ids=lambda hole: hole.__name__)
def test_each_hole_is_found_among_a_few_dozen_specs(hole, monkeypatch):
    hole(monkeypatch)
    first = HOLES[hole][0] // 40 * 40
    assert any(fuzz.check(seed).violated for seed in range(first, first + 40))


@pytest.mark.slow
def test_a_compiler_that_knows_no_nan_is_found():
    """Fast math, were it not refused: its checks for finite numbers are gone."""
    program = (
        "from dither.simulation import devices; devices._refuse_inexact = lambda: None\n"
        "from dither.auditing import fuzz; assert any(fuzz.check(seed).violated for seed in range(4))"
    )
    honor = "--xla_cpu_fast_math_honor_nans=false --xla_cpu_fast_math_honor_infs=false"
    flags = {"XLA_FLAGS": f"--xla_cpu_enable_fast_math=true {honor}"}
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, **flags})
