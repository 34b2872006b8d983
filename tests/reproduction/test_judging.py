"""Criteria as statistics: data for which each helper must say holds, fails, inconclusive and not judged."""

import numpy as np
import pytest

from dither.reproduction import judging
from dither.reproduction.judging import FAILS, HOLDS, INCONCLUSIVE, NOT_JUDGED

SPREAD = np.array([-0.02, 0.01, 0.0, 0.02, -0.01])  # mean 0, standard error 0.0071


def around(*centres, scale=1.0):
    """Groups with these means whose paired differences have some spread too."""
    rng = np.random.default_rng(3)
    return [centre + scale * rng.permutation(SPREAD) for centre in centres]


def test_difference_is_paired():
    seeds = np.array([0.1, 0.5, 0.9])  # far apart between seeds, but the gain is the same in each
    gap = judging.difference(seeds + 0.01, seeds)
    assert gap.mean == pytest.approx(0.01)
    assert gap.error == pytest.approx(0.0, abs=1e-12)
    assert gap.sign == 1
    assert judging.difference(seeds, seeds).sign == 0


def test_standard_error_by_hand():
    gap = judging.difference(np.array([1.0, 2.0, 3.0]), np.zeros(3))
    assert gap.mean == 2.0
    assert gap.error == pytest.approx(1.0 / np.sqrt(3.0))


@pytest.mark.parametrize(
    ("judge", "centres", "status"),
    [
        ("ordered_within_noise", (0.1, 0.2, 0.3), HOLDS),
        ("ordered_within_noise", (0.3, 0.2, 0.1), FAILS),
        ("ordered_within_noise", (0.1, 0.3, 0.2), FAILS),
        ("ordered_within_noise", (0.2, 0.2, 0.2), INCONCLUSIVE),
        ("interior_optimum", (0.3, 0.1, 0.3), HOLDS),
        ("interior_optimum", (0.1, 0.2, 0.3), FAILS),
        ("interior_optimum", (0.3, 0.2, 0.1), FAILS),
        ("interior_optimum", (0.2, 0.2, 0.2), INCONCLUSIVE),
        ("interior_optimum", (0.2, 0.2, 0.3), INCONCLUSIVE),  # better than one end, equal to the other
        ("order_is_broken", (0.1, 0.3, 0.1), HOLDS),
        ("order_is_broken", (0.1, 0.2, 0.3), FAILS),
        ("order_is_broken", (0.3, 0.2, 0.1), HOLDS),
        ("order_is_broken", (0.2, 0.2, 0.2), INCONCLUSIVE),
    ],
)
def test_judges_and_their_mirror_images(judge, centres, status):
    mirrored = {"lowest": False} if judge == "interior_optimum" else {"rising": False}
    assert getattr(judging, judge)(around(*centres), "abc").status == status
    assert getattr(judging, judge)(around(*(-c for c in centres)), "abc", **mirrored).status == status


def test_a_small_step_back_is_within_noise():
    assert judging.ordered_within_noise(around(0.1, 0.3, 0.299), "abc").status == HOLDS


@pytest.mark.parametrize(("a", "b", "status"), [(0.3, 0.1, HOLDS), (0.1, 0.3, FAILS), (0.2, 0.2, INCONCLUSIVE)])
def test_greater_by(a, b, status):
    first, second = around(a, b)
    assert judging.greater_by(first, second, ("a", "b")).status == status


@pytest.mark.parametrize(
    ("a", "b", "status"),
    [
        ((0.3, 0.2), (0.1, 0.2), HOLDS),
        ((0.3, 0.1), (0.1, 0.2), FAILS),
        ((0.2, 0.2), (0.2, 0.2), INCONCLUSIVE),
    ],
)
def test_never_below(a, b, status):
    groups = around(*a, *b)
    assert judging.never_below(groups[:2], groups[2:], (1, 2), ("a", "b")).status == status
    expected = FAILS if status == FAILS else HOLDS
    assert judging.never_below(groups[:2], groups[2:], (1, 2), ("a", "b"), above=False).status == expected


def test_the_same_runs_are_nowhere_above_each_other():
    """More seeds could not decide it: it is decided."""
    groups = around(0.1, 0.2)
    assert judging.never_below(groups, groups, (1, 2), ("a", "b")).status == FAILS
    assert judging.never_below(groups, groups, (1, 2), ("a", "b"), above=False).status == HOLDS


def test_numbers_say_what_they_are_about():
    verdicts = [judging.ordered_within_noise(around(0.1, 0.2), "ab", what=f"Q = {q}") for q in (1, 10)]
    names = [row["setting"] for row in judging.all_of(*verdicts).numbers]
    assert names == ["Q = 1: a", "Q = 1: b", "Q = 10: a", "Q = 10: b"]
    assert judging.order_is_broken(around(0.1, 0.2), "ab").text.startswith("no pair is against the order")


def test_convex():
    x = (1.0, 2.0, 4.0)
    assert judging.convex(around(1.0, 0.0, 1.0), x).status == HOLDS
    assert judging.convex(around(0.0, 1.0, 0.0), x).status == FAILS
    assert judging.convex(around(0.0, 1.0, 3.0), x).status == INCONCLUSIVE  # a straight line


def test_few_seeds_are_not_judged_and_diverged_runs_decide_nothing():
    two = [np.array([0.1, 0.2]), np.array([0.5, 0.6])]
    assert judging.ordered_within_noise(two, "ab").status == NOT_JUDGED
    broken = [np.array([0.1, 0.2, 0.3]), np.array([0.5, np.nan, 0.6])]
    assert judging.ordered_within_noise(broken, "ab").status == INCONCLUSIVE
    assert judging.interior_optimum(around(0.1, 0.2), "ab").status == NOT_JUDGED


def test_all_of_fails_with_its_weakest_part():
    parts = {status: judging.Verdict(status, status) for status in (HOLDS, FAILS, INCONCLUSIVE, NOT_JUDGED)}
    assert judging.all_of(parts[HOLDS], parts[HOLDS]).status == HOLDS
    assert judging.all_of(parts[HOLDS], parts[INCONCLUSIVE]).status == INCONCLUSIVE
    assert judging.all_of(parts[INCONCLUSIVE], parts[NOT_JUDGED]).status == NOT_JUDGED
    assert judging.all_of(parts[NOT_JUDGED], parts[FAILS]).status == FAILS


def test_false_alarms_are_rare():
    """Without any effect, looked at after 5, 10, 20 and 30 seeds: 5% of the comparisons are called in any look."""
    rng = np.random.default_rng(0)
    seeds = [rng.normal(size=(2, 30)) for _ in range(4000)]
    called = [
        any(judging.greater_by(a[:n], b[:n], ("a", "b")).status != INCONCLUSIVE for n in judging.LOOKS)
        for a, b in seeds
    ]
    assert 0.04 < np.mean(called) < 0.06


def test_few_seeds_need_more():
    assert judging.threshold(3) == pytest.approx(7.31, abs=0.01)  # tables of Student's t, at 1.82%
    assert judging.threshold(5) == pytest.approx(3.86, abs=0.01)
    assert judging.threshold(10**6) == pytest.approx(2.361, abs=1e-3)  # Pocock's bound for four looks


# Robustness


def robust(*verdicts):
    rows = [{"setting": name or "reference", "changes": name, "verdict": status} for name, status in verdicts]
    return judging.Robustness("robust", tuple(rows))


def test_robustness_names_what_decides():
    table = robust(("", HOLDS), ("rate", HOLDS), ("rate", FAILS), ("clip", INCONCLUSIVE), ("rate, clip", FAILS))
    assert table.describe() == "holds in 2 of 5 settings, fails in 2, undecided in 1; rate decides"
    assert (
        robust(("", FAILS), ("rate", HOLDS), ("L", HOLDS)).describe()
        == "holds in 2 of 3 settings, fails in 1; rate and L decide"
    )
    assert robust(("", HOLDS), ("rate", HOLDS)).describe() == "holds in 2 of 2 settings"
    assert robust(("", INCONCLUSIVE), ("rate", INCONCLUSIVE)).describe() == "undecided in all 2 settings"


def test_an_undecided_reference_depends_on_what_decides_it_in_both_ways():
    table = robust(("", INCONCLUSIVE), ("rate", HOLDS), ("clip", INCONCLUSIVE))
    assert table.describe() == "holds in 1 of 3 settings, undecided in 2 (the reference too)"
    table = robust(("", INCONCLUSIVE), ("rate", HOLDS), ("clip", FAILS))
    assert table.describe().endswith("fails in 1, undecided in 1 (the reference too); rate and clip decide")
    assert table.describe(HOLDS).endswith("; clip decides")  # as printed, at a scale with more seeds


def test_a_pair_decides_where_neither_does_alone():
    table = robust(("", HOLDS), ("rate", HOLDS), ("clip", HOLDS), ("rate, clip", FAILS))
    assert table.describe() == "holds in 3 of 4 settings, fails in 1; rate with clip decides"


def test_a_reference_with_another_verdict_than_as_printed_is_said():
    table = robust(("", HOLDS), ("rate", FAILS))
    assert table.describe(HOLDS) == "holds in 1 of 2 settings, fails in 1; rate decides"
    for printed in (FAILS, INCONCLUSIVE):
        assert "fails in 1 (the reference holds at this scale); rate decides" in table.describe(printed)


def test_what_the_paper_gives_is_counted_apart():
    table = robust(("", HOLDS), ("rate", HOLDS), ("regime", FAILS))
    table.verdicts[2]["beyond"] = True
    assert table.describe() == "holds in 2 of 2 settings; fails in 1 beyond the paper"


def test_settings_that_were_not_computed_are_counted_apart():
    table = robust(("", HOLDS), ("rate", judging.NOT_COMPUTED), ("clip", NOT_JUDGED))
    assert table.describe() == "holds in 1 of 1 setting; 1 not computed"
    assert robust(("", NOT_JUDGED)).describe() == "not judged at scale robust"


@pytest.mark.parametrize(("first", "chance"), [(5, 0.057), (3, 0.071)])
def test_the_chance_of_a_false_alarm_in_any_look(first, chance):
    """As docs/reproduce.md says: seeds without an effect, judged after the first look and at all later ones."""
    gaps = np.random.default_rng(0).standard_normal((100_000, judging.LOOKS[-1]), dtype=np.float32)
    alarms = np.zeros(len(gaps), bool)
    for seeds in sorted({first, *judging.LOOKS}):
        looked = gaps[:, :seeds]
        errors = looked.std(1, ddof=1) / np.sqrt(seeds)
        alarms |= np.abs(looked.mean(1)) > judging.threshold(seeds) * errors
    assert alarms.mean() == pytest.approx(chance, abs=0.002)  # 2.6 standard errors of 100,000 trials
