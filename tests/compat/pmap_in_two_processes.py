"""What `compat.pmap` does in one of two processes with two devices each.

`test_pmap_processes.py` starts it twice, with the coordinator's address and the number
of the process. Each check that holds prints its name.
"""

import gc
import logging
import os
import sys
import traceback

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lockstep.compat import device_put_sharded, pmap, replicate, unreplicate
from lockstep.compat.mapping import host_local, small_leaves

ADDRESS, PROCESS = sys.argv[1], int(sys.argv[2])
MINE = slice(2 * PROCESS, 2 * PROCESS + 2)  # this process's rows of four
GLOBAL = np.arange(12, dtype=np.float32).reshape(4, 3)


def assert_is_mine(array, rows):
    """A stacked array of this process's devices, one row each."""
    assert array.is_fully_addressable and len(array.addressable_shards) == 2
    for shard, row, device in zip(
        array.addressable_shards, rows, jax.local_devices(), strict=True
    ):
        assert shard.device == device and shard.data.shape == (1, *np.shape(row))
    np.testing.assert_allclose(array, rows, rtol=1e-6)


def rows_of_this_process_in_and_out():
    f = pmap(lambda x: (x - lax.psum(x, "i"), lax.axis_index("i")), "i")
    out, index = f(GLOBAL[MINE])
    assert_is_mine(out, (GLOBAL - GLOBAL.sum(0))[MINE])
    assert index.tolist() == [2 * PROCESS, 2 * PROCESS + 1]
    assert_is_mine(f(jnp.asarray(GLOBAL[MINE]))[0], out)
    elsewhere = jax.device_put(GLOBAL[MINE], jax.local_devices()[1])
    assert_is_mine(f(elsewhere)[0], out)
    assert f.moves.leaves == 1
    assert_is_mine(
        f(device_put_sharded(list(GLOBAL[MINE]), jax.local_devices()))[0], out
    )


def a_training_is_that_of_one_device():
    traces = 0

    def loss_of(w, x):
        return jnp.mean((x @ w - 1) ** 2)

    def step(state, x):
        nonlocal traces
        traces += 1
        grads = lax.pmean(jax.grad(loss_of)(state["w"], x), "batch")
        return {"w": state["w"] - 0.01 * grads, "step": state["step"] + 1}

    w = np.ones(3, np.float32)
    start, want = {"w": w, "step": 0}, w
    state, mapped = replicate(start), pmap(step, "batch", donate_argnums=0)
    shardings = set()
    for _ in range(5):
        old, state = state, mapped(state, GLOBAL[MINE, None])
        assert old["w"].is_deleted(), "donated"
        shardings.add(id(state["w"].sharding))
        want = want - 0.01 * jax.grad(loss_of)(want, GLOBAL)
    assert_is_mine(state["w"], [want, want])
    assert state["step"].tolist() == [5, 5] and state["step"].weak_type
    assert traces == 1 and len(shardings) == 1
    assert unreplicate(state["w"]).devices() == {jax.local_devices()[0]}


def many_small_results_come_back_together():
    def step(state, x):
        total = lax.psum(x.sum(), "i")
        new = {name: leaf + 1 for name, leaf in state.items()}
        return new, {"index": lax.axis_index("i"), "total": total, "column": x}

    n = 2 * small_leaves.MIN_ARRAYS
    big = small_leaves.MAX_BYTES // 4 + 1
    rows = {f"float{i}": np.full((2, i % 3, 2), i, np.float32) for i in range(n)}
    rows |= {f"half{i}": jnp.full((2, 3), i, jnp.bfloat16) for i in range(n)}
    rows |= {f"int{i}": np.full(2, i, np.int32) for i in range(3)}  # too few
    rows |= {"big": np.zeros((2, big), np.float32)}
    rates = {f"rate{i}": i / 2 for i in range(n)}
    state = {**rows, **replicate(rates)}
    axes = {"index": 0, "total": None, "column": 1}
    mapped = pmap(step, "i", out_axes=(0, axes), donate_argnums=0)
    for count in (1, 2):
        old, (state, out) = state, mapped(state, GLOBAL[MINE])
        if count == 2:
            assert all(leaf.is_deleted() for leaf in old.values()), "donated"
        for name, leaf in rows.items():
            assert state[name].dtype == leaf.dtype, name
            assert_is_mine(state[name], np.asarray(leaf) + count)
        for name, rate in rates.items():
            assert state[name].weak_type and state[name].dtype == np.float32
            assert_is_mine(state[name], [rate + count] * 2)
        assert float(out["total"]) == GLOBAL.sum()
        assert out["index"].tolist() == [2 * PROCESS, 2 * PROCESS + 1]
        np.testing.assert_array_equal(out["column"], GLOBAL[MINE].T)
    assert mapped.compiles.count == 1


def an_array_that_is_donated_twice_is_copied():
    f = pmap(lambda s: {"a": s["a"] + 1, "b": s["b"] * 3}, donate_argnums=0)
    params = f({"a": GLOBAL[MINE], "b": GLOBAL[MINE]})["b"]
    out = f({"a": params, "b": params})
    assert_is_mine(out["a"], 3 * GLOBAL[MINE] + 1)
    assert_is_mine(out["b"], 9 * GLOBAL[MINE])


def nothing_outlives_the_arrays_it_belongs_to():
    gc.collect()
    before = len(host_local._behind)
    out = pmap(lambda x: x + 1)(GLOBAL[MINE])
    assert len(host_local._behind) == before + 1
    del out
    gc.collect()
    assert len(host_local._behind) == before


def weak_types_do_not_drift():
    state = replicate({"w": jnp.ones(3, jnp.bfloat16), "rate": 0.5})
    f = pmap(lambda s: {"w": s["w"] * s["rate"], "rate": s["rate"]})
    for _ in range(2):
        state = f(state)
    assert state["w"].dtype == jnp.bfloat16 and state["rate"].weak_type
    assert (
        pmap(lambda w, r: w * r, in_axes=(0, None))(state["w"], 0.5).dtype
        == jnp.bfloat16
    )


def keys_and_arguments_that_are_not_mapped():
    keys = jax.random.split(jax.random.key(0), 4)[MINE]
    draws = pmap(
        lambda k, shape: jax.random.normal(k, shape), static_broadcasted_argnums=1
    )
    assert_is_mine(draws(keys, (2,)), [jax.random.normal(k, (2,)) for k in keys])
    assert pmap(lambda k: k)(keys).dtype == keys.dtype
    f = pmap(lambda x, c, *, y: (x * c + y, c), in_axes=(1, None), out_axes=(1, None))
    for c in (2.0, np.float32(2), jnp.float32(2)):
        out, same = f(GLOBAL[MINE].T, c, y=GLOBAL[MINE])
        np.testing.assert_array_equal(out, 3 * GLOBAL[MINE].T)
        assert float(same) == 2 and same.sharding.is_fully_replicated


def a_lowered_program_is_that_of_all_processes():
    lowered = pmap(lambda x: lax.psum(x, "i"), "i").lower(GLOBAL[MINE])
    assert "mhlo.num_partitions = 4 " in lowered.as_text()
    ((shape,), _) = lowered.in_avals
    assert shape.shape == (4, 3)
    lowered.compile()


def a_map_inside_a_map():
    f = pmap(pmap(lambda x: x - lax.pmean(x, ("i", "j")), "j"), "i")
    out = f(GLOBAL[MINE][None])
    np.testing.assert_allclose(out, (GLOBAL - GLOBAL.mean(0))[MINE][None])
    assert out.is_fully_addressable
    np.testing.assert_allclose(f(f(out)), out, atol=1e-6)
    assert f.moves.calls == 0


def under_jit_it_keeps_to_its_own_process():
    said = []
    logging.getLogger("lockstep").addHandler(handler := logging.Handler())
    handler.emit = lambda record: said.append(record.getMessage())
    f = pmap(lambda x: lax.psum(x, "i"), "i")
    mine = np.broadcast_to(GLOBAL[MINE].sum(0), (2, 3))
    np.testing.assert_array_equal(jax.jit(f)(GLOBAL[MINE]), mine)
    assert len([s for s in said if "devices of its own process" in s]) == 1
    local = pmap(lambda x: lax.psum(x, "i"), "i", devices=jax.local_devices())
    np.testing.assert_array_equal(local(GLOBAL[MINE]), mine)


def wrong_sizes_are_named():
    for x, y, text in (
        (GLOBAL[MINE], GLOBAL[:3], "y: leading axis 3, expected 2"),
        (GLOBAL[:1], GLOBAL[:1], "has size 1 in this one, which has 2 devices"),
        (GLOBAL, GLOBAL, "requires 4 logical devices, but only 2"),
    ):
        try:
            pmap(lambda x, y: x)(x, y)
        except ValueError as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"no error: {text}")


CHECKS = (
    rows_of_this_process_in_and_out,
    a_training_is_that_of_one_device,
    many_small_results_come_back_together,
    an_array_that_is_donated_twice_is_copied,
    nothing_outlives_the_arrays_it_belongs_to,
    weak_types_do_not_drift,
    keys_and_arguments_that_are_not_mapped,
    a_lowered_program_is_that_of_all_processes,
    a_map_inside_a_map,
    under_jit_it_keeps_to_its_own_process,
    wrong_sizes_are_named,
)

if __name__ == "__main__":
    jax.distributed.initialize(
        ADDRESS,
        2,
        PROCESS,
        coordinator_bind_address=ADDRESS,
        cluster_detection_method="deactivate",
        initialization_timeout=60,
    )
    try:
        for check in CHECKS:
            check()
            print("holds:", check.__name__, flush=True)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # an orderly exit would wait for the other process
