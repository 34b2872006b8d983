"""`python -m dither` and `dither`."""

from __future__ import annotations

import sys


def main() -> None:
    """The command line; a Ctrl-C while its modules are imported ends it quietly."""
    try:
        from dither.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
