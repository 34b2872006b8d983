"""Private statistics of a federation: parties answer questions of `experiment.counting` under terms of their own.

A party's owner approves what is counted for which purpose (a schema, statistics, an evaluation) and at which ε.
The party charges its ledger with all of it before it looks, and keeps every answer: the same question again gets
the same answer, and questions beyond the ε are refused. Counts leave as masked integers where the agreement sums
securely; names of categories leave as a list, which the noise on their counts covers.

`StatisticsTerms` is what is approved, `PartyStatistics` a party's side. The server's is in `federation.surveys`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from dither.accounting.ledger import Charge
from dither.accounting.ledger.runs import EVERY_RECORD
from dither.errors import FederationError
from dither.experiment import counting
from dither.experiment.build import large_delta
from dither.experiment.counting import NAMES, PURPOSES, Columns, Institution, Question
from dither.experiment.evaluation import score_columns
from dither.experiment.folder import read_checked, write_checked
from dither.federation.agreement import (
    Agreement,
    PartyData,
    Rows,
    Terms,
    held_out_rows,
    least_clients,
    require,
)
from dither.privacy.discrete import Words
from dither.secagg.roster import Rules

if TYPE_CHECKING:
    import pandas as pd

    from dither.federation.messages import SignedMessage
    from dither.federation.party import Party

LOCAL = "local, not private: "  # how a line begins that tells the owner about records
MODULUS_BITS = 64  # counts reach 2^31 records times 2^16 units
_ADVICE = "this party no longer knows what it answered: continue without it, or start a new run"


@dataclass(frozen=True)
class StatisticsTerms(Terms):
    """What parties agree to have counted."""

    file = "statistics.json"

    purpose: str  # type: ignore[misc]  # here it is part of the agreement
    epsilon: float
    delta: float
    trained: Agreement | None = None  # evaluation: what the model was trained under

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "trained": None if self.trained is None else self.trained.to_dict()}

    def check(self) -> Self:
        super().check()
        counting.check_budget(self.epsilon, self.delta)
        require(self.purpose in PURPOSES, f"counts for {self.purpose!r}; known: {', '.join(PURPOSES)}")
        evaluated = (self.purpose == "evaluation") == (self.trained is not None)
        require(evaluated, "evaluates no model, or one too many")
        require(self.spec.num_clients == self.spec.cohort_size, "does not ask each of its parties once")
        return self

    def counted(self, records: int) -> int:
        return records if self.trained is None else len(held_out_rows(self.trained.spec, records)[1])

    @property
    def rules(self) -> Rules | None:
        """Of secure aggregation: every party must answer, or the sum is not opened. None: sums are in the open."""
        if self.spec.aggregation == "off":
            return None
        everyone = max(len(self.names), least_clients(self.spec))
        return Rules(MODULUS_BITS, 0, self.spec.colluders, everyone, self.spec.secagg.neighbours).check()

    @property
    def lists_names(self) -> bool:
        return self.purpose != "evaluation"

    def words(self, client: int) -> Words:
        """Where a party's noise comes from."""
        return counting.noise_words(self.spec.randomness, self.spec.seed, self.purpose, client)

    def _described(self, number: int, experiment: object) -> tuple[Rows, Rows, Rows]:
        what = {
            "schema": "what the columns hold, bounds, scales and categories, for a schema",
            "statistics": "counts, means, quantiles and categories of the columns",
            "evaluation": "how well the trained model predicts your records that training left out",
        }
        counts = "counts with your noise, readable by the server"
        if self.rules is not None:
            counts = "masked counts with your noise; the server learns the sum over all parties"
        leaves = [("what leaves", counts)]
        if self.lists_names:
            leaves.append(
                ("also", "the names of your columns, and of categories that enough of your records have")
            )
        proven = f"at most {self.epsilon:.3g} at δ = {self.delta:g} (zero-out) against anybody"
        asked = self.spec.with_values({"privacy.delta": self.delta})
        warnings = [("WARNING", text) for text in large_delta(asked, self.sizes[number], federated=True)]
        return [("counted", what[self.purpose])], leaves, [("proven ε", proven), *warnings]


class PartyStatistics:
    """One party's answers under one set of terms. What it has answered is on the disk before it is sent."""

    def __init__(self, terms: StatisticsTerms, party: Party, folder: Path) -> None:
        self.agreement, self.client, self._say = terms, terms.number(party.name), party.say
        self._source, self._folder = party.source, folder
        self._ledger, self._dataset = party.ledger, party.dataset
        mu, slip = counting.mu_and_slip(terms.epsilon, terms.delta, lists_names=terms.lists_names)
        self._mu, self._slip, self._words = mu, slip, terms.words(self.client)
        self._columns: Columns | None = None
        entries = self._ledger.history(self._dataset)
        charged = {each.rounds[0] for each in entries if each.kind == "charge" and each.run == self._run}
        if not charged <= {int(number) for number in self._answers()}:
            raise FederationError(
                f"this party has answered questions of run {terms.run[:8]} that its folder does not remember: "
                f"it was deleted or restored from a copy. Continue without this party, or start a new run"
            )

    @property
    def _run(self) -> str:
        return f"{self.agreement.purpose}-{self.agreement.run}"

    @property
    def header(self) -> list[str]:
        """The names of the columns; public."""
        return [str(name) for name in self._whole_table().columns]

    def _whole_table(self) -> pd.DataFrame:
        if self._source.table is None:
            raise FederationError(f"{self._source.name!r} holds arrays; statistics need a table")
        return self._source.table

    def answer(self, message: SignedMessage) -> tuple[list[list[str]] | None, np.ndarray]:
        """(names, none) or (None, words of the noisy counts)."""
        index, question = message.field("round", int), Question.from_dict(message.field("question", dict))
        asked = hashlib.sha256(json.dumps(question.to_dict(), sort_keys=True).encode())
        for name in sorted(message.arrays):
            if name.startswith("m"):
                asked.update(name.encode() + np.ascontiguousarray(message.arrays[name]).tobytes())
        answers, digest = self._answers(), asked.hexdigest()
        saved = answers.get(str(index))
        if saved is not None and saved["question"] != digest:
            raise FederationError(f"question {index} was answered before, in other words")
        if saved is None or saved["answer"] is None:
            if index < 0 or any(int(number) > index for number in answers):
                raise FederationError(f"question {index} is over")
            left = 1.0 - sum(each["share"] for number, each in answers.items() if number != str(index))
            table = self._table(message)
            answers[str(index)] = {"question": digest, "share": question.share, "answer": None}
            self._save(answers)
            self._charge(index)
            institution = Institution(table, self._mu, self._slip, self._words)
            institution.left = left
            if question.kind == NAMES:
                saved_answer: list[Any] = institution.names(question)
            else:
                saved_answer = institution.answer(question).tolist()
            answers[str(index)]["answer"] = saved_answer
            self._save(answers)
        else:
            saved_answer = saved["answer"]
        if question.kind == NAMES:
            return saved_answer, np.zeros(0, np.uint64)
        return None, np.array(saved_answer, np.int64).view(np.uint64)

    def _charge(self, index: int) -> None:
        """Everything that the terms allow, with the first question; later ones leave a mark."""
        terms = self.agreement
        release = counting.release(terms.epsilon, terms.delta, lists_names=terms.lists_names)
        whole = [Charge(EVERY_RECORD, [((release,), 1)])]
        first = not self._ledger.is_registered(self._dataset, self._run)
        charges = whole if first else [Charge(EVERY_RECORD, [])]
        rounds = (index, index + 1)
        self._ledger.charge(self._run, self._dataset, charges, rounds=rounds, plan=lambda: whole)

    def _table(self, message: SignedMessage) -> Columns:
        """The party's table; for an evaluation, the model's predictions for the records that training left out."""
        if self._columns is None and self.agreement.trained is not None:
            scored = _scored(self.agreement.trained, self._source, message)
            told = f"on {len(scored):,} of your records that training left out, {_own(scored)}"
            self._say(f"{LOCAL}{told}")
            self._columns = Columns(scored)
        elif self._columns is None:
            self._columns = Columns(self._whole_table())
        return self._columns

    def _answers(self) -> dict[str, Any]:
        path = self._folder / "answers.json"
        if not path.is_file():
            return {}
        answers: dict[str, Any] = read_checked(path, _ADVICE)["answers"]
        return answers

    def _save(self, answers: Mapping[str, Any]) -> None:
        write_checked(self._folder / "answers.json", {"answers": dict(answers)})


def _own(scored: pd.DataFrame) -> str:
    """An institution's own exact score, for itself."""
    if "error" in scored:
        return f"the model errs by {scored['error'].mean():.4f} of the label's range on average"
    return f"the model predicts {(scored['predicted'] == scored['truth']).mean():.2%} right"


def _scored(trained: Agreement, source: PartyData, message: SignedMessage) -> pd.DataFrame:
    """What the broadcast model says of a party's records that training left out."""
    x, y = trained.encode(source, held_out=True)
    model, leaves = trained.with_parameters(lambda number: message.array(f"m{number}"))
    return score_columns(np.asarray(model.apply(leaves, x)), y, model.task, len(trained.classes))
