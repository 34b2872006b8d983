"""The Flower app of a Dither federation; all of it is in the package `dither`."""
