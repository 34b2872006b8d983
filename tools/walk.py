"""The walk of a command through Dither's files: `python tools/walk.py run adult` runs the command and prints which
file calls which, in the order in which they are first reached."""

from __future__ import annotations

import inspect
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

SOURCE = Path(__file__).resolve().parent.parent / "src" / "dither"


class Walk:
    """Calls from one file of Dither to another, in the order in which they first happen."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}  # file -> the function that it was entered by
        self.calls: dict[tuple[str, str], int] = {}
        self._inside = f"{SOURCE}/"

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """A profile function: `sys.setprofile`."""
        if event != "call" or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # bodies of modules and classes
            return
        callee = self._name(frame)
        if callee is None:
            return
        caller, above = None, frame.f_back
        while above is not None and caller is None:  # through libraries, such as a compiler that traces a function
            caller, above = self._name(above), above.f_back
        self.files.setdefault(callee, frame.f_code.co_qualname)
        if caller is not None and caller != callee:
            self.calls[caller, callee] = self.calls.get((caller, callee), 0) + 1

    def _name(self, frame: FrameType) -> str | None:
        path = frame.f_code.co_filename
        return path.removeprefix(self._inside) if path.startswith(self._inside) else None

    def report(self) -> str:
        """The files with their entries, then what each calls."""
        lines = [f"{number:3d}  {name:40s} {entry}" for number, (name, entry) in enumerate(self.files.items(), 1)]
        lines.append("")
        for name in self.files:
            called = [callee for caller, callee in self.calls if caller == name]
            if called:
                lines.append(f"{name} -> {', '.join(called)}")
        return "\n".join([*lines, "", f"{len(self.files)} files, {len(self.calls)} calls from file to file"])


def main(arguments: list[str]) -> int:
    """Run the command with its output left out, and print its walk."""
    if not arguments:
        print(__doc__)
        return 2
    from dither.cli import main as command

    if arguments[0] == "run" and "--out" not in arguments:
        arguments = [*arguments, "--out", str(Path(tempfile.mkdtemp()) / "run")]
    walk, before = Walk(), sys.argv
    sys.argv = ["dither", *arguments, "--quiet"]
    sys.setprofile(walk)
    code = 0
    try:
        command()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.setprofile(None)
        sys.argv = before
    print(walk.report())
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
