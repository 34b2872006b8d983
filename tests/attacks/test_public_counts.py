"""H4: add/remove while counts are public. The agreement of a federation shows every party's record count, so they
alone tell a neighbour with one record more from one without: no ε under add/remove is true there."""

import math

import numpy as np
import pytest

from dither import accounting
from dither.accounting.ledger import Budget, Charge, Ledger
from dither.errors import BudgetExhausted, FederationError, NoProof, SpecError
from dither.experiment import build
from dither.federation.agreement import Agreement, federated_spec
from dither.spec import Spec
from tests.auditing.grid import small_dataset, small_spec


def agreement_of(sizes, **changes) -> Agreement:
    base = Spec.from_preset("adult").with_values({"num_clients": 2, "cohort_size": 2, **changes})
    spec = federated_spec(base, 2, "own")
    return Agreement("f", "r1", spec, ("ann", "bob"), tuple(sizes), None, ("no", "yes"), 3, ()).check()


def absent(rows):
    return [row for row in rows if row.adjacency == "add/remove"]


def test_no_epsilon_under_add_remove_where_everybody_reads_the_counts():
    one, other = agreement_of((4000, 4000)), agreement_of((4001, 4000))
    assert one.digest != other.digest  # what everybody sees tells the neighbours apart
    rows = absent(one.experiment().accountant().table())
    assert {row.value for row in rows} == {math.inf}
    assert all("count to all parties" in row.detail and "use zero-out" in row.detail for row in rows)


def test_terms_name_neighbours_of_equal_counts():
    assert agreement_of((9, 9), **{"privacy.adjacency": "auto"}).spec.privacy.adjacency == "zero-out"
    with pytest.raises(SpecError, match="use 'zero-out'"):
        agreement_of((9, 9), **{"privacy.adjacency": "add/remove"})
    for named in ("auto", "add/remove"):
        found = agreement_of((9, 9)).to_dict()
        found["spec"]["privacy"]["adjacency"] = named
        with pytest.raises(FederationError, match="use 'zero-out'"):
            Agreement.from_dict(found)


COINS = {"batch_sampling": "poisson-full", "sampling_rate": 0.2, "local_steps": 1}
GIVEN = {"privacy__noise": "given", "privacy__noise_std": 0.5, "privacy__adjacency": "zero-out"}


@pytest.mark.parametrize(
    ("method", "changes", "reason"),
    [
        ("cpfed", {"batch_sampling": "poisson"}, "cut at a length"),
        ("cpfed", {"sampling_rate": 0.0}, "sampling rate is batch_size over the count"),
        ("cpfed", {"batch_sampling": "full", "sampling_rate": 0.0}, "full batches"),
        ("cpfed", {"local_steps": 2}, "longest batch"),
        ("cpfed", {"privacy__clip_quantile": 0.5, "randomness": "os"}, "an adaptive clip is counted"),
        ("cpfed", {"data__split": "per-client"}, "how many records were pooled"),
        ("cpfed", {"data__part": "private", "data__public_fraction": 0.1}, "how many records were pooled"),
        ("concentrated", {}, "depend on the counts"),
        ("dp-scaffold", {}, "depend on the counts"),
        ("nbafl", {"method_options__param_clip": 1.0, "privacy__clip": "none"}, "depend on the counts"),
    ],
)
def test_no_epsilon_under_add_remove_where_something_follows_a_count(method, changes, reason):
    spec = small_spec(method, **{**COINS, **GIVEN, **changes})
    rows = build.build_experiment(spec, dataset=small_dataset()).accountant().table()
    assert {row.value for row in absent(rows)} == {math.inf}
    assert all(reason in row.detail for row in absent(rows))
    assert all(math.isfinite(row.value) for row in rows if row not in absent(rows))


@pytest.mark.parametrize("method", ["cpfed", "dp-sgd", "dp-dsgd"])
@pytest.mark.parametrize("noise", ["given", "paper", "proven"])
@pytest.mark.parametrize("randomness", ["seeded", "os", "seeded, adaptive clip"])
def test_what_ignores_counts_is_the_same_with_other_counts(method, noise, randomness):
    """Where add/remove is proved, noise, weights, claim, ε and warnings must not move when a client has a record
    more. A warning about δ named the count, and float32 errors of small clients followed from it."""
    changes = {**COINS, **GIVEN, "privacy__noise": noise, "privacy__adjacency": "add/remove"}
    changes |= {"randomness": randomness.partition(",")[0], "privacy__delta": 0.05}
    changes |= {"privacy__clip_quantile": 0.5} if "clip" in randomness else {}
    changes |= {"privacy__noise_std": 0.5} if noise == "given" else {"privacy__noise_std": 0.0}
    spec = small_spec(method, data__records_per_client=20, **changes)
    seen = []
    for records in (20, 21):
        own = spec.with_values({"data.records_per_client": records})
        experiment = build.build_experiment(own, dataset=small_dataset())
        rows = experiment.accountant().table()
        assert all(math.isfinite(row.value) for row in absent(rows))
        hyper = {name: np.asarray(value).tolist() for name, value in experiment.prepared.hyper.items()}
        seen.append(
            (hyper, experiment.prepared.claim, experiment.plan.weights, experiment.prepared.num_rounds, rows)
        )
    assert seen[0] == seen[1]


def test_dither_chooses_nothing_by_counts_that_are_secret():
    """Its batch size, which spec.toml holds, was a share of the count."""
    asked = {"data.path": "own.csv", "data.label": "y", "privacy.adjacency": "add/remove"}
    with pytest.raises(SpecError, match="chooses by the record counts"):
        build.choose({**asked, "batch_sampling": "poisson-full"})


@pytest.mark.parametrize("changes", [{"batch_sampling": "poisson"}, {"privacy__clip_quantile": 0.5}])
def test_noise_is_not_calibrated_to_neighbours_without_a_proof(changes):
    """The digits of the noise followed from the largest count where float32 counts for an adaptive clip."""
    spec = small_spec("cpfed", **{**COINS, "privacy__adjacency": "add/remove", "randomness": "os", **changes})
    with pytest.raises(NoProof, match="use zero-out"):
        build.build_experiment(spec, dataset=small_dataset())


def test_an_old_add_remove_budget_keeps_its_entries_and_pays_for_no_run_that_shows_counts(tmp_path):
    coins = accounting.Conditions()  # what entries before this rule say of counts: nothing
    poisson = build.build_experiment(small_spec("cpfed", **{**COINS, **GIVEN}), dataset=small_dataset())
    released = poisson.prepared.build(poisson.prepared.hyper).releases(build.RoundInfo(0, 0, 24, 3))
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.set_budget("data", Budget(9.0, 1e-5, "upload", "add/remove"))
    ledger.charge("old", "data", [Charge("ann", [(released, 2)])], rounds=(0, 2), conditions=coins)
    (before,) = ledger.spent("data")
    assert 0 < before.epsilon < 9
    assert before.adjacency == "add/remove"
    shown = accounting.Conditions(counts_shown="a federation shows every party's count to all parties")
    with pytest.raises(BudgetExhausted, match=r"dither budget set DATA .* --adjacency zero-out"):
        ledger.charge("new", "data", [Charge("ann", [(released, 1)])], rounds=(0, 1), conditions=shown)
    ledger.set_budget("data", Budget(9.0, 1e-5), raising=True)
    ledger.charge("new", "data", [Charge("ann", [(released, 1)])], rounds=(0, 1), conditions=shown)
    (after,) = Ledger(tmp_path / "ledger.sqlite").spent("data")  # read again from the disk
    assert after.adjacency == "zero-out"
    assert before.epsilon < after.epsilon < 9
    ledger.set_budget("data", Budget(9.0, 1e-5, "upload", "add/remove"), raising=True)
    assert ledger.spent("data")[0].epsilon == math.inf  # one run that shows counts is enough
