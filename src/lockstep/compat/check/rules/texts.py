"""What is written beside the code: install commands, comments, prose."""

import ast
import re
from collections.abc import Iterator

from lockstep.compat.check.findings import Level
from lockstep.compat.check.module import Module, Remarks, rule

_DEAD_EXTRA = re.compile(
    r"jax\[(?:[\w-]+,\s*)*(cuda(?:\d+[_-](?:pip|cudnn\w*)|1[01]\w*))\b"
)
_INSTALL = re.compile(r"\bpip3? install\b")

_SENTENCE = re.compile(r"[^.!?\n]+(?:\.\d[^.!?\n]*)*(?:\n(?!\s*\n)[^.!?\n]+)*")
_KEPT = (
    r"(preserv|retain|keeps?\b|kept\b|(no longer|not|n't|never) "
    r"(\w+ )?(remov|squeez|strip|dropp?|reduc))"
)
_AXIS = r"((device|leading|mapped|first) (axis|dimension)|rank)"
_CLAIMS = (
    re.compile(r"pmap_no_rank_reduction"),
    re.compile(rf"{_AXIS}[^.]{{0,40}}{_KEPT}", re.IGNORECASE),
    re.compile(rf"{_KEPT}[^.]{{0,40}}{_AXIS}", re.IGNORECASE),
    re.compile(r"same rank as (the|its|their) input", re.IGNORECASE),
)
_OF_OTHERS = re.compile("shard_map|per_device|vmap", re.IGNORECASE)


@rule(Level.ERROR)
def dead_extra(module: Module) -> Remarks:
    """Finds `jax[cuda12_pip]` and the like, with which pip installs a JAX for CPUs."""
    for line, text in _install_texts(module):
        found = _DEAD_EXTRA.search(text)
        if found:
            yield (
                line,
                f"jax has no extra {found[1]} any more: pip warns and installs JAX "
                "without CUDA, which then sees 1 CPU device: write jax[cuda12] or "
                "jax[cuda13]",
            )


def _install_texts(module: Module) -> Iterator[tuple[int | ast.AST, str]]:
    yield from module.source.commands
    for line, text in module.source.prose:
        for offset, part in enumerate(text.split("\n")):
            if _INSTALL.search(part):
                yield line + offset, part
    for node in module.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.lstrip().startswith("jax["):
                yield node, node.value


@rule(Level.WARNING)
def rank_claim(module: Module) -> Remarks:
    """Finds texts that say a function under pmap sees arrays with the device axis."""
    for line, text in module.source.prose:
        if "pmap" not in text:
            continue
        for start in _claims(text):
            yield (
                line + text.count("\n", 0, start),
                "this says that a function under pmap keeps the device axis. It does "
                "not, on JAX 0.10 as on 0.12: an input [N, rows, ...] is [rows, ...] "
                "inside; only lockstep.per_device and jax.shard_map see the axis",
            )


def _claims(text: str) -> Iterator[int]:
    """Where sentences claim it, unless they speak of something else as well."""
    for sentence in _SENTENCE.finditer(text):
        found = filter(None, (claim.search(sentence[0]) for claim in _CLAIMS))
        if not _OF_OTHERS.search(sentence[0]):
            yield from (sentence.start() + claim.start() for claim in found)
