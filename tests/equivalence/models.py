"""Seven losses of the kinds that people have, each in at most 500 parameters.

Between them they return a loss in every form (one value a row, a scalar, a `Mean`),
with and without a model state, a key, and a mask of their own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

from lockstep.metrics import Mean


class Task(NamedTuple):
    """A loss and all that a run of it needs.

    Attributes:
        loss: as `make_train_step` takes it.
        params: the first parameters.
        model_state: the first model state; `None` without one.
        draw: `(rng, rows) -> batch` of host arrays.
        optimizer: of the run.
        takes_key: whether the last argument of the loss is a key.
    """

    loss: Callable[..., Any]
    params: Any
    model_state: Any
    draw: Callable[[np.random.Generator, int], Any]
    optimizer: optax.GradientTransformation
    takes_key: bool


def plain(dtype: Any, axis_name: str | None, dropout: float) -> Task:
    """An MLP in plain JAX; one value a row."""
    params = {
        "in": {"w": _normal(0, (4, 6), dtype), "b": _normal(1, (6,), dtype)},
        "out": _normal(2, (6,), dtype),
    }

    def loss(params, batch):
        hidden = jnp.tanh(batch["x"] @ params["in"]["w"] + params["in"]["b"])
        errors = (hidden @ params["out"] - batch["y"]) ** 2
        return errors, {"error": errors}

    return Task(loss, params, None, _regression(dtype), optax.adam(1e-2), False)


def flax_linen(dtype: Any, axis_name: str | None, dropout: float) -> Task:
    """BatchNorm and dropout. The first bias has no signal: BatchNorm removes it."""

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.Dense(6, dtype=dtype, param_dtype=dtype)(x)
            x = linen.BatchNorm(
                use_running_average=False,
                momentum=0.9,
                axis_name=axis_name,
                dtype=dtype,
                param_dtype=dtype,
            )(x)
            x = linen.Dropout(dropout, deterministic=False)(linen.relu(x))
            return linen.Dense(3, dtype=dtype, param_dtype=dtype)(x)

    net = Net()
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = dict(net.init(keys, jnp.ones((2, 4), dtype)))
    params = variables.pop("params")
    if dtype == jnp.float64:  # Linen starts the statistics in float32
        variables = jax.tree.map(lambda x: x.astype(dtype), variables)

    def loss(params, model_state, batch, key):
        logits, model_state = net.apply(
            {"params": params, **model_state},
            batch["x"],
            mutable=["batch_stats"],
            rngs={"dropout": key},
        )
        losses = _cross_entropy(logits, batch["label"])
        return losses, ({"error": losses}, model_state)

    optimizer = optax.sgd(0.1, momentum=0.9)
    return Task(loss, params, variables, _classes(dtype), optimizer, True)


def flax_nnx(dtype: Any, axis_name: str | None, dropout: float) -> Task:
    """LayerNorm; a scalar that leaves masked rows out by itself."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            options = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
            self.first = nnx.Linear(4, 6, **options)
            self.norm = nnx.LayerNorm(6, **options)
            self.last = nnx.Linear(6, 1, **options)

        def __call__(self, x):
            return self.last(jax.nn.gelu(self.norm(self.first(x))))[:, 0]

    graph, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, batch):
        errors = (nnx.merge(graph, params, rest)(batch["x"]) - batch["y"]) ** 2
        mask = batch.get("mask", jnp.ones(len(errors)))
        error = jnp.sum(errors * mask) / jnp.sum(mask)
        return error, {"error": error}

    optimizer = optax.sgd(3e-3, momentum=0.9, nesterov=True)
    return Task(loss, params, None, _regression(dtype), optimizer, False)


def haiku(dtype: Any, axis_name: str | None, dropout: float) -> Task:
    """Dropout over the whole batch; a `Mean`."""

    def forward(x):
        x = jax.nn.relu(hk.Linear(6)(x))
        return hk.Linear(3)(hk.dropout(hk.next_rng_key(), dropout, x))

    net = hk.transform(forward)
    params = net.init(jax.random.key(0), jnp.ones((2, 4), dtype))

    def loss(params, batch, rng):
        losses = _cross_entropy(net.apply(params, rng, batch["x"]), batch["label"])
        error = Mean.of(losses, batch.get("mask"))
        return error, {"error": error}

    return Task(loss, params, None, _classes(dtype), optax.adamw(1e-2), True)


class EquinoxNet(eqx.Module):
    """A dropout between two layers, for one row."""

    first: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, dtype, key):
        one, two = jax.random.split(key)
        self.first = eqx.nn.Linear(4, 6, dtype=dtype, key=one)
        self.dropout = eqx.nn.Dropout(0.25)
        self.last = eqx.nn.Linear(6, "scalar", dtype=dtype, key=two)

    def __call__(self, x, key):
        return self.last(self.dropout(jax.nn.silu(self.first(x)), key=key))


def equinox(dtype: Any, axis_name: str | None, dropout: float) -> Task:
    """A key in each row of the batch: dropout that is the same in both views."""
    net = EquinoxNet(dtype, jax.random.key(0))
    params, static = eqx.partition(net, eqx.is_inexact_array)

    def loss(params, batch):
        outputs = jax.vmap(eqx.combine(params, static))(batch["x"], batch["key"])
        errors = optax.huber_loss(outputs, batch["y"])
        return errors, {"error": errors}

    def draw(rng, rows):
        keys = jax.vmap(jax.random.key)(rng.integers(2**31, size=rows))
        return {**_regression(dtype)(rng, rows), "key": keys}

    return Task(loss, params, None, draw, optax.sgd(0.1, momentum=0.9), False)


def language(dtype: Any, axis_name: str | None, dropout: float) -> Task:
    """Attention over tokens of unequal number; some rows have none at all."""
    vocabulary, length, width = 11, 5, 6
    params = {
        "embed": _normal(0, (vocabulary, width), dtype),
        "attend": _normal(1, (3, width, width), dtype),
    }

    def loss(params, batch):
        x = params["embed"][batch["tokens"]]
        q, k, v = (x @ w for w in params["attend"])
        scores = q @ k.swapaxes(1, 2) / width**0.5
        scores = jnp.where(jnp.tri(length, dtype=bool), scores, -1e9)
        x = x + jax.nn.softmax(scores) @ v
        losses = _cross_entropy(x @ params["embed"].T, batch["next"])
        error = Mean.of(losses, batch["mask"])
        return error, {"error": error}

    def draw(rng, rows):
        tokens = rng.integers(vocabulary, size=(rows, length + 1)).astype(np.int32)
        lengths = rng.integers(length + 1, size=(rows, 1))
        lengths[0] = length
        return {
            "tokens": tokens[:, :-1],
            "next": tokens[:, 1:],
            "mask": np.arange(length) < lengths,
        }

    return Task(loss, params, None, draw, optax.adam(1e-2), False)


def contrastive(dtype: Any, axis_name: str | None, dropout: float) -> Task:
    """All other rows of the batch are negatives; a scalar without a mask.

    In the device view the loss has to gather the rows of the other devices.
    """
    params = {"a": _normal(0, (4, 5), dtype), "b": _normal(1, (4, 5), dtype)}

    def loss(params, batch):
        a = _unit(batch["x"] @ params["a"])
        b = _unit(batch["x2"] @ params["b"])
        all_a, all_b, own = a, b, jnp.arange(len(a))
        if axis_name is not None:
            all_a, all_b = jax.lax.all_gather((a, b), axis_name, tiled=True)
            own += len(a) * jax.lax.axis_index(axis_name)
        rows = _cross_entropy(5 * a @ all_b.T, own)
        columns = _cross_entropy(5 * b @ all_a.T, own)
        error = jnp.mean(rows + columns)
        return error, {"error": error}

    def draw(rng, rows):
        x = rng.normal(size=(rows, 4))
        x2 = x + 0.5 * rng.normal(size=(rows, 4))
        return {"x": x.astype(dtype), "x2": x2.astype(dtype)}

    return Task(loss, params, None, draw, optax.sgd(0.5, momentum=0.9), False)


TASKS: dict[str, Callable[[Any, str | None, float], Task]] = {
    "plain": plain,
    "linen": flax_linen,
    "nnx": flax_nnx,
    "haiku": haiku,
    "equinox": equinox,
    "language": language,
    "contrastive": contrastive,
}


def _normal(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    draws = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(draws / shape[-2 % len(shape)] ** 0.5, dtype)


def _regression(dtype: Any) -> Callable[..., Any]:
    def draw(rng, rows):
        x = rng.normal(size=(rows, 4))
        y = 2 + np.sin(x.sum(1))  # far from what the net says: no loss is all rounding
        return {"x": x.astype(dtype), "y": y.astype(dtype)}

    return draw


def _classes(dtype: Any) -> Callable[..., Any]:
    def draw(rng, rows):
        x = rng.normal(size=(rows, 4))
        label = (x[:, 0] > 0).astype(np.int32) + (x[:, 1] > 0)
        return {"x": x.astype(dtype), "label": label}

    return draw


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def _unit(x: jax.Array) -> jax.Array:
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)
