"""Secure aggregation: floats as integers (encoding), and a protocol that opens only their sum (protocol)."""
