"""Do the tests notice? Random mutants of clipping, noise, sampling and accounting, and how many the tests kill.

    python tools/mutants.py map                                          # which test reaches which line
    python tools/mutants.py run --seed 1 --results build/mutants.json    # draws and tests; resumes
    python tools/mutants.py run --seed 1 --results build/mutants.json --again    # survivors, against more tests
    python tools/mutants.py list --seed 1                                # the mutants of a seed

A mutant is one small change of one line. Each line that can be changed is equally likely, so files count by their
length; then each kind of change on that line. A mutant meets the default tests that reach its line, quick files
first, in a copy of the tree; without a map, the test files that import its module. Docstrings, messages,
annotations and the papers' convergence bounds are left alone.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import itertools
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "dither"
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
FORK = multiprocessing.get_context("fork")
MAP = ROOT / "build" / "mutants-map.json"
TARGETS = {
    "privacy": ("clipping", "noise", "sampling", "discrete", "entropy", "lattice"),
    "accounting": ("*",),
    "accounting/ledger": ("filter", "book"),
    "methods": (
        *("__init__", "local", "cpfed", "concentrated", "baselines"),
        *("dp_scaffold", "nbafl", "secure_fedavg"),
    ),
    "experiment": ("counting", "statistics", "evaluation", "private_schema"),
    "auditing": ("counts",),
}
END = "\n# Convergence\n"  # what follows is no part of privacy
ROOMS = ("accounting", "privacy", "methods", "vectors", "statistical", "attacks", "equivalence", "simulation")
MAPPED = [f"tests/{room}" for room in (*ROOMS, "experiment", "auditing")]
WITHOUT_MAP = 600.0  # seconds after which a mutant counts as one that loops, where no test's time is known
MOST_SECONDS = 60.0  # of tests that a mutant meets at first; survivors meet the rest with --again

COMPARISONS = "Lt LtE GtE|LtE Lt Gt|Gt GtE LtE|GtE Gt Lt|Eq NotEq|NotEq Eq|In NotIn|NotIn In|Is IsNot|IsNot Is"
ARITHMETIC = "Add Sub|Sub Add|Mult Div|Div Mult|FloorDiv Mult|Mod FloorDiv|Pow Mult|LShift RShift|RShift LShift"
OPERATORS = {
    getattr(ast, first): [getattr(ast, other) for other in others]
    for first, *others in map(
        str.split, f"{COMPARISONS}|{ARITHMETIC}|BitAnd BitOr|BitOr BitAnd|BitXor BitOr".split("|")
    )
}
PAIRS = "min max|minimum maximum|floor ceil|any all|argmin argmax|exp expm1|log log1p"
FUNCTIONS = {a: b for pair in PAIRS.split("|") for a, b in itertools.permutations(pair.split())}
DROPPED = {"sqrt", "isqrt", "square", "abs", "isfinite", "cumsum"}  # f(x) becomes x
IN_ORDER = {"subtract", "divide", "power", "arctan2"}  # functions of libraries whose arguments may be swapped
SPOKEN = {"did_you_mean", "named_scope", "errstate", "SpecError", "NoProof", "ValueError", "join"}
BRACKETED = ast.BinOp | ast.BoolOp | ast.Compare | ast.IfExp | ast.UnaryOp | ast.Lambda


class Edit(NamedTuple):
    """The bytes from `start` to `end` of a file become `after`."""

    file: str
    line: int
    statement: int  # the line on which the statement begins, which is what coverage counts
    kind: str
    start: int
    end: int
    before: str
    after: str

    def apply(self, source: str) -> str:
        data = source.encode()
        return (data[: self.start] + self.after.encode() + data[self.end :]).decode()


# Drawing


class Mutator:
    """Finds all mutants of the project's files, or of those named, such as privacy/lattice.py."""

    def __init__(self, only: list[str] | None = None) -> None:
        self.sources = {
            str(path.relative_to(ROOT)): path.read_text("utf-8")
            for room, names in TARGETS.items()
            for name in names
            for path in sorted((SOURCE / room).glob(f"{name}.py"))
            if not only or str(path.relative_to(SOURCE)) in only
        }
        # The types of parameters: two arguments may be swapped where both fit both places.
        self.types: dict[str, set[tuple[str, ...]]] = defaultdict(set)
        for path in SOURCE.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.FunctionDef):
                    parameters = [p for p in node.args.args if p.arg != "self"]
                    if node.args.vararg:
                        parameters = [node.args.vararg] * 9
                elif isinstance(node, ast.ClassDef):
                    parameters = [field for field in node.body if isinstance(field, ast.AnnAssign)]
                else:
                    continue
                types = tuple(ast.unparse(p.annotation) if p.annotation else "" for p in parameters)
                self.types[node.name].add(types)

    def draw(self, count: int, seed: int) -> list[Edit]:
        """`count` different mutants: a line that can be changed, a kind of change, one such change."""
        by_line: dict[tuple[str, int], dict[str, list[Edit]]] = defaultdict(lambda: defaultdict(list))
        for file, source in self.sources.items():
            for edit in self.edits(file, source):
                by_line[file, edit.line][edit.kind].append(edit)
        rng, lines, drawn = random.Random(seed), sorted(by_line), list[Edit]()  # noqa: S311
        while len(drawn) < count:
            kinds = by_line[rng.choice(lines)]
            edit = rng.choice(kinds[rng.choice(sorted(kinds))])
            if edit not in drawn and self.works(edit):
                drawn.append(edit)
        return drawn

    def works(self, edit: Edit) -> bool:
        """Whether the mutant is a program, and another one."""
        source = self.sources[edit.file]
        try:
            return ast.dump(ast.parse(edit.apply(source))) != ast.dump(ast.parse(source))
        except SyntaxError:
            return False

    def edits(self, file: str, source: str) -> list[Edit]:
        starts = [0, *itertools.accumulate(len(line.encode()) for line in source.splitlines(keepends=True))]
        data, result = source.encode(), list[Edit]()

        def visit(node: Any, bound: set[str], statement: int = 1) -> None:
            if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Call) and name_of(node.func) in SPOKEN):
                return
            if isinstance(node, ast.stmt):
                statement = node.lineno
            if isinstance(node, ast.FunctionDef | ast.Lambda):
                bound = {parameter.arg for parameter in (*node.args.args, *node.args.kwonlyargs)}
            for kind, other in self.replacements(node, bound):
                place = node.test if kind == "condition" else node
                start = starts[place.lineno - 1] + place.col_offset
                end = starts[place.end_lineno - 1] + place.end_col_offset
                text = ast.unparse(other)
                after = f"({text})" if isinstance(other, BRACKETED) else text
                result.append(
                    Edit(file, place.lineno, statement, kind, start, end, data[start:end].decode(), after)
                )
            if isinstance(node, ast.Raise):
                return  # its message
            for field, value in ast.iter_fields(node):
                if field in ("annotation", "returns", "decorator_list"):
                    continue
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        visit(child, bound, statement)
                    if isinstance(child, ast.stmt):
                        names = (part for part in ast.walk(child) if isinstance(part, ast.Name))
                        bound |= {name.id for name in names if isinstance(name.ctx, ast.Store)}

        visit(ast.parse(source.split(END)[0]), set())
        return result

    def replacements(self, node: ast.AST, bound: set[str]) -> Iterator[tuple[str, ast.AST]]:
        """What may stand in the place of a node. `bound` are the variables that have a value before it."""
        match node:
            case ast.BinOp() | ast.AugAssign():
                for other in OPERATORS.get(type(node.op), ()):
                    yield "arithmetic", changed(node, op=other())
            case ast.Compare():
                for i, operator in enumerate(node.ops):
                    for other in OPERATORS[type(operator)]:
                        yield "comparison", changed(node, ops=[*node.ops[:i], other(), *node.ops[i + 1 :]])
            case ast.BoolOp():
                yield "boolean", changed(node, op=ast.And() if isinstance(node.op, ast.Or) else ast.Or())
                for i in range(len(node.values)):
                    rest = [*node.values[:i], *node.values[i + 1 :]]
                    yield "boolean", rest[0] if len(rest) == 1 else changed(node, values=rest)
            case ast.UnaryOp():
                yield "sign" if isinstance(node.op, ast.USub) else "boolean", node.operand
            case ast.Constant(value=bool()):
                yield "boolean", ast.Constant(not node.value)
            case ast.Constant(value=int()):
                yield from (("off by one", ast.Constant(node.value + step)) for step in (1, -1))
            case ast.Constant(value=float()):
                values = (node.value * 2, node.value / 2) if node.value else (1.0,)
                yield from (("constant", ast.Constant(value)) for value in values)
            case ast.Call():
                yield from self.calls(node)
            case ast.IfExp():
                swapped = changed(node, body=node.orelse, orelse=node.body)
                yield from (("branches", other) for other in (swapped, node.body, node.orelse))
            case ast.If():
                yield from (("condition", ast.Constant(value)) for value in (True, False))
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]) if name not in bound:
                return
            case (
                ast.AugAssign()
                | ast.Raise()
                | ast.Continue()
                | ast.Break()
                | ast.Expr(value=ast.Call())
                | ast.Assign(targets=[ast.Name() | ast.Subscript() | ast.Attribute()])
            ):
                yield "deleted statement", ast.Pass()

    def calls(self, node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
        name, arguments = name_of(node.func), node.args
        if name in FUNCTIONS:
            field = "attr" if isinstance(node.func, ast.Attribute) else "id"
            yield "function", changed(node, func=changed(node.func, **{field: FUNCTIONS[name]}))
        if name in DROPPED and len(arguments) == 1:
            yield "function", arguments[0]
        if name == "where" and len(arguments) == 3:
            yield "branches", changed(node, args=[arguments[0], arguments[2], arguments[1]])
        plain = not any(isinstance(argument, ast.Starred) for argument in arguments)
        for i in range(len(arguments) - 1) if plain else ():
            fit = any(len(t) > i + 1 and t[i] == t[i + 1] for t in self.types.get(name, ()))
            if (fit or name in IN_ORDER) and ast.dump(arguments[i]) != ast.dump(arguments[i + 1]):
                swapped = [*arguments[:i], arguments[i + 1], arguments[i], *arguments[i + 2 :]]
                yield "swapped arguments", changed(node, args=swapped)
        if name == "_replace" or ast.unparse(node.func).startswith(("np.", "jnp.", "jax.", "math.")):
            for i in range(len(node.keywords)):
                yield "dropped keyword", changed(node, keywords=[*node.keywords[:i], *node.keywords[i + 1 :]])


def name_of(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def changed(node: Any, **fields: Any) -> Any:
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


# Testing


def make_map() -> None:
    """Run the default tests once, to see which reaches which line, and how long each takes."""
    with tempfile.TemporaryDirectory() as folder:
        config, data, report = (Path(folder) / name for name in ("config", "data", "report.xml"))
        config.write_text(f"[run]\ninclude = {SOURCE}/*\ndata_file = {data}\n")
        options = [
            "--cov",
            f"--cov-config={config}",
            "--cov-context=test",
            "--cov-report=",
            f"--junitxml={report}",
        ]
        print(run_tests([*options, "-n", "2", "--dist", "loadfile", *MAPPED], ROOT)[1][-1000:])
        write_map(data, report)


def write_map(data: Path, report: Path) -> None:
    from coverage import CoverageData

    coverage = CoverageData(str(data))
    coverage.read()
    cases = ElementTree.parse(report).iter("testcase")  # noqa: S314
    passed = {f"{c.get('classname')}::{c.get('name')}": float(c.get("time", 0)) for c in cases if not len(c)}
    lines, seconds = {}, {}
    for path in coverage.measured_files():
        for line, contexts in coverage.contexts_by_lineno(path).items():
            tests = sorted({context.rpartition("|")[0] for context in contexts} - {""})
            lines[f"{Path(path).relative_to(ROOT)}:{line}"] = tests
            for test in tests:
                module, _, name = test.partition("::")
                reported = f"{module.removesuffix('.py').replace('/', '.')}::{name}"
                if reported in passed:
                    seconds[test] = passed[reported]
    MAP.parent.mkdir(exist_ok=True)
    MAP.write_text(json.dumps({"seconds": seconds, "lines": lines}))


def tests_for(edit: Edit, known: dict[str, Any], most: float) -> list[str]:
    """The tests named for a mutant's file, and those that reach its line, or its file where none does (what runs
    at import or is compiled once). Its room's come first, then quick modules; not longer than `most` seconds."""
    seconds, lines = known["seconds"], known["lines"]
    reached = set(lines.get(f"{edit.file}:{edit.statement}", ())) & set(seconds)
    if not reached:
        reached = {test for place, tests in lines.items() if place.startswith(f"{edit.file}:") for test in tests}
    mirrored, room = f"/test_{Path(edit.file).stem}.py", f"tests/{edit.file.split('/')[2]}/"
    modules = defaultdict(list)
    for test in seconds:
        module = test.split("::")[0]
        if test in reached or module.endswith(mirrored):
            modules[module].append(test)
    chosen, total = list[str](), 0.0

    def distance(module: str) -> tuple[bool, bool, float]:
        mine = module.endswith(mirrored), module.startswith(room)
        return (not mine[0], not mine[1], sum(seconds[test] for test in modules[module]))

    order = sorted(modules, key=distance)
    for test in itertools.chain.from_iterable(modules[module] for module in order):
        if total + seconds[test] <= most:
            chosen.append(test)
            total += seconds[test]
    return chosen


def importing(edit: Edit) -> list[str]:
    """The test files that import a mutant's module: the one named for it, those of its room, others."""
    package, _, module = edit.file.removeprefix("src/").removesuffix(".py").replace("/", ".").rpartition(".")
    room, files = f"tests/{edit.file.split('/')[2]}/", []
    for path in (path for place in MAPPED for path in sorted((ROOT / place).rglob("test_*.py"))):
        imports = [
            node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)
        ]
        names = {f"{node.module}.{alias.name}" for node in imports for alias in node.names}
        modules = {node.module for node in imports}
        if path.name == f"test_{module}.py" or f"{package}.{module}" in names | modules:
            files.append(str(path.relative_to(ROOT)))
    return sorted(files, key=lambda file: (not file.endswith(f"/test_{module}.py"), not file.startswith(room)))


def run_tests(arguments: list[str], tree: Path, limit: float | None = None) -> tuple[int | None, str]:
    """pytest's exit status (None after `limit` seconds) and output. In a fork: libraries are imported once."""
    with tempfile.NamedTemporaryFile("r") as output:
        child = FORK.Process(target=call_pytest, args=(arguments, tree, output.name))
        child.start()
        child.join(limit)
        if child.exitcode is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.join()
            return None, ""
        return child.exitcode, output.read()


def call_pytest(arguments: list[str], tree: Path, output: str) -> None:
    os.setsid()
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    sys.path.insert(0, str(tree / "src"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (sys.path[0], os.environ.get("PYTHONPATH"))))
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # a cached file of the same second and size would hide a mutant
    sys.dont_write_bytecode = True
    options = ["-o", "addopts=-q -m 'not slow'", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    status = pytest.main([*options, *arguments])
    sys.stdout.flush()
    os._exit(status)


def judge(edit: Edit, tree: Path, tests: list[str], limit: float) -> dict[str, Any]:
    """Run the tests against a mutant: killed (and by which test), timeout, or survived."""
    path, chosen = tree / edit.file, tree / "chosen-tests"
    source = path.read_text("utf-8")
    chosen.write_text("\n".join(tests))
    began = time.monotonic()
    try:
        path.write_text(edit.apply(source), "utf-8")
        status, said = run_tests(["-x", "-rfE", "--tb=line", f"@{chosen}"], tree, limit)
    finally:
        path.write_text(source, "utf-8")
    verdict = {"seconds": round(time.monotonic() - began, 1), "tests": len(tests)}
    if status is None:
        return {"status": "timeout", **verdict}
    if status in (0, 5):  # 5: there was no test
        return {"status": "survived", **verdict}
    # The last one: before the first test, the mutant ended the import of what all tests share.
    marks = "FAILED", "ERROR", "ImportError while loading conftest"
    failed = [line.split(" - ")[0].split(" '/")[0] for line in said.splitlines() if line.startswith(marks)]
    if status not in (1, 2, 4) or not failed or "ERROR: not found" in said:  # the last: the map is old
        raise RuntimeError(f"pytest ended with status {status}:\n{said[-2000:]}")
    return {"status": "killed", **verdict, "by": failed[0]}


def judge_in_copy(folder: str, number: int, edit: Edit, tests: list[str], limit: float) -> dict[str, Any]:
    """Judge a mutant in this process's own copy of the tree."""
    tree = Path(folder) / str(os.getpid())
    if not tree.exists():
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "site", "results", "runs", "dist"))
    return {"number": number, **edit._asdict(), **judge(edit, tree, tests, limit)}


# reason: the options of a command
def run(count: int, seed: int, jobs: int, results: Path, *, again: bool, only: list[str]) -> None:
    """Test the mutants that have no result yet; with `again` those that survived."""
    for library in (
        "jax.numpy",
        "optax",
        "jax_privacy",
        "dp_accounting",
        "scipy.optimize",
        "pandas",
        "hypothesis",
    ):
        importlib.import_module(library)
    known, drawn = json.loads(MAP.read_text()) if MAP.exists() else None, Mutator(only).draw(count, seed)
    done = {e["number"]: e for e in json.loads(results.read_text("utf-8"))["mutants"]} if results.exists() else {}
    waiting = [i for i in range(count) if i not in done or (again and done[i]["status"] == "survived")]
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(jobs, mp_context=FORK) as pool:
        futures = []
        for number in waiting:
            if known is None:
                tests, limit = importing(drawn[number]), WITHOUT_MAP
            else:
                tests = tests_for(drawn[number], known, math.inf if again else MOST_SECONDS)
                limit = 60.0 + 8.0 * sum(known["seconds"][test] for test in tests)
            futures.append(pool.submit(judge_in_copy, folder, number, drawn[number], tests, limit))
        try:
            for future in as_completed(futures):
                entry = future.result()
                done[entry["number"]] = entry
                print(f"{len(done):>4} {line_of(entry)}", flush=True)
                write(results, seed, [done[i] for i in sorted(done)])
        finally:
            pool.shutdown(cancel_futures=True)  # after an error or Ctrl-C the others need not run
    print_table(list(done.values()))


def write(results: Path, seed: int, entries: list[dict[str, Any]]) -> None:
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    results.write_text(f'{{"seed": {seed}, "mutants": [\n{lines}\n]}}\n', "utf-8")


def line_of(entry: dict[str, Any]) -> str:
    place = f"{entry['file'].removeprefix('src/dither/')}:{entry['line']}"
    change = " ".join(f"{entry['before']}  ->  {entry['after']}".split())
    status = f"{entry['status']:<8} {entry['seconds']:5.0f} s  " if "status" in entry else ""
    return f"{status}#{entry['number']} {place}  {entry['kind']}: {change[:120]}"


def print_table(entries: list[dict[str, Any]]) -> None:
    """Counts by file. "equivalent" is a person's verdict, written into the results with a `reason`."""
    statuses = ("killed", "timeout", "equivalent", "survived")
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for entry in entries:
        for row in (entry["file"].removeprefix("src/dither/"), "all"):
            counts[row][entry["status"]] += 1
    print(f"| file | mutants | {' | '.join(statuses)} |\n|---|---|{'---|' * len(statuses)}")
    for name, row in sorted(counts.items(), key=lambda item: (item[0] == "all", item[0])):
        print(f"| {name} | {row.total()} | {' | '.join(str(row[status]) for status in statuses)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("map", "run", "list", "table"))
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--again", action="store_true", help="test the survivors once more, against more tests")
    parser.add_argument("--only", nargs="*", default=[], help="files to change, such as privacy/lattice.py")
    parser.add_argument("--results", type=Path, default=RESULTS, help="those that are there are not tested again")
    options = parser.parse_args()
    if options.action == "map":
        make_map()
    elif options.action == "run":
        run(options.count, options.seed, options.jobs, options.results, again=options.again, only=options.only)
    elif options.action == "list":
        for number, edit in enumerate(Mutator(options.only).draw(options.count, options.seed)):
            print(line_of({"number": number, **edit._asdict()}))
    else:
        print_table(json.loads(options.results.read_text("utf-8"))["mutants"])


if __name__ == "__main__":
    main()
