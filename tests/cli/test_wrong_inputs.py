"""Two hundred mistakes over all commands: each ends with an exit code and one line that names it, and every
file is as it was."""

import io
import os
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest
from typer.main import get_command

from dither import cli
from dither.federation import keys
from dither.spec import preset_text

TABLE = "patient,age,site,sick\n" + "".join(
    f"p{i:03d},{20 + 37 * i % 60},{'north' if i % 3 else 'south'},{'yes' if 37 * i % 60 > 25 else 'no'}\n"
    for i in range(120)
)
SPLIT = "--set data.name=breast-cancer --set num_clients=10 --set cohort_size=5"
SMALL = {
    "data.name": "breast-cancer", "num_clients": 4, "cohort_size": 4, "num_rounds": 2, "batch_size": 8,
    "eval_every": 2, "compare": False,
}  # fmt: skip


def run_command(arguments):
    """(exit code, standard error, standard output) of a command in this process."""
    errors, output, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(errors), redirect_stdout(output):
        patch.setattr(sys, "argv", ["dither", *arguments])
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
    return code, errors.getvalue(), output.getvalue()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with tables, specs, keys, and files that are not what they seem."""
    place = tmp_path_factory.mktemp("work")
    (place / "a.csv").write_text(TABLE)
    (place / "b.csv").write_text(TABLE.replace("site", "ward"))
    (place / "empty.csv").write_text("")
    (place / "header.csv").write_text("age,sick\n")
    (place / "copy.csv").write_text(TABLE)
    (place / "case.csv").write_text("age,sick\n" + "30,yes\n40,Yes\n50,no\n" * 20)
    (place / "missing.csv").write_text("age,sick\n" + "30,yes\n40,no\n50,\n" * 20)
    (place / "ragged.csv").write_text("age,sick\n" + "30,yes\n40,no\n" * 20 + "50,yes,1\n")
    (place / "twice.csv").write_text("age,age,sick\n" + "30,1,yes\n40,2,no\n" * 20)
    (place / "crash.py").write_text("def net(input_shape):\n    return input_shape[9]\n")
    (place / "one-class.csv").write_text("age,sick\n" + "30,yes\n40,yes\n" * 20)
    (place / "infinite.csv").write_text(TABLE.replace(TABLE.splitlines()[4].split(",")[1], "inf", 1))
    (place / "binary.csv").write_bytes(bytes(range(256)) * 4)
    (place / "excel.csv").write_bytes(b"PK\x03\x04" + bytes(200))
    (place / "broken.parquet").write_bytes(b"PAR1" + bytes(50))
    (place / "broken.npz").write_bytes(b"not a zip file")
    (place / "text.txt").write_text("hello\n")
    (place / "broken.toml").write_text("method = \n")
    (place / "latin.toml").write_bytes("method = 'é'\n".encode("latin-1"))
    (place / "key.toml").write_text("rounds = 3\n")
    (place / "type.toml").write_text('num_rounds = "many"\n')
    (place / "list.toml").write_text("num_rounds = [1, 2]\n")
    (place / "section.toml").write_text("privacy = 3\n")
    (place / "zero.toml").write_text(preset_text("adult").replace("num_clients = 16", "num_clients = 0"))
    (place / "steps.toml").write_text("[training]\nnoise = -1\n")
    (place / "broken.json").write_text("{")
    (place / "list.json").write_text("[1, 2]")
    (place / "method.py").write_text("raise RuntimeError('no')\n")
    (place / "model.py").write_text("import nowhere_to_be_found\n")
    (place / "folder").mkdir()
    (place / "not-a-ledger").write_text("hello\n")
    os.symlink(place / "a.csv", place / "link.csv")
    keys.create(place / "fed", ["north", "south"], hosts=["localhost"], days=30)
    return place


@pytest.fixture(scope="module")
def finished(workplace):
    """A finished run, one whose outcome is missing, and a damaged one."""
    from dither.experiment import train

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workplace)
        train.run("adult", values=SMALL, out="run")
    shutil.copytree(workplace / "run", workplace / "unfinished")
    for name in ("summary.json", "model.safetensors"):
        (workplace / "unfinished" / name).unlink()
    shutil.copytree(workplace / "run", workplace / "damaged")
    (workplace / "damaged" / "summary.json").write_text("{")


def contents(place):
    """What every file is: its inode, size and time, and where a link leads."""
    found = {}
    for folder, _, files in os.walk(place):
        for name in files:
            path = os.path.join(folder, name)
            state = os.lstat(path)
            found[path] = (state.st_ino, state.st_size, state.st_mtime_ns)
    return found


# The command, its exit code, and what the line says.
WRONG = [
    # run: what to run
    ("run adlut", 2, "did you mean 'adult'?"),
    ("run patients.tml", 2, "no spec file 'patients.tml'"),
    ("run nowhere.toml", 2, "no spec file 'nowhere.toml'"),
    ("run nowhere.csv --label sick", 2, "'nowhere.csv' not found"),
    ("run folder --label sick", 2, "folder"),
    ("run text.txt", 2, "text.txt"),
    ("run broken.toml", 2, "not valid TOML"),
    ("run latin.toml", 2, "not a text file in UTF-8"),
    ("run key.toml", 2, "unknown key 'rounds'"),
    ("run type.toml", 2, "num_rounds"),
    ("run list.toml", 2, "num_rounds"),
    ("run section.toml", 2, "privacy"),
    ("run a.csv key.toml --label sick", 2, "'key.toml' is not a table"),
    ("run a.csv", 2, "label"),
    ("run a.csv --label sik", 2, "'sik'"),
    ("run a.csv b.csv --label sick", 2, "'b.csv' has no column 'site'"),
    ("run empty.csv --label sick", 2, "'empty.csv' is empty"),
    ("run header.csv --label sick", 2, "no rows"),
    ("run one-class.csv --label sick", 2, "1 class"),
    ("run a.csv copy.csv --label sick", 2, "'a' and 'copy' hold the same records"),
    ("run a.csv a.csv --label sick", 2, "lists a file twice"),
    ("run case.csv --label sick", 2, "differ only in case, 'Yes' and 'yes'"),
    ("run missing.csv --label sick", 2, "'sick' is empty in row 3 and 19 more; remove rows without a label"),
    ("run ragged.csv --label sick", 2, "row 41 has more cells than the header; correct the row"),
    ("run twice.csv --label sick", 2, "two columns called 'age'"),
    ("run a.csv --label patient", 2, "too many classes"),
    ("run infinite.csv --label sick", 2, "column 'age', row 4"),
    ("run binary.csv --label sick", 2, "binary.csv"),
    ("run excel.csv --label sick", 2, "an Excel or zip file"),
    ("run broken.parquet --label sick", 2, "'broken.parquet' cannot be read"),
    ("run broken.npz", 2, "'broken.npz' cannot be read"),
    ("run nothing-*.csv --label sick", 2, "no file matches"),
    # run: settings
    ("run adult --set privacy.epsilonn=1", 2, "did you mean 'privacy.epsilon'?"),
    ("run adult --set seed", 2, "not of the form key=value"),
    ("run adult --set privacy.epsilon=nan", 2, "privacy.epsilon"),
    ("run adult --set privacy.epsilon=-1", 2, "must be above 0"),
    ("run adult --set privacy.delta=1", 2, "must be below 1"),
    ("run adult --set privacy.delta=abc", 2, "privacy.delta"),
    ("run adult --set batch_size=99999999", 2, "batch_size=99999999 exceeds"),
    ("run adult --set batch_size=0", 2, "must be at least 1"),
    ("run adult --set cohort_size=17", 2, "exceeds num_clients=16"),
    (f"run secure-fedavg {SPLIT} --set batch_size=50", 2, "batch_size=50 exceeds the 45 records of client"),
    (
        f"run secure-fedavg {SPLIT} --set privacy.delta=0.9",
        2,
        "local_steps*batch_size/client_size > 0.8*delta",
    ),
    ("run adult --set num_clients=0", 2, "num_clients=0"),
    ("run adult --set num_clients=1000000", 2, "num_clients"),
    ("run adult --set method=cpfd", 2, "did you mean 'cpfed'?"),
    ("run adult --set method=nowhere.py", 2, "nowhere.py"),
    ("run adult --set method=method.py", 2, "line 1 of 'method.py' fails: RuntimeError: no"),
    ("run adult --set model.name=model.py:factory", 2, "model.py"),
    ("run adult --set model.name=crash.py:net", 2, "line 2 of 'crash.py' fails: IndexError"),
    ("run adult --set model.name=mlp --set model.options.width=3", 2, "for a model of your own"),
    ("run adult --set model.name=resnet", 2, "resnet"),
    ("run adult --set model.weights=nowhere.safetensors", 2, "nowhere.safetensors"),
    ("run adult --set model.hidden=abc", 2, "model.hidden"),
    ("run adult --set data.name=adlut", 2, "did you mean 'adult'?"),
    ("run adult --set data.partition=column", 2, "data.column"),
    ("run adult --set seed=-1", 2, "seed=-1"),
    ("run adult --seed abc", 2, "abc"),
    ("run adult --epsilon 1", 2, "no option '--epsilon'; use --set privacy.epsilon=..."),
    ("run adult --set task=regression", 2, "regression"),
    # run: folders
    ("run adult --out run", 2, "already exists"),
    ("run adult --out text.txt", 2, "already exists"),
    ("run adult --out text.txt/run", 2, "text.txt"),
    ("run --resume nowhere", 2, "not a run folder"),
    ("run --resume a.csv", 2, "not a run folder"),
    ("run --resume run --out other", 2, "cannot be combined"),
    ("run --resume run --set seed=3", 2, "another spec"),
    ("run --resume damaged", 4, "summary.json"),
    ("run adult --ledger not-a-ledger", 4, "not-a-ledger"),
    ("run adult --data-dir nowhere", 2, "nowhere"),
    ("run adult --checkpoint-seconds -1", 2, "checkpoint"),
    ("run adult --out -", 2, "'-' is not the name of a file or folder"),
    ("run /dev/null", 2, "no spec file '/dev/null'"),
    ("run ADULT", 2, "did you mean 'adult'?"),
    ("run a.csv --label sick --set method=cpfd", 2, "did you mean 'cpfed'?"),
    ("run adult --set lr=1", 2, "did you mean 'client_lr'?"),
    ("run adult --set clip=1", 2, "did you mean 'privacy.clip_norm'?"),
    ("run adult --set dataset=mnist", 2, "did you mean 'data.name'?"),
    ("run adult --set noise=1", 2, "did you mean 'privacy.noise'?"),
    ("run adult --set noise_multiplier=1", 2, "`dither keys` lists them all"),
    ("run adult --batch-size 5", 2, "use --set batch_size=..."),
    ("run adult --processes 0", 2, "--processes 0"),
    ("run adult --processes 2 --process 1", 2, "together"),
    ("run adult --processes 2 --process 5 --coordinator 127.0.0.1:1", 2, "process"),
    ("run a.csv a.csv --label sick", 2, "lists a file twice"),
    # start
    ("start nowhere.csv --label sick", 2, "'nowhere.csv' not found"),
    ("start folder --label sick", 2, "folder"),
    ("start excel.csv --label sick --yes", 2, "an Excel or zip file"),
    ("start a.csv --label sik", 2, "did you mean 'sick'?"),
    ("start a.csv --label sick --drop agee --yes", 2, "did you mean 'age'?"),
    ("start a.csv --label sick --task guess --yes", 2, "guess"),
    ("start a.csv --label sick --epsilon 0 --yes", 2, "epsilon=0.0 must be a finite number above 0"),
    ("start a.csv --label sick --epsilon nan --yes", 2, "epsilon=nan"),
    ("start a.csv --label sick --delta 2 --yes", 2, "delta=2.0"),
    ("start a.csv --label sick --split 1,2 --yes", 2, "three numbers"),
    ("start a.csv --label sick --split a,b,c --yes", 2, "such as 5,85,10"),
    ("start a.csv --label sick --classes yes --yes", 2, "at least two"),
    ("start a.csv --label sick --classes yes,yes --yes", 2, "each once"),
    ("start a.csv --label sick --classes yes,no --task regression --yes", 2, "a number has none"),
    ("start a.csv --label sick --classes yes,no --set num_roundss=5 --yes", 2, "did you mean 'num_rounds'?"),
    ("start a.csv --label sick --classes yes,no --set data.path=b.csv --yes", 2, "'data.path' follows from"),
    ("start a.csv --label sick --classes yes,no --set randomness=coin --yes", 2, "randomness='coin'"),
    ("start a.csv --label sick --classes yes,no --out text.txt --yes", 2, "'text.txt' exists"),
    ("start a.csv --label sick --classes yes,no --out - --yes", 2, "'-' is not the name"),
    ("start a.csv --label sick --classes yes,no --ledger not-a-ledger --yes", 4, "not-a-ledger"),
    ("start a.csv copy.csv --label sick --classes yes,no --yes", 2, "'copy.csv' holds the records of another"),
    ("start", 2, "TABLES"),
    # sweep
    ("sweep adult", 2, "--vary"),
    ("sweep adult --vary seed", 2, "seed"),
    ("sweep adult --vary seed=5:0", 2, "seed"),
    ("sweep adult --vary sead=1,2", 2, "did you mean 'seed'?"),
    ("sweep adult --vary privacy.epsilon=1,abc", 2, "privacy.epsilon"),
    ("sweep adult --vary seed=0:2 --max-memory lots", 2, "lots"),
    ("sweep adult --vary seed=0:2 --out run", 2, "run"),
    ("sweep adult --vary seed=0:2 --out -", 2, "'-' is not the name"),
    ("sweep nowhere.toml --vary seed=0:2", 2, "nowhere.toml"),
    # evaluate, predict
    ("evaluate nowhere --data a.csv", 2, "not a run folder"),
    ("evaluate unfinished --data a.csv", 4, "unfinished"),
    ("evaluate run --data nowhere.csv", 2, "nowhere.csv"),
    ("evaluate run --data a.csv", 2, "column"),
    ("evaluate run --data a.csv --data b.csv", 2, "--epsilon"),
    ("evaluate run --data a.csv --epsilon 0", 2, "epsilon=0.0"),
    ("evaluate run", 2, "--data"),
    ("predict run --data a.csv --out a.csv", 2, "a.csv"),
    ("predict run --data link.csv --out a.csv", 2, "a.csv"),
    ("predict run --data a.csv --out folder", 2, "folder"),
    ("predict run --data a.csv --out b.csv", 2, "'b.csv' already exists"),
    ("predict run --data a.csv --out nowhere/p.csv", 2, "the folder of 'nowhere/p.csv' does not exist"),
    ("predict run --data a.csv --out p.csv --id agee", 2, "'agee'"),
    ("predict run --data excel.csv --out p.csv", 2, "Excel"),
    ("predict run --data a.csv", 2, "--out"),
    # presets, keys, data
    ("presets adlut", 2, "did you mean 'adult'?"),
    ("keys cpfd", 2, "did you mean 'cpfed'?"),
    ("data get mnistt", 2, "did you mean 'mnist'?"),
    ("data describe nowhere.csv --label sick", 2, "nowhere.csv"),
    ("data describe a.csv", 2, "label"),
    ("data describe digits --partition circles", 2, "circles"),
    ("data describe digits --clients 0", 2, "0"),
    ("data describe digits --clients abc", 2, "abc"),
    ("data describe a.csv --label sick --picture a.csv", 2, "a.csv"),
    ("data describe a.csv --label sick --schema broken.toml", 2, "broken.toml"),
    ("data describe a.csv --label sick --picture a.doc", 2, "must end in .png, .pdf or .svg"),
    ("data schema a.csv --label sick --out -", 2, "'-' is not the name"),
    ("data schema a.csv --label sick --out a.csv", 2, "already exists"),
    ("data schema a.csv --label sik", 2, "'sik'"),
    ("data schema a.csv --label sick --task guess", 2, "guess"),
    ("data schema a.csv --label sick --drop agee", 2, "agee"),
    ("data schema nowhere.csv --label sick", 2, "nowhere.csv"),
    ("data schema a.csv", 2, "--label"),
    ("data schema a.csv --label sick --private", 2, "--private needs --epsilon"),
    ("data schema a.csv --label sick --private --epsilon -1", 2, "epsilon=-1.0"),
    ("data schema a.csv --label sick --keep agee", 2, "did you mean 'age'?"),
    ("data lists", 2, "lists"),
    ("data list extra", 2, "extra"),
    ("data get", 2, "NAME"),
    ("presets adult extra", 2, "extra"),
    # account, audit, check, statement, stats
    ("account adlut", 2, "did you mean 'adult'?"),
    ("account folder", 2, "folder"),
    ("account damaged", 4, "summary.json"),
    ("account adult --set privacy.unit=year", 2, "privacy.unit"),
    ("account text.txt", 2, "text.txt"),
    ("account a.csv", 2, "'a.csv' is a table"),
    ("audit adult --out text.txt", 2, "'text.txt' is a file"),
    ("audit", 2, "nothing to attack"),
    ("audit adult --view pigeon", 2, "pigeon"),
    ("audit adult --trials 0", 2, "trials"),
    ("audit adult --confidence 2", 2, "confidence"),
    ("audit adult --fuzz 2", 2, "--fuzz"),
    ("audit --fuzz 0", 2, "fuzz"),
    ("audit adult --rounds 0", 2, "rounds"),
    ("audit adult --canaries -1", 2, "--canaries"),
    ("audit nowhere", 2, "nowhere"),
    ("check nowhere.toml", 2, "nowhere.toml"),
    ("check broken.toml", 2, "broken.toml"),
    ("check latin.toml", 2, "latin.toml"),
    ("check steps.toml", 2, "noise_multiplier is missing"),
    ("check broken.json", 2, "broken.json"),
    ("check list.json", 2, "list.json"),
    ("check folder", 2, "folder"),
    ("check", 2, "FILE"),
    ("statement nowhere", 2, "nowhere"),
    ("statement unfinished", 4, "unfinished"),
    ("statement run --out a.csv", 2, "a.csv"),
    ("statement run --out text.txt", 2, "text.txt"),
    ("statement run --out nowhere/s.md", 2, "the folder 'nowhere' does not exist"),
    ("statement run --party west", 2, "west"),
    ("stats a.csv --epsilon 0", 2, "epsilon"),
    ("stats a.csv --epsilon 1 --delta 2", 2, "delta"),
    ("stats a.csv --epsilon 1 --columns agee", 2, "agee"),
    ("stats nowhere.csv --epsilon 1", 2, "nowhere.csv"),
    ("stats --epsilon 1", 2, "FILE"),
    # budget
    ("budget show nowhere.csv", 2, "nowhere.csv"),
    ("budget show --ledger not-a-ledger", 4, "not-a-ledger"),
    ("budget show --ledger folder", 4, "folder"),
    ("budget set a.csv --epsilon -1", 2, "-1"),
    ("budget set a.csv --epsilon 1 --delta 3", 2, "3"),
    ("budget set a.csv --epsilon 1 --view pigeon", 2, "pigeon"),
    ("budget set a.csv --epsilon 1 --adjacency close", 2, "close"),
    ("budget set nowhere.csv --epsilon 1", 2, "nowhere.csv"),
    ("budget set a.csv", 2, "--epsilon"),
    ("budget same a.csv nowhere", 2, "nowhere"),
    ("budget other a.csv b.csv", 2, "--yes"),
    ("budget set a.csv --epsilon inf", 2, "inf"),
    ("budget set a.csv --epsilon abc", 2, "abc"),
    ("budget history nowhere.csv", 2, "nowhere.csv"),
    ("budget history --ledger not-a-ledger", 4, "not-a-ledger"),
    # plan
    ("plan adlut --epsilon 1", 2, "adlut"),
    ("plan adult", 2, "--epsilon"),
    ("plan adult --epsilon 0 --records 1000 --dim 10", 2, "epsilon"),
    ("plan adult --epsilon 1", 2, "--proxy"),
    ("plan adult --epsilon 1 --records 0 --dim 10", 2, "records"),
    ("plan adult --epsilon 1 --proxy adlut", 2, "adlut"),
    ("plan adult --epsilon 1 --proxy adult --public-fraction 2", 2, "public"),
    ("plan adult --epsilon 1 --records 1000 --dim 10 --grid rounds", 2, "rounds"),
    ("plan adult --epsilon 1 --records 1000 --dim 10 --constant smoothness=much", 2, "smoothness"),
    ("plan adult --epsilon 1 --records 1000 --dim 10 --mode guess", 2, "guess"),
    ("plan adult --epsilon 1 --records 1000 --dim 10 --out nowhere/plan.toml", 2, "nowhere"),
    ("plan adult --epsilon 1 --records 1000 --dim 10 --picture plan.doc", 2, "must end in .png, .pdf or .svg"),
    ("plan adult --epsilon 1 --records 1000 --dim 10 --out key.toml", 2, "'key.toml' already exists"),
    ("plan zero.toml --epsilon 1 --records 1000 --dim 10", 2, "num_clients=0"),
    # reproduce, web, doctor
    ("reproduce nbafl/fig99 --list", 2, "fig99"),
    ("reproduce nbalf", 2, "nbafl"),
    ("reproduce nbafl/fig2 --scale huge", 2, "huge"),
    ("reproduce nbafl/fig2 --scale smoke --against nowhere.json", 2, "nowhere.json"),
    ("reproduce nbafl/fig2 --scale smoke --out text.txt", 2, "'text.txt' is a file"),
    ("web nowhere", 2, "nowhere"),
    ("web folder --host 192.0.2.1 --port 0 --no-open", 2, "give another --port or --host"),
    ("web folder --port 99999", 2, "99999"),
    ("doctor --ledger not-a-ledger", 1, ""),
    # a federation
    ("serve adult --federation nowhere", 2, "nowhere"),
    ("serve adult --federation fed/server --address nonsense", 2, "nonsense"),
    ("serve adlut --federation fed/server", 2, "adlut"),
    ("serve adult --federation fed/server --without west", 2, "west"),
    ("join --federation nowhere --data a.csv", 2, "nowhere"),
    ("join --federation fed/parties/north --data nowhere.csv", 2, "nowhere.csv"),
    ("join --federation fed/parties/north --data a.csv --server nonsense", 6, "nonsense"),
    ("join --federation fed/parties/north", 2, "--data"),
    ("federation init fed --parties north,south", 2, "fed"),
    ("federation init other --parties north", 2, "parties"),
    ("federation init other --parties north,north", 2, "north"),
    ("federation init other --parties north,../south", 2, "south"),
    ("federation init other --parties north,south --days 0", 2, "--days"),
    ("federation init other --parties north,south --days 99999999", 2, "--days"),
    ("federation renew nowhere", 2, "nowhere"),
    ("federation request ../north", 2, "use at most 63 letters, digits"),
    ("federation request fed", 2, "'fed' already exists"),
    ("federation request west --transport pigeon", 2, "choose flower or nvflare"),
    ("federation accept nowhere.json --federation fed/parties/north", 4, "'nowhere.json' cannot be read"),
    ("federation accept broken.json --federation fed/parties/north", 4, "'broken.json' is not valid JSON"),
    ("federation add fed nowhere.json", 4, "'nowhere.json' cannot be read"),
    ("federation add fed list.json", 4, "'list.json' is not a JSON object"),
    ("federation revoke fed west", 6, "known: north, south"),
    ("federation revoke nowhere north", 2, "nowhere"),
    ("federation status nowhere", 2, "nowhere"),
    ("federation verify folder --federation fed/parties/north", 4, "no signature.json"),
    ("federation demo --parties 2", 2, "--parties"),
    ("federation demo --out text.txt", 2, "'text.txt' already exists"),
    ("join --federation fed/server --data a.csv", 2, "not a party's folder"),
    ("serve key.toml --federation fed/server", 2, "did you mean 'num_rounds'?"),
    ("serve adult", 2, "--federation"),
    ("federation check --federation nowhere", 6, "nowhere"),
    ("nonsense", 2, "nonsense"),
    ("run --nonsense", 2, "--nonsense"),
]


def test_every_command_is_given_mistakes():
    tree = get_command(cli.app)
    commands = {
        f"{name} {each}".strip() for name, top in tree.commands.items() for each in getattr(top, "commands", [""])
    }
    assert [
        name for name in sorted(commands) if not any(f"{row[0]} ".startswith(f"{name} ") for row in WRONG)
    ] == []


def cases():
    """All of them; by default every fourth of those that need no finished run."""
    light = 0
    for command, code, says in WRONG:
        heavy = bool({"run", "unfinished", "damaged"} & set(command.split()[1:]))
        light += not heavy
        marks = [pytest.mark.slow] if heavy or light % 4 else []
        yield pytest.param(command, code, says, marks=marks, id=command.replace(" ", "_"))


@pytest.mark.parametrize(("command", "code", "says"), cases())
def test_a_mistake_is_one_line_and_destroys_nothing(command, code, says, workplace, monkeypatch, request):
    if {"run", "unfinished", "damaged"} & set(command.split()[1:]):
        request.getfixturevalue("finished")
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("COLUMNS", "100")
    before = contents(workplace)
    got, errors, output = run_command(command.split())
    assert got == code, errors + output
    after = contents(workplace)
    assert {path: after.get(path) for path in before} == before
    assert [path for path in after if path not in before and "/fed/" not in path] == []  # locks of a party
    if command.startswith(("doctor", "federation check")):  # a list of findings
        return
    assert len(errors.strip().splitlines()) == 1, errors
    assert errors.startswith("error: ")
    assert says in errors
    assert "Errno" not in errors
    assert "Traceback" not in errors
