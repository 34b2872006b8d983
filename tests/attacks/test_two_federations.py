"""One operator, two federations, one ledger: the server chooses the number of a run, so it can choose it twice."""

from types import SimpleNamespace

import pytest

from dither.accounting.ledger import Budget, Ledger
from dither.errors import FederationError
from dither.federation import messages, surveys
from dither.federation.agreement import PartyData
from dither.federation.party import Party
from tests.federation.test_statistics import QUESTIONS, Clinics


class SameTables(Clinics):
    """Clinics whose tables and ledgers lie beside the federation, for another one to use."""

    def file(self, name):
        return self.folder.parent / f"{name}.csv"

    def node(self, name, **changes):
        return Party(
            self.folder / "keys" / "parties" / name,
            PartyData(self.file(name)),
            ledger=Ledger(self.folder.parent / f"{name}.sqlite"),
            approve=self.approve,
            seeded=True,
            **changes,
        )


@pytest.fixture
def federations(tmp_path, monkeypatch):
    monkeypatch.setattr(messages, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(surveys, "secrets", SimpleNamespace(token_hex=lambda size: "ab" * size))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    return SameTables(tmp_path / "one"), SameTables(tmp_path / "two")


def test_a_run_number_used_in_two_federations_is_charged_in_both(federations):
    """Statistics of the second federation, at eight times the ε of the first, were not charged: a run of this
    number was registered."""
    one, two = federations
    first, second = one.asking((1.0, 1e-5)), two.asking((8.0, 1e-5))
    assert first.agreement.run == second.agreement.run
    first.total(QUESTIONS[0])
    (spent,) = one.spent("ann")
    assert spent.epsilon == pytest.approx(1.0, rel=1e-3)
    second.total(QUESTIONS[0])
    (spent,) = one.spent("ann")
    assert spent.epsilon > 8.0


def test_the_budget_holds_for_both_together(federations):
    """A budget for one of them is no budget for both."""
    one, two = federations
    first, second = one.asking((1.0, 1e-5)), two.asking((1.0, 1e-5))
    for name in ("ann", "bob", "cat"):
        one.nodes[name].ledger.set_budget(one.nodes[name].dataset, Budget(1.2, 1e-5))
    first.total(QUESTIONS[0])
    with pytest.raises(FederationError, match="was not answered by all parties"):
        second.total(QUESTIONS[0])
