"""Names that are gone, on their way out, or never were."""

import ast
import difflib
import importlib
import warnings
from collections.abc import Iterator
from types import ModuleType

from lockstep.compat.check.code import constant, keyword
from lockstep.compat.check.findings import Level
from lockstep.compat.check.module import Module, Remarks, rule
from lockstep.compat.flags import FLAGS
from lockstep.compat.names import NAMES, look_up
from lockstep.compat.naming import Kind, Name

_MISSING = object()


def names_in_table(module: Module) -> Iterator[tuple[ast.AST, str, Name]]:
    """Every use of a name that has a row, unless the code is ready to miss it."""
    for node, dotted in module.uses:
        row = look_up(dotted)
        if row is not None:
            yield node, dotted, row


@rule(Level.ERROR)
def gone_name(module: Module) -> Remarks:
    """Finds names that today's JAX or Flax no longer has."""
    for node, dotted, row in names_in_table(module):
        if not row.gone or (row.restore and _installs(module)):
            continue
        if row.rename:
            new = row.rename + dotted.removeprefix(row.old)
            yield node, f"{dotted} was renamed to {new}"
        elif row.kind is Kind.RENAMED:
            yield node, f"{dotted} is gone: write {row.today}"
        else:
            yield node, f"{dotted} is gone: use {row.today}"


@rule(Level.ERROR)
def gone_attribute(module: Module) -> Remarks:
    """Finds `x.device_buffers` and `x.device()`, which arrays no longer have."""
    if not _imports(module, "jax") or _installs(module):
        return
    lines = set()
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and not module.dotted(node):
            row = NAMES.get(f"jax.Array.{node.attr}")
            if row is not None and row.gone:
                lines.add(node.lineno)
                yield node, f"arrays have no {node.attr} any more: use {row.today}"
    if not _defines(module, "device"):
        for call, dotted in module.calls:
            if _asks_for_device(call) and not dotted and call.lineno not in lines:
                today = NAMES["jax.Array.device"].today
                yield call, f"the device of an array is no method today: use {today}"


def _asks_for_device(call: ast.Call) -> bool:
    """Whether it is `x.device()`."""
    is_method = isinstance(call.func, ast.Attribute) and call.func.attr == "device"
    return is_method and not call.args and not call.keywords


def _defines(module: Module, name: str) -> bool:
    return any(
        isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name
        for node in module.nodes
    )


@rule(Level.ERROR)
def gone_keyword(module: Module) -> Remarks:
    """Finds `jnp.clip(x, a_min=..., a_max=...)`: its arguments have other names.

    So have those of `pjit(f, in_axis_resources=...)`.
    """
    resources = ("in_axis_resources", "out_axis_resources")
    for call, dotted in module.calls:
        if dotted == "jax.experimental.pjit.pjit" and not _installs(module):
            if keyword(call, *resources) is not None:
                yield call, "pjit changed: write jax.jit(f, in_shardings=...)"
        if dotted == "jax.numpy.clip" and not _installs(module):
            if keyword(call, "a", "a_min", "a_max") is not None:
                yield call, f"jnp.clip changed: write {NAMES['jax.numpy.clip'].today}"


@rule(Level.ERROR)
def gone_option(module: Module) -> Remarks:
    """Finds options of `jax.config` that are gone."""
    for call, dotted in module.calls:
        if dotted in ("jax.config.update", "jax.config.config.update") and call.args:
            name = constant(call.args[0])
            if isinstance(name, str) and name in FLAGS and not _installs(module):
                value, why = FLAGS[name]
                yield call, f"the option {name} is gone: {why} (as with {value!r})"


@rule(Level.ERROR)
def unknown_name(module: Module) -> Remarks:
    """Finds misspelt names: not in JAX, nor ever, but close to one that is or was."""
    for node, dotted in module.uses:
        if dotted.startswith("jax.") and look_up(dotted) is None:
            meant = _misspelt(dotted)
            if meant:
                yield node, f"{dotted} does not exist; perhaps {meant}"


@rule(Level.NOTE)
def old_name(module: Module) -> Remarks:
    """Finds names that still work but are on their way out."""
    for node, dotted, row in names_in_table(module):
        if row.kind is Kind.OLD:
            yield node, f"{dotted} is on its way out: use {row.today}"


def _installs(module: Module) -> bool:
    return any(
        dotted.startswith("lockstep.compat.")
        and dotted.endswith(("install", "installed"))
        for _, dotted in module.calls
    )


def _imports(module: Module, library: str) -> bool:
    return any(
        (binding.dotted + ".").startswith(library + ".")
        for bindings in module.scopes.scope_of(module.tree).names.values()
        for binding in bindings
    )


def _misspelt(dotted: str) -> str:
    """What was meant by a name of JAX that does not exist; empty if it does."""
    path, *parts = dotted.split(".")
    owner: object = importlib.import_module(path)
    for part in parts:
        if not isinstance(owner, ModuleType):
            return ""  # attributes of objects are not ours to judge
        if part.startswith("_"):
            return ""  # private names come and go
        found = _member(owner, part)
        if found is _MISSING:
            rows = (row.rpartition(".") for row in NAMES)
            known = [*dir(owner), *(name for base, _, name in rows if base == path)]
            near = difflib.get_close_matches(part, known, 1, cutoff=0.8)
            return f"{path}.{near[0]}" if near else ""
        path, owner = f"{path}.{part}", found
    return ""


def _member(owner: ModuleType, name: str) -> object:
    """A module's member; a submodule that cannot be imported here counts as one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names on their way out
        if hasattr(owner, name):
            return getattr(owner, name)
        path = f"{owner.__name__}.{name}"
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            return _MISSING if error.name == path else error
        except Exception as error:  # such as a library that it needs
            return error
