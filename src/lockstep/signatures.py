"""What a program is compiled for: the types of its leaves, and what is static."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from lockstep.packing import describe
from lockstep.tree import describe_leaf, is_static, named_leaves


@dataclasses.dataclass(frozen=True)
class Signature:
    """The arguments of a call, without their values.

    Attributes:
        leaves: path of every array or number -> its dtype and shape.
        static: path -> value of what is part of the program: flags, names, functions,
            and the static fields of dataclasses.
    """

    leaves: Mapping[str, str]
    static: Mapping[str, Any]

    @classmethod
    def of(
        cls, arguments: Mapping[str, Any], static: Mapping[str, Any] | None = None
    ) -> "Signature":
        """Read named arguments; `static` are arguments that are static as a whole."""
        leaves, found = {}, dict(static or {})
        for name, argument in arguments.items():
            argument = describe(argument)
            for path, leaf in named_leaves(argument, name):
                if is_static(leaf):
                    found[path] = leaf
                else:
                    leaves[path] = describe_leaf(leaf)
            found.update(_static_fields(argument, name))
        return cls(leaves, found)

    def changes_from(self, old: "Signature") -> list[str]:
        """What is other than in an older signature, a few words each.

        Example:
            >>> old = Signature.of({"batch": np.zeros(64, np.int32)}, {"lr": 0.1})
            >>> new = Signature.of({"batch": np.zeros(60, np.int32)}, {"lr": 0.2})
            >>> new.changes_from(old)
            ['batch int32[64] -> int32[60]', 'static argument lr 0.1 -> 0.2']
        """
        return _leaf_changes(old.leaves, self.leaves) + self._static_changes(old)

    def lost_rows(self, old: "Signature") -> bool:
        """Whether it differs by fewer rows alone: a short last batch."""
        changed = [
            (old.leaves.get(path, ""), kind)
            for path, kind in self.leaves.items()
            if old.leaves.get(path) != kind
        ]
        rows = [(_rows(before), _rows(now)) for before, now in changed]
        return bool(rows) and all(
            before and now and before[0] == now[0] and before[1] > now[1]
            for before, now in rows
        )

    def _static_changes(self, old: "Signature") -> list[str]:
        changed = {
            path: value
            for path, value in self.static.items()
            if path in old.static and not _equal(old.static[path], value)
        }
        functions = [path for path, value in changed.items() if _is_code(value)]
        if functions and len(functions) == len(changed) and old.leaves == self.leaves:
            return [_about_functions(functions)]
        return [
            _change(path, old.static[path], value) for path, value in changed.items()
        ]


def _leaf_changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    both = [p for p in new if p in old]
    changed = [_leaf_change(p, old[p], new[p]) for p in both if old[p] != new[p]]
    added = [f"{p} is new ({new[p]})" for p in new if p not in old]
    gone = [f"{p} is gone" for p in old if p not in new]
    return changed + added + gone


def _leaf_change(path: str, old: str, new: str) -> str:
    if old.endswith("[]") and new.endswith("[]"):  # both are scalars
        old, new = old[:-2], new[:-2]
    return f"{path} {old} -> {new}"


def _change(path: str, old: Any, new: Any) -> str:
    kind = "static argument " if path.isidentifier() else "static "
    if _is_code(new):
        return f"{kind}{path} is another function"
    return f"{kind}{path} {_short(old)} -> {_short(new)}"


def _about_functions(paths: list[str]) -> str:
    what = ", ".join(paths)
    last = paths[0].rpartition(".")[2]
    reuse = "the optimizer" if last in ("tx", "optimizer") else "it"
    kind = "function" if len(paths) == 1 else "functions"
    return (
        f"tree differs only in the {kind} {what}: reuse {reuse} (make it once, before "
        "the loop)"
    )


def _static_fields(values: Any, name: str) -> dict[str, Any]:
    """The fields of dataclasses in a tree that are not among its leaves."""
    children = jax.tree_util.tree_flatten_with_path(
        values, is_leaf=lambda x: x is not values
    )[0]
    if not children or not children[0][0]:
        return {}
    found = {}
    names = {getattr(path[0], "name", None) for path, _ in children}
    if dataclasses.is_dataclass(values):
        for field in dataclasses.fields(values):
            if field.name not in names and hasattr(values, field.name):
                found[f"{name}.{field.name}"] = getattr(values, field.name)
    for path, child in children:
        found.update(_static_fields(child, name + jax.tree_util.keystr(path)))
    return found


def _is_code(value: Any) -> bool:
    """Whether a value is a function or a tuple of functions, as an optimizer is."""
    if isinstance(value, tuple):
        return bool(value) and all(map(_is_code, value))
    return callable(value) and not isinstance(value, type)


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a is b or a == b)
    except (TypeError, ValueError):  # such as arrays in a static field
        return False


def _rows(kind: str) -> tuple[str, int] | None:
    """`float32[8,3]` -> (`float32[,3]`, 8)."""
    dtype, _, shape = kind.partition("[")
    first, comma, rest = shape.rstrip("]").partition(",")
    return (f"{dtype}[{comma}{rest}]", int(first)) if first else None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
