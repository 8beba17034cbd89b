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
from lockstep.compat.names import FLAGS, NAMES, Kind, look_up


_MISSING = object()


@rule(Level.ERROR)
def gone_name(module: Module) -> Remarks:
    """Finds names that today's JAX or Flax no longer has."""
    for node, dotted in _uses(module):
        row = look_up(dotted)
        if row is None or not row.gone or (row.restore and _installs(module)):
            continue
        what = "was renamed to" if row.kind is Kind.RENAMED else "is gone: use"
        if row.kind is Kind.RENAMED and not row.rename:
            what = "is gone: write"
        yield node, f"{dotted} {what} {_today(dotted, row.old, row.rename, row.today)}"


@rule(Level.ERROR)
def gone_attribute(module: Module) -> Remarks:
    """Finds `x.device_buffers`, which arrays no longer have."""
    if not _imports(module, "jax"):
        return
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and not module.dotted(node):
            row = NAMES.get(f"jax.Array.{node.attr}")
            if row is not None and row.gone and not _installs(module):
                yield node, f"arrays have no {node.attr} any more: use {row.today}"


@rule(Level.ERROR)
def gone_keyword(module: Module) -> Remarks:
    """Finds `jnp.clip(x, a_min=..., a_max=...)`: its arguments have other names."""
    for call, dotted in module.calls:
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
    for node, dotted in _uses(module):
        if dotted.startswith("jax.") and look_up(dotted) is None:
            meant = _misspelt(dotted)
            if meant:
                yield node, f"{dotted} does not exist; perhaps {meant}"


@rule(Level.NOTE)
def old_name(module: Module) -> Remarks:
    """Finds names that still work but are on their way out."""
    for node, dotted in _uses(module):
        row = look_up(dotted)
        if row is not None and row.kind is Kind.OLD:
            yield node, f"{dotted} is on its way out: use {row.today}"


def _today(dotted: str, old: str, rename: str, today: str) -> str:
    return rename + dotted.removeprefix(old) if rename else today


def _uses(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """Dotted names in imports and expressions, but for those that are guarded."""
    set_here = {module.dotted(n) for n in module.nodes if _is_stored(n)} - {""}
    for node in module.nodes:
        for dotted in _dotted_names(module, node):
            if dotted not in set_here and not _is_guarded(module, node):
                yield node, dotted


def _dotted_names(module: Module, node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            # `jax.config` is an object today: the module of that name is gone.
            yield "jax.config.config" if alias.name == "jax.config" else alias.name
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        for alias in node.names:
            yield f"{node.module}.{alias.name}"
    elif isinstance(node, ast.Attribute):
        whole = not isinstance(module.scopes.parents[node], ast.Attribute)
        if whole and not _is_said_at_import(module, node):
            yield from filter(None, [module.dotted(node)])


def _is_said_at_import(module: Module, node: ast.expr) -> bool:
    """Whether the first name of `a.b.c` was imported by a name that has a row."""
    while isinstance(node, ast.Attribute):
        node = node.value
    binding = module.binding(node)
    return binding is not None and look_up(binding.dotted) is not None


def _is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)


def _is_guarded(module: Module, node: ast.AST) -> bool:
    """Whether the code is ready for the name to be missing."""
    for around in module.scopes.ancestors(node):
        if isinstance(around, ast.Try) and any(
            _catches(handler, len(around.body)) for handler in around.handlers
        ):
            return True
        if isinstance(around, (ast.If, ast.IfExp)):
            test = ast.unparse(around.test)
            if "hasattr" in test or "version" in test:
                return True
    return False


def _catches(handler: ast.ExceptHandler, statements: int) -> bool:
    caught = ast.walk(handler.type) if handler.type else ()
    names = {n.id for n in caught if isinstance(n, ast.Name)}
    if names & {"ImportError", "ModuleNotFoundError", "AttributeError"}:
        return True
    catches_all = handler.type is None or "Exception" in names
    return catches_all and statements <= 3  # more of them guard something else


def _installs(module: Module) -> bool:
    return any(
        dotted.startswith("lockstep.compat.")
        and dotted.endswith(("install", "installed"))
        for _, dotted in module.calls
    )


def _imports(module: Module, library: str) -> bool:
    return any(
        dotted == library or dotted.startswith(library + ".")
        for node in module.nodes
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for dotted in _dotted_names(module, node)
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
            near = difflib.get_close_matches(part, known, 1, cutoff=0.85)
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
