"""The trainings of the benchmark table, in plain JAX: `NAME()` makes a `Workload`.

lockstep bench benchmarks/workloads.py:lm
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from lockstep.bench.workload import Workload

CLASSES = 10


def mlp():
    """6 leaves, 670 thousand parameters, 256 rows."""
    return _classifier([784, 512, 512, CLASSES], rows=256, activate=jax.nn.relu)


def deep():
    """202 leaves, 40 thousand parameters: 100 layers of width 16."""
    return _classifier([784, *[16] * 100, CLASSES], rows=256, activate=jnp.tanh)


def wide():
    """2 leaves, 8 million parameters."""
    rng = np.random.default_rng(0)
    params = [_normal(rng, 2048, 2048) for _ in range(2)]

    def loss(params, batch):
        hidden = jnp.tanh(batch["x"] @ params[0])
        return jnp.mean((hidden @ params[1] - batch["y"]) ** 2)

    batch = {name: _normal(rng, 64, 2048) for name in ("x", "y")}
    return Workload(loss, optax.adamw(1e-3), params, batch)


def cnn():
    """Two convolutions with BatchNorm over the global batch; 28 x 28 images."""
    rng = np.random.default_rng(0)
    params = {
        "conv": [0.2 * _normal(rng, 3, 3, 1, 16), 0.05 * _normal(rng, 3, 3, 16, 32)],
        "scale": [jnp.ones(16), jnp.ones(32)],
        "shift": [jnp.zeros(16), jnp.zeros(32)],
        "out": (0.1 * _normal(rng, 32 * 49, CLASSES), jnp.zeros(CLASSES)),
    }
    statistics = [(jnp.zeros(n), jnp.ones(n)) for n in (16, 32)]

    def loss(params, statistics, batch, average):
        x, moved = batch["x"], []
        layers = zip(
            *(params[name] for name in ("conv", "scale", "shift")),
            statistics,
            strict=True,
        )
        for kernel, scale, shift, (mean, variance) in layers:
            x = lax.conv_general_dilated(
                x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            now, square = average((x.mean((0, 1, 2)), (x**2).mean((0, 1, 2))))
            spread = square - now**2
            moved.append((0.9 * mean + 0.1 * now, 0.9 * variance + 0.1 * spread))
            x = jax.nn.relu((x - now) * lax.rsqrt(spread + 1e-5) * scale + shift)
        weights, biases = params["out"]
        logits = x.reshape(len(x), -1) @ weights + biases
        return _cross_entropy(logits, batch["y"]), ({}, moved)

    def global_loss(params, statistics, batch):
        return loss(params, statistics, batch, lambda tree: tree)

    def device_loss(params, statistics, batch):
        return loss(params, statistics, batch, lambda tree: lax.pmean(tree, "data"))

    batch = {
        "x": _normal(rng, 128, 28, 28, 1),
        "y": rng.integers(0, CLASSES, 128).astype(np.int32),
    }
    optimizer = optax.adamw(1e-3)
    return Workload(global_loss, optimizer, params, batch, statistics, device_loss)


def lm(layers=4, width=128, length=128, words=256, heads=4, rows=16):
    """A transformer: 69 leaves, 4 layers, width 128, sequences of 128."""
    rng = np.random.default_rng(0)

    def dense(n, m):
        return _normal(rng, n, m) / n**0.5, jnp.zeros(m)

    params = {
        "embed": 0.02 * _normal(rng, words, width),
        "place": 0.02 * _normal(rng, length, width),
        "layers": [
            {
                "norms": [(jnp.ones(width), jnp.zeros(width)) for _ in range(2)],
                **{name: dense(width, width) for name in ("q", "k", "v", "o")},
                "up": dense(width, 4 * width),
                "down": dense(4 * width, width),
            }
            for _ in range(layers)
        ],
        "norm": (jnp.ones(width), jnp.zeros(width)),
        "out": _normal(rng, width, words) / width**0.5,
    }

    def norm(x, scale_shift):
        x = x - x.mean(-1, keepdims=True)
        x = x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5)
        return x * scale_shift[0] + scale_shift[1]

    def linear(x, weights):
        return x @ weights[0] + weights[1]

    def attend(x, layer):
        def split(name):
            return linear(x, layer[name]).reshape(*x.shape[:2], heads, -1)

        mixed = jax.nn.dot_product_attention(
            split("q"), split("k"), split("v"), is_causal=True
        )
        return linear(mixed.reshape(x.shape), layer["o"])

    def loss(params, batch):
        x = params["embed"][batch["tokens"]] + params["place"]
        for layer in params["layers"]:
            x = x + attend(norm(x, layer["norms"][0]), layer)
            hidden = jax.nn.gelu(linear(norm(x, layer["norms"][1]), layer["up"]))
            x = x + linear(hidden, layer["down"])
        logits = norm(x, params["norm"]) @ params["out"]
        return _cross_entropy(logits[:, :-1], batch["tokens"][:, 1:])

    batch = {"tokens": rng.integers(0, words, (rows, length)).astype(np.int32)}
    return Workload(loss, optax.adamw(1e-3), params, batch)


WORKLOADS = {make.__name__: make for make in (mlp, deep, cnn, lm, wide)}


def _classifier(widths, rows, activate):
    rng = np.random.default_rng(0)
    params = [
        (_normal(rng, n, m) / n**0.5, jnp.zeros(m))
        for n, m in zip(widths, widths[1:], strict=False)
    ]

    def loss(params, batch):
        x = batch["x"]
        for weights, biases in params[:-1]:
            x = activate(x @ weights + biases)
        return _cross_entropy(x @ params[-1][0] + params[-1][1], batch["y"])

    batch = {
        "x": _normal(rng, rows, widths[0]),
        "y": rng.integers(0, CLASSES, rows).astype(np.int32),
    }
    return Workload(loss, optax.adamw(1e-3), params, batch)


def _cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)
