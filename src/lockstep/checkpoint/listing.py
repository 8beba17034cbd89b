"""What lies in a folder of checkpoints, read without starting a device."""

import datetime
from pathlib import Path

from lockstep.checkpoint.plan import Change, replan
from lockstep.checkpoint.saved import Saved
from lockstep.checkpoint.store import DAMAGED, Damaged, Store, all_steps, leftovers
from lockstep.tables import as_text

_TITLES = ("step", "size", "saved", "devices", "batch", "state")


class NoCheckpoint(Exception):
    """There is nothing in the folder to tell of; the text says what is missing."""


def listing(directory: Path) -> str:
    """One line for each checkpoint: its size, when, on what, and whether it is whole.

    Raises:
        NoCheckpoint: there is none.
    """
    store = Store(directory)
    rows = [_row(store, step) for step in all_steps(directory)]
    others = [*leftovers(directory), *sorted(directory.glob(f"*{DAMAGED}"))]
    rows += [(p.name, _size(p), "", "", "", "not a checkpoint") for p in others]
    if not rows:
        raise NoCheckpoint(f"{directory} holds no checkpoint")
    return as_text([_TITLES, *rows])


def planned(
    directory: Path, devices: int, policy: str, step: int | None = None
) -> tuple[Path, Change]:
    """The plan for going on from a checkpoint on another number of devices.

    Raises:
        NoCheckpoint: there is none, or it does not know the batches of its run.
        ValueError: the policy cannot hold on so many devices.
    """
    store = Store(directory)
    steps = store.steps()
    if not steps or (step is not None and step not in steps):
        have = ", ".join(map(str, steps)) or "none"
        raise NoCheckpoint(f"{directory} holds no such checkpoint; it has {have}")
    path = store.path(steps[-1] if step is None else step)
    try:
        saved = Saved.from_json(store.read_run(int(path.name)))
    except Damaged as damage:
        raise NoCheckpoint(f"{path} cannot be read: {damage}") from damage
    if saved.plan is None:
        raise NoCheckpoint(
            f"{path} was saved outside of a Trainer, without its batches"
        )
    return path, replan(saved.plan, devices, policy)


def _row(store: Store, step: int) -> tuple[str, ...]:
    size = _size(store.path(step))
    missing = store.missing(step)
    try:
        saved = Saved.from_json(store.read_run(step))
    except Damaged as damage:
        why = f"{missing[0]} is missing" if missing else str(damage)
        return (str(step), size, "", "", "", f"damaged: {why}")
    when = datetime.datetime.fromtimestamp(saved.seconds)
    plan = saved.plan
    return (
        str(step),
        size,
        f"{when:%Y-%m-%d %H:%M}",
        "" if plan is None else str(plan.devices),
        "" if plan is None else f"{plan.rows:,}",
        f"damaged: {missing[0]} is missing" if missing else "complete",
    )


def _size(path: Path) -> str:
    size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
    return f"{size / 2**20:,.1f} MiB"
