"""Bring a step's arguments to its mesh: the state, the batch, and all the rest.

What lies there already passes through after a quick look at each leaf; what comes
from the host or from one device is copied, and that is said once.
"""

import logging
import weakref
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from lockstep import placement, sharding, tree
from lockstep.distributed.session import check_connected, group_of
from lockstep.placement import Layout, MaskedBatch, Unplaced
from lockstep.placement.same_values import require_same, same_values

_log = logging.getLogger("lockstep")


class Placer:
    """Places arguments on one mesh by one `remainder`.

    Attributes:
        dropped_rows: rows left out so far under `remainder="drop"`.
    """

    def __init__(
        self,
        mesh: Mesh,
        axis_name: str,
        *,
        remainder: str,
        multiple: int = 1,
        allow_unsplit: bool = True,
    ) -> None:
        """Rows go along `axis_name`, a multiple of `multiple` to each device."""
        check_connected()
        self.mesh, self.axis_name = mesh, axis_name
        self.remainder, self.multiple = remainder, multiple
        self.allow_unsplit = allow_unsplit
        self.dropped_rows = 0
        self._most_rows = 0
        self._said = False
        self._in_state: set[int] = set()
        self._everywhere = sharding.replicated(mesh)
        self._rows = sharding.rows(mesh, axis_name)
        self._replicas: dict[int, tuple[Any, Any]] = {}
        self.layout = Layout(mesh, axis_name, multiple)

    def is_placed(self, leaves: Iterable[Any]) -> bool:
        """Whether all leaves are arrays on the mesh: the usual case, seen quickly."""
        everywhere, rows = self._everywhere, self._rows
        for leaf in leaves:
            if not isinstance(leaf, jax.Array):
                return False
            where = leaf.sharding  # outputs of a step share these very objects
            if where is not everywhere and where is not rows:
                if not sharding.on_mesh(leaf, self.mesh):
                    return False
        return True

    def state(self, state: Any, name: str = "state") -> Any:
        """The state on the mesh: what is elsewhere is copied, placed leaves stay.

        Raises:
            ValueError: a leaf is committed to devices outside the mesh.
            RuntimeError: a leaf was donated to an earlier call.
        """
        leaves = jax.tree.leaves(state)
        if not self.is_placed(leaves):
            state = same_values(state, self.mesh, name)
            state = placement.map_named(self._state_leaf, state, name)
            leaves = jax.tree.leaves(state)
        elif any(map(tree.is_gone, leaves)):
            check_alive(state, name)
        self._in_state = set(map(tree.identity, leaves))
        if len(self._in_state) < len(leaves):
            return _copy_seen(state, set())
        return state

    def batch(self, batch: Any, name: str = "batch", **agreed: Any) -> Any:
        """A batch split over the mesh; `None` when "drop" leaves no row of it.

        `agreed` is what `place_batch` takes beside: `shares`, `ahead`.
        """
        if isinstance(batch, Unplaced):
            return batch.place(self.layout)
        if self._batch_is_placed(batch, name):
            return batch
        placed, shares = placement.place_batch(
            batch, self.layout, self.remainder, at_least=self._most_rows, **agreed
        )
        if isinstance(placed, MaskedBatch):  # one shape for the whole run
            self._most_rows = placed.mask.shape[0]
        if self.remainder == "drop":
            kept = 0 if placed is None else placement.count_rows(placed)
            self.dropped_rows += shares.total - kept
        return placed

    def pad_to(self, rows: int) -> None:
        """Pad short batches to so many rows, as an earlier process did."""
        self._most_rows = max(self._most_rows, rows)

    def other(self, argument: Any, name: str) -> Any:
        """A replicated argument: a key, a learning rate, a teacher's parameters."""
        leaves = jax.tree.leaves(argument)
        if any(map(tree.is_gone, leaves)):
            check_alive(argument, name)
        if self.is_placed(leaves):
            if any(tree.identity(leaf) in self._in_state for leaf in leaves):
                return _copy_seen(argument, self._in_state)
            return argument
        self._require_same(argument, name)
        return placement.map_named(self._other_leaf, argument, name)

    def _require_same(self, argument: Any, name: str) -> None:
        """Refuse values that are new here and differ between processes."""
        if len(group_of(self.mesh)) == 1:
            return
        new = [
            (path, leaf)
            for path, leaf in tree.named_leaves(argument, name)
            if not self.is_placed([leaf])
            and not tree.is_static(leaf)
            and self._known_replica(leaf) is None
        ]
        require_same(new, self.mesh, name)

    def _known_replica(self, leaf: Any) -> Any:
        """What was made of this very array before."""
        known = self._replicas.get(id(leaf))
        return known[1] if known and known[0]() is leaf else None

    def _state_leaf(self, path: str, leaf: Any) -> Any:
        check_alive(leaf, path)
        if self.is_placed([leaf]):
            return leaf
        placement.check_registered(leaf, path)
        if tree.is_static(leaf):
            return leaf
        if isinstance(leaf, jax.Array) and leaf.committed:
            self._check_inside(path, leaf)
        if not self._said:
            self._said = True
            _log.info(
                "%s is not on the mesh yet: the state is copied to its %d devices "
                "(replicate(state, mesh) does it beforehand)",
                path,
                self.mesh.size,
            )
        return placement.copy_to(leaf, self._everywhere, path)

    def _other_leaf(self, path: str, leaf: Any) -> Any:
        if self.is_placed([leaf]) or tree.is_static(leaf):
            return leaf
        if not isinstance(leaf, jax.Array):
            return placement.put(tree.as_host(leaf), self._everywhere, path)
        if (known := self._known_replica(leaf)) is not None:
            return known
        if leaf.committed:
            self._check_inside(path, leaf)
        placed = placement.put(leaf, self._everywhere, path)
        self._replicas = {k: v for k, v in self._replicas.items() if v[0]() is not None}
        self._replicas[id(leaf)] = (weakref.ref(leaf), placed)
        return placed

    def _check_inside(self, path: str, leaf: jax.Array) -> None:
        """One device of the mesh is where a state starts; another mesh is a mistake."""
        devices, own = set(self.mesh.devices.flat), leaf.sharding.device_set
        if own - devices or 1 < len(own) < len(devices):
            raise ValueError(
                f"{path} is on {_ids(leaf.sharding.device_set)}, and the mesh has "
                f"{_ids(devices)}: place it with replicate(..., mesh), or use the mesh "
                "on which it lies"
            )

    def _batch_is_placed(self, batch: Any, name: str) -> bool:
        """Whether a batch lies on the mesh by rows; refuse one placed otherwise."""
        leaves = jax.tree.leaves(batch)
        if any(map(tree.is_gone, leaves)):
            check_alive(batch, name)
        if not leaves or not self.is_placed(leaves):
            return False
        with_rows = [x for x in leaves if x.shape]
        if not with_rows:
            return False
        carried = "pad" if isinstance(batch, MaskedBatch) else None
        parts = self.mesh.shape[self.axis_name]
        if parts > 1 and all(x.is_fully_replicated for x in with_rows):
            carried = "unsplit"
            if not self.allow_unsplit:
                raise ValueError(
                    f"{name} is whole on every device (placed with remainder='unsplit' "
                    "or replicate), and the device view needs a shard on each: place "
                    "it with shard_batch"
                )
        if carried is None and self.remainder == "pad":
            return False  # it still needs its mask
        if carried and self.remainder not in ("error", carried):
            raise ValueError(
                f"{name} was placed with remainder={carried!r} and the step has "
                f"remainder={self.remainder!r}: set it once, where the batch is placed"
            )
        return True


def check_alive(values: Any, name: str) -> None:
    """Refuse donated leaves; JAX 0.10 crashes on them.

    Raises:
        RuntimeError: names the first deleted leaf.
    """
    for path, leaf in tree.named_leaves(values, name):
        tree.check_leaf_alive(leaf, path)


def _copy_seen(values: Any, seen: set[int]) -> Any:
    """Copy the arrays that come a second time: memory is donated once (JAX crashes)."""

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and tree.identity(leaf) in seen:
            return jnp.copy(leaf)
        seen.add(tree.identity(leaf))
        return leaf

    return jax.tree.map(copy, values)


def _ids(devices: Iterable[Any]) -> str:
    """Devices by their numbers, as `devices 4, 5`."""
    numbers = sorted(d.id for d in devices)
    return f"device{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
