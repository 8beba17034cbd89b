"""Random keys: one key a device, one a step."""

import ast
import re

from lockstep.compat.check.code import (
    GRADS,
    KEY_MAKERS,
    last_name,
)
from lockstep.compat.check.findings import Level
from lockstep.compat.check.mapped import Mapped
from lockstep.compat.check.module import Module, Remarks, rule
from lockstep.compat.check.scopes import Function

_KEY_NAME = re.compile(r"(^|_)(rng|key|prng)s?$")
_SPLITS = {"jax.random.split", "flax.training.common_utils.shard_prng_key"}
_REPLICATES = {
    "jax.device_put_replicated",
    "flax.jax_utils.replicate",
    "lockstep.compat.replicate",
    "lockstep.compat.device_put_replicated",
    "jax.numpy.broadcast_to",
    "jax.numpy.stack",
}
_PER_DEVICE = {"jax.lax.axis_index", "lockstep.device_key", "lockstep.rng.device_key"}


@rule(Level.WARNING)
def keys_split_in_batches(module: Module) -> Remarks:
    """Finds `split(keys, 2)` of an array of keys, which JAX refuses."""
    for call, dotted in module.calls:
        if dotted == "jax.random.split" and call.args and _is_batch(module, call):
            name = ast.unparse(call.args[0])
            yield (
                call,
                f"{name} is an array of keys, and split takes one key: write "
                f"jax.vmap(lambda key: jax.random.split(key, 1)[0])({name}), "
                f"lockstep.compat.refresh_keys({name}), or fold the step into the "
                "key inside the mapped function",
            )


def _is_batch(module: Module, call: ast.Call) -> bool:
    """Whether what is split was itself the whole result of a split."""
    binding = module.binding(call.args[0])
    if binding is None or binding.at is not None:
        return False
    made = binding.value
    if isinstance(made, ast.Subscript):  # `keys = split(keys, 2)[:, 0]` keeps a batch
        if not isinstance(made.slice, ast.Tuple):
            return False
        made = made.value
    return isinstance(made, ast.Call) and module.dotted(made.func) in _SPLITS


@rule(Level.WARNING)
def one_key_for_all_devices(module: Module) -> Remarks:
    """Finds train steps in which every device draws the same random numbers."""
    for mapped in module.mapped.all:
        function = mapped.function
        if function is None or not mapped.how.endswith("pmap"):
            continue
        nodes = module.reach(function)
        trains = any(_calls(module, node, GRADS) for node in nodes)
        told_apart = any(module.dotted(node) in _PER_DEVICE for node in nodes)
        if trains and not told_apart:
            yield from _constant_keys(module, mapped, nodes)
            yield from _broadcast_keys(module, mapped)
            yield from _replicated_keys(module, mapped)


_ADVICE = (
    "give each device its own, jax.random.split(key, n_devices) outside, or "
    "fold in jax.lax.axis_index(axis_name) inside"
)


def _constant_keys(module: Module, mapped: Mapped, nodes: list[ast.AST]) -> Remarks:
    for node in nodes:
        if _calls(module, node, {"jax.random.PRNGKey", "jax.random.key"}):
            if isinstance(node, ast.Call) and _is_fixed(module, node):
                yield (
                    node,
                    f"{mapped.name} makes the same key on every device and in every "
                    f"step: pass a key in, and {_ADVICE}",
                )


def _broadcast_keys(module: Module, mapped: Mapped) -> Remarks:
    """A key that `in_axes=None` hands to all devices."""
    axes = mapped.option("in_axes")
    function = mapped.function
    if not isinstance(axes, ast.Tuple) or function is None:
        return
    arguments = [*function.args.posonlyargs, *function.args.args]
    for axis, argument in zip(axes.elts, arguments, strict=False):
        whole = isinstance(axis, ast.Constant) and axis.value is None
        if whole and _is_key(module, function, argument.arg):
            yield (
                mapped.node,
                f"in_axes=None gives one {argument.arg} to all devices, which then "
                f"draw the same numbers: {_ADVICE}",
            )


def _is_key(module: Module, function: Function, name: str) -> bool:
    """Whether an argument is called a key, or is drawn from under its name."""
    if _KEY_NAME.search(name):
        return True
    calls = [n for n in module.reach(function) if isinstance(n, ast.Call) and n.args]
    return any(
        module.dotted(call.func).startswith("jax.random.")
        and isinstance(call.args[0], ast.Name)
        and call.args[0].id == name
        for call in calls
    )


def _replicated_keys(module: Module, mapped: Mapped) -> Remarks:
    for call, _ in module.calls:
        if module.mapped.called(call) is not mapped:
            continue
        for argument in call.args:
            made = module.value(argument)
            if isinstance(made, ast.Call) and _replicates_a_key(module, made):
                yield (
                    made,
                    f"{mapped.name} gets copies of one key, so that all devices draw "
                    f"the same numbers: {_ADVICE}",
                )


def _replicates_a_key(module: Module, call: ast.Call) -> bool:
    if module.dotted(call.func) not in _REPLICATES or not call.args:
        return False
    what = call.args[0]
    if isinstance(what, ast.BinOp):  # jnp.stack([key] * n)
        what = what.left
    if isinstance(what, ast.List) and len(what.elts) == 1:
        what = what.elts[0]
    made = module.value(what)
    if isinstance(made, ast.Call):
        return module.dotted(made.func) in KEY_MAKERS
    return made is None and bool(_KEY_NAME.search(last_name(what)))


def _calls(module: Module, node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Call) and module.dotted(node.func) in names


def _is_fixed(module: Module, call: ast.Call) -> bool:
    """Whether nothing in the arguments comes from those of a function: a seed."""
    names = (n for a in call.args for n in ast.walk(a) if isinstance(n, ast.Name))
    return all(_is_from_outside(module, name) for name in names)


def _is_from_outside(module: Module, name: ast.Name) -> bool:
    """Whether a name is bound to no argument and no value of a function."""
    if name.id in ("self", "cls"):
        return True
    scopes = module.scopes.scope_of(name).outward()
    home = next((scope for scope in scopes if name.id in scope.names), None)
    return home is None or isinstance(home.node, ast.Module)
