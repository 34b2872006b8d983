"""`python -m dither.reproduction`: the same as `dither reproduce`, without the command line's packages.

For machines that only compute: fill a cache folder there, carry it back, and draw the report from it.

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, compute, print."""
    parser = argparse.ArgumentParser(
        "python -m dither.reproduction", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", default=["all"], help="all, a paper (nbafl) or a figure (nbafl/fig2)")
    parser.add_argument("--scale", default="quick", choices=("smoke", "quick", "full"))
    parser.add_argument("--out", default="reproduced", help="folder for pictures, CSVs and report.html")
    parser.add_argument("--cache", help="folder of finished runs (default: the platform's cache folder)")
    parser.add_argument("--data-dir", help="folder with local copies of the data sets")
    parser.add_argument("--only-compute", action="store_true", help="fill the cache and stop there")
    parser.add_argument("--estimate", action="store_true", help="print what is missing and its estimated time")
    given = parser.parse_args(arguments)
    try:
        return _run(given, shlex.join(["python", "-m", "dither.reproduction", *(arguments or sys.argv[1:])]))
    except DitherError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _run(given: argparse.Namespace, command: str) -> int:
    from dither.reproduction import computing, figures, reproduce
    from dither.reproduction.cache import Cache

    chosen = figures.select(given.what)
    cache, kind = Cache(given.cache), computing.device_kind()
    missing = computing.missing(computing.points(chosen, given.scale), cache)
    for figure in chosen:
        own = [point for point in missing if point.figure == figure.id]
        if own:
            seconds = sum(computing.estimated_seconds(point.spec, kind) for point in own)
            print(f"{figure.id}: {len(own)} runs to make, about {seconds:.0f} s and compilation", flush=True)
    if given.estimate:
        return 0
    began = shown = time.perf_counter()

    def progress(now: computing.Progress) -> None:
        nonlocal shown
        if time.perf_counter() - shown < 5:
            return
        shown = time.perf_counter()
        spent = shown - began
        left = spent * (now.total / now.done - 1) if now.done else float("nan")
        part = 100 * now.done / max(now.total, 1e-9)
        print(f"{part:3.0f}%  {now.figure}  {spent:.0f} s, about {left:.0f} s left", flush=True)

    result = reproduce(
        given.what,
        scale=given.scale,
        out=None if given.only_compute else given.out,
        cache=given.cache,
        data_dir=given.data_dir,
        only_compute=given.only_compute,
        command=command,
        on_progress=progress,
    )
    for claim in result.claims:
        proven = claim["proven"]["status"] if claim["proven"] else "-"
        print(f"{claim['id']:7} {claim['printed']['status']:13} proven: {proven:13} {claim['variant']}")
    made = f"{result.made['computed']} runs made in {time.perf_counter() - began:.0f} s"
    print(f"{made}; report: {result.report}" if result.report else f"{made}; kept in {cache.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
