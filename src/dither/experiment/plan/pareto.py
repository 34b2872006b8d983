"""Points that no other beats in everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def front(items: Sequence[Item], costs: Callable[[Item], tuple[float, ...]]) -> list[Item]:
    """Items for which no other is at least as good in every cost and better in one; equal ones count once.

    Sorted by the first cost, then the next."""
    ordered = sorted(items, key=costs)
    kept: list[Item] = []
    for item in ordered:
        mine = costs(item)
        # In this order whatever dominates an item, or equals it, stands before it.
        if not any(all(other <= own for other, own in zip(costs(one), mine, strict=True)) for one in kept):
            kept.append(item)
    return kept
