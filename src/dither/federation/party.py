"""A party: it answers the coordinator's messages and decides by itself what may leave.

A party trusts the server with the model alone. It computes its noise, its rounds and the proven ε from the
agreement that its owner approved, and charges its own ledger before anything is computed. It refuses whatever the
agreement does not allow: another digest, a round it was not drawn for, a round twice with another broadcast, a sum
of fewer parties than the proof counts on, a broadcast that is not finite.

The same round asked again gets the same upload again (with secure aggregation: the same words under the masks of
the new attempt), so a repetition reveals nothing new and is not charged. An upload is on the disk before it is
sent. A round whose update must not leave is over too: it is not computed again, because every refusal tells the
server something about an update.

Statistics (questions of `experiment.counting`) are charged with all that their terms allow before the first look,
and every answer is kept: the same question again gets the same answer, and questions beyond the ε are refused.

Whatever goes wrong, the server hears one of the sentences in `REFUSALS`; the reason is for the owner alone.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dither.accounting import compress
from dither.accounting.ledger import Budget, Charge, composed
from dither.accounting.ledger.runs import EVERY_RECORD, Ledger, data_id
from dither.errors import BudgetExhausted, ClientRefused, DataError, DitherError, FederationError, ProtocolAbort
from dither.experiment import build, counting
from dither.experiment.counting import NAMES, Columns, Institution, Question
from dither.experiment.evaluation import score_columns
from dither.experiment.folder import read_checked, to_json, write_checked
from dither.federation import engines, keys, messages
from dither.federation.agreement import (
    Agreement,
    PartyData,
    StatisticsTerms,
    Terms,
    approved_digest,
    digest_of,
    federated_spec,
    is_approved,
    record_approval,
    secagg_rules,
    sums_integers,
)
from dither.federation.state import (
    COMPUTED,
    PARTY_ADVICE,
    ChargedRound,
    ClientState,
    PartyStore,
    PendingUpload,
    ReleaseRecord,
)
from dither.models import scores_of_each
from dither.privacy import clipping, noise
from dither.secagg.client import ClientSession
from dither.secagg.graph import Rules
from dither.simulation import devices
from dither.spec import PrivacySpec
from dither.types import Conditions, Release, RoundInfo, epsilon_text

if TYPE_CHECKING:
    import pandas as pd

# How the owner agreed to a run, or to statistics (without an experiment); raises FederationError when not.
Approve = Callable[[Terms, build.Experiment | None], str]

Look = tuple[list[Charge], Conditions]  # what statistics reveal, as a ledger composes it

LOCAL = "local, not private: "  # how a line begins that tells the owner about records

# All that a server can hear of a party that does not do what it was asked. Reasons depend on the party's files,
# records, budget and other projects; these sentences do not.
REFUSALS = {
    "terms": "the agreement is refused; the party's own output says why",
    "budget": "this party's budget does not allow it",
    "update": "the update must not leave this party",
    "other": "refused; the party's own output says why",
}


_ANSWERS = "answers.json"  # of statistics, beside their terms
_MOST_ANSWERS = 1 << 27  # bytes of them: some ten million counts
_TERMS: dict[str, type[Terms]] = {"terms": Agreement, "statistics": StatisticsTerms}  # by the kind of message


class Party:
    """One party's side of a federation. `answer` turns each message into its answer."""

    # reason: the options of `dither join`
    def __init__(
        self,
        folder: Path,
        source: PartyData,
        *,
        ledger: Ledger,
        new_ledger: bool = False,
        approve: Approve,
        seeded: bool = False,
        target: Budget | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        devices.set_up()  # refuses what would make a failure of a record
        self.folder, self.source, self.ledger = folder, source, ledger
        if target is not None:  # the most that it allows a run to reveal of one record
            counting.check_budget(target.epsilon, target.delta)
        self._target = target
        # Here, before any message: what is said of the records stays with their owner.
        # Whatever lies at the path later on, these are the records that are charged.
        self.dataset = data_id(ledger, path=str(source.path))
        ledger.identify(self.dataset, source.rows, file=source.name, new_ledger=new_ledger)
        source.check_unchanged()
        self.keyring = keys.Keyring.load(folder)
        self.name = keys.party_name(folder)
        self.identity = keys.Identity.load(folder)
        if self.keyring.party(self.name).identity != self.identity.public:
            raise FederationError(f"identity.key in {str(folder)!r} is not the one federation.json lists")
        self._approve, self._seeded, self.say = approve, seeded, say
        self._runs: dict[type[Terms], _Training | _Counting] = {}  # the newest, of training and of statistics
        self.outcome: dict[str, Any] | None = None  # what the server said at the end
        self.refusal: DitherError | None = None  # why this party does not take part

    @property
    def _run(self) -> _Training | None:
        run = self._runs.get(Agreement)
        return run if isinstance(run, _Training) else None

    @property
    def limited(self) -> bool:
        """Whether its owner has said how much the server may learn, or that nothing is to be protected."""
        budget = self.ledger.budget(self.dataset)
        held = budget is not None and budget.view in ("upload", "sum")  # other views are those of outsiders
        return self._seeded or self._target is not None or held

    @property
    def privacy(self) -> PrivacySpec | None:
        """The privacy section of the agreement, once there is one."""
        return None if self._run is None else self._run.agreement.spec.privacy

    @property
    def answered(self) -> int:
        """Rounds of this run that this party made an upload for, since its beginning."""
        return 0 if self._run is None else self._run.store.answered()

    def answer(self, content: bytes) -> bytes:
        """The signed answer to a message; a refusal is an answer too."""
        quoted, asked = messages.digest(content), ""
        try:
            message = messages.unpack(
                content, federation=self.keyring.id, to=self.name, keys={messages.SERVER: self.keyring.server}
            )
            asked = message.kind
            with np.errstate(all="ignore"):  # no warning tells of a record
                kind, fields, arrays = self._handle(message)
        except Exception as error:
            # What is no error of Dither's is a fault of ours: it ends nothing, and shows the server nothing.
            fault: DitherError = DataError(f"unforeseen {type(error).__name__}: {error}")
            if isinstance(error, OSError) and error.errno:  # a file's name and the system's words alone
                where = f"{str(error.filename)!r}: " if error.filename else ""
                fault = FederationError(f"{where}{error.strerror}; mend that, and run the same command again")
            reason = error if isinstance(error, DitherError) else fault
            # It may quote the server, which must not write to the owner's terminal as it likes.
            reason.args = (messages.printable(str(reason)),)
            local = LOCAL if isinstance(reason, DataError) else ""  # it may quote a cell
            self.say(f"{local}refused: {' '.join(str(reason).split())}")
            if asked in _TERMS:
                self.refusal = reason
            return self._pack("refused", {"why": _for_the_server(error, asked)}, quoted=quoted)
        return self._pack(kind, fields, arrays, quoted=quoted)

    def _handle(self, message: messages.SignedMessage) -> tuple[str, dict[str, Any], dict[str, Any]]:
        if message.kind == "hello":
            return "hello", self._hello(), {}
        if message.kind in _TERMS:
            return "accepted", *self._agree_to(message)
        if message.kind == "notice":  # what the server says of itself; nothing here depends on it
            self.say(f"the server has stopped: {messages.printable(message.field('why', str)[:400])}")
            return "noted", {}, {}
        run = self._current(message.field("run", str))
        if message.kind == "question" and isinstance(run, _Counting):
            return "upload", *run.question(message)
        if message.kind in ("roster", "confirmed", "unseal", "release"):
            return message.kind, {}, run.secagg(message)
        if message.kind == "round" and isinstance(run, _Training):
            return "upload", *run.round(message)
        if message.kind == "finish":
            rounds, accuracy = message.field("rounds", int), message.fields.get("accuracy")
            if not isinstance(accuracy, int | float | None):
                raise FederationError("a run that ends with an accuracy that is not a number")
            self.outcome = {"rounds": rounds, "accuracy": accuracy}
            return "bye", {"releases": run.releases.statement()}, {}
        raise FederationError(f"a message of unknown kind {message.kind!r}")

    def _hello(self) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        target = {} if self._target is None else {"epsilon": self._target.epsilon}
        return {"records": self.source.count, "versions": devices.versions(), "time": now, **target}

    def _agree_to(self, message: messages.SignedMessage) -> tuple[dict[str, Any], dict[str, Any]]:
        """Training or statistics, under terms that the owner approves."""
        kind = _TERMS[message.kind]
        terms = kind.from_dict(message.field("terms", dict))
        run = self._runs.get(kind)
        if run is None or run.agreement.digest != terms.digest:
            run = self._begin(terms)
        return {"digest": terms.digest, **run.facts}, run.enrol()

    def _begin(self, terms: Terms) -> _Training | _Counting:
        """Check terms that are new here, have the owner approve them, and make ready for the run."""
        if terms.federation != self.keyring.id:
            raise FederationError("the agreement belongs to another federation")
        for name in terms.names:
            self.keyring.party(name)
        experiment = self._check(terms)
        # A run's folder belongs to one agreement: what was charged and masked in it was so under that one.
        before = _saved_terms(self.folder / "runs" / terms.run)
        if before is not None and before.digest != terms.digest:
            raise FederationError(
                f"run {terms.run[:8]} has another agreement already; a new agreement needs a new run"
            )
        if approved_digest(self.folder, terms.purpose) != terms.digest:
            # On disk before a record is read: whether the records fit a schema is for one approved agreement, not
            # for as many "first" ones as a server likes to try.
            record_approval(self.folder, terms, self._approve(terms, experiment))
        run = self._made_ready(terms, experiment)
        terms.save(run.store.path)
        self._runs[type(terms)] = run
        self.say(f"taking part in run {terms.run[:8]}: {terms.purpose or f'training, as client {run.client}'}")
        return run

    def _current(self, name: str) -> _Training | _Counting:
        """The run that a message is about: a current one, or one that a restart interrupted."""
        for run in self._runs.values():
            if run.agreement.run == name:
                return run
        terms = _saved_terms(self.folder / "runs" / name) if name.isalnum() else None
        if terms is None:
            raise FederationError(f"run {name[:8]!r} is unknown here: its agreement was not accepted")
        if not is_approved(self.folder, terms):
            raise FederationError(f"run {name[:8]} has an agreement that the owner did not approve")
        self._runs[type(terms)] = run = self._made_ready(terms, self._check(terms))
        self.say(f"back in run {name[:8]}")
        return run

    def _made_ready(self, terms: Terms, experiment: build.Experiment | None) -> _Training | _Counting:
        if isinstance(terms, Agreement) and experiment is not None:
            return _Training(self, terms, experiment)
        if isinstance(terms, StatisticsTerms):
            return _Counting(self, terms)
        raise FederationError("an agreement of no known kind")

    def _check(self, terms: Terms) -> build.Experiment | None:
        """What the agreement runs, if this party may be asked to. No record is read: whether the records fit a
        schema is for a server whose agreement was approved."""
        if terms.spec.randomness != "os" and not self._seeded:
            raise FederationError(
                "the agreement draws noise from a public seed, which protects nothing; allow it with --test"
            )
        agreed, held = terms.sizes[terms.number(self.name)], terms.counted(self.source.count)
        if agreed != held:
            raise FederationError(
                f"the agreement counts {agreed} records here, and this party holds {held}; join with the file "
                "that was counted, or have a new run started"
            )
        if federated_spec(terms.spec, len(terms.names), terms.spec.data.name) != terms.spec:
            raise FederationError("the agreement has settings that a federation never runs with")
        if isinstance(terms, StatisticsTerms):
            if terms.trained is not None and not is_approved(self.folder, terms.trained):
                raise FederationError("the model to evaluate was trained under an agreement not approved here")
            self._check_counted(terms)
        if not isinstance(terms, Agreement):
            return None
        terms.encode(self.source, empty=True)  # a file of another kind, or with other columns, is refused
        experiment = terms.experiment()
        if experiment.plan.assumed:
            raise FederationError("the method's releases rest on an assumption, which no ledger can charge")
        self._check_target(terms, experiment)
        return experiment

    def _check_target(
        self, agreement: Agreement, experiment: build.Experiment, counted: StatisticsTerms | None = None
    ) -> None:
        """`FederationError` unless this party's own target holds against the server itself: for all that this
        party sends in a run, with all that was `counted` here, whatever the view that the agreement names, and
        whatever the server says of its noise."""
        if self._target is None:
            return
        view = "sum" if sums_integers(experiment.plan) else "upload"
        delta = agreement.spec.privacy.delta
        accountant = agreement.accountant(experiment).of([agreement.number(self.name)])
        row, (before, after) = accountant.proven(view), self._looks(counted, agreement)
        value = row.value
        if before or after:
            run = [Charge(EVERY_RECORD, accountant.clients[0].most)]
            terms = self._target._replace(delta=delta, view=view, adjacency=experiment.plan.adjacency)
            # The order counts: models of other runs may have been evaluated before or after the surveys.
            orders = [[*first, (run, accountant.conditions), *after] for first in (before, before[::-1])]
            value = max(composed(order, terms)[0] for order in orders[: max(len(before), 1)])
        kind = "assumes" if row.assumed else "proves"
        whom = f"against a server that sees {'sums' if view == 'sum' else 'its uploads'}"
        whom += ", with what was counted here," * bool(before or after)
        self._within_target(
            math.inf if row.assumed else value, delta, f"{kind} ε = {epsilon_text(value, digits=4)}", whom
        )

    def _check_counted(self, terms: StatisticsTerms) -> None:
        """The same for what is to be counted: by itself, and with each run that it scores or that came before."""
        if self._target is None:
            return
        for trained in [terms.trained] if terms.trained else _agreements(self.folder):
            self._check_target(trained, trained.experiment(), terms)
        before, after = self._looks(terms)
        value, _ = composed([*before, *after], self._target._replace(delta=terms.delta))
        self._within_target(
            value, terms.delta, f"proves ε = {epsilon_text(value, digits=4)}", "with what was counted here before"
        )

    def _looks(self, more: StatisticsTerms | None, run: Agreement | None = None) -> tuple[list[Look], list[Look]]:
        """What was counted here under terms that the owner approved, and what is asked now: before a run (surveys
        first), and of the model that it made."""
        saved = [StatisticsTerms.load(path, PARTY_ADVICE) for path in sorted((self.folder / "runs").glob("*"))]
        every = {terms.digest: terms for terms in (*saved, more) if terms is not None}
        looks: tuple[list[Look], list[Look]] = [], []
        for terms in sorted(every.values(), key=lambda terms: terms.trained is not None):
            look = [Charge(EVERY_RECORD, [((terms.release,), 1)])], Conditions()
            looks[run is not None and terms.trained == run].append(look)
        return looks

    def _within_target(self, value: float, delta: float, said: str, whom: str) -> None:
        most, largest, *_ = self._target or (math.inf, 1.0)
        if delta > largest:
            raise FederationError(
                f"the agreement has δ = {delta:g}, above this party's {largest:g}; raise --delta, or do not join"
            )
        if not value <= most:
            raise FederationError(
                f"the agreement {said} for this party {whom}, above its own target of {most:.15g}; raise "
                "--epsilon, or ask the organiser for privacy.noise='proven' and that view"
            )

    def _pack(
        self, kind: str, fields: dict[str, Any], arrays: dict[str, Any] | None = None, *, quoted: str
    ) -> bytes:
        return messages.pack(
            self.identity,
            federation=self.keyring.id,
            kind=kind,
            sender=self.name,
            to=messages.SERVER,
            fields=fields,
            arrays=arrays,
            answers=quoted,
        )


class _Announced(NamedTuple):
    """The sum that an answer goes into."""

    message: bytes
    asked: bytes  # the digest of what is answered


class _PartyRun:
    """What training and statistics share at a party: its ledger, enrolment for secure aggregation, and opening a
    sum."""

    agreement: Terms
    facts: Mapping[str, Any] = MappingProxyType({})  # what the server hears besides that the terms are accepted

    def __init__(self, party: Party, agreement: Terms) -> None:
        self.agreement, self.store = agreement, PartyStore(party.folder / "runs" / agreement.run)
        self.client = agreement.number(party.name)
        self.releases = ReleaseRecord(self.store.path, party.name, agreement.digest, party.identity)
        self._ledger, self._dataset = party.ledger, party.dataset
        # What the ledger calls the run. The server chose its number, and so may the server of another federation
        # that shares this ledger: only the digest of all that was agreed, and who agreed, tell runs apart.
        named = f"{agreement.run}-{agreement.digest}-{party.name}"
        self._account = f"{agreement.purpose}-{named}" if agreement.purpose else named
        self._session: ClientSession | None = None

    def _charged(self) -> set[int]:
        """Rounds or questions of this run that the ledger holds."""
        return {start for start, _ in self._ledger.charged(self._account, self._dataset)}

    def _check_remembered(self, remembered: bool) -> None:
        """An intent is older than its charge, so a folder that knows less than the ledger was deleted or restored:
        this party no longer knows what it sent or which batches it used, and must not continue."""
        if not remembered:
            raise FederationError(
                f"this party has given answers in run {self.agreement.run[:8]} that its folder does not remember: "
                "it was deleted or restored from a copy. Continue without this party, or start a new run"
            )

    def _secagg_session(self, party: Party, rules: Rules | None) -> ClientSession | None:
        if rules is None:
            return None
        saved = self.store.secagg()
        if saved is not None:
            session = ClientSession.load(saved)
            if session.federation != session_id(self.agreement):  # killed before those terms were saved
                raise FederationError(f"run {self.agreement.run[:8]} was begun under another agreement")
            return session
        session = ClientSession(
            self.client,
            federation=session_id(self.agreement),
            server=party.keyring.server,
            rules=rules,
            pins={number: party.keyring.party(name).identity for number, name in enumerate(self.agreement.names)},
            signing=party.identity.private,
        )
        self.store.save_secagg(session.save())
        return session

    def enrol(self) -> dict[str, bytes]:
        return {} if self._session is None else {"hello": self._session.hello()}

    def secagg(self, message: messages.SignedMessage) -> dict[str, bytes]:
        """Enrolment after the agreement, and opening a sum."""
        session = self._session
        if session is None:
            raise ProtocolAbort("this agreement sums uploads in the open: there is nothing to mask or to open")
        step: Callable[[bytes], bytes | None] = {
            "roster": session.confirm,
            "confirmed": session.confirmed,
            "unseal": session.unseal,
            "release": session.release,
        }[message.kind]
        answer = step(message.bytes("secagg"))
        self.store.save_secagg(session.save())
        if answer is not None and message.kind in ("unseal", "release"):
            self.releases.append(answer, *session.place, opens=True)
        return {} if answer is None else {"secagg": answer}

    def _announced(
        self, message: messages.SignedMessage, index: int, asked: bytes, parties: Callable[[set[int]], bool]
    ) -> _Announced | None:
        """The announcement of the sum that an answer goes into; None if sums are in the open."""
        if self._session is None:
            return None
        announcement = message.bytes("announce")
        cohort = self._session.announced(announcement, asked)
        if cohort.round_index != index or not parties(set(cohort.ids)):
            raise ProtocolAbort(f"{message.kind} {index} is announced for a cohort that was not drawn for it")
        return _Announced(announcement, asked)

    def _upload(self, index: int, announced: _Announced | None, row: np.ndarray) -> bytes | np.ndarray:
        """The row, masked if sums are secure. This party's record contains it before it leaves."""
        if self._session is None or announced is None:
            self.releases.append(row.tobytes(), index)
            return row
        masked = self._session.upload(announced.message, row, announced.asked)
        self.store.save_secagg(self._session.save())
        self.releases.append(masked, *self._session.place)
        return masked


class _Counting(_PartyRun):
    """Statistics at one party. What it has answered is on the disk before it is sent."""

    agreement: StatisticsTerms

    def __init__(self, party: Party, terms: StatisticsTerms) -> None:
        super().__init__(party, terms)
        self._say, self._source = party.say, party.source
        self._columns: tuple[bytes, Columns] | None = None  # and the digest of the model that scored them
        self._mu, self._slip = counting.mu_and_slip(terms.epsilon, terms.delta, lists_names=terms.lists_names)
        self._words = terms.words(self.client)
        self._check_remembered(self._charged() <= set(map(int, self._answers())))
        self._session = self._secagg_session(party, terms.rules)
        if terms.lists_names:  # those of the columns are public
            self.facts = {"columns": [str(name) for name in self._source.frame().columns]}

    def question(self, message: messages.SignedMessage) -> tuple[dict[str, Any], dict[str, Any]]:
        """The answer to a question: names, or counts with noise, masked."""
        index = message.field("round", int)
        question = Question.from_dict(message.field("question", dict))
        leaves, everybody = self._model(message), set(range(len(self.agreement.names)))
        asked = messages.asked_digest(leaves, question.to_dict())
        announced = None
        if question.kind != NAMES:
            announced = self._announced(message, index, asked, lambda parties: parties == everybody)
        answer = self._answer(index, question, leaves, asked.hex())
        if question.kind == NAMES:
            self.releases.append(to_json(answer).encode(), index)
            return {"round": index, "names": answer}, {}
        row = np.array(answer, np.int64).view(np.uint64)
        return {"round": index}, {"upload": self._upload(index, announced, row)}

    def _answer(self, index: int, question: Question, leaves: list[np.ndarray], digest: str) -> list[Any]:
        """Names, or noisy counts: what was answered before, or a fresh answer that is charged and kept."""
        answers = self._answers()
        saved = answers.get(str(index))
        if saved is not None and saved["question"] != digest:
            raise FederationError(f"question {index} was another one when it was answered")
        if saved is None or saved["answer"] is None:
            if index < 0 or any(int(number) > index for number in answers):
                raise FederationError(f"question {index} is over")
            if answers and (self.store.path / _ANSWERS).stat().st_size > _MOST_ANSWERS:
                raise FederationError(f"question {index} is one too many: {_MOST_ANSWERS} bytes were answered")
            left = 1.0 - sum(each["share"] for number, each in answers.items() if number != str(index))
            saved = {"question": digest, "share": question.share, "answer": None}
            self._charge(index, answers, saved)
            institution = Institution(self._table(leaves), self._mu, self._slip, self._words)
            institution.left = left
            listed = question.kind == NAMES
            answer = institution.names(question) if listed else institution.answer(question).tolist()
            saved["answer"] = counting.fitting(answer) if listed else answer
            self._save({**answers, str(index): saved})
        return list(saved["answer"])

    def _model(self, message: messages.SignedMessage) -> list[np.ndarray]:
        """The arrays of the model that is evaluated; none in a survey of the table itself."""
        if self.agreement.trained is None:
            return []
        shapes = jax.tree.leaves(jax.eval_shape(self.agreement.trained.model().init, jax.random.key(0)))
        return message.model([(leaf.shape, leaf.dtype) for leaf in shapes])

    def _table(self, leaves: list[np.ndarray]) -> Columns:
        """What is counted. It is kept for the next question; for another model it is made anew, since all parties
        of a sum were asked about the same."""
        model = messages.asked_digest(leaves)
        if self._columns is None or self._columns[0] != model:
            trained = self.agreement.trained
            table = self._source.frame() if trained is None else self._scored(trained, leaves)
            self._columns = model, Columns(table)
        return self._columns[1]

    def _scored(self, trained: Agreement, leaves: list[np.ndarray]) -> pd.DataFrame:
        """What the broadcast model says of the records that training left out. The owner hears the exact score."""
        x, y = trained.encode(self._source, held_out=True)
        model = trained.model()
        structure = jax.tree.structure(jax.eval_shape(model.init, jax.random.key(0)))
        predicted = scores_of_each(model, jax.tree.unflatten(structure, list(map(jnp.asarray, leaves))), x)
        scored = score_columns(np.asarray(predicted), y, model.task, len(trained.classes))
        self._say(f"{LOCAL}on {len(scored):,} of your records that training left out, {_own(scored)}")
        return scored

    def _charge(self, index: int, answers: Mapping[str, Any], intent: Mapping[str, Any]) -> None:
        """Everything that the terms allow, with the first question; later ones leave a mark. The intent is on disk
        before. A question that the ledger holds and this folder does not was answered by a copy of the folder, or
        before it was restored: it must not be answered again, with fresh noise and without a charge."""
        known = self._ledger.charged(self._account, self._dataset)
        starts = {start for start, _ in known}
        self._check_remembered(starts <= set(map(int, answers)))
        if index in starts:
            return
        self.releases.check(first=not known)
        self._save({**answers, str(index): intent})
        whole = [Charge(EVERY_RECORD, [((self.agreement.release,), 1)])]
        if not self._ledger.charge(
            self._account,
            self._dataset,
            [Charge(EVERY_RECORD, [])] if known else whole,
            rounds=(index, index + 1),
            plan=lambda: whole,
            on_top_of=known,
        ):
            self._save({number: each for number, each in answers.items() if number != str(index)})
            self._check_remembered(False)  # the copy was faster

    def _answers(self) -> dict[str, Any]:
        path = self.store.path / _ANSWERS
        answers: dict[str, Any] = read_checked(path, PARTY_ADVICE)["answers"] if path.is_file() else {}
        return answers

    def _save(self, answers: Mapping[str, Any]) -> None:
        write_checked(self.store.path / _ANSWERS, {"answers": dict(answers)})


class _Training(_PartyRun):
    """The training of one run at one party."""

    agreement: Agreement

    def __init__(self, party: Party, agreement: Agreement, experiment: build.Experiment) -> None:
        super().__init__(party, agreement)
        self.experiment, (x, y) = experiment, agreement.encode(party.source)
        self._check_memory()
        accountant = agreement.accountant(experiment)
        self._conditions, self._releases = accountant.conditions, accountant.ledger_releases
        secret = None
        if agreement.spec.randomness == "os":
            secret = noise.wrap(np.frombuffer(self.store.secret(), np.uint32)[None])
        settings = engines.RunSettings.of(experiment)
        self._engine = engines.ClientEngine(settings, x, y, client=self.client, secret=secret)
        self._engine.warm()
        self._session = self._secagg_session(party, secagg_rules(experiment))

    def _check_memory(self) -> None:
        """A run continues only with its memory, and with the records and the ledger that know of its charges."""
        newest, charged = self._check_charged()
        computed = newest.round if newest is not None and newest.outcome else -1
        if not {computed, self.releases.newest_round} - {-1} <= charged:
            raise FederationError(
                f"run {self.agreement.run[:8]} began with other records or another ledger: "
                "bring those back, or start a new run"
            )
        if newest is not None and self.agreement.spec.randomness == "os":
            self._check_remembered(self.store.has_secret())

    def _check_charged(self) -> tuple[ChargedRound | None, set[int]]:
        """The newest round that this folder knows of, and all that the ledger holds: none is newer."""
        newest, charged = self.store.load(ChargedRound), self._charged()
        self._check_remembered(max(charged, default=-1) <= (-1 if newest is None else newest.round))
        return newest, charged

    def _check_order(self) -> None:
        """A model is evaluated after its training: in that order a party's target was checked, and the order of
        releases counts in their ε."""
        for path in self.store.path.parent.glob(f"*/{StatisticsTerms.file}"):
            trained = read_checked(path, PARTY_ADVICE)["trained"] if path.with_name(_ANSWERS).is_file() else None
            if trained is not None and digest_of(trained) == self.agreement.digest:
                raise FederationError("its model was evaluated before this training began: start a new run")

    # Rounds

    def round(self, message: messages.SignedMessage) -> tuple[dict[str, Any], dict[str, Any]]:
        """The upload of a round."""
        index = message.field("round", int)
        self._check_turn(index)
        broadcast = self._broadcast(message)
        asked, drawn = messages.asked_digest(broadcast), set(self.experiment.cohorts[index].tolist())
        announced = self._announced(message, index, asked, lambda parties: parties <= drawn)
        before = self.store.load(PendingUpload)
        if before is not None and before.round == index:
            pending = before
            if pending.broadcast != asked.hex():
                raise FederationError(f"round {index} was answered before, for another broadcast")
        else:
            self._check_open(index, before)
            pending = self._answer(index, broadcast, message.field("last_counted", int), before)
        return {"round": index}, {"upload": self._upload(index, announced, pending.row)}

    def _check_turn(self, index: int) -> None:
        if not 0 <= index < len(self.experiment.cohorts):
            raise FederationError(f"round {index}: the agreement has {len(self.experiment.cohorts)} rounds")
        if self.client not in self.experiment.cohorts[index]:
            raise FederationError(f"round {index}: this party was not drawn for it")

    def _check_open(self, index: int, before: PendingUpload | None) -> None:
        """Rounds only go up, and a round that was computed is never computed again."""
        newest = self.store.load(ChargedRound)
        here = max(-1 if before is None else before.round, -1 if newest is None else newest.round)
        if here > index:
            raise FederationError(f"round {index} is over: this party is at round {here}")
        if newest is not None and newest.outcome == COMPUTED and newest.round != (before and before.round):
            # Nor does a later one begin: the client's state is lost with it, and which batches were used.
            raise FederationError(f"round {newest.round} was computed before, and its upload is lost")
        if newest is not None and newest.round == index and newest.outcome:
            raise ClientRefused(newest.outcome)

    def _broadcast(self, message: messages.SignedMessage) -> list[np.ndarray]:
        leaves = message.model(self._engine.message_shapes)
        if any(leaf.dtype.kind == "f" and not (np.abs(leaf) <= clipping.REACH).all() for leaf in leaves):
            raise FederationError("a broadcast that is not finite, or beyond ±2^40")
        return leaves

    def _answer(
        self, index: int, broadcast: list[np.ndarray], last_counted: int, before: PendingUpload | None
    ) -> PendingUpload:
        client_state = self._client_state(last_counted, before)
        self.store.check_space((1 << 16) + sum(4 * leaf.nbytes for leaf in [*broadcast, *client_state]))
        self._charge(index)
        began = time.perf_counter()
        answer = self._engine.answer(broadcast, client_state, index)
        seconds = time.perf_counter() - began
        # Only where no noise protects the records: else every upload is finite, and nothing here depends on them.
        problem = "" if answer.finite else "the update is not finite: lower client_lr, or check these records"
        self.store.log(
            {
                "round": index,
                "time": datetime.now(UTC).isoformat(timespec="seconds"),
                "seconds": round(seconds, 4),
                "clamped": answer.clamped,
                **({"refused": problem} if problem else {}),
            }
        )
        if problem:
            reason = f"round {index}: {problem.split(':')[0]}"  # what follows the colon is for this party alone
            self.store.save(ChargedRound(index, reason))
            raise ClientRefused(reason)
        pending = PendingUpload(index, messages.asked_digest(broadcast).hex(), [answer.row, *answer.state])
        self.store.save(pending)
        self.store.save(ChargedRound(index, COMPUTED))
        return pending

    def _client_state(self, last_counted: int, before: PendingUpload | None) -> list[np.ndarray]:
        """The client's state, with the newest upload's if that counted. Under shuffled epochs a batch once used
        is never used again in that epoch, whatever the server says of it."""
        kept = self.store.load(ClientState)
        newer = before is not None and (kept is None or kept.round < before.round)
        always = self.agreement.spec.batch_sampling == "shuffled"
        if before is not None and newer and (always or last_counted == before.round):
            self.store.save(ClientState(before.round, before.state))
            return before.state
        return self._engine.start() if kept is None else kept.leaves

    def _charge(self, index: int) -> None:
        """Charge a round once, before it is computed. An intent without an upload was charged; nothing left."""
        newest, charged = self._check_charged()
        if newest is not None and newest.round == index and index in charged:
            return
        if not charged:
            self._check_order()
        self.releases.check(first=not charged)
        self.store.save(ChargedRound(index, ""))
        self._ledger.charge(
            self._account,
            self._dataset,
            [Charge(EVERY_RECORD, [(self._released_in(index), 1)])],
            rounds=(index, index + 1),
            conditions=self._conditions,
            plan=self._whole_run,
        )

    def _released_in(self, index: int) -> tuple[Release, ...]:
        cohort = self.experiment.cohorts[index]
        return self._releases(RoundInfo(index, self.client, self.agreement.sizes[self.client], len(cohort)))

    def _whole_run(self) -> list[Charge]:
        """What this party reveals in all rounds, registered with the first one."""
        taken = [i for i, cohort in enumerate(self.experiment.cohorts) if self.client in np.asarray(cohort)]
        return [Charge(EVERY_RECORD, compress(self._released_in(i) for i in taken))]


def _own(scored: pd.DataFrame) -> str:
    """An institution's own exact score, for itself."""
    if "error" in scored:
        return f"the model errs by {scored['error'].mean():.4f} of the label's range on average"
    return f"the model predicts {(scored['predicted'] == scored['truth']).mean():.2%} right"


def _saved_terms(folder: Path) -> Terms | None:
    """What was agreed for the run in this folder."""
    found = (kind.load(folder, PARTY_ADVICE) for kind in _TERMS.values())
    return next((terms for terms in found if terms is not None), None)


def _agreements(folder: Path) -> Iterator[Agreement]:
    """The agreements on trainings that this party has accepted."""
    found = (Agreement.load(path, PARTY_ADVICE) for path in sorted((folder / "runs").glob("*")))
    return (agreement for agreement in found if agreement is not None)


def _approved_last(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The run of the agreement that the owner of this party's folder approved last, and the agreement as saved:
    files of the owner's that this or an earlier one names need not be approved here."""
    digest = approved_digest(folder)
    paths = sorted((folder / "runs").glob(f"*/{Agreement.file}"))
    found = ((path.parent, read_checked(path, PARTY_ADVICE)) for path in paths)
    return next(((run, saved) for run, saved in found if digest_of(saved) == digest), None)


def approved_agreement(folder: Path) -> Agreement | None:
    """That agreement."""
    found = _approved_last(folder)
    return Agreement.load(found[0], PARTY_ADVICE) if found else None


def approved_privacy(folder: Path) -> dict[str, Any] | None:
    """Its privacy section."""
    found = _approved_last(folder)
    return dict(found[1]["spec"]["privacy"]) if found else None


def session_id(agreement: Terms) -> bytes:
    """What secure aggregation calls the federation: one for each run, so that no mask is ever used in two."""
    return hashlib.sha256(f"dither {agreement.federation} {agreement.digest}".encode()).digest()


def _for_the_server(error: Exception, asked: str) -> str:
    """What the server hears when its message of kind `asked` led to an error."""
    if isinstance(error, BudgetExhausted):
        return REFUSALS["budget"]
    if isinstance(error, ClientRefused):
        return REFUSALS["update"]
    return REFUSALS["terms" if asked in _TERMS else "other"]
