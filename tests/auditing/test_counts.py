"""Private statistics and evaluations under attack: what one record shows is near what is proved and never above
it, and a noise or a sensitivity that is too small is found."""

import numpy as np
import pytest

from dither.auditing import fuzz
from dither.auditing.counts import check_counts, draw_case
from dither.experiment import counting

KINDS = {"statistics", "evaluation, two classes", "evaluation, classes", "evaluation, regression", "schema"}


def checked(seeds):
    return (check_counts(np.random.default_rng(seed), 1e-7) for seed in seeds)


def test_no_question_shows_more_than_is_proved():
    outcomes = list(checked(range(24)))
    assert {case.values["method"] for case, _, _ in outcomes} == KINDS
    assert all(attacked <= proven <= case.epsilon * (1 + 1e-6) for case, proven, attacked in outcomes)
    assert max(attacked / proven for _, proven, attacked in outcomes) > 0.8


def too_little_noise(monkeypatch):
    noise_std = counting.noise_std
    monkeypatch.setattr(counting, "noise_std", lambda question, mu: 0.7 * noise_std(question, mu))


def sums_that_move_further(monkeypatch):
    monkeypatch.setattr(counting.Question, "touched", property(lambda self: len(self.columns)))


def one_budget_for_every_question(monkeypatch):
    spend = counting.Institution.spend

    def forgetful(self, question):
        self.left = 1.0
        return spend(self, question._replace(share=1.0))

    monkeypatch.setattr(counting.Institution, "spend", forgetful)


@pytest.mark.parametrize("hole", [too_little_noise, sums_that_move_further, one_budget_for_every_question])
def test_a_hole_is_found(hole, monkeypatch):
    hole(monkeypatch)
    assert any(attacked > proven for _, proven, attacked in checked(range(40)))


def test_both_worlds_differ_in_one_record():
    for seed in range(20):
        case = draw_case(np.random.default_rng(seed))
        first, *others = zip(case.with_record, case.blanked, strict=True)
        assert all(a is b for a, b in others)
        assert len(first[0]) == case.sizes[0] + 1
        assert len(first[1]) == case.sizes[0] + case.lists_names  # blanked, or not there to be scored
        assert len(others) + 1 == len(case.sizes)
        described = all(name.startswith(("number", "text")) for name in first[0].columns)
        assert described == case.lists_names == (case.values["method"] in ("statistics", "schema"))
        assert (first[0].iloc[:-1].to_numpy() == first[1].iloc[: case.sizes[0]].to_numpy()).all()


def test_the_net_draws_them_too():
    outcome = fuzz.check(5)
    assert outcome.attack == "counts"
    assert 0 < outcome.attacked < outcome.proven
    assert fuzz.check(13).drawn.values["method"] in KINDS
