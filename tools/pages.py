"""Run the examples of docs/gallery.md and write their outputs and pictures into the page."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gallery.md"
EXAMPLE = re.compile(r"```sh\n(.*?)```\n\n```text\n(.*?)```\n", re.DOTALL)
PICTURE = re.compile(r"<!-- picture: (\S+) -> (\S+) -->")


def examples(page: Path = PAGE) -> list[tuple[str, str]]:
    """The commands of the page, each with the output that is stored."""
    return EXAMPLE.findall(page.read_text(encoding="utf-8"))


def run(commands: str, folder: Path) -> str:
    """What the commands print in a folder; an error where one of them fails."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'src'}",
        "DITHER_LEDGER": "ledger.sqlite",
        "DITHER_STATE": "state",
        "COLUMNS": "100",
        "NO_COLOR": "1",
    }
    script = 'set -e -o pipefail\ndither() { python -m dither "$@"; }\n' + commands
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, text=True, capture_output=True, timeout=900
    )
    if done.returncode:
        raise RuntimeError(f"{commands}: exit code {done.returncode}\n{done.stderr}")
    return "\n".join(line.rstrip() for line in done.stdout.splitlines()) + "\n"


def main() -> None:
    """Run everything, then write the page and its pictures."""
    text = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "examples").symlink_to(ROOT / "examples")
        for commands, _ in examples():
            print(commands.splitlines()[0], file=sys.stderr, flush=True)
            output = run(commands, folder)
            text = EXAMPLE.sub(
                lambda found, commands=commands, output=output: (
                    f"```sh\n{commands}```\n\n```text\n{output}```\n" if found[1] == commands else found[0]
                ),
                text,
            )
        for source, target in PICTURE.findall(text):
            shutil.copy(folder / source, PAGE.parent / target)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
