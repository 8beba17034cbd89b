"""What is saved beside the arrays, as JSON: where the run stood, and what it ran on."""

import dataclasses
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import numpy as np

from lockstep.checkpoint.leaves import Leaf
from lockstep.checkpoint.plan import Plan
from lockstep.checkpoint.store import Damaged

_PACKAGES = {"lockstep": "lockstep-jax", "jax": "jax", "jaxlib": "jaxlib"}


def versions() -> dict[str, str]:
    """The versions that a run trains with.

    Example:
        >>> versions()["jax"] == jax.__version__
        True
    """
    found = {}
    for name, package in _PACKAGES.items():
        try:
            found[name] = version(package)
        except PackageNotFoundError:  # a checkout on the path
            found[name] = "unknown"
    return found


@dataclasses.dataclass(frozen=True)
class Saved:
    """One moment of a run.

    Attributes:
        step: steps that are finished.
        leaves: what the state's leaves are, by path.
        fit: the number of the `fit` or `steps` call of this trainer, from 1.
        began: the step at which that call began.
        position: where the batches of that call stand, see `Feed.position`.
        key: the Trainer's base key, from `key_words`.
        plan: devices and rows of a batch.
        conditions: what the bits of the run depend on, if it promises bits.
        results: numbers by which the best checkpoint is chosen.
        versions: of lockstep and JAX.
        seconds: when, in seconds since 1970.
    """

    step: int
    leaves: dict[str, Leaf]
    fit: int = 1
    began: int = 0
    position: dict[str, Any] | None = None
    key: dict[str, Any] | None = None
    plan: Plan | None = None
    conditions: dict[str, Any] | None = None
    results: dict[str, float] = dataclasses.field(default_factory=dict)
    versions: dict[str, str] = dataclasses.field(default_factory=versions)
    seconds: float = dataclasses.field(default_factory=time.time)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        leaves = {path: leaf.to_json() for path, leaf in self.leaves.items()}
        plan = None if self.plan is None else dataclasses.asdict(self.plan)
        return fields | {"leaves": leaves, "plan": plan}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Saved":
        """The inverse of `to_json`; fields of later versions are left out.

        Raises:
            Damaged: a field is missing or of another kind.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        values = {name: value for name, value in fields.items() if name in known}
        try:
            leaves = {p: Leaf.from_json(leaf) for p, leaf in fields["leaves"].items()}
            plan = Plan(**fields["plan"]) if fields.get("plan") else None
            return cls(**values | {"leaves": leaves, "plan": plan})
        except (AttributeError, KeyError, TypeError) as error:
            raise Damaged(f"run/metadata: {error!r}") from error


def key_words(key: jax.Array | None) -> dict[str, Any] | None:
    """A base key as plain numbers.

    Example:
        >>> key_words(jax.random.key(7))
        {'impl': 'threefry2x32', 'words': [0, 7]}
    """
    if key is None:
        return None
    typed = jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
    words = jax.random.key_data(key) if typed else key
    impl = str(jax.random.key_impl(key)) if typed else "raw"
    return {"impl": impl, "words": np.asarray(words).tolist()}


def check_same_key(
    saved: dict[str, Any] | None, now: dict[str, Any] | None, where: Any
) -> None:
    """Refuse to go on with other random numbers than the run began with.

    Args:
        saved: the words of the key that the run began with.
        now: those of the key that it is given.
        where: the checkpoint.

    Raises:
        ValueError: they differ.
    """
    if saved != now:
        raise ValueError(
            f"the run in {where} was started with {_key_name(saved)}, and now has "
            f"{_key_name(now)}: its random numbers would not be those of the run. Give "
            "the same key=, or use another directory for a new run"
        )


def _key_name(key: dict[str, Any] | None) -> str:
    return "no key" if key is None else f"the key {key['words']} ({key['impl']})"
