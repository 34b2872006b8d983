"""Tests of `dither.experiment.check`: claimed against proven ε of training that Dither did not run."""

import itertools
import json
import math
import re
from collections import Counter
from pathlib import Path

import dp_accounting
import pytest

from dither.accounting import gaussian_epsilon
from dither.errors import NoProof, SpecError
from dither.experiment.check import check
from dither.types import epsilon_text

DPSGD = {
    "noise_multiplier": 1.1,
    "steps": 1000,
    "sampling": "poisson",
    "sampling_rate": 0.01,
    "clipping": "example",
    "claimed_adjacency": "add/remove",
}


def poisson_event(noise, rate, steps):
    gaussian = dp_accounting.GaussianDpEvent(noise)
    return dp_accounting.SelfComposedDpEvent(dp_accounting.PoissonSampledDpEvent(rate, gaussian), steps)


def test_poisson_batches_agree_with_dp_accounting():
    accountant = dp_accounting.pld.PLDAccountant()
    accountant.compose(poisson_event(1.1, 0.01, 1000))
    expected = accountant.get_epsilon(1e-5)
    for described in (DPSGD, poisson_event(1.1, 0.01, 1000)):
        assert check(described).proven("add/remove").value == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize(("factor", "supported"), [(1.01, True), (0.99, False)])
def test_a_claim_is_supported_where_a_proof_reaches_it(factor, supported):
    proven = check(DPSGD).proven().value
    assert check({**DPSGD, "claimed_epsilon": factor * proven}).supported is supported
    assert not check(DPSGD).supported  # nothing was claimed


def test_what_is_not_said_is_taken_at_its_worst():
    proven = check(DPSGD).proven("zero-out").value
    for left_out in ("sampling", "sampling_rate"):
        worse = check({name: value for name, value in DPSGD.items() if name != left_out})
        assert worse.proven("zero-out").value > 10 * proven
        assert any("sampling" in text for text in worse.fixes)
    unclipped = check({name: value for name, value in DPSGD.items() if name != "clipping"})
    assert all(math.isinf(row.value) for row in unclipped.table)
    assert any("clip" in text for text in unclipped.fixes)
    assert math.isinf(check({**DPSGD, "noise_multiplier": 0.0}).proven().value)


def test_shuffled_and_batch_clipped_steps_get_no_more_than_is_proved():
    poisson = check({**DPSGD, "batch_size": 100, "records": 10_000})
    shuffled = check({**DPSGD, "sampling": "shuffled", "batch_size": 100, "records": 10_000})
    one_use_an_epoch = check({"noise_multiplier": 1.1, "steps": 10, "sampling": "full", "clipping": "example"})
    assert shuffled.proven("zero-out").value == pytest.approx(one_use_an_epoch.proven("zero-out").value)
    assert shuffled.proven("zero-out").value > poisson.proven("zero-out").value
    # A record can turn the clipped mean of a batch round: twice the distance, for every relation.
    turned = check({**DPSGD, "noise_multiplier": 2.2, "clipping": "batch"})
    assert turned.proven("zero-out").value >= poisson.proven("zero-out").value * (1 - 1e-9)


@pytest.mark.parametrize(
    "kinds", [((100, 2), (1, 4)), ((100, 5), (1, 10)), ((1, 1), (2, 3), (0.5, 7)), ((1, 5), (2, 5))]
)
@pytest.mark.parametrize("sampling", ["shuffled", "stream"])
def test_noise_that_changes_within_an_epoch_is_accounted_for_every_place_of_a_record(sampling, kinds):
    """Against the exact ε of the worst places of a record among ten, in batches of two, or of four."""
    records, size = 10, 4 if sampling == "stream" else 2
    noise = [z for z, steps in kinds for _ in range(steps)]
    worst = 0.0
    for places in itertools.product(range(records), repeat=math.ceil(len(noise) * size / records)):
        met = Counter((epoch * records + place) // size for epoch, place in enumerate(places))
        worst = max(worst, sum((met[batch] / z) ** 2 for batch, z in enumerate(noise)))
    steps = {"sampling": sampling, "batch_size": size, "records": records, "clipping": "example"}
    described = {"releases": [{"noise_multiplier": float(z), "steps": count, **steps} for z, count in kinds]}
    proven = check(described).proven("zero-out").value
    assert proven >= gaussian_epsilon(math.sqrt(worst), 1e-5) * (1 - 1e-12)
    if sampling == "shuffled" and kinds == ((1, 5), (2, 5)):  # whole epochs
        assert proven == pytest.approx(gaussian_epsilon(math.sqrt(worst), 1e-5))


def test_gaps_are_named_until_they_are_closed():
    closed = check({**DPSGD, "randomness": "secure", "other_runs": 0, "exact_noise": True})
    assert closed.not_covered == ()
    assert closed.fixes == ()
    assert len(check(DPSGD).not_covered) == 3
    assert any("3 other runs" in text for text in check({**DPSGD, "other_runs": 3}).not_covered)


def test_an_opacus_history_does_not_say_how_batches_are_drawn(tmp_path):
    path = tmp_path / "accountant.json"
    path.write_text(json.dumps({"history": [[1.1, 0.01, 1000]], "mechanism": "rdp"}))
    assert check(path).proven("zero-out").value > 100
    assert check(path, {"sampling": "poisson"}).proven("zero-out").value == check(DPSGD).proven("zero-out").value


def test_several_kinds_of_steps_add_up(tmp_path):
    event = dp_accounting.ComposedDpEvent([poisson_event(1.1, 0.01, 500), poisson_event(1.1, 0.01, 500)])
    path = tmp_path / "event.txt"
    path.write_text(repr(event))
    assert check(path).proven("add/remove").value == pytest.approx(check(DPSGD).proven().value, rel=1e-6)
    fixed = dp_accounting.SampledWithoutReplacementDpEvent(1000, 10, dp_accounting.GaussianDpEvent(2.0))
    described = {
        "noise_multiplier": 2.0, "steps": 1, "sampling": "fixed", "batch_size": 10, "records": 1000,
        "clipping": "example",
    }  # fmt: skip
    assert check(fixed).proven("replace-one").value == check(described).proven("replace-one").value


@pytest.mark.parametrize(
    "event",
    [
        dp_accounting.LaplaceDpEvent(1.0),
        dp_accounting.PoissonSampledDpEvent(0.1, poisson_event(1.0, 0.1, 1)),
        dp_accounting.NonPrivateDpEvent(),
    ],
)
def test_an_event_without_a_recipe_is_refused_by_name(event):
    with pytest.raises(NoProof, match="DpEvent"):
        check(event)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": "shufled"}, "sampling='shufled'.*did you mean 'shuffled'"),
        ({"nois_multiplier": 1}, "unknown key 'nois_multiplier'"),
        ({"steps": 1.5}, "steps=1.5 must be a whole number"),
        ({"steps": True}, "steps=True"),
        ({"sampling_rate": 2}, "sampling_rate=2 must be a number from 0 to 1"),
        ({"delta": 0.0}, "delta=0.0"),
        ({"claimed_epsilon": math.nan}, "claimed_epsilon=nan"),
    ],
)
def test_wrong_values_are_named(changes, message):
    with pytest.raises(SpecError, match=message):
        check({**DPSGD, **changes})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "title = ", "is not a description"),
        ("a.toml", "title = 'x'", "noise_multiplier is missing"),
        ("a.json", "[]", "is not an Opacus accountant's state"),
        ("a.json", "{", "is not a description"),
        ("a.txt", "__import__('os').system('true')", "is not an event"),
        ("a.txt", "GaussianDpEvent()", "is missing a number"),
    ],
)
def test_wrong_files_are_named(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(SpecError, match=message):
        check(path)
    with pytest.raises(SpecError, match="cannot be read"):
        check(tmp_path / "none.toml")


def test_the_numbers_of_the_docs():
    page = Path("docs/check.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .* \| .* \| ([\d.]+) \| ([\d.]+) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 5
    file = ""
    for zero_out, replace_one, command in rows:
        file = next(iter(re.findall(r"examples/check/[\w-]+\.toml", command)), file)
        values = {"sampling": "poisson"} if "sampling=poisson" in command else {}
        values |= {"steps": 125} if "steps=125" in command else {}
        result = check(file, values)
        assert epsilon_text(result.proven("zero-out").value) == zero_out
        assert epsilon_text(result.proven("replace-one").value) == replace_one
