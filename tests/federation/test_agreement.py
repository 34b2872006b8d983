"""The agreement: what a party's records must fit, what its digest covers, and what a federation runs on."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from dither import data
from dither.accounting import compress
from dither.accounting.ledger import Budget, Charge, composed
from dither.accounting.ledger.runs import EVERY_RECORD
from dither.cli import app
from dither.errors import ConfigError, DataError, FederationError
from dither.experiment.folder import write_text
from dither.federation import joining, keys, party, state
from dither.federation.agreement import (
    Agreement,
    PartyData,
    StatisticsTerms,
    collusion_notes,
    federated_spec,
    record_approval,
)
from dither.federation.server import load_evaluation_data
from dither.privacy.sampling import planned_cohorts
from dither.spec import Spec, code
from dither.types import RoundInfo, epsilon_text
from tests.federation.parties import small_spec

SCHEMA = data.Schema(
    label=data.Label("outcome", ("no", "yes")),
    columns=(
        data.Numeric("age", (0, 120), (40, 20), 40),
        data.Categorical("ward", ("a", "b"), "a"),
    ),
)


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("age,ward,outcome\n50,a,yes\n61,z,no\n,b,no\n")
    return path


def agreement(schema=SCHEMA, **changes):
    values = {
        "federation": "f",
        "run": "r",
        "spec": federated_spec(small_spec(), 4, "wards"),
        "schema": None if schema is None else schema.to_dict(),
        "classes": ("no", "yes"),
        "num_features": 4,
        "image_shape": (),
        "names": ("ann", "bob", "cat", "dan"),
        "sizes": (3, 5, 5, 5),
    }
    return Agreement(**{**values, **changes}).check()


def test_a_table_is_encoded_by_the_federations_schema(table):
    x, y = agreement().encode(PartyData(table, "outcome"))
    np.testing.assert_array_equal(x[:, 1:], [[1, 0, 0], [0, 0, 1], [0, 1, 0]])  # ward z is "(other)"
    assert y.tolist() == [1, 0, 0]


def test_an_agreement_on_a_file_that_is_not_at_hand_is_verified(tmp_path, monkeypatch):
    """`dither federation verify` and `dither budget show` refused every run of an own method or model."""
    keys.create(tmp_path / "keys", ("ann", "bob"), hosts=["localhost"])
    keyring, identity = (each.load(tmp_path / "keys" / "server") for each in (keys.Keyring, keys.Identity))
    own = tmp_path / "keys" / "parties" / "ann"
    method = Path(__file__).parents[2] / "examples" / "fedavgm_dp.py"
    agreed = agreement(spec=federated_spec(small_spec().with_values({"method": str(method)}), 4, "wards"))
    journal = state.Journal(tmp_path / "run")
    write_text(journal.path / "spec.toml", "")
    agreed.save(journal.path)
    journal.sign(identity, keyring.id)
    statement = {"party": "ann", "terms": agreed.digest, "releases": 0, "head": ""}
    state.save_statements(journal.path, {"ann": keys.Identity.load(own).signed(statement)})
    agreed.save(own / "runs" / "r")
    record_approval(own, agreed, "test")
    monkeypatch.setattr(code, "_approved", {})
    told = CliRunner().invoke(app, ["federation", "verify", str(journal.path), "--federation", str(own)])
    assert "ann released 0 messages" in told.output, told.exception
    told = CliRunner().invoke(app, ["budget", "show", "--federation", str(own), "--ledger", str(tmp_path / "l")])
    assert told.exit_code == 0, told.exception


def test_an_earlier_run_of_an_own_file_stops_no_other(tmp_path, table, monkeypatch):
    """Whoever had evaluated such a run was refused in every round of the next one, with advice on a method that it
    did not have; `dither federation check` found fault with the party."""
    keys.create(tmp_path / "keys", ("ann", "bob"), hosts=["localhost"])
    own = tmp_path / "keys" / "parties" / "ann"
    method = Path(__file__).parents[2] / "examples" / "fedavgm_dp.py"
    agreed = agreement(spec=federated_spec(small_spec().with_values({"method": str(method)}), 4, "wards"))
    shared = {name: getattr(agreed, name) for name in ("federation", "spec", "names", "sizes")}
    evaluated = StatisticsTerms(**shared, run="e", purpose="evaluation", epsilon=1.0, delta=1e-5, trained=agreed)
    evaluated.save(own / "runs" / "e")
    write_text(own / "runs" / "e" / "answers.json", "{}")
    agreed.save(own / "runs" / "r")
    record_approval(own, agreed, "test")
    monkeypatch.setattr(code, "_approved", {})

    def run(terms):
        """Another run of this party, about to be charged."""
        return SimpleNamespace(store=SimpleNamespace(path=own / "runs" / "x"), agreement=terms)

    party._Training._check_order(run(agreement()))
    with pytest.raises(FederationError, match="evaluated before"):
        party._Training._check_order(run(SimpleNamespace(digest=agreed.digest)))
    findings = joining.check(own, data=table, label="outcome", server="", ledger=tmp_path / "l")
    assert all(finding.good for finding in findings)
    with pytest.raises(FederationError, match=r"runs/r/terms.json': the agreement names method 'fedavgm_dp.py#"):
        Agreement.load(own / "runs" / "r", "")


def test_a_party_computes_the_public_features_that_were_agreed_on(table):
    spec = federated_spec(small_spec(**{"data.transform": "random", "batch_size": 2}), 4, "wards")
    agreed = agreement(spec=spec, num_features=1024)
    plain, _ = agreement().encode(PartyData(table, "outcome"))
    np.testing.assert_array_equal(agreed.encode(PartyData(table, "outcome"))[0], data.transform(plain, "random"))
    empty = agreed.encode(PartyData(table, "outcome"), empty=True)
    assert empty[0].shape == (0, 1024)
    shown = dict(agreed.describe("ann", agreed.experiment()))
    assert shown["features"].startswith("random, computed here")
    assert agreed.digest != agreement().digest


def test_a_missing_label_column(table):
    with pytest.raises(DataError, match=r"label column 'result' is not in 'own.csv'.*outcome"):
        PartyData(table, "result")


def test_another_label_than_the_federations(table):
    with pytest.raises(DataError, match=r"--label 'ward', but the federation predicts 'outcome'"):
        agreement().encode(PartyData(table, "ward"))


def test_a_missing_feature_column(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("age,outcome\n50,yes\n")
    with pytest.raises(DataError, match=r"ward"):
        agreement().encode(PartyData(path))


def test_a_label_that_is_no_class(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("age,ward,outcome\n50,a,perhaps\n")
    with pytest.raises(DataError, match=r"perhaps"):
        agreement().encode(PartyData(path))


def test_arrays_with_another_number_of_features_or_classes(tmp_path):
    path = tmp_path / "own.npz"
    np.savez(path, x=np.zeros((3, 7), np.float32), y=np.array([0, 1, 2]))
    with pytest.raises(DataError, match=r"labels run from 0 to 2, but there are 2 classes"):
        agreement(schema=None).encode(PartyData(path))
    np.savez(path, x=np.zeros((3, 7), np.float32), y=np.array([0, 1, 1]))
    with pytest.raises(DataError, match=r"7 features a record, the federation's model takes 4"):
        agreement(schema=None).encode(PartyData(path))
    with pytest.raises(DataError, match=r"trains on a table"):
        agreement().encode(PartyData(path))


@pytest.mark.parametrize(("local_steps", "credited"), [(1, True), (2, False)])
def test_the_owner_is_shown_what_the_ledger_charges(local_steps, credited):
    """In sums of floats the ledger counts only on a party's own noise. The owner was asked to approve an ε that
    counted on the others' noise, too: 2.14 where 4.97 was charged."""
    values = {"randomness": "os", "secagg.mode": "real", "privacy.colluders": 0, "federation.min_clients": 4}
    spec = small_spec("concentrated", **values, local_steps=local_steps)
    agreed = agreement(spec=federated_spec(spec, 4, "wards"), sizes=(100,) * 4)
    experiment = agreed.experiment()
    charged = experiment.accountant(agreed.lacking(experiment.plan)).of([0])
    shown = [text for what, text in agreed.describe("ann", experiment) if what == "proven ε" and "sums of" in text]
    assert ["at most " + epsilon_text(charged.proven("sum").value) in text for text in shown] == [True]
    assert (charged.proven("sum").value < charged.proven("upload").value) == credited


def test_the_owner_is_shown_what_one_record_costs_where_whole_clients_are_protected():
    """DP-FedAvg: the ε of a whole client was shown, 979, and 3615 was charged for one record. Its uploads carry no
    noise of the party's."""
    spec = small_spec("dp-fedavg", randomness="os")
    agreed = agreement(spec=federated_spec(spec, 4, "wards"), sizes=(100,) * 4)
    experiment = agreed.experiment()
    accountant = experiment.accountant(agreed.lacking(experiment.plan))
    rounds = [accountant.ledger_releases(RoundInfo(index, 0, 100, 4)) for index in range(3)]
    terms = Budget(1.0, spec.privacy.delta, "final")
    charged, _ = composed([([Charge(EVERY_RECORD, compress(rounds))], accountant.conditions)], terms)
    assert charged > 3 * accountant.proven("final").value
    shown = agreed.describe("ann", experiment)
    (final,) = [text for what, text in shown if what == "proven ε" and "final model" in text]
    assert f"at most {epsilon_text(charged)} " in final
    assert "numbers as they are, readable by the server" in dict(shown)["what leaves"]


def test_the_owner_is_warned_of_cohorts_that_the_server_can_choose():
    """A third of a cohort may collude, and a third of all parties do: of 12 parties, 4. A server that looks for a
    seed finds one with which more than the third of 6 are in every cohort of a party."""
    values = {"secagg.mode": "real", "num_clients": 12, "num_rounds": 6, "privacy.colluders": -1}
    notes = {}
    for size in (6, 12):
        spec = federated_spec(small_spec(**values, cohort_size=size), 12, "wards")
        notes[size] = collusion_notes(spec)[1]
    assert spec.colluders == 4
    assert not notes[12]
    assert "a third of all parties, 4, collude with it" in notes[6]

    def met(seed):
        drawn = planned_cohorts(seed, np.arange(6), 12, 6)
        return [len({1, 2, 3, 4} & set(cohort.tolist())) for cohort in drawn if 0 in cohort]

    found = next(seed for seed in range(1000) if len(met(seed)) >= 3 and min(met(seed)) > 2)
    assert found == 11


def test_every_part_of_the_terms_is_in_their_digest():
    first = agreement()
    assert Agreement.from_dict(json.loads(json.dumps(first.to_dict()))).digest == first.digest
    other_schema = data.Schema(SCHEMA.label, (SCHEMA.columns[0]._replace(bounds=(0, 119)), SCHEMA.columns[1]))
    quieter = first.spec.with_values({"privacy.noise_std": 0.05})
    for changed in (
        agreement(schema=other_schema),
        agreement(spec=quieter),
        agreement(sizes=(4, 5, 5, 5)),
        agreement(names=("ann", "bob", "dan", "cat")),
        agreement(run="s"),
        agreement(classes=("yes", "no")),
    ):
        assert changed.digest != first.digest


def test_terms_that_do_not_fit_together_are_refused():
    with pytest.raises(FederationError, match=r"3 sizes"):
        agreement(sizes=(3, 5, 5))
    with pytest.raises(FederationError, match=r"twice"):
        agreement(names=("ann", "ann", "cat", "dan"))
    with pytest.raises(FederationError, match=r"of type NoneType"):
        Agreement.from_dict({"format": 1})


def test_a_federation_never_runs_on_a_simulations_settings():
    spec = federated_spec(small_spec(**{"randomness": "auto", "secagg.mode": "ideal"}), 4, "wards")
    assert (spec.randomness, spec.secagg.mode, spec.data.path) == ("os", "real", "")
    with pytest.raises(ConfigError, match=r"num_clients=4, but the federation has 5"):
        federated_spec(small_spec(), 5, "wards")
    with pytest.raises(ConfigError, match=r"dropout"):
        federated_spec(small_spec(**{"federation.dropout": 0.1}), 4, "wards")


def test_the_spec_and_the_schema_in_the_manual_are_whole(tmp_path, monkeypatch):
    """As a reader copies them: the server's agreement with five parties, each of which accepts its settings."""
    page = Path(__file__).parents[2] / "docs" / "deployment.md"
    schema, spec = re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    monkeypatch.chdir(tmp_path)
    Path("schema.toml").write_text(schema)
    Path("spec.toml").write_text(spec)
    asked = Spec.from_any(Path("spec.toml"))
    evaluation = load_evaluation_data(asked)
    names = tuple("abcde")
    offered = agreement(
        schema=evaluation.schema,
        spec=federated_spec(asked, 5, evaluation.name),
        classes=evaluation.classes,
        num_features=evaluation.x_test.shape[1],
        names=names,
        sizes=(640,) * 5,
    )
    assert federated_spec(offered.spec, 5, offered.spec.data.name) == offered.spec
    experiment = offered.experiment()
    rows = dict(offered.describe("a", experiment))
    assert any("colludes with up to 2 of the 5" in str(value) for value in rows.values())
