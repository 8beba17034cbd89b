"""Results that were declared the same on all devices: are they?"""

from typing import Any

from jax.tree_util import keystr, tree_flatten_with_path

from lockstep import notices
from lockstep.jaxprs.varying import varying_outputs


def tell_of_differing(traced: Any, axis_name: str, function_name: str) -> None:
    """Tells once of results with `out_axes=None` that can differ between devices.

    Such an array says that it is replicated while its copies differ, and which of
    them is read depends on who reads.

    Args:
        traced: what `jax.jit(f).trace(...)` gives of a function that is one
            `shard_map` over `axis_name`.
        axis_name: the mapped axis.
        function_name: of the mapped function.
    """
    (mapped,) = (e for e in traced.jaxpr.jaxpr.eqns if e.primitive.name == "shard_map")
    inputs, outputs = mapped.params["in_specs"], mapped.params["out_specs"]
    varies = varying_outputs(
        mapped.params["jaxpr"], [any(spec) for spec in inputs], axis_name
    )
    paths = [keystr(path) for path, _ in tree_flatten_with_path(traced.out_info)[0]]
    for path, spec, differs in zip(paths, outputs, varies, strict=True):
        if differs and not any(spec):
            notices.say_once(
                f"compat.pmap out_axes of {function_name}{path}",
                f"pmap({function_name}) returns result{path} with out_axes=None, for "
                "which it must be the same on all devices, and it can differ: average "
                "it with jax.lax.pmean, or stack it with out_axes=0",
            )
