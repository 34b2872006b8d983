"""`python -m dither` and `dither`."""

from __future__ import annotations

import gc
import os
import sys
import warnings


def main() -> None:
    """The command line; a Ctrl-C before a command begins ends it quietly."""
    warnings.simplefilter("ignore")  # one may be about a single record, and under -W error would end the command
    os.environ["PYTHONWARNINGS"] = "ignore"  # and in what it starts: servers and clients of the transports
    gc.set_threshold(50_000)  # imports make objects that stay: looking through them often takes a tenth of a start
    try:
        from dither.cli import main as run

        run()
    except KeyboardInterrupt:
        print("interrupted before anything was done", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
