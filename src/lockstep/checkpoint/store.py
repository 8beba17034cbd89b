"""The folder of a run's checkpoints: one folder a step, each whole or not there.

Orbax writes `120.orbax-checkpoint-tmp` and renames it to `120` when everything in it
is on the disk. What is removed is renamed first as well, so that a process that is
killed at any moment leaves no half of a checkpoint under a step's name.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax

from lockstep.distributed import is_main_process

_STEP = re.compile(r"\d+")
# Under `state`, `run` and the checkpoint itself; the last files that Orbax writes.
_NEEDED = ("_CHECKPOINT_METADATA", "run/metadata", "state/_METADATA")
_UNFINISHED = "*.orbax-checkpoint-tmp*"
REMOVED, DAMAGED = ".removed", ".damaged"


class Damaged(Exception):
    """A checkpoint that cannot be read; the text says why."""


class Store:
    """Checkpoints of one run, written in the background.

    Attributes:
        directory: where they lie.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._orbax: Any = None
        self._writing: int | None = None

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, in order."""
        return [step for step in all_steps(self.directory) if not self.missing(step)]

    def path(self, step: int) -> Path:
        """The folder of one checkpoint."""
        return self.directory / str(step)

    def missing(self, step: int) -> list[str]:
        """The files that a complete checkpoint has and this one has not, or empty."""
        return [name for name in _NEEDED if not _has_bytes(self.path(step) / name)]

    def read_run(self, step: int) -> dict[str, Any]:
        """What was saved beside the arrays.

        Raises:
            Damaged: it cannot be read.
        """
        try:
            return json.loads((self.path(step) / "run" / "metadata").read_text())
        except (OSError, ValueError) as error:
            raise Damaged(f"run/metadata: {error}") from error

    def write(self, step: int, arrays: dict[str, Any], run: dict[str, Any]) -> None:
        """Start to write a checkpoint; returns when the arrays may be donated.

        Raises:
            RuntimeError: this or the write before failed; names step and folder.
        """
        import orbax.checkpoint as ocp

        self.wait()
        self._writing = step
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(arrays), run=ocp.args.JsonSave(run)
        )
        try:
            self._checkpointer().save(self.path(step), args=items)
        except Exception as error:
            raise self._failed(error) from error

    def check(self) -> None:
        """Raise the error of a write that has failed, without waiting for one."""
        try:
            if self._orbax is not None:
                self._orbax.check_for_errors()
        except Exception as error:
            raise self._failed(error) from error

    def wait(self) -> None:
        """Wait until what is being written is whole on the disk.

        Raises:
            RuntimeError: it failed; names step and folder.
        """
        try:
            if self._orbax is not None:
                self._orbax.wait_until_finished()
        except Exception as error:
            raise self._failed(error) from error
        self._writing = None

    def read(self, step: int, like: dict[str, Any]) -> dict[str, Any]:
        """The arrays, each placed as the array or description in `like`.

        Raises:
            Damaged: a file is missing, cut short or changed.
        """
        import orbax.checkpoint as ocp

        target = {path: _target(leaf) for path, leaf in like.items()}
        restore_args = ocp.checkpoint_utils.construct_restore_args(target)
        state = ocp.args.PyTreeRestore(target, restore_args=restore_args)
        try:
            items = self._checkpointer().restore(
                self.path(step), args=ocp.args.Composite(state=state)
            )
        except jax.errors.JaxRuntimeError:  # no memory: the checkpoint may be good
            raise
        except Exception as error:
            raise Damaged(f"{type(error).__name__}: {_first_line(error)}") from error
        return items.state

    def set_aside(self, step: int) -> Path:
        """Free the name of a damaged checkpoint; nothing of it is deleted."""
        aside = self.path(step).with_name(f"{step}{DAMAGED}")
        if is_main_process():
            shutil.rmtree(aside, ignore_errors=True)
            self.path(step).rename(aside)
        return aside

    def remove(self, step: int) -> None:
        """Delete a checkpoint."""
        if is_main_process():
            gone = self.path(step).with_name(f"{step}{REMOVED}")
            self.path(step).rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def clean(self) -> None:
        """Delete what killed processes left: unfinished writes, half deletions."""
        if is_main_process():
            for path in leftovers(self.directory):
                shutil.rmtree(path, ignore_errors=True)

    def _checkpointer(self) -> Any:
        import orbax.checkpoint as ocp

        if self._orbax is None:
            self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
        return self._orbax

    def _failed(self, error: Exception) -> RuntimeError:
        step, self._writing = self._writing, None
        for path in leftovers(self.directory):
            if is_main_process() and path.name.startswith(f"{step}."):
                shutil.rmtree(path, ignore_errors=True)
        have = ", ".join(map(str, self.steps())) or "none"
        return RuntimeError(
            f"the checkpoint of step {step} could not be written to {self.directory}: "
            f"{_first_line(error)}. Earlier checkpoints are as they were (steps: "
            f"{have}). Check that the disk has room and that the folder may be written "
            "to; the state that was reached is trainer.state"
        )


def all_steps(directory: Path) -> list[int]:
    """The steps of everything that stands under a step's name, damaged or not."""
    names = (p.name for p in directory.iterdir()) if directory.is_dir() else ()
    return sorted(int(name) for name in names if _STEP.fullmatch(name))


def leftovers(directory: Path) -> list[Path]:
    """Folders of writes and deletions that did not come to an end."""
    if not directory.is_dir():
        return []
    return sorted([*directory.glob(_UNFINISHED), *directory.glob(f"*{REMOVED}")])


def _target(leaf: Any) -> Any:
    """What Orbax makes of an array: one that lies as `leaf`, or one on the host."""
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return leaf


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def _has_bytes(file: Path) -> bool:
    try:
        return file.is_file() and file.stat().st_size > 0
    except FileNotFoundError:  # the main process has just deleted it
        return False
