"""A party says how much it allows (`dither join --epsilon`). A server with its real keys asks for statistics too,
or takes the others' noise out of a sum by what it broadcasts to them."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from dither.accounting.ledger import Budget, Charge, composed
from dither.accounting.ledger.runs import EVERY_RECORD
from dither.cli import app, federations
from dither.errors import FederationError
from dither.experiment import build, counting
from dither.experiment.counting import Question
from dither.federation import joining, keys, messages
from dither.federation.agreement import Agreement, StatisticsTerms, federated_spec, record_approval
from dither.federation.party import REFUSALS
from dither.privacy.clipping import REACH
from dither.types import Conditions
from tests.federation.parties import Parties, small_spec

SUMS = {
    "secagg.mode": "real",
    "batch_sampling": "full",
    "client_lr": 0.02,
    "randomness": "os",
    "privacy.clip": "example",
    "privacy.noise": "proven",
    "privacy.view": "sum",
    "privacy.epsilon": 1.0,
    "privacy.delta": 1e-5,
    "privacy.adjacency": "zero-out",
    "privacy.colluders": 0,
}


@pytest.fixture(scope="module")
def parties(tmp_path_factory):
    return Parties(tmp_path_factory.mktemp("target"), small_spec(**SUMS, local_steps=1))


def agreement_of(parties, spec):
    dataset = parties.experiment.dataset
    return Agreement(
        federation=keys.Keyring.load(parties.folder / "keys" / "server").id,
        run="c" * 16,
        spec=federated_spec(spec, 4, "breast-cancer"),
        schema=dataset.schema.to_dict(),
        classes=dataset.classes,
        num_features=dataset.x_train.shape[1],
        image_shape=(),
        names=parties.names,
        sizes=tuple(int(size) for size in parties.experiment.partition.size),
    ).check()


def spread(experiment, broadcast):
    """The largest standard deviation of a coordinate of what another client sends, over draws of its noise."""
    simulation = build.make_simulation(experiment)
    inputs = simulation.inputs(experiment.problem, seeds=[0], hyper=build.hypers([experiment]))
    state, run = (jax.tree.map(lambda leaf: leaf[0], each) for each in (simulation.start(inputs), inputs.runs))
    message = jax.tree.map(lambda leaf: jnp.full_like(leaf, broadcast), state.server)
    own = jax.tree.map(lambda leaf: leaf[1], state.clients)

    @jax.jit
    def sent(message):
        upload = simulation.sent(message, own, run, inputs.shared, jnp.int32(0), jnp.int32(1), 4).upload
        return jnp.concatenate([leaf.astype(jnp.int32).reshape(-1) for leaf in jax.tree.leaves(upload)])

    words = [np.asarray(sent(message)) for _ in range(3)]
    return float(np.std(words, axis=0).max())


@pytest.mark.parametrize(("local_steps", "survives"), [(1, True), (2, False)])
def test_others_noise_counts_only_where_no_broadcast_can_remove_it(parties, local_steps, survives):
    spec = small_spec(**SUMS, local_steps=local_steps)
    experiment = build.build_experiment(spec, dataset=parties.experiment.dataset)
    assert spread(experiment, 0.0) > 100
    assert (spread(experiment, REACH) > 100) == survives
    agreement = agreement_of(parties, spec)
    agreed = agreement.experiment()
    alone = agreement.lacking(agreed.plan) == 3
    assert alone == (not survives)
    party = parties.node("ann", target=Budget(1.0, 1e-5))
    if survives:
        party._check_target(agreement, agreed)
        return
    with pytest.raises(FederationError, match="against a server that sees its uploads, above its own target"):
        party._check_target(agreement, agreed)


def asked(parties, party, purpose, run, epsilon, kind="statistics", **fields):
    """The party's answer to statistics of this ε."""
    identity = keys.Identity.load(parties.folder / "keys" / "server")
    keyring = keys.Keyring.load(parties.folder / "keys" / "server")
    agreement = agreement_of(parties, parties.spec)
    terms = StatisticsTerms(
        federation=keyring.id,
        run=run,
        purpose=purpose,
        epsilon=epsilon,
        delta=1e-5,
        spec=agreement.spec.with_values({"secagg.mode": "off"}),
        names=agreement.names,
        sizes=agreement.sizes,
    ).check()
    fields = fields or {"terms": terms.to_dict()}
    body = messages.pack(
        identity, federation=keyring.id, kind=kind, sender=messages.SERVER, to="ann", fields={"run": run, **fields}
    )
    return messages.unpack(
        party.answer(body),
        federation=keyring.id,
        to=messages.SERVER,
        keys={"ann": party.identity.public},
        answers=messages.digest(body),
    )


def test_statistics_count_against_a_partys_own_target(parties):
    party = parties.node("ann", target=Budget(0.5, 1e-5))
    refusal = {"why": REFUSALS["terms"]}
    assert asked(parties, party, "statistics", "d" * 16, 5.0).fields == refusal
    assert "above its own target" in str(party.refusal)
    assert asked(parties, party, "schema", "e" * 16, 0.4).kind == "accepted"
    assert asked(parties, party, "statistics", "f" * 16, 0.4).fields == refusal  # the two together
    assert asked(parties, party, "statistics", "f" * 16, 0.1).kind == "accepted"
    question = Question("survey", ("mean radius",), 1.0).to_dict()
    strict = parties.node("ann", target=Budget(0.3, 1e-5))  # after a restart with a smaller one
    answer = asked(parties, strict, "schema", "e" * 16, 0.4, kind="question", round=0, question=question)
    assert answer.fields == {"why": REFUSALS["other"]}


def test_the_order_of_releases_counts(parties):
    """A training of ε = 0.6 on sampled batches with statistics and an evaluation: as a party checks them, and as a
    server may ask for them (which it may not, see test_inconsistent.py)."""
    values = {**SUMS, "secagg.mode": "off", "batch_sampling": "poisson", "privacy.epsilon": 0.6}
    agreement = agreement_of(
        parties, small_spec(**values | {"privacy.view": "upload"}, local_steps=1, num_rounds=20)
    )
    accountant = agreement.accountant(agreement.experiment()).of([0])
    run = [Charge(EVERY_RECORD, accountant.clients[0].most)], accountant.conditions
    statistics, evaluation = (
        ([Charge(EVERY_RECORD, [((counting.release(epsilon, 1e-5, lists_names=names),), 1)])], Conditions())
        for epsilon, names in ((0.5, True), (0.3, False))
    )
    orders = [statistics, run, evaluation], [evaluation, statistics, run]
    spent = [composed(order, Budget(1.0, 1e-5))[0] for order in orders]
    assert [f"{each:.3f}" for each in spent] == ["0.898", "0.909"]


def test_an_evaluation_of_another_model_comes_before_a_run(tmp_path):
    """It was composed as if it came after, where it counts for less."""
    parties = Parties(tmp_path, small_spec(**SUMS, local_steps=1))
    party = parties.node("ann", target=Budget(1.0, 1e-5))
    old, new = (replace(agreement_of(parties, parties.spec), run=name) for name in ("old", "new"))
    for purpose, trained, epsilon in (("evaluation", old, 0.3), ("statistics", None, 0.5)):
        shared = {"federation": old.federation, "spec": old.spec, "names": old.names, "sizes": old.sizes}
        asked_for = {"purpose": purpose, "epsilon": epsilon, "delta": 1e-5, "trained": trained}
        terms = StatisticsTerms(run=purpose, **shared, **asked_for)
        (party.folder / "runs" / purpose).mkdir(parents=True)
        terms.save(party.folder / "runs" / purpose)
    survey, evaluation = (counting.release(0.5, 1e-5), counting.release(0.3, 1e-5, lists_names=False))

    def found(run):
        return [[look[0].participations[0][0][0] for look, _ in part] for part in party._looks(None, run)]

    assert found(old) == [[survey], [evaluation]]
    assert found(new) == [[survey, evaluation], []]


def test_statistics_after_a_training_count_with_it(tmp_path):
    """Under --epsilon 1 a party accepted a training at ε = 1, and then statistics at ε = 1."""
    parties = Parties(tmp_path, small_spec(**SUMS, local_steps=1))
    party = parties.node("ann", target=Budget(1.0, 1e-5))
    terms = agreement_of(parties, parties.spec).to_dict()
    assert asked(parties, party, "schema", "c" * 16, 1.0, kind="terms", terms=terms).kind == "accepted"
    assert asked(parties, party, "statistics", "d" * 16, 1.0).fields == {"why": REFUSALS["terms"]}
    assert "above its own target" in str(party.refusal)
    # Nor if the owner has approved another training since, which has not begun.
    record_approval(party.folder, replace(agreement_of(parties, parties.spec), run="e" * 16), "test")
    assert asked(parties, party, "statistics", "d" * 16, 1.0).fields == {"why": REFUSALS["terms"]}


@pytest.mark.parametrize(
    ("colluders", "options", "approved"), [(0, [], False), (2, [], True), (0, ["--test"], True)]
)
def test_what_nobody_reads_has_no_warning(parties, monkeypatch, colluders, options, approved):
    """The server says how many parties may collude with it. Where it said 0, `--yes --epsilon 1` approved noise
    that is enough in a sum of four, and one colluding party shows the server an upload: ε = 2.16."""
    spec = small_spec(**{**SUMS, "privacy.colluders": colluders}, local_steps=1)
    agreement = agreement_of(parties, spec)
    experiment = agreement.experiment()
    accountant = agreement.accountant(experiment).of([0])
    assert accountant.proven("sum").value <= 1.0
    assert accountant.proven("upload").value > 1.2
    answers = []

    def join(*given, approve, **more):
        answers.append(approve(agreement, experiment))
        return joining.JoinOutcome("ann", 0, None, [])

    monkeypatch.setattr(joining, "join", join)
    monkeypatch.setattr(federations, "_term_as_interrupt", lambda: None)
    folder = parties.folder / "keys" / "parties" / "ann"
    asked = ["join", "--data", "ann.csv", "--federation", str(folder), "--yes", "--epsilon", "1", *options]
    result = CliRunner().invoke(app, asked)
    assert answers == ["--yes"] * approved
    assert ("approves no agreement with a warning" in str(result.exception)) != approved
    # Who reads the agreement as JSON, to name it with --approve, saw the last warning alone, and of all proofs the
    # one against the weakest adversary.
    told = CliRunner().invoke(app, [*asked, "--json"]).output.splitlines()
    (terms,) = [json.loads(line) for line in told if '"terms"' in line]
    read = [(each["what"], each["agreement"]) for each in terms["terms"]]
    assert read == agreement.describe("ann", experiment)
    assert len([what for what, _ in read if what == "proven ε"]) > 1
