"""Read the collectives out of a compiled program's text.

The text is that of `jax.stages.Compiled.as_text()`: named computations of one
instruction a line, before them the tables of source lines.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

from lockstep.debug.communication.source_lines import SourceLines

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
    "ragged-all-to-all",
    "collective-broadcast",
)
_COLLECTIVE = re.compile(
    rf"= (?P<result>.*?) (?P<kind>{'|'.join(sorted(KINDS, key=len, reverse=True))})"
    r"(?P<start>-start)?\("
)
_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) \(.*\{\s*$")
_CALL = re.compile(
    r"(?P<how>calls|to_apply|body|condition|branch_computations|called_computations)="
    r"(?:\{(?P<many>[^}]*)\}|%?(?P<one>[\w.-]+))"
)
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_SHAPE = re.compile(r"\b(?P<kind>pred|token|[a-z]+\d+\w*)\[(?P<sizes>[\d,]*)\]")
_GROUPS = re.compile(
    r"(?:replica_groups|source_target_pairs)="
    r"(\{\{.*?\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|mesh\[.*?\] ?\{.*?\})"
)
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_NAME = re.compile(r'op_name="([^"]*)"')
_WORDS = {"f": "float", "s": "int", "u": "uint", "c": "complex", "bf": "bfloat"}


@dataclasses.dataclass(frozen=True)
class Array:
    """One array in the text: its JAX dtype, its shape on one device, its bytes."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    def __str__(self) -> str:
        """As `float32[4,8]`."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One collective instruction.

    Attributes:
        kind: one of `KINDS`.
        results: what arrives on each device.
        groups: which devices take part together, as the text has it.
        rounds: how often a step runs it, as far as the text tells.
        in_loop: whether it stands in the body of a loop.
        rounds_known: whether the length of all loops around it is in the text.
        source: `file:line (function)`, `None` where the text has none.
        operation: the operation of JAX that it came from, as `psum`.
    """

    kind: str
    results: tuple[Array, ...]
    groups: str
    rounds: int
    in_loop: bool
    rounds_known: bool
    source: str | None
    operation: str


@dataclasses.dataclass
class _Computation:
    """The lines of one computation, and who calls it how often."""

    lines: list[str] = dataclasses.field(default_factory=list)
    callers: list[tuple[str, int | None]] = dataclasses.field(default_factory=list)


def read_collectives(text: str) -> list[Instruction]:
    """All collectives of a compiled program, in the order of the text."""
    lines, found = SourceLines(text), []
    computations, entry = _computations(text)
    for name, computation in computations.items():
        for line in computation.lines:
            match = _COLLECTIVE.search(line)
            if match:
                rounds, in_loop, known = _rounds(name, entry, computations)
                found.append(
                    Instruction(
                        kind=match["kind"],
                        results=_results(match),
                        groups=_first(_GROUPS, line) or "{}",
                        rounds=rounds,
                        in_loop=in_loop,
                        rounds_known=known,
                        source=lines.of(_first(_FRAME, line)),
                        operation=_first(_NAME, line).rpartition("/")[2],
                    )
                )
    return found


def read_arrays(text: str) -> Iterator[Array]:
    """The arrays in the text of a type.

    Example:
        >>> [str(a) for a in read_arrays("(f32[8]{0}, bf16[4,8]{1,0}, pred[])")]
        ['float32[8]', 'bfloat16[4,8]', 'bool[]']
    """
    for match in _SHAPE.finditer(text):
        kind = match["kind"]
        shape = tuple(int(n) for n in match["sizes"].split(",") if n)
        letters, digits = re.fullmatch(r"([a-z]+)(\d*)\w*", kind).groups()  # type: ignore[union-attr]
        bits = int(digits or {"pred": 8}.get(kind, 0))
        plain = letters in _WORDS and kind == letters + digits
        dtype = _WORDS[letters] + digits if plain else {"pred": "bool"}.get(kind, kind)
        yield Array(dtype, shape, math.ceil(math.prod(shape) * bits / 8))


def _results(match: re.Match[str]) -> tuple[Array, ...]:
    """What an instruction leaves on a device; a `-start` also lists its operands."""
    arrays = tuple(read_arrays(match["result"]))
    if match["start"] and match["kind"] == "all-gather":
        return arrays[len(arrays) // 2 :]
    if match["start"] and match["kind"] == "collective-permute":
        return arrays[1:2] or arrays
    return arrays


def _computations(text: str) -> tuple[dict[str, _Computation], str]:
    """All computations by name, and the name of the one that runs first."""
    found: dict[str, _Computation] = {}
    entry, current = "", ""
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = header["name"]
            found.setdefault(current, _Computation())
            entry = current if header["entry"] else entry
        elif current:
            found[current].lines.append(line)
            _note_calls(line, current, found)
    return found, entry


def _note_calls(line: str, caller: str, found: dict[str, _Computation]) -> None:
    trips = _TRIPS.search(line)
    for match in _CALL.finditer(line):
        times: int | None = 1
        if match["how"] in ("body", "condition"):
            times = int(trips[1]) if trips else None
        for name in (match["many"] or match["one"] or "").split(","):
            name = name.strip().removeprefix("%")
            found.setdefault(name, _Computation()).callers.append((caller, times))


def _rounds(
    name: str, entry: str, computations: dict[str, _Computation]
) -> tuple[int, bool, bool]:
    """How often a computation runs, whether in a loop, and whether that is known."""
    if name == entry:
        return 1, False, True
    total, in_loop, known = 0, False, True
    for caller, times in computations[name].callers:
        rounds, inside, sure = _rounds(caller, entry, computations)
        total += rounds * (1 if times is None else times)
        in_loop = in_loop or inside or times != 1
        known = known and sure and times is not None
    return max(total, 1), in_loop, known


def _first(pattern: re.Pattern[str], line: str) -> str:
    match = pattern.search(line)
    return match[1] if match else ""
