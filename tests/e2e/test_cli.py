"""The command line, as a user has it: real processes, real folders, exit codes and one-line errors."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from dither import load, run
from dither.data.schema import PRIVATE, SchemaPrivacy
from dither.experiment.report import Report
from dither.experiment.train import UNSCORED
from dither.spec import parse_setting
from tests.cli.test_wrong_inputs import run_command
from tests.e2e.test_interrupts import HEEDING

QUICK = ["--set", "data.name=breast-cancer", "--set", "num_clients=10", "--set", "cohort_size=5"]


def dither(*arguments, cwd=None, check=True, **environment):
    result = subprocess.run(
        [sys.executable, "-m", "dither", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "100", **environment},
    )
    if check:
        assert result.returncode == 0, result.stderr
    return result


def dither_here(*arguments, cwd=".", check=True, **environment):
    """The same in this process: a process takes longer to start than most commands take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        for name, value in {"NO_COLOR": "1", "COLUMNS": "100", **environment}.items():
            patch.setenv(name, value)
        code, errors, printed = run_command([*map(str, arguments)])
    if check:
        assert code == 0, errors
    return subprocess.CompletedProcess(arguments, code, printed, errors)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "first"
    result = dither("run", "secure-fedavg", *QUICK, "--set", "num_rounds=30", "--out", folder)
    return folder, result


def test_a_run_leaves_everything_the_readme_names(finished):
    folder, result = finished
    names = {path.name for path in folder.iterdir()}
    assert {
        "spec.toml", "metrics.jsonl", "summary.json", "plot.png", "model.safetensors", "schema.toml",
        "provenance.json", "digests.json", "local",
    } <= names  # fmt: skip
    assert "round 30/30" in result.stdout
    assert "claimed ε" in result.stdout
    assert str(folder / "plot.png") in result.stdout.replace("\n", "")
    assert (folder / "plot.png").read_bytes()[:4] == b"\x89PNG"
    summary = json.loads((folder / "summary.json").read_text())
    assert {"test_accuracy", "loss", "rounds", "seconds", "epsilon"} <= set(summary)
    claimed = summary["epsilon"]["claimed"]
    assert claimed["value"] == pytest.approx(0.5)
    assert (claimed["unit"], claimed["delta"]) == ("message", 1e-4)
    assert {"proven", "attacked"} <= set(summary["epsilon"])
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [10, 20, 30]


def test_the_folders_spec_runs_again_to_the_same_bits(finished, tmp_path):
    folder, _ = finished
    dither_here("run", folder / "spec.toml", "--out", tmp_path / "again", "--quiet")
    again = tmp_path / "again" / "model.safetensors"
    assert again.read_bytes() == (folder / "model.safetensors").read_bytes()


def test_the_model_is_usable_afterwards(finished, tmp_path):
    from sklearn.datasets import load_breast_cancer

    folder, _ = finished
    frame = load_breast_cancer(as_frame=True).frame
    label = json.loads((folder / "summary.json").read_text())["classes"]
    names = load_breast_cancer().target_names
    frame["target"] = [names[value] for value in frame["target"]]
    assert set(frame["target"]) == set(label)
    import tomllib

    column = tomllib.loads((folder / "schema.toml").read_text())["label"]["column"]
    frame = frame.rename(columns={"target": column})
    frame.to_csv(tmp_path / "all.csv", index=False)
    frame.drop(columns=column).to_parquet(tmp_path / "features.parquet")
    scores = json.loads(dither_here("evaluate", folder, "--data", tmp_path / "all.csv", "--json").stdout)
    assert scores["records"] == 569
    dither_here("predict", folder, "--data", tmp_path / "features.parquet", "--out", tmp_path / "p.csv")
    lines = (tmp_path / "p.csv").read_text().splitlines()
    assert len(lines) == 570
    predicted = [line.split(",")[0] for line in lines[1:]]
    agreement = np.mean([a == b for a, b in zip(predicted, frame[column], strict=True)])
    assert agreement == pytest.approx(scores["accuracy"])

    import dither as library

    run = library.load(folder)
    assert run.predict(frame).tolist() == predicted


@pytest.fixture
def records(finished, tmp_path):
    """A table that the finished run can predict, with a column that names each record."""
    from sklearn.datasets import load_breast_cancer

    frame = load_breast_cancer(as_frame=True).data.head(3)
    frame.insert(0, "patient", ["p1", "p2", "p3"])
    frame.to_csv(tmp_path / "new.csv", index=False)
    return tmp_path / "new.csv"


def predict(finished, *arguments):
    return run_command(["predict", str(finished[0]), *map(str, arguments)])


def test_predictions_carry_the_records_names(finished, records):
    code, _, printed = predict(finished, "--data", records, "--id", "patient", "--out", "-")
    assert code == 0
    lines = [line.split(",") for line in printed.splitlines()]
    assert lines[0][:2] == ["patient", "prediction"]
    assert [line[0] for line in lines[1:]] == ["p1", "p2", "p3"]


@pytest.mark.parametrize("ids", [(), ("--id", "patient")])
def test_text_in_a_number_column_of_a_private_schema_is_named(finished, records, monkeypatch, ids):
    """It counted as missing, as in training, without a word: "17,99" was predicted as a blank."""
    schema = load(finished[0]).schema
    columns = tuple(column._replace(bounds_from=PRIVATE) for column in schema.columns)
    private = replace(schema, columns=columns, privacy=SchemaPrivacy(0.1, 1e-5))
    monkeypatch.setattr(Report, "schema", private)
    given = ("--data", records, *ids, "--out", "-")
    assert "note" not in predict(finished, *given)[1]
    with_text = records.read_text().replace("20.57", '"20,57"').replace("19.69", "n/a ").replace("17.99", "inf")
    records.write_text(with_text)
    code, errors, printed = predict(finished, *given)
    assert (code, len(printed.splitlines())) == (0, 4)
    (note,) = [line for line in errors.splitlines() if line.startswith("note:")]
    assert "column 'mean radius' is numeric, but not in 2 of 3 cells, such as 'inf' in row 1" in note
    for name, label in zip(("patient", "p1", "p2"), (schema.label.column, *schema.label.classes), strict=True):
        with_text = with_text.replace(name, label)
    records.write_text(with_text.replace("p3", schema.label.classes[0]))
    code, errors, _ = run_command(["evaluate", str(finished[0]), "--data", str(records)])
    assert (code, "'mean radius' is numeric, but not in 2 of 3 cells" in errors) == (0, True)


def test_predictions_never_replace_a_file(finished, records, tmp_path):
    before = records.read_bytes()
    (tmp_path / "link.csv").symlink_to(records)
    for target in (records, tmp_path / "link.csv", finished[0] / "model.safetensors"):
        code, errors, _ = predict(finished, "--data", records, "--out", target)
        assert code == 2
        assert f"'{target}' already exists; give another --out" in errors
    assert records.read_bytes() == before


def test_predictions_leave_links_and_pipes_what_they_are(finished, records, tmp_path):
    (tmp_path / "link.csv").symlink_to(tmp_path / "made.csv")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for name in ("link.csv", "pipe"):
        assert predict(finished, "--data", records, "--out", tmp_path / name)[0] == 0
    assert (tmp_path / "link.csv").is_symlink()
    assert (tmp_path / "made.csv").read_text().startswith("prediction,")
    assert (tmp_path / "pipe").is_fifo()
    assert os.read(reader, 1000).startswith(b"prediction,")
    os.close(reader)


def test_a_finished_run_says_that_it_is(finished):
    code, _, printed = run_command(["run", "--resume", str(finished[0])])
    assert code == 0
    assert "nothing was trained" in printed


def test_a_command_outlives_its_reader(tmp_path):
    """`dither run | head -1` trains to the end."""
    program = (
        "import sys; from dither.cli.common import outlive_readers, terminal; outlive_readers()\n"
        "for line in range(2000): terminal().print(line)\n"
        "open(sys.argv[1], 'w').write('the end')"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "end")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 0
    assert process.stderr.read() == b""
    assert (tmp_path / "end").read_text() == "the end"


# A child that is killed by SIGKILL at an exact moment: when round N is about to be appended to the metrics, has
# just been, when its checkpoint lies complete beside its place, or has just been moved there.
KILLED = """
import os, signal, sys
from dither import cli
from dither.experiment import folder as runs

moment, target = sys.argv[1], int(sys.argv[2])
append, replace = runs.RunFolder.append_metrics, os.replace

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def append_metrics(self, row, local):
    if row["round"] == target and moment == "before metrics":
        die()
    append(self, row, local)
    if row["round"] == target and moment == "after metrics":
        die()

def move(source, destination):
    ours = str(destination).endswith(f"round-{target:08d}.npz")
    if ours and moment == "before checkpoint":
        die()
    replace(source, destination)
    if ours and moment == "after checkpoint":
        die()

runs.RunFolder.append_metrics, os.replace = append_metrics, move
sys.argv = ["dither", *sys.argv[3:]]
cli.main()
"""


@pytest.mark.parametrize(
    "moments",
    [
        (("before checkpoint", 8), ("after metrics", 12)),
        pytest.param((("before metrics", 4), ("after checkpoint", 16)), marks=pytest.mark.slow),
    ],
)
def test_kill_and_resume_is_bit_identical(tmp_path, moments):
    """SIGKILL at two moments, resumed each time: the final parameters are those of an undisturbed run."""
    options = [*QUICK, "--set", "num_rounds=20", "--set", "eval_every=2", "--checkpoint-seconds", "0"]
    settings = dict(map(parse_setting, options[1:-2:2]))
    run("secure-fedavg", values=settings, out=tmp_path / "whole")
    folder = tmp_path / "killed"
    again = ["run", "--resume", folder, "--quiet", "--checkpoint-seconds", "0"]
    start = ["run", "secure-fedavg", *options, "--out", folder, "--quiet"]
    for (moment, target), arguments in zip(moments, (start, again), strict=True):
        child = subprocess.run(
            [sys.executable, "-c", KILLED, moment, str(target), *map(str, arguments)], timeout=240
        )
        assert child.returncode == -signal.SIGKILL
        assert not (folder / "summary.json").exists()
    code, errors, _ = run_command(["run", "--resume", str(folder), "--quiet"])
    assert (code, errors) == (0, "")
    whole = tmp_path / "whole" / "model.safetensors"
    assert whole.read_bytes() == (folder / "model.safetensors").read_bytes()

    def without_time(path):
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]

    assert without_time(folder) == without_time(tmp_path / "whole")
    assert not list(folder.rglob("*.tmp")), "what a kill left half-written is cleared away"


def test_ctrl_c_says_how_to_resume(tmp_path):
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", HEEDING, "-m", "dither", "run", "secure-fedavg", *QUICK, "--set",
         "num_rounds=200000", "--out", str(folder)],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"dither run --resume {folder}" in errors.replace("\n", " ")
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "secure-fedavgg"], "unknown preset 'secure-fedavgg'; did you mean 'secure-fedavg'?"),
        (["evaluate", "nowhere", "--data", "x.csv"], "not a run folder"),
    ],
)
def test_bad_values_get_one_line_and_exit_code_2(arguments, message, tmp_path):
    result = dither(*arguments, cwd=tmp_path, check=False)
    assert result.returncode == 2, result.stdout + result.stderr
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def write_table(path, rows):
    path.write_text("\n".join(",".join(map(str, row)) for row in rows) + "\n")


def table(count=60):
    return [
        ["age", "site", "sick"],
        *([20 + i % 50, "north" if i % 3 else "south", "yes" if i % 2 else "no"] for i in range(count)),
    ]


def test_a_users_own_table_end_to_end(tmp_path):
    write_table(tmp_path / "t.csv", table())
    result = dither(
        "run", "secure-fedavg", "--set", "data.path=t.csv", "--set", "data.label=sick",
        "--set", "data.partition=column", "--set", "data.column=site", "--set", "num_clients=0",
        "--set", "cohort_size=2", "--set", "num_rounds=5", "--out", "run", cwd=tmp_path,
    )  # fmt: skip
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["num_clients"] == 2
    assert any("preprocessing not covered" in note for note in summary["notes"])
    assert result.stdout.count("preprocessing:") == 1
    # What was read from the records, and what is measured on them, stays local and is marked.
    assert not (tmp_path / "run" / "schema.toml").exists()
    assert (tmp_path / "run" / "local" / "schema.toml").is_file()
    assert summary["test_accuracy"] is None
    assert "not scored" in result.stdout
    assert "(local, not private)" in result.stdout
    test = dither_here("evaluate", "run", "--data", "t.csv", cwd=tmp_path).stdout
    assert "local, not private" in test


def test_a_corrupt_local_copy_is_refused(tmp_path):
    (tmp_path / "adult").mkdir()
    (tmp_path / "adult" / "adult.data").write_text("39, not the census\n")
    (tmp_path / "adult" / "adult.test").write_text("nothing\n")
    result = dither("run", "--data-dir", tmp_path, cwd=tmp_path, check=False, DITHER_DATA="")
    assert result.returncode == 2
    assert "adult.data" in result.stderr
    assert "SHA-256" in result.stderr or "5b00264637db" in result.stderr


def test_taken_folders_and_foreign_checkpoints_are_refused(finished, tmp_path):
    folder, _ = finished
    taken = dither_here("run", "secure-fedavg", *QUICK, "--out", folder, check=False)
    assert taken.returncode == 2
    assert "already exists" in taken.stderr
    other = dither_here("run", "--resume", folder, "--set", "seed=3", check=False)
    assert other.returncode == 2
    assert "from another spec" in other.stderr


@pytest.mark.slow
def test_tables_also_come_as_json(tmp_path):
    names = {row["preset"] for row in json.loads(dither("presets", "--json").stdout)}
    assert "secure-fedavg" in names
    sets = {row["name"] for row in json.loads(dither("data", "list", "--json").stdout)}
    assert {
        "adult",
        "mnist",
        "emnist-balanced",
        "emnist-bymerge",
        "fashion-mnist",
        "digits",
        "breast-cancer",
    } <= sets
    facts = json.loads(
        dither(
            "data", "describe", "digits", "--partition", "dirichlet", "--clients", "5", "--json", cwd=tmp_path
        ).stdout
    )
    assert len(facts["clients"]) == 5
    assert (tmp_path / facts["picture"]).read_bytes()[:4] == b"\x89PNG"
    run = json.loads(dither("run", *QUICK, "--set", "num_rounds=2", "--json", cwd=tmp_path).stdout)
    assert run["rounds"] == 2


def test_a_drafted_schema_marks_what_it_read_and_is_used(tmp_path):
    write_table(tmp_path / "t.csv", table())
    drafted = dither("data", "schema", "t.csv", "--label", "sick", cwd=tmp_path)
    assert "which no ε covers" in drafted.stdout
    text = (tmp_path / "schema.toml").read_text()
    assert "read from data" in text
    again = dither_here("data", "schema", "t.csv", "--label", "sick", cwd=tmp_path, check=False)
    assert again.returncode == 2
    (tmp_path / "schema.toml").write_text(text.replace("read from data", "public"))
    dither_here(
        "run", "secure-fedavg", "--set", "data.path=t.csv", "--set", "data.schema=schema.toml",
        "--set", "num_clients=2", "--set", "cohort_size=1", "--set", "num_rounds=3", "--out", "run",
        "--quiet", cwd=tmp_path,
    )  # fmt: skip
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["notes"] == [UNSCORED]
    assert (tmp_path / "run" / "schema.toml").is_file()


def test_a_client_whose_update_is_not_finite_ends_the_run_or_is_left_out(tmp_path):
    """A learning rate beyond all measure makes every update overflow."""
    wild = ["run", "fedavg.toml", "--out"]
    (tmp_path / "fedavg.toml").write_text(
        'method = "fedavg"\nnum_clients = 4\ncohort_size = 2\nnum_rounds = 4\nlocal_steps = 8\nbatch_size = 4\n'
        'client_lr = 1e18\neval_every = 2\n[data]\nname = "breast-cancer"\n[model]\nname = "mlp"\n'
        '[privacy]\nnoise = "none"\n'
    )
    aborted = dither(*wild, "a", cwd=tmp_path, check=False)
    assert aborted.returncode == 1
    assert "sent an update that is not finite" in aborted.stderr
    assert "Traceback" not in aborted.stderr
    dither_here(*wild, "b", "--set", "federation.refused=continue", cwd=tmp_path)
    summary = json.loads((tmp_path / "b" / "summary.json").read_text())
    assert sum(summary["refused"].values()) > 0
    assert any("left out" in note for note in summary["notes"])


def test_several_tables_are_one_for_each_institution():
    from dither.cli.runs import _source
    from dither.errors import SpecError

    assert _source(["a.csv", "b.parquet"]) == {"data.path": ["a.csv", "b.parquet"]}
    assert _source(["adult"]) == "adult"
    assert _source([]) is None
    with pytest.raises(SpecError, match=r"'my.toml' is not a table"):
        _source(["a.csv", "my.toml"])
