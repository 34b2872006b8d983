"""What may be imported where: the layers by import-linter (pyproject.toml), the rest here."""

import subprocess
import sys
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


def test_help_needs_no_jax():
    assert not {"jax", "sklearn", "pandas", "matplotlib", "scipy"} & imported("import dither.cli")


def test_a_run_starts_without_what_it_does_not_use():
    """Half of the time to the first round was the import of these."""
    heavy = {"scipy.stats", "scipy.signal", "sklearn", "pandas", "matplotlib"}
    assert not heavy & imported("import dither; dither.run")
