"""What of a function's results is known from the shapes of its inputs alone."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from lockstep.jaxprs.varying import varying_outputs


def partial_eval_by_shape(
    fn: Callable[..., Any], input_spec: Iterable[Any], *args: Any, **kwargs: Any
) -> Any:
    """`jax.eval_shape`, but with the values of what does not depend on the inputs.

    So a model's parameters can be made without an input, and without running it.

    Args:
        fn: `(*inputs, *args, **kwargs) -> tree of arrays`.
        input_spec: a shape, or a pair `(shape, dtype)`, for each input; the default
            dtype is float32.
        *args: further arguments, with their values.
        **kwargs: the same by keyword.

    Returns:
        The tree with arrays where they are known, and `jax.ShapeDtypeStruct` elsewhere.

    Example:
        >>> init = lambda x: {"w": jnp.ones(2), "out": x * 2}
        >>> made = partial_eval_by_shape(init, [(4, 3)])
        >>> made["w"].tolist(), made["out"]
        ([1.0, 1.0], ShapeDtypeStruct(shape=(4, 3), dtype=float32))
    """
    inputs = [_read(spec) for spec in input_spec]

    def results(*inputs: Any) -> Any:
        return fn(*inputs, *args, **kwargs)

    traced, shapes = jax.make_jaxpr(results, return_shape=True)(*inputs)
    depends = varying_outputs(traced, [True] * len(inputs), axis_name="")

    @jax.jit  # which leaves out whatever the known results do not need
    def known() -> list[Any]:
        zeros = [jnp.zeros(spec.shape, spec.dtype) for spec in inputs]
        leaves = jax.tree.leaves(results(*zeros))
        return [
            leaf for leaf, unknown in zip(leaves, depends, strict=True) if not unknown
        ]

    leaves, tree = jax.tree.flatten(shapes)
    values = iter(known())
    pairs = zip(leaves, depends, strict=True)
    return tree.unflatten(
        [leaf if unknown else next(values) for leaf, unknown in pairs]
    )


def _read(spec: Any) -> jax.ShapeDtypeStruct:
    spec = tuple(spec)
    if len(spec) == 2 and isinstance(spec[0], Iterable):
        return jax.ShapeDtypeStruct(tuple(spec[0]), spec[1])
    return jax.ShapeDtypeStruct(spec, jnp.float32)
