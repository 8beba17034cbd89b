"""The two views of one step, as functions that `jax.jit` can trace.

Global view: the user's function sees the whole batch. Device view: `shard_map` shows
it one shard, with the mesh axis bound for `lax.pmean`; what leaves it is made whole
again by the rules below.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend import core
from jax.sharding import PartitionSpec

from lockstep.jaxprs.varying import (
    draws_equally,
    reduces_over,
    used_as_keys,
    varying_outputs,
)
from lockstep.metrics import Mean, is_mean
from lockstep.notices import say_once
from lockstep.parallel import program
from lockstep.parallel.options import Options
from lockstep.parallel.static_leaves import unwrap, wrap
from lockstep.placement import MaskedBatch
from lockstep.step.sharded import specs as state_specs
from lockstep.tree import is_key, named_leaves

_KEY_NAME = re.compile(r"(^|_)(keys?|rngs?)($|_)")


def global_view(options: Options) -> Callable[..., Any]:
    """The function over wrapped arguments, on the whole batch."""

    def run(*wrapped: Any) -> Any:
        return wrap(call(options, call_arguments(options, wrapped)))

    return run


class DeviceView:
    """The function over wrapped arguments, on one shard a device.

    Outputs: the state (if the step returns one) is replicated; scalars that differ
    between devices become their mean; `Mean`s are summed; other arrays are stacked,
    one row a device.

    Attributes:
        suspects: paths of state leaves that the analysis cannot prove equal on all
            devices; known once the step was traced.
    """

    def __init__(self, options: Options, names: tuple[str, ...]) -> None:
        """Describe a step whose arguments have these names; nothing is traced yet."""
        self.options, self.names = options, names
        self.axis_name = options.device_axis or options.row_axis
        self.mesh = options.device_mesh
        self.batch_argnums = options.batch_argnums
        self.state_argnum = options.state_argnum
        self.owns_keys = options.is_train_step
        self.suspects: list[str] = []

    def __call__(self, *wrapped: Any) -> Any:
        """Run the step on every device; traced by `jax.jit`."""
        split = PartitionSpec(self.axis_name)
        specs = tuple(self._specs(i, arg) for i, arg in enumerate(wrapped))
        equal: Any = PartitionSpec()
        if self.owns_keys and self.state_argnum is not None:  # returns the state first
            equal = specs[self.state_argnum], equal
        rebuild: list[Callable[[Any, Any], Any]] = []

        def local(*args: Any) -> Any:
            equal, rows, restore = self._one_device(args)
            rebuild.append(restore)
            return equal, rows

        outputs = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=specs,
            out_specs=(equal, split),
            check_vma=False,
        )(*wrapped)
        return rebuild[-1](*outputs)

    def _specs(self, i: int, arg: Any) -> Any:
        """How each leaf of one argument is split over the devices."""
        split, whole = PartitionSpec(self.axis_name), PartitionSpec()
        if i in self.batch_argnums:
            return jax.tree.map(lambda x: split if x.shape else whole, arg)
        if i == self.state_argnum:
            return state_specs(arg, self.axis_name)
        mapped = self._mapped_keys(i, arg)
        return jax.tree.map(lambda x, m: split if m else whole, arg, mapped)

    def _mapped_keys(self, i: int, arg: Any) -> Any:
        """For each leaf: is it an array of keys, one a device?"""
        devices = self.mesh.shape[self.axis_name]

        def mapped(path: Any, leaf: Any) -> bool:
            shape = key_shape(leaf, self.names[i])
            if not shape:
                return False
            if self.owns_keys or shape != (devices,):
                where = self.names[i] + jax.tree_util.keystr(path)
                raise ValueError(
                    f"{where} holds keys of shape {shape}; give one key (it is folded "
                    f"with the device's number) or {devices} keys, one a device"
                )
            return True

        return jax.tree_util.tree_map_with_path(mapped, arg)

    def _local_key(self, i: int, arg: Any) -> Any:
        """Give each device its own key: its row of many, or the one key folded."""
        if i == self.state_argnum or self.owns_keys:
            return arg
        index = jax.lax.axis_index(self.axis_name)

        def local(leaf: Any) -> Any:
            if i in self.batch_argnums:
                single = is_key(leaf) and not leaf.shape
                return jax.random.fold_in(leaf, index) if single else leaf
            shape = key_shape(leaf, self.names[i])
            if shape is None:
                return leaf
            return leaf[0] if shape else jax.random.fold_in(leaf, index)

        return jax.tree.map(local, arg)

    def _one_device(self, wrapped: tuple[Any, ...]) -> Any:
        """Trace the user's step on one shard and sort its outputs."""
        args = tuple(self._local_key(i, arg) for i, arg in enumerate(wrapped))
        leaves, structure = jax.tree.flatten(args)
        shapes: list[Any] = []

        def flat(*leaves: Any) -> Any:
            args = call_arguments(self.options, jax.tree.unflatten(structure, leaves))
            out = wrap(call(self.options, args))
            shapes.append(out)
            return jax.tree.leaves(out)

        jaxpr = jax.make_jaxpr(flat)(*leaves)
        varies = self._marks(args, wrapped)
        leaves, varies = self._fold_raw_keys(jaxpr, args, leaves, varies)
        marks = varying_outputs(jaxpr, varies, self.axis_name)
        out_structure = jax.tree.structure(shapes[-1])
        marks = jax.tree.unflatten(out_structure, marks)
        values = [jnp.asarray(x) for x in core.jaxpr_as_fun(jaxpr)(*leaves)]
        out = jax.tree.unflatten(out_structure, values)
        return self._sort(jaxpr, wrapped, out, marks)

    def _marks(self, args: tuple[Any, ...], wrapped: tuple[Any, ...]) -> list[bool]:
        """Which input leaves differ between devices: shards and folded keys."""
        return [
            (i in self.batch_argnums and bool(leaf.shape)) or leaf is not before
            for i, (arg, old) in enumerate(zip(args, wrapped, strict=True))
            for leaf, before in zip(
                jax.tree.leaves(arg), jax.tree.leaves(old), strict=True
            )
        ]

    def _fold_raw_keys(
        self, jaxpr: Any, args: tuple[Any, ...], leaves: list[Any], varies: list[bool]
    ) -> tuple[list[Any], list[bool]]:
        """Fold the raw keys that have another name: what the step draws from.

        A key in the state stays as it is; the step may fold it by itself.
        """
        if self.owns_keys:
            return leaves, varies
        index = jax.lax.axis_index(self.axis_name)
        owners = [i for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
        leaves, folded = list(leaves), list(varies)
        for j, used in enumerate(used_as_keys(jaxpr)):
            used = used or (owners[j] == self.state_argnum and is_key(leaves[j]))
            if not used or varies[j] or owners[j] in self.batch_argnums:
                continue
            if owners[j] != self.state_argnum:
                leaves[j], folded[j] = jax.random.fold_in(leaves[j], index), True
                continue
            alone = [k == j for k in range(len(leaves))]
            if draws_equally(jaxpr, varies, alone, self.axis_name):
                paths = named_leaves(args[owners[j]], self.names[owners[j]])
                raise _key_in_state(paths[j - owners.index(owners[j])][0])
        return leaves, folded

    def _sort(self, jaxpr: Any, wrapped: Any, out: Any, marks: Any) -> Any:
        """Outputs as (equal on all devices, one row a device, how to rebuild)."""
        state = None if self.state_argnum is None else wrapped[self.state_argnum]
        state_at = program.find_state(state, out)
        if state_at:
            new, new_marks = (out, marks) if state_at == "all" else (out[0], marks[0])
            self._check_reduced(jaxpr, new, new_marks)
        if state_at == "all":
            return out, [], lambda equal, rows: equal
        rest = out[1:] if state_at == "first" else out
        rest_marks = marks[1:] if state_at == "first" else marks
        if state_at and len(rest) == 1:
            rest = (self._merge(rest[0], rest_marks[0], "metrics"),)
        else:
            rest = self._merge(rest, rest_marks, "output")
        leaves, structure = jax.tree.flatten(rest)
        equal = [None if x.shape else x for x in leaves]
        rows = [x[None] if x.shape else None for x in leaves]

        def rebuild(outputs: Any, rows: Any) -> Any:
            state, equal = outputs
            joined = [r if e is None else e for e, r in zip(equal, rows, strict=True)]
            rest = jax.tree.unflatten(structure, joined)
            return (state, *rest) if state_at == "first" else rest

        return (out[0] if state_at == "first" else None, equal), rows, rebuild

    def _merge(self, metrics: Any, marks: Any, name: str) -> Any:
        """Sum the `Mean`s and average the scalars that differ between devices."""
        axis = self.axis_name

        def merge(path: Any, value: Any, mark: Any) -> Any:
            if not any(jax.tree.leaves(mark)):
                return value
            if isinstance(value, Mean):
                return jax.lax.psum(value, axis)
            if value.shape:
                return value
            where = name + jax.tree_util.keystr(path)
            say_once(
                f"mean over devices {where}",
                f"{where} differs between devices and is returned as the mean over "
                f"the {self.mesh.shape[axis]} devices; average it in the step "
                f"(lax.pmean) or return Mean(total, count) for a weighted mean",
            )
            floating = jnp.issubdtype(value.dtype, jnp.inexact)
            value = value if floating else value.astype(jnp.float32)
            return jax.lax.pmean(value, axis)

        return jax.tree_util.tree_map_with_path(merge, metrics, marks, is_leaf=is_mean)

    def _check_reduced(self, jaxpr: Any, state: Any, marks: Any) -> None:
        """Find state leaves that may differ; refuse a step that reduces nothing."""
        name = self.names[self.state_argnum or 0]
        paths = [path for path, _ in named_leaves(state, name)]
        flags = jax.tree.leaves(marks)
        whole = [not spec for spec in jax.tree.leaves(state_specs(state, ""))]
        found = zip(paths, flags, whole, strict=True)
        self.suspects = [path for path, mark, equal in found if mark and equal]
        if self.suspects and not reduces_over(jaxpr, self.axis_name):
            raise ValueError(
                f"this step averages nothing over {self.axis_name!r}, so each device "
                f"would train on its own shard ({len(self.suspects)} of {len(paths)} "
                f"leaves would differ, first {self.suspects[0]}): add grads = "
                f"jax.lax.pmean(grads, {self.axis_name!r}) before the update, or use "
                "parallelize, where the step needs no average"
            )


def key_shape(leaf: Any, name: str) -> tuple[int, ...] | None:
    """The shape of an array of keys (`()` for one key), `None` for other leaves.

    Raw uint32 keys are recognised by an argument called key, keys, rng or rngs; one
    key by itself also by its use (`_fold_raw_keys`).
    """
    if not hasattr(leaf, "shape"):
        return None
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf.shape
    raw = leaf.dtype == jnp.uint32 and leaf.shape[-1:] in ((2,), (4,))
    return leaf.shape[:-1] if raw and _KEY_NAME.search(name) else None


def _key_in_state(path: str) -> ValueError:
    return ValueError(
        f"{path} is a random key inside the state, equal on all devices: every device "
        "would draw the same numbers. Give the key as a further argument of the step "
        "(it is folded with the device's number), fold it before you draw "
        "(jax.random.fold_in(key, lax.axis_index(axis_name))), or use parallelize"
    )


def call_arguments(options: Options, wrapped: Any) -> list[Any]:
    """The user's own arguments: static leaves back, masks merged into dicts."""
    args = jax.tree.map(lambda x: x, wrapped)  # fresh containers: steps may mutate
    if not options.is_train_step:  # which takes a MaskedBatch itself
        args = [_merge_mask(arg, options.mask_name) for arg in args]
    return [unwrap(arg) for arg in args]


def call(options: Options, args: list[Any]) -> Any:
    """Call the user's function; explain unbound axes and lost mutations.

    The last argument is the dict of keyword arguments.
    """
    before = [jax.tree.leaves(arg) for arg in args]
    try:
        out = options.traced(*args[:-1], **args[-1])
    except NameError as error:
        raise _explain_axis(error, options.device_axis) from error
    for i, (arg, old) in enumerate(zip(args, before, strict=True)):
        if i not in options.batch_argnums:  # a batch is the step's own to change
            _check_mutations(arg, old, out)
    return out


def _merge_mask(arg: Any, mask_name: str) -> Any:
    if not isinstance(arg, MaskedBatch):
        return arg
    if not isinstance(arg.data, dict):
        raise TypeError(
            f"remainder='pad' needs a place for the mask, and the batch is a "
            f"{type(arg.data).__name__}: make it a dict (the step then finds the mask "
            f"at batch[{mask_name!r}]), or use make_train_step, which applies it"
        )
    mask = arg.mask
    if mask_name in arg.data:
        own = arg.data[mask_name]
        mask = mask.reshape(mask.shape + (1,) * (own.ndim - 1)).astype(
            mask.dtype if own.dtype == bool else own.dtype
        )
        mask = mask * own
    return {**arg.data, mask_name: mask}


def _explain_axis(error: NameError, axis_name: str | None) -> Exception:
    text = str(error)
    found = re.search(r"unbound axis name:? ['\"]?([\w.-]+)", text)
    if not found:
        return error
    name = found.group(1).rstrip(".")
    if axis_name is None:
        return ValueError(
            f"this step averages by itself (a collective over {name!r}), and "
            "parallelize shows it the whole batch, where there is nothing to average: "
            f"use per_device(step, axis_name={name!r}), or remove the "
            "lax.pmean/lax.psum from the step"
        )
    return ValueError(
        f"the step uses the axis {name!r}, and per_device was given axis_name="
        f"{axis_name!r}: write the same name in both"
    )


def _check_mutations(arg: Any, before: list[Any], out: Any) -> None:
    """Find values that the step changed in place and did not return."""
    known = {id(x) for x in before} | {id(x) for x in jax.tree.leaves(out)}
    for path, leaf in jax.tree_util.tree_flatten_with_path(arg)[0]:
        if isinstance(leaf, Tracer) and id(leaf) not in known:
            raise ValueError(
                f"the step changed {type(arg).__name__}{jax.tree_util.keystr(path)} in "
                "place and did not return it, so the change is lost: return what the "
                "step changed, as in\n    return (model, optimizer), metrics"
            )
