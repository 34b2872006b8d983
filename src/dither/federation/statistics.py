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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dither.accounting.ledger import Charge
from dither.accounting.ledger.runs import EVERY_RECORD, Ledger, data_id
from dither.errors import FederationError
from dither.experiment import counting
from dither.experiment.build import large_delta
from dither.experiment.counting import NAMES, PURPOSES, Columns, Institution, Question
from dither.experiment.evaluation import score_columns
from dither.experiment.folder import read_checked, write_checked
from dither.federation.agreement import (
    Agreement,
    PartyData,
    Terms,
    check_json,
    collusion_notes,
    least_clients,
    listed,
    require,
    typed,
)
from dither.privacy.discrete import Words
from dither.secagg.roster import Rules
from dither.spec import Spec

if TYPE_CHECKING:
    import pandas as pd

    from dither.federation.messages import SignedMessage

LOCAL = "local, not private: "  # how a line begins that tells the owner about records
MODULUS_BITS = 64  # counts reach 2^31 records times 2^16 units
_FORMAT = 1
_ADVICE = "this party no longer knows what it answered: go on without it, or start a new run"


@dataclass(frozen=True)
class StatisticsTerms(Terms):
    """What parties agree to have counted."""

    federation: str
    run: str
    purpose: str
    epsilon: float
    delta: float
    spec: Spec
    names: tuple[str, ...]
    sizes: tuple[int, ...]  # records of each party that are counted
    trained: Agreement | None = None  # evaluation: what the model was trained under

    def to_dict(self) -> dict[str, Any]:
        trained = None if self.trained is None else self.trained.to_dict()
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items()}
        return {"format": _FORMAT, **plain, "spec": self.spec.to_dict(), "trained": trained}

    @classmethod
    def from_dict(cls, received: Mapping[str, Any]) -> StatisticsTerms:
        """Terms from JSON that anybody may have written."""
        check_json(received)
        require(received.get("format") == _FORMAT, f"has format {received.get('format')!r}; this reads {_FORMAT}")
        trained, spec = received.get("trained"), received.get("spec")
        if not isinstance(trained, dict | None) or not isinstance(spec, dict):
            raise FederationError("the agreement cannot be read: its spec or the trained one is not a table")
        return cls(
            federation=typed(received, "federation", str),
            run=typed(received, "run", str),
            purpose=typed(received, "purpose", str),
            epsilon=float(typed(received, "epsilon", float)),
            delta=float(typed(received, "delta", float)),
            spec=Spec.from_any(spec),
            names=listed(received, "names", str),
            sizes=listed(received, "sizes", int),
            trained=None if trained is None else Agreement.from_dict(trained),
        ).check()

    def check(self) -> StatisticsTerms:
        """Itself, or an error where the parts do not fit together."""
        counting.check_budget(self.epsilon, self.delta)
        require(self.purpose in PURPOSES, f"counts for {self.purpose!r}; known: {', '.join(PURPOSES)}")
        require(
            (self.purpose == "evaluation") == (self.trained is not None), "evaluates no model, or one too many"
        )
        parties = len(self.names) == len(self.sizes) == self.spec.num_clients == self.spec.cohort_size
        require(parties and len(set(self.names)) == len(self.names), "does not ask each of its parties once")
        require(min(self.sizes) >= 1 and max(self.sizes) < 2**31, "has a party without records, or too many")
        plain = self.run.isascii() and self.run.isalnum() and len(self.run) <= 64
        require(plain, f"has run {self.run[:80]!r}; use up to 64 letters and digits")
        return self

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

    def describe(self, name: str) -> list[tuple[str, str]]:
        """The terms in plain words, for the owner of one party's data."""
        what = {
            "schema": "what the columns hold, bounds, scales and categories, for a schema",
            "statistics": "counts, means, quantiles and categories of the columns",
            "evaluation": "how well the trained model predicts your records that training left out",
        }
        number = self.number(name)
        counts = "counts with your noise, readable by the server"
        if self.rules is not None:
            counts = "masked counts with your noise; the server learns the sum over all parties"
        rows = [
            ("counted", what[self.purpose]),
            ("your records", f"{self.sizes[number]:,}; this count is shown to everybody"),
            ("parties", ", ".join(f"{each} ({n:,})" for each, n in zip(self.names, self.sizes, strict=True))),
            ("what leaves", counts),
        ]
        if self.lists_names:
            rows.append(("also", "the names of your columns, and of categories that enough of your records have"))
        safe, warning = collusion_notes(self.spec)
        rows += [("collusion", safe)] * bool(safe) + [("WARNING", warning)] * bool(warning)
        rows.append(("proven ε", f"at most {self.epsilon:.3g} at δ = {self.delta:g} (zero-out) against anybody"))
        asked = self.spec.with_values({"privacy.delta": self.delta})
        rows += [("WARNING", text) for text in large_delta(asked, self.sizes[number], federated=True)]
        if self.spec.randomness == "seeded":
            rows.append(("WARNING", "a test: the noise comes from a public seed and protects nothing"))
        return [*rows, ("digest", self.digest)]


class PartyStatistics:
    """One party's answers under one set of terms. What it has answered is on the disk before it is sent."""

    # reason: a party's records, memory and account, and its owner's ear
    def __init__(
        self,
        terms: StatisticsTerms,
        source: PartyData,
        ledger: Ledger,
        folder: Path,
        name: str,
        say: Callable[[str], None],
    ) -> None:
        self.agreement, self.client, self._say = terms, terms.number(name), say
        self._source, self._ledger, self._folder = source, ledger, folder
        self._dataset = data_id(ledger, path=str(source.path))
        mu, slip = counting.mu_and_slip(terms.epsilon, terms.delta, lists_names=terms.lists_names)
        self._mu, self._slip, self._words = mu, slip, terms.words(self.client)
        self._columns: Columns | None = None
        charged = {
            entry.rounds[0]
            for entry in ledger.history(self._dataset)
            if entry.kind == "charge" and entry.run == self._run
        }
        if not charged <= {int(number) for number in self._answers()}:
            raise FederationError(
                f"this party has answered questions of run {terms.run[:8]} that its folder does not remember: it "
                "was deleted or restored from a copy. Go on without this party, or start a new run"
            )

    @property
    def _run(self) -> str:
        return f"{self.agreement.purpose}-{self.agreement.run}"

    @property
    def header(self) -> list[str]:
        """The names of the columns; public."""
        if self._source.table is None:
            raise FederationError(f"{self._source.name!r} holds arrays; statistics are of tables")
        return [str(name) for name in self._source.table.columns]

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
            counted = institution.names if question.kind == NAMES else institution.answer
            answers[str(index)]["answer"] = saved_answer = _plain(counted(question))
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
        self._ledger.charge(
            self._run,
            self._dataset,
            charges,
            rounds=(index, index + 1),
            plan=lambda: whole,
        )

    def _table(self, message: SignedMessage) -> Columns:
        """The party's table; for an evaluation what the model says of the records that training left out."""
        if self.agreement.trained is not None:
            if self._columns is None:
                scored = _scored(self.agreement.trained, self._source, message)
                told = f"on {len(scored):,} of your records that training left out, {_own(scored)}"
                self._say(f"{LOCAL}{told}")
                self._columns = Columns(scored)
            return self._columns
        if self._columns is None:
            if self._source.table is None:
                raise FederationError(f"{self._source.name!r} holds arrays; statistics are of tables")
            self._columns = Columns(self._source.table)
        return self._columns

    def _answers(self) -> dict[str, Any]:
        path = self._folder / "answers.json"
        if not path.is_file():
            return {}
        answers: dict[str, Any] = read_checked(path, _ADVICE)["answers"]
        return answers

    def _save(self, answers: Mapping[str, Any]) -> None:
        write_checked(self._folder / "answers.json", {"answers": dict(answers)})


def _plain(answer: np.ndarray | list[list[str]]) -> list[Any]:
    return answer.tolist() if isinstance(answer, np.ndarray) else answer


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
