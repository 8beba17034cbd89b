"""What one output of a step on N devices is, next to that of one device."""

import dataclasses
import functools
import re

import jax.numpy as jnp
import numpy as np

from lockstep.debug.comparing.noise import size, subtract, wide

# 2-norm of a difference over that of the update, where no more is known: 1e-6 is some
# 8 roundings of float32; a 16-bit number is itself rounded by half its tolerance.
TOLERANCES = {"float64": 1e-12, "float32": 1e-6, "bfloat16": 2**-6, "float16": 2**-9}
# How much further than measured noise rounding may move a leaf: another order of a sum
# rounds in more places than moved inputs do.
NOISE_FACTOR = 10
# Two draws differ from each other as much as from a third, give or take.
REDRAW_FACTOR = 3
# From this share of noise in an update it tells nothing.
NO_SIGNAL = 0.1


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One output leaf, on one device and on N.

    Attributes:
        path: its name.
        want: on one device.
        got: on N devices, in the same shape (or another, where that cannot be).
        old: in the state before the step; `None` for other outputs.
        copies_differ: whether the N devices hold different copies.
        noise: how far moving the inputs by their last place moves it (2-norm).
        redraw: how far another key moves it, where its masks depend on the device
            count by design.
        moment: the verdict on the optimizer's moment of this parameter, if that could
            not be compared.
        tolerance: the accepted relative difference; `None` chooses by type.
    """

    path: str
    want: np.ndarray
    got: np.ndarray
    old: np.ndarray | None = None
    copies_differ: bool = False
    noise: float = 0.0
    redraw: float = 0.0
    moment: str = ""
    tolerance: float | None = None

    @functools.cached_property
    def verdict(self) -> str:
        """One of equal, rounding, no signal, random, per device, wrong."""
        if self.copies_differ:
            return "wrong"
        if self.got.shape != self.want.shape:
            return "per device"
        if np.array_equal(wide(self.want), wide(self.got), equal_nan=True):
            return "equal"
        if self.gap <= self._allowed():
            return "rounding"
        if self.gap <= NOISE_FACTOR * self.noise:
            return "no signal" if self.noise > NO_SIGNAL * self.moved else "rounding"
        if self.gap <= REDRAW_FACTOR * self.redraw:
            return "random"
        return self.moment or "wrong"

    @functools.cached_property
    def gap(self) -> float:
        """2-norm of the difference; infinite where only one of both is finite."""
        if self.got.shape != self.want.shape:
            return float("inf")
        want, got = wide(self.want), wide(self.got)
        same = (want == got) | (np.isnan(want) & np.isnan(got))
        difference = np.where(same, 0, got - np.where(same, 0, want))
        return size(difference) if np.isfinite(difference).all() else float("inf")

    @functools.cached_property
    def moved(self) -> float:
        """2-norm of what the step did on one device: the update, or the output."""
        return size(self.change(self.want))

    @property
    def difference(self) -> float:
        """The difference relative to the value, in 2-norm; NaN where none is."""
        if self.verdict == "per device":
            return float("nan")
        whole = size(wide(self.want))
        return self.gap / whole if whole else self.gap

    @property
    def is_float(self) -> bool:
        """Whether the leaf holds real or complex numbers of limited precision."""
        return bool(jnp.issubdtype(self.want.dtype, jnp.inexact))

    def change(self, new: np.ndarray) -> np.ndarray:
        """An update: new - old for the state, the value itself for other outputs."""
        return wide(new) if self.old is None else subtract(new, self.old)

    def _allowed(self) -> float:
        """The 2-norm that rounding explains without a measurement."""
        if not self.is_float:
            return 0.0
        kind = str(jnp.finfo(self.want.dtype).dtype)
        eps = float(jnp.finfo(self.want.dtype).eps)
        tolerance = self.tolerance
        if tolerance is None:
            tolerance = TOLERANCES.get(kind, 8 * eps)
        # A new parameter is rounded to its own last place, however small the update.
        stored = 0.0 if self.old is None else eps * size(wide(self.want))
        return tolerance * self.moved + stored


def with_moments(leaves: list[Leaf]) -> list[Leaf]:
    """Give wrong parameters the verdict on moments that could not be compared.

    Adam and Lion make a full step of a gradient that is rounding alone. Its sign may be
    the same in all trials by chance; its size, which is in the moment, is not.
    """
    unclear = [leaf for leaf in leaves if leaf.verdict in ("no signal", "random")]

    def with_moment(leaf: Leaf) -> Leaf:
        if leaf.verdict == "wrong":
            for moment in unclear:
                if _same_parameter(leaf, moment):
                    return dataclasses.replace(leaf, moment=moment.verdict)
        return leaf

    return [with_moment(leaf) for leaf in leaves]


def _same_parameter(a: Leaf, b: Leaf) -> bool:
    """Whether two leaves of a state belong to one parameter: all keys but the first.

    `state[0]['w']['bias']` and `state[1].mu['w']['bias']` do.
    """
    key = re.sub(r"^\w+(\[\w+\]|\.\w+)", "", a.path)
    return a.old is not None and a.want.shape == b.want.shape and b.path.endswith(key)


def align(want: np.ndarray, got: np.ndarray, counts: tuple[int, int]) -> np.ndarray:
    """What the device view returns on N devices, in the shape that it has on one.

    There an array that is not in the state has one row a device: `[N, b, ...]` may be
    the rows `[1, N b, ...]` of the whole batch, with padding at the end, or N times
    the same value. Otherwise it stays as it is.
    """
    few, many = counts
    if want.ndim == 0 or want.ndim != got.ndim:
        return got
    if want.shape[0] == few and got.shape[0] == many and want.ndim > 1:
        whole = got.reshape(few, -1, *got.shape[2:])
        if whole.shape[1] >= want.shape[1] > got.shape[1]:
            return whole[:, : want.shape[1]]
    if got.shape[1:] != want.shape[1:]:
        return got
    if few == 1 and got.shape[0] == many:
        return got[:1] if (got == got[:1]).all() else got
    return got[: len(want)]
