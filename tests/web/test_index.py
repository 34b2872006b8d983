"""Rows from files: states, changes, and files that anybody may have broken."""

import json
import math
import tomllib

import pytest

from dither.experiment.folder import to_json
from dither.web.files import SafeFolder, read_spec
from dither.web.index import RunIndex
from dither.web.index import read_row as _read_row
from dither.web.run_page import details
from tests.web.folders import make_run


def rows(index):
    index.refresh()
    return {row["id"]: row for row in index.rows()}


@pytest.fixture
def index(tmp_path):
    return RunIndex(SafeFolder(tmp_path))


def test_a_finished_run(tmp_path, index):
    make_run(tmp_path)
    row = rows(index)["run"]
    assert row["state"] == "finished"
    assert (row["method"], row["data"], row["round"], row["num_rounds"]) == ("cpfed", "adult", 20, 20)
    assert row["accuracy"] == pytest.approx(0.7)
    assert row["spark"][0] == pytest.approx(0.52)
    assert row["claimed"] == {"value": 74.8, "unit": "run", "failing": 1}
    assert (row["proven"]["value"], row["proven"]["adjacency"]) == (0.9995, "zero-out")
    assert row["attacked"] is None


def test_what_a_federation_counted_is_in_the_proven_epsilon(tmp_path, index):
    """Of schema, training and evaluation only the training was shown."""
    totals = {"id": "ab", "terms": "cd", "parties": {}, "excluded": {}, "aggregation": "off", "colluders": 0}
    totals |= {"most_missing": 0, "void_rounds": 0, "seconds_a_round": 1.0}
    parts = [("schema", 0.3), ("evaluation", 0.2), ("training", 0.9995), ("everything together", 1.3)]
    split = [{"what": what, "epsilon": epsilon, "delta": 1e-5} for what, epsilon in parts]
    make_run(tmp_path, federation={**totals, "split": split})
    proven = rows(index)["run"]["proven"]
    assert (proven["value"], proven["delta"]) == (1.3, 1e-5)
    assert [(part["what"], part["epsilon"]) for part in proven["parts"]] == parts[:-1]


def test_what_a_private_schema_spent_is_in_the_proven_epsilon(tmp_path, index):
    """The model follows from it too, and only the training was shown."""
    (make_run(tmp_path) / "schema.toml").write_text("[privacy]\nepsilon = 0.5\ndelta = 1e-6\n")
    proven = rows(index)["run"]["proven"]
    assert (proven["value"], proven["delta"]) == pytest.approx((1.4995, 1.1e-5))
    assert [(part["what"], part["epsilon"]) for part in proven["parts"]] == [("schema", 0.5), ("training", 0.9995)]
    text = (tmp_path / "run" / "schema.toml").read_text()
    replaced = {"privacy.adjacency": "replace-one"}
    (make_run(tmp_path, name="replaced", values=replaced) / "schema.toml").write_text(text)
    proven = rows(index)["replaced"]["proven"]  # as a blank that is filled again
    assert (proven["value"], proven["delta"]) == pytest.approx((1.0 + 2.09, 1e-5 + 1e-6 * (1 + math.exp(0.5))))
    for number, text in enumerate(("[privacy]\nepsilon = 'x'\ndelta = 1", "privacy = 3", "[", "")):
        (make_run(tmp_path, name=f"odd-{number}") / "schema.toml").write_text(text)
        assert rows(index)[f"odd-{number}"]["proven"]["value"] == 0.9995


def test_the_proven_epsilon_of_a_project_is_its_own(tmp_path, index):
    """The ε of schema and training were added up, although all three parts come to less."""
    (make_run(tmp_path, "start/run") / "schema.toml").write_text("[privacy]\nepsilon = 0.2\ndelta = 1e-5\n")
    assert rows(index)["start/run"]["proven"]["value"] == pytest.approx(1.1995)
    parts = [("schema", 0.2), ("training", 0.9995), ("evaluation", 0.3), ("everything together", 1.1)]
    split = [{"what": what, "epsilon": epsilon, "delta": 1e-5, "terms": ""} for what, epsilon in parts]
    project = tmp_path / "start" / "project.json"
    for changed, shown in (({}, 1.1), ({"terms": "server sees sums, zero-out"}, 1.1995)):
        split[-1] |= {"terms": "server sees uploads, zero-out"} | changed
        project.write_text(json.dumps({"split": split}))
        assert rows(index)["start/run"]["proven"]["value"] == pytest.approx(shown)
    split[-1]["terms"], split[1]["epsilon"] = "server sees uploads, zero-out", 0.5  # of another run
    for odd in ({"split": split}, {"split": [3]}, {"split": []}, [], {"split": [{"terms": "x"}]}):
        project.write_text(json.dumps(odd))
        assert rows(index)["start/run"]["proven"]["value"] == pytest.approx(1.1995)


def test_the_proven_epsilon_is_that_of_the_spec_own_neighbours(tmp_path, index):
    make_run(tmp_path, values={"privacy.adjacency": "replace-one"})
    assert rows(index)["run"]["proven"]["value"] == 2.09
    make_run(tmp_path, name="auto", values={"privacy.adjacency": "auto"})
    assert rows(index)["auto"]["proven"]["value"] == 2.09  # of the catalogue
    own = {"privacy.adjacency": "auto", "data.path": "own.csv", "data.name": "", "data.label": "y"}
    make_run(tmp_path, name="own", values=own)
    assert rows(index)["own"]["proven"]["value"] == 0.9995


def test_states(tmp_path, index):
    make_run(tmp_path, "running", done=6, summary=False)
    make_run(tmp_path, "silent", done=6, summary=False, age=4000)
    make_run(tmp_path, "spent", stopped="the privacy budget ends after round 10 of 20")
    make_run(tmp_path, "no-spec", spec_text="method = [")
    (make_run(tmp_path, "half") / "summary.json").write_text('{"epsilon": ')
    (make_run(tmp_path, "list") / "summary.json").write_text("[1]")
    found = rows(index)
    assert {name: row["state"] for name, row in found.items()} == {
        "running": "running",
        "silent": "stopped",
        "spent": "stopped",
        "no-spec": "broken",
        "half": "broken",
        "list": "broken",
    }
    assert "budget ends after round 10" in found["spent"]["state_reason"]
    assert "resume" in found["silent"]["state_reason"]
    assert "TOML" in found["no-spec"]["state_reason"]
    assert found["no-spec"]["proven"]["value"] == 2.09  # of its summary, under the default adjacency


def test_only_what_changed_is_read_again(tmp_path, index, monkeypatch):
    make_run(tmp_path, "a")
    make_run(tmp_path, "b", done=4, summary=False)
    assert sorted(index.refresh().changed) == ["a", "b"]
    read = []
    monkeypatch.setattr(
        "dither.web.index.read_row",
        lambda folder, run, stamp, keep=_read_row: read.append(run) or keep(folder, run, stamp),
    )
    assert index.refresh() == ([], [])
    assert read == []
    with open(tmp_path / "b" / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"round": 6, "test_accuracy": 0.9}) + '\n{"round": 8, "test_acc')
    assert index.refresh().changed == ["b"] == read
    assert index.row("b")["round"] == 6  # the line under way does not count


def test_a_run_that_is_removed_is_gone(tmp_path, index):
    folder = make_run(tmp_path, "a")
    index.refresh()
    for path in folder.iterdir():
        path.unlink()
    assert index.refresh().removed == ["a"]
    assert index.rows() == []


def test_specs_that_differ_in_the_seed_alone_are_one_group(tmp_path, index):
    for name, values in {"a": {"seed": 1}, "b": {"seed": 2}, "c": {"seed": 1, "num_clients": 17}}.items():
        make_run(tmp_path, name, values=values)
    found = rows(index)
    assert found["a"]["group"] == found["b"]["group"] != found["c"]["group"]


def test_fields_of_the_wrong_type_do_no_harm(tmp_path, index):
    text = 'method = 3\nseed = "x"\nnum_rounds = "many"\ndata = 4\nprivacy = [1]\n'
    folder = make_run(tmp_path, spec_text=text, epsilon={"claimed": 3, "proven": "all"}, notes={"a": 1}, ledger=7)
    (folder / "metrics.jsonl").write_text(
        '[1]\n3\n{"round": "x"}\n{"round": 1, "test_accuracy": "nan"}\n{"round": 2}\n'
    )
    (folder / "audit.json").write_text('{"rows": [1, {"attacked": 3}]}')
    row = rows(index)["run"]
    assert (row["method"], row["accuracy"], row["claimed"], row["proven"], row["attacked"]) == (
        "3",
        None,
        None,
        None,
        None,
    )


def test_an_audit_gives_the_attacked_epsilon(tmp_path, index):
    folder = make_run(tmp_path)
    found = [
        {"view": view, "unit": "run", "verdict": "ok", "attacked": {"value": v}}
        for view, v in (("upload", 0.4), ("final", 0.7))
    ]
    (folder / "audit.json").write_text(json.dumps({"rows": found}))
    assert rows(index)["run"]["attacked"]["value"] == 0.4


TEXTS = [
    'method = "cpfed"\nseed = 3\nnum_clients = 4\n\n[data]\nname = "x"\nseed = 9\n',
    'seed = 3\nmethod = "a"\n',
    'method = "a"\n[data]\nseed = 9\n',
    'method = "a"\nnote = """\nseed = 3\n"""\nx = 1\n',
    "method = 'a'\nnote = '''\nseed = 3\n'''\n",
    "numbers = [\n1,\n]\nseed = 3\n",
    'method = "a\\"b"\nseed = 3\n',
    "seed = 3\nseed = 4\n",
    'seed = "3"\n',
    "method = 1\n",
    "",
]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_the_shortcut_for_seeds_reads_what_toml_says(tmp_path, text):
    try:
        wanted = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        wanted = {}
    make_run(tmp_path, spec_text=text)
    assert read_spec(SafeFolder(tmp_path), "run")[0] == wanted


HOSTILE = {
    "summary.json": [
        '{"a": ' + "[" * 100_000,
        '{"epsilon": {"claimed": {"conditions": 5}, "proven": [{"not_covered": 5}]}}',
    ],
    "metrics.jsonl": [
        "[" * 100_000,
        '{"round": 1e999}',
        '{"round": 1' + "0" * 400 + ', "seconds": 1' + "0" * 400 + "}",
    ],
    "audit.json": ['{"rows": 5}', '{"rows": null}'],
    "spec.toml": ["a = " + "[" * 100_000, "seed = " + "9" * 5000 + "\n", "\ufeff\x00", "privacy = 5\ndata = 6\n"],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in HOSTILE.items() for text in texts])
def test_a_hostile_folder_does_not_take_the_others_off_the_page(tmp_path, index, name, text):
    make_run(tmp_path, "good")
    (make_run(tmp_path, "hostile") / name).write_text(text)
    found = rows(index)
    assert found["good"]["state"] == "finished"
    to_json(details(index.folder, found["hostile"]))
