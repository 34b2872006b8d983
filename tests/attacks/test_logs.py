"""Logs of a party that are collected elsewhere (`dither join --json`) hold nothing of a record."""

import warnings

import pandas as pd
import pytest

from dither.accounting.ledger.runs import Ledger
from dither.errors import DataError, FederationError
from dither.federation import joining, keys, messages
from dither.federation import party as party_module
from dither.federation.party import LOCAL, REFUSALS
from tests.attacks.test_party_target import agreement_of
from tests.federation.parties import Parties, small_spec


def test_a_cell_that_does_not_fit_the_schema_is_for_the_owner_alone(tmp_path):
    """The reason quotes the cell, which helps the owner; it went into structured logs as well."""
    parties = Parties(tmp_path, small_spec())
    path = parties.file("ann")
    path.write_text(path.read_text().replace("benign", "told in confidence", 1))
    ledger = Ledger(tmp_path / "new.sqlite")
    parties.nodes["ann"] = parties.node("ann", ledger=ledger, new_ledger=True)
    with pytest.raises(FederationError, match=REFUSALS["terms"]) as told:
        parties.coordinator().run()
    assert "told in confidence" not in str(told.value)
    assert isinstance(parties.nodes["ann"].refusal, DataError)
    (said,) = [line for line in parties.said if "told in confidence" in line]
    assert said.startswith(LOCAL)
    collected: list[str] = []
    for line in parties.said:
        joining._without_records(collected.append)(line)
    assert len(collected) == len(parties.said)
    assert not any("told in confidence" in line for line in collected)


def test_an_error_that_nobody_foresaw_is_for_the_owner_alone(tmp_path, monkeypatch):
    """A library's own words may quote a cell, too."""
    parties = Parties(tmp_path, small_spec())

    def encode(*arguments, **options):
        raise ValueError("could not convert 'told in confidence'")

    monkeypatch.setattr(parties.nodes["ann"].source, "encode", encode)
    with pytest.raises(FederationError, match=REFUSALS["terms"]):
        parties.coordinator().run()
    (said,) = [line for line in parties.said if "told in confidence" in line]
    assert said.startswith(LOCAL)
    assert isinstance(parties.nodes["ann"].refusal, DataError)  # of which `join --json` says nothing more


def test_a_full_disk_is_told_where_logs_are_collected(tmp_path, monkeypatch):
    """It is no record's: but a container, which logs with --json, said nothing of it."""
    parties = Parties(tmp_path, small_spec())

    def full(*arguments):
        raise OSError(28, "No space left on device", "/srv/dither/keys/runs")

    monkeypatch.setattr(party_module, "record_approval", full)
    with pytest.raises(FederationError, match=REFUSALS["terms"]):
        parties.coordinator().run()
    collected: list[str] = []
    joining._without_records(collected.append)(parties.said[-1])
    assert collected == [
        "refused: '/srv/dither/keys/runs': No space left on device; mend that, and run the same command again"
    ]


def test_no_warning_tells_of_a_record(tmp_path):
    """Only for a table with so large a number NumPy warned of an overflow, on a stream that may be collected; and
    the party refused if its warnings were errors."""
    parties = Parties(tmp_path, small_spec())
    table = pd.read_csv(parties.file("ann"))
    table.iloc[0, 0] = 1e99
    table.to_csv(parties.file("ann"), index=False)
    party = parties.node("ann", ledger=Ledger(tmp_path / "new.sqlite"), new_ledger=True)
    agreement = agreement_of(parties, parties.spec.with_values({"data.encoding": "standard"}))
    column = agreement.schema["columns"][0] | {"bounds": [-1e100, 1e100], "standard": [0.0, 1.0]}
    agreement.schema["columns"][0] = column
    identity = keys.Identity.load(tmp_path / "keys" / "server")
    body = messages.pack(
        identity,
        federation=agreement.federation,
        kind="terms",
        sender=messages.SERVER,
        to="ann",
        fields={"terms": agreement.to_dict()},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        party.answer(body)
    assert party.refusal is None
