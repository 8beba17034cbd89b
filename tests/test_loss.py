"""Which arguments a loss takes, and in which forms it answers."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from stepping import make, mlp_params

from lockstep.metrics import Mean
from lockstep.step import make_train_step
from lockstep.step.loss import Loss, describe


def plain(params, batch): ...
def key_by_place(params, batch, seed): ...
def key_by_name(params, batch, alpha=0.1, rng=None): ...
def key_by_keyword(params, batch, *, key): ...
def no_key(params, batch, alpha=0.1, *, beta=2.0): ...
def stateful(params, model_state, batch): ...
def stateful_key(params, model_state, batch, key): ...


class Callable:
    def __call__(self, params, batch, key=None): ...


@pytest.mark.parametrize(
    ("fn", "model_state", "key", "by_keyword"),
    [
        (plain, False, None, False),
        (key_by_place, False, "seed", False),
        (key_by_name, False, "rng", True),
        (key_by_keyword, False, "key", True),
        (no_key, False, None, False),
        (stateful, True, None, False),
        (stateful_key, True, "key", False),
        (Callable(), False, "key", False),
        (functools.partial(key_by_name, alpha=2.0), False, "rng", True),
        (functools.partial(stateful_key, model_state=0, key=1), False, "key", True),
    ],
)
def test_the_key_is_read_from_the_signature(fn, model_state, key, by_keyword):
    if isinstance(fn, functools.partial) and fn.func is stateful_key:
        with pytest.raises(TypeError, match="takes 1 arguments by place"):
            Loss.read(fn, model_state)
        return
    loss = Loss.read(fn, model_state)
    assert (loss.key, loss.by_keyword) == (key, by_keyword)


def test_the_key_arrives_where_it_belongs():
    def by_name(params, batch, alpha=0.1, rng=None):
        return (params, batch, alpha, rng), {}

    def by_place(params, model_state, batch, key):
        return (params, model_state, batch, key), ({}, "new")

    assert Loss.read(by_name)("p", None, "b", "k") == (("p", "b", 0.1, "k"), {}, None)
    value, metrics, state = Loss.read(by_place, True)("p", "s", "b", "k")
    assert (value, metrics, state) == (("p", "s", "b", "k"), {}, "new")


@pytest.mark.parametrize(
    ("fn", "model_state", "why"),
    [
        (lambda params: 0.0, False, "it takes 1 arguments by place"),
        (lambda params, batch: 0.0, True, "it takes 2 arguments by place"),
        (lambda *args: 0.0, False, r"\*args may or may not take a key"),
        (lambda params, batch, *rest: 0.0, False, r"\*args may or may not"),
        (lambda params, batch, a, b: 0.0, False, "'a' and 'b' cannot both be the key"),
        (lambda params, batch, *, train: 0.0, False, "'train' has no value"),
        (max, False, r"\*args|signature cannot be read"),
    ],
)
def test_an_unclear_signature_is_refused(fn, model_state, why):
    first = "params, model_state, batch" if model_state else "params, batch"
    with pytest.raises(TypeError, match=why) as error:
        Loss.read(fn, model_state)
    assert f"lambda {first}, key: ..." in str(error.value)


def test_what_is_no_function_is_refused():
    anything: Any = 3.0
    with pytest.raises(TypeError, match="weak float.*not a function"):
        make_train_step(anything, optax.sgd(1.0))


def returning(value, **options):
    """One step of a loss that returns this."""

    def plain(params, batch):
        return value(params)

    def stateful(params, model_state, batch):
        return value(params)

    has_state = options.get("model_state", False)
    step = make(stateful if has_state else plain, **options)
    state = {"n": jnp.zeros(())} if has_state else None
    return step(step.init(mlp_params(), model_state=state), {"x": np.ones((4, 3))})


@pytest.mark.parametrize(
    ("value", "error", "found"),
    [
        (
            lambda p: None,
            ValueError,
            "the loss returned NoneType for a batch of 4 rows",
        ),
        (lambda p: p["out"], ValueError, r"float32\[8\] for .* 4 rows.*shape \[4\]"),
        (lambda p: jnp.ones((4, 3)), ValueError, r"float32\[4,3\].*Mean.of"),
        (lambda p: Mean(jnp.ones(4), 4), ValueError, r"Mean\(float32\[4\], int\)"),
        (lambda p: [1.0, {}], ValueError, "the loss returned list"),
        (lambda p: jnp.int32(3), TypeError, r"the loss is int32\[\]; .* needs a float"),
        (lambda p: Mean(3, 4), TypeError, r"Mean\(int, int\); a gradient needs"),
        (
            lambda p: (1.0, {}, 2),
            TypeError,
            r"or \(loss, metrics\).*\(float, dict, int",
        ),
        (lambda p: (1.0, 2.0), TypeError, "must be a dict of numbers, not float"),
        (lambda p: (1.0, ({}, p)), TypeError, r"\(dict, dict\); .*model_state=True"),
    ],
)
def test_another_form_is_named(value, error, found):
    with pytest.raises(error, match=found):
        returning(value)


@pytest.mark.parametrize(
    "value", [lambda p: 1.0, lambda p: (1.0, {}), lambda p: (1.0, ({}, 1, 2))]
)
def test_another_form_with_a_model_state_is_named(value):
    with pytest.raises(TypeError, match=r"loss, \(metrics, model_state\)"):
        returning(value, model_state=True)


def test_no_metrics_may_be_none():
    _, metrics = returning(lambda p: (p["out"].sum(), None))
    assert set(metrics) == {"loss", "grad_norm"}


def test_describe():
    assert describe((1.0, Mean(np.ones(2), 3))) == "(float, Mean(float64[2], int))"
