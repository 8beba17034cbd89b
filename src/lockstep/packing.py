"""Many small leaves in one vector: what costs by the leaf is then paid once.

An all-reduce, an optimizer's arithmetic and an argument of a compiled program each cost
some microseconds a leaf and device, however small the leaf is. Leaves of one dtype are
therefore joined; large leaves stay as they are, for joining them is a copy.
"""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from lockstep import sharding
from lockstep.tree import named_leaves

# Measured: docs/performance.md, "Packed leaves".
SMALL_BYTES = 16 * 1024


@dataclasses.dataclass(frozen=True)
class Packing:
    """Which leaves of a tree go where.

    Attributes:
        structure: the tree's.
        shapes: of its leaves.
        slots: for each part of the packed form the numbers of its leaves: several are
            joined in one vector, and one by itself stays as it is.
        cut: if given, every part is a vector, filled up with zeros so that it can be
            cut into so many equal slices.
    """

    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    slots: tuple[tuple[int, ...], ...]
    cut: int | None = None

    @classmethod
    def of(cls, tree: Any, small_bytes: int = SMALL_BYTES) -> "Packing":
        """Join all leaves of one dtype that are below a size.

        Example:
            >>> tree = {"b": jnp.ones(2), "w": jnp.ones((2, 2)), "x": jnp.ones(9, int)}
            >>> Packing.of(tree).slots
            ((0, 1), (2,))
        """
        leaves, structure = jax.tree.flatten(tree)
        groups: dict[Any, list[int]] = {}
        for i, leaf in enumerate(leaves):
            small = math.prod(leaf.shape) * leaf.dtype.itemsize < small_bytes
            groups.setdefault(leaf.dtype if small else i, []).append(i)
        shapes = tuple(tuple(leaf.shape) for leaf in leaves)
        return cls(structure, shapes, tuple(map(tuple, groups.values())))

    @property
    def joined(self) -> int:
        """How many leaves are in vectors."""
        return sum(len(slot) for slot in self.slots if len(slot) > 1)

    def fits(self, tree: Any) -> bool:
        """Whether a tree is like the one that is to be packed.

        Where that is a single array, any other has its structure; those are like it
        that have its shape, and are no counts.

        Example:
            >>> packing = Packing.of(jnp.ones(2))
            >>> packing.fits(jnp.zeros(2)), packing.fits(jnp.zeros(()))
            (True, False)
        """
        if jax.tree.structure(tree) != self.structure:
            return False
        if not jax.tree_util.treedef_is_leaf(self.structure):
            return True
        inexact = jnp.issubdtype(tree.dtype, jnp.inexact)
        return inexact and tuple(tree.shape) == self.shapes[0]

    def pack(self, tree: Any) -> "Packed":
        """A tree of this form, packed; of one dtype in each slot.

        Example:
            >>> tree = {"b": jnp.ones(2), "w": jnp.zeros((2, 2))}
            >>> Packing.of(tree).pack(tree).parts
            (Array([1., 1., 0., 0., 0., 0.], dtype=float32),)
        """
        leaves = jax.tree.leaves(tree)
        parts = tuple(
            leaves[slot[0]] if len(slot) == 1 else _join([leaves[i] for i in slot])
            for slot in self.slots
        )
        return Packed(parts if self.cut is None else tuple(map(self.flat, parts)), self)

    def unpack(self, parts: tuple[Any, ...]) -> Any:
        """The tree again."""
        leaves: dict[int, Any] = {}
        for slot, part in zip(self.slots, parts, strict=True):
            shapes = tuple(self.shapes[i] for i in slot)
            whole = self.cut is None and len(slot) == 1
            found = [part] if whole else _pieces(part, shapes)
            leaves.update(zip(slot, found, strict=True))
        return jax.tree.unflatten(self.structure, [leaves[i] for i in sorted(leaves)])

    def describe(self, parts: tuple[Any, ...]) -> Any:
        """The tree with descriptions of its leaves."""
        leaves = {
            i: jax.ShapeDtypeStruct(self.shapes[i], part.dtype)
            for slot, part in zip(self.slots, parts, strict=True)
            for i in slot
        }
        return jax.tree.unflatten(self.structure, [leaves[i] for i in sorted(leaves)])

    def names(self, name: str) -> list[str]:
        """How messages call each part of a packed tree of that name."""
        tree = jax.tree.unflatten(self.structure, range(len(self.shapes)))
        paths = [path for path, _ in named_leaves(tree, name)]
        return [
            paths[first] + (f" and {len(others)} more, packed" if others else "")
            for first, *others in self.slots
        ]

    def cut_for(self, slices: int | None) -> "Packing":
        """The same with parts that can be cut into slices."""
        return dataclasses.replace(self, cut=slices)

    def flat(self, part: jax.Array) -> jax.Array:
        """A part as a vector that can be cut.

        Example:
            >>> Packing.of([jnp.ones((2, 3))]).cut_for(4).flat(jnp.ones((2, 3))).shape
            (8,)
        """
        size = max(part.size, 1)  # no slice may be empty
        whole = size + -size % (self.cut or 1)
        return jnp.pad(jnp.ravel(part), (0, whole - part.size))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """A packed tree, itself a tree with one leaf for each slot.

    Attributes:
        parts: vectors `[sum of sizes]`, and large leaves.
        packing: how to unpack them.
    """

    parts: tuple[Any, ...]
    packing: Packing = dataclasses.field(metadata={"static": True})

    def unpack(self) -> Any:
        """The tree again."""
        return self.packing.unpack(self.parts)


def pack(trees: Any, packing: Packing) -> Any:
    """Pack all subtrees that have the packing's structure.

    Example:
        >>> params = [jnp.ones(2), jnp.zeros(2)]
        >>> pack({"mu": params, "count": 0}, Packing.of(params))["mu"].parts
        (Array([1., 1., 0., 0.], dtype=float32),)
    """

    def packed(node: Any) -> Any:
        return packing.pack(node) if packing.fits(node) else node

    return jax.tree.map(packed, trees, is_leaf=packing.fits)


def unpack(trees: Any) -> Any:
    """Unpack all packed subtrees; without any, the same trees."""

    def whole(node: Any) -> Any:
        return node.unpack() if isinstance(node, Packed) else node

    return jax.tree.map(whole, trees, is_leaf=lambda node: isinstance(node, Packed))


def describe(trees: Any) -> Any:
    """All packed subtrees as descriptions of the leaves that are in them.

    Example:
        >>> params = [jnp.ones(2), jnp.zeros(())]
        >>> [leaf.shape for leaf in describe(pack(params, Packing.of(params)))]
        [(2,), ()]
    """

    def whole(node: Any) -> Any:
        return node.packing.describe(node.parts) if isinstance(node, Packed) else node

    return jax.tree.map(whole, trees, is_leaf=lambda node: isinstance(node, Packed))


def names(trees: Any, name: str) -> list[str]:
    """How messages call each leaf of a tree; a vector by the leaves that are in it.

    Example:
        >>> params = {"b": jnp.ones(2), "c": jnp.ones(3), "w": jnp.ones((64, 65))}
        >>> names(pack(params, Packing.of(params)), "params")
        ["params['b'] and 1 more, packed", "params['w']"]
    """
    nodes = jax.tree_util.tree_flatten_with_path(
        trees, is_leaf=lambda node: isinstance(node, Packed)
    )[0]
    found = []
    for path, node in nodes:
        path = name + jax.tree_util.keystr(path)
        found += node.packing.names(path) if isinstance(node, Packed) else [path]
    return found


@jax.jit
def _join(leaves: list[jax.Array]) -> jax.Array:
    return jnp.concatenate([jnp.ravel(leaf) for leaf in leaves])


def _pieces(part: Any, shapes: tuple[tuple[int, ...], ...]) -> list[Any]:
    """The leaves in a vector.

    Where the devices hold slices of it, joined leaves are gathered at once: cut from
    slices, each leaf would be a piece of communication to compile.
    """
    where = None if isinstance(part, Tracer) else part.sharding
    if not isinstance(where, NamedSharding) or not any(where.spec):
        return _split(part, shapes)
    assert isinstance(where.mesh, Mesh)  # of devices, for the array is one
    mesh = sharding.auto(where.mesh)
    part = sharding.regard(part, mesh)
    if len(shapes) > 1:
        part = jax.jit(_same, out_shardings=sharding.replicated(mesh))(part)
    return [sharding.regard(leaf, where.mesh) for leaf in _split(part, shapes)]


def _same(x: jax.Array) -> jax.Array:
    return x


def _split_up(vector: jax.Array, shapes: tuple[tuple[int, ...], ...]) -> list[Any]:
    ends = list(itertools.accumulate(map(math.prod, shapes)))
    pieces = jnp.split(vector, ends)  # the last one is filling, or nothing
    return [jnp.reshape(p, s) for p, s in zip(pieces[:-1], shapes, strict=True)]


_split = jax.jit(_split_up, static_argnums=1)
