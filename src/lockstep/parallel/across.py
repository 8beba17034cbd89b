"""A step that several processes take together: is it the same step?

Processes whose programs differ (another constant, another shape) hang in a collective,
or train on in silence. So each new program is compared, by a digest of its text, before
it runs for the first time. In one process nothing is done.
"""

from typing import Any

import jax
from jax.sharding import Mesh

from lockstep.distributed import session
from lockstep.distributed.agreement import agree, digest
from lockstep.distributed.warm_up import meet

_CURE = (
    "All processes must run the same script on batches of the same form; a constant "
    "that the step takes from outside must be the same everywhere"
)


class Across:
    """The programs of one step on one mesh, as its processes know them."""

    def __init__(self, mesh: Mesh) -> None:
        """Nothing was compared yet."""
        self._mesh = mesh
        self._group = session.group_of(mesh)
        current = session.current() if len(self._group) > 1 else None
        self._line = None if current is None else current.line
        self._known: set[Any] = set()

    def knows(self, args: Any) -> bool:
        """Whether a program was compared for arguments of these shapes."""
        return self._line is None or _shapes(args) in self._known

    def compare(self, run: Any, args: tuple[Any, ...], name: str) -> None:
        """Compare a program that is new, when all have come to it.

        Raises:
            RuntimeError: names the odd process.
        """
        if self.knows(args):
            return
        meet(self._mesh)
        text = digest(run.lower(*args).as_text())
        forms = [_form(leaf) for leaf in jax.tree.leaves(args)]
        what = f"the form of {name}'s arguments"
        agree(forms, self._group, what=what, cure=_CURE, show=_briefly)
        agree(text, self._group, what=f"the program of {name}", cure=_CURE)
        self._known.add(_shapes(args))

    def begin(self, steps: int = 1) -> None:
        """Count steps as begun, so that one who is missing is noticed."""
        if self._line is not None:
            self._line.begin_steps(steps)


def _shapes(args: Any) -> Any:
    leaves, structure = jax.tree.flatten(args)
    return structure, tuple(getattr(leaf, "shape", None) for leaf in leaves)


def _form(leaf: Any) -> str:
    shape = getattr(leaf, "shape", ())
    return f"{getattr(leaf, 'dtype', '?')}[{','.join(map(str, shape))}]"


def _briefly(forms: list[str]) -> str:
    return f"arguments ..., {', '.join(forms[-4:])}"
