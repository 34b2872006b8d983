"""The protocol types that every room shares, and nothing else.

A method is an `Algorithm`: a named tuple of pure functions. An engine (the simulator, a real
federation) calls them; a paper file builds them; the accountant reads `releases`. This module does not
import JAX: the arrays are whatever the caller puts in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

__version__ = "0.1.0"

Array = Any  # a jax.Array inside a traced function, a NumPy array on the host
PyTree = Any  # nested tuples, dicts, named tuples of arrays
Params = PyTree
ServerState = PyTree
ClientState = PyTree  # () where a method keeps none
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

    def take(self, positions: Array) -> tuple[Array, Array]:
        """The records at the client's own positions 0..size-1. Positions past the end are clamped:
        whoever passes them must give those records weight 0."""
        inside = positions.clip(0, self.size - 1)
        rows = self.order[self.start + inside]
        return self.x[rows], self.y[rows]


class Keys(NamedTuple):
    """A client's randomness in one round, one stream a purpose."""

    batch: Key  # differs for every round and client
    epoch: Key  # the same in all rounds of a run: orders the shuffled epochs
    noise: Key  # differs for every round and client


class Round(NamedTuple):
    """Public facts of the round, as a client sees them."""

    index: Array  # 0, 1, 2, ...
    client: Array  # this client's number, 0..num_clients-1
    cohort_size: Array  # |S_t|


class ClientResult(NamedTuple):
    """What a client returns: `upload` leaves the machine (already multiplied by `weight`), `state` stays,
    `metrics` are scalars for the simulator's eyes only (never sent)."""

    upload: Upload
    weight: Array
    state: ClientState
    metrics: Mapping[str, Array]


class Cohort(NamedTuple):
    """Who took part in a round. `active` is False for padding, whose upload does not count."""

    clients: Array
    active: Array
    size: Array


class Sampling(NamedTuple):
    """How a record came to be used, with its privacy meaning.

    kind        "full" (every record), "fixed" (a fresh uniform subset of fixed size at each use),
                "poisson" (each record by its own coin), "shuffled" (disjoint batches of a shuffled epoch)
    rate        probability that one given record enters one given batch
    adjacency   the neighbour relation for which the release's sensitivity is stated: "zero-out" and "add/remove"
                for the norm of one contribution, "replace-one" for the distance of any two
    truncation  probability that a capped Poisson batch dropped a record, per batch: charged to δ
    """

    kind: str
    rate: float
    adjacency: str
    truncation: float = 0.0
    batch_size: int = 0
    population: int = 0
    fixed_rate: bool = True  # False where the rate follows the client's record count: no proof under add/remove


class Release(NamedTuple):
    """What one participation of one client reveals about one of its records, for the accountant.

    `noise_std` and `sensitivity` are in the same unit; the sensitivity is for the adjacency named in
    `sampling`. `uses` counts identical releases inside the participation (local steps, say). `rates` are the
    learning rates of those steps, where plain gradient steps follow each other: one for all or one a step; without
    them no proof credits the other clients' noise (R6').
    """

    channel: str  # "uplink" or "downlink"
    noise_std: float
    sensitivity: float
    uses: int
    sampling: Sampling
    source: str  # where the number comes from: equation, lemma or erratum
    rates: tuple[float, ...] = ()


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


class Algorithm(NamedTuple):
    """One federated method: pure functions, hyper-parameters closed over by its factory."""

    init: Callable[[Params], ServerState]
    client_init: Callable[[Params], ClientState]
    message: Callable[[ServerState], Message]
    client: Callable[[Keys, Message, ClientState, Records, Round], ClientResult]
    server: Callable[[Key, ServerState, Upload, Cohort], ServerState]
    params: Callable[[ServerState], Params]
    releases: Callable[[RoundInfo], tuple[Release, ...]]


class PrivacyPlan(NamedTuple):
    """What a method's factory is told: the public facts of a federation and the user's choices."""

    num_clients: int
    client_sizes: np.ndarray  # records per client, public in all five papers
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
    seed: int = 0  # for participation designs that are drawn beforehand


class Prepared(NamedTuple):
    """A method made ready for one federation.

    `build(hyper)` gives the `Algorithm`; called with the float64 values on the host its `releases` is
    exact, called with traced values inside the engine one compilation serves a whole sweep.
    """

    hyper: dict[str, Any]
    build: Callable[[Hyper], Algorithm]
    claim: Claim
    cohort_size_at: Callable[[int], int]
    cohorts: np.ndarray | None = None  # a fixed participation design [num_rounds, cohort_size], or drawn
    caveats: tuple[str, ...] = ()
    noise_names: tuple[str, ...] = ()  # entries of `hyper` that scale the noise: what calibration turns
    reclaim: Callable[[Hyper], Claim] | None = None  # the claim at other noise
    weights: np.ndarray | None = None  # how uploads are weighted in the sum, up to a factor; None: alike
    client_state: bool = False  # clients keep private state that shapes later uploads (control variates)
    own_epochs: bool = False  # shuffled epochs advance only when the client takes part
    assumed: bool = False  # the releases rest on an assumption that is not proved
    per_client: bool = False  # the unit of privacy is a whole client, not a record
    exposures: int = 0  # uploads of one client that an outsider sees beside the broadcasts
    stop_when_proven: bool = False  # stop at the last round whose proven ε is within the setting's epsilon
    upload_noise: str = ""  # the entry of `hyper` whose noise is added once, to the finished upload; "": none is
    upload_unit: float = 0.0  # least factor from the unit of an uplink release to that of the upload; 0: unknown
    ignores_counts: bool = False  # noise, weights, rounds and claim are the same whatever the record counts
    num_rounds: int | None = None  # where the method stops before the spec's rounds: its budget is spent
