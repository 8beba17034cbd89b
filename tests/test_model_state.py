"""The model state: BatchNorm over the whole batch, or averaged when asked for."""

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_mesh_of
from flax import linen as nn
from jax.sharding import PartitionSpec as P
from same import assert_same
from stepping import VIEWS, make, on_mesh

from lockstep import notices
from lockstep.metrics import Mean
from lockstep.parallel import per_device
from lockstep.step import make_train_step

X = {"x": np.arange(8.0, dtype=np.float32)}
PARAMS = {"scale": jnp.ones(())}


def start(**more):
    return {"mean": jnp.zeros(()), "var": jnp.ones(()), **more}


def batch_norm(axis_name=None):
    """Momentum 0: the running statistics are those of the last batch."""

    def loss(params, stats, batch):
        x = batch["x"]
        mean, square = x.mean(), (x**2).mean()
        if axis_name:
            mean, square = jax.lax.pmean((mean, square), axis_name)
        var = square - mean**2
        y = params["scale"] * (x - mean) / jnp.sqrt(var + 1e-3)
        return (y - jnp.sin(x)) ** 2, ({}, {"mean": mean, "var": var})

    return loss


def run(loss, view, n, batch=X, state=None, **options):
    step = make(loss, view, model_state=True, **options)
    return on_mesh(step, n)(step.init(PARAMS, model_state=state or start()), batch)


class TestE1:
    def test_global_view_has_the_statistics_of_the_whole_batch(self):
        for n in (1, 4, 8):
            state, _ = run(batch_norm(), "global", n)
            assert float(state.model_state["mean"]) == 3.5
            assert float(state.model_state["var"]) == 5.25

    def test_device_view_with_axis_name_too_and_the_same_gradient(self):
        want, want_metrics = run(batch_norm(), "global", 1)
        for n in (1, 2, 4):
            got, metrics = run(batch_norm("data"), "device", n)
            assert_same(got.params, want.params)
            assert_same(got.model_state, want.model_state)
            assert_same(metrics["loss"], want_metrics["loss"])

    def test_device_view_local_is_averaged_and_said_once(self, caplog):
        notices.reset()
        with caplog.at_level(logging.INFO, logger="lockstep"):
            for _ in range(2):
                state, _ = run(batch_norm(), "device", 4, batch_norm="local")
        assert float(state.model_state["mean"]) == 3.5
        assert float(state.model_state["var"]) == 0.25
        shards = [s.data for s in state.model_state["mean"].addressable_shards]
        assert len(shards) == 4 and all(float(s) == 3.5 for s in shards)
        said = [r.message for r in caplog.records if "mean of the local" in r.message]
        assert len(said) == 1 and "model_state['mean']" in said[0]

    def test_device_view_without_either_is_refused_by_name(self):
        with pytest.raises(
            ValueError, match=r"model_state\['mean'\] and 1 more leaves"
        ):
            run(batch_norm(), "device", 4)


def test_padding_is_refused_where_the_loss_averages_over_devices():
    """Devices with fewer real rows would weigh as much as the others."""
    step = make_train_step(
        batch_norm("data"), optax.sgd(0.1), model_state=True, axis_name="data"
    )
    padding = per_device(step, make_mesh_of(4), remainder="pad")
    with pytest.raises(ValueError, match="mean of their means is not the mean of the"):
        padding(step.init(PARAMS, model_state=start()), X)


def test_one_reduction_serves_gradients_and_statistics():
    step = make(batch_norm(), "device", model_state=True, batch_norm="local")
    state = step.init(PARAMS, model_state=start())
    mapped = jax.jit(
        jax.shard_map(
            step,
            mesh=make_mesh_of(4),
            in_specs=(P(), P("data")),
            out_specs=P(),
            check_vma=False,
        )
    )
    text = str(mapped.lower(state, X).compile().as_text())
    assert len(re.findall(r"= \(?\S.* all-reduce\(", text)) == 1


def test_a_count_that_differs_has_no_mean():
    def loss(params, stats, batch):
        seen = stats["seen"] + jnp.sum(batch["x"] > 3).astype(jnp.int32)
        return params["scale"] * batch["x"], ({}, {"seen": seen})

    state = {"seen": jnp.zeros((), jnp.int32)}
    with pytest.raises(ValueError, match=r"model_state\['seen'\].*has no mean.*psum"):
        run(loss, "device", 4, state=state, batch_norm="local")


def test_what_differs_in_one_microbatch_differs_in_all_that_follow_from_it():
    def loss(params, stats, batch):
        new = {"mean": batch["x"].mean(), "var": 0.5 * stats["mean"]}
        return params["scale"] * batch["x"], ({}, new)

    with pytest.raises(ValueError, match=r"model_state\['mean'\] and 1 more leaves"):
        run(loss, "device", 4, accumulate=2)
    state, _ = run(loss, "device", 2, accumulate=2, batch_norm="local")
    # Shards 0..3 and 4..7; microbatches 0,2 | 1,3 and 4,6 | 5,7.
    assert float(state.model_state["mean"]) == (2.0 + 6.0) / 2
    assert float(state.model_state["var"]) == 0.5 * (1.0 + 5.0) / 2


@pytest.mark.parametrize("view", VIEWS)
def test_a_count_of_calls_goes_through_every_microbatch(view):
    def loss(params, stats, batch):
        return params["scale"] * batch["x"], ({}, {"n": stats["n"] + 1})

    state, _ = run(loss, view, 2, state={"n": jnp.zeros((), jnp.int32)}, accumulate=4)
    assert int(state.model_state["n"]) == 4
    assert state.model_state["n"].dtype == jnp.int32


def test_a_number_beside_the_rows_is_equal_on_all_devices():
    def loss(params, stats, batch):
        return params["scale"] * batch["x"], ({}, {"rate": batch["rate"] * 2})

    def step(state, batch, rate):
        return made(state, {**batch, "rate": rate})

    made = make(loss, "device", model_state=True)
    mapped = jax.shard_map(
        step,
        mesh=make_mesh_of(4),
        in_specs=(P(), P("data"), P()),
        out_specs=P(),
        check_vma=False,
    )
    state = made.init(PARAMS, model_state={"rate": jnp.zeros(())})
    state, _ = jax.jit(mapped)(state, X, 0.5)
    assert float(state.model_state["rate"]) == 1.0


def test_statistics_keep_their_dtype():
    def loss(params, stats, batch):
        return params["scale"] * batch["x"], ({}, {"m": batch["x"].mean()})

    for view, options in (("global", {}), ("device", {"batch_norm": "local"})):
        state = {"m": jnp.zeros((), jnp.bfloat16)}
        new, _ = run(loss, view, 4, state=state, **options)
        assert new.model_state["m"].dtype == jnp.bfloat16
        assert float(new.model_state["m"]) == 3.5


@pytest.mark.parametrize(
    ("new", "found"),
    [
        ({"mean": jnp.zeros(())}, r"model_state\['var'\] is missing"),
        (start(extra=jnp.zeros(())), r"model_state\['extra'\] is new"),
        (start(var=jnp.zeros(2)), r"model_state\['var'\] was float32\[\] and is now"),
        (start(var=jnp.zeros((), int)), r"model_state\['var'\] was float32\[\] and is"),
    ],
)
def test_a_model_state_of_another_form_is_named(new, found):
    def loss(params, stats, batch):
        return params["scale"] * batch["x"], ({}, new)

    with pytest.raises(ValueError, match=found):
        run(loss, "global", 1)


def trained(params):
    """Without the bias before BatchNorm: its true gradient is zero and it wanders."""
    return {"kernel": params["Conv_0"]["kernel"], "head": params["Dense_0"]}


class TestLinen:
    """A convolution, BatchNorm and dropout, over the views."""

    class Net(nn.Module):
        axis_name: str | None = None

        @nn.compact
        def __call__(self, x):
            x = nn.Conv(3, (3, 3))(x)
            x = nn.BatchNorm(False, momentum=0.9, axis_name=self.axis_name)(x)
            return nn.Dense(2)(nn.relu(x).reshape(len(x), -1))

    def run(self, view, n, axis_name=None, k=1, **options):
        net = self.Net(axis_name)
        x = np.random.default_rng(0).normal(size=(16, 4, 4, 1)).astype(np.float32)
        batch = {"x": x, "y": (x.sum((1, 2, 3)) > 0).astype(np.int32)}
        variables = self.Net().init(jax.random.key(0), x[:1])

        def loss(params, stats, batch):
            logits, new = net.apply(
                {"params": params, "batch_stats": stats},
                batch["x"],
                mutable=["batch_stats"],
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
            right = Mean.of(logits.argmax(-1) == batch["y"])
            return losses, ({"accuracy": right}, new["batch_stats"])

        step = make(
            loss, view, optax.sgd(0.1), model_state=True, accumulate=k, **options
        )
        params = variables["params"]
        state = step.init(params, model_state=variables["batch_stats"])
        run, losses = on_mesh(step, n), []
        for _ in range(3):
            state, metrics = run(state, batch)
            losses.append(float(metrics["loss"]))
        return state, losses, metrics

    def test_any_number_of_devices_is_one_device(self):
        want, want_losses, _ = self.run("global", 1)
        for view, n, axis in (("global", 8, None), ("device", 4, "data")):
            got, losses, metrics = self.run(view, n, axis)
            np.testing.assert_allclose(losses, want_losses, rtol=1e-6)
            assert_same(got.model_state, want.model_state)
            assert_same(trained(got.params), trained(want.params))
            assert float(metrics["accuracy"].count) == 16.0

    def test_microbatches_normalise_for_themselves_the_same_on_all_devices(self):
        want, want_losses, _ = self.run("global", 1, k=2)
        got, losses, _ = self.run("device", 4, "data", k=2)
        np.testing.assert_allclose(losses, want_losses, rtol=1e-6)
        assert_same(got.model_state, want.model_state)

    def test_local_statistics_must_be_asked_for(self):
        with pytest.raises(ValueError, match=r"BatchNorm_0.*axis_name='data'"):
            self.run("device", 4)
        self.run("device", 4, batch_norm="local")
