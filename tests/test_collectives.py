"""What a step sends between the devices, and which gradients are not reduced."""

import logging
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from lockstep import callbacks, compat, debug
from lockstep.debug.communication.groups import axis_of
from lockstep.debug.communication.hlo import read_collectives
from lockstep.loop import Trainer
from lockstep.parallel import parallelize, per_device
from lockstep.step import make_train_step

OPTIMIZER = optax.adam(0.1)
PARAMS = {
    "w": jnp.ones((4, 8)),
    "b": jnp.zeros(8),
    "out": jnp.ones((8,), jnp.float32),
}
BATCH = {"x": np.ones((16, 4), np.float32), "y": np.ones(16, np.float32)}


def line_of(mark):
    """The number of the line of this file that ends in `# line: mark`."""
    lines = Path(__file__).read_text().splitlines()
    return 1 + next(i for i, x in enumerate(lines) if x.endswith(f"# line: {mark}"))


def loss_of(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"])
    return ((hidden @ params["out"] - batch["y"]) ** 2).mean()


def make_state():
    return PARAMS, OPTIMIZER.init(PARAMS)


def step_with(reduce, loss_of=loss_of):
    def step(state, batch):
        params, moments = state
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, moments = OPTIMIZER.update(reduce(grads), moments, params)
        return (optax.apply_updates(params, updates), moments), {
            "loss": jax.lax.pmean(loss, "data")
        }

    return step


def pmean(grads):
    return jax.lax.pmean(grads, "data")  # line: pmean


def forgets_two(grads):
    return {**grads, "w": jax.lax.pmean(grads["w"], "data")}


def global_step(state, batch):
    params, moments = state
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), {"loss": loss}


def stacked(batch):
    return jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch)


GRADIENT_BYTES = 4 * (32 + 8 + 8)


def test_a_healthy_step_in_the_device_view(mesh_of, caplog):
    caplog.set_level(logging.INFO)
    step = per_device(step_with(pmean), mesh_of(4))
    report = debug.collectives(step, make_state(), BATCH, link_gb_per_s=100)
    assert str(report.verdict) == (
        "gradients of 3 of 3 parameters are reduced over data"
    )
    assert report.warnings == () and not caplog.records
    assert step.compiles.count == 0
    (row,) = report.rows
    assert (row.kind, row.axis, row.devices) == ("all-reduce", "data", 4)
    assert row.nbytes == GRADIENT_BYTES + 4 == report.nbytes  # and the loss
    assert not row.in_loop and row.rounds == 1
    assert "float32[4,8]" in row.arrays
    assert report.sent_bytes == 2 * 3 / 4 * report.nbytes
    assert report.seconds == pytest.approx(report.sent_bytes / 100e9)
    line = line_of("pmean")
    assert re.search(rf"{Path(__file__).name}:{line} \(pmean\)", str(report))
    assert "at 100 GB/s" in str(report) and "<td>data (4)</td>" in report._repr_html_()


def test_a_healthy_step_in_the_global_view(mesh_of, caplog):
    caplog.set_level(logging.INFO)
    mesh = mesh_of(8, {"data": 4, "model": 2})
    report = debug.collectives(parallelize(global_step, mesh), make_state(), BATCH)
    assert report.warnings == () and report.verdict is None and not caplog.records
    assert {row.axis for row in report.rows} == {"data"}
    assert {row.devices for row in report.rows} == {4}
    assert report.nbytes == GRADIENT_BYTES + 4
    assert "(loss_of)" in report.rows[0].place


def test_a_healthy_pmap(caplog):
    caplog.set_level(logging.INFO)
    step = compat.pmap(step_with(pmean), "data", devices=jax.devices()[:4])
    state = compat.replicate(make_state(), jax.devices()[:4])
    report = debug.collectives(step, state, stacked(BATCH))
    assert str(report.verdict).startswith("gradients of 3 of 3 parameters are reduced")
    assert report.warnings == () and not caplog.records
    assert report.nbytes == GRADIENT_BYTES + 4
    assert step.compiles.count == 0


def test_a_pmap_with_static_and_unmapped_arguments():
    def step(state, batch, rate, name):
        assert name == "sgd"
        grads = jax.lax.pmean(jax.grad(loss_of)(state, batch), "data")
        return jax.tree.map(lambda p, g: p - rate * g, state, grads), None

    devices = jax.devices()[:4]
    mapped = compat.pmap(
        step,
        "data",
        in_axes=(0, 0, None, None),
        static_broadcasted_argnums=3,
        devices=devices,
    )
    state = compat.replicate(PARAMS, devices)
    report = debug.collectives(mapped, state, stacked(BATCH), 0.1, "sgd")
    assert len(report.verdict.reduced) == 3 and report.warnings == ()
    assert report.nbytes == GRADIENT_BYTES
    assert debug.memory(mapped, state, stacked(BATCH), 0.1, "sgd").rows == 16


@pytest.mark.parametrize("view", ["per_device", "pmap"])
def test_gradients_that_are_not_reduced_are_named(mesh_of, view):
    if view == "pmap":
        devices = jax.devices()[:4]
        step = compat.pmap(step_with(forgets_two), "data", devices=devices)
        args = compat.replicate(make_state(), devices), stacked(BATCH)
    else:
        step = per_device(step_with(forgets_two), mesh_of(4))
        args = make_state(), BATCH
    report = debug.collectives(step, *args)
    assert "gradients of 1 of 3 parameters are reduced over data" in str(report)
    assert report.verdict.missing == ("state[0]['b']", "state[0]['out']")
    (warning,) = report.warnings
    assert "state[0]['b'], state[0]['out'] differ between the devices" in warning
    assert "after jax.grad and before the update" in warning
    assert "lax.pmean(grads, 'data')" in warning


def test_a_mean_in_the_loss_is_no_mean_of_the_gradient(mesh_of):
    def averaged_loss(params, batch):
        return jax.lax.pmean(loss_of(params, batch), "data")

    step = per_device(step_with(lambda grads: grads, averaged_loss), mesh_of(4))
    report = debug.collectives(step, make_state(), BATCH)
    assert report.verdict.reduced == () and len(report.verdict.missing) == 3
    assert "a pmean inside the loss averages the loss" in report.warnings[0]


def test_a_step_that_averages_nothing_is_refused(mesh_of):
    step = per_device(global_step, mesh_of(4))
    with pytest.raises(ValueError, match="averages nothing over 'data'"):
        debug.collectives(step, make_state(), BATCH)


def test_running_statistics_that_differ_are_named(mesh_of):
    def step(state, batch):
        grads = jax.lax.pmean(jax.grad(loss_of)(state["params"], batch), "data")
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        seen = 0.9 * state["seen_mean"] + 0.1 * batch["x"].mean(0)
        return {"params": params, "seen_mean": seen}, None

    state = {"params": PARAMS, "seen_mean": jnp.zeros(4)}
    report = debug.collectives(per_device(step, mesh_of(4)), state, BATCH)
    assert str(report.verdict) == (
        "gradients of 3 of 3 parameters are reduced over data; "
        "also not reduced: state['seen_mean']"
    )
    assert "before the step returns them" in report.warnings[0]


def test_a_parameter_that_no_row_moves_is_named(mesh_of):
    def frozen(params, batch):
        return loss_of({**params, "b": jax.lax.stop_gradient(params["b"])}, batch)

    step = make_train_step(frozen, optax.sgd(0.1), axis_name="data")
    report = debug.collectives(per_device(step, mesh_of(4)), step.init(PARAMS), BATCH)
    assert report.verdict.missing == () and report.warnings == ()
    assert "state.params['b']" not in report.verdict.missing


def test_what_cannot_be_proved_is_left_to_the_replicas(mesh_of):
    def butterfly(grads):
        for distance in (1, 2):
            pairs = [(i, i ^ distance) for i in range(4)]
            other = jax.lax.ppermute(grads, "data", pairs)
            grads = jax.tree.map(jnp.add, grads, other)
        return grads

    step = per_device(step_with(butterfly), mesh_of(4))
    report = debug.collectives(step, make_state(), BATCH)
    assert (
        "the step uses ppermute, which this analysis cannot follow"
        in (report.warnings[0])
    )
    moves = [row for row in report.rows if row.kind == "collective-permute"]
    assert moves and all((row.axis, row.devices) == ("data", 4) for row in moves)
    assert sum(row.sent_bytes for row in moves) == 2 * GRADIENT_BYTES


def test_a_reduction_in_a_loop_is_counted_and_named(mesh_of):
    step = make_train_step(loss_of, OPTIMIZER, accumulate=2)
    report = debug.collectives(parallelize(step, mesh_of(4)), step.init(PARAMS), BATCH)
    in_loop = [row for row in report.rows if row.in_loop]
    assert in_loop and all(row.rounds == 2 for row in in_loop)
    assert report.nbytes >= 2 * GRADIENT_BYTES
    assert "runs 2 times a step, inside a loop" in report.warnings[0]
    assert "2 x in a loop" in str(report)

    once = make_train_step(loss_of, OPTIMIZER, accumulate=2, axis_name="data")
    report = debug.collectives(per_device(once, mesh_of(4)), once.init(PARAMS), BATCH)
    assert report.warnings == () and report.nbytes < 1.2 * GRADIENT_BYTES


def test_rows_that_leave_their_device_are_named(mesh_of):
    def step(w, x):
        return w + jnp.sort(x, axis=0)[0].sum(), None  # line: sort

    report = debug.collectives(
        parallelize(step, mesh_of(4)), jnp.zeros(()), np.ones((64, 8), np.float32)
    )
    text = " ".join(report.warnings)
    assert "rows, or what was computed from them, leave their device" in text
    assert f"test_collectives.py:{line_of('sort')} (step)" in text


def test_devices_that_exchange_nothing(mesh_of):
    step = parallelize(lambda w, x: w + 1, mesh_of(4), batch_argnums=())
    report = debug.collectives(step, jnp.zeros(3), np.ones(3, np.float32))
    assert "the devices exchange nothing" in report.warnings[0]
    assert str(report).startswith("no collectives on data 4")


def test_every_kind_with_its_axis_and_bytes(mesh_of):
    mesh = mesh_of(8, {"data": 4, "model": 2})

    def body(w, x):
        _, parts = jax.lax.scan(
            lambda c, r: (c, jax.lax.psum(r, "data")), 0.0, x.astype(jnp.float32)
        )
        gathered = jax.lax.all_gather(w.astype(jnp.bfloat16), "model")
        scattered = jax.lax.psum_scatter(w, "data", tiled=True)
        swapped = jax.lax.all_to_all(w.reshape(4, -1), "data", 0, 0)
        both = jax.lax.pmax(w[:3], ("data", "model"))
        until = jax.lax.while_loop(
            lambda c: c < 5, lambda c: c + jax.lax.psum(c, "model"), x[0, 0]
        )
        return parts, gathered, scattered, swapped, both, until

    step = jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=(P(), P(), P("data"), P("data"), P(), P()),
            check_vma=False,
        )
    )
    report = debug.collectives(step, jnp.ones(16), jnp.ones((16, 3)))
    found = {(row.kind, row.axis): row for row in report.rows}
    loop = found["all-reduce", "data"]
    assert (loop.arrays, loop.nbytes, loop.rounds) == (("float32[3]",), 12, 4)
    gather = found["all-gather", "model"]
    assert gather.devices == 2 and gather.nbytes in (64, 128)  # a CPU may widen
    scatter = found["reduce-scatter", "data"]
    assert (scatter.nbytes, scatter.arrays) == (64, ("float32[4]",))
    assert scatter.sent_bytes == 48
    assert found["all-to-all", "data"].nbytes == 64
    assert found["all-reduce", "data, model"].devices == 8
    unknown = found["all-reduce", "model"]
    assert unknown.in_loop and not unknown.rounds_known
    assert "unknown (a loop)" in str(report)


def test_one_device_has_nothing_to_reduce(mesh_of):
    report = debug.collectives(
        per_device(step_with(pmean), mesh_of(1)), make_state(), BATCH
    )
    assert report.rows == () and report.warnings == ()


def test_keyword_arguments_and_host_values(mesh_of):
    step = parallelize(lambda w, x, rate: (w - rate * x.mean(0), None), mesh_of(4))
    x = np.ones((8, 3), np.float32)
    report = debug.collectives(step, np.zeros(3, np.float32), rate=0.1, x=x)
    assert report.nbytes == 12


class TestCompiledText:
    """Forms that other compilers write; the CPU's own come from real programs."""

    TEXT = """HloModule step

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %s = f32[] add(%a, %b)
}

%wrapped (p: f32[8,4]) -> f32[2,4] {
  ROOT %rs = f32[2,4]{1,0} reduce-scatter(%p), replica_groups=[2,4]<=[4,2]T(1,0), \
dimensions={0}, to_apply=%add
}

%body (c: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %start = ((f32[8,4]{1,0}), f32[2,4]{1,0}) async-start(%x), calls=%wrapped
  %done = f32[2,4]{1,0} async-done(%start)
}

%condition (c: (s32[], f32[8,4])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (p: bf16[16]) -> bf16[16] {
  %ag = (bf16[4]{0}, bf16[16]{0:T(8,128)}) all-gather-start(%p), \
replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}, metadata={op_name="a/all_gather"}
  %ar = f32[] all-reduce-start(%q), replica_groups={}, to_apply=%add
  %cp = (f32[5]{0}, f32[5]{0}, u32[], u32[]) collective-permute-start(%r), \
source_target_pairs={{0,2},{2,4},{4,6},{6,0}}
  %loop = (s32[], f32[8,4]) while(%t), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  ROOT %agd = bf16[16]{0} all-gather-done(%ag)
}
"""
    MESH = {"data": 4, "model": 2}

    def test_asynchronous_forms(self):
        found = {x.kind: x for x in read_collectives(self.TEXT)}
        gather = found["all-gather"]
        assert list(map(str, gather.results)) == ["bfloat16[16]"]
        assert gather.results[0].nbytes == 32 and gather.operation == "all_gather"
        assert axis_of(gather.groups, self.MESH) == ("data", 4)
        assert gather.source is None  # this text has no tables of lines
        assert axis_of(found["all-reduce"].groups, self.MESH) == ("data, model", 8)
        permute = found["collective-permute"]
        assert list(map(str, permute.results)) == ["float32[5]"]
        assert axis_of(permute.groups, self.MESH, pairs=True) == ("data", 4)
        scatter = found["reduce-scatter"]
        assert (scatter.in_loop, scatter.rounds) == (True, 3)
        assert axis_of(scatter.groups, self.MESH) == ("data", 4)

    @pytest.mark.parametrize(
        ("groups", "want"),
        [
            ("mesh['data'=4,'model'=2] {'model'}", ("model", 2)),
            ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_0'}", ("data", 4)),
            ("mesh['a'=8] {'a':(1)4}", ("data", 4)),
            ("mesh['a'=8] {'a':(2)2}", ("part of data", 2)),
            ("{{0,1},{2,3},{4,5},{6,7}}", ("model", 2)),
            ("{{0,4},{1,5},{2,6},{3,7}}", ("part of data", 2)),
            ("[1,8]<=[8]", ("data, model", 8)),
            ("something new", ("something new", 8)),
        ],
    )
    def test_groups(self, groups, want):
        assert axis_of(groups, self.MESH) == want


def test_the_callback_shows_it_once_before_the_first_step(mesh_of):
    shown = []
    step = per_device(step_with(pmean), mesh_of(4))
    trainer = Trainer(
        step,
        callbacks=[callbacks.Inspect(debug.collectives, show=shown.append)],
    )
    trainer.fit(make_state(), [BATCH] * 3)
    (text,) = shown
    assert "gradients of 3 of 3 parameters are reduced over data" in text
    assert step.compiles.count == 1 and step.observers == []


def test_the_callback_stops_a_step_that_averages_nothing(mesh_of):
    trainer = Trainer(
        per_device(global_step, mesh_of(4)),
        callbacks=[callbacks.Inspect(debug.collectives)],
    )
    with pytest.raises(ValueError, match="averages nothing over 'data'"):
        trainer.fit(make_state(), [BATCH])
