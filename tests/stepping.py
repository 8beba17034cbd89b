"""Train steps for tests: made in either view, and run over n devices by plain JAX."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from conftest import make_mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lockstep.step import make_train_step

VIEWS = ("global", "device")


def on_mesh(step, n: int):
    """The step, compiled over n devices in its own view, by plain JAX."""
    mesh = make_mesh_of(n)
    if step.view == "global":
        rows = NamedSharding(mesh, P("data"))
        compiled = jax.jit(step)
        return lambda state, batch, *key: compiled(
            jax.device_put(state, NamedSharding(mesh, P())),
            jax.device_put(batch, rows),
            *key,
        )
    mapped = {}

    def run(state, batch, *key):
        specs = (P(), P("data"), *(P() for _ in key))
        if len(key) not in mapped:
            mapped[len(key)] = jax.jit(
                jax.shard_map(
                    step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False
                )
            )
        return mapped[len(key)](state, batch, *key)

    return run


def make(loss, view="global", optimizer=None, **options):
    axis = {"global": None, "device": "data"}[view]
    optimizer = optimizer or optax.sgd(1.0)
    return make_train_step(loss, optimizer, axis_name=axis, **options)


def gradient(loss, batch, view="global", n=1, w=1.0, **options):
    """The gradient by w and the metrics of one step of plain SGD with rate 1."""
    step = make(loss, view, **options)
    state = step.init({"w": jnp.asarray(w)})
    new, metrics = on_mesh(step, n)(state, batch)
    return float(w - new.params["w"]), metrics


def mlp_params(dtype: Any = jnp.float32):
    k1, k2 = jax.random.split(jax.random.key(1))
    return {
        "a": {
            "w": 0.5 * jax.random.normal(k1, (4, 8), dtype),
            "b": jnp.zeros(8, dtype),
        },
        "out": jax.random.normal(k2, (8,), dtype),
    }


def mlp(params, x):
    return jnp.tanh(x @ params["a"]["w"] + params["a"]["b"]) @ params["out"]


def batch_of(rows: int, dtype: Any = np.float32):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 4)).astype(dtype)
    return {"x": x, "y": np.sin(x.sum(1))}


def square_rows(params, batch):
    return (mlp(params, batch["x"]) - batch["y"]) ** 2


def square_mean(params, batch):
    return jnp.mean(square_rows(params, batch))


def plain_step(loss, optimizer):
    """What a person writes by hand for one device."""

    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return jax.jit(step)
