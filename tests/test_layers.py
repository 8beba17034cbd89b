"""The layout of the package: who may import whom, and how long a thing may be.

A module imports lower layers and, without a circle, its own: a reader can start at
the bottom and never has to look up.
"""

import ast
import graphlib
import itertools
from pathlib import Path

import pytest

import lockstep

ROOT = Path(lockstep.__file__).parent

LAYERS = tuple(
    set(names.split())
    for names in (
        # 0: the machine, and trees of values
        """notices tables tree simulation compile_cache devices distributed
        preemption""",
        # 1: values on devices
        """sharding placement rng metrics signatures compiles
        observers printing jaxprs replicas packing""",
        # 2: one step: the train step, then any step on all devices
        """reduce fixed_order step first_step parallel memory transfers""",
        # 3: data in, numbers out
        """data evaluation writers checkpoint""",
        # 4: many steps
        """loop callbacks""",
        # 5: the command line
        """bench scale doctor launch processes ray rehearse watch replay
        cli __main__""",
    )
)
# Side packages: the highest layer that they import, and the lowest that imports them.
SIDES = {"debug": (2, 4), "compat": (1, 5)}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 40

LAYER_OF = {module: n for n, layer in enumerate(LAYERS) for module in layer}
FILES = sorted(ROOT.rglob("*.py"))


def module_of(file: Path) -> str:
    """`debug/shapes.py` -> `debug`, `tree.py` -> `tree`."""
    return file.relative_to(ROOT).with_suffix("").parts[0]


def dotted(file: Path) -> str:
    """`debug/shapes.py` -> `lockstep.debug.shapes`; a package goes by its folder."""
    parts = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {dotted(file) for file in FILES}


def imports_of(file: Path) -> set[str]:
    """The modules of lockstep that a file imports, inside functions as well."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name}:{node.lineno}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    assert "lockstep" not in names, f"{file.name} imports the package that it is in"
    ours = {name for name in names if name.startswith("lockstep.")}
    # `from a.b import c` imports a.b.c where that is a module, and a.b otherwise.
    return {name if name in MODULES else name.rpartition(".")[0] for name in ours}


def forbidden(module: str, imported: str) -> bool:
    """Whether the table says no."""
    if module == imported:
        return False
    if module in SIDES and imported in SIDES:
        return True
    if module in SIDES:
        return LAYER_OF[imported] > SIDES[module][0]
    if imported in SIDES:
        return LAYER_OF[module] < SIDES[imported][1]
    return LAYER_OF[imported] > LAYER_OF[module]


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, text: str) -> int:
    """Lines of a function without its docstring and without blank lines."""
    first = function.body[0]
    has_docstring = ast.get_docstring(function) is not None
    skipped = range(first.lineno, (first.end_lineno or 0) + 1) if has_docstring else ()
    lines = text.splitlines()
    numbers = range(function.lineno, (function.end_lineno or 0) + 1)
    return sum(bool(lines[n - 1].strip()) for n in numbers if n not in skipped)


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
class TestEveryFile:
    def test_is_in_the_table(self, file):
        module = module_of(file)
        assert module == "__init__" or module in LAYER_OF or module in SIDES

    def test_imports_no_higher_layer(self, file):
        module = module_of(file)
        if module == "__init__":  # the front door sees every room
            return
        rooms = {name.split(".")[1] for name in imports_of(file)}
        wrong = {room for room in rooms if forbidden(module, room)}
        assert not wrong, f"{module} may not import {wrong}"

    def test_uses_the_public_jax_alone(self, file):
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            assert not any(name.startswith("jax._src") for name in names)

    def test_is_short(self, file):
        text = file.read_text()
        assert len(text.splitlines()) <= MAX_FILE_LINES
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = code_lines(node, text)
                assert count <= MAX_FUNCTION_LINES, f"{node.name} has {count} lines"


def test_no_circle_of_imports():
    front_door = ROOT / "__init__.py"
    graph = {dotted(f): imports_of(f) for f in FILES if f != front_door}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the circle


def test_only_public_modules_list_their_names():
    """A name is public by standing in a package or in a public namespace."""
    for file in FILES:
        assigned = [
            n for n in ast.parse(file.read_text()).body if isinstance(n, ast.Assign)
        ]
        if "__all__" in {ast.unparse(node.targets[0]) for node in assigned}:
            public = module_of(file) in lockstep.__all__
            assert public or file.name == "__init__.py", file


def test_no_name_in_the_table_is_left_over():
    table = set(itertools.chain(*LAYERS)) | set(SIDES)
    assert table == {module_of(f) for f in FILES} - {"__init__"}


def test_the_table_forbids_what_it_should():
    assert forbidden("tree", "parallel")
    assert forbidden("data", "compat")
    assert forbidden("step", "debug")
    assert forbidden("debug", "loop")
    assert not forbidden("loop", "debug")
    assert not forbidden("parallel", "placement")


def test_a_function_is_measured_without_its_docstring():
    text = 'def f():\n    """One.\n\n    Two.\n    """\n    a = 1\n\n    return a\n'
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert code_lines(function, text) == 3
