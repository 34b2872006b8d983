"""Engines run the rounds: `simulate` on this machine; a real federation comes beside it."""
