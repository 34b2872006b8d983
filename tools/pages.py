"""Find and run the commands of the documentation. As a program: write the outputs of docs/gallery.md again."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
GALLERY = ROOT / "docs" / "gallery.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:dither|python) [^`]+)`")
FILE = re.compile(r"# ([\w.]+\.(?:py|toml))\n")  # the first line of a block that is a file
EXAMPLE = re.compile(r"```sh\n(.*?)```\n\n```text\n(.*?)```\n", re.DOTALL)
PICTURE = re.compile(r"<!-- picture: (\S+) -> (\S+) -->")


class Step(NamedTuple):
    """A file to write, a command to run, or Python to run."""

    kind: str
    """"file", "command", "python" or "inline" (a command in a sentence)"""
    text: str
    output: str = ""
    """what the page shows of the output"""
    name: str = ""
    """of the file"""


def steps(page: Path) -> list[Step]:
    """Everything on a page that a reader may type, in order."""
    text = page.read_text(encoding="utf-8")
    positions = [(found.start(), step) for found in FENCE.finditer(text) for step in block_steps(found)]
    sentences = FENCE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    positions += [
        (found.start(), Step("inline", " ".join(found[1].split()))) for found in INLINE.finditer(sentences)
    ]
    return [step for _, step in sorted(positions, key=lambda each: each[0])]


def block_steps(found: re.Match[str]) -> Iterator[Step]:
    """The steps of one fenced block; the block after it may be its output."""
    language, body, output = found[1] or guessed(found[2]), found[2], found[3] or ""
    name = FILE.match(body)
    if name:
        yield Step("file", body, name=name[1])
    elif language == "python":
        yield Step("python", body, output)
    elif language == "sh" and output:
        yield Step("command", body, output)
    elif language == "sh":
        for line in body.replace("\\\n", " ").splitlines():
            if line.strip():
                yield Step("command", re.sub(r"\s+#.*", "", line).strip())
    elif language == "console":
        for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            yield Step("command", command, shown)
    elif language not in ("text", "toml"):
        raise ValueError(f"a block in {language}: use sh, console, python, toml or text\n{body}")


def guessed(body: str) -> str:
    """The language of a block that does not say it."""
    if body.startswith("$ "):
        return "console"
    return "sh" if re.match(r"(dither|python|make|pip) ", body) else "text"


def run(step: Step, folder: Path, columns: int = 100) -> subprocess.CompletedProcess[str]:
    """Run a command or Python in a folder, with a ledger of that folder's own."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'src'}",
        "DITHER_LEDGER": "ledger.sqlite",
        "DITHER_STATE": "state",
        "COLUMNS": str(columns),
        "NO_COLOR": "1",
    }
    if step.kind == "python":
        command = ["python", "-c", step.text]
    else:
        script = 'set -e -o pipefail\ndither() { python -m dither "$@"; }\n' + step.text
        command = ["bash", "-c", script]
    return subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, timeout=900)


def main() -> None:
    """Run the gallery, then write its outputs and its pictures."""
    text = GALLERY.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "examples").symlink_to(ROOT / "examples")
        for commands, stored in EXAMPLE.findall(text):
            print(commands.splitlines()[0], file=sys.stderr, flush=True)
            done = run(Step("command", commands), folder)
            if done.returncode not in (0, 1):  # 1: a finding, such as a claim without a proof
                raise RuntimeError(f"{commands}: exit code {done.returncode}\n{done.stderr}")
            output = "\n".join(line.rstrip() for line in done.stdout.splitlines()) + "\n"
            text = text.replace(f"{commands}```\n\n```text\n{stored}", f"{commands}```\n\n```text\n{output}")
        for source, target in PICTURE.findall(text):
            shutil.copy(folder / source, GALLERY.parent / target)
    GALLERY.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
