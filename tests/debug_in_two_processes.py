"""What the tools of `lockstep.debug` say in one of two processes, two devices each.

`test_debug_processes.py` starts it twice, with the coordinator's address and the number
of the process. Each check that holds prints its name.
"""

import os
import sys
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import lockstep as ls
from lockstep.debug import NonFiniteError, ReplicaMismatch, check_replicas, nan_guard

ADDRESS, PROCESS = sys.argv[1], int(sys.argv[2])


def raised(kind, function, *args):
    try:
        function(*args)
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def on_all_devices(value):
    where = NamedSharding(ls.make_mesh(), PartitionSpec())
    return jax.make_array_from_callback(np.shape(value), where, lambda i: value[i])


def split_by_rows(rows):
    where = NamedSharding(ls.make_mesh(), PartitionSpec("data"))
    rows = np.array(rows, np.float32)
    return jax.make_array_from_callback(rows.shape, where, lambda i: rows[i])


def equal_copies_pass():
    check_replicas({"w": on_all_devices(np.ones(3)), "n": on_all_devices(np.int32(3))})


def one_flipped_bit_is_found_by_both():
    mesh, good = ls.make_mesh(), np.ones(3, np.float32)
    bad = good.copy()
    bad.view(np.uint32)[1] ^= 1
    for device in range(4):
        copies = [
            jax.device_put(bad if d.id == mesh.devices.flat[device].id else good, d)
            for d in jax.local_devices()
        ]
        where = NamedSharding(mesh, PartitionSpec())
        w = jax.make_array_from_single_device_arrays((3,), where, copies)
        text = raised(ReplicaMismatch, check_replicas, {"w": w})
        assert "state['w']: device" in text and "differ" in text, text


def a_bad_row_is_named_by_both():
    def step(w, x):
        return w, jnp.log(x * w).mean()

    step = nan_guard(ls.parallelize(step))
    x = split_by_rows([1, 2, -3, 4])
    text = raised(NonFiniteError, step, on_all_devices(np.float32(1)), x)
    third = ls.make_mesh().devices.flat[2]
    assert f"device {third.id} (process 1), batch row 2: makes it" in text, text
    assert "nan made by `log`" in text


def a_bad_row_is_named_in_the_device_view():
    def step(w, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.log(x * w).mean())(w)
        return w - jax.lax.pmean(grad, "data"), jax.lax.pmean(loss, "data")

    step = nan_guard(ls.per_device(step))
    x = split_by_rows([1, -2, 3, 4])
    text = raised(NonFiniteError, step, on_all_devices(np.float32(1)), x)
    second = ls.make_mesh().devices.flat[1]
    assert f"device {second.id} (process 0), batch row 1: makes it" in text, text
    assert "nan made by `log`" in text


def rows_that_meet_are_refused_by_both():
    """Also where only one process has the rows that would show it."""

    def largest(params, batch):
        return (batch["x"] * params["w"]).max()

    step = ls.make_train_step(largest, optax.sgd(0.1), axis_name="data")
    for rows in (range(8), [1, 2, 3, 4, 0, 0, 0, 0]):
        state = step.init({"w": np.float32(1)})
        text = raised(
            ValueError, ls.per_device(step), state, {"x": split_by_rows(rows)}
        )
        assert "the loss is no mean of independent rows" in text, text


def one_process_alone_saves_it():
    saved = Path("run/nan_step_1/call.json")
    assert saved.exists() == (PROCESS == 0)


CHECKS = (
    equal_copies_pass,
    one_flipped_bit_is_found_by_both,
    a_bad_row_is_named_by_both,
    a_bad_row_is_named_in_the_device_view,
    rows_that_meet_are_refused_by_both,
    one_process_alone_saves_it,
)

if __name__ == "__main__":
    ls.initialize(ADDRESS, 2, PROCESS)
    try:
        for check in CHECKS:
            check()
            print(f"holds: {check.__name__}", flush=True)
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # the other process may wait in a collective
