"""The server of a federation: it gathers the parties, makes the agreement, and runs the rounds.

A round is announced to its cohort and closed with the answers that arrive before the deadline. With fewer than
`federation.min_clients` answers it stays open: the server waits for parties to come back, and stops if they do
not; it can be started again later. After every round, the state and who counted, who was missing and why are on
disk. A server that is killed continues after the last completed round, as soon as enough parties are there.

A party that sends something no honest party sends is excluded: it is named, recorded, and no longer asked. To the
others it is a missing party, and their proofs and rules hold as for any other missing party.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from dither import data
from dither.accounting.ledger import Budget
from dither.errors import DitherError, FederationError, ProtocolAbort, SpecError
from dither.experiment import build, plots, train
from dither.experiment.account import with_counts
from dither.experiment.counting import PURPOSES
from dither.experiment.metrics import Labelled, judge
from dither.experiment.report import TOGETHER, Exclusion, FederationTotals, PartyTotals, Report, SpentPart
from dither.federation import engines, keys, messages, state
from dither.federation.agreement import (
    Agreement,
    StatisticsTerms,
    Terms,
    collusion_notes,
    federated_spec,
    held_out_sizes,
    largest_norm,
    secagg_rules,
)
from dither.federation.messages import Mailbox, Question, SignedMessage, Take, Transport
from dither.federation.party import session_id
from dither.federation.state import Journal
from dither.secagg import encoding
from dither.secagg.graph import Rules
from dither.secagg.server import ServerSession
from dither.spec import Spec, code
from dither.types import __version__

SCORES = "scores.json"  # of a private evaluation
WAIT_SECONDS = 3600.0  # for parties to come and for their owners to agree


def without_records(schema: data.Schema, features: str = "all", transform: str = "none") -> data.Dataset:
    """What a server that has no test records knows of the data: how a table becomes features."""
    names = tuple(schema.feature_names(features))
    x = data.transform(np.zeros((0, len(names)), np.float32), transform)
    y = np.zeros(0, np.int32 if schema.label.bounds is None else np.float32)
    return data.Dataset(schema.name or "own data", x, y, x, y, schema.label.classes, names, schema=schema)


def load_evaluation_data(spec: Spec) -> data.Dataset:
    """What the server knows of the data: how a table becomes features (data.schema), and its own records to score
    models on, the catalogue's or those of data.test_path."""
    d = spec.data
    if not d.path and not d.schema and not spec.privacy.project_epsilon:
        return build.load_data(spec.with_values({"data.split": "given", "data.partition": "iid"}))
    if spec.privacy.project_epsilon and not d.schema:  # parties estimate it, privately
        x, y = np.zeros((0, 1), np.float32), np.zeros(0, np.int32)
        return data.Dataset("own data", x, y, x, y, (), ())
    if not d.schema:
        raise SpecError(
            "a federation needs data.schema: bounds and categories that are known without looking at anybody's "
            "records (dither data schema FILE drafts one)"
        )
    schema = data.with_label_bounds(data.Schema.load(d.schema), d.label_bounds)
    evaluation = without_records(schema, d.features, d.transform)
    if not d.test_path or not spec.scored:
        return evaluation
    table = data.read_table(d.test_path)
    rows = data.hash_table(table)
    build.refuse_charged(d.test_path, rows)  # every party is told the scores
    encoded = schema.encode(table, d.encoding, d.features)
    if encoded.y is None:
        raise SpecError(f"data.test_path={d.test_path!r} has no labels")
    x_test = data.transform(encoded.x, d.transform)
    return evaluation._replace(x_test=x_test, y_test=encoded.y, test_hashes=rows)


class Coordinator:
    """One run of a federation, from the first hello to the summary."""

    agreement: Terms
    _round_kind = "round"  # of message

    # reason: the options of `dither serve`, and what it was given to work with
    def __init__(
        self,
        transport: Transport,
        keys_folder: Path,
        spec: Spec,
        journal: Journal,
        evaluation: data.Dataset,
        *,
        without: tuple[str, ...] = (),
        wait_seconds: float = WAIT_SECONDS,
        on_event: Callable[[str, dict[str, Any]], None] = lambda event, facts: None,
    ) -> None:
        self.keyring, self._identity = keys.Keyring.load(keys_folder), keys.Identity.load(keys_folder)
        if self._identity.public != self.keyring.server:
            raise FederationError(f"identity.key in {str(keys_folder)!r} is not the one federation.json lists")
        for name in without:
            self.keyring.party(name)
        self.parties = tuple(party.name for party in self.keyring.parties if party.name not in without)
        self._gone = set(without)  # who will not be asked again, however often the server is started
        self._out = dict.fromkeys(without, "left out with --without")  # who is asked nothing, and why
        self._silent: set[str] = set()  # whose silence made a round void, and who cannot be done without
        self.mailbox = Mailbox(transport, self.keyring, self._identity)
        self.journal, self._evaluation, self._event = journal, evaluation, on_event
        self._wait, self.asked_spec = wait_seconds, spec
        for file in spec.files:
            code.approve(file)
        self._waits = ("", 0.0)  # for what, and since when
        self._told = ("", 0.0)  # what was said of it, and when

    def run(self) -> Report:
        """Everything; returns the report. Whoever calls this holds the journal's lock."""
        began = time.monotonic()
        from dither.federation import surveys  # which subclasses this

        agreed = self.journal.agreement() if self.journal.signed else None
        if agreed and (report := Report.read(self.journal.path)):  # killed before the parties knew
            self.agreement = agreed
            return self._say_goodbye(report, seconds=_COME_BACK_SECONDS)

        counted = self._begun or self.journal.path.joinpath(surveys.STATISTICS).is_file()
        if self.asked_spec.privacy.statistics_epsilon and not counted:
            surveys.write_statistics(self)
        project = surveys.FederatedProject(self) if self.asked_spec.privacy.project_epsilon else None
        if project is not None and self._begun:
            self._evaluation = project.known()
        elif project is not None:
            self.asked_spec, self._evaluation = project.prepare()
        self.agreement = agreement = self._agree()
        self.experiment = agreement.experiment()
        self._session = self._enrol()
        if not self._begun:
            self._create(agreement)
        test, sizes = (self._evaluation.x_test, self._evaluation.y_test), np.array(agreement.sizes, np.int32)
        self.engine = engines.ServerEngine(engines.RunSettings.of(self.experiment), *test, sizes=sizes)
        done, leaves = self.journal.resume(agreement)
        if leaves is not None:
            self.engine.state = train.restore(self.engine.state, leaves)
        self._last_counted = {n: line["round"] for line in self.journal.rounds() for n in line["counted"]}
        rows = self.journal.folder.metrics()
        began -= float(rows[-1]["seconds"]) if rows else 0.0
        total = len(self.experiment.cohorts)
        # An upload at most: words of 8 bytes, a seal's shares for each party, and what goes around them.
        largest = 8 * self.engine.dimension + 256 * len(agreement.names) + (1 << 16)
        facts = {"rounds": total, "done": done, "folder": str(self.journal.path), "upload_bytes": largest}
        self._event("start", facts)
        for index in range(done, total):
            started = time.monotonic()
            line = self._round(index)
            line["seconds"] = round(time.monotonic() - started, 3)
            scores: dict[str, float] = {}
            if index + 1 == total or (index + 1) % agreement.spec.eval_every == 0:
                if self._evaluation.test_hashes is not None:  # may be those of a party on this machine
                    build.refuse_charged(self.asked_spec.data.test_path, self._evaluation.test_hashes)
                scores = self.engine.evaluate()
                name = "test_accuracy" if agreement.classes else "test_r2"
                measured = {name: scores.get(name), "loss": scores.get("loss")}
                seconds = round(time.monotonic() - began, 3)
                self.journal.folder.append_metrics({"round": index + 1, **measured, "seconds": seconds})
            self.journal.complete(line, self.engine.save(), agreement)
            self._last_counted |= dict.fromkeys(line["counted"], index)
            self._event("round", {**line, **scores, "of": total})
        if project is not None:
            project.evaluate(agreement)
        return self._finish(agreement)

    # Before the rounds

    @property
    def _begun(self) -> bool:
        """Whether every party has accepted and is enrolled: from then on not all of them are needed."""
        return self.journal.path.joinpath("spec.toml").is_file()

    def _agree(self) -> Agreement:
        """The agreement, accepted by every party: the one in the journal, or a new one from what parties hold."""
        agreement = self.journal.agreement()
        if agreement is not None and self._begun:
            self.agreement = agreement
            members = {party.name for party in self.keyring.parties}
            self._out |= dict.fromkeys(set(agreement.names) - members, "it is no longer a member")
            self._out |= {name: each["why"] for name, each in self.journal.excluded().items()}
            self._gone |= set(self._out)
            self._check_left()
            self.gather(self._left(), agreement.least)
            return agreement
        if agreement is not None and set(agreement.names) != set(self.parties):
            self.journal.forget_agreement()
            agreement = None
        self.gather(self.parties, len(self.parties))
        if agreement is None:
            agreement = self._new_agreement(self.parties)
            self.journal.save_agreement(agreement)
        safe, warning = collusion_notes(agreement.spec)
        self._have_accepted("terms", agreement, lambda name, answer: None, collusion=safe, warning=warning)
        return agreement

    def _have_accepted(self, kind: str, terms: Terms, take: Take, **facts: Any) -> None:
        """Have every party accept these terms, and keep its hello for secure aggregation."""
        digest, masked = terms.digest, terms.spec.aggregation != "off"
        self._hellos: dict[str, bytes] = {}

        def accepted(name: str, answer: SignedMessage) -> None:
            if answer.kind != "accepted" or answer.fields.get("digest") != digest:
                raise FederationError("it accepted another agreement")
            if masked:
                self._hellos[name] = answer.bytes("hello")
            take(name, answer)
            self._event("accepted", {"party": name})

        told = {"digest": digest, "parties": list(terms.names), "collusion": "", "warning": "", **facts}
        self._event("terms", told)
        self._everybody(kind, terms.names, ({"terms": terms.to_dict()}, {}), accepted, "approve")

    def _new_agreement(self, names: tuple[str, ...]) -> Agreement:
        """What follows from the spec, the server's data and what parties say they hold."""
        evaluation, spec = self._evaluation, federated_spec(self.asked_spec, len(names), self._evaluation.name)
        try:
            agreement = Agreement(
                federation=self.keyring.id,
                run=secrets.token_hex(8),
                spec=self._with_targets(spec, names),
                schema=None if evaluation.schema is None else evaluation.schema.to_dict(),
                classes=evaluation.classes,
                num_features=evaluation.x_test.shape[1],
                image_shape=evaluation.image_shape,
                names=names,
                sizes=tuple(held_out_sizes(self.asked_spec, count)[0] for count in self.records_of(names)),
            ).check()
            agreement.experiment()  # a spec that cannot run is refused before anybody is asked
        except DitherError as error:
            error.args = (f"{error} ({self._extremes(names)})",)
            raise
        return agreement

    def _extremes(self, names: Sequence[str]) -> str:
        """What parties say that may be why the spec cannot run, and who says it."""
        held, greeted = dict(zip(names, self.records_of(names), strict=True)), self.mailbox.greeted
        least, most = min(held, key=held.__getitem__), max(held, key=held.__getitem__)
        said = f"the parties hold {held[least]:,} ({least}) to {held[most]:,} ({most}) records"
        targets = {name: greeted[name]["epsilon"] for name in names if "epsilon" in greeted[name]}
        lowest = min(targets, key=targets.__getitem__, default="")
        return said + f"; the smallest target is ε = {targets[lowest]:.15g} ({lowest})" if lowest else said

    def _with_targets(self, spec: Spec, names: Sequence[str]) -> Spec:
        """The spec with the targets that parties have set for themselves. Each of them checks its own anyway."""
        privacy, greeted = spec.privacy, self.mailbox.greeted
        asked = zip(names, privacy.epsilons or (privacy.epsilon,) * len(names), strict=True)
        targets = [min(target, greeted[name].get("epsilon", math.inf)) for name, target in asked]
        if privacy.noise != "proven" or (not privacy.epsilons and min(targets) >= privacy.epsilon):
            return spec
        return spec.with_values({"privacy.epsilons": targets})

    def records_of(self, names: Iterable[str]) -> list[int]:
        """How many records each party says that it holds."""
        return [int(self.mailbox.greeted[name]["records"]) for name in names]

    def _other_versions(self) -> dict[str, str]:
        """Parties with another version of Dither than the server's."""
        versions_seen = {name: each["versions"]["dither"] for name, each in self.mailbox.greeted.items()}
        return {name: each for name, each in versions_seen.items() if each != __version__}

    @property
    def gone(self) -> list[str]:
        """Parties of the agreement that are out for good."""
        return [name for name in self.agreement.names if name in self._gone]

    def _left(self) -> tuple[str, ...]:
        """Parties that may be asked: all but those who are out, and those with another version of Dither."""
        return tuple(n for n in self.agreement.names if n not in self._out and n not in self._other_versions())

    def _check_left(self) -> None:
        names, least = self.agreement.names, self.agreement.least
        if len(set(names) - set(self._out)) < least:
            why = "; ".join(f"{name} is out: {why}" for name, why in self._out.items())
            raise FederationError(
                f"the agreement asks for {least} of {len(names)} parties, and {why}; start a new run without them"
            )

    def gather(self, names: tuple[str, ...], least: int) -> None:
        """Wait for these parties: all of them, or `least` of them when no other has come for a while."""
        until, seen = time.monotonic() + self._wait, time.monotonic()
        heard: set[str] = set()
        while True:
            self.mailbox.look()
            for name in sorted(set(self.mailbox.greeted) & set(names) - heard):
                heard.add(name)
                seen = time.monotonic()
                self._event("joined", {"party": name, **self.mailbox.greeted[name]})
            other = [f"{n} runs Dither {its}" for n, its in sorted(self._other_versions().items()) if n in heard]
            if len(names) - len(other) < least:
                raise FederationError(
                    f"{', '.join(other)}, the server {__version__}: install one version everywhere"
                )
            enough = len(heard) - len(other) >= least and time.monotonic() - seen > messages.GRACE_SECONDS
            if enough or len(heard) == len(names):
                break
            if time.monotonic() > until:
                away = sorted(set(names) - heard)
                said = f"{', '.join(away)} did not connect within {self._wait:.0f} s"
                raise FederationError(f"{said}; {leave_out(away)}")
            self._waiting("join", set(names) - heard)
            self.mailbox.transport.pause()

    def _everybody(self, kind: str, names: tuple[str, ...], question: Question, take: Take, purpose: str) -> None:
        """Ask before the rounds, when nobody can be done without."""
        replies = self.mailbox.ask(
            kind,
            dict.fromkeys(names, question),
            seconds=self._wait,
            take=take,
            on_wait=lambda who: self._waiting(purpose, who),
        )
        missing = [name for name in names if name not in replies.counted]
        if missing:
            why = {name: replies.reasons.get(name, f"no answer to {kind!r}") for name in missing}
            said = "; ".join(f"{name} does not take part: {each}" for name, each in why.items())
            raise FederationError(f"{said}; {leave_out(missing)}")

    def _waiting(self, what: str, missing: set[str], patience: float = 2.0) -> None:
        """Say whom we wait for: not at once, then when it changes, and every half minute."""
        text, now = f"{what} {sorted(missing)}", time.monotonic()
        if what != self._waits[0]:
            self._waits = (what, now)
        if now - max(self._waits[1], self._told[1]) < patience:
            return
        if text != self._told[0] or now - self._told[1] > 30:
            self._told = (text, now)
            self._event("waiting", {"to": what, "parties": sorted(missing)})

    def _create(self, agreement: Agreement) -> None:
        """Make of the journal's folder a run folder (spec.toml last: a folder that has it can be resumed)."""
        versions_seen = {name: self.mailbox.greeted[name] for name in agreement.names}
        provenance = {**train.provenance(self.experiment), "versions": versions_seen}
        schema = {} if self._evaluation.schema is None else {"schema.toml": self._evaluation.schema.to_toml()}
        # With the files of method and model as this machine knows them.
        spec = replace(agreement.spec, method=self.asked_spec.method, model=self.asked_spec.model)
        files = {**schema, **train.model_source(agreement.spec)}
        self.journal.folder.begin_files({"run": agreement.run, **provenance}, spec, files)

    def _rules(self) -> Rules | None:
        return secagg_rules(self.experiment)

    def _enrol(self) -> ServerSession | None:
        """Secure aggregation: everybody signs the same roster, once for a run."""
        rules, names = self._rules(), self.agreement.names
        if rules is None:
            return None
        saved = self.journal.secagg()
        if saved is not None:
            session = ServerSession.load(saved, self._identity.private)
        else:
            session = ServerSession(
                federation=session_id(self.agreement),
                rules=rules,
                pins=dict(enumerate(self.keyring.party(name).identity for name in names)),
                signing=self._identity.private,
            )
        if session.roster is None:
            for name in names:
                try:
                    session.hello(self._hellos[name])
                except ProtocolAbort as error:
                    raise FederationError(f"{name} does not take part: {error}; {leave_out([name])}") from None
        roster = session.make_roster()
        self.journal.save_secagg(session.save())
        if self._begun:
            return session

        def ask(kind: str, body: bytes, take: Take) -> None:
            self._everybody(kind, names, ({"run": self.agreement.run}, {"secagg": body}), take, "enrol")

        ask("roster", roster, lambda name, answer: session.confirm(answer.bytes("secagg")))
        self.journal.save_secagg(session.save())
        ask("confirmed", session.confirmed(), lambda name, answer: None)
        self._event("enrolled", {"parties": list(names)})
        return session

    # Rounds

    def _round(self, index: int) -> dict[str, Any]:
        names = [self.agreement.names[client] for client in self.experiment.cohorts[index]]
        self._check_left()
        before, left = set(self.journal.excluded()), self._left()
        asked = [name for name in names if name in left]
        result = self._nothing()
        if len(asked) >= self.agreement.least:  # else without effect: nobody is asked, so nobody is charged
            result = self._collect(index, asked)
        counted = np.array([name in result.counted for name in names])
        refusing = np.array([name in result.refused for name in names])
        self.engine.close(index, result.total, counted, counted | refusing)
        return {
            "round": index,
            "cohort": names,
            "counted": [name for name in names if name in result.counted],
            "missing": [name for name in names if name not in result.counted and name not in result.refused],
            "refused": dict(result.refused),
            "attempts": result.attempts,
            "excluded": {n: each["why"] for n, each in self.journal.excluded().items() if n not in before},
            **{name: value for name in ("disputed", "silent") if (value := getattr(result, name))},
        }

    def _nothing(self) -> RoundResult:
        return RoundResult(np.zeros(self.engine.dimension, np.float32))

    def _collect(self, index: int, names: Sequence[str]) -> RoundResult:
        """The sum of these parties' uploads, of as many as answer and at least of those that are needed."""
        return self._collect_open(index, names) if self._session is None else self._collect_masked(index, names)

    def _exclude(self, index: int, name: str, why: str) -> None:
        """From now on that party is asked nothing: it sent what no honest party sends."""
        self.journal.exclude(name, index, why)
        self._out[name] = why
        self._gone.add(name)
        self._event("excluded", {"party": name, "round": index, "why": why})

    def _ask(
        self, index: int, kind: str, questions: Mapping[str, Question], take: Take, **limits: Any
    ) -> messages.Replies:
        """Ask within a round. Liars are excluded."""
        replies = self.mailbox.ask(
            kind,
            questions,
            seconds=self.agreement.spec.federation.round_timeout,
            take=take,
            on_wait=lambda who: self._waiting(f"answer in round {index + 1}", who, patience=10.0),
            **limits,
        )
        for name, why in replies.invalid.items():
            self._exclude(index, name, why)
        return replies

    def _ask_for_uploads(
        self, index: int, names: Iterable[str], take: Take, *, least: int, announcement: bytes | None = None
    ) -> dict[str, str]:
        """Broadcast the model to these parties: whose answers do not count, and why."""
        arrays: dict[str, np.ndarray | bytes] = {f"m{n}": leaf for n, leaf in enumerate(self.engine.message())}
        if announcement is not None:
            arrays["announce"] = announcement
        place = {"run": self.agreement.run, "round": index}
        questions: dict[str, Question] = {name: (place | self._round_fields(name), arrays) for name in names}
        return self._ask(index, self._round_kind, questions, take, least=least).reasons

    def _round_fields(self, name: str) -> dict[str, Any]:
        return {"last_counted": self._last_counted.get(name, -1)}

    def _question_fields(self) -> dict[str, Any] | None:
        """What is asked besides the model."""
        return None

    def _collect_open(self, index: int, names: Sequence[str]) -> RoundResult:
        """Uploads as they are; the server checks each."""
        rows: dict[str, np.ndarray] = {}
        refused: dict[str, str] = {}

        def take(name: str, answer: SignedMessage) -> None:
            rows[name] = self._checked(answer, index)

        attempts, least = 0, self.agreement.least
        while len(rows) < least:
            if attempts:
                self._too_few(index, len(rows), [name for name in names if name not in rows], attempts, refused)
            attempts += 1
            left = [name for name in names if name not in rows and name not in refused]
            refused |= self._ask_for_uploads(index, left, take, least=least - len(rows))
        total = self.engine.sum([rows[name] for name in names if name in rows])
        return RoundResult(total, set(rows), refused, attempts)

    def _checked(self, answer: SignedMessage, index: int) -> np.ndarray:
        """An upload in the open, if an honest party could have sent it."""
        row = self._row(answer, index, "<f4")
        if not np.isfinite(row).all():
            raise FederationError("its upload is not finite")
        largest = largest_norm(self.agreement.spec, self.engine.dimension)
        norm = float(np.linalg.norm(row.astype(np.float64)))
        if norm > largest * (1 + _ROUNDING):
            raise FederationError(f"its upload has norm {norm:.4g}, federation.max_norm is {largest:g}")
        return row

    def _row(self, answer: SignedMessage, index: int, kind: str) -> np.ndarray:
        if answer.kind != "upload" or answer.fields.get("round") != index:
            raise FederationError(
                f"it answered round {index} with {answer.kind!r} of {answer.fields.get('round')}"
            )
        row = answer.array("upload", kind)
        if row.shape != (self.engine.dimension,):
            raise FederationError(f"its upload has shape {row.shape}, expected ({self.engine.dimension},)")
        return row

    def _collect_masked(self, index: int, cohort: Sequence[str]) -> RoundResult:
        """Sums by secure aggregation: the server sees masked words, and opens the sum of those who stayed."""
        session, names, least = self._secagg, self.agreement.names, self.agreement.least
        standing = session.standing(index)
        if standing == "over":  # killed while it was being opened: this round stays without effect
            return self._nothing()
        if standing == "new":
            self._announce(index, cohort)
        refused: dict[str, str] = {}
        tries = 0
        while True:
            announcement = session.announcement()
            self.journal.save_secagg(session.save())
            left = set(self._left())
            refused |= self._ask_for_uploads(
                index,
                [names[client] for client in session.missing if names[client] in left],
                lambda name, answer: session.upload(answer.bytes("upload")),
                least=least,
                announcement=announcement,
            )
            if not session.missing:
                return self._open_sum(index, refused)
            came = len(session.cohort) - len(session.missing)
            if came >= least:
                session.reannounce()
                continue
            tries += 1
            self._too_few(index, came, [names[client] for client in session.missing], tries, refused)

    def _announce(self, index: int, cohort: Sequence[str]) -> None:
        """Open the sum of a round, of what these parties answer to what all of them are asked."""
        asked = messages.asked_digest(self.engine.message(), self._question_fields())
        self._secagg.announce(index, map(self.agreement.number, cohort), self.engine.dimension, asked)

    def _open_sum(self, index: int, refused: dict[str, str]) -> RoundResult:
        """Have the seals taken off; who made one that cannot be is excluded, and the round is without effect."""
        session, names = self._secagg, self.agreement.names
        requests = session.unseal()
        self.journal.save_secagg(session.save())
        silent, _ = self._ask_for_shares(index, "unseal", requests, session.shares)
        disputed = [f"{names[maker]}'s share for {names[who]}" for maker, who in session.disputed]
        liars: dict[str, str] = {}
        if not session.ready:
            more, refusing = self._ask_for_shares(index, "release", session.disputes(), session.released)
            silent |= more
            liars = {name: f"it does not release useless shares: {why}" for name, why in refusing.items()}
        liars |= {names[client]: why for client, why in session.liars().items()}
        for name in sorted(liars, key=names.index):
            if name not in self._out:
                self._exclude(index, name, liars[name])
        result = self._nothing()._replace(refused=refused, attempts=session.attempt + 1, disputed=disputed)
        if not session.ready:
            self._rest(index, silent)
            return result._replace(silent=sorted(silent))
        if liars:
            return result
        counted = {names[client] for client in session.cohort}
        return result._replace(total=self._decoded(session), counted=counted)

    def _decoded(self, session: ServerSession) -> np.ndarray:
        """The numbers behind the words of an opened sum."""
        aggregation = build.aggregation(self.experiment)
        if aggregation is None:
            raise ProtocolAbort("a sum was opened under an agreement without secure aggregation")
        total = encoding.decode(session.open(), aggregation.how)
        if aggregation.noise_std is None and not aggregation.integers:  # noise on integers leaves the ball
            # A masked vector cannot be looked at. Honest ones lie in a ball, so their sum lies in one, too.
            largest = largest_norm(self.agreement.spec, self.engine.dimension) * len(session.cohort)
            total *= min(1.0, largest / max(float(np.linalg.norm(total)), largest))
        return total

    def _ask_for_shares(
        self, index: int, kind: str, requests: Mapping[int, bytes], take: Callable[[bytes], None]
    ) -> tuple[set[str], dict[str, str]]:
        """Who gave no answer that counts, and why if they said so."""
        place = {"run": self.agreement.run}
        questions: dict[str, Question] = {
            self.agreement.names[client]: (place, {"secagg": body}) for client, body in requests.items()
        }
        replies = self._ask(
            index,
            kind,
            questions,
            lambda name, answer: take(answer.bytes("secagg")),
            enough=lambda: self._secagg.ready,
        )
        return set(questions) - replies.counted, replies.reasons

    def _rest(self, index: int, silent: set[str]) -> None:
        """Continue without those whose silence cost a round, if enough others remain: whether they are lost or
        lie, they could cost the next round, too. A restarted server asks them again. If too few remain, the
        second such round of one of them ends the run, because parties are charged for rounds without effect."""
        new = silent - set(self._out)
        if len(set(self._left()) - new) < self.agreement.least:
            if again := silent & self._silent:
                raise FederationError(
                    f"round {index + 1} could not be opened: no help from {', '.join(sorted(again))}, for the "
                    "second time; the run is kept: start the server again when they are back"
                )
            self._silent |= silent
            return
        for name in sorted(new):
            self._out[name] = f"it did not help to open the sum of round {index + 1}"
            self._event("left out", {"party": name, "round": index, "why": self._out[name]})

    @property
    def _secagg(self) -> ServerSession:
        if self._session is None:
            raise ProtocolAbort("no enrolment for secure aggregation")
        return self._session

    def _too_few(
        self, index: int, came: int, missing: Iterable[str], tries: int, refused: Mapping[str, str]
    ) -> None:
        """Wait for parties to come back, or give up when they do not or will not."""
        away, least = sorted(missing), self.agreement.least
        if tries >= _MOST_TRIES or len(self.agreement.names) - len(refused) < least:
            said = "".join(f"; {name} refuses: {why}" for name, why in refused.items())
            raise FederationError(
                f"{self._round_kind} {index + 1} has {came} of at least {least} answers, missing: "
                f"{', '.join(away)}{said}; the run is kept: start the server again when they are back"
            )
        self._waiting(f"come back for {self._round_kind} {index + 1}", set(away), patience=0.0)

    # After the rounds

    def tell_failure(self, why: str) -> None:
        """Tell connected parties why the run stops; they wait for the server to come back."""
        names = self.mailbox.present() - set(self._out)
        question: Question = {"why": why[:_LONGEST_NOTICE]}, {}
        self.mailbox.ask("notice", dict.fromkeys(names, question), seconds=5.0, take=lambda name, answer: None)

    def _finish(self, agreement: Agreement) -> Report:
        lines, folder = self.journal.rounds(), self.journal.folder
        rows, state = folder.metrics(), self.engine.state
        completed = self.experiment.first_rounds(len(lines))
        # Of a round that was left while it was being opened nobody knows who was in the sum that the server saw.
        void = [str(line["round"] + 1) for line in lines if not line["counted"]]
        most_missing = agreement.may_lack if void else int(np.asarray(state.missing)[0])
        report = train.report_of(completed, folder, rows, np.asarray(state.participation)[0], most_missing)
        totals = replace(self._totals(agreement, lines, most_missing), split=self._split(completed, most_missing))
        report = replace(report, federation=totals)
        notes = []
        if most_missing:
            noise = "the proven ε of sums does not count on their noise"
            notes.append(f"at most {most_missing} parties were missing from a sum: {noise}")
        for name, entry in self.journal.excluded().items():
            notes.append(f"{name} was excluded in round {entry['round'] + 1}: {entry['why']}")
        if void:
            notes.append(
                f"without effect: round {', '.join(void)} (the server ended while that sum was being opened, a "
                "seal was false, or too few parties were left); what parties were charged for it stays charged"
            )
        if self.asked_spec.privacy.project_epsilon and not (folder.path / SCORES).is_file():
            notes.append(f"no private evaluation, which every party must answer: without {', '.join(self.gone)}")
        report = report.with_notes(*notes)
        params = self.engine.params()
        folder.save_model({**self.experiment.model.frozen, **train.named_leaves(params)})
        if self.engine.scored:
            x, y = self._evaluation.x_test, self._evaluation.y_test
            records = Labelled(x, y, np.arange(len(y)), "the server's test records")
            judgement = judge(completed, params, [(row["round"], row["loss"]) for row in rows], records)
            report = replace(report, scores=judgement.scores, advice=judgement.advice)
            plots.draw_run(report, rows, folder.path / "plot.png")
        report.save()
        self.journal.sign(self._identity, self.keyring.id)
        return self._say_goodbye(report)

    def _totals(self, agreement: Agreement, lines: list[dict[str, Any]], most_missing: int) -> FederationTotals:
        """What the report says of the parties."""

        def party(name: str, size: int) -> PartyTotals:
            counts = {key: sum(name in line[key] for line in lines) for key in ("counted", "missing", "refused")}
            up, down = (each.get(name, 0) for each in (self.mailbox.bytes_up, self.mailbox.bytes_down))
            return PartyTotals(records=size, **counts, bytes_up=up, bytes_down=down)

        return FederationTotals(
            id=self.keyring.id[:16],
            terms=agreement.digest,
            parties={n: party(n, size) for n, size in zip(agreement.names, agreement.sizes, strict=True)},
            excluded={name: Exclusion(**entry) for name, entry in self.journal.excluded().items()},
            aggregation=agreement.spec.aggregation,
            colluders=agreement.spec.colluders,
            most_missing=most_missing,
            void_rounds=int(np.asarray(self.engine.state.void)[0]),
            seconds_a_round=float(np.median([line["seconds"] for line in lines])) if lines else 0.0,
        )

    def _split(self, completed: build.Experiment, most_missing: int) -> tuple[SpentPart, ...]:
        """What was counted on the same records, the training, and everything together; nothing if only trained."""
        saved = [StatisticsTerms.load(self.journal.path / purpose, "start a new run") for purpose in PURPOSES]
        counted = [terms for terms in saved if terms is not None]
        if not counted:
            return ()
        accountant = completed.accountant(most_missing)
        terms = Budget(0.0, completed.spec.privacy.delta, completed.plan.view, completed.plan.adjacency)
        before, after = (
            [each.release for each in counted if bool(each.trained) is late] for late in (False, True)
        )
        parts = [SpentPart(each.purpose, each.epsilon, each.delta) for each in counted]
        together = with_counts(accountant, terms, before, after)
        return (*parts, SpentPart("training", accountant.epsilon(), terms.delta), SpentPart(TOGETHER, *together))

    def _say_goodbye(self, report: Report, seconds: float = 10.0) -> Report:
        """Tell the parties how the run ended, and keep their statements of releases."""
        statements: dict[str, dict[str, Any]] = {}

        def take(name: str, answer: SignedMessage) -> None:
            statement = answer.fields.get("releases")
            statements[name] = state.check_statement(statement, name, self.agreement.digest, self.keyring)

        accuracy = self.journal.folder.metrics()[-1].get("test_accuracy")
        outcome = {"rounds": len(self.journal.rounds()), "accuracy": accuracy}
        question: Question = {"run": self.agreement.run, **outcome}, {}
        self.mailbox.ask(
            "finish",
            dict.fromkeys(self.agreement.names, question),
            seconds=seconds,
            take=take,
            on_wait=lambda who: self._waiting("hear that the run is over", who),
        )
        state.save_statements(self.journal.path, statements)
        self._event("done", {"folder": str(self.journal.path)})
        return report


_MOST_TRIES = 3
_COME_BACK_SECONDS = 60.0  # for parties of a complete run, which may know of its end and not come
_LONGEST_NOTICE = 400
_ROUNDING = 1e-5  # of a norm that a party computed in float32


def leave_out(names: Iterable[str]) -> str:
    return f"start again later, or leave them out: {' '.join(f'--without {name}' for name in names)}"


class RoundResult(NamedTuple):
    """A round's sum, and who is in it."""

    total: np.ndarray
    counted: Collection[str] = ()
    refused: Mapping[str, str] = MappingProxyType({})
    attempts: int = 0
    disputed: Sequence[str] = ()  # whose share was no use to whom
    silent: Sequence[str] = ()  # who did not help to open the sum, where that made it fail
