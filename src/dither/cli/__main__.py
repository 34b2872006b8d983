from dither.cli import main

main()
