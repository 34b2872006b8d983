"""A party: it answers the coordinator's messages and decides by itself what may leave.

A party trusts the server with the model alone. It computes its noise, its rounds and the proven ε from the
agreement that its owner approved, and charges its own ledger before anything is computed. It refuses whatever the
agreement does not allow: another digest, a round it was not drawn for, a round twice with another broadcast, a sum
of fewer parties than the proof counts on, a broadcast that is not finite.

The same round asked again gets the same upload again (with secure aggregation: the same words under the masks of
the new attempt), so a repetition reveals nothing new and is not charged. An upload is on the disk before it is
sent. A round whose update must not leave is over too: it is not computed again, because every refusal tells the
server something about an update.

Whatever goes wrong, the server hears one of the sentences in `REFUSALS`; the reason is for the owner alone.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from dither.accounting import compress
from dither.accounting.ledger import Budget, Charge, Entry, composed
from dither.accounting.ledger.runs import EVERY_RECORD, Ledger, data_id
from dither.errors import BudgetExhausted, ClientRefused, DataError, DitherError, FederationError, ProtocolAbort
from dither.experiment import build, counting
from dither.experiment.counting import NAMES
from dither.experiment.folder import to_json
from dither.federation import engines, keys, messages
from dither.federation.agreement import (
    Agreement,
    PartyData,
    Terms,
    approved_digest,
    federated_spec,
    record_approval,
    secagg_rules,
    sums_integers,
)
from dither.federation.state import COMPUTED, PARTY_ADVICE, ChargedRound, PartyStore, PendingUpload, ReleaseRecord
from dither.federation.statistics import LOCAL, PartyStatistics, StatisticsTerms
from dither.privacy import clipping, noise
from dither.secagg.client import ClientSession
from dither.secagg.roster import Rules
from dither.simulation import devices
from dither.spec import PrivacySpec
from dither.types import Conditions, Release, RoundInfo

# How the owner agreed to a run, or to statistics (without an experiment); raises FederationError when not.
Approve = Callable[[Terms, build.Experiment | None], str]

Look = tuple[list[Charge], Conditions]  # what statistics reveal, as a ledger composes it

# All that a server can hear of a party that does not do what it was asked. Reasons depend on the party's files,
# records, budget and other projects; these sentences do not.
REFUSALS = {
    "terms": "the agreement is refused; the party's own output says why",
    "budget": "this party's budget does not allow it",
    "update": "the update must not leave this party",
    "other": "refused; the party's own output says why",
}


_TERMS: dict[str, type[Terms]] = {"terms": Agreement, "statistics": StatisticsTerms}  # by the kind of message


class Target(NamedTuple):
    """The most that a party allows a run to reveal: the ε of one record, at a δ of at most `delta`."""

    epsilon: float
    delta: float = 1e-5

    def check(self) -> Target:
        """Itself, or an error if no run could meet it."""
        if not (0 < self.epsilon < math.inf and 0 < self.delta < 1):
            raise FederationError(
                f"--epsilon {self.epsilon:g} --delta {self.delta:g}: ε must be positive and finite, δ in (0, 1)"
            )
        return self


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
        target: Target | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.folder, self.source, self.ledger = folder, source, ledger
        self._target = target and target.check()
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
            kind, fields, arrays = self._handle(message)
        except Exception as error:
            # What is no error of Dither's is a fault of ours: it ends nothing, and shows the server nothing.
            fault = FederationError(f"unforeseen {type(error).__name__}: {error}")
            reason = error if isinstance(error, DitherError) else fault
            # It may quote the server, which must not write to the owner's terminal as it likes.
            reason.args = (messages.printable(str(reason)),)
            local = LOCAL if isinstance(error, DataError) else ""  # it may quote a cell
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
        self._check_noise(terms)
        agreed, held = terms.sizes[terms.number(self.name)], terms.counted(self.source.count)
        if agreed != held:
            raise FederationError(f"the agreement counts {agreed} records here; this party holds {held}")
        experiment = self._check_training(terms) if isinstance(terms, Agreement) else None
        trained = terms.trained if isinstance(terms, StatisticsTerms) else None
        if trained is not None and approved_digest(self.folder) != trained.digest:
            raise FederationError("the model to evaluate was trained under an agreement not approved here")
        if isinstance(terms, StatisticsTerms):
            self._check_counted(terms)
        # A run's folder belongs to one agreement: what was charged and masked in it was so under that one.
        folder = self.folder / "runs" / terms.run
        before = _saved_terms(folder)
        if before is not None and before.digest != terms.digest:
            raise FederationError(
                f"run {terms.run[:8]} has another agreement already; a new agreement needs a new run"
            )
        approved = approved_digest(self.folder, terms.purpose) == terms.digest
        answer = "" if approved else self._approve(terms, experiment)
        records = terms.encode(self.source) if isinstance(terms, Agreement) else None
        if not approved:
            record_approval(self.folder, terms, answer)
        terms.save(PartyStore(folder).path)
        self._runs[type(terms)] = run = self._made_ready(terms, records)
        self.say(f"taking part in run {terms.run[:8]}: {terms.purpose or f'training, as client {run.client}'}")
        return run

    def _check_training(self, agreement: Agreement) -> build.Experiment:
        """What the agreement runs, if this party may be asked to. No record is read: whether the records fit a
        schema is for a server whose agreement was approved."""
        if federated_spec(agreement.spec, len(agreement.names), agreement.spec.data.name) != agreement.spec:
            raise FederationError("the agreement has settings that a federation never runs with")
        experiment = agreement.experiment(*agreement.encode(self.source, empty=True))
        if experiment.plan.assumed:
            raise FederationError("the method's releases rest on an assumption, which no ledger can charge")
        self._check_target(agreement, experiment)
        return experiment

    def _current(self, name: str) -> _Training | _Counting:
        """The run that a message is about: a current one, or one that a restart interrupted."""
        for run in self._runs.values():
            if run.agreement.run == name:
                return run
        terms = _saved_terms(self.folder / "runs" / name) if name.isalnum() else None
        if terms is None:
            raise FederationError(f"run {name[:8]!r} is unknown here: its agreement was not accepted")
        if approved_digest(self.folder, terms.purpose) != terms.digest:
            raise FederationError(f"run {name[:8]} has an agreement that the owner did not approve")
        self._check_noise(terms)
        records = terms.encode(self.source) if isinstance(terms, Agreement) else None
        if records is not None and len(records[1]) != terms.sizes[terms.number(self.name)]:
            raise FederationError(f"this party no longer holds the records of run {name[:8]}")
        run = self._made_ready(terms, records)
        if isinstance(run, _Training):
            self._check_target(run.agreement, run.experiment)
        else:
            self._check_counted(run.agreement)
        self._runs[type(terms)] = run
        self.say(f"back in run {name[:8]}")
        return run

    def _made_ready(self, terms: Terms, records: tuple[np.ndarray, np.ndarray] | None) -> _Training | _Counting:
        if isinstance(terms, Agreement) and records is not None:
            return _Training(self, terms, *records)
        if isinstance(terms, StatisticsTerms):
            return _Counting(self, terms)
        raise FederationError("an agreement of no known kind")

    def _check_noise(self, agreement: Terms) -> None:
        if agreement.spec.randomness != "os" and not self._seeded:
            raise FederationError(
                "the agreement draws noise from a public seed, which protects nothing; allow it with --test"
            )

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
        accountant = experiment.accountant(agreement.lacking(experiment.plan)).of([agreement.number(self.name)])
        row, (before, after) = accountant.proven(view), self._looks(counted)
        value = row.value
        if before or after:
            run = [Charge(EVERY_RECORD, accountant.clients[0].most)]
            terms = Budget(self._target.epsilon, delta, view, experiment.plan.adjacency)
            value = composed([*before, (run, accountant.conditions), *after], terms)[0]
        kind = "assumes" if row.assumed else "proves"
        whom = f"against a server that sees {'sums' if view == 'sum' else 'its uploads'}"
        whom += ", with what was counted here," * bool(before or after)
        self._within_target(math.inf if row.assumed else value, delta, f"{kind} ε = {value:.4g}", whom)

    def _check_counted(self, terms: StatisticsTerms) -> None:
        """The same for what is to be counted: by itself, and with the run whose model it scores."""
        if self._target is None:
            return
        if (trained := terms.trained) is not None:
            self._check_target(trained, trained.experiment(*trained.encode(self.source, empty=True)), terms)
        before, after = self._looks(terms)
        value, _ = composed([*before, *after], Budget(self._target.epsilon, terms.delta))
        self._within_target(value, terms.delta, f"proves ε = {value:.4g}", "with what was counted here before")

    def _looks(self, more: StatisticsTerms | None) -> tuple[list[Look], list[Look]]:
        """What was counted here under terms that the owner approved, and what is asked now: before a run, and of
        the model that it made."""
        saved = [StatisticsTerms.load(path, PARTY_ADVICE) for path in sorted((self.folder / "runs").glob("*"))]
        every = {terms.digest: terms for terms in (*saved, more) if terms is not None}
        looks: tuple[list[Look], list[Look]] = [], []
        for terms in every.values():
            release = counting.release(terms.epsilon, terms.delta, lists_names=terms.lists_names)
            look = [Charge(EVERY_RECORD, [((release,), 1)])], Conditions()
            looks[terms.trained is not None].append(look)
        return looks

    def _within_target(self, value: float, delta: float, said: str, whom: str) -> None:
        most, largest = self._target or (math.inf, 1.0)
        if delta > largest:
            raise FederationError(
                f"the agreement has δ = {delta:g}, above this party's {largest:g}; raise --delta, or do not join"
            )
        if not value <= most:
            raise FederationError(
                f"the agreement {said} for this party {whom}, above its own target; raise --epsilon {most:g}, or "
                "ask for privacy.noise='proven' and that view"
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


class _PartyRun:
    """What training and statistics share at a party: enrolment for secure aggregation, and opening a sum."""

    agreement: Terms
    facts: Mapping[str, Any] = MappingProxyType({})  # what the server hears besides that the terms are accepted

    def __init__(self, party: Party, agreement: Terms) -> None:
        self.agreement, self.store = agreement, PartyStore(party.folder / "runs" / agreement.run)
        self.client = agreement.number(party.name)
        self.releases = ReleaseRecord(self.store.path, party.name, agreement.digest, party.identity)
        self._session: ClientSession | None = None

    def _secagg_session(self, party: Party, rules: Rules | None) -> ClientSession | None:
        if rules is None:
            return None
        saved = self.store.secagg()
        if saved is not None:
            return ClientSession.load(saved)
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
        return {} if answer is None else {"secagg": answer}

    def _upload(self, index: int, announced: bytes | None, row: np.ndarray) -> bytes | np.ndarray:
        """The row, masked if sums are secure. This party's record contains it before it leaves."""
        if self._session is None or announced is None:
            self.releases.append(index, row.tobytes())
            return row
        masked = self._session.upload(announced, row)
        self.store.save_secagg(self._session.save())
        self.releases.append(index, masked)
        return masked


class _Counting(_PartyRun):
    """Statistics at one party."""

    agreement: StatisticsTerms

    def __init__(self, party: Party, terms: StatisticsTerms) -> None:
        super().__init__(party, terms)
        self._answers = PartyStatistics(terms, party, self.store.path)
        self._session = self._secagg_session(party, terms.rules)
        self.facts = {"columns": self._answers.header} if terms.lists_names else {}

    def question(self, message: messages.SignedMessage) -> tuple[dict[str, Any], dict[str, Any]]:
        """The answer to a question: names, or counts with noise, masked."""
        index, announced = message.field("round", int), None
        is_list = message.field("question", dict).get("kind") == NAMES
        if self._session is not None and not is_list:
            announced = message.bytes("announce")
            if set(self._session.announced(announced).ids) != set(range(len(self.agreement.names))):
                raise ProtocolAbort(f"question {index} is announced for some of the parties only")
        names, row = self._answers.answer(message)
        if names is not None:
            self.releases.append(index, to_json(names).encode())
            return {"round": index, "names": names}, {}
        return {"round": index}, {"upload": self._upload(index, announced, row)}


class _Training(_PartyRun):
    """The training of one run at one party."""

    agreement: Agreement

    def __init__(self, party: Party, agreement: Agreement, x: np.ndarray, y: np.ndarray) -> None:
        super().__init__(party, agreement)
        self.experiment = experiment = agreement.experiment(x, y)
        self._ledger, self._dataset = party.ledger, party.dataset
        self._check_memory()
        accountant = experiment.accountant(missing=agreement.lacking(experiment.plan))
        self._conditions, self._releases = accountant.conditions, accountant.ledger_releases
        secret = None
        if agreement.spec.randomness == "os":
            secret = noise.wrap(np.frombuffer(self.store.secret()[:8], np.uint32)[None])
        settings = engines.RunSettings.of(experiment)
        self._engine = engines.ClientEngine(settings, x, y, client=self.client, secret=secret)
        self._engine.warm()
        self._session = self._secagg_session(party, secagg_rules(experiment))

    def _check_memory(self) -> None:
        """A run continues only with the records and the ledger with which it began. An intent is older than its
        charge, so a folder that knows less than the ledger was deleted or restored: this party no longer knows
        what it sent or which batches it used, and must not continue."""
        if self.store.dataset() not in (None, self._dataset):
            raise FederationError(
                f"run {self.agreement.run[:8]} began with other records or another ledger: "
                "bring those back, or start a new run"
            )
        charged = [entry.rounds[0] for entry in self._charges()]
        newest = self.store.charged()
        forgotten = charged and (newest is None or newest.round < max(charged))
        if newest is not None and self.agreement.spec.randomness == "os":
            forgotten = forgotten or not self.store.has_secret()
        if forgotten:
            raise FederationError(
                f"this party has answered rounds of run {self.agreement.run[:8]} that its folder does not "
                "remember: it was deleted or restored from a copy. Continue without this party, or start a new run"
            )
        self.store.save_dataset(self._dataset)

    # Rounds

    def round(self, message: messages.SignedMessage) -> tuple[dict[str, Any], dict[str, Any]]:
        """The upload of a round."""
        index = message.field("round", int)
        self._check_turn(index)
        broadcast = self._broadcast(message)
        announced = None
        if self._session is not None:
            announced = message.bytes("announce")
            cohort = self._session.announced(announced)
            if cohort.round_index != index or not set(cohort.ids) <= set(self.experiment.cohorts[index].tolist()):
                raise ProtocolAbort(f"round {index} is announced for a cohort that was not drawn for it")
        before = self.store.pending()
        if before is not None and before.round == index:
            pending = before
            if pending.broadcast != _digest(broadcast):
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
        newest = self.store.charged()
        here = max(-1 if before is None else before.round, -1 if newest is None else newest.round)
        if here > index:
            raise FederationError(f"round {index} is over: this party is at round {here}")
        if newest is not None and newest.round == index and newest.outcome:
            if newest.outcome == COMPUTED:
                raise FederationError(f"round {index} was computed before, and its upload is lost")
            raise ClientRefused(newest.outcome)

    def _broadcast(self, message: messages.SignedMessage) -> list[np.ndarray]:
        leaves = [message.array(f"m{number}") for number in range(len(self._engine.message_shapes))]
        for leaf, (shape, dtype) in zip(leaves, self._engine.message_shapes, strict=True):
            if leaf.shape != shape or leaf.dtype != dtype:
                raise FederationError(f"the broadcast has {leaf.dtype} {leaf.shape}, expected {dtype} {shape}")
            if leaf.dtype.kind == "f" and not (np.abs(leaf) <= clipping.REACH).all():
                raise FederationError("a broadcast that is not finite, or beyond ±2^40")
        return leaves

    def _answer(
        self, index: int, broadcast: list[np.ndarray], last_counted: int, before: PendingUpload | None
    ) -> PendingUpload:
        client_state = self._client_state(last_counted, before)
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
            self.store.save_charged(ChargedRound(index, reason))
            raise ClientRefused(reason)
        pending = PendingUpload(index, _digest(broadcast), answer.row, answer.state, answer.clamped)
        self.store.save_pending(pending)
        self.store.save_charged(ChargedRound(index, COMPUTED))
        return pending

    def _client_state(self, last_counted: int, before: PendingUpload | None) -> list[np.ndarray]:
        """The client's state, with the newest upload's if that counted. Under shuffled epochs a batch once used
        is never used again in that epoch, whatever the server says of it."""
        kept = self.store.state()
        newer = before is not None and (kept is None or kept.round < before.round)
        always = self.agreement.spec.batch_sampling == "shuffled"
        if before is not None and newer and (always or last_counted == before.round):
            self.store.save_state(before.round, before.state)
            return before.state
        return self._engine.start() if kept is None else kept.state

    def _charge(self, index: int) -> None:
        """Charge a round once, before it is computed. An intent without an upload was charged; nothing left."""
        newest = self.store.charged()
        if newest is not None and newest.round == index and self._is_charged(index):
            return
        self.store.save_charged(ChargedRound(index, ""))
        self._ledger.charge(
            self.agreement.run,
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

    def _is_charged(self, index: int) -> bool:
        return any(entry.rounds == (index, index + 1) for entry in self._charges())

    def _charges(self) -> list[Entry]:
        """What the ledger holds of this run."""
        return [
            entry
            for entry in self._ledger.history(self._dataset)
            if entry.kind == "charge" and entry.run == self.agreement.run
        ]


def _saved_terms(folder: Path) -> Terms | None:
    """What was agreed for the run in this folder."""
    found = (kind.load(folder, PARTY_ADVICE) for kind in _TERMS.values())
    return next((terms for terms in found if terms is not None), None)


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


def _digest(leaves: list[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for leaf in leaves:
        digest.update(np.ascontiguousarray(leaf).data)
    return digest.hexdigest()
