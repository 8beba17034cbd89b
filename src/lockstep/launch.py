"""Runs a script or module as `python` would, in a process that was set up for it."""

import builtins
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType, TracebackType

from lockstep.notices import say_once
from lockstep.simulation import backend_started, simulate_by_environment


@dataclass(frozen=True)
class Program:
    """A script or notebook, or with `module=True` the name of a module."""

    target: str
    arguments: tuple[str, ...] = ()
    module: bool = False


class CannotStart(Exception):
    """The program cannot be found or read; nothing of it ran."""


@contextmanager
def simulated(count: int) -> Iterator[None]:
    """Gives the program that runs inside `count` simulated CPU devices.

    A program that takes other devices by itself gets them; afterwards that is said.
    """
    simulate_by_environment(count)
    try:
        yield
    finally:
        _say_other_devices(count)


def run(program: Program) -> None:
    """Runs the program in this process, as `__main__`, and returns at its end.

    For a process that does nothing else: `sys.argv`, `sys.path[0]` and `__main__`
    become the program's, for good.

    Raises:
        CannotStart: there is no such program.
        SystemExit: the program asked for it, or failed; its traceback is then printed,
            by the program's own `sys.excepthook` if it has one.
    """
    try:
        load = _load_module if program.module else _load_script
        parts, main = load(program)
        sys.modules["__main__"] = main
        for code in parts:
            exec(code, vars(main))
    except CannotStart:
        raise
    except SystemExit as error:
        _tell_of_exit(error.code)
        raise
    except BaseException as error:
        _explain_old_names(error)
        traceback = _without_launcher(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else 1) from None


def _tell_of_exit(code: object) -> None:
    if "lockstep.distributed.faults" in sys.modules:
        from lockstep.distributed.faults import tell_of_exit

        tell_of_exit(code)


def _explain_old_names(error: BaseException) -> None:
    if "lockstep.compat.install" in sys.modules:
        from lockstep.compat.install import explain, is_installed

        if is_installed():
            explain(error)


def _load_script(program: Program) -> tuple[Iterable[CodeType], ModuleType]:
    path = os.path.abspath(program.target)
    loader = SourceFileLoader("__main__", path)
    try:
        source = loader.get_data(path)
    except OSError as error:
        raise CannotStart(f"cannot read {program.target}: {error.strerror}") from None
    _become(program, program.target, os.path.dirname(os.path.realpath(path)))
    main = _main_module(__file__=path, __loader__=loader, __package__=None)
    if path.endswith(".ipynb"):
        from lockstep.compat.notebook import names_of_notebooks

        vars(main).update(names_of_notebooks())
        return _cells(path), main
    return [loader.source_to_code(source, path)], main


def _cells(notebook: str) -> Iterable[CodeType]:
    from lockstep.compat.notebook import compile_cells

    try:
        return compile_cells(notebook)
    except ValueError as error:
        raise CannotStart(str(error)) from None


def _load_module(program: Program) -> tuple[Iterable[CodeType], ModuleType]:
    _become(program, "-m", os.getcwd())
    spec = _find_module(program.target)
    if spec.submodule_search_locations is not None:  # a package
        spec = _find_module(f"{program.target}.__main__")
    get_code = getattr(spec.loader, "get_code", None)
    code = get_code(spec.name) if get_code else None
    if code is None:  # a folder without __init__.py, or a compiled module
        raise CannotStart(f"module {program.target} has no Python code to run")
    sys.argv[0] = str(spec.origin)
    main = _main_module(
        __file__=spec.origin,
        __loader__=spec.loader,
        __package__=spec.parent,
        __spec__=spec,
    )
    return [code], main


def _find_module(name: str) -> ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the program's own import failed
        spec = None
    except ValueError:  # such as a name with two dots in a row
        spec = None
    if spec is None:
        raise CannotStart(f"no module named {name}")
    return spec


def _become(program: Program, name: str, folder: str) -> None:
    sys.argv = [name, *program.arguments]
    if not sys.flags.safe_path:  # then Python has put the launcher's folder there
        sys.path[0] = folder


def _main_module(**attributes: object) -> ModuleType:
    main = ModuleType("__main__")
    vars(main).update(attributes, __builtins__=builtins)
    return main


def _without_launcher(traceback: TracebackType | None) -> TracebackType | None:
    """Drops the frames in front of the program's own first frame."""
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if filename != __file__ and not filename.startswith("<frozen importlib"):
            break
        traceback = traceback.tb_next
    return traceback


def _say_other_devices(count: int) -> None:
    if "jax" not in sys.modules or not backend_started():
        return
    import jax

    if (have := jax.local_device_count()) != count or jax.default_backend() != "cpu":
        say_once(
            f"simulated {count}, used {have}",
            f"the program ran on {have} {jax.default_backend()} devices, not on the "
            f"{count} simulated ones: it chooses its devices itself",
        )
