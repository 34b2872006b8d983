"""Private statistics over a federation: the numbers of a simulation, charged at each party, under its terms."""

import json
from dataclasses import replace

import numpy as np
import pytest

from dither.accounting.ledger import Budget, Ledger
from dither.errors import FederationError, SpecError
from dither.experiment import counting
from dither.experiment.account import TOGETHER, account
from dither.experiment.counting import Counting, Question, noise_words
from dither.experiment.evaluation import PrivateScores
from dither.experiment.private_schema import Wanted
from dither.experiment.start import plan_project, start_project
from dither.experiment.statement import statement
from dither.experiment.statistics import describe
from dither.federation import keys, messages
from dither.federation.agreement import PartyData, StatisticsTerms
from dither.federation.party import Party
from dither.federation.server import Coordinator, load_evaluation_data
from dither.federation.state import Journal
from dither.federation.surveys import FederatedProject, StatisticsCoordinator, write_statistics
from dither.spec import Spec
from dither.types import epsilon_text
from tests.experiment.test_private_schema import clinic
from tests.federation.parties import FIRST, LocalTransport

NAMES = ("ann", "bob", "cat")
ASKED = {
    "data.label": "ill",
    "privacy.project_epsilon": 4.0,
    "secagg.mode": "real",
    "randomness": "seeded",
    "num_clients": 0,
    "cohort_size": 3,
    "data.partition": "files",
    "federation.round_timeout": 20.0,
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(messages, "_LOOK_SECONDS", 0.0)


class Clinics:
    """Three parties with a table each, and their server."""

    def __init__(self, folder, records=1500, **changes):
        self.folder, self.spec, self.approved = folder, Spec.from_any({**ASKED, **changes}), []
        keys.create(folder / "keys", NAMES, hosts=["localhost"])
        for seed, name in enumerate(NAMES):
            table = clinic(records, seed)
            table.loc[:3, "ill"] = ["maybe", ""] * 2  # blanks: no party refuses because of them
            table.to_csv(self.file(name), index=False)
        self.nodes = {name: self.node(name) for name in NAMES}
        self.transport = LocalTransport(
            {FIRST + n: (lambda body, name=name: self.nodes[name].answer(body)) for n, name in enumerate(NAMES)}
        )

    def file(self, name):
        return self.folder / f"{name}.csv"

    def approve(self, terms, experiment):
        self.approved.append(terms)
        return "test"

    def node(self, name, **changes):
        return Party(
            self.folder / "keys" / "parties" / name,
            PartyData(self.file(name)),
            ledger=Ledger(self.folder / f"{name}.sqlite"),
            approve=self.approve,
            seeded=True,
            **changes,
        )

    def coordinator(self, **changes):
        place = self.folder / "run"
        place.mkdir(exist_ok=True)
        return Coordinator(
            self.transport,
            self.folder / "keys" / "server",
            self.spec,
            Journal(place),
            load_evaluation_data(self.spec),
            wait_seconds=20.0,
            **changes,
        )

    def asking(self, budget=(4.0, 1e-5), purpose="statistics", **changes):
        coordinator = self.coordinator(**changes)
        coordinator.gather(coordinator.parties, len(coordinator.parties))
        return StatisticsCoordinator(coordinator, purpose, budget)

    def simulated(self, budget=(4.0, 1e-5)):
        words = [noise_words("seeded", self.spec.seed, "statistics", client) for client in range(3)]
        return Counting([counting.read(self.file(name)) for name in NAMES], *budget, words)

    def spent(self, name):
        ledger = self.nodes[name].ledger
        return [each for dataset in ledger.datasets() for each in ledger.spent(dataset)]


@pytest.mark.parametrize("kind", ["statistics", "question"])
def test_a_party_whose_text_cannot_be_written_is_named(tmp_path, kind):
    """Half a character as the name of a column or of a category ended the coordinator, whoever sent it."""
    clinics = Clinics(tmp_path, 60)
    liar = clinics.nodes["bob"]
    handle = liar._handle

    def lies(message):
        what, fields, arrays = handle(message)
        name = "columns" if message.kind == "statistics" else "names"
        fields = {**fields, name: ["\ud800"] if name == "columns" else [["\ud800"]]} if name in fields else fields
        return what, fields, arrays

    liar._handle = lambda message: lies(message) if message.kind == kind else handle(message)
    with pytest.raises(FederationError, match="bob does not take part: a header that cannot be read"):
        clinics.asking().names(Question("names", ("grade",), 0.1))


def lying(clinics, changed, *names):
    """These parties list other columns, or other names of categories."""

    def lies(handle, message):
        what, fields, arrays = handle(message)
        return what, {name: changed.get(name, lambda it: it)(each) for name, each in fields.items()}, arrays

    for name in names:
        node = clinics.nodes[name]
        node._handle = lambda message, handle=node._handle: lies(handle, message)


@pytest.mark.parametrize("left", [0, -1])
def test_a_party_that_lacks_the_label_is_named(tmp_path, left):
    """The others could not tell whom to leave out."""
    clinics = Clinics(tmp_path, 60)
    lying(clinics, {"columns": lambda it: [name for name in it[:left] if name != "ill"]}, "bob")
    with pytest.raises(FederationError, match=r"^bob: no column 'ill' .* --without bob$"):
        clinics.asking().header  # noqa: B018


@pytest.mark.parametrize("columns", [["ill", "age", "age"], ["ill"]])
def test_a_party_whose_columns_make_no_schema_is_named(tmp_path, columns):
    """A column listed twice, or nothing but the label, ended the server with an error that named nobody."""
    clinics = Clinics(tmp_path, 60)
    lying(clinics, {"columns": lambda it: columns}, "bob")
    with pytest.raises(FederationError, match=r"bob.*: (it lists a column twice|no column).*--without bob$"):
        clinics.asking().header  # noqa: B018


def test_a_label_that_no_table_has_is_the_specs_fault(tmp_path):
    """All parties were named, as if their tables were wrong."""
    with pytest.raises(FederationError, match=r"^data.label='il' is in no party's table.*'ill'"):
        Clinics(tmp_path, 60, **{"data.label": "il"}).asking().header  # noqa: B018


def test_counting_goes_on_without_a_party_that_did_not_take_part(tmp_path):
    """As the server's message says. It kept the terms of all three, and waited for the one that was left out."""
    clinics = Clinics(tmp_path, 60)
    lying(clinics, {"digest": lambda it: "another"}, "bob")
    with pytest.raises(FederationError, match=r"bob does not take part: .* --without bob"):
        clinics.asking()
    asking = clinics.asking(without=("bob",))
    assert asking.agreement.names == ("ann", "cat")
    assert asking.total(QUESTIONS[0]._replace(share=0.5))


def test_statistics_that_are_complete_wait_for_nobody(tmp_path, monkeypatch):
    """A party that was gone for good before the training kept the server waiting for it: `--without` it, as the
    message asked, the server waited all the same."""
    clinics = Clinics(tmp_path, 60, **{"privacy.statistics_epsilon": 9.0})
    monkeypatch.setattr(FederatedProject, "prepare", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        clinics.coordinator().run()
    del clinics.transport.answer[FIRST + 1]
    again = clinics.coordinator(without=("bob",))
    again._wait = 2.0
    with pytest.raises(KeyboardInterrupt):  # where the project begins
        again.run()


@pytest.mark.parametrize(("first", "then"), [((), ("bob",)), (("bob",), ())])
def test_a_counting_that_was_begun_ends_with_the_parties_it_began_with(tmp_path, first, then):
    """`--without bob` was not heard: the server counted bob or, where bob was away, waited for him."""
    clinics = Clinics(tmp_path, 60)
    clinics.asking(without=first).total(QUESTIONS[0])
    said = r"began with ann, .*: start again with .*--without.*, or start a new run$"
    with pytest.raises(FederationError, match=said):
        clinics.asking(without=then)
    clinics.asking(without=first).total(QUESTIONS[0])


def test_a_sum_that_cannot_be_opened_ends_the_counting(tmp_path, monkeypatch):
    """The server named nobody, and asked to be started again: which ended in the same way for ever."""
    clinics = Clinics(tmp_path, 60, **{"federation.round_timeout": 1.0})
    asking = clinics.asking()
    bob, honest = FIRST + 1, clinics.transport.answer[FIRST + 1]
    monkeypatch.setitem(clinics.transport.answer, bob, lambda body: None if b'"unseal"' in body else honest(body))
    with pytest.raises(FederationError, match=r"bob did not help to open its sum, .*; start a new run$"):
        asking.total(QUESTIONS[0])
    monkeypatch.undo()
    monkeypatch.setattr(messages, "_LOOK_SECONDS", 0.0)
    asking = clinics.asking()
    with pytest.raises(FederationError, match=r"server ended while it opened its sum, .*; start a new run$"):
        asking.total(QUESTIONS[0])


def test_a_project_is_split_by_the_counts_that_were_agreed_to(tmp_path):
    """A party that said another count before the evaluation changed its ε, when the rest was spent."""
    clinics = Clinics(tmp_path, 60)
    asking = clinics.asking(purpose="schema")
    project = FederatedProject(asking)
    project._coordinator = coordinator = clinics.coordinator()
    coordinator.gather(NAMES, 3)
    before = project._budgets(NAMES)
    coordinator.mailbox.greeted["bob"]["records"] = 2**31 - 1
    assert project._budgets(NAMES) == before
    (tmp_path / "run" / "schema" / "schema.toml").touch()
    assert project._budgets(NAMES[:2]) == before  # which the schema was made with


@pytest.mark.parametrize("name", ["", "NA", "high ", "1.0", "x" * 1001])
def test_a_party_that_lists_what_no_cell_reads_is_named(tmp_path, name):
    """Two spellings of one category made a schema that nobody can read, whenever the server was started again."""
    clinics = Clinics(tmp_path, 200)
    lying(clinics, {"names": lambda it: [[*names, name] for names in it]}, "bob")
    with pytest.raises(FederationError, match="bob does not take part: it lists names"):
        clinics.asking().names(Question("names", ("grade",), 0.1))


def test_names_that_do_not_fit_into_a_question_stop_nobody(tmp_path):
    """The question was longer than a message may be: every honest party refused it."""
    clinics = Clinics(tmp_path, 200)
    long = [chr(0x1F600) * 900 + str(number) for number in range(60)]
    for party in NAMES:
        lying(
            clinics, {"names": lambda it, p=party: [[*names, *(p + each for each in long)] for names in it]}, party
        )
    asking = clinics.asking()
    listed = asking.names(Question("names", ("grade", "visit"), 0.3))
    assert {"high", "low"} <= set(listed[0])
    asking.total(Question("categories", ("grade", "visit"), 0.1, categories=tuple(map(tuple, listed))))


def test_names_that_do_not_fit_into_an_answer_are_left_out(tmp_path, monkeypatch):
    """A wide table with long categories: the server took an honest party's list for a lie, when it was charged."""
    long = [[chr(0x1F600) * 900 + f"{column} {number}" for number in range(64)] for column in range(4)]
    monkeypatch.setattr(counting.Institution, "names", lambda self, question: [["high", *long[0]], *long[1:]])
    listed = Clinics(tmp_path, 60).asking().names(Question("names", ("grade", "visit", "age", "ill"), 0.3))
    assert "high" in listed[0]
    assert sum(map(len, listed)) < 64


QUESTIONS = [
    Question("survey", ("age", "grade"), 0.2),
    Question("histogram", ("age", "year"), 0.2, ((0.0, 128.0), (1980.0, 2040.0)), label="ill", classes=("no",)),
    Question("sums", ("age",), 0.2, ((0.0, 128.0),)),
    Question("categories", ("grade",), 0.1, categories=(("low", "high"),)),
]


@pytest.mark.parametrize("mode", ["real", "off"])
def test_sums_are_those_of_the_simulation(tmp_path, mode):
    clinics = Clinics(tmp_path, 200, **{"secagg.mode": mode})
    asking, simulated = clinics.asking(), clinics.simulated()
    for question in QUESTIONS:
        ours, std = asking.total(question)
        theirs, expected = simulated.total(question)
        assert std == expected
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one, other)
    names = Question("names", ("grade", "visit"), 0.3)
    assert asking.names(names) == simulated.names(names) == [["high", "low"], []]
    assert asking.records == simulated.records == 600
    for name in NAMES:
        (spent,) = clinics.spent(name)
        assert 3.9 < spent.epsilon <= 4.0
    with pytest.raises(FederationError, match=r"was not answered by all|the party's own output says why"):  # spent
        asking.total(QUESTIONS[0])


def test_statistics_of_all_columns_are_those_of_the_simulation(tmp_path):
    clinics = Clinics(tmp_path, 200, **{"privacy.statistics_epsilon": 9.0})
    result = write_statistics(clinics.coordinator())
    assert result.columns == describe(clinics.simulated((9.0, 1e-5)), list(clinic(1).columns))
    assert json.loads((tmp_path / "run" / "statistics.json").read_text())["epsilon"] == 9.0


def test_a_party_answers_once_and_within_its_terms(tmp_path):
    clinics = Clinics(tmp_path, 200)
    asking = clinics.asking()
    assert [terms.purpose for terms in clinics.approved] == ["statistics"] * 3
    first, _ = asking.total(QUESTIONS[0])
    # a server that starts again asks nothing twice; parties that start again give the same answers
    again = clinics.asking()
    clinics.nodes = {name: clinics.node(name) for name in NAMES}
    np.testing.assert_array_equal(again.total(QUESTIONS[0])[0][0], first[0])
    assert len(clinics.approved) == 3
    # a folder that forgot what it answered gives no second answer with fresh noise
    (tmp_path / "keys" / "parties" / "ann" / "runs" / asking.agreement.run / "answers.json").unlink()
    with pytest.raises(FederationError, match="does not remember"):
        clinics.node("ann")._current(asking.agreement.run)


def test_a_server_that_asks_more_than_was_agreed_is_refused(tmp_path):
    clinics = Clinics(tmp_path, 200, **{"secagg.mode": "off"})
    asking = clinics.asking()
    first, _ = asking.total(QUESTIONS[0])
    forgotten = {"headers": asking._saved()["headers"], "answers": []}

    def again(question):
        asking._save(forgotten)
        asking._index = -1
        return asking.total(question)

    np.testing.assert_array_equal(again(QUESTIONS[0])[0][0], first[0])  # no fresh noise to average over
    for other in (QUESTIONS[3], QUESTIONS[0]._replace(share=0.3), QUESTIONS[0]._replace(columns=("age",))):
        with pytest.raises(FederationError, match="not answered by all"):
            again(other)
    asking._save({**forgotten, "answers": [0]})
    asking._index = 0
    with pytest.raises(FederationError, match="not answered by all"):  # 0.2 of the budget is spent
        asking.total(QUESTIONS[0]._replace(share=0.81))


def test_terms_from_strangers_are_checked(tmp_path):
    good = Clinics(tmp_path, 50).asking().agreement
    assert StatisticsTerms.from_dict(good.to_dict()).digest == good.digest
    for change in (
        {"purpose": "curiosity"},
        {"epsilon": 1},
        {"epsilon": -1.0},
        {"purpose": "evaluation"},
        {"names": ["ann", "ann", "cat"]},
        {"sizes": [50, 50]},
        {"run": "../.."},
        {"format": 2},
        {"spec": {**good.spec.to_dict(), "method": "theirs.py"}},  # which nobody here approved
    ):
        with pytest.raises(Exception, match=r"agreement|epsilon"):
            StatisticsTerms.from_dict({**good.to_dict(), **change})
    many = replace(good, names=tuple(f"p{n}" for n in range(60)), sizes=(50,) * 60)
    sparse = {"num_clients": 60, "cohort_size": 60, "privacy.colluders": 20, "secagg.neighbours": 20}
    many = replace(many, spec=good.spec.with_values(sparse))
    with pytest.raises(SpecError, match="look for an order of the ring"):  # the same as in training
        many.rules  # noqa: B018
    words = dict(good.describe("ann"))
    assert "at most 4" in words["proven ε"]
    assert "masked" in words["what leaves"]
    careless = replace(good, delta=0.1, spec=good.spec.with_values({"randomness": "os"}))
    assert "lets the guarantee fail for 5 of 50 records" in dict(careless.describe("ann"))["WARNING"]


def test_a_party_with_too_few_records_to_hold_some_out_is_named_before_anything_is_spent(tmp_path):
    """The evaluation noticed it, when all the rest was spent, and the model was never saved."""
    clinics = Clinics(tmp_path, 200)
    clinics.nodes["bob"].source.count = 2
    with pytest.raises(FederationError, match=r"^bob: too few records .* --without bob$"):
        FederatedProject(clinics.coordinator()).prepare()
    assert not clinics.approved


def after(round):
    """Kills the server after this round."""

    def killed(event, facts):
        if event == "round" and facts["round"] == round:
            raise KeyboardInterrupt

    return killed


def test_a_project_goes_on_after_a_restart(tmp_path):
    """The server had forgotten the schema: it died with a TypeError, whenever it was started again."""
    clinics = Clinics(tmp_path, num_rounds=3)
    with pytest.raises(KeyboardInterrupt):
        clinics.coordinator(on_event=after(0)).run()
    report = clinics.coordinator().run()
    assert report.rounds == 3
    assert (tmp_path / "run" / "scores.json").is_file()


@pytest.mark.slow
def test_a_party_that_is_away_when_its_answer_is_needed_is_named(tmp_path):
    """The training had gone on without it, after a restart of the server, which ended in a KeyError."""
    clinics = Clinics(tmp_path, num_rounds=2, **{"federation.min_clients": 2, "privacy.colluders": 0})
    with pytest.raises(KeyboardInterrupt):
        clinics.coordinator(on_event=after(0)).run()
    bob = clinics.transport.answer.pop(FIRST + 1)
    again = clinics.coordinator()
    again._wait = 4.0
    with pytest.raises(FederationError, match=r"bob did not connect within 4 s; .* --without bob$"):
        again.run()
    clinics.transport.answer[FIRST + 1] = bob
    assert clinics.coordinator().run().rounds == 2
    assert (tmp_path / "run" / "scores.json").is_file()


@pytest.mark.parametrize("why", ["excluded", "left out", pytest.param("revoked", marks=pytest.mark.slow)])
def test_a_project_ends_without_scores_where_a_party_is_gone_for_good(tmp_path, why):
    """All must answer an evaluation: the server waited in vain, and the model was never saved."""
    few = {"federation.min_clients": 2, "privacy.colluders": 0, "federation.round_timeout": 5.0}
    clinics = Clinics(tmp_path, num_rounds=2, **few)
    bob, honest = FIRST + 1, clinics.transport.answer[FIRST + 1]
    if why == "excluded":
        clinics.transport.answer[bob] = lambda body: b"garbage" if b'"kind":"round"' in body else honest(body)
        report = clinics.coordinator().run()
    else:
        with pytest.raises(KeyboardInterrupt):
            clinics.coordinator(on_event=after(0)).run()
        if why == "revoked":
            keys.revoke(tmp_path / "keys", "bob")
        report = clinics.coordinator(without=("bob",) * (why == "left out")).run()
    assert any("no private evaluation" in note and "without bob" in note for note in report.notes)
    assert [part.what for part in report.federation.split] == ["schema", "training", TOGETHER]
    assert (
        "model.safetensors"
        in Journal(tmp_path / "run").verify(keys.Keyring.load(tmp_path / "keys" / "server"))["files"]
    )


@pytest.mark.slow
def test_one_epsilon_for_a_federation(tmp_path):
    clinics = Clinics(tmp_path, num_rounds=40)
    clinics.nodes["bob"] = clinics.node("bob", target=Budget(4.0, 1e-5))  # which it is, with schema and evaluation
    report = clinics.coordinator().run()
    assert report.spec.num_rounds == report.rounds == 40  # the spec's, not Dither's choice
    assert [terms.__class__.__name__ for terms in clinics.approved].count("StatisticsTerms") == 6
    scores = json.loads((tmp_path / "run" / "scores.json").read_text())
    for name in NAMES:
        (spent,) = clinics.spent(name)
        assert len(spent.runs) == 3
    delta = report.spec.privacy.delta
    ledger = clinics.nodes["ann"].ledger
    (dataset,) = ledger.datasets()
    (spent,) = ledger.spent(dataset, delta=delta)
    assert 3.9 < spent.epsilon <= 4.0
    # the same in a simulation
    files = [clinics.file(name) for name in NAMES]
    plan = plan_project(files, Wanted("ill"), epsilon=4.0)
    values = {"randomness": "seeded", "secagg.mode": "real", "privacy.colluders": 1, "num_rounds": 40}
    project = start_project(
        plan, out=tmp_path / "sim", ledger=tmp_path / "sim.sqlite", new_ledger=True, values=values
    )
    deployed = Spec.from_any(tmp_path / "sim" / "federation.toml")
    for key in ("data.label", "privacy.project_epsilon", "secagg.mode", "cohort_size", "data.partition"):
        assert deployed.flat()[key] == clinics.spec.flat()[key]
    assert project.split[-1].what == TOGETHER
    assert project.epsilon.epsilon == pytest.approx(spent.epsilon, abs=1e-6)
    # what the server's run folder says of all three: it showed the training's ε alone
    split = account(tmp_path / "run").split
    assert [part.what for part in split] == ["schema", "evaluation", "training", TOGETHER]
    assert split[-1].epsilon == pytest.approx(spent.epsilon, abs=1e-6)
    assert split[-1].epsilon > split[-2].epsilon == report.epsilon.proven().value
    assert f"comes to ε = {epsilon_text(split[-1].epsilon)}" in statement(tmp_path / "run").to_markdown()
    federated = (tmp_path / "run" / "schema" / "schema.toml").read_text().split("[privacy]")[0]
    simulated = (tmp_path / "sim" / "schema.toml").read_text().split("[privacy]")[0]
    assert federated.splitlines()[4:] == simulated.splitlines()[4:]
    assert PrivateScores.from_json(json.dumps(scores)).model.keys() == scores["model"].keys()
    for name, (value, low, high) in scores["model"].items():
        assert (value, low, high) == pytest.approx(tuple(project.scores.model[name]), abs=1e-6)
