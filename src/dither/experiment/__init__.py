"""A spec becomes an experiment, and an experiment a run folder: build, train, sweep, plan."""
