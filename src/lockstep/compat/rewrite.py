"""Rewrites renamed names in the text of a module, and leaves the rest of it alone.

Needs LibCST (the extra `migrate`), so nothing imports this file before it is used.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import libcst as cst
from libcst import matchers
from libcst.codemod import CodemodContext
from libcst.codemod.visitors import AddImportsVisitor
from libcst.helpers import get_full_name_for_node_or_raise as full_name
from libcst.metadata import MetadataWrapper, PositionProvider, QualifiedNameProvider

from lockstep.compat.names import NAMES, look_up

Places = set[tuple[int, str]]
"""The names to rewrite: the line of each, and its dotted name in the table."""


def rewrite(text: str, places: Places, clips: set[int]) -> str:
    """The text with the names at `places` in today's spelling.

    Args:
        text: a module.
        places: which names, from the checker.
        clips: the lines of the calls of `jnp.clip` with `a_min` and `a_max`.
    """
    if not places and not clips:
        return text
    context = CodemodContext()
    module = cst.parse_module(text)
    renamer = _Renamer(places, clips)
    changed = MetadataWrapper(module).visit(renamer)
    for missing in renamer.needed - _imported(changed):
        AddImportsVisitor.add_needed_import(context, missing)
    return AddImportsVisitor(context).transform_module(changed).code


def _imported(module: cst.Module) -> set[str]:
    """What `import a.b` at the top of a module makes reachable: `a` and `a.b`."""
    lines = [s for s in module.body if isinstance(s, cst.SimpleStatementLine)]
    imports = [s for line in lines for s in line.body if isinstance(s, cst.Import)]
    names = [a.evaluated_name for i in imports for a in i.names if a.asname is None]
    parts = [name.split(".") for name in names]
    return {".".join(p[:n]) for p in parts for n in range(1, len(p) + 1)}


def _module_of(new: str) -> str:
    """The module to import for a dotted name: `import jax` loads most of JAX."""
    parts = new.split(".")
    loaded = parts[0] != "jax" or parts[1] not in ("extend", "example_libraries")
    return parts[0] if loaded else ".".join(parts[:3])


class _Renamer(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (QualifiedNameProvider, PositionProvider)

    def __init__(self, places: Places, clips: set[int]):
        super().__init__()
        self.needed: set[str] = set()
        self._places = places
        self._clips = clips

    # --- expressions ---

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        """Rewrites `jax.tree_map` where it stands."""
        old = self._qualified(original_node)
        row = NAMES.get(old)
        if row is None or not row.rename or not self._is_wanted(original_node, old):
            return updated_node
        new = self._spelled(original_node, row.rename)
        return new.with_changes(lpar=updated_node.lpar, rpar=updated_node.rpar)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        """Rewrites the keywords of `jnp.clip`."""
        if self._qualified(original_node.func) != "jax.numpy.clip":
            return updated_node
        if self._line(original_node) not in self._clips:
            return updated_node
        today = {"a_min": "min", "a_max": "max"}
        args = [
            arg.with_changes(
                keyword=cst.Name(today.get(arg.keyword.value, arg.keyword.value))
            )
            if arg.keyword
            else arg
            for arg in updated_node.args
        ]
        return updated_node.with_changes(args=args)

    def _spelled(self, node: cst.Attribute, new: str) -> Any:
        """`new` through the name that `node` starts with, or through `jax`."""
        root: cst.BaseExpression = node
        while isinstance(root, cst.Attribute):
            root = root.value
        base = self._qualified(root)
        home = _module_of(new)
        through_root = isinstance(root, cst.Name) and new.startswith(f"{base}.")
        if not through_root or not f"{base}.".startswith(f"{home}."):
            self.needed.add(home)
        if isinstance(root, cst.Name) and through_root:
            new = root.value + new.removeprefix(base)
        return cst.parse_expression(new)

    # --- imports ---

    def leave_SimpleStatementLine(
        self,
        original_node: cst.SimpleStatementLine,
        updated_node: cst.SimpleStatementLine,
    ) -> Any:
        """Rewrites the imports of a line; each on a line of its own where it can be."""
        old, new = list(updated_node.body), self._body(original_node, updated_node)
        if new == old:
            return updated_node
        above = [*updated_node.leading_lines, *_lost_comments(original_node.body, new)]
        if len(old) > 1:  # they stay on the line of the others
            return updated_node.with_changes(body=new, leading_lines=above)
        first, *others = new
        return cst.FlattenSentinel(
            [
                updated_node.with_changes(body=[first], leading_lines=above),
                *(cst.SimpleStatementLine(body=[other]) for other in others),
            ]
        )

    def leave_SimpleStatementSuite(
        self,
        original_node: cst.SimpleStatementSuite,
        updated_node: cst.SimpleStatementSuite,
    ) -> cst.SimpleStatementSuite:
        """Rewrites the imports of a body that stands behind its colon."""
        return updated_node.with_changes(body=self._body(original_node, updated_node))

    def _body(self, original_node: Any, updated_node: Any) -> list[Any]:
        line = self._line(original_node)
        pairs = zip(original_node.body, updated_node.body, strict=True)
        return [part for pair in pairs for part in self._statement(*pair, line)]

    def _statement(
        self, old: cst.BaseSmallStatement, now: cst.BaseSmallStatement, line: int
    ) -> Iterator[cst.BaseSmallStatement]:
        """A statement in today's spelling: several, if its names have several homes."""
        new: list[Any] = [old]
        if isinstance(old, cst.ImportFrom):
            new = list(self._import_from(old, line))
        elif isinstance(old, cst.Import):
            new = [self._import(old, line)]
        if new == [old]:
            yield now
            return
        *first, last = new
        default = cst.MaybeSentinel.DEFAULT
        yield from (part.with_changes(semicolon=default) for part in first)
        yield last.with_changes(semicolon=old.semicolon)

    def _import(self, statement: cst.Import, line: int) -> cst.Import:
        names = []
        for alias in statement.names:
            old = full_name(alias.name)
            new = self._today(old, line)
            if old == "jax.config" and (line, "jax.config.config") in self._places:
                new = "jax"
            names.append(alias.with_changes(name=_dotted(new)) if new else alias)
        same = all(a is b for a, b in zip(names, statement.names, strict=True))
        return statement if same else statement.with_changes(names=names)

    def _import_from(
        self, statement: cst.ImportFrom, line: int
    ) -> Iterator[cst.ImportFrom]:
        """The statement without its renamed names, and one for each of their homes."""
        if isinstance(statement.names, cst.ImportStar) or statement.module is None:
            yield statement
            return
        module = full_name(statement.module)
        kept, moved = [], {}
        for alias in statement.names:
            name = cst.ensure_type(alias.name, cst.Name).value
            new = self._today(f"{module}.{name}", line)
            if new is None:
                kept.append(alias)
            else:
                home, _, new_name = _importable(new).rpartition(".")
                moved.setdefault(home, []).append(_alias(new_name, alias, name))
        if kept and not moved:
            yield statement
            return
        if kept:
            comma = _last_comma(kept[-1], statement.names[-1])
            last = kept[-1].with_changes(comma=comma)
            yield statement.with_changes(names=[*kept[:-1], last])
        for home, aliases in moved.items():
            yield cst.ImportFrom(module=_dotted(home), names=_joined(aliases))

    def _today(self, dotted: str, line: int) -> str | None:
        row = look_up(dotted)
        if row is None or not row.rename or (line, row.old) not in self._places:
            return None
        return row.rename + dotted.removeprefix(row.old)

    # --- what the checker said ---

    def _is_wanted(self, node: cst.CSTNode, old: str) -> bool:
        return (self._line(node), old) in self._places

    def _line(self, node: cst.CSTNode) -> int:
        position: Any = self.get_metadata(PositionProvider, node)
        return position.start.line

    def _qualified(self, node: cst.CSTNode) -> str:
        names = self.get_metadata(QualifiedNameProvider, node, set())
        found = {n.name for n in names} if names else set()  # pyright: ignore
        return found.pop() if len(found) == 1 else ""


def _last_comma(kept: cst.ImportAlias, last: cst.ImportAlias) -> Any:
    """The comma that ended the names, with the comment of a name that is kept."""
    own, end = (getattr(n.comma, "whitespace_after", None) for n in (kept, last))
    lines = cst.ParenthesizedWhitespace
    if not isinstance(own, lines) or not isinstance(end, lines):
        return last.comma
    end = end.with_changes(first_line=own.first_line, empty_lines=own.empty_lines)
    return cst.Comma(whitespace_after=end)


def _lost_comments(
    old: Sequence[cst.CSTNode], new: Sequence[cst.CSTNode]
) -> list[cst.EmptyLine]:
    """The comments beside names that moved, as lines of their own."""
    before, after = (
        [c for node in nodes for c in matchers.findall(node, matchers.Comment())]
        for nodes in (old, new)
    )
    kept = set(map(id, after))
    comments = [cst.ensure_type(c, cst.Comment) for c in before if id(c) not in kept]
    return [cst.EmptyLine(comment=comment) for comment in comments]


def _dotted(name: str) -> Any:
    return cst.parse_expression(name)


def _importable(new: str) -> str:
    """`jax.tree.map` is better imported as `tree_map`, from `jax.tree_util`."""
    head, _, name = new.rpartition(".")
    return f"jax.tree_util.tree_{name}" if head == "jax.tree" else new


def _alias(new: str, alias: cst.ImportAlias, old: str) -> cst.ImportAlias:
    """The imported name, still called in this module what it was called."""
    local = cst.ensure_type(alias.asname.name, cst.Name).value if alias.asname else old
    asname = None if local == new else cst.AsName(cst.Name(local))
    return cst.ImportAlias(cst.Name(new), asname)


def _joined(aliases: Sequence[cst.ImportAlias]) -> list[cst.ImportAlias]:
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    with_commas = [alias.with_changes(comma=comma) for alias in aliases[:-1]]
    return [*with_commas, aliases[-1]]
