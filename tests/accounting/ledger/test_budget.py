"""What was spent, and that no more than the budget ever is."""

import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dither import accounting
from dither.accounting import Conditions, proven
from dither.accounting.ledger import Budget, Charge, Ledger, book
from dither.accounting.ledger.entries import decode_charges, encode_charges
from dither.errors import BudgetExhausted, ConfigError
from dither.types import Release, Sampling, epsilon_text

from .conftest import all_of, gaussian, poisson, shuffled

DELTA = 1e-5


def epsilon(*participations, **options):
    return proven(list(participations), DELTA, options.pop("conditions", None), view="upload", **options).value


def spent(ledger, client="ann", dataset="data", **options):
    (row,) = ledger.spent(dataset, client, **options)
    return row


# Charges


def test_a_charge_is_what_was_said(ledger):
    ledger.charge("run", "data", [Charge("ann", [(gaussian(), 2), (poisson(), 3)])], rounds=(0, 5))
    row = spent(ledger)
    assert row.epsilon == pytest.approx(epsilon((gaussian(), 2), (poisson(), 3)), rel=1e-12)
    assert row[2:] == (DELTA, "upload", "zero-out", 5, ("run",), None, "", (accounting.FLOAT_NOISE,))
    assert spent(ledger, "bob")[:2] == ("bob", 0.0)
    assert spent(ledger, dataset="other").epsilon == 0.0


def test_a_second_run_starts_from_what_the_first_has_spent(ledger, path):
    ledger.charge("first", "data", all_of(["ann"], gaussian(), 5), rounds=(0, 5))
    second = Ledger(path)
    second.charge("second", "data", all_of(["ann"], gaussian(8.0), 4), rounds=(0, 4))
    row = spent(second)
    assert row.runs == ("first", "second")
    assert row.epsilon == pytest.approx(epsilon((gaussian(), 5), (gaussian(8.0), 4)), rel=1e-12)
    assert row.epsilon < epsilon((gaussian(), 5)) + epsilon((gaussian(8.0), 4)), "composed, not added up"
    assert spent(ledger).epsilon == row.epsilon, "the first process sees it too"


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ann", "bob"]),
            st.sampled_from(["one", "two"]),
            st.sampled_from([gaussian(8.0), gaussian(20.0, uses=2), poisson(2.0), poisson(3.0, rate=0.1, uses=1)]),
            st.integers(1, 4),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_spent_is_never_below_the_accounting_of_the_merged_list_and_only_grows(charges):
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "ledger.sqlite")
        lists, before = {"ann": [], "bob": []}, {"ann": 0.0, "bob": 0.0}
        runs, first = {"ann": set(), "bob": set()}, {}
        for t, (client, run, releases, count) in enumerate(charges):
            is_sampled = any(r.sampling.kind == "poisson" for r in releases)
            first.setdefault(client, [run, is_sampled])
            # A first run that did not register (the ledger says so) and turns to sampling after another one has
            # begun: the tails get their larger share of δ only then, and the filter's bound may fall.
            late = first[client] == [run, False] and is_sampled and len(runs[client] | {run}) > 1
            first[client][1] |= is_sampled and first[client][0] == run
            ledger.charge(run, "data", [Charge(client, [(releases, count)])], rounds=(t, t + 1))
            lists[client].append((releases, count))
            runs[client].add(run)
            for name in lists:
                now, merged = spent(ledger, name).epsilon, epsilon(*lists[name])
                sampled = any(r.sampling.kind == "poisson" for each, _ in lists[name] for r in each)
                if len(runs[name]) > 1 and sampled:  # the filter
                    assert now > merged
                else:
                    assert now == pytest.approx(merged, rel=1e-9)
                assert (late or now > before[name]) if name == client else now == before[name]
                before[name] = now
        assert [tuple(row[5:6]) for row in Ledger(ledger.path).spent("data")] == [
            (sum(count for _, count in lists[name]),) for name in sorted(lists) if lists[name]
        ]


def test_all_or_nothing(ledger):
    ledger.set_budget("data", Budget(epsilon((gaussian(), 4)), DELTA))
    ledger.charge("run", "data", all_of(["cyd"], gaussian(), 3), rounds=(0, 3))
    before = ledger.head()
    with pytest.raises(BudgetExhausted) as caught:
        ledger.charge("run", "data", all_of(["ann", "bob", "cyd"], gaussian(), 2), rounds=(3, 5))
    three, four, five = (epsilon((gaussian(), n)) for n in (3, 4, 5))
    message = str(caught.value)
    assert f"data, client 'cyd' has spent ε={epsilon_text(three, digits=6)} of its budget ε={four:.15g}" in message
    assert f"rounds 3 to 4 of run 'run' would make it ε={epsilon_text(five, digits=6)}" in message
    assert "\n" not in message
    assert caught.value.exit_code == 3
    assert ledger.head() == before
    assert [row.client for row in ledger.spent("data")] == ["cyd"]
    ledger.charge("run", "data", all_of(["ann", "bob", "cyd"], gaussian(), 1), rounds=(3, 4))  # exactly the budget
    assert [row.participations for row in ledger.spent("data")] == [1, 1, 4]
    assert spent(ledger, "cyd").epsilon == four


def test_no_proof_fails_closed(ledger):
    fixed = (Release("uplink", 1.0, 1.0, 1, Sampling("fixed", 0.1, "replace-one"), "test"),)
    ledger.charge("free", "data", all_of(["ann"], fixed), rounds=(0, 1))  # no budget: recorded all the same
    assert spent(ledger, adjacency="add/remove").epsilon == math.inf
    assert spent(ledger, adjacency="replace-one").epsilon == spent(ledger).epsilon < math.inf
    ledger.set_budget("data", Budget(1e6, DELTA, adjacency="add/remove"))
    for client in ("ann", "bob"):
        with pytest.raises(BudgetExhausted, match="would make it ε=∞"):
            ledger.charge("run", "data", all_of([client], fixed), rounds=(0, 1))
    with pytest.raises(BudgetExhausted):  # what has no proof stays in the account
        ledger.charge("run", "data", all_of(["ann"], gaussian(1e9)), rounds=(0, 1))
    ledger.set_budget("data", Budget(10.0, DELTA, adjacency="replace-one"), raising=True)
    ledger.charge("run", "data", all_of(["ann"], fixed), rounds=(0, 1))
    unbounded = (gaussian()[0]._replace(sensitivity=math.inf),)
    for releases in (gaussian(0.0), gaussian(math.nan), unbounded):
        with pytest.raises(BudgetExhausted, match="ε=∞"):
            ledger.charge("run", "data", all_of(["bob"], releases), rounds=(0, 1))


@pytest.mark.parametrize(
    ("releases", "count", "rounds", "conditions", "match"),
    [
        (gaussian(), -1, (0, 1), None, "count=-1"),
        (gaussian(), 1.5, (0, 1), None, "count=1.5"),
        (gaussian(uses=-2), 1, (0, 1), None, "uses=-2"),
        (gaussian(channel="pigeon"), 1, (0, 1), None, "pigeon"),
        (gaussian(), 1, (3, 3), None, r"rounds=\(3, 3\)"),
        (gaussian(), 1, (-1, 3), None, r"rounds=\(-1, 3\)"),
        (gaussian(), 1, (0, 1), Conditions(colluders=-1), "colluders=-1"),
        (gaussian(), 1, (0, 1), Conditions(others_noise=-1.0), "others_noise=-1"),
    ],
)
def test_nonsense_never_enters(ledger, releases, count, rounds, conditions, match):
    with pytest.raises(ValueError, match=match):
        ledger.charge("run", "data", [Charge("ann", [(releases, count)])], rounds=rounds, conditions=conditions)
    assert ledger.history() == []


# Budgets


def test_budgets_bind_the_client_else_the_data_set(ledger, path):
    assert ledger.budget("data", "ann") is None
    wide, narrow = Budget(3.0, 1e-6), Budget(1.0, 1e-5, "sum", "replace-one")
    ledger.set_budget("data", wide)
    ledger.set_budget("data", narrow, client="ann", raising=True)
    other = Ledger(path)
    assert (other.budget("data", "ann"), other.budget("data", "bob"), other.budget("data")) == (narrow, wide, wide)
    assert other.budget("elsewhere", "ann") is None
    assert spent(other)[1:5] == (0.0, 1e-5, "sum", "replace-one")
    other.set_budget("data", None, client="ann", raising=True)
    assert ledger.budget("data", "ann") == wide
    ledger.set_budget("data", None, raising=True)
    assert ledger.budget("data", "ann") is None
    entries = ledger.history("data")
    assert [(entry.kind, entry.client, entry.budget) for entry in entries] == [
        ("budget", None, wide),
        ("budget", "ann", narrow),
        ("budget", "ann", None),
        ("budget", None, None),
    ]


@pytest.mark.parametrize(
    "budget",
    [
        Budget(-1.0, DELTA),
        Budget(math.nan, DELTA),
        Budget(math.inf, DELTA),
        Budget(1.0, 0.0),
        Budget(1.0, 1.0),
        Budget(1.0, DELTA, "oracle"),
        Budget(1.0, DELTA, "upload", "swap"),
    ],
)
def test_budgets_that_cannot_be_meant(ledger, budget):
    with pytest.raises(ConfigError, match="budget"):
        ledger.set_budget("data", budget)
    assert ledger.history() == []


def test_a_budget_below_what_is_spent_and_a_raised_one(ledger):
    ledger.set_budget("data", Budget(epsilon((gaussian(), 9)), DELTA))
    assert ledger.affordable("run", "data", lambda n: all_of(["ann"], gaussian(), n), 50) == 9
    ledger.charge("run", "data", all_of(["ann"], gaussian(), 5), rounds=(0, 5))
    ledger.set_budget("data", Budget(epsilon((gaussian(), 2)), DELTA))  # what was affordable is not any more
    with pytest.raises(BudgetExhausted):
        ledger.charge("run", "data", all_of(["ann"], gaussian(), 1), rounds=(5, 6))
    ledger.set_budget("data", Budget(epsilon((gaussian(), 6)), DELTA), raising=True)
    ledger.charge("run", "data", all_of(["ann"], gaussian(), 1), rounds=(5, 6))


@pytest.mark.parametrize(
    "looser",
    [
        Budget(2.5, 1e-6, "sum", "replace-one"),
        Budget(2.0, 1e-5, "sum", "replace-one"),
        Budget(2.0, 1e-6, "broadcast", "replace-one"),
        Budget(2.0, 1e-6, "sum", "add/remove"),
        None,
    ],
)
def test_a_budget_is_raised_only_by_intent_and_the_chain_keeps_both(ledger, looser):
    before = Budget(2.0, 1e-6, "sum", "replace-one")
    ledger.set_budget("data", before)
    for client in (None, "ann") if looser else (None,):
        with pytest.raises(ConfigError, match="raises the budget from ε=2"):
            ledger.set_budget("data", looser, client)
    assert ledger.budget("data", "ann") == before
    ledger.set_budget("data", looser, raising=True)
    stricter = Budget(1.0, 1e-7, "upload", looser.adjacency if looser else "add/remove")
    ledger.set_budget("data", stricter, "ann")  # lower: nobody is asked
    assert [(e.was, e.budget) for e in ledger.history()] == [(None, before), (before, looser), (looser, stricter)]


def test_zero_budget_lets_nothing_pass_but_what_reveals_nothing(ledger):
    ledger.set_budget("data", Budget(0.0, DELTA))
    ledger.charge("run", "data", all_of(["ann"], gaussian(math.inf), 3), rounds=(0, 3))
    with pytest.raises(BudgetExhausted):
        ledger.charge("run", "data", all_of(["ann"], gaussian(), 1), rounds=(3, 4))


# Stopping at the right round


def coming(t):
    """Clients that take part in different rounds, with noise that decays."""
    releases = gaussian(round(12.0 * 0.97**t, 6))
    clients = [name for name, every in (("ann", 1), ("bob", 2), ("cyd", 3)) if t % every == 0]
    return all_of(clients, releases)


def first(rounds):
    return [charge for t in range(rounds) for charge in coming(t)]


@pytest.mark.parametrize("start", [0, 4])
@pytest.mark.parametrize("limit", [0.05, 0.9, 1.3, 2.0, 1e3])
def test_the_last_affordable_round_is_that_of_brute_force(ledger, limit, start):
    num_rounds = 25
    ledger.charge("earlier", "data", all_of(["cyd"], gaussian(9.0), 4), rounds=(0, 4))
    ledger.set_budget("data", Budget(limit, DELTA))
    ledger.set_budget("data", Budget(limit * 0.8, DELTA, adjacency="replace-one"), client="bob", raising=True)

    def within(client, rounds):
        items = [(gaussian(9.0), 4)] if client == "cyd" else []
        for t in range(rounds):
            items += [pair for charge in coming(t) if charge.client == client for pair in charge.participations]
        if client == "bob":
            return epsilon(*items, adjacency="replace-one") <= limit * 0.8
        return epsilon(*items) <= limit or len(items) == (4 if client == "cyd" else 0)

    # a client that takes no part in these rounds pays nothing for them, whatever it has spent before
    def payable(rounds):
        present = {charge.client for t in range(rounds) for charge in coming(t)}
        return all(within(client, rounds) for client in present)

    expected = max(n for n in range(num_rounds + 1) if all(payable(k) for k in range(n + 1)))
    assert 0 < expected < num_rounds or limit in (0.05, 1e3)
    found = ledger.affordable("run", "data", first, num_rounds, start=start)
    assert found == expected
    for t in range(found):
        ledger.charge("run", "data", coming(t), rounds=(start + t, start + t + 1))
    if found < num_rounds:
        with pytest.raises(BudgetExhausted):
            ledger.charge("run", "data", coming(found), rounds=(start + found, start + found + 1))


def test_what_was_affordable_needs_no_accounting_later(ledger, path, monkeypatch):
    ledger.set_budget("data", Budget(1.0, DELTA))
    per_round = all_of(["ann", "bob"], poisson())
    found = ledger.affordable("run", "data", lambda n: all_of(["ann", "bob"], poisson(), n), 500)
    assert 0 < found < 500
    with monkeypatch.context() as patched:
        patched.setattr(book, "proven", None)
        for start in range(0, found, 7):
            stop = min(start + 7, found)
            ledger.charge("run", "data", all_of(["ann", "bob"], poisson(), stop - start), rounds=(start, stop))
    with pytest.raises(BudgetExhausted):
        ledger.charge("run", "data", per_round, rounds=(found, found + 1))
    assert spent(Ledger(path)).epsilon <= 1.0


def test_what_was_affordable_is_not_once_another_process_has_spent(ledger, path):
    ledger.set_budget("data", Budget(epsilon((gaussian(), 10)), DELTA))
    assert ledger.affordable("run", "data", lambda n: all_of(["ann"], gaussian(), n), 20) == 10
    Ledger(path).charge("other", "data", all_of(["ann"], gaussian(), 4), rounds=(0, 4))
    ledger.charge("run", "data", all_of(["ann"], gaussian(), 6), rounds=(0, 6))
    with pytest.raises(BudgetExhausted):
        ledger.charge("run", "data", all_of(["ann"], gaussian(), 1), rounds=(6, 7))


def test_a_thousand_clients_with_one_history_are_one_question(ledger, monkeypatch):
    asked = []

    def counted(*arguments, **options):
        asked.append(arguments)
        return proven(*arguments, **options)

    monkeypatch.setattr(book, "proven", counted)
    clients = [f"client {i}" for i in range(1000)]
    ledger.set_budget("data", Budget(5.0, DELTA))
    ledger.charge("run", "data", all_of(clients, poisson(), 3), rounds=(0, 3))
    assert len(ledger.spent("data")) == 1000
    assert len(asked) == 1


# Doing rounds again


def test_rounds_done_again_count_again(ledger):
    for _ in range(2):
        ledger.charge("run", "data", all_of(["ann"], gaussian()), rounds=(0, 1))
    assert spent(ledger).epsilon == pytest.approx(epsilon((gaussian(), 2)))


def test_replay_takes_an_identical_charge_and_no_other(ledger, path):
    conditions = Conditions(encoded=True, cohort_size=2)

    def charge(
        run="run", noise=10.0, rounds=(0, 2), clients=("ann", "bob"), conditions=conditions, dataset="data"
    ):
        again = Ledger(path)  # resumed in a new process
        return again.charge(
            run, dataset, all_of(clients, gaussian(noise), 2), rounds=rounds, conditions=conditions, replay=True
        )

    first = charge()
    assert charge() == first
    assert charge(clients=("bob", "ann")) == first
    assert len(ledger.history()) == 1
    assert spent(ledger).participations == 2
    heads = {
        first,
        charge(run="other"),
        charge(noise=10.000001),
        charge(rounds=(2, 4)),
        charge(rounds=(0, 3)),
        charge(clients=("ann",)),
        charge(conditions=None),
        charge(dataset="elsewhere"),
    }
    assert len(heads) == len(ledger.history()) == 8
    assert charge() == ledger.head(), "an earlier one still stands for it"


def test_replay_needs_no_budget_left(ledger):
    ledger.set_budget("data", Budget(epsilon((gaussian(), 1)), DELTA))
    ledger.charge("run", "data", all_of(["ann"], gaussian()), rounds=(0, 1))
    with pytest.raises(BudgetExhausted):
        ledger.charge("run", "data", all_of(["ann"], gaussian()), rounds=(0, 1))
    ledger.charge("run", "data", all_of(["ann"], gaussian()), rounds=(0, 1), replay=True)


# History


def test_history_gives_back_what_was_charged(ledger, path):
    conditions = Conditions(encoded=True, cohort_size=7, convex=True, smoothness=0.3, not_covered=("tuning",))
    charges = [Charge("ann", [(gaussian(), 2), (poisson(), 1)]), Charge("bob", [(gaussian() + poisson(), 4)])]
    head = ledger.charge("run", "data", charges, rounds=(10, 14), conditions=conditions)
    ledger.charge("run", "elsewhere", all_of(["cyd"], gaussian()), rounds=(0, 1))
    (entry,) = Ledger(path).history("data")
    assert f"{entry.position}:{entry.hash}" == head
    assert entry[2:4] == ("charge", "data")
    assert (entry.run, entry.rounds, entry.conditions) == ("run", (10, 14), conditions)
    assert {client: dict(items) for client, items in entry.charges} == {c: dict(i) for c, i in charges}
    assert ledger.datasets() == ["data", "elsewhere"]
    assert [entry.dataset for entry in ledger.history()] == ["data", "elsewhere"]


# Runs with different conditions


def sum_epsilon(count, conditions, releases=gaussian(1.0)):
    return proven([(releases, count)], DELTA, conditions, view="sum").value


def test_the_sums_credit_is_that_of_the_weaker_run(ledger):
    ledger.set_budget("data", Budget(100.0, DELTA, "sum"))
    many, few = Conditions(encoded=True, cohort_size=50), Conditions(encoded=True, cohort_size=20, colluders=4)
    ledger.charge("one", "data", all_of(["ann"], gaussian(1.0), 3), rounds=(0, 3), conditions=many)
    assert spent(ledger).epsilon == pytest.approx(sum_epsilon(3, many))
    ledger.charge("one", "data", all_of(["ann"], gaussian(1.0), 2), rounds=(3, 5), conditions=many)
    assert spent(ledger).epsilon == pytest.approx(sum_epsilon(5, many))
    ledger.charge("two", "data", all_of(["ann"], gaussian(1.0), 2), rounds=(0, 2), conditions=few)
    assert spent(ledger).epsilon == pytest.approx(sum_epsilon(7, few))
    ledger.charge("three", "data", all_of(["ann"], gaussian(1.0), 1), rounds=(0, 1))  # nothing known: no credit
    assert spent(ledger).epsilon == pytest.approx(epsilon((gaussian(1.0), 8)))


def local_steps(*rates, noise_std=3.0):
    (release,) = gaussian(noise_std, uses=4)
    return (release._replace(rates=rates),)


def test_rates_are_kept_and_without_them_no_credit_is_taken(ledger, path):
    """R6': the ledger's ε of sums is the accountant's, from the rates of every round."""
    falling, convex = (
        local_steps(1.0, 0.5, 0.4, 0.3),
        Conditions(encoded=True, cohort_size=10, convex=True, smoothness=1.0),
    )
    ledger.set_budget("data", Budget(100.0, DELTA, "sum"))
    ledger.charge("run", "data", all_of(["ann"], falling, 5), rounds=(0, 5), conditions=convex)
    again = Ledger(path)
    assert again.history("data")[-1].charges[0].participations == ((falling, 5),)
    assert spent(again).epsilon == pytest.approx(sum_epsilon(5, convex, falling))
    assert spent(again).epsilon < 0.9 * epsilon((falling, 5))
    # one rate for all steps is another thing, and so is none
    assert sum_epsilon(5, convex, local_steps(1.0)) < sum_epsilon(5, convex, falling)
    assert sum_epsilon(5, convex, local_steps()) == pytest.approx(epsilon((falling, 5)))


def test_entries_of_before_the_rates_get_no_credit():
    """They hold the first rate times the smoothness, which says nothing of the rates that follow."""
    new = encode_charges(
        all_of(["ann"], local_steps(), 5), (0, 5), Conditions(encoded=True, cohort_size=10, convex=True)
    )
    old = new.replace('"convex":true', '"convex":true,"step_lipschitz":0.1,"step_smoothness":0.5')
    assert old != new
    charged = decode_charges(old)
    assert charged == decode_charges(new)
    ((releases, count),) = charged.charges()[0].participations
    assert sum_epsilon(count, charged.conditions, releases) == pytest.approx(epsilon((releases, 5)))


def test_discrete_noise_is_charged_with_its_grid(ledger):
    """The ledger knows that neighbours' vectors were rounded: as much as the accountant, never less."""
    coarse = Conditions(encoded=True, cohort_size=4, lattice=accounting.Lattice(0.1, 1000))
    mine = all_of(["ann"], gaussian(9.0), 3)
    ledger.charge("one", "data", mine, rounds=(0, 3), conditions=coarse)
    alone = {view: proven([(gaussian(9.0), 3)], DELTA, coarse, view=view).value for view in ("upload", "sum")}
    for view, value in alone.items():
        assert spent(ledger, view=view).epsilon == pytest.approx(value)
    assert alone["upload"] > 2 * epsilon((gaussian(9.0), 3))
    ledger.charge("two", "data", mine, rounds=(0, 3), conditions=Conditions(encoded=True, cohort_size=4))
    for view, value in alone.items():
        assert spent(ledger, view=view).epsilon > value


def test_nothing_assumed_is_counted(ledger):
    steps = local_steps(1.0)
    assumed = Conditions(encoded=True, cohort_size=10, assume=True, participation=accounting.binomial(5, 0.1))
    assert sum_epsilon(5, assumed, steps) < sum_epsilon(5, Conditions(), steps) * 0.9
    ledger.set_budget("data", Budget(100.0, DELTA, "sum"))
    ledger.charge("run", "data", all_of(["ann"], steps, 5), rounds=(0, 5), conditions=assumed)
    assert spent(ledger).epsilon == pytest.approx(epsilon((steps, 5)))


def test_exposed_uploads_add_up_over_runs_and_not_inside_one(ledger):
    releases = gaussian(2.0) + gaussian(20.0, channel="downlink")
    ledger.set_budget("data", Budget(100.0, DELTA, "broadcast"))

    def expected(count, exposures):
        return proven([(releases, count)], DELTA, Conditions(exposures=exposures), view="broadcast").value

    for run, rounds, total, exposed in [("a", (0, 3), 3, 2), ("a", (3, 6), 6, 2), ("b", (0, 3), 9, 4)]:
        ledger.charge(run, "data", all_of(["ann"], releases, 3), rounds=rounds, conditions=Conditions(exposures=2))
        assert spent(ledger).epsilon == pytest.approx(expected(total, exposed)), run
    assert expected(9, 2) < expected(9, 4) < epsilon((releases, 9))


def test_shuffled_epochs_do_not_continue_over_runs(ledger):
    """Ten batches an epoch: five batches use a record at most once, in each run that shuffles anew."""
    conditions = Conditions(own_epochs=True)
    terms = {"adjacency": "replace-one"}
    plain = (Release("uplink", 20.0, 1.0, 1, Sampling("full", 1.0, "replace-one"), "test"),)

    def uses(count):
        return pytest.approx(epsilon((plain, count), **terms), rel=1e-6)

    def charge(run, rounds):
        ledger.charge(
            run, "data", all_of(["ann"], shuffled(), rounds[1] - rounds[0]), rounds=rounds, conditions=conditions
        )
        return spent(ledger, **terms).epsilon

    assert charge("one", (0, 5)) == uses(1)
    assert charge("one", (5, 9)) == uses(1), "the epoch goes on inside a run"
    assert charge("two", (0, 1)) == uses(2), "another run shuffles anew"
    naive = epsilon((shuffled(), 10), conditions=conditions, **terms)
    assert naive == uses(1), "ten batches of one run are one epoch"
    assert charge("one", (8, 9)) == uses(3), "rounds done again may be shuffled again"
    assert charge("one", (9, 18)) == uses(3), "and their epoch goes on"
    assert charge("one", (18, 19)) == uses(4)
    ledger.charge("three", "data", all_of(["ann"], plain, 2), rounds=(0, 2))
    assert spent(ledger, **terms).epsilon == uses(6), "other kinds of batches compose with it"
    other = shuffled(20.0, 20, 100)
    ledger.charge("four", "data", all_of(["ann"], other, 5), rounds=(0, 5), conditions=conditions)
    assert spent(ledger, **terms).epsilon == uses(7), "and so do epochs of another batch size"
    assert spent(ledger).epsilon == uses(7), "stated for a replacement, a blank costs as much"
    assert spent(ledger, adjacency="add/remove").epsilon == math.inf, "no such neighbours (G3)"


def test_shuffled_runs_get_no_credit_of_sums_once_there_are_two(ledger):
    conditions = Conditions(encoded=True, cohort_size=10, own_epochs=True)
    for run in ("one", "two"):
        ledger.charge(run, "data", all_of(["ann"], shuffled(), 10), rounds=(0, 10), conditions=conditions)
    assert spent(ledger, view="sum").epsilon == spent(ledger, view="upload").epsilon


def test_joined_data_sets_are_spent_as_one_and_the_joining_is_labelled(ledger, path):
    ledger.charge("first", "d" * 16, all_of(["ann"], gaussian(), 5), rounds=(0, 5))
    ledger.charge("second", "e" * 16, all_of(["ann", "bob"], gaussian(8.0), 4), rounds=(0, 4))
    ledger.identify("e" * 16, name="d" * 16)
    for each in (ledger, Ledger(path)):
        for name in ("d" * 16, "e" * 16):
            row = spent(each, dataset=name)
            assert row.epsilon == pytest.approx(epsilon((gaussian(), 5), (gaussian(8.0), 4)), rel=1e-12)
            assert (row.participations, row.runs) == (9, ("first", "second"))
            assert "joined" in row.not_covered
        assert spent(each, "bob", "d" * 16).epsilon == pytest.approx(epsilon((gaussian(8.0), 4)), rel=1e-12)
    # A run that goes on keeps its place, on the joined account: rounds made before are made again.
    ledger.charge("second", "e" * 16, all_of(["ann"], gaussian(8.0), 1), rounds=(4, 5))
    assert len(ledger._book.account("d" * 16, "ann").counts) == 2
    ledger.charge("second", "e" * 16, all_of(["ann"], gaussian(8.0), 1), rounds=(4, 5))
    assert len(ledger._book.account("d" * 16, "ann").counts) == 3
    assert spent(ledger, dataset="d" * 16).epsilon == pytest.approx(
        epsilon((gaussian(), 5), (gaussian(8.0), 6)), rel=1e-12
    )


@pytest.mark.parametrize(("kept", "gone"), [(2.0, 3.0), (3.0, 2.0)])
def test_joined_data_sets_keep_the_stricter_budget(ledger, path, kept, gone):
    for client in (None, "ann"):
        ledger.set_budget("d" * 16, Budget(kept, DELTA), client)
        ledger.set_budget("e" * 16, Budget(gone, DELTA), client)
    ledger.identify("e" * 16, name="d" * 16)
    for each in (ledger, Ledger(path)):
        for name in ("d" * 16, "e" * 16):
            assert each.budget(name) == each.budget(name, "ann") == Budget(2.0, DELTA)
