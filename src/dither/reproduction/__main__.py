"""`python -m dither.reproduction`: as `dither reproduce`, without the packages of the command line.

For a machine that only computes: fill a cache folder there, copy it back, and draw the report from it.

    python -m dither.reproduction nbafl dp-scaffold/fig4 --scale full --cache DIR --only-compute
    python -m dither.reproduction all --scale full --cache DIR --out results
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence

from dither.errors import DitherError
from dither.reproduction.figure import SCALES


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, compute, print."""
    parser = argparse.ArgumentParser(
        "python -m dither.reproduction", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", default=["all"], help="all, a paper (nbafl) or a figure (nbafl/fig2)")
    parser.add_argument("--scale", default="quick", choices=SCALES)
    parser.add_argument("--out", default="reproduced", help="folder for pictures, CSVs and report.html")
    parser.add_argument("--cache", help="folder of finished runs (default: the platform's cache folder)")
    parser.add_argument("--data-dir", help="folder with local copies of the data sets")
    parser.add_argument("--only-compute", action="store_true", help="fill the cache and stop")
    parser.add_argument("--robust", default="", help="also judge with open settings changed, at this scale")
    parser.add_argument("--minutes", type=float, default=0.0, help="start no further batch of runs after this")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the figures")
    parser.add_argument("--estimate", action="store_true", help="print what is missing and how long it may take")
    options = vars(parser.parse_args(arguments))
    estimate = options.pop("estimate")
    command = shlex.join(["python", "-m", "dither.reproduction", *(arguments or sys.argv[1:])])
    from dither.reproduction import reproduce
    from dither.reproduction.running import estimates

    try:
        if estimate or options["jobs"] == 1:  # else this process leaves the device to the others
            for line in estimates(options["what"], options["scale"], options["cache"], options["robust"]):
                print(line, flush=True)
        if estimate:
            return 0
        result = reproduce(**options, command=command, on_progress=_Printed())
    except DitherError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for claim in result.claims:
        print(f"{claim.id:7} {claim.text}  {claim.variant}")
    made = result.provenance
    done = f"{made['computed']} runs computed, {made['missing']} missing, {made['elapsed']:.0f} s"
    print(f"{done}; report: {result.report or 'not drawn'}")
    return 0


class _Printed:
    """Prints the progress every few seconds."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()

    def __call__(self, done: float, total: float, figure: str) -> None:
        now = time.perf_counter()
        if now - self._last > 5:
            self._last, spent = now, now - self._began
            left = f", about {spent * (total / done - 1):.0f} s left" if done > total / 100 else ""
            print(f"{100 * done / total:3.0f}%  {figure}  {spent:.0f} s{left}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
