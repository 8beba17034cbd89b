"""Collectives over an axis that no map binds: which axes are bound?"""

import re
from collections.abc import Iterable

from lockstep.compat.mapping.options import UNNAMED

_UNBOUND = re.compile(r"unbound axis name: (\S+?)\.? ")


def explain_unbound_axis(
    error: NameError, function_name: str, axes: Iterable[str]
) -> None:
    """Adds the axes that are bound to JAX's error, raised in a mapped function."""
    unbound = _UNBOUND.search(str(error))
    if unbound is None:
        return
    bound = [axis for axis in axes if not axis.startswith(UNNAMED)]
    if bound:
        names = ", ".join(map(repr, bound))
        said = f"binds {names}: write that name, or give it axis_name='{unbound[1]}'"
    else:
        said = f"binds no name: give it axis_name='{unbound[1]}'"
    error.args = (f"{error} Here pmap({function_name}) {said}.",)
