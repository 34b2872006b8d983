"""Secure aggregation: the encoding of floats as integers; the protocol comes beside it."""
