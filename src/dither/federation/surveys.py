"""The server's side of private statistics, and of a project with one ε: schema, training, evaluation.

`StatisticsCoordinator` asks the parties of a federation what `Counting` asks in a simulation, by the same secure
sums as a round of training: a question is a round whose upload is a vector of counts. `FederatedProject` ties a
private schema, the training and a private evaluation together, with one ε for all (`privacy.project_epsilon`).
"""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from dither import data
from dither.data.schema import Schema, SchemaPrivacy
from dither.errors import FederationError, SpecError, did_you_mean
from dither.experiment import counting
from dither.experiment.counting import MOST_NAMES, Question
from dither.experiment.defaults import TUNED, federated_defaults
from dither.experiment.evaluation import private_scores
from dither.experiment.folder import read_checked, write_checked, write_text
from dither.experiment.private_schema import Wanted, check_classes, estimate_schema
from dither.experiment.start import Budgets, calibrated
from dither.experiment.statistics import Statistics, describe
from dither.federation.agreement import Agreement, StatisticsTerms, federated_spec, held_out_sizes
from dither.federation.messages import SignedMessage
from dither.federation.server import SCORES, Coordinator, leave_out, without_records
from dither.federation.state import Journal
from dither.secagg.graph import Rules
from dither.secagg.server import ServerSession
from dither.spec import Spec

_ADVICE = "start a new run"
STATISTICS = "statistics.json"


class _Asked(NamedTuple):
    """What a question has instead of an engine: how long its answer is, and what is broadcast."""

    dimension: int
    leaves: list[np.ndarray]

    def message(self) -> list[np.ndarray]:
        return self.leaves

    def sum(self, rows: list[np.ndarray]) -> np.ndarray:
        return np.asarray(np.sum(rows, axis=0))


class StatisticsCoordinator(Coordinator):
    """Asks all parties of a coordinator for one purpose, within (ε, δ): a `counting.Counter`. Every party must
    answer every question. Answers are on the disk: a server that is started again asks none of them twice."""

    _round_kind = "question"
    agreement: StatisticsTerms
    engine: _Asked  # type: ignore[assignment]

    def __init__(
        self,
        coordinator: Coordinator,
        purpose: str,
        budget: tuple[float, float],
        trained: tuple[Agreement, list[np.ndarray]] | None = None,
    ) -> None:
        vars(self).update(vars(coordinator))  # the same mailbox, keys and parties
        self.journal = Journal(coordinator.journal.path / purpose)
        self.journal.path.mkdir(parents=True, exist_ok=True)
        self._trained = trained[0] if trained else None
        self._leaves = trained[1] if trained else []
        self._headers: dict[str, list[str]] = {}
        self.agreement = self._agree_to_count(purpose, budget)
        self.records = sum(self.agreement.sizes)
        self._session = self._enrol()
        if not self._begun:
            self._save({"headers": self._headers, "answers": []})
        self._mu, _ = counting.mu_and_slip(*budget, lists_names=self.agreement.lists_names)
        self._index = -1

    @property
    def _begun(self) -> bool:
        return (self.journal.path / "answers.json").is_file()

    @property
    def header(self) -> list[str]:
        """The columns that all parties have."""
        headers = {name: self._saved()["headers"][name] for name in self.agreement.names}
        first, *others = headers.values()
        shared = [name for name in first if all(name in other for other in others)]
        label = self.asked_spec.data.label
        counts = Counter(name for each in headers.values() for name in each if name != label)
        if shared and (not label or label in shared) and (set(shared) - {label} or not counts):
            return shared
        # The label, or what most tables have.
        needed = label if label and label not in shared else max(counts, key=counts.__getitem__, default="")
        away = [name for name, each in headers.items() if needed not in each]
        if label and needed == label and len(away) == len(headers):
            raise FederationError(
                f"data.label={label!r} is in no party's table{did_you_mean(label, counts, 'check its spelling')}"
            )
        raise FederationError(
            f"{', '.join(away)}: no column {needed[:80]!r} in the table, and all need the same header; give them "
            f"one, or start a new run with {' '.join(f'--without {name}' for name in away)}"
        )

    def _agree_to_count(self, purpose: str, budget: tuple[float, float]) -> StatisticsTerms:
        """Terms that every party has accepted: those of the journal, or new ones."""
        terms = StatisticsTerms.load(self.journal.path, _ADVICE)
        if terms is not None and terms.names != self._asked:
            if self._begun:  # every party must answer every question
                members = [party.name for party in self.keyring.parties]
                others = [f"--without {name}" for name in members if name not in terms.names]
                again = f"start again with {' '.join(others) or 'no --without'}, or "
                raise FederationError(
                    f"the counting for {purpose} began with {', '.join(terms.names)}, and each of them must "
                    f"answer to its end: {again * (set(terms.names) <= set(members))}{_ADVICE}"
                )
            (self.journal.path / "secagg.json").unlink(missing_ok=True)  # one of them did not take part
            terms = None
        if terms is None:
            terms = self._new_terms(purpose, budget)
            terms.save(self.journal.path)

        def take(name: str, answer: SignedMessage) -> None:
            if terms.lists_names:
                self._headers[name] = listed = list(map(str, answer.field("columns", list)))
                if len(set(listed)) < len(listed):
                    raise FederationError("it lists a column twice")

        self._have_accepted("statistics", terms, take, upload_bytes=8 * counting.MOST_CELLS + (1 << 16))
        return terms

    @property
    def _asked(self) -> tuple[str, ...]:
        return self.parties if self._trained is None else self._trained.names

    def _new_terms(self, purpose: str, budget: tuple[float, float]) -> StatisticsTerms:
        names = self._asked
        if self._trained is not None:
            spec = self._trained.spec
        else:
            asked = self.asked_spec.with_values({"num_clients": len(names), "cohort_size": len(names)})
            spec = federated_spec(asked, len(names), "own data")
        epsilon, delta = map(float, budget)
        terms = StatisticsTerms(
            federation=self.keyring.id,
            run=secrets.token_hex(8),
            spec=spec,
            names=names,
            sizes=(),
            purpose=purpose,
            epsilon=epsilon,
            delta=delta,
            trained=self._trained,
        )
        return replace(terms, sizes=tuple(map(terms.counted, self.records_of(names)))).check()

    # Questions

    def total(self, question: Question) -> tuple[list[np.ndarray], float]:
        """The sum over the parties, column by column, and the standard deviation of its noise."""
        dimension = sum(rows * cells for rows, cells in question.shapes())

        def ask(index: int) -> list[int]:
            self._question, self.engine = question, _Asked(dimension, self._leaves)
            unanswered = f"question {index + 1} of {self.agreement.purpose} was not answered by all parties"
            try:
                result = self._collect(index, self.agreement.names)
            except FederationError as error:
                raise FederationError(f"{unanswered}: {error}") from None
            if set(result.counted) != set(self.agreement.names):
                who = ", ".join([*result.silent, *self.journal.excluded()])
                why = f"{who} did not help to open its sum" if who else "the server ended while it opened its sum"
                advice = "start a new run"
                if self._trained is not None:
                    advice += ", or end this one without scores: start it again with --without PARTY"
                raise FederationError(f"{unanswered}: {why}, and no sum is opened twice; {advice}")
            cells: list[int] = result.total.tolist()
            return cells

        cells = np.array(self._once(ask), np.int64)
        return question.split(cells), counting.total_std(question, self._mu, len(self.agreement.names))

    def names(self, question: Question) -> list[list[str]]:
        def ask(index: int) -> list[list[str]]:
            answers: dict[str, list[list[str]]] = {}

            def take(name: str, answer: SignedMessage) -> None:
                listed = answer.field("names", list)
                good = len(listed) == len(question.columns) and all(
                    isinstance(names, list) and len(names) <= MOST_NAMES and all(map(counting.is_name, names))
                    for names in listed
                )
                if not good:
                    raise FederationError("it lists names that were not asked for")
                answers[name] = listed

            fields = {"run": self.agreement.run, "round": index, "question": question.to_dict()}
            self._everybody("question", self.agreement.names, (fields, {}), take, "answer")
            return counting.fitting(counting.union([answers[name] for name in self.agreement.names]))

        listed: list[list[str]] = self._once(ask)
        return listed

    def _once(self, ask: Any) -> Any:
        """The answer to the next question, from disk if it was asked before."""
        self._index += 1
        saved = self._saved()
        if self._index == len(saved["answers"]):
            saved["answers"].append(ask(self._index))
            self._save(saved)
        return saved["answers"][self._index]

    def _saved(self) -> dict[str, Any]:
        return read_checked(self.journal.path / "answers.json", _ADVICE)

    def _save(self, content: dict[str, Any]) -> None:
        write_checked(self.journal.path / "answers.json", content)

    # In the place of a training round

    def _rules(self) -> Rules | None:
        return self.agreement.rules

    def _round_fields(self, name: str) -> dict[str, Any]:
        return {"question": self._question_fields()}

    def _question_fields(self) -> dict[str, Any]:
        return self._question.to_dict()

    def _decoded(self, session: ServerSession) -> np.ndarray:
        return np.asarray(session.open(), np.uint64).view(np.int64)

    def _checked(self, answer: SignedMessage, index: int) -> np.ndarray:
        return self._row(answer, index, "<u8").view(np.int64)


def write_statistics(coordinator: Coordinator) -> Statistics:
    """Private statistics of all columns that parties share, in statistics.json of the run folder."""
    coordinator.gather(coordinator.parties, len(coordinator.parties))
    privacy = coordinator.asked_spec.privacy
    budget = (privacy.statistics_epsilon, privacy.delta)
    asking = StatisticsCoordinator(coordinator, "statistics", budget)
    result = Statistics(describe(asking, asking.header), *budget, len(coordinator.parties))
    write_text(coordinator.journal.path / STATISTICS, result.to_json())
    return result


class FederatedProject:
    """A private schema before the training of a coordinator, and a private evaluation after it."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator, self._spec = coordinator, coordinator.asked_spec
        if not self._spec.data.label:
            raise SpecError("privacy.project_epsilon needs data.label, the name of the label column")

    @property
    def _schema(self) -> Path:
        return self._coordinator.journal.path / "schema" / "schema.toml"

    def _budgets(self, names: tuple[str, ...]) -> Budgets:
        """By the record counts that the parties agreed to first, whatever one of them says later."""
        terms = StatisticsTerms.load(self._schema.parent, _ADVICE)
        known = terms is not None and (terms.names == names or self._schema.is_file())
        counts = terms.sizes if terms and known else self._coordinator.records_of(names)
        return Budgets.split(self._spec.privacy.project_epsilon, sum(counts))

    def prepare(self) -> tuple[Spec, data.Dataset]:
        """The spec of the training, and what the server knows of the data: the schema that parties made."""
        coordinator = self._coordinator
        names = coordinator.parties
        coordinator.gather(names, len(names))
        held = zip(names, coordinator.records_of(names), strict=True)
        few = [name for name, count in held if not min(self._parts(count))]
        if few:
            raise FederationError(f"{', '.join(few)}: too few records to hold some out; {leave_out(few)}")
        budgets = self._budgets(names)
        if not self._schema.is_file():
            asking = StatisticsCoordinator(coordinator, "schema", (budgets.schema, budgets.delta))
            wanted = Wanted(self._spec.data.label, self._spec.task, self._spec.data.class_names)
            check_classes(wanted, asking.header, coordinator.records_of(names), (budgets.schema, budgets.delta))
            privacy = SchemaPrivacy(budgets.schema, budgets.delta, f"schema-{asking.agreement.run}")
            drafted = estimate_schema(asking, asking.header, wanted, privacy, "parties")
            drafted.schema.save(self._schema)
        return self._training_spec(Schema.load(self._schema), names, budgets), self.known()

    def _parts(self, count: int) -> tuple[int, int]:
        """How many of a party's records are for training, and how many for the evaluation."""
        return held_out_sizes(self._spec.with_values({"data.split": "rows"}), count)

    def known(self) -> data.Dataset:
        """What the server knows of the data once there is a schema."""
        return without_records(Schema.load(self._schema))

    def _training_spec(self, schema: Schema, names: tuple[str, ...], budgets: Budgets) -> Spec:
        """What Dither chooses for these parties, with as much ε as schema and evaluation leave."""
        asked = self._spec.with_values({"data.split": "rows"})
        sizes = tuple(self._parts(count)[0] for count in self._coordinator.records_of(names))
        chosen = federated_defaults(schema, sizes, budgets.training, budgets.delta)
        options = {key: value for key, value in chosen.items() if key.startswith("method_options.")}
        asked_for = {
            key for key, value in self._spec.flat().items() if key in TUNED and value != Spec.default(key)
        }
        values = {key: value for key, value in chosen.items() if key not in options and key not in asked_for}
        spec = asked.with_values(values).with_values(options)

        def build(spec: Spec) -> Any:
            spec = federated_spec(spec, len(names), "own data")
            classes, width = schema.label.classes, len(schema.feature_names("all"))
            return Agreement("", "plan", spec, names, sizes, schema.to_dict(), classes, width, ()).experiment()

        return calibrated(spec, build, budgets)

    def evaluate(self, agreement: Agreement) -> None:
        """Scores of the trained model on the records that parties held out, in scores.json of the run folder. None
        where a party is out for good, because every party must answer."""
        coordinator = self._coordinator
        if coordinator.gone or (coordinator.journal.path / SCORES).is_file():
            return
        coordinator.gather(agreement.names, len(agreement.names))  # a server that was started again has met few
        budgets = self._budgets(agreement.names)
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(coordinator.engine.params())]
        budget = (budgets.evaluation, budgets.delta)
        asking = StatisticsCoordinator(coordinator, "evaluation", budget, (agreement, leaves))
        schema = data.Schema.from_dict(agreement.schema or {})
        scores = private_scores(asking, agreement.classes, schema.label.bounds, *budget)
        write_text(coordinator.journal.path / SCORES, scores.to_json())
