"""One call of a step on disk: `call.json` says what it is, `arrays.npz` holds it.

Arrays are stored by the path of their leaf (`state['w']`), keys as their words and
bfloat16 as its bits, with the true type in `call.json`. Trees and functions are not
stored: a replay takes them from the program that is run again.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lockstep import tree
from lockstep.debug.comparing.trials import Call

FORMAT = 1


def save(directory: Path, name: str, number: int, call: Call, report: str) -> None:
    """Write one call below `directory`, over one that is there."""
    directory.mkdir(parents=True, exist_ok=True)
    leaves = named(call)
    arrays = {path: _words(x) for path, x in leaves.items() if not tree.is_static(x)}
    np.savez(directory / "arrays.npz", allow_pickle=False, **arrays)
    text = {
        "format": FORMAT,
        "function": name,
        "step": number,
        "report": report,
        "program": _program(),
        "devices": jax.device_count(),
        "platform": jax.default_backend(),
        "jax": jax.__version__,
        "leaves": {path: _kind(leaf) for path, leaf in leaves.items()},
    }
    (directory / "call.json").write_text(json.dumps(text, indent=1) + "\n")


def read(directory: str | Path) -> dict[str, Any]:
    """What `call.json` says.

    Raises:
        ValueError: there is none, or of another format.
    """
    path = Path(directory) / "call.json"
    if not path.exists():
        raise ValueError(
            f"{directory} holds no saved call (call.json): give the folder that the "
            "report of nan_guard names"
        )
    found = json.loads(path.read_text())
    if found["format"] != FORMAT:
        raise ValueError(
            f"{path} has format {found['format']}, this lockstep reads {FORMAT}"
        )
    return found


def restore(directory: str | Path, call: Call) -> Call:
    """A call with the saved values in the place of its own.

    Raises:
        ValueError: a leaf is missing or has another type or shape than the saved one.
    """
    kinds = read(directory)["leaves"]
    with np.load(Path(directory) / "arrays.npz") as arrays:
        values = {path: _value(arrays[path], kinds[path]) for path in arrays.files}
    own = named(call)
    for path, leaf in own.items():
        there = kinds.get(path, "nothing")
        if not _alike(_kind(leaf), there, any_rows=not path.startswith("state")):
            raise ValueError(
                f"the program's step takes {path} = {_kind(leaf)}, and {directory} "
                f"holds {there}: run the program and the arguments it was saved from"
            )
    leaves = [values.get(path, leaf) for path, leaf in own.items()]
    structure = jax.tree.structure((call.args, call.keywords))
    return Call(*jax.tree.unflatten(structure, leaves))


def named(call: Call) -> dict[str, Any]:
    """All leaves of a call by their paths."""
    found = [
        pair
        for i, argument in enumerate(call.args)
        for pair in tree.named_leaves(argument, _name(i))
    ]
    return dict(found + tree.named_leaves(call.keywords, "keywords"))


def _name(i: int) -> str:
    return ("state", "batch")[i] if i < 2 else f"argument {i}"


def _kind(leaf: Any) -> str:
    """The type and shape; the program's text may differ in its static leaves."""
    return "static" if tree.is_static(leaf) else tree.describe_leaf(leaf)


def _alike(own: str, saved: str, any_rows: bool) -> bool:
    """Whether a saved value can stand for a program's own.

    Numbers may be of other widths: a first state often comes from the host.
    """
    (kind, shape), (other, saved_shape) = (
        text.removeprefix("weak ").split("[", 1) if "[" in text else (text, "")
        for text in (own, saved)
    )
    same_kind = kind.strip("b0123456789") == other.strip("b0123456789")
    return same_kind and (any_rows or shape == saved_shape)


def _words(leaf: Any) -> np.ndarray:
    if tree.is_key(leaf):
        return np.asarray(jax.random.key_data(leaf))
    value = np.asarray(leaf)
    own = value.dtype.kind in "biufc"  # of NumPy, and not of ml_dtypes
    return value if own else value.view(f"u{value.dtype.itemsize}")


def _value(words: np.ndarray, kind: str) -> Any:
    dtype = kind.partition("[")[0].removeprefix("weak ")
    if dtype in ("int", "float", "complex"):
        return words.item()
    if dtype.startswith("key<"):
        return jax.random.wrap_key_data(jax.numpy.asarray(words), impl=dtype[4:-1])
    wanted = jax.numpy.dtype(dtype)
    return words if words.dtype == wanted else words.view(wanted)


def _program() -> dict[str, Any] | None:
    """How the running program was started; `None` in a notebook or a prompt."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if not file:
        return None
    spec = getattr(main, "__spec__", None)
    return {
        "target": spec.name if spec else os.path.abspath(file),
        "module": spec is not None,
        "arguments": sys.argv[1:],
        "folder": os.getcwd(),
        "compat": "lockstep.compat.install" in sys.modules
        and sys.modules["lockstep.compat.install"].is_installed(),
    }
