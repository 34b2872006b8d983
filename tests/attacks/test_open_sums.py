"""A ledger counts what was seen, not what secure aggregation would have hidden."""

from dither.accounting.ledger.runs import Budget, Ledger, Spending
from dither.experiment.build import build_experiment
from dither.spec import Spec

VALUES = {
    "method": "cpfed",
    "num_clients": 8,
    "cohort_size": 8,
    "num_rounds": 4,
    "local_steps": 1,
    "batch_sampling": "full",
    "data.name": "breast-cancer",
    "data.features": "all",
    "privacy.noise": "given",
    "privacy.noise_std": 0.5,
}


def charge(ledger: Ledger, mode: str, dataset: str) -> int:
    """How many of four rounds can be paid."""
    experiment = build_experiment(Spec().with_values({**VALUES, "secagg.mode": mode}))
    clients = [f"client {number}" for number in range(8)]
    account = Spending(ledger, experiment.accountant(), run=mode, dataset=dataset, clients=clients, replay=False)
    return account.pay(0, 4)


def test_a_run_in_the_open_is_charged_for_its_uploads_whatever_the_budget_names(tmp_path):
    """The view was compared with secagg.mode when a run began, for the budget of the whole data set: a client's
    own budget, or one that was set later, counted the others' noise in sums that nobody hid."""
    ledger = Ledger(tmp_path / "ledger.sqlite", anchored=False)
    for mode in ("off", "ideal"):
        charge(ledger, mode, mode)
    spent = {(mode, view): ledger.spent(mode, "client 0", view=view)[0].epsilon
             for mode in ("off", "ideal") for view in ("upload", "sum")}  # fmt: skip
    assert spent["off", "sum"] == spent["off", "upload"] == spent["ideal", "upload"]
    assert spent["ideal", "sum"] < 0.7 * spent["ideal", "upload"]
    budget = Budget(0.5 * (spent["ideal", "sum"] + spent["ideal", "upload"]), 1e-5, "sum")
    for mode in ("off", "ideal"):
        ledger.set_budget(f"other {mode}", budget, "client 0")
    assert charge(ledger, "ideal", "other ideal") == 4
    assert charge(ledger, "off", "other off") < 4
