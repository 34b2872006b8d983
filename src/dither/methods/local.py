"""What several methods share: a scan of local steps over a round's batches, and noisy gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dither import types
from dither.accounting import exact
from dither.errors import SpecError
from dither.models import Model
from dither.privacy import clipping, lattice, noise, sampling
from dither.privacy.sampling import Batches
from dither.privacy.softmax import turned
from dither.types import Array, Batch, ClientResult, Hyper, Keys, Params, Prepared, PrivacyPlan, Records, Round

if TYPE_CHECKING:
    import optax

# As in `Algorithm`
ClientFunction = Callable[[Keys, types.Message, types.ClientState, Records, Round], ClientResult]
ServerFunction = Callable[[types.Key, types.ServerState, types.Upload, types.Cohort], types.ServerState]
_SMALL_STEP = 4096  # numbers in a batch
_LEAST_SUM_REACH = 2**20  # of integers that are summed over clients: 37 noise stds


def train(
    start: types.PyTree,
    records: Records,
    batches: Batches,
    step: Callable[[types.PyTree, Batch, Array], tuple[types.PyTree, Array]],
) -> tuple[types.PyTree, Array]:
    """Apply `step(carry, batch, number) -> (carry, diagnostic)` to each batch in turn.

    Returns the last carry and the mean diagnostic. Records are fetched inside the scan: all batches of all
    clients at once would not fit for image data.
    """

    on_gpu = jax.default_backend() == "gpu"
    if on_gpu and batches.positions.shape[1] > 2 * exact.BLOCK:
        # Batches that are summed in blocks are filled up to whole ones before their records are fetched.
        missing = -batches.positions.shape[1] % exact.BLOCK
        batches = Batches(*(jnp.pad(each, ((0, 0), (0, missing))) for each in batches))
    with jax.named_scope("gather"):  # names for a profile (benchmarks/profiling.py)
        rows = records.rows(batches.positions)
        if on_gpu:  # a kernel reads there unchecked
            rows = rows.clip(0, len(records.x) - 1)
        labels = records.y[rows]
        weights = batches.weights * (labels >= 0)  # a blanked record (label below 0, zero-out) adds nothing
    fetched = rows, labels, weights

    def body(carry: tuple[Array, types.PyTree], inputs: tuple[Array, ...]) -> tuple[Any, Array]:
        (number, before), (rows, y, weights) = carry, inputs
        with jax.named_scope("gather"):
            batch = types.Fetched(records.x[rows], y, weights)
            if on_gpu and records.x.ndim == 2 and records.x.dtype == jnp.float32:
                batch.steps = types.RoundBatches(records.x, *fetched, number)
        after, diagnostic = step(turned(before), batch, number)
        return (number + 1, turned(after)), diagnostic

    # Two small steps a turn spare a CPU some of the loop's own work; more only take longer to compile.
    small = rows.shape[1] * math.prod(records.x.shape[1:]) <= _SMALL_STEP
    unroll = 2 if small and jax.default_backend() == "cpu" else 1
    (_, end), diagnostics = jax.lax.scan(body, (jnp.int32(0), turned(start)), fetched, unroll=unroll)
    return turned(end), jnp.mean(diagnostics)


def batch_sampler(plan: PrivacyPlan) -> sampling.BatchSampler:
    """The plan's way of drawing a round's batches."""
    return sampling.make(
        plan.batch_sampling,
        batch_size=plan.batch_size,
        local_steps=plan.local_steps,
        client_sizes=plan.client_sizes,
        sampling_rate=plan.sampling_rate,
    )


def subtract(a: Params, b: Params) -> Params:
    """a - b, leaf by leaf."""
    return jax.tree.map(jnp.subtract, a, b)


def add(a: Params, b: Params) -> Params:
    """a + b, leaf by leaf."""
    return jax.tree.map(jnp.add, a, b)


def scale(factor: Array, tree: Params) -> Params:
    """factor · tree."""
    return jax.tree.map(lambda leaf: factor * leaf, tree)


def axpy(factor: Array, x: Params, y: Params) -> Params:
    """factor · x + y."""
    return jax.tree.map(lambda a, b: factor * a + b, x, y)


def learning_rate(hyper: Hyper, step: Array) -> Array:
    """client_lr / (1 + lr_decay · t) at the global local step t."""
    return hyper["client_lr"] / (1 + hyper["lr_decay"] * jnp.asarray(step, jnp.float32))


def rate_hyper(plan: PrivacyPlan) -> dict[str, Any]:
    """The values of `learning_rate`, which a sweep may vary."""
    return {"client_lr": plan.client_lr, "lr_decay": plan.lr_decay}


def proximal_hyper(proximal: float) -> dict[str, Any]:
    """μ, which a sweep may vary, if it is not 0. Without it, a local step need not read the broadcast model, and
    a network's step stays in a core's cache."""
    return {"proximal": proximal} if proximal else {}


def round_rates(hyper: Hyper, index: int, local_steps: int) -> tuple[float, ...]:
    """`learning_rate` of each local step of a round, for proofs: one value if it is constant, none for a single
    step, whose rate no proof needs. So rounds that reveal the same compare equal."""
    rate, decay = float(hyper["client_lr"]), float(hyper["lr_decay"])
    if local_steps == 1:
        return ()
    if decay == 0:
        return (rate,)
    return tuple(rate / (1 + decay * (index * local_steps + step)) for step in range(local_steps))


def model_as_state(
    *,
    client: ClientFunction,
    server: ServerFunction,
    releases: Callable[[types.RoundInfo], tuple[types.Release, ...]],
    client_init: Callable[[Params], types.ClientState] = lambda params: (),
) -> types.Algorithm:
    """A method whose server keeps and broadcasts the model, and nothing else."""

    def same(state: Params) -> Params:
        return state

    return types.Algorithm(same, client_init, same, client, server, same, releases)


def counted_steps(params: Params) -> types.ClientState:
    """The state of a client that counts its local steps, to know its position in a shuffled epoch."""
    return {"steps": jnp.int32(0)}


def optimizer(name: str) -> optax.GradientTransformation:
    """A client's optimiser, restarted each round, before it is scaled by the learning rate."""
    import optax

    return {"sgd": optax.identity, "adam": optax.scale_by_adam}[name]()


def proximal_training(
    model: Model, plan: PrivacyPlan, *, optimizer_name: str
) -> Callable[[Hyper, Keys, Params, Records, Round, Array], Params]:
    """A round's local training without clip and noise, pulled to the broadcast model by hyper["proximal"] where
    that is given."""
    sampler = batch_sampler(plan)
    rule = optimizer(optimizer_name)
    # With the rate inside the gradient, a GPU adds the product of a step to the model in one pass.
    plain = optimizer_name == "sgd" and not plan.l2 and jax.default_backend() != "cpu"

    def local_model(
        hyper: Hyper, keys: Keys, start: Params, records: Records, round: Round, steps_done: Array
    ) -> Params:
        def step(carry: tuple[Params, Any], batch: Batch, number: Array) -> tuple[Any, Array]:
            params, memory = carry
            rate = learning_rate(hyper, round.index * plan.local_steps + number)
            divisor = sampler.divisor(records.size)
            at_once = plain and "proximal" not in hyper
            gradient, _ = clipping.gradient(
                model,
                params,
                batch,
                divisor=-divisor / rate if at_once else divisor,
                clip_norm=jnp.inf,
                mode="none",
                l2=plan.l2,
            )
            if at_once:
                return (add(params, gradient), memory), jnp.zeros(())
            if "proximal" in hyper:  # of (μ/2)|w - w_global|²
                gradient = axpy(hyper["proximal"], subtract(params, start), gradient)
            direction, memory = rule.update(gradient, memory, params)
            return (axpy(-rate, direction, params), memory), jnp.zeros(())

        batches = sampler.draw(keys, steps_done, records.size)
        return train((start, rule.init(start)), records, batches, step)[0][0]

    return local_model


def clipped_gradients(
    model: Model, plan: PrivacyPlan, sampler: sampling.BatchSampler
) -> Callable[[Hyper, Params, Batch, Array], tuple[Params, Array]]:
    """The plan's mean gradient of one batch, clipped at hyper["clip_norm"], and the fraction clipped."""

    def gradient(hyper: Hyper, params: Params, batch: Batch, client_size: Array) -> tuple[Params, Array]:
        return clipping.gradient(
            model,
            params,
            batch,
            divisor=sampler.divisor(client_size),
            clip_norm=hyper["clip_norm"],
            mode=plan.clip,
            l2=plan.l2,
            l2_inside_clip=plan.l2_inside_clip,
        )

    return gradient


# Methods that add noise to every gradient: CPFed, Concentrated, DP-SCAFFOLD and their baselines


class CountedGradient(NamedTuple):
    """What is noised with an adaptive clip: the clipped gradient, and the count of unclipped less clipped records,
    each counted as `COUNT_SHARE` of the clip."""

    gradient: Params
    count: Array


class NoisyGradients(NamedTuple):
    """`at(hyper, keys, params, batch, records, round, step)` gives (noisy gradient, fraction clipped), or, where
    the plan has `exact_sums`, (its noisy integers, fraction clipped); `mean(hyper, integers, index)` is then the
    gradient that such integers stand for. `releases(hyper, info)` says what those gradients reveal."""

    at: Callable[..., tuple[Params, Array]]
    mean: Callable[[Hyper, Params, Array], Params]
    releases: Callable[[Hyper, types.RoundInfo], tuple[types.Release, ...]]
    sampler: sampling.BatchSampler


def noisy_gradients(model: Model, plan: PrivacyPlan, *, source: str) -> NoisyGradients:
    """Clipped mean gradients with N(0, noise_std²) added at every local step.

    `hyper` must hold clip_norm, noise_std (one a client), noise_log_decay and noise_decay_start.
    """
    sampler = batch_sampler(plan)
    clipped_gradient = clipped_gradients(model, plan, sampler)
    exact_gradient = _exact_gradients(model, plan, sampler)
    exactly = is_exact(plan) and plan.clip != "none"
    error = _gradient_error(model, plan, sampler) if exactly else 0.0
    if plan.clip_quantile:
        if sampler.width > _MOST_COUNTED:
            raise SpecError(
                f"privacy.clip_quantile with batches of {sampler.width:,} records: at most {_MOST_COUNTED:,} are "
                "possible; lower batch_size"
            )
        error = _with_count(error, sampler.width if exactly else 0)
    schedule = noise.schedule(plan.noise_schedule, local_steps=plan.local_steps)
    if schedule.name == "steps" and sampler.kind == "disjoint":
        raise SpecError(
            "noise_schedule='steps' has no proof for batch_sampling='disjoint'; use 'rounds' or 'fixed'"
        )

    def factor_of(hyper: Hyper, index: Array, step: Array) -> Array:
        return schedule.factor(index, step, hyper["noise_log_decay"], hyper["noise_decay_start"])

    def mean(hyper: Hyper, integers: Params, index: Array) -> Params:
        # The same for all clients; or, weighted, that of a client of weight 1 (integers are in units of noise).
        noise_std = hyper["noise_std"][0] * factor_of(hyper, index, 0) * weight_of(hyper, 0)
        return scale(1 / lattice.sum_scale(noise_std, hyper["clip_norm"]), integers)

    # reason: all that one client knows in one step
    def at(
        hyper: Hyper, keys: Keys, params: Params, batch: Batch, records: Records, round: Round, step: Array
    ) -> tuple[Params, Array]:
        noise_std = hyper["noise_std"][round.client] * factor_of(hyper, round.index, step)
        key = noise.for_step(keys.noise, step)
        if exactly:
            weight = weight_of(hyper, round.client)
            return exact_gradient(hyper, key, params, batch, records.size, noise_std, weight)
        gradient, clipped = clipped_gradient(hyper, params, batch, records.size)
        if plan.clip_quantile:
            count = _count(hyper, batch, clipped) / sampler.divisor(records.size)
            return noise.gaussian(key, CountedGradient(gradient, count), noise_std=noise_std), clipped
        return noise.gaussian(key, gradient, noise_std=noise_std), clipped

    def releases(hyper: Hyper, info: types.RoundInfo) -> tuple[types.Release, ...]:
        one = sampler.sampling(info.size)
        if plan.clip == "example" and one.adjacency == sampling.REPLACE_ONE:
            one = one._replace(adjacency=sampling.ZERO_OUT)  # each contribution lies in a ball around zero
        summed = plan.cohort_size if plan.exact_sums else 0
        first = types.Release(
            channel="uplink",
            noise_std=float(np.asarray(hyper["noise_std"])[info.client]),
            sensitivity=gradient_sensitivity(plan.clip, float(hyper["clip_norm"]), one.batch_size, one.adjacency)
            * (1 + error),
            uses=plan.local_steps,
            sampling=one,
            source=source,
            rates=round_rates(hyper, info.index, plan.local_steps),
            exact=exact.noise(plan.num_params + bool(plan.clip_quantile), summed=summed) if exactly else None,
        )
        decay, start = float(hyper["noise_log_decay"]), float(hyper["noise_decay_start"])
        if schedule.name != "steps":
            return (_scheduled(first, schedule.factor(info.index, 0, decay, start)),)
        rates = first.rates * plan.local_steps if len(first.rates) == 1 else first.rates
        return tuple(
            _scheduled(first, schedule.factor(info.index, step, decay, start))._replace(
                uses=1, rates=rates[step : step + 1]
            )
            for step in range(plan.local_steps)
        )

    return NoisyGradients(at, mean, releases, sampler)


def _scheduled(release: types.Release, factor: float) -> types.Release:
    """The release with its noise times a factor, which float32 computes as an exponential."""
    error = exact.accumulated(8 + 8 * abs(math.log(factor))) if release.exact and factor != 1 else 0.0
    return release._replace(noise_std=release.noise_std * factor, sensitivity=release.sensitivity * (1 + error))


# Exact noise (R7): what is rounded, and how far one record moves it in float32


def is_exact(plan: PrivacyPlan) -> bool:
    """Whether the method's noise is drawn on integers. (Discrete noise is added to encoded uploads instead.)"""
    return plan.exact_noise and plan.noise != "none" and not plan.discrete_noise


def sums_exactly(plan: PrivacyPlan) -> bool:
    """Whether secure aggregation sums the noisy integers of the clients as they are (R9): one release a round, all
    on one lattice, with room for their sum."""
    alike = plan.local_steps == 1 and not plan.noise_scale and plan.clip != "none" and not plan.max_norm
    if not (is_exact(plan) and plan.aggregation != "off" and alike):
        return False
    return lattice.sum_reach(plan.cohort_size) >= _LEAST_SUM_REACH


def noisy_vector(plan: PrivacyPlan, key: types.Key, tree: Params, *, noise_std: Array, reach: Array) -> Params:
    """`tree` with the plan's noise; clipping it to norm `reach` must have been the last operation."""
    if not is_exact(plan):
        return noise.gaussian(key, tree, noise_std=noise_std)
    scale = lattice.scale_of(noise_std, reach)
    return noise.exact_gaussian(key, lattice.rounded(tree, scale), noise_std=noise_std, scale=scale)


def clip_whole(plan: PrivacyPlan, tree: Params, clip_norm: Array) -> Params:
    """The tree, clipped as a whole: the last operation before the plan's noise."""
    return (clipping.exact_clip if is_exact(plan) else clipping.clip)(tree, clip_norm)


def _exact_gradients(
    model: Model, plan: PrivacyPlan, sampler: sampling.BatchSampler
) -> Callable[..., tuple[Params, Array]]:
    """The plan's noisy gradient, or its integers: noise on the sum of the clipped gradients before it is divided,
    or on the clipped mean. What follows is post-processing."""
    inside = _inside_clip(plan)

    # reason: all that one client knows in one step
    def at(
        hyper: Hyper,
        key: types.Key,
        params: Params,
        batch: Batch,
        client_size: Array,
        noise_std: Array,
        weight: Array,
    ) -> tuple[Params, Array]:
        clip_norm, divisor = hyper["clip_norm"], sampler.divisor(client_size)
        summed, longest = (divisor, sampler.width) if plan.clip == "example" else (jnp.float32(1.0), 1)
        std = noise_std * summed
        if plan.exact_sums:
            # In units of the noise a client's numbers are weighted by 1/noise_std; without noise, by its weight.
            scale = lattice.sum_scale(noise_std, clip_norm / weight) / summed
        else:
            scale = lattice.scale_of(std, clip_norm * longest)
        integers, clipped = clipping.on_lattice(
            model,
            params,
            batch,
            divisor=divisor,
            clip_norm=clip_norm,
            mode=plan.clip,
            scale=scale,
            l2=inside,
            fixed_places=_fixed_places(sampler),
        )
        if plan.clip_quantile:
            integers = CountedGradient(integers, lattice.rounded(_count(hyper, batch, clipped), scale))
        if plan.exact_sums:
            return noise.integers_to_sum(key, integers, noise_std=std, clients=plan.cohort_size), clipped
        noisy = noise.exact_gaussian(key, integers, noise_std=std, scale=scale)
        mean = jax.tree.map(lambda leaf: leaf / summed, noisy)
        return _regularised(mean, params, plan.l2 - inside), clipped

    return at


def _regularised(mean: Params, params: Params, l2: float) -> Params:
    """The mean gradient with that of the regulariser outside the clip."""
    if isinstance(mean, CountedGradient):
        return mean._replace(gradient=clipping.regularised(mean.gradient, params, l2))
    return clipping.regularised(mean, params, l2)


def _inside_clip(plan: PrivacyPlan) -> float:
    """The regulariser that is clipped with the mean gradient."""
    return plan.l2 if plan.clip == "batch" and plan.l2_inside_clip else 0.0


def _fixed_places(sampler: sampling.BatchSampler) -> bool:
    """Whether every record has a fixed place in a batch, drawn or not."""
    return sampler.kind in ("full", "poisson-full")


def _gradient_error(model: Model, plan: PrivacyPlan, sampler: sampling.BatchSampler) -> float:
    """How much further than `gradient_sensitivity` float32 may move what is rounded, relatively."""
    if plan.clip == "batch":
        return whole_error(model)
    fixed = _fixed_places(sampler)
    # For add/remove the longest block, whatever the count: ε must not follow from it.
    longest = 2 * exact.BLOCK if fixed and plan.adjacency == sampling.ADD_REMOVE else sampler.width
    return exact.summed_error(clipping.norm_error(model), longest, fixed_places=fixed)


def whole_error(model: Model) -> float:
    """The same for a vector of the model's size that is clipped as a whole, last of all, and then rounded."""
    shapes = jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))
    return exact.whole_error(math.prod(leaf.shape) for leaf in shapes)


# An adaptive clip (Andrew et al. 2021): the count of unclipped records is one more coordinate of the gradient

COUNT_SHARE = 0.1  # of the clip, which one record adds to the count or takes from it
CLIP_RATE = 0.2  # by which the clip's logarithm follows the count
_MOST_COUNTED = 2**21  # records in a batch, whose count float32 holds


def _count(hyper: Hyper, batch: Batch, clipped: Array) -> Array:
    """Unclipped minus clipped records, times their share. Both are whole numbers: `clipped` is a fraction of
    them."""
    records = jnp.sum(batch.weights)
    balance = records - 2 * jnp.rint(clipped * jnp.maximum(records, 1.0))
    return COUNT_SHARE * hyper["clip_norm"] * balance


def _with_count(error: float, longest: int) -> float:
    """How much further than by the clip one record may move gradient and count together, relatively: `error` is
    that of the gradient alone, `longest` the largest count that float32 multiplies. Clip and noise of a round are
    products."""
    count = COUNT_SHARE * (1 + 2 * longest * exact.accumulated(4))
    return math.hypot(1 + error, count) * (1 + (exact.accumulated(4) if longest else 0.0)) - 1


def _counting(model: Params, balance: Array | float = 0.0) -> dict[str, Any]:
    """A model or its change, and unclipped minus clipped records as a fraction of all."""
    return {"model": model, "unclipped": jnp.asarray(balance, jnp.float32)}


def _balance(hyper: Hyper, mean: CountedGradient) -> Array:
    return mean.count / (COUNT_SHARE * hyper["clip_norm"])


def _at_clip(hyper: Hyper, factor: Array) -> Hyper:
    """`hyper` in a round whose clip is `factor` times the first: its noise is, too. Whatever is broadcast, the
    factor is a number in a range that float32 computes with."""
    factor = jnp.where(factor >= 1 / types.CLIP_RANGE, jnp.minimum(factor, types.CLIP_RANGE), 1 / types.CLIP_RANGE)
    return {**hyper, "clip_norm": hyper["clip_norm"] * factor, "noise_std": hyper["noise_std"] * factor}


def _next_clip(hyper: Hyper, factor: Array, balance: Array) -> Array:
    """The clip's factor after a round; `balance` is unclipped minus clipped records, as a noisy fraction of
    all."""
    unclipped = jnp.clip((balance + 1) / 2, -1, 2)
    factor = factor * jnp.exp(-CLIP_RATE * (unclipped - hyper["clip_quantile"]))
    return jnp.clip(factor, 1 / types.CLIP_RANGE, types.CLIP_RANGE)


def gradient_sensitivity(clip: str, clip_norm: float, divisor: float, adjacency: str) -> float:
    """How far one record moves a mean gradient: 2 clip/B when replaced, clip/B when blanked, added or removed
    (G2); a clip of the whole batch bounds it by 2 clip whatever the batch (E4); without a clip nothing does."""
    if clip == "none":
        return float("inf")
    if clip == "batch":
        return 2 * clip_norm
    return (2 if adjacency == sampling.REPLACE_ONE else 1) * clip_norm / divisor


def gradient_hyper(plan: PrivacyPlan, noise_std: float) -> dict[str, Any]:
    """The values a sweep may vary, where noise is added to gradients; `noise_std` times each client's scale."""
    scale = np.asarray(plan.noise_scale or np.ones(plan.num_clients), np.float64)
    if len(scale) != plan.num_clients:
        raise SpecError(
            f"privacy.noise_scale has {len(scale)} entries for {plan.num_clients} clients; give one for each"
        )
    return {
        **rate_hyper(plan),
        "clip_norm": plan.clip_norm,
        "noise_std": noise_std * scale,
        "noise_log_decay": math.log(plan.noise_decay),  # a logarithm keeps its digits in float32
        "noise_decay_start": float(plan.noise_decay_start),
    }


def weight_of(hyper: Hyper, client: Array) -> Array:
    """A client's weight in the mean, 1 at the mean over all clients: in inverse proportion to its noise where
    clients have targets of their own, so that every client adds the same noise to a sum. Else a plain 1, which
    changes no bit."""
    return hyper["client_weight"][client] if "client_weight" in hyper else 1


def chosen_noise_std(plan: PrivacyPlan, calibrated: Callable[[], Array]) -> float:
    """The noise std the plan asks for: none, as given, or `calibrated()` by the paper's formula."""
    if plan.noise == "none":
        return 0.0
    if plan.noise == "given":
        return plan.noise_std
    if plan.noise == "proven":
        return 1.0  # a unit: the accountant sets the factor
    return float(calibrated())


def refuse_unused(plan: PrivacyPlan, method: str, *, schedule: bool = False, scale: bool = False) -> None:
    """Refuse keys that the method would ignore."""
    if schedule and plan.noise_schedule != "constant":
        raise SpecError(
            f"privacy.noise_schedule={plan.noise_schedule!r} is for methods that add noise to gradients, not "
            f"{method}"
        )
    if scale and plan.noise_scale:
        raise SpecError(f"privacy.noise_scale is for methods that add noise to gradients, not {method}")


def quietest(hyper: Hyper) -> float:
    """The smallest noise of any client, for which the claimed ε is stated."""
    return float(np.min(hyper["noise_std"]))


def averaging(plan: PrivacyPlan, gradients: NoisyGradients) -> Callable[[Hyper], types.Algorithm]:
    """Periodic averaging: local noisy steps from the broadcast model, then the mean over the cohort."""

    def build(hyper: Hyper) -> types.Algorithm:
        def client(
            keys: Keys, message: Params, state: types.ClientState, records: Records, round: Round
        ) -> ClientResult:
            done, start = state["steps"], _counting(message) if plan.clip_quantile else message
            batches, integers = gradients.sampler.draw(keys, done, records.size), None
            keys = keys._replace(noise=noise.for_steps(keys.noise, len(batches.positions)))

            def step(carry: Params, batch: Batch, number: Array) -> tuple[Params, Array]:
                params = carry["model"] if plan.clip_quantile else carry
                gradient, clipped = gradients.at(hyper, keys, params, batch, records, round, number)
                rate = learning_rate(hyper, round.index * plan.local_steps + number)
                if isinstance(gradient, CountedGradient):
                    return _counting(axpy(-rate, gradient.gradient, params), _balance(hyper, gradient)), clipped
                return axpy(-rate, gradient, params), clipped

            def integers_of(_: Params, batch: Batch, number: Array) -> tuple[Params, Array]:
                return gradients.at(hyper, keys, message, batch, records, round, number)

            weight = weight_of(hyper, round.client) / round.cohort_size
            if plan.exact_sums:
                summed = CountedGradient(message, jnp.float32(0)) if plan.clip_quantile else message
                nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.int32), summed)
                integers, clipped = train(nothing, records, batches, integers_of)
                change = step_of(message, integers, round.index, jnp.float32(1))
                upload = scale(1 / round.cohort_size, change)  # the integers are weighted already
            else:
                end, clipped = train(start, records, batches, step)
                upload = scale(weight, subtract(end, start))
            state = {"steps": done + plan.local_steps}
            return ClientResult(upload, weight, state, {"clipped": clipped}, integers)

        def step_of(params: Params, integers: Params, index: Array, clients: Array) -> Params:
            """The step of a round, from the sum of the integers of this many clients."""
            mean = gradients.mean(hyper, scale(1 / clients, integers), index)
            mean = _regularised(mean, params, plan.l2 - _inside_clip(plan))
            if isinstance(mean, CountedGradient):
                return _counting(scale(-learning_rate(hyper, index), mean.gradient), _balance(hyper, mean))
            return scale(-learning_rate(hyper, index), mean)

        return model_as_state(
            client_init=counted_steps,
            client=client,
            server=lambda key, state, upload, cohort: add(state, upload),
            releases=lambda info: gradients.releases(hyper, info),
        )._replace(decode=step_of if plan.exact_sums else None)

    return _adaptive(build) if plan.clip_quantile else build


def _adaptive(build: Callable[[Hyper], types.Algorithm]) -> Callable[[Hyper], types.Algorithm]:
    """The method with a clip that the server keeps and broadcasts beside the model, as a factor of the first."""

    def adaptive(hyper: Hyper) -> types.Algorithm:
        fixed = build(hyper)

        def client(
            keys: Keys, message: dict[str, Any], state: types.ClientState, records: Records, round: Round
        ) -> ClientResult:
            now = build(_at_clip(hyper, message["clip"]))
            return now.client(keys, message["model"], state, records, round)

        def server(key: types.Key, state: dict[str, Any], upload: types.Upload, cohort: types.Cohort) -> Any:
            model = fixed.server(key, state["model"], upload["model"], cohort)
            return {"model": model, "clip": _next_clip(hyper, state["clip"], upload["unclipped"])}

        def decode(state: dict[str, Any], *rest: Any) -> types.Upload:
            now = build(_at_clip(hyper, state["clip"])).decode
            return None if now is None else now(state["model"], *rest)

        return fixed._replace(
            init=lambda params: {"model": params, "clip": jnp.float32(1)},
            client=client,
            server=server,
            params=lambda state: state["model"],
            decode=fixed.decode and decode,
        )

    return adaptive


def noisy_averaging(
    model: Model,
    plan: PrivacyPlan,
    params: Any,
    *,
    source: str,
    noise_std: Callable[..., Array],
    claim: Callable[..., types.Claim],
) -> Prepared:
    """A method that averages noisy local steps. Its paper gives the noise, `noise_std(params, epsilon=, delta=)`,
    and the ε, `claim(params, noise_std=, delta=)`; `params` are the quantities of its theorem."""
    plan = plan._replace(exact_sums=sums_exactly(plan))
    calibrated = partial(noise_std, params, epsilon=plan.epsilon, delta=plan.delta)
    hyper = gradient_hyper(plan, chosen_noise_std(plan, calibrated))
    if plan.epsilons:
        hyper["client_weight"] = np.ones(plan.num_clients)  # until the accountant has set the noise

    if plan.clip_quantile:
        hyper["clip_quantile"] = plan.clip_quantile

    def claimed(other: Hyper) -> types.Claim:
        std = quietest(other) / (math.hypot(1, COUNT_SHARE) if plan.clip_quantile else 1)
        return claim(params, noise_std=std, delta=plan.delta) if std else no_noise(plan)

    return Prepared(
        plan=plan._replace(
            hyper=hyper,
            noise_names=("noise_std",),
            own_epochs=True,
            upload_unit=upload_unit(plan),
        ),
        build=averaging(plan, noisy_gradients(model, plan, source=source)),
        claim=claimed(hyper),
        cohort_size_at=lambda index: plan.cohort_size,
        reclaim=claimed,
    )


def upload_unit(plan: PrivacyPlan) -> float:
    """How far noise of std 1 on a gradient of the last step moves the weighted upload, at the smallest clip."""
    last = plan.num_rounds * plan.local_steps - 1
    smallest = 1 / types.CLIP_RANGE if plan.clip_quantile else 1.0  # noise follows the clip
    return smallest * plan.client_lr / (1 + plan.lr_decay * last) / plan.cohort_size


def rounding(plan: PrivacyPlan) -> float:
    """How much further apart the encoding for a secure sum may move two uploads, before a server's noise."""
    return 0.0 if plan.aggregation == "off" else math.sqrt(plan.num_params) * 2.0**-plan.scale_bits


def no_noise(plan: PrivacyPlan, unit: str = "run") -> types.Claim:
    """The claim of a run without noise."""
    return types.Claim(float("inf"), unit, plan.delta, "no noise")
