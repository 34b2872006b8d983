"""`python -m dither` and `dither`."""

from __future__ import annotations

import sys


def main() -> None:
    """The command line; a Ctrl-C before a command begins ends it quietly."""
    try:
        from dither.cli import main as run

        run()
    except KeyboardInterrupt:
        print("interrupted before anything was done", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
