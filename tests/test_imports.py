"""The arrows of docs/architecture.md: a room imports only from rooms above it."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "dither"
# Top to bottom. A room may import itself and what stands above it.
ROOMS = [
    "errors",
    "timing",
    "core",
    "models",
    "data",
    "privacy",
    "secagg",
    "papers",
    "methods",
    "spec",
    "proofs",
    "spending",
    "runs",
    "unfinished",
    "plots",
    "engines",
    "tasks",
    "compiling",
    "sizing",
    "sweeps",
    "training",
    "sweeping",
    "following",
    "federation",
    "planning",
    "audit",
    "reproduce",
    "api",
    "web",
    "cli",
    "__main__",
]


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imports(path: Path) -> set[str]:
    """Modules of dither that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "dither"}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "dither":
            if node.module == "dither":
                found |= {f"dither.{alias.name}" for alias in node.names}
            else:
                found.add(node.module)
    return found


FILES = sorted(path for path in SOURCE.rglob("*.py") if path.name != "__init__.py" or path.parent != SOURCE)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_arrows_point_one_way(path):
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    assert own in ROOMS, f"{path.name} belongs to no room: add it to docs/architecture.md and to this list"
    for module in imports(path):
        other = room_of(module)
        if other in ROOMS:
            assert ROOMS.index(other) <= ROOMS.index(own), f"{own} imports {module}, which stands below it"


def test_engines_know_no_paper_and_papers_know_no_engine():
    for path in (SOURCE / "engines").rglob("*.py"):
        assert not any(module.startswith("dither.papers") for module in imports(path)), path
    for path in (SOURCE / "papers").rglob("*.py"):
        assert not any(module.startswith(("dither.engines", "dither.secagg")) for module in imports(path)), path


def test_flower_is_imported_in_one_place():
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        if path.parent != SOURCE / "engines" / "flower":
            assert "import flwr" not in text, path
            assert "from flwr" not in text, path


def test_nothing_imports_the_command_line():
    for path in FILES:
        if path.parent.name != "cli" and path != SOURCE / "__main__.py":
            assert not any(module.startswith("dither.cli") for module in imports(path)), path


def test_help_needs_no_jax():
    import subprocess
    import sys

    code = (
        "import sys, dither.cli; "
        "bad = {'jax', 'sklearn', 'pandas', 'matplotlib', 'scipy'} & set(sys.modules); "
        "sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_run_starts_without_what_it_does_not_use():
    """Half of the time to the first round was the import of these."""
    import subprocess
    import sys

    code = (
        "import sys; from dither import api; api.run; "
        "bad = {'scipy.stats', 'scipy.signal', 'sklearn', 'pandas', 'matplotlib'} & set(sys.modules); "
        "sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
