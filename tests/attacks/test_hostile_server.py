"""A server with its real keys sends agreements: a path of the party's machine as method, junk, huge numbers.

Whatever it sends, the party executes and opens nothing that it names, refuses quickly and cheaply, and says always
the same: the server learns nothing of the party's files or records. The owner reads the reason.
"""

import copy
import hashlib
import json
import random
import tracemalloc
from dataclasses import replace

import pytest

from dither.cli.federations import _approval
from dither.errors import FederationError
from dither.federation import keys, messages
from dither.federation.agreement import Agreement, approved_digest, federated_spec
from dither.spec import code
from tests.federation.parties import Parties, small_spec

REFUSED = "the agreement is refused; the party's own output says why"
MEBIBYTE = 1 << 20


class Server:
    """The server's keys in hostile hands, and a party whose owner would not agree to anything."""

    def __init__(self, folder):
        spec = small_spec(**{"secagg.mode": "real", "federation.min_clients": 2})
        self.parties = Parties(folder, spec)
        self.identity = keys.Identity.load(folder / "keys" / "server")
        self.federation = keys.Keyring.load(folder / "keys" / "server")
        dataset = self.parties.experiment.dataset
        self.agreement = Agreement(
            federation=self.federation.id,
            run="b" * 16,
            spec=federated_spec(spec, 4, "breast-cancer"),
            schema=dataset.schema.to_dict(),
            classes=dataset.classes,
            num_features=dataset.x_train.shape[1],
            image_shape=(),
            names=self.parties.names,
            sizes=(100,) * 4,
        ).check()
        self.asked = []
        self.party = self.parties.node("ann", approve=self.owner)

    def owner(self, agreement, experiment):
        self.asked.append(agreement)
        raise FederationError("the owner does not agree")

    def ask(self, agreement, party):
        """The party's answer to this agreement."""
        body = messages.pack(
            self.identity,
            federation=self.federation.id,
            kind="terms",
            sender=messages.SERVER,
            to="ann",
            fields={"terms": agreement},
        )
        return messages.unpack(
            party.answer(body),
            federation=self.federation.id,
            to=messages.SERVER,
            keys={"ann": party.identity.public},
            answers=messages.digest(body),
        )

    def refused(self, agreement):
        """What the owner reads; what the server hears is the same every time."""
        answer = self.ask(agreement, self.party)
        assert (answer.kind, dict(answer.fields), dict(answer.arrays)) == ("refused", {"why": REFUSED}, {})
        assert str(self.party.refusal).isprintable()
        return str(self.party.refusal)

    def with_values(self, **changes):
        """The agreement with values set, `spec__privacy__delta=0`."""
        found = copy.deepcopy(self.agreement.to_dict())
        for key, value in changes.items():
            at = found
            *path, last = key.split("__")
            for part in path:
                at = at[part]
            at[last] = value
        return found


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    return Server(tmp_path_factory.mktemp("hostile") / "federation")


def test_no_file_that_the_server_names_is_executed(server, tmp_path):
    tool, ran = tmp_path / "tool.py", tmp_path / "ran"
    tool.write_text(
        f"import pathlib; pathlib.Path({str(ran)!r}).write_text('x')\nOPTIONS = {{}}\nprepare = print\n"
    )
    server.refused(server.with_values(spec__method=str(tool), spec__method_options={}))
    assert not ran.exists()


def test_a_file_is_a_method_where_its_content_was_approved(server, tmp_path):
    """By its digest, whatever it is called there and whatever the file holds by then; nowhere else."""
    path = tmp_path / "mine.py"
    path.write_text("from dither.methods.cpfed import OPTIONS, prepare\n\nSECURE_AGGREGATION = True\n")
    spec = server.agreement.spec.with_values({"method": str(path)})
    agreement = replace(server.agreement, spec=federated_spec(spec, 4, "breast-cancer"))
    name = f"mine.py#{hashlib.sha256(path.read_bytes()).hexdigest()}"
    assert agreement.spec.method == name
    asked = json.loads(json.dumps(agreement.to_dict()))
    code._approved.clear()  # what making the agreement has left: another machine
    assert "--method FILE" in server.refused(asked)
    code.approve(path)
    party = server.parties.node("ann", approve=server.owner)
    path.write_text("raise RuntimeError\n")
    server.asked.clear()
    assert server.ask(asked, party).fields == {"why": REFUSED}
    assert [found.spec.method for found in server.asked] == [name]  # the owner was asked, and saw its options
    shown = dict(server.asked[0].describe("ann", server.asked[0].experiment()))
    assert json.loads(shown["method options"]) == agreement.spec.method_options
    assert str(party.refusal) == "the owner does not agree"
    asked["spec"]["method"] = name[:-1] + "x"
    assert "--method FILE" in server.refused(asked)


def test_the_server_does_not_learn_which_files_there_are(server, tmp_path):
    (tmp_path / "raises.py").write_text("raise RuntimeError('boom')\n")
    reasons = set()
    for path in (tmp_path / "none.py", tmp_path / "raises.py", json.__file__):
        reason = server.refused(server.with_values(spec__method=str(path), spec__method_options={}))
        reasons.add(reason.replace(repr(str(path)), ""))
    assert len(reasons) == 1  # for all that the party does, it did not look


JUNK = {
    "schema of junk": {"schema": {"name": 1}},
    "columns of junk": {"schema": {"label": 3, "columns": "x"}},
    "no schema": {"schema": None},
    "sizes of words": {"sizes": ["a"] * 4},
    "sizes of lists": {"sizes": [[1]] * 4},
    "huge sizes": {"sizes": [10**18] * 4},
    "coins for somebody's huge size": {"sizes": [100, 2**31 - 1, 100, 100], "spec__batch_sampling": "poisson"},
    "an order of somebody's huge size": {"sizes": [100, 2**31 - 1, 100, 100], "spec__batch_sampling": "shuffled"},
    "features below 0": {"num_features": -1},
    "features without measure": {"num_features": 10**12},
    "features of half a number": {"num_features": 30.5},
    "pictures without measure": {"image_shape": [10**9, 10**9]},
    "no classes": {"classes": []},
    "too many classes": {"classes": [str(each) for each in range(20_000)]},
    "names twice": {"names": ["ann"] * 4},
    "names for the terminal": {"names": ["ann", "\x1b[2Jok", "c", "d"], "sizes": [100, 0, 100, 100]},
    "names of numbers": {"names": [1, 2, 3, 4]},
    "format of a list": {"format": []},
    "a run of another folder": {"run": "../../x"},
    "a spec of one number": {"spec": 3},
    "privacy of one number": {"spec__privacy": 5},
    "an unknown key": {"spec__surprise": 1},
    "method of a number": {"spec__method": 1},
    "method without a name": {"spec__method": ""},
    "method options of a number": {"spec__method_options": 3},
    "a rate of words": {"spec__client_lr": "nan"},
    "a rate without measure": {"spec__client_lr": 1e308},
    "a server's rate without measure": {"spec__server_lr": 1e308},
    "a model without measure": {"spec__model__name": "mlp", "spec__model__hidden": [10**7, 10**7]},
    "a model of many layers": {"spec__model__name": "mlp", "spec__model__hidden": [10] * 10_000},
    "delta 0": {"spec__privacy__delta": 0.0},
    "epsilon below 0": {"spec__privacy__epsilon": -1.0},
    "local steps without measure": {"spec__local_steps": 10**9},
    "rounds without measure": {"spec__num_rounds": 10**7},
    "batches without measure": {"spec__batch_size": 10**9},
    "a seed without measure": {"spec__seed": 10**30},
    "a threshold without measure": {"spec__secagg__threshold": 10**9},
    "neighbours without measure": {"spec__secagg__neighbours": 10**9},
    "a bound without measure": {"spec__secagg__bound": 1e300},
    "scale bits": {"spec__secagg__scale_bits": 5000},
    "scale bits below 0": {"spec__secagg__scale_bits": -5000},
    "no evaluation": {"spec__eval_every": 0},
    "noise below 0": {"spec__privacy__noise_std": -1.0},
    "noise without measure": {"spec__privacy__noise_std": 1e300},
    "no clip": {"spec__privacy__clip_norm": 0.0},
    "a clip without measure": {"spec__privacy__clip_norm": 1e300},
    "noise scales": {"spec__privacy__noise_scale": [1.0, 1.0]},
    "targets": {"spec__privacy__epsilons": [1.0, 1.0]},
    "a target without measure": {"spec__privacy__epsilons": [1e300] * 4},
    "norms below 0": {"spec__federation__max_norm": -3.0},
    "a wait without measure": {"spec__federation__round_timeout": 1e300},
}


def test_records_are_looked_at_under_approved_terms_alone(server, monkeypatch):
    """Else a refusal tells the server whether all records fit a schema of its choice, unasked."""
    monkeypatch.setattr(server, "asked", [])
    schema = server.agreement.to_dict()["schema"]
    classes = ["malignant", "unheard of"]
    for label in (schema["label"], {**schema["label"], "classes": classes}):
        changed = server.with_values(schema={**schema, "label": label}, classes=list(label["classes"]))
        assert server.refused(changed) == "the owner does not agree"
    assert len(server.asked) == 2


def test_a_server_tries_one_schema_at_a_party_that_nobody_watches(tmp_path):
    """Under --yes, a party that starts again after each refusal told the server, schema by schema, which labels
    its records have: an approval counted only once the records were read."""
    server = Server(tmp_path / "federation")
    folder, schema = server.party.folder, server.agreement.to_dict()["schema"]

    def yes(agreement, experiment):
        before = approved_digest(folder, agreement.purpose)
        return _approval(agreement.digest, before, yes=True, named="", silent=True)

    heard = []
    for number, classes in enumerate((["malignant", "none"], ["benign", "none"], ["malignant", "benign"])):
        label = {**schema["label"], "classes": classes}
        asked = server.with_values(run=f"a{number}", schema={**schema, "label": label}, classes=classes)
        party = server.parties.node("ann", approve=yes)
        assert server.ask(asked, party).kind == "refused"
        heard.append("this is not the agreement approved here" in str(party.refusal))
    assert heard == [False, True, True]


MODEL = """
from os import system
from pathlib import Path

from dither.models import make

def factory(start="zeros"):
    return make("logistic", num_features=30, num_classes=2, start=start)
"""


def test_of_an_approved_file_only_what_it_defines_is_called(server, tmp_path):
    """The server names the factory, and its options are the arguments: what the file imports was not approved. It
    was called before the owner was asked."""
    path, ran = tmp_path / "own_model.py", tmp_path / "ran"
    path.write_text(MODEL)
    name = code.approve(path)
    server.asked.clear()
    shell = {"command": f"touch {ran}"}
    for factory, options in (("system", shell), ("Path", {}), ("make", {"name": "logistic"}), ("__init__", {})):
        model = {"spec__model__name": f"{name}:{factory}", "spec__model__options": options}
        assert "is not defined in" in server.refused(server.with_values(**model)), factory
    assert not ran.exists()
    assert not server.asked
    own = server.with_values(spec__model__name=f"{name}:factory", spec__model__options={"start": "zeros"})
    assert server.refused(own) == "the owner does not agree"
    shown = dict(server.asked[0].describe("ann", server.asked[0].experiment()))
    assert f"{name}:factory" in shown["method"]
    assert shown["model options"] == '{"start": "zeros"}'


def test_junk_is_refused_quickly_cheaply_and_always_alike(server):
    server.asked.clear()
    tracemalloc.start()
    try:
        for name, change in JUNK.items():
            tracemalloc.reset_peak()
            assert server.refused(server.with_values(**change)), name
            assert tracemalloc.get_traced_memory()[1] < 24 * MEBIBYTE, name
    finally:
        tracemalloc.stop()
    assert server.asked == []


@pytest.mark.parametrize("count", [100, pytest.param(5000, marks=pytest.mark.slow)])
def test_mutated_terms_never_escape(server, count):
    """Every place of a valid agreement in turn exchanged for junk, and several at once: seeded, so that a
    failure comes again."""
    random_ = random.Random(count)
    reasons = set()
    for _ in range(count):
        found = json.loads(json.dumps(server.agreement.to_dict()))
        for _ in range(random_.choice((1, 1, 1, 2, 5))):
            mutate(found, random_)
        reasons.add(server.refused(found).split(":")[0])
    assert len(reasons) > 20  # they failed for many reasons; the server heard of one


def mutate(found, random_):
    """Exchange, drop, double or add one value somewhere in a tree of JSON."""
    at = found
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            return
        key = random_.choice(keys)
        inner = at[key]
        if isinstance(inner, dict | list) and inner and random_.random() < 0.8:
            at = inner
            continue
        what = random_.random()
        if what < 0.1:
            del at[key]
        elif what < 0.2 and isinstance(at, list):
            at.append(inner)
        elif what < 0.3 and isinstance(at, dict):
            at[random_.choice(("", "x", "__class__", "data.path", "method"))] = copy.deepcopy(
                random_.choice(VALUES)
            )
        else:
            at[key] = copy.deepcopy(random_.choice(VALUES))
        return


VALUES = (
    None, True, False, 0, 1, -1, 2, 3.5, 1e-300, 1e308, -1e308, 10**9, 10**12, 10**30, -(10**30), 2**31, 2**63,
    "", "a", "nan", "inf", "../../etc/passwd", "/etc/passwd.py", "x" * 10_000, "\x00\n", "\U0001f600",
    [], {}, [[]], [{}], [None], {"": {}}, [0] * 1000, [1.5, "a", None], {"a": [1, {"b": 2}]}, [[[[[[[[]]]]]]]],
)  # fmt: skip
