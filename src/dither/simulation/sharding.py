"""A mesh of devices for a simulation: runs along one axis, the clients of a round along the other.

Every device holds all records and the state of its runs. In a round each device trains its part of the cohort;
the sums meet in one reduction and the clients' new states are gathered, so that all devices of a run close the
round alike. Runs have nothing to say to each other. The devices may be those of several processes
(`simulation.distributed`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dither.errors import SpecError
from dither.simulation import distributed
from dither.simulation.arrays import Gathered
from dither.types import Array, PyTree

RUNS, CLIENTS = "runs", "clients"


class Shards(NamedTuple):
    """How many devices share the runs, and how many share each run's clients."""

    runs: int = 1
    clients: int = 1

    @property
    def devices(self) -> int:
        """Devices in all."""
        return self.runs * self.clients

    @property
    def alone(self) -> bool:
        """There is one device: nothing below does anything."""
        return self.devices == 1

    # From outside

    def spread(self, function: Callable[..., Any], arguments: str) -> Callable[..., Any]:
        """`function` with its positional arguments spread over the devices: those marked "r" and all results along
        their leading axis of runs, those marked "." whole on each device. Keywords are constants."""
        if self.alone:
            return function
        specs = tuple(PartitionSpec(RUNS) if letter == "r" else PartitionSpec() for letter in arguments)

        def everywhere(*values: Any, **constants: Any) -> Any:
            return jax.shard_map(
                partial(function, **constants),
                mesh=self._mesh(),
                in_specs=specs,
                out_specs=PartitionSpec(RUNS),
                check_vma=False,  # that results agree along the clients' axis is `whole`'s doing, and tested
            )(*values)

        return everywhere

    def place(self, runs: PyTree, shared: PyTree) -> tuple[PyTree, PyTree]:
        """The arrays of the runs, and those that all runs read, where `spread` wants them."""
        if self.alone:
            return runs, shared
        size = jax.tree.leaves(runs)[0].shape[0]
        if size % self.runs:
            raise SpecError(f"{size} runs cannot be shared equally by {self.runs} devices; fill up or use fewer")
        mesh = self._mesh()
        by_run, everywhere = NamedSharding(mesh, PartitionSpec(RUNS)), NamedSharding(mesh, PartitionSpec())
        if distributed.count() == 1:
            return jax.device_put(runs, by_run), jax.device_put(shared, everywhere)
        distributed.meet(list(mesh.devices.flat))
        return (
            jax.tree.map(lambda leaf: distributed.put(leaf, by_run), runs),
            jax.tree.map(lambda leaf: distributed.put(leaf, everywhere), shared),
        )

    def _mesh(self) -> Mesh:
        available = distributed.devices(self.devices)
        if len(available) < self.devices:
            raise SpecError(
                f"{self.runs} x {self.clients} shards need {self.devices} devices, here: {len(available)}"
            )
        return Mesh(np.array(available).reshape(self.runs, self.clients), (RUNS, CLIENTS))

    # On each device, along the clients' axis

    def lacking(self, length: int) -> int:
        """Entries to add so that every device gets as many."""
        return -length % self.clients

    def part(self, array: Array) -> Array:
        """This device's share of an array's leading axis."""
        if self.clients == 1:
            return array
        size = array.shape[0] // self.clients
        return jax.lax.dynamic_slice_in_dim(array, jax.lax.axis_index(CLIENTS) * size, size)

    def summed(self, tree: PyTree) -> PyTree:
        """The devices' sums together."""
        return tree if self.clients == 1 else jax.lax.psum(tree, CLIENTS)

    def whole(self, gathered: Gathered) -> Gathered:
        """The devices' parts of a round together."""
        if self.clients == 1:
            return gathered
        total, metrics, clamped = self.summed((gathered.total, gathered.metrics, gathered.clamped))
        each = (gathered.states, gathered.counted, gathered.finite)
        states, counted, finite = jax.lax.all_gather(each, CLIENTS, tiled=True)
        return Gathered(total, states, metrics, counted, finite, clamped)


ONE_DEVICE = Shards()
