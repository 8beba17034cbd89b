"""Stacked trees: one row a device, as `pmap` takes and returns them."""

import ast
import re

from lockstep.compat.check.code import TREE_MAPS, constant, keyword, last_name
from lockstep.compat.check.findings import Level
from lockstep.compat.check.module import Module, Remarks, rule

_STATE_NAME = re.compile(r"(^|_)(state|params|opt_state|variables|train_state)s?$")
_STACKS = {
    "jax.device_put_replicated",
    "jax.device_put_sharded",
    "flax.jax_utils.replicate",
    "lockstep.compat.replicate",
    "lockstep.compat.device_put_replicated",
    "lockstep.compat.device_put_sharded",
}
_SHARDED = {"jax.device_put_sharded", "lockstep.compat.device_put_sharded"}
_REPLICATE = {"flax.jax_utils.replicate"}


@rule(Level.WARNING)
def row_of_stacked_state(module: Module) -> Remarks:
    """Finds `x[0]` of stacked state, which gathers the whole stack on every device."""
    if not module.drives_pmap:
        return
    for call, dotted in module.calls:
        if (
            dotted in TREE_MAPS
            and len(call.args) == 2
            and call not in module.on_devices
        ):
            if _takes_row_zero(call.args[0]) and _is_stacked(module, call.args[1]):
                what = ast.unparse(call.args[1])
                yield (
                    call,
                    f"x[0] of the stacked {what} gathers every row on every device: "
                    f"use lockstep.compat.unreplicate({what}), which reads one shard",
                )


def _takes_row_zero(function: ast.expr) -> bool:
    """Whether it is `lambda x: x[0]`."""
    return (
        isinstance(function, ast.Lambda)
        and len(function.args.args) == 1
        and isinstance(function.body, ast.Subscript)
        and last_name(function.body.value) == function.args.args[0].arg
        and constant(function.body.slice) == 0
    )


def _is_stacked(module: Module, tree: ast.expr) -> bool:
    names, root = [], tree
    while isinstance(root, (ast.Attribute, ast.Subscript)):
        names.append(last_name(root))
        root = root.value
    made = module.value(root)
    if isinstance(made, ast.Call):
        if module.mapped.called(made) is not None:
            return True
        return module.dotted(made.func) in _STACKS
    names.append(last_name(root))
    return made is None and any(map(_STATE_NAME.search, names))


@rule(Level.WARNING)
def map_over_lists_of_shards(module: Module) -> Remarks:
    """Finds `tree_map(lambda xs: device_put_sharded(xs, ...), tree)`: xs is no list."""
    for call, dotted in module.calls:
        if dotted not in TREE_MAPS or len(call.args) != 2 or keyword(call, "is_leaf"):
            continue
        function = module.function(call.args[0])
        if function is None or not function.args.args:
            continue
        leaf = function.args.args[0].arg
        for inner in ast.walk(function):
            if isinstance(inner, ast.Call) and inner.args:
                shards = module.dotted(inner.func) in _SHARDED
                if shards and last_name(inner.args[0]) == leaf:
                    yield (
                        inner,
                        f"{leaf} is a leaf, so an array: tree_map goes into lists of "
                        "shards and never hands one over. Give device_put_sharded a "
                        "list of trees, one a device, or the rows of the leaf, "
                        f"list({leaf})",
                    )


@rule(Level.WARNING)
def replicated_number(module: Module) -> Remarks:
    """Finds `jax_utils.replicate(0.1)`, which today makes a bfloat16 state float32."""
    for call, dotted in module.calls:
        if dotted in _REPLICATE and call.args:
            what = module.value(call.args[0])
            if isinstance(constant(what), (int, float)):
                yield (
                    call,
                    "flax.jax_utils.replicate makes a strong float32 of a Python "
                    "number since Flax 0.12, and a state of a smaller type becomes "
                    "float32 with it: use lockstep.compat.replicate: it stays weak",
                )
