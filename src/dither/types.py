"""The protocol types that all packages share, and nothing else.

A method is an `Algorithm`: a named tuple of pure functions. An engine (the simulator, a real
federation) calls them; a paper file builds them; the accountant reads `releases`. This module does not
import JAX: the arrays are whatever the caller puts in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Context
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

__version__ = "0.2.0"

_ROUNDED = {"up": ROUND_CEILING, "down": ROUND_FLOOR, "nearest": ROUND_HALF_EVEN}


# Adversaries, from the strongest to the weakest: the view's key, a short name and a phrase.
SHORT_VIEWS = {
    "upload": "server sees uploads",
    "sum": "server sees sums",
    "broadcast": "outsider sees broadcasts",
    "final": "outsider sees the final model",
}
ADVERSARIES = {
    "upload": "a server that sees every upload",
    "sum": "a server that sees only sums of uploads",
    "broadcast": "an outsider who sees every broadcast",
    "final": "an outsider who sees only the final model",
}


def epsilon_text(value: float | str, rounded: str = "up", digits: int = 3) -> str:
    """An ε, or what follows from one, for people. A proven one is rounded up, since it is an upper bound; one that
    was attacked, or that is left of a budget, "down"; one that is claimed to the "nearest"."""
    if math.isinf(float(value)):
        return "∞"
    context = Context(prec=digits, rounding=_ROUNDED[rounded])
    return f"{float(context.create_decimal(repr(float(value)))):.{digits}g}"


CLIP_RANGE = 2.0**10  # how far an adaptive clip may go from where it began

Array = Any  # a jax.Array inside a traced function, a NumPy array on the host
PyTree = Any  # nested tuples, dicts, named tuples of arrays
Params = PyTree
ServerState = PyTree
ClientState = PyTree  # () if a method keeps none
Message = PyTree  # what the server broadcasts
Upload = PyTree  # what leaves a client, already scaled by its weight
Key = Any  # a JAX key, or another source of randomness that privacy.noise understands
Hyper = Mapping[str, Any]  # values a sweep may vary: traced in the engine, float64 on the host


class Records(NamedTuple):
    """One client's records, as a window on arrays that all clients share.

    `order[start : start + size]` are the rows of `x` and `y` that belong to the client. In a simulation
    `x` and `y` hold everyone's data once, however many runs share them; on a real node they hold the
    node's own rows, `order` counts up and `start` is 0.
    """

    x: Array
    y: Array
    order: Array
    start: Array
    size: Array

    def rows(self, positions: Array) -> Array:
        """The rows of `x` and `y` at the client's own positions 0..size-1. Positions past the end are clamped:
        the caller must give those records weight 0."""
        return self.order[self.start + positions.clip(0, self.size - 1)]

    def take(self, positions: Array) -> tuple[Array, Array]:
        """The records at the client's own positions, as `rows` says."""
        rows = self.rows(positions)
        return self.x[rows], self.y[rows]


class RoundBatches(NamedTuple):
    """All batches of a client in one round, and which of them is meant."""

    x: Array  # everyone's records
    rows: Array  # of `x`: [steps, batch]
    y: Array
    weights: Array
    number: Array


class Batch(NamedTuple):
    """The records of one local step, with 0/1 weights (0 is padding)."""

    x: Array
    y: Array
    weights: Array


class Fetched(Batch):
    """A batch as it was fetched, which knows where from, for a kernel that fetches its records itself. Whatever is
    made of it, by `_replace` or `jax.tree.map` too, does not: that kernel never reads other records than these."""

    steps: RoundBatches | None = None  # no entry of the tuple


class Keys(NamedTuple):
    """A client's randomness in one round, one stream per purpose."""

    batch: Key  # differs for every round and client
    epoch: Key  # the same in all rounds of a run: orders the shuffled epochs
    noise: Key  # differs for every round and client


class Round(NamedTuple):
    """Public facts of the round, as a client sees them."""

    index: Array  # 0, 1, 2, ...
    client: Array  # this client's number, 0..num_clients-1
    cohort_size: Array  # |S_t|


class ClientResult(NamedTuple):
    """What a client returns: `upload` leaves the machine (already multiplied by `weight`), `state` stays, and
    `metrics` are scalars that only the simulator sees (never sent). If `integers` are given and uploads are
    aggregated securely, they leave the machine instead of `upload`, which is computed from them."""

    upload: Upload
    weight: Array
    state: ClientState
    metrics: Mapping[str, Array]
    integers: Upload | None = None


class Cohort(NamedTuple):
    """Who took part in a round. `active` is False for padding, whose upload does not count."""

    clients: Array
    active: Array
    size: Array


class Sampling(NamedTuple):
    """How a record was sampled, with its privacy meaning.

    Attributes:
        kind: "full" (every record), "fixed" (a fresh uniform subset of fixed size at each use), "poisson" (each
            record independently) or "shuffled" (disjoint batches of a shuffled epoch).
        rate: The probability that one given record enters one given batch.
        adjacency: The neighbour relation for which the release's sensitivity is stated: "zero-out" and
            "add/remove" for the norm of one contribution, "replace-one" for the distance between any two.
        truncation: The probability that a capped Poisson batch dropped a record, per batch. It is charged to δ.
    """

    kind: str
    rate: float
    adjacency: str
    truncation: float = 0.0
    batch_size: int = 0
    population: int = 0
    fixed_rate: bool = True  # False if the rate follows the client's record count: no proof under add/remove


class ExactNoise(NamedTuple):
    """Noise that is drawn on the integers and added to integers (R7): what each use of a release pays for that.

    Attributes:
        rounding: How much further apart rounding may move neighbours, in units of the noise std.
        distance: The total variation distance between the noise that is drawn and the noise that is proved.
        failure: The probability of a coin, independent of the records, with which other noise is drawn.
        sums: The noisy integers of all clients are summed directly, on one lattice. The credit for the others'
            noise is then exact too, and `distance` and `failure` count the noise of a whole cohort.
    """

    rounding: float
    distance: float
    failure: float = 0.0
    sums: bool = False

    def delta(self, epsilon: float) -> float:
        """What distance and failure add to δ at this ε (docs/privacy.md, Exact noise)."""
        return self.failure + self.distance * (1.0 + math.exp(min(epsilon, 700.0)))


class Uses(NamedTuple):
    """A release after several local steps, by how many of them use the record (E3). If no step moves two models
    apart, j uses of the record move what is released by at most j times `share` of the sensitivity.

    Attributes:
        steps: Local steps of the round, each on its own batch.
        share: The share of the sensitivity for one use in which the record is replaced.
        rate: The largest learning rate of any round; a step must not expand at it.
    """

    steps: int
    share: float
    rate: float


class Release(NamedTuple):
    """What one participation of one client reveals about one of its records, for the accountant.

    `noise_std` and `sensitivity` are in the same unit; the sensitivity is for the adjacency named in
    `sampling`. `uses` counts identical releases inside the participation, such as local steps. `rates` are the
    learning rates of those steps, one for all or one a step, if they are plain gradient steps in sequence. Without
    them no proof credits the other clients' noise (R6'). With `exact`, the sensitivity holds for what float32
    computes, and nothing that is added to the noise has bits of its own. None means a proof for real numbers.
    """

    channel: str  # "uplink" or "downlink"
    noise_std: float
    sensitivity: float
    uses: int
    sampling: Sampling
    source: str  # where the number comes from: equation, lemma or erratum
    rates: tuple[float, ...] = ()
    exact: ExactNoise | None = None
    by_use: Uses | None = None  # None: only the sensitivity is known


class RoundInfo(NamedTuple):
    """Which participation `releases` is asked about."""

    index: int  # type: ignore[assignment]  # shadows tuple.index, which nobody calls here
    client: int
    size: int
    cohort_size: int


class Claim(NamedTuple):
    """The ε of a paper's own formula, with its unit and whether the formula's conditions hold."""

    value: float
    unit: str  # "message", "run", ...
    delta: float
    source: str
    conditions: tuple[tuple[str, bool], ...] = ()
    adjacency: str = "replace-one"  # the neighbours the paper speaks of

    def to_json(self) -> dict[str, Any]:
        """The entry of summary.json."""
        conditions = [{"condition": text, "holds": bool(holds)} for text, holds in self.conditions]
        return {**self._asdict(), "conditions": conditions}


class Algorithm(NamedTuple):
    """One federated method: pure functions, hyper-parameters closed over by its factory."""

    init: Callable[[Params], ServerState]
    client_init: Callable[[Params], ClientState]
    message: Callable[[ServerState], Message]
    client: Callable[[Keys, Message, ClientState, Records, Round], ClientResult]
    server: Callable[[Key, ServerState, Upload, Cohort], ServerState]
    params: Callable[[ServerState], Params]
    releases: Callable[[RoundInfo], tuple[Release, ...]]
    # The sum of a round's uploads, from the state, the sum of their `integers`, the round's number and cohort size
    decode: Callable[[ServerState, Upload, Array, Array], Upload] | None = None


class Participation(NamedTuple):
    """The meaning of the counts of the releases. `kind` is one of:

    - "realised": they happened; the guarantee is given the pattern.
    - "worst": they are the most that can happen.
    - "binomial": they are all of `num_rounds`, and an honest party decides with an independent coin of `rate`
      whether the client takes part in each (R4, ex ante). With `adaptive` selection (by loss, or by anything
      that follows from earlier outputs), R4 is refused and all rounds are counted. The first `certain` of the
      listed participations are not drawn: the client takes part in them.
    """

    kind: str = "realised"
    num_rounds: int | None = None
    rate: float = 1.0
    adaptive: bool = False
    certain: int = 0


class Lattice(NamedTuple):
    """Noise that is discrete on the integers, after rounding to `step` (in the unit of the releases): of a vector
    of `dimension` coordinates, by clients whose noise is at least `least` times the target's."""

    step: float
    dimension: int
    least: float = 1.0


class Conditions(NamedTuple):
    """What a proof may use besides the releases: the part of a `PrivacyPlan` that recipes read and ledgers keep.
    The defaults claim nothing.

    Attributes:
        cohort_size: Clients in a sum, including the target (the smallest number, if it varies).
        colluders: Clients that give their own noise to the server.
        others_noise: Variance of the honest others' noise in the sum, relative to the target's. None means equal
            weights and equal noise: cohort_size - colluders - 1.
        convex: Every honest client's clipped gradient is that of a convex loss: one linear score and per-example
            clipping.
        smoothness: A data-independent bound on the smoothness of those losses, or None.
        lipschitz: A Lipschitz bound of the clipped-gradient map, for G7c, or None.
        client_state: Clients keep private state from round to round (DP-SCAFFOLD). Sums then depend on more than
            the public past, and no aggregation credit is proved.
        assume: Take the credit of G7b although convexity or non-expansive steps are not established; the value is
            labelled as assumed.
        own_epochs: Shuffled epochs advance only when the client takes part.
        num_rounds: Rounds of the run, for shuffled epochs that advance with the calendar.
        encoded: Uploads are rounded and clamped before they are summed.
        lattice: The grid of the uplink's discrete Gaussian noise; None means continuous noise.
        exposures: Uploads of the client that the outsider of view "broadcast" also sees (NbAFL's L).
        counts_shown: What in the run depends on a record count, in words; add/remove then has no proof.
    """

    cohort_size: int = 1
    colluders: int = 0
    others_noise: float | None = None
    convex: bool = False
    smoothness: float | None = None
    lipschitz: float | None = None
    client_state: bool = False
    assume: bool = False
    own_epochs: bool = False
    num_rounds: int | None = None
    exposures: int = 0
    lattice: Lattice | None = None
    encoded: bool = False
    participation: Participation = Participation()
    unit: str = "run"
    not_covered: tuple[str, ...] = ()
    counts_shown: str = ""


class PrivacyPlan(NamedTuple):
    """Everything that decides what a run reveals: the only source of what runs and of what is proved.

    The spec fills in the first part, the method the second (`prepare` returns the plan with its noise and what is
    particular to it), the experiment the third. The engine builds samplers, clip, noise, rates and sums from it;
    accountant, calibration, ledger, planner, audit, report and a deployed party take their facts from it.
    """

    # From the spec
    client_sizes: np.ndarray  # records of each client, public in all five papers
    num_params: int
    cohort_size: int
    num_rounds: int
    local_steps: int
    batch_size: int
    batch_sampling: str  # see privacy.sampling.make
    sampling_rate: float  # of Poisson batches, public; 0: batch_size over each client's own count
    client_lr: float
    lr_decay: float  # η_t = client_lr / (1 + lr_decay · t)
    server_lr: float
    clip_norm: float
    clip: str  # "batch", "example" or "none"
    l2: float
    l2_inside_clip: bool
    epsilon: float
    delta: float
    noise: str  # "paper", "proven", "given" or "none"
    unit: str
    view: str
    colluders: int
    adjacency: str
    options: Mapping[str, Any]  # the method's own constants
    noise_std: float = 0.0  # for noise="given": the std of what the method noises
    noise_schedule: str = "constant"
    noise_decay: float = 1.0
    noise_decay_start: int = 0
    noise_scale: tuple[float, ...] = ()  # factor of each client's noise; empty: 1 for all
    epsilons: tuple[float, ...] = ()  # target of each client; empty: `epsilon` for all
    clip_quantile: float = 0.0  # share of the gradients that an adaptive clip should not shorten; 0: it is fixed
    seed: int = 0  # for participation designs that are drawn beforehand
    aggregation: str = "off"  # how uploads are summed: "off" (in the open), "ideal" or "real"
    discrete_noise: bool = False  # noise on the encoded integers of an upload
    scale_bits: int = 0  # fractional bits of that encoding
    exact_noise: bool = False  # randomness "os": noise on integers, and proofs of what float32 computes (R7)
    max_norm: float = 0.0  # uploads are projected onto the ball of this radius; 0: they are not
    assume_credit: bool = False  # take the credit of the others' noise where it is unproved, labelled so

    # From the method
    hyper: Hyper = MappingProxyType({})  # what the compiled rounds take: noise, rates, clips; float64 on the host
    noise_names: tuple[str, ...] = ()  # entries of `hyper` that scale the noise: what calibration turns
    weights: np.ndarray | None = None  # of uploads in the sum, up to a factor; None: alike, if Dither's method
    design: np.ndarray | None = None  # a fixed participation design [num_rounds, cohort_size]; None: drawn
    client_state: bool = False  # clients keep private state that shapes later uploads (control variates)
    own_epochs: bool = False  # shuffled epochs advance only when the client takes part
    assumed: bool = False  # the releases rest on an assumption that is not proved
    per_client: bool = False  # the unit of privacy is a whole client, not a record
    exposures: int = 0  # uploads of one client that an outsider sees beside the broadcasts
    upload_noise: str = ""  # the entry of `hyper` whose noise is added once, to the finished upload; "": none is
    upload_unit: float = 0.0  # least factor from the unit of an uplink release to that of the upload; 0: unknown
    exact_sums: bool = False  # secure aggregation sums the noisy integers of one release a round (R9)
    ignores_counts: bool = False  # noise, weights, rounds and claim are the same whatever the record counts

    # From the experiment
    cohorts: tuple[np.ndarray, ...] = ()  # who takes part in each round
    round_numbers: tuple[int, ...] = ()  # of these rounds, where some were made twice; empty: 0, 1, 2, ...
    missing: int = 0  # clients that may lack in a sum: their noise counts as little as a colluder's
    noise_ratio: float = 0.0  # least over largest noise that clients add to the sum
    noise_lost: bool = False  # noisy uploads may be cut, or be rounded to steps that their noise does not exceed
    convex: bool = False
    smoothness: float | None = None
    not_covered: tuple[str, ...] = ()
    counts_shown: str = "nobody said that none is"  # what depends on a record count; empty: nothing does

    @property
    def num_clients(self) -> int:
        return len(self.client_sizes)

    @property
    def silent(self) -> int:
        """Clients on whose noise a proof must not count: colluders, and those that may be missing from a sum."""
        return self.colluders + self.missing

    @property
    def noise_projected(self) -> bool:
        """Whether uploads are projected onto a ball after their noise was added, or may be cut or rounded so that
        it is lost: then it protects the upload that carries it, and no other one in a sum."""
        return (self.max_norm > 0 or self.noise_lost) and not self.discrete_noise

    @property
    def longest_upload(self) -> float:
        """How far records may move a client's model in a round, before its weight and its noise."""
        param_clip: float = self.options.get("param_clip", 0.0)
        largest_clip = self.clip_norm * (CLIP_RANGE if self.clip_quantile else 1.0)
        return max(self.client_lr * self.local_steps * largest_clip, 2 * param_clip)

    @property
    def lattice(self) -> Lattice | None:
        """The grid of discrete noise in the unit of the releases, at the smallest weight, where it is coarsest."""
        if not self.discrete_noise:
            return None
        return Lattice(2.0**-self.scale_bits / self.upload_unit, self.num_params, self.noise_ratio)

    def conditions(self, unit: str = "run") -> Conditions:
        """The conditions of this plan that recipes use."""
        # What is projected after its noise is not Gaussian any more: a long update loses the noise along itself.
        size = min([self.cohort_size, *map(len, self.cohorts)])
        others = 0 if self.noise_projected else max(size - self.silent - 1, 0)
        return Conditions(
            cohort_size=size,
            colluders=min(self.silent, max(size - 1, 0)),
            others_noise=others * self.noise_ratio**2,
            convex=self.convex,
            smoothness=self.smoothness,
            client_state=self.client_state,
            own_epochs=self.own_epochs,
            num_rounds=len(self.cohorts),
            exposures=self.exposures,
            lattice=self.lattice,
            encoded=self.aggregation != "off",
            assume=self.assume_credit,
            unit=unit + (", whole client" if self.per_client else ""),
            not_covered=self.not_covered,
            counts_shown=self.counts_shown,
        )


class Prepared(NamedTuple):
    """A method set up for one federation.

    `build(hyper)` returns the `Algorithm`. With the float64 values of `plan.hyper`, its `releases` are exact. With
    traced values inside the engine, one compilation serves a whole sweep.
    """

    plan: PrivacyPlan
    build: Callable[[Hyper], Algorithm]
    claim: Claim
    cohort_size_at: Callable[[int], int]
    caveats: tuple[str, ...] = ()
    reclaim: Callable[[Hyper], Claim] | None = None  # the claim at other noise
    stop_when_proven: bool = False  # stop at the last round whose proven ε is within the plan's epsilon
    num_rounds: int | None = None  # where the method stops before the spec's rounds: its budget is spent

    @property
    def hyper(self) -> Hyper:
        """Noise, rates and clips of the plan."""
        return self.plan.hyper

    @property
    def releases(self) -> Callable[[RoundInfo], tuple[Release, ...]]:
        """What a participation reveals, at the plan's noise."""
        return self.build(self.plan.hyper).releases
