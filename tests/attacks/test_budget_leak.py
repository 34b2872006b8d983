"""A party refuses a round because its budget is spent, and the server hears what other projects spent."""

import numpy as np
import pytest

from dither.accounting.ledger import Budget, Charge, Ledger
from dither.errors import BudgetExhausted
from dither.federation.party import _for_the_server
from dither.types import Release, Sampling


def spent(folder, rounds):
    """What a party's ledger says of a run when another project has used up that many rounds of its budget."""
    ledger = Ledger(folder / f"{rounds}.sqlite")
    dataset = ledger.fingerprint(np.arange(2))
    release = (Release("uplink", 2.0, 1.0, 1, Sampling("full", 1.0, "add/remove"), "x"),)
    ledger.charge("secret-other-project", dataset, [Charge("every record", [(release, rounds)])], rounds=(0, 1))
    ledger.set_budget(dataset, Budget(5.0, 1e-5, "upload", "add/remove"))
    with pytest.raises(BudgetExhausted) as caught:
        ledger.charge("fedrun", dataset, [Charge("every record", [(release, 9)])], rounds=(0, 1))
    return caught.value


def test_a_budget_refusal_says_nothing_of_other_projects(tmp_path):
    heard = {_for_the_server(spent(tmp_path, rounds), "round") for rounds in (2, 3)}
    assert heard == {"this party's budget does not allow it"}
