"""The model state in the device view: equal on all devices, or averaged on demand.

In the device view BatchNorm sees the rows of one device, so its running statistics
differ between devices unless the layer reduces them itself (`axis_name=`). Which of
the two it is can be read from the dataflow of the loss.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lockstep import tree
from lockstep.jaxprs.varying import reduces_over, varying_outputs
from lockstep.notices import say_once
from lockstep.reduce import widen


def differing(
    forward: Callable[[Any, Any, Any, Any], Any],
    params: Any,
    model_state: Any,
    batch: Any,
    key: Any,
    axis_name: str,
) -> list[bool]:
    """Which leaves of the new model state can differ between devices.

    Args:
        forward: `(params, model_state, batch, key)` to the new model state, of the
            same structure as the old one. It is traced, never run.
        params: equal on all devices.
        model_state: equal on all devices.
        batch: this device's rows; leaves of rank 0 are equal on all devices.
        key: this device's key, or `None`.
        axis_name: the mesh axis of the devices.
    """
    jaxpr = jax.make_jaxpr(forward)(params, model_state, batch, key)
    state = [False] * len(jax.tree.leaves(model_state))
    # A leaf without rows is the same on all devices; a key is not.
    local = [jnp.ndim(leaf) > 0 for leaf in jax.tree.leaves(batch)]
    local += [True] * len(jax.tree.leaves(key))
    while True:  # what differs after one microbatch goes into the next
        inputs = [False] * len(jax.tree.leaves(params)) + state + local
        after = varying_outputs(jaxpr, inputs, axis_name)
        grown = [a or b for a, b in zip(state, after, strict=True)]
        if grown == state:
            return state
        state = grown


def check_policy(
    model_state: Any, differs: list[bool], batch_norm: str | None, axis_name: str
) -> None:
    """Refuse statistics that differ between devices, unless they may be averaged.

    Raises:
        ValueError: `batch_norm` is not `"local"` and a leaf differs; or a leaf differs
            that has no mean, such as a count.
    """
    leaves = zip(tree.named_leaves(model_state, "model_state"), differs, strict=True)
    paths = {path: leaf for (path, leaf), local in leaves if local}
    if not paths:
        return
    first = next(iter(paths))
    for path, leaf in paths.items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"{path} ({tree.describe_leaf(leaf)}) differs between the devices of "
                f"{axis_name!r} and has no mean: make it equal in the loss, as with "
                f"jax.lax.psum(x, {axis_name!r})"
            )
    if batch_norm != "local":
        raise ValueError(
            f"{first} and {len(paths) - 1} more leaves of the model state come from "
            "the rows of one device only: give the layer "
            f"axis_name={axis_name!r}, so that its statistics are those of the whole "
            "batch, or use the global view (make_train_step without axis_name), or say "
            "batch_norm='local' if each device shall normalise by itself; the "
            "statistics are then averaged"
        )
    say_once(
        "batch_norm=local",
        f"batch_norm='local': each device of {axis_name!r} normalises its own rows, "
        f"and running statistics are the mean over devices ({first}, ...). A running "
        "variance is then the mean of the local variances, which leaves out how the "
        "devices' means differ: it is below the variance of the whole batch",
    )


def check_padding(
    forward: Callable[..., Any], args: tuple[Any, ...], axis_name: str
) -> None:
    """Refuse padding where the statistics are reduced over devices in the loss.

    Layers take the mean of the devices' masked means there, and devices with fewer
    real rows, or none, weigh as much as the others.

    Raises:
        ValueError: the model state comes from a reduction over the axis.
    """
    if reduces_over(jax.make_jaxpr(forward)(*args), axis_name):
        raise ValueError(
            f"the loss reduces over {axis_name!r} to make its model state (BatchNorm "
            "with axis_name?), and the batch may be padded: the devices then hold "
            "unequal numbers of real rows, and a mean of their means is not the mean "
            "of the rows. Use the global view (make_train_step without axis_name) and "
            "give the mask to the layer, or remainder='drop'"
        )


def shares(model_state: Any, differs: list[bool], devices: int) -> list[jax.Array]:
    """This device's part of the mean of each leaf that differs, to be added up."""
    leaves = zip(jax.tree.leaves(model_state), differs, strict=True)
    return [widen(leaf) / devices for leaf, local in leaves if local]


def with_means(model_state: Any, differs: list[bool], means: list[jax.Array]) -> Any:
    """The model state with the added shares in the places of the leaves that differ."""
    leaves, structure = jax.tree.flatten(model_state)
    rest = iter(means)
    both = zip(leaves, differs, strict=True)
    equal = [next(rest).astype(x.dtype) if local else x for x, local in both]
    return jax.tree.unflatten(structure, equal)
