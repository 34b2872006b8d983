"""Clipping, noise, sampling and what they prove: each carries its privacy meaning with it."""
