"""Every command of README and docs is run as printed, or with less work, or is listed here with a reason.

A page is one test. Its files are written, then its commands and its Python run in order in a folder of its own.
What the page shows of an output is compared with the output. Numbers may differ, as noise comes from the operating
system; numbers that a page promises are in `PROMISES`.
"""

import ast
import importlib.util
import re
import shutil
from pathlib import Path

import pytest
from typer.main import get_command

from dither.cli import app
from dither.spec import preset_text

ROOT = Path(__file__).parents[1]


def load_tool():
    spec = importlib.util.spec_from_file_location("pages", ROOT / "tools" / "pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pages = load_tool()
PAGE = pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: str(page.relative_to(ROOT)))

# What is not run here: how a command begins (a pattern), and why. A file of tests as the reason runs it.
NOT_RUN = {
    "pip install": "installs packages",
    "make (?!run$)": "sets up an environment, or measures for minutes",
    "git clone URL": "stands for the address of any copy",
    "cd dither": "enters that copy",
    "python -m pytest": "tests run themselves",
    "python benchmarks/accuracy.py table": "rewrites docs/benchmarks.md",
    r"python benchmarks/(?!bench.py --show)": "measures for minutes to hours",
    "python tools/mutants.py map": "an hour of tests",
    "python tools/mutants.py run": "hours of tests",
    "python tools/pages.py": "rewrites docs/gallery.md",
    "python tools/pack_results.py": "needs the report of hours of runs",
    "python tools/fill_reproduction.py": "rewrites docs/reproduction.md",
    "python tools/compare_reports.py": "tests/reproduction/test_writeup.py",
    "python tools/audit_nbafl.py": "tests/auditing/test_broken_claims.py",
    "python tools/audit_pictures.py docs/images": "rewrites the pictures of docs, minutes",
    r"python -m dither.reproduction (?!.*--estimate)": "tests/reproduction/test_running.py",
    "dither reproduce (?!--list)": "tests/reproduction/test_running.py",
    "dither web": "tests/e2e/test_web.py",
    "dither serve": "tests/e2e/test_federation.py",
    "dither join": "tests/e2e/test_federation.py",
    "dither federation check": "tests/e2e/test_federation.py",
    "dither federation demo": "tests/e2e/test_federation.py",
    "dither federation verify": "tests/e2e/test_federation.py",
    "dither statement runs/first --party": "needs a run of a federation",
    "dither budget show north.csv --federation": "needs a party that has approved an agreement",
    "flower-supernode": "tests/e2e/test_federation_app.py",
    "flwr run": "tests/e2e/test_federation_app.py",
    "dither run mnist.toml --out runs/large --processes 2": "tests/e2e/test_processes.py",
    "dither run benchmarks/specs/B1.toml": "tests/e2e/test_processes.py",
    "dither run examples/mnist.toml --set model.name=examples/torch_model.py": "tests/e2e/test_examples.py",
}
SAME = {"make run": "dither run adult"}  # in an environment that is there already
# Less work: what is replaced in a command or in Python whose output is not compared.
LIGHTER = [
    (
        r"^dither run (?!--resume|diabetes)(.*)",
        r"dither run \1 --set num_rounds=2 --set eval_every=2 --set compare=false",
    ),
    (r"^(dither run .*mnist.*)", r"\1 --set data.records_per_client=100 --set batch_size=5"),
    (r"^(dither run dp-scaffold.*)", r"\1 --set privacy.noise_decay_start=1"),
    (r"^dither sweep (.*)", r"dither sweep \1 --set num_rounds=2 --set compare=false"),
    (r"^dither plan (.*)", r"dither plan \1 --quick --seeds 1 --grid num_rounds=5"),
    (r"^dither start (.*)", r"dither start \1 --yes --set num_rounds=2"),
    (r"^dither audit (?!--fuzz)(.*)", r"dither audit \1 --trials 300 --rounds 1"),
    (
        r"^(dither audit my.toml.*)",
        r"\1 --set data.name=breast-cancer --set num_clients=4 --set cohort_size=4 --set batch_size=8",
    ),
    (r"--fuzz \d+", "--fuzz 1"),
    (r"--canaries \d+", "--canaries 5"),
    (r"--trials \d+(.*--trials)", r"\1"),
    (r"trials=100_000", "trials=300"),
    (r"num_rounds=(100|50|30)\b", "num_rounds=3"),
    (r'"seed": range\(5\)', '"seed": range(2), "num_rounds": [2]'),
    (r"public_fraction=0.5\)", 'public_fraction=0.5, effort="quick", seeds=1, grid={"num_rounds": [5]})'),
    (r"6_400_000", "64_000"),
    (r"--private --epsilon 0.1", "--private --epsilon 2"),  # the tables are small
    (r"runs/\.\.\.", "runs/done"),
]
EXIT = {  # the exit code where it is not 0
    "dither check": (0, 1),  # 1: a claim without a proof
    "dither doctor": (0, 1),  # 1: something is missing
    "dither run patients.toml --out again": (3,),
    "dither run patients.toml --set data.path=renamed.csv": (2,),
    "dither plan cpfed --epsilon 1 --proxy adult --public-fraction 0.5 --set cohort_size=40": (2,),
    "dither plan nbafl --epsilon 1 --model logistic": (2,),  # it leaves no signal
    "dither account cpfed --set privacy.noise=proven --set privacy.adjacency=add/remove": (1,),
}
FORGET = "rm -rf ledger.sqlite* state"  # alternatives on one page spend the same ε twice
BEFORE = {  # what a page, or a command, takes as done
    "dither run north.csv south.csv west.csv": FORGET,
    "dither federation accept": "cp fed/invitations/north.json invitation.json",  # the organiser has sent it
    "dither federation init fed --parties": "rm -r fed",  # the other way to make keys
    "docs/deployment.md": "for name in south east; do dither federation request $name; cp $name/*.json .; done",
    "dither federation init fed --request": "cp north/north.request.json .",  # the party has sent it
    "docs/gallery.md": "rm -r hospitals",  # a run's folder there, tables on other pages
    "docs/performance.md": "mkdir records",
    "docs/privacy.md": "python make_patients.py; head -19000 patients.csv > renamed.csv; "
    "dither run patients.toml --out run",
}
COLUMNS = {"docs/tutorial.md": 200}  # the width of the terminal where it is not 100
NOISY = ("dither stats",)  # which categories and bounds are printed depends on the noise
PROMISES = [  # page, command, pattern of a number, its least and its largest value
    ("docs/tutorial.md", "dither run patients.toml --out hospital", r"proven ε +│ ([\d.]+) per run", 0.99, 1.0),
    ("docs/tutorial.md", "dither run patients.toml --out hospital", r"test accuracy +│ ([\d.]+)", 0.73, 0.78),
    ("docs/tutorial.md", "dither run patients.toml --out again", r"ends after round (\d+) of 40", 5, 39),
    ("docs/tasks.md", "dither evaluate", r"the model +│ ([\d.]+)", 50, 75),
]
NUMBER = re.compile(r"(?<![A-Za-z])-?\d[\d,]*\.?\d*(e-?\d+)?")


def is_mention(text):
    """Whether a command in a sentence only names a command or an option, or has a placeholder for a file."""
    if re.search(r"\.\.\.|\b[A-Z]{3,}\b", text):
        return True
    arguments = [word for word in text.split()[1:] if word not in command_names()]
    return not arguments or all(word.startswith("-") for word in arguments)


def command_names():
    tree = get_command(app)
    return {name for top, each in tree.commands.items() for name in (top, *getattr(each, "commands", ()))}


def why_not(text):
    return next((reason for start, reason in NOT_RUN.items() if re.match(start, text)), None)


def lighter(step):
    text = SAME.get(step.text, step.text)
    for pattern, replacement in () if step.output else LIGHTER:
        text = re.sub(pattern, replacement, text)
    return step._replace(text=text)


def to_run(page):
    found = []
    for step in pages.steps(page):
        if step.kind in ("command", "inline") and why_not(step.text):
            continue
        if step.kind == "inline" and is_mention(step.text):
            continue
        found.append(lighter(step))
    return found


def plain(text):
    """Text without its numbers, boxes and spaces, in one line: tables break their lines where they like."""
    text = re.sub(r"\b[0-9a-f]{8}\b", "#", text)  # the id of a data set
    return " ".join(re.sub(r"[│┃┏┓┗┛┡┩└┘┌┐├┤┬┴┼╇╈━─┳]", " ", NUMBER.sub("#", text)).split())


def missing_lines(shown, printed):
    """The lines of a page that were not printed; "..." stands for anything."""
    parts = [plain(part) for line in shown.splitlines() for part in line.split("...")]
    return [part for part in parts if part not in plain(printed)]


def with_values(code):
    """Python that checks the numbers in comments at the end of its lines: `f(x)  # 0.702`."""
    lines, checked = code.splitlines(), []
    for node in ast.parse(code).body:
        promised = re.search(r"  # ([\d.]+)$", lines[node.end_lineno - 1])
        source = ast.get_source_segment(code, node)
        checked.append(f"_value = {source}" if promised and isinstance(node, ast.Expr) else source)
        if promised:
            digits = len(promised[1].replace(".", "").lstrip("0"))
            value = "_value" if isinstance(node, ast.Expr) else node.targets[0].id
            checked.append(f"assert f'{{{value}:.{digits}g}}' == '{promised[1]}', {value}")
    return "\n".join(checked)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """What the pages name: tables of institutions, a spec, a description of training, and finished runs."""
    folder = tmp_path_factory.mktemp("place")
    for number, name in enumerate(("north", "south", "west", "public", "new", "hospitals/a", "hospitals/b")):
        label, file = ("readmitted" if "/" in name else "outcome"), folder / f"{name}.csv"
        rows = (
            f"p{number}{i:04d},{age},{'surgery' if i % 3 else 'medicine'},{'yes' if age > 45 else 'no'}"
            for i, age in enumerate(20 + 37 * i % 60 for i in range(2500))
        )
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join([f"patient,age,ward,{label}", *rows]) + "\n")
    for step in pages.steps(ROOT / "docs" / "tutorial.md"):
        if step.kind == "file":
            (folder / step.name).write_text(step.text, encoding="utf-8")
    (folder / "my.toml").write_text(preset_text("adult"))
    shutil.copy(ROOT / "examples/check/opacus-mnist.toml", folder / "training.toml")
    run = "dither run north.csv south.csv west.csv --label outcome --set num_rounds=2 --out runs/done"
    done = pages.run(pages.Step("command", run), folder)
    assert done.returncode == 0, done.stderr
    shutil.copytree(folder / "runs/done", folder / "runs/first")
    shutil.rmtree(folder / "state")  # nothing has been spent yet
    for file in folder.glob("ledger.sqlite*"):
        file.unlink()
    for name in ("examples", "benchmarks", "tools", "tests", "src", "results"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.mark.slow
@PAGE
def test_the_commands_of_a_page_run(page, place, tmp_path):
    folder, name = tmp_path / "folder", str(page.relative_to(ROOT))
    shutil.copytree(place, folder, symlinks=True)
    assert pages.run(pages.Step("command", BEFORE.get(name, "")), folder).returncode == 0
    ran = set()
    for step in to_run(page):
        if step.kind == "file":
            (folder / step.name).write_text(step.text, encoding="utf-8")
            continue
        if step.text in ran and step.kind == "inline":
            continue
        ran.add(step.text)
        if step.kind == "python":
            step = step._replace(text=with_values(step.text))
        for start, script in BEFORE.items():
            if step.text.startswith(start):
                assert pages.run(pages.Step("command", script), folder).returncode == 0
        done = pages.run(step, folder, COLUMNS.get(name, 100))
        printed = done.stdout + done.stderr
        allowed = next((codes for start, codes in EXIT.items() if step.text.startswith(start)), (0,))
        assert done.returncode in allowed, f"{step.text}\n{printed}"
        assert "Traceback" not in printed, f"{step.text}\n{printed}"
        if not step.text.startswith(NOISY):
            assert missing_lines(step.output, printed) == [], f"{step.text}\n{printed}"
        for where, command, pattern, least, most in PROMISES:
            if where == name and step.text.startswith(command):
                assert least <= float(re.search(pattern, printed)[1]) <= most, printed


@PAGE
def test_every_command_on_a_page_exists(page):
    """Commands and their options, in blocks and in sentences."""
    tree = get_command(app)
    for step in pages.steps(page):
        if step.kind not in ("command", "inline"):
            continue
        for call in re.findall(r"(?:^|[;|&] *|\n)dither ([^|;&\n]*)", step.text):
            command, words = tree, re.sub(r"'[^']*'", "", call).split()
            while words and words[0] in getattr(command, "commands", ()):
                command = command.commands[words.pop(0)]
            options = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
            options |= {"--help", "--install-completion", "--show-completion"}
            named = {re.sub("=.*", "", word) for word in words if re.match(r"--?[a-z]", word)}
            assert named <= options, step.text
            is_group = hasattr(command, "commands")
            assert not is_group or not words or words[0].startswith("-") or words[0].isupper(), step.text


def test_nothing_is_listed_that_no_page_has():
    texts = [step.text for page in pages.PAGES for step in pages.steps(page)]
    assert [start for start in NOT_RUN if not any(re.match(start, text) for text in texts)] == []
    assert [start for start in EXIT if not any(text.startswith(start) for text in texts)] == []
    assert [name for name in (*COLUMNS, *(each[0] for each in PROMISES)) if not (ROOT / name).exists()] == []
    assert [
        start
        for start in BEFORE
        if not (ROOT / start).exists() and not any(text.startswith(start) for text in texts)
    ] == []
    assert all((ROOT / reason).exists() for reason in NOT_RUN.values() if reason.startswith("tests/"))


def test_the_gallery_stores_its_outputs():
    outputs = [step.output for step in pages.steps(pages.GALLERY) if step.kind == "command"]
    assert len(outputs) >= 6
    assert all(outputs)


def test_the_checks_see_what_is_wrong():
    assert missing_lines("│ proven  │ 0.219 │ run │\n...\nR3", "proven ┃ 1 run (R3)") == []
    assert missing_lines("claimed 3 per run", "proven 3 per run") == ["claimed # per run"]
    assert is_mention("dither budget show")
    assert is_mention("dither statement RUN --out x.pdf")
    assert not is_mention("dither account cpfed")
    with pytest.raises(AssertionError):
        exec(with_values("abs(-0.25)  # 0.26"))
    exec(with_values("x = abs(-0.25)  # 0.25"))
