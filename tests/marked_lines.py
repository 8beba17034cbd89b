"""Code whose faulty lines are marked `# <-`: a rule finds these lines and no others."""

import textwrap
from pathlib import Path

from lockstep.compat.check.checker import check_module
from lockstep.compat.check.findings import Finding
from lockstep.compat.check.module import Module
from lockstep.compat.check.sources import python_source

IMPORTS = """
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from functools import partial
from jax import lax
"""


def findings_in(text: str, rule: str = "") -> list[Finding]:
    """What is found in a module, in all or of one rule."""
    module = Module(python_source(Path("train.py"), text))
    assert not module.source.unread, module.source.unread
    return [f for f in check_module(module) if rule in ("", f.rule)]


def assert_marked(rule: str, text: str) -> None:
    """The lines that a rule names are those that end in `# <-`."""
    text = IMPORTS + textwrap.dedent(text)
    lines = text.split("\n")
    marked = {n for n, line in enumerate(lines, 1) if line.rstrip().endswith("# <-")}
    found = {f.line for f in findings_in(text, rule)}
    said = [f"{n}: {lines[n - 1].strip()}" for n in sorted(found ^ marked)]
    assert found == marked, f"{rule} differs on {said}"
