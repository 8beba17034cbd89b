"""Restores the names of the pmap era for this process, and takes them back.

Only what can keep its meaning is restored. Every other gone name raises, and the
error says what to write today.
"""

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import jax

from lockstep.compat.flags import FLAGS
from lockstep.compat.names import NAMES, look_up
from lockstep.compat.naming import Name
from lockstep.notices import say_once

_restored: ExitStack | None = None
_WHICH_PMAP = "jax_pmap_shmap_merge"  # either answer: jax.pmap is compat.pmap now
_CALLED_A_PLACE = re.compile(r"(Device|Sharding)' object is not callable")


def install(*, era_random: bool = False) -> None:
    """Makes code of the pmap era find its names on `jax` and `flax`.

    Call it before that code is imported; a second call changes nothing but may add
    `era_random`. It acts on this process alone, and starts no backend.

    Args:
        era_random: also draws the random numbers of the time (the default until JAX
            0.5), so that an old run repeats its loss curve.

    Example:
        >>> import jax
        >>> from lockstep import compat
        >>> with compat.installed():
        ...     jax.tree_map(lambda x: x + 1, {"a": 1})
        {'a': 2}
        >>> hasattr(jax, "tree_map")
        False
    """
    global _restored
    if _restored is None:
        with ExitStack() as undo:
            _restore_names(undo)
            _explain_missing_names(undo)
            _restore_config(undo)
            _restored = undo.pop_all()
    if era_random:
        _set_flag(_restored, "jax_threefry_partitionable", False)


def uninstall() -> None:
    """Takes back all that `install` did; does nothing where it did nothing."""
    global _restored
    if _restored is not None:
        _restored.close()
        _restored = None


def is_installed() -> bool:
    """Whether the names of the pmap era are restored now."""
    return _restored is not None


@contextmanager
def installed(*, era_random: bool = False) -> Iterator[None]:
    """`install` for the length of a `with` block."""
    already = _restored is not None
    install(era_random=era_random)
    try:
        yield
    finally:
        if not already:
            uninstall()


# --- names that are restored ----------------------------------------------------


def _restore_names(undo: ExitStack) -> None:
    for row in NAMES.values():
        if row.restore and _is_installed(row.old):
            _restore(undo, row)


def _restore(undo: ExitStack, row: Name) -> None:
    try:
        value = _find(row.restore)
    except (ImportError, AttributeError):
        say_once(f"compat {row.old}", f"{row.old} is not restored: no {row.restore}")
        return
    path, _, attribute = row.old.rpartition(".")
    owner = _owner(undo, path)
    if isinstance(owner, type):
        for concrete in owner.__subclasses__():  # what jax.Array's values really are
            if attribute in vars(concrete):
                _set(undo, concrete, attribute, value)
        return
    if row.gone and attribute in vars(owner):
        return  # this JAX still has it
    _set(undo, owner, attribute, value)
    if isinstance(value, ModuleType):
        _set_module(undo, row.old, value)


def _is_installed(dotted: str) -> bool:
    return find_spec(dotted.partition(".")[0]) is not None


def _find(dotted: str) -> Any:
    """The object at a dotted name: the longest module, then attributes."""
    path, _, attribute = dotted.rpartition(".")
    if not path:
        return importlib.import_module(dotted)
    owner = _find(path)
    if not hasattr(owner, attribute) and isinstance(owner, ModuleType):
        return importlib.import_module(dotted)
    return getattr(owner, attribute)


def _owner(undo: ExitStack, path: str) -> Any:
    """The module or class a name lies in; a module that is gone is made anew."""
    try:
        return _find(path)
    except ImportError:
        parent, _, name = path.rpartition(".")
        module = ModuleType(path, f"What is restored of {path}.")
        module.__path__ = []  # so that `from module import gone` asks our finder
        vars(module)["__getattr__"] = _explaining(module)
        _set(undo, _owner(undo, parent), name, module)
        _set_module(undo, path, module)
        return module


def _set(undo: ExitStack, owner: Any, attribute: str, value: Any) -> None:
    if attribute in vars(owner):
        undo.callback(setattr, owner, attribute, vars(owner)[attribute])
    else:
        undo.callback(delattr, owner, attribute)
    setattr(owner, attribute, value)


def _set_module(undo: ExitStack, path: str, module: ModuleType) -> None:
    before = sys.modules.get(path)
    if before is None:
        undo.callback(sys.modules.pop, path, None)
    else:
        undo.callback(sys.modules.__setitem__, path, before)
    sys.modules[path] = module


# --- names that are not: an error that says what to write -----------------------


def _explain_missing_names(undo: ExitStack) -> None:
    finder = _GoneFinder()
    sys.meta_path.append(finder)
    undo.callback(sys.meta_path.remove, finder)
    gone = [row.old for row in NAMES.values() if row.gone and not row.restore]
    for path in sorted({old.rpartition(".")[0] for old in gone}):
        module = sys.modules.get(path)
        if module is not None:
            _set(undo, module, "__getattr__", _explaining(module))


def _explaining(module: ModuleType) -> Callable[[str], Any]:
    before = vars(module).get("__getattr__")
    path = module.__name__

    def explain(attribute: str) -> Any:
        row = NAMES.get(f"{path}.{attribute}") or NAMES.get(path)
        if row is not None and row.gone:
            raise AttributeError(_explanation(f"{path}.{attribute}", row))
        if before is not None:
            return before(attribute)
        raise AttributeError(f"module {path!r} has no attribute {attribute!r}")

    return explain


class _GoneFinder:
    """Answers, last of all finders, for imports of what is gone."""

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> ModuleSpec | None:
        row = look_up(fullname)
        if row is not None and row.gone:
            raise ImportError(_explanation(fullname, row), name=fullname)
        return None


def _explanation(dotted: str, row: Name) -> str:
    return f"{dotted} is gone from today's {dotted.split('.')[0]}: use {row.today}"


def explain(error: BaseException) -> None:
    """Adds what to write today to an error that says it only to those who know.

    `x.device()` is such a case: it cannot be restored, for JAX takes what can be
    called for a function.
    """
    if isinstance(error, TypeError) and _CALLED_A_PLACE.search(str(error)):
        error.add_note(
            "lockstep: where an array lies is no method any more: write x.device for "
            "an array on one device, x.devices() for one on several"
        )


# --- settings -------------------------------------------------------------------


def _restore_config(undo: ExitStack) -> None:
    """`jax.config` is also a module again, and takes the options that are gone."""
    module = ModuleType("jax.config", "The module form of `jax.config`.")
    vars(module)["__getattr__"] = lambda name: getattr(jax.config, name)
    _set_module(undo, "jax.config", module)
    update = jax.config.update

    def update_known(name: str, value: Any) -> None:
        if name not in FLAGS or name in jax.config.values:
            update(name, value)
        elif value != FLAGS[name][0] and name != _WHICH_PMAP:
            raise AttributeError(
                f"jax.config has no option {name!r} any more, and {value!r} is not "
                f"what JAX does today: {FLAGS[name][1]}"
            )

    _set(undo, jax.config, "update", update_known)


def _set_flag(undo: ExitStack, name: str, value: Any) -> None:
    undo.callback(jax.config.update, name, getattr(jax.config, name))
    jax.config.update(name, value)
