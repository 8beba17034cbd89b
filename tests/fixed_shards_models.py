"""Small models with dropout, their batches, and their steps with fixed shards."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lockstep as ls
from lockstep.step import make_train_step
from lockstep.tree import is_key

STEPS = 4


def drop(key, x):
    if key is None:
        return x
    kept = jax.random.bernoulli(key, 0.8, x.shape)
    return jnp.where(kept, x / 0.8, 0)


def mlp_loss(params, batch, key):
    h = jnp.tanh(batch["x"] @ params["a"]["w"] + params["a"]["b"])
    error = (drop(key, h) @ params["out"] - batch["y"]) ** 2
    return error, {"large": ls.Mean.of(error > 1, batch.get("mask"))}


def mlp_batches(rows=32, last=32):
    rng = np.random.default_rng(0)
    sizes = [rows] * (STEPS - 1) + [last]
    xs = [rng.normal(size=(n, 4)).astype(np.float32) for n in sizes]
    return [{"x": x, "y": np.sin(x.sum(1))} for x in xs]


def random_params(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(size=s, scale=s[0] ** -0.5), jnp.float32)
        for name, s in shapes.items()
    }


def mlp_params():
    layer = random_params({"w": (4, 8), "b": (8,)})
    return {"a": layer, **random_params({"out": (8,)}, seed=1)}


def cnn_loss(params, batch, key):
    h = jax.lax.conv_general_dilated(
        batch["x"],
        params["conv"],
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    mean, var = h.mean((1, 2), keepdims=True), h.var((1, 2), keepdims=True)
    h = drop(key, jax.nn.swish((h - mean) / jnp.sqrt(var + 1e-5)))
    logits = h.mean((1, 2)) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


def cnn(rows=16, last=16):
    rng = np.random.default_rng(1)
    sizes = [rows] * (STEPS - 1) + [last]
    batches = [
        {
            "x": rng.normal(size=(n, 6, 6, 3)).astype(np.float32),
            "y": rng.integers(0, 5, n),
        }
        for n in sizes
    ]
    return cnn_loss, random_params({"conv": (3, 3, 3, 8), "out": (8, 5)}), batches


WIDTH, HEADS, LENGTH, WORDS = 16, 2, 8, 32


def transformer_loss(params, batch, key):
    tokens, keys = batch["x"], [None] * 2 if key is None else jax.random.split(key)
    h = params["words"][tokens] + params["places"]
    heads = tokens.shape + (HEADS, WIDTH // HEADS)
    q, k, v = jnp.split(normalised(h) @ params["qkv"], 3, -1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q.reshape(heads), k.reshape(heads))
    seen = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores / np.sqrt(WIDTH // HEADS), -1e9))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v.reshape(heads))
    h = h + drop(keys[0], mixed.reshape(h.shape) @ params["o"])
    h = h + drop(keys[1], jax.nn.gelu(normalised(h) @ params["up"]) @ params["down"])
    logits = h @ params["words"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits[:, :-1], tokens[:, 1:]
    )
    return losses.mean(-1)


def attention(params, batch):
    return transformer_loss(params, batch, None)


def normalised(x):
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-5)


def transformer(rows=32, last=32):
    shapes = {
        "words": (WORDS, WIDTH),
        "places": (LENGTH, WIDTH),
        "qkv": (WIDTH, 3 * WIDTH),
        "o": (WIDTH, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
    }
    rng = np.random.default_rng(2)
    sizes = [rows] * (STEPS - 1) + [last]
    batches = [{"x": rng.integers(0, WORDS, (n, LENGTH))} for n in sizes]
    return transformer_loss, random_params(shapes), batches


def make(loss, *, shards=8, optimizer=None, **options):
    return make_train_step(
        loss,
        optimizer or optax.adamw(3e-3),
        axis_name="data",
        fixed_shards=shards,
        **options,
    )


def start(step, params, **state):
    key = jax.random.key(3) if step.takes_key else None
    return step.init(params, key=key, **state)


def bits(tree):
    """Every leaf of a tree as NumPy, keys as their numbers."""
    tree = ls.to_host(tree)
    return jax.tree.map(
        lambda x: jax.random.key_data(x) if is_key(x) else np.asarray(x), tree
    )


def digest(tree):
    """A short text that differs where any bit of a tree does."""
    whole = hashlib.sha256()
    for leaf in jax.tree.leaves(bits(tree)):
        whole.update(leaf.tobytes())
    return whole.hexdigest()
