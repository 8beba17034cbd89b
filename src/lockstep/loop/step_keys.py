"""The keys of the steps of a run, made on the devices some at a time."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from lockstep import placement, sharding
from lockstep.rng import step_key

# One key by itself costs the host as much as starting a small step. More than this
# would make the first step wait for a longer compile.
BLOCK = 16


class StepKeys:
    """`step_key(base, step)` for any step, cheap when the steps come in order.

    Example:
        >>> from lockstep import make_mesh
        >>> base = jax.random.key(0)
        >>> keys = StepKeys(base, make_mesh())
        >>> bool(keys[20] == step_key(base, 20))
        True
    """

    def __init__(self, base: jax.Array, mesh: Mesh) -> None:
        self._base = placement.replicate(base, mesh)
        self._make = jax.jit(_block, out_shardings=sharding.replicated(mesh))
        self._number = -1
        self._keys: tuple[jax.Array, ...] = ()

    def __getitem__(self, step: int) -> jax.Array:
        number, place = divmod(step, BLOCK)
        if number != self._number:
            self._keys = self._make(self._base, np.int32(number * BLOCK))
            self._number = number
        return self._keys[place]


def _block(base: jax.Array, first: jax.Array) -> tuple[jax.Array, ...]:
    # Not vmap: some kinds of keys give other bits under it.
    keys = jax.lax.map(lambda step: step_key(base, step), first + jnp.arange(BLOCK))
    return tuple(keys[i] for i in range(BLOCK))
