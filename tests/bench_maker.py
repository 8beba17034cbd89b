"""A maker for `lockstep bench` and `lockstep scale`, as a user would write it."""

from pathlib import Path

SCRIPT = """
import jax.numpy as jnp, numpy as np, optax

def make():
    def loss(w, batch):
        return jnp.mean((batch['x'] @ w) ** 2)
    batch = {'x': np.ones((8, 3), np.float32)}
    return loss, optax.sgd(0.1), jnp.ones(3), batch
"""


def write_maker(folder: Path) -> str:
    """Write it into a folder; where it is, as the commands take it."""
    script = folder / "my_step.py"
    script.write_text(SCRIPT)
    return f"{script}:make"
