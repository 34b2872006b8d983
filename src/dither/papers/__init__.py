"""One file per paper, readable with the paper beside it, in a fixed order: Algorithm, Noise, Privacy,
Convergence. `prepare(model, setting)` makes a method ready for one federation."""
