"""Specs: complete round trip through TOML, and every wrong value named."""

import dataclasses
import subprocess
import sys

import pytest

from dither.errors import SpecError
from dither.spec import METHODS, Spec, all_keys, describe_keys, parse_setting, preset_names, preset_title


@pytest.mark.parametrize("name", preset_names())
def test_presets_load_and_survive_toml(name):
    spec = Spec.from_preset(name)
    again = Spec.from_toml(spec.to_toml())
    assert again == spec
    assert again.digest() == spec.digest()
    assert len(preset_title(name)) > 10


def test_the_secure_fedavg_preset_is_the_papers_setting():
    spec = Spec.from_preset("secure-fedavg")
    assert (spec.num_clients, spec.cohort_size, spec.local_steps, spec.batch_size) == (100, 50, 1, 1)
    assert (spec.privacy.epsilon, spec.privacy.delta, spec.privacy.clip_norm) == (0.5, 1e-4, 2.0)
    assert (spec.client_lr, spec.lr_decay, spec.num_rounds) == (0.2, 0.01, 200)


def test_every_change_changes_the_digest():
    spec = Spec()
    assert spec.with_values({"privacy.epsilon": 0.7}).digest() != spec.digest()
    assert spec.with_values({"seed": 1}).digest() != spec.digest()
    assert spec.with_values({"seed": 0}).digest() == spec.digest()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"privacy.epsilonn": 1}, "unknown key 'privacy.epsilonn'; did you mean 'privacy.epsilon'"),
        ({"num_round": 1}, "unknown key 'num_round'; did you mean 'num_rounds'"),
        ({"method": "secure-fedav"}, "unknown method='secure-fedav'; did you mean 'secure-fedavg'"),
        ({"method_options.frst_round": "all"}, "did you mean 'first_round'"),
        ({"cohort_size": 101}, "cohort_size=101 exceeds num_clients=100"),
        ({"privacy.epsilon": 0}, "privacy.epsilon=0.0 must be above 0"),
        ({"privacy.epsilon": float("nan")}, "privacy.epsilon=nan"),
        ({"privacy.delta": 0}, "privacy.delta=0.0 must be above 0"),
        ({"privacy.delta": 1}, "privacy.delta=1.0 must be below 1"),
        ({"privacy.clip_norm": 0}, "privacy.clip_norm=0.0 must be above 0"),
        ({"local_steps": 0}, "local_steps=0 must be at least 1"),
        ({"num_rounds": 1.5}, "num_rounds=1.5 must be a whole number"),
        ({"num_rounds": True}, "num_rounds=True must be a whole number"),
        ({"model.hidden": [3, -1]}, "model.hidden"),
        ({"data.partition": "idd"}, "'idd' is not one of 'iid'"),
        ({"data.path": "x.csv"}, "needs data.label"),
        (
            {"data.path": "x.npz", "data.public": True, "data.part": "private", "data.public_fraction": 0.2},
            "data.part='private' are records that are not public",
        ),
        ({"num_clients": 0}, "num_clients=0 is for data.partition='column' or 'files'"),
        ({"data.partition": "column"}, "needs data.column"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"privacy": 3}, "unknown key 'privacy'"),
    ],
)
def test_wrong_values_are_named(values, message):
    with pytest.raises(SpecError) as caught:
        Spec().with_values(values)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_values_from_the_command_line():
    assert parse_setting("privacy.epsilon=0.5") == ("privacy.epsilon", 0.5)
    assert parse_setting("privacy.epsilon=inf") == ("privacy.epsilon", float("inf"))
    assert parse_setting("data.name=digits") == ("data.name", "digits")
    assert parse_setting("model.hidden=[8, 4]") == ("model.hidden", [8, 4])
    assert parse_setting("data.path=a=b.csv") == ("data.path", "a=b.csv")
    with pytest.raises(SpecError, match="not of the form key=value"):
        parse_setting("seed")


def test_unknown_preset_and_missing_file():
    with pytest.raises(SpecError, match="did you mean 'secure-fedavg'"):
        Spec.from_any("secure-fedavgg")
    with pytest.raises(SpecError, match=r"no spec file 'nowhere\.toml'"):
        Spec.from_any("nowhere.toml")
    with pytest.raises(SpecError, match="not valid TOML"):
        Spec.from_toml("seed = = 3")


def test_a_spec_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Spec().seed = 3  # type: ignore[misc]


def test_every_key_and_every_option_has_a_line_of_help():
    for name in METHODS:
        for key, _, what in describe_keys(name):
            assert what, key
    assert "privacy.epsilon" in all_keys()


def test_defaults_of_options_satisfy_their_own_limits():
    for name in METHODS:
        for key, value in Spec(method=name).method_options.items():
            METHODS[name].options[key].check(key, value)


def test_a_spec_is_checked_without_numpy_or_jax():
    code = "import sys; from dither.spec import Spec; Spec.from_preset('nbafl'); print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert not {"jax", "numpy", "dither.methods"} & set(output.split())


def test_neighbours_follow_the_data_unless_they_are_named():
    own = {"data.path": "own.csv", "data.name": "", "data.label": "y"}
    assert Spec().adjacency == "replace-one"  # the papers', on the catalogue's data
    assert Spec().with_values(own).adjacency == "zero-out"
    assert Spec.from_preset("adult").adjacency == "zero-out"
    assert Spec().with_values({**own, "privacy.adjacency": "replace-one"}).adjacency == "replace-one"
    assert Spec.from_toml(Spec().to_toml()).adjacency == Spec().adjacency


def test_kept_results_keep_their_names_whether_neighbours_are_named_or_not():
    named = Spec().with_values({"privacy.adjacency": "replace-one"})
    assert named.fingerprint() == Spec().fingerprint()
    assert named.digest() != Spec().digest()
    blanked = Spec().with_values({"privacy.adjacency": "zero-out"})
    assert blanked.fingerprint() != Spec().fingerprint()


def test_the_declared_keys_are_the_fields_and_their_defaults_have_their_types():
    fields = {key: value for key, value in Spec().flat().items() if not key.startswith("method_options.")}
    declared = {key: default for key, default, _ in describe_keys()}
    assert set(declared) == set(fields)
    for key, default in declared.items():
        given = Spec().with_values({key: default}).flat()[key]  # converted to the field's type
        assert (type(given), given) == (type(fields[key]), fields[key]), key
