"""The table of proven ε: what a client's releases are worth to each adversary, under one adjacency.

Views, from the strongest adversary to the weakest (errata, Recipes):

    upload      the server sees every upload
    sum         the server sees sums only and `colluders` clients help it (secure aggregation)
    broadcast   an outsider sees what is broadcast, and at most `exposures` of the client's uploads
    final       an outsider sees the final model only; bounded by "broadcast"

A later view is a function of an earlier one, so each bound carries over (but for an outsider who also sees
some uploads: sums do not bound that); where several recipes are valid
for a view its value is their minimum, never across adjacencies. What no theorem covers is ε = ∞.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from dither.accounting.bounds import Bound, Participations, ProvenRow, Rounds
from dither.accounting.composition import ADD_REMOVE, ADJACENCIES, ZERO_OUT
from dither.accounting.gaussian import check_delta
from dither.accounting.views import downlink_bound, joint_bound, sum_bound, upload_bound
from dither.errors import NoProof
from dither.types import Conditions, Release

VIEWS = ("upload", "sum", "broadcast", "final")
NO_PROOF = "no proof"
_Recipe = Callable[[Rounds, float, Conditions, str], Bound]
_ROUNDING = "rounding and clamping before secure aggregation (G8)"
FLOAT_NOISE = "floating-point noise: the proof is for real numbers, low bits of an upload can tell more (H3)"
_FLOAT_SUMS = "floating-point sums before the noise: the proof is for real numbers"


def compress(rounds: Iterable[tuple[Release, ...]]) -> list[tuple[tuple[Release, ...], int]]:
    """Equal participations counted once: the input of `account`, from one tuple of releases a round."""
    return list(Counter(tuple(releases) for releases in rounds).items())


def account(
    participations: Participations,
    delta: float,
    conditions: Conditions | None = None,
    *,
    adjacency: str = ZERO_OUT,
    views: Sequence[str] = VIEWS,
    every_recipe: bool = False,
) -> list[ProvenRow]:
    """ProvenRow ε of one client's releases for each view, under one adjacency.

    `participations` holds (releases of one participation, how many such participations) pairs; a Release
    alone stands for a participation that makes just this one. Keep the releases of one participation
    together in one tuple: the sum's credit and R4 depend on what happens in the same round.
    `every_recipe` gives one row for each recipe that was tried, refusals included, instead of the best one
    a view.
    """
    check_delta(delta)
    conditions = Conditions() if conditions is None else conditions
    if adjacency not in ADJACENCIES:
        raise ValueError(f"adjacency={adjacency!r}; known: {ADJACENCIES}")
    unknown = [view for view in views if view not in VIEWS]
    if unknown:
        raise ValueError(f"view={unknown[0]!r}; known: {VIEWS}")
    rounds = _counted(participations, conditions)

    @functools.cache
    def bound(recipe: _Recipe) -> Bound:
        """Fail closed: what a recipe refuses is ε = ∞ with the reason."""
        try:
            if adjacency == ADD_REMOVE and conditions.counts_shown:
                raise NoProof(
                    "add/remove needs that nothing released depends on a record count: "
                    f"{conditions.counts_shown}; use zero-out"
                )
            return recipe(rounds, delta, conditions, adjacency)
        except NoProof as refusal:
            return Bound(math.inf, NO_PROOF, str(refusal))

    table = []
    for view in views:
        tried = [bound(recipe) for recipe in _recipes(view, conditions)]
        best = min(tried, key=lambda b: (b.value, b.assumed))
        if best.recipe == NO_PROOF:
            best = best._replace(detail="; ".join(b.detail for b in tried))
        for row in tried if every_recipe else [best]:
            rounded = row.recipe.startswith("R6") or row.recipe.endswith(" sum")
            # A broadcast's noise counts that of the uploads.
            rounded = rounded or (conditions.encoded and row.recipe.endswith((" downlink", " joint")))
            rounded = rounded and conditions.lattice is None  # noise after rounding covers it
            gaps = (_FLOAT_SUMS if conditions.lattice else FLOAT_NOISE, *((_ROUNDING,) if rounded else ()))
            table.append(
                ProvenRow(
                    view=view,
                    adjacency=adjacency,
                    value=row.value,
                    delta=delta,
                    unit=conditions.unit,
                    recipe=row.recipe,
                    not_covered=conditions.not_covered + gaps,
                    assumed=row.assumed,
                    detail=row.detail,
                )
            )
    return table


def _recipes(view: str, conditions: Conditions) -> tuple[_Recipe, ...]:
    """All recipes that are valid for a view; the value is their minimum."""
    if view == "upload":
        return (upload_bound,)
    if view == "sum":
        return (upload_bound, sum_bound)
    if view == "broadcast" and conditions.exposures:
        # the outsider sees some uploads too: sums alone no longer bound the view, all uploads still do
        return (upload_bound, joint_bound)
    return (upload_bound, sum_bound, downlink_bound)


def proven(
    participations: Participations,
    delta: float,
    conditions: Conditions | None = None,
    *,
    view: str,
    adjacency: str = ZERO_OUT,
) -> ProvenRow:
    """The best bound for one view: `account` with a single row."""
    return account(participations, delta, conditions, adjacency=adjacency, views=(view,))[0]


def _counted(participations: Participations, conditions: Conditions) -> Rounds:
    groups = [
        ((releases,) if isinstance(releases, Release) else tuple(releases), int(count))
        for releases, count in participations
    ]
    for releases, count in groups:
        if count < 0:
            raise ValueError(f"count={count} of {releases} is negative")
        for release in releases:
            if release.channel not in ("uplink", "downlink"):
                raise ValueError(f"channel={release.channel!r}; known: 'uplink', 'downlink'")
    total = sum(count for _, count in groups)
    kind, num_rounds, rate, adaptive, certain = conditions.participation
    sure = [(releases, count, 1.0) for releases, count in groups]
    if kind == "realised":
        return Rounds(sure, f"given the {total} participations that happened")
    if kind == "worst":
        return Rounds(sure, f"at most {total} participations")
    if kind != "binomial":
        raise ValueError(f"participation kind={kind!r}; known: 'realised', 'worst', 'binomial'")
    if num_rounds is not None and total != num_rounds:
        raise ValueError(f"{total} participations are listed for a binomial over num_rounds={num_rounds}")
    if adaptive:
        return Rounds(sure, f"all {total} rounds, because R4 is refused for adaptive selection")
    drawn, left = [], certain
    for releases, count in groups:
        first = min(left, count)
        left -= first
        drawn += [(releases, first, 1.0), (releases, count - first, rate)]
    how = f"ex ante, participation in each of {total - certain} rounds with probability {rate:g}"
    how += f" and in {certain} for sure" if certain else ""
    return Rounds([group for group in drawn if group[1]], how)
