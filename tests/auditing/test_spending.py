"""The ledger under attack: what it says was spent covers what was shown, and holes in it are found."""

import numpy as np
import pytest

from dither.accounting.ledger import book
from dither.auditing import fuzz
from dither.auditing.spending import check_spending


def checked(seed):
    return check_spending(np.random.default_rng(seed))


def repeated_rounds_are_free(monkeypatch):
    """A charge that is dropped: rounds made again with fresh noise."""
    add = book.Account.add

    def forgetful(self, run, rounds, conditions, counts):
        if run not in self.runs or rounds[0] >= self.runs[run][1]:
            add(self, run, rounds, conditions, counts)

    monkeypatch.setattr(book.Account, "add", forgetful)


def one_list_of_all_runs(monkeypatch):
    """Loss distributions composed over runs, as if nobody looked in between: no filter."""

    def merged(self, account, blocks, terms):
        everything = self._together(account, terms, range(len(account.counts)))
        return self._row(everything, terms, ideal=False).value

    monkeypatch.setattr(book.Book, "_filtered", merged)


def the_order_counts(monkeypatch):
    """A filter that begins anew with each sampled run."""
    filtered = book.Book._filtered

    def from_the_last(self, account, blocks, terms):
        sampled = [at for at, block in enumerate(blocks) if not self._is_gaussian(block, terms)]
        if not sampled or len(blocks) < 2:
            return filtered(self, account, blocks, terms)
        left = blocks[sampled[-1] :]
        return filtered(self, account, left, terms) if left[1:] else self._row(left[0], terms).value

    monkeypatch.setattr(book.Book, "_filtered", from_the_last)


def a_budget_that_is_not_asked(monkeypatch):
    """A run that has begun is paid whatever it costs."""
    affords = book.Book._affords

    def generous(self, dataset, client, account, budget):
        return len(account.counts) > 1 or affords(self, dataset, client, account, budget)

    monkeypatch.setattr(book.Book, "_affords", generous)


HOLES = {  # seeds that show each, and how
    repeated_rounds_are_free: (8, "history"),
    a_budget_that_is_not_asked: (12, "history"),
    the_order_counts: (8, "history"),
    one_list_of_all_runs: (11, "choice"),
}


@pytest.mark.parametrize("seed", [8, 11, 17])
def test_what_was_shown_is_near_what_was_spent_and_never_above(seed):
    case = checked(seed)
    assert 0.99 * case.proven < case.attacked <= case.proven


def test_accounts_that_kept_their_budgets_may_pass_one_when_they_are_joined():
    """Of two data sets that turned out to be the same the ledger says what was spent: it may be more."""
    case = checked(900101)
    assert "joined" in case.values["story"]
    assert case.attacked <= case.proven


@pytest.mark.parametrize("hole", HOLES, ids=lambda hole: hole.__name__)
def test_a_hole_is_found(hole, monkeypatch):
    seed, attack = HOLES[hole]
    hole(monkeypatch)
    case = checked(seed)
    assert case.attack == attack
    assert case.attacked > 1.03 * case.proven


def test_the_net_draws_them_too():
    outcome = fuzz.check(9)
    assert outcome.drawn.values["method"] == "ledger"
    assert not outcome.violated


@pytest.mark.slow
def test_a_hundred_histories_are_covered():
    cases = [checked(seed) for seed in range(100)]
    assert all(case.attacked <= case.proven * (1 + 1e-3) for case in cases)
    kinds = {word for case in cases for line in case.values.get("story", ()) for word in line.split()}
    assert {"refused", "joined", "(poisson,", "(fixed,", "(full,"} <= kinds
