"""What may be imported where: the layers by import-linter (pyproject.toml), the rest here."""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from importlinter.cli import lint_imports

SOURCE = Path(__file__).parent.parent / "src" / "dither"


def imported(statement: str) -> set[str]:
    """The modules that a fresh process has after a statement."""
    code = f"import sys; {statement}; print(*sys.modules)"
    return set(
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    )


def test_rooms_import_only_from_rooms_below_them(monkeypatch):
    monkeypatch.chdir(SOURCE.parent.parent)
    assert lint_imports(no_cache=True) == 0


def test_flower_is_imported_in_one_place():
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path.parent != SOURCE / "federation" / "flower":
            assert "import flwr" not in text, path
            assert "from flwr" not in text, path


def test_windows_is_refused_by_name():
    code = "import sys; sys.platform = 'win32'; import dither"
    refused = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert refused.stderr.splitlines()[-1].endswith("On Windows, use WSL.")


def test_help_needs_no_jax():
    assert not {"jax", "sklearn", "pandas", "matplotlib", "scipy"} & imported("import dither.cli")


def test_a_run_starts_without_what_it_does_not_use():
    """Half of the time to the first round was the import of these."""
    heavy = {"scipy.stats", "scipy.signal", "sklearn", "pandas", "matplotlib"}
    assert not heavy & imported("import dither; dither.run")


def test_a_kept_account_is_read_without_jax():
    """`dither account PRESET` answers a second time in under a second."""
    assert not {"jax", "scipy.stats", "pandas"} & imported("import dither.experiment.account")


def test_what_is_asked_for_by_name_is_installed_with_dither():
    """A run asks for the versions of these packages: each must be a dependency, or come with one."""
    import tomllib

    from dither.cli import look
    from dither.experiment import build

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.split(r"[<>=!~ \[]", each, maxsplit=1)[0] for each in project["dependencies"]} | {"jaxlib"}
    assert set(build.LIBRARIES) <= names
    assert set(look._NEEDED) <= names


def test_no_class_name_is_used_twice():
    names = Counter(
        node.name
        for file in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []
