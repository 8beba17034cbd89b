"""`Checkpointer`: what of a run is kept, how often, and how it comes back."""

import logging
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

from lockstep import placement, tree
from lockstep.checkpoint.keeping import Keeping
from lockstep.checkpoint.leaves import arrays_of, describe
from lockstep.checkpoint.lock import Lock
from lockstep.checkpoint.plan import KEEP, check_policy
from lockstep.checkpoint.restore import restore
from lockstep.checkpoint.saved import Saved
from lockstep.checkpoint.store import Damaged, Store, all_steps
from lockstep.distributed import is_main_process
from lockstep.distributed.session import exchange
from lockstep.replicas import check_replicas, unstacked

_log = logging.getLogger("lockstep")


class Checkpointer:
    """Saves a run in the background, and brings it back after a stop.

    Given to a `Trainer`, it does both by itself: a run whose directory holds a
    complete checkpoint goes on from there. It can also be used alone, with `save`,
    `restore` and `wait`. With several processes all of them make one, on a directory
    that all of them see.

    Args:
        directory: of this run alone; made when it is not there.
        every: save after this many steps, and at the end of a run.
        keep: how many of the newest checkpoints to keep; `None` keeps all.
        best: the name of a number that a callback finds (`"valid/loss"`): a step at
            which it is better than ever is saved too, and kept whatever comes later.
        best_is: `"min"` or `"max"`.
        strict: refuse batches whose position cannot be saved, instead of reading over
            those that were used.
        policy: what may change on another number of devices: `"keep-global-batch"` or
            `"linear-scaling"`, see `lockstep plan`; `None` takes any batch.

    Raises:
        ValueError: an option is out of range.
        ImportError: Orbax is not installed.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> checkpoints = Checkpointer(tempfile.mkdtemp())
        >>> checkpoints.save(7, {"w": jnp.arange(3.0)})
        >>> checkpoints.wait()
        >>> checkpoints.latest, checkpoints.restore({"w": jnp.zeros(3)})
        (7, {'w': Array([0., 1., 2.], dtype=float32)})
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        every: int = 1000,
        keep: int | None = 3,
        best: str | None = None,
        best_is: str = "min",
        strict: bool = False,
        policy: str | None = KEEP,
    ) -> None:
        if find_spec("orbax") is None:
            raise ImportError(
                "Checkpointer needs Orbax: pip install 'lockstep-jax[checkpoints]'"
            )
        _check_options(directory, every, keep, best_is)
        if policy is not None:
            check_policy(policy)
        self.directory = Path(directory).expanduser().absolute()
        self.every = every
        self.strict, self.policy = strict, policy
        self._store = Store(self.directory)
        self._lock = Lock(self.directory)
        self._keeping = Keeping(self._store, keep, best, best_is)

    def __repr__(self) -> str:
        return f"Checkpointer({str(self.directory)!r}, every={self.every})"

    @property
    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, in order."""
        return self._store.steps()

    @property
    def latest(self) -> int | None:
        """The step of the newest complete checkpoint."""
        return max(self.steps, default=None)

    @property
    def best_step(self) -> int | None:
        """The step of the checkpoint with the best result; `None` without any."""
        return self._keeping.best_step

    def save(self, step: int, state: Any, *, stacked: bool = False) -> None:
        """Begin to save a state; returns when its memory may be donated.

        Args:
            step: its number; one that is there already is replaced.
            state: any tree; one copy of what is replicated is written.
            stacked: the leaves have one row a device, as `compat.pmap` keeps them: row
                0 is saved, after a comparison with the others.

        Raises:
            RuntimeError: this or the save before failed; names step and folder.
            ReplicaMismatch: the rows of a stacked state differ.
        """
        if stacked:
            check_replicas(state, stacked=True)
            state = placement.map_named(_first_copy, state, "state")
        self.write(state, lambda leaves: Saved(step, leaves))

    def restore(self, state: Any, step: int | None = None) -> Any:
        """The saved values in the tree and the layout of `state`.

        Arrays come back where those of `state` lie, NumPy arrays on the host.

        Args:
            state: of the same structure, shapes and types: arrays, whose values do
                not matter, or `jax.ShapeDtypeStruct` with a sharding.
            step: which checkpoint; the newest one that can be read when `None`.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            ValueError: it holds another state; lists the leaves that differ.
            RuntimeError: it cannot be read.
        """
        steps = self.steps
        if not steps or (step is not None and step not in steps):
            raise FileNotFoundError(
                f"{self.directory} holds no complete checkpoint"
                f"{'' if step is None else f' of step {step}'}; it has "
                f"{', '.join(map(str, steps)) or 'none'}"
            )
        if step is None:
            found = self.newest(state)
            return state if found is None else found[1]
        try:
            saved = Saved.from_json(self._store.read_run(step))
            return restore(self._store, saved, state)
        except Damaged as damage:
            raise RuntimeError(
                f"{self._store.path(step)} cannot be read: {damage}"
            ) from damage

    def wait(self) -> None:
        """Wait until the last save is on the disk, and keep what is to be kept.

        Raises:
            RuntimeError: it failed; names step and folder.
        """
        self._store.wait()
        self._keeping.remove_old()

    # What the Trainer uses:

    def write(self, state: Any, saved: Callable[[dict[str, Any]], Saved]) -> None:
        """Save a state with what is known of its run, made from its list of leaves."""
        for path, leaf in tree.named_leaves(state, "state"):
            tree.check_leaf_alive(leaf, path)
        everybody = tuple(range(jax.process_count()))
        exchange(None, everybody, what="a save of the state")
        self.wait()
        now = saved(describe(state))
        if now.step in all_steps(self.directory):
            self._store.remove(now.step)
        self._make_directory(f"the checkpoint of step {now.step} could not be written")
        self._store.write(now.step, arrays_of(state), now.to_json())

    def check(self) -> None:
        """Raise the error of a save that has failed, without waiting for one."""
        self._store.check()

    def finish(self) -> None:
        """Wait as at the end of a run; say if `best` was never found."""
        self.wait()
        self._keeping.report()

    def own(self) -> None:
        """Keep other processes out of the directory, which is made, until `release`.

        Raises:
            RuntimeError: it cannot be made, or a run of another process is in it.
        """
        if is_main_process():
            self._make_directory("the run cannot be saved")
            self._lock.take()

    def release(self) -> None:
        """Let other processes use the directory."""
        self._lock.release()

    def take_over(self) -> bool:
        """Delete what killed processes left; whether there is a checkpoint."""
        self._store.clean()
        return bool(all_steps(self.directory))

    def newest(
        self,
        state: Any,
        *,
        check: Callable[[Saved, Path], None] | None = None,
        owned: bool = False,
    ) -> tuple[Saved, Any] | None:
        """The newest checkpoint that can be read, and its state; `None` without any.

        Args:
            state: arrays or their descriptions.
            check: may refuse what was found.
            owned: whether this run writes here; damaged ones are then set aside.

        Raises:
            RuntimeError: there are checkpoints, and none can be read.
        """
        damaged: dict[int, Damaged] = {}
        for step in reversed(all_steps(self.directory)):
            try:
                saved = Saved.from_json(self._store.read_run(step))
                if check is not None:
                    check(saved, self._store.path(step))
                restored = restore(self._store, saved, state)
            except Damaged as damage:
                damaged[step] = damage
                continue
            for step, damage in damaged.items():
                self._pass_over(step, damage, owned)
            return saved, restored
        if damaged:
            raise RuntimeError(
                f"no checkpoint in {self.directory} can be read; "
                + "; ".join(f"step {step}: {why}" for step, why in damaged.items())
                + ". Use another directory to start anew"
            )
        return None

    def improves(self, results: dict[str, float]) -> bool:
        """Whether `best` is among the results, and better than in all checkpoints."""
        return self._keeping.improves(results)

    def _pass_over(self, step: int, damage: Damaged, owned: bool) -> None:
        """Say that a checkpoint is not used; free its name for the next save of it."""
        where = "it stays there"
        if owned:
            try:
                where = f"it is set aside as {self._store.set_aside(step).name}"
            except OSError as error:
                where = f"it stays there ({error})"
        path = self._store.path(step)
        _log.warning(
            "%s cannot be read (%s) and is passed over; %s", path, damage, where
        )

    def _make_directory(self, what: str) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RuntimeError(
                f"{what}, for {self.directory} cannot be made: {error}. Give "
                "Checkpointer a directory that may be written to"
            ) from error


def _first_copy(path: str, leaf: Any) -> Any:
    copy = unstacked(leaf)
    if copy is leaf and not tree.is_static(leaf):
        raise ValueError(
            f"{path} ({tree.describe_leaf(leaf)}) has no row on each device: leave "
            "stacked=True out for a state as it is, or stack it with compat.replicate"
        )
    return copy


def _check_options(
    directory: str | Path, every: int, keep: int | None, best_is: str
) -> None:
    if "://" in str(directory):
        raise ValueError(
            f"directory={str(directory)!r} is no path of a file system: mount the "
            "bucket, and give the path of the mount"
        )
    for name, count in (("every", every), ("keep", keep)):
        if count is None and name == "keep":
            continue
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"{name}={count!r}: give a whole number of at least 1")
    if best_is not in ("min", "max"):
        raise ValueError(f"best_is={best_is!r} is not 'min' or 'max'")
