"""Plain words for what a privacy table says. The derivations are in docs/privacy.md."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

VIEWS = {
    "upload": ("every upload", "an ordinary server, which sees what each client sends"),
    "sum": ("sums of uploads", "a server behind secure aggregation, with the clients that side with it"),
    "broadcast": ("broadcasts", "an eavesdropper on what the server sends out"),
    "final": ("the final model", "anybody who gets the trained model"),
}
NEIGHBOURS = {
    "zero-out": "one record is blanked (counts are public)",
    "add/remove": "one record is added or removed",
    "replace-one": "one record is exchanged for another",
}
RECIPES = {
    "R1": "Gaussian releases without sampling: exact composition.",
    "R2": "Fresh batches of a fixed size: the privacy loss of every step, composed.",
    "R3": "Poisson batches, each record by its own coin: the privacy loss of every step, composed.",
    "R4": "A random number of uses: a mixture over how often a record is used.",
    "R5": "One release a round on random batches: amplified, then composed.",
    "R6": "Sums of uploads: the honest others' noise is credited where a theorem allows it.",
    "no proof": "No theorem covers this case: the proven ε is infinite, never a guess.",
}
ERRATA = {
    "G1": "The classical Gaussian constant is proved below ε = 1 and fails far above it.",
    "G2": "Replacing a record moves the sum twice as far as blanking or adding one; they are never mixed.",
    "G3": "Theorems for Poisson batches do not hold for fixed-size or shuffled ones.",
    "G4": "The privacy profile of fixed-size sampling is derived in recipe R2.",
    "G5": "Choosing clients at random does not amplify the privacy of a record: participations are counted.",
    "G6": "The papers' conversions to ε are loose; exact ones are used.",
    "G7": "Noise inside local steps: later steps start from different models, and contract earlier noise.",
    "G8": "Rounding and clamping in a computer are outside the theorems.",
    "G9": "Looks at the data that nobody counted (bounds, medians, choices) are not covered.",
    "H3": "Noise in floating point: the low bits of what is released can tell more than the theorem allows.",
    "E1": "Secure FedAvg, eq (8): e^x - 1 <= 2x is used where it does not hold.",
    "E2": "Secure FedAvg: the claim is for one message, not for the run.",
    "E3": "Secure FedAvg: Lemma 1 holds even if all of a client's data change, so it is cautious.",
    "E4": "Clipping a batch's gradient is not clipping each record's: the sensitivity differs.",
    "N1": "NbAFL: the classical constant at ε = 50 to 100, and channels composed apart.",
    "N2": "NbAFL: a sensitivity of 2C/m is claimed, clipping proves 2C.",
    "N3": "NbAFL: an outsider sees uploads and broadcasts together.",
    "N4": "NbAFL: Lemma 4 inverts the amplification formula the wrong way round.",
    "N7": "NbAFL: a clip from median norms reads private data.",
    "S1": "DP-SCAFFOLD: the true leak is far smaller than printed.",
    "S2": "DP-SCAFFOLD: the server's choice of users is counted as amplification.",
    "S5": "DP-SCAFFOLD: the decay factors used violate the theorem's own conditions.",
    "S6": "DP-SCAFFOLD: the printed ε comes from a fixed Rényi order.",
    "C1": "CPFed: an average of participations bounds nobody's.",
    "C2": "CPFed: colluding clients subtract their own noise.",
    "C3": "CPFed: the sampling of records, which the paper ignores, gives a far smaller ε.",
    "D1": "Concentrated: the upload's noise is m/γ times less than the proof takes it to be.",
    "D2": "Concentrated: a record is used once or not at all in an epoch, never a fraction of a time.",
}
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_ID = re.compile(r"\b([GHENSCD]\d)[a-c]?\b")


def errata_in(texts: Iterable[str]) -> dict[str, str]:
    """The errata that texts name by their ids, in words."""
    found = dict.fromkeys(match for text in texts for match in _ID.findall(text))
    return {name: ERRATA[name] for name in found if name in ERRATA}


def odds(epsilon: float | None) -> str:
    """What an ε means: by how much it can change an adversary's odds."""
    if epsilon is None:
        return ""
    if math.isinf(epsilon):
        return "no bound: an adversary may tell for certain"
    if epsilon < 0.5:
        return f"changes anybody's odds by at most {100 * math.expm1(epsilon):.2g}%"
    factor = math.exp(min(epsilon, 700.0))
    if factor < 1000:
        return f"changes anybody's odds by a factor of at most {factor:.3g}"
    power = f"{epsilon / math.log(10):.0f}".translate(_RAISED)
    return f"changes odds by a factor of up to 10{power}: little protection by itself"


def explain(row: Mapping[str, Any], value: float | None) -> str:
    """A proven row as a sentence."""
    view, adjacency = str(row.get("view", "")), str(row.get("adjacency", ""))
    seen, who = VIEWS.get(view, (view, view))
    change = NEIGHBOURS.get(adjacency, adjacency)
    unit = "one message" if str(row.get("unit", "")).startswith("message") else "the whole run"
    if value is None or math.isinf(value):
        return f"To {who} ({seen}), over {unit}: no theorem bounds what can be told if {change}."
    return f"To {who} ({seen}), over {unit}: if {change}, that {odds(value)}."


def recipe_words(recipe: str) -> str:
    """What a recipe is, by the ids in its name."""
    return " ".join(text for name, text in RECIPES.items() if name in recipe)
