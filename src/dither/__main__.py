"""`python -m dither`: the command line."""

from dither.cli import main

main()
