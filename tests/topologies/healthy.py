"""What holds in several processes that are well; each check that does prints its name.

`lockstep run --processes N --simulate D healthy.py FILE`: the numbers of the trainings
go to FILE. All processes run all checks in the same order, faults included: a fault in
the data must raise everywhere, and leave nothing behind.
"""

import json
import logging
import os
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training import SGD, all_numbers, loss, params

import lockstep as ls
from lockstep import notices
from lockstep.distributed import session
from lockstep.placement.row_shares import shards_of

ls.initialize()
MESH = ls.make_mesh()
ME, COUNT, LOCAL = jax.process_index(), jax.process_count(), jax.local_device_count()
DEVICES = COUNT * LOCAL


class Heard(logging.Handler):
    """Keeps what lockstep says."""

    def __init__(self):
        super().__init__()
        self.texts = []
        self.more = threading.Condition()

    def emit(self, record):
        with self.more:
            self.texts.append(record.getMessage())
            self.more.notify_all()

    def wait_for(self, text):
        with self.more:
            assert self.more.wait_for(lambda: text in self.texts, timeout=20)

    def take(self):
        texts, self.texts = "\n".join(self.texts), []
        return texts

    def assert_only_main_said(self, text):
        """All processes have this to say, and one does."""
        session.exchange(None, tuple(range(COUNT)), what="what was said")
        said = self.take()
        assert (text in said) == ls.is_main_process(), said


HEARD = Heard()
logging.getLogger("lockstep").addHandler(HEARD)
logging.getLogger("lockstep").propagate = False


def initialize_again_changes_nothing():
    ls.initialize()
    with pytest.raises(RuntimeError, match="called before with other arguments"):
        ls.initialize(timeout_s=7)


def the_threads_of_the_backend_give_way():
    policies = {
        os.sched_getscheduler(int(name)) for name in os.listdir("/proc/self/task")
    }
    assert os.SCHED_BATCH in policies
    assert os.sched_getscheduler(0) == os.SCHED_OTHER  # the thread of the user


def numbers_are_those_of_one_device():
    numbers = all_numbers(MESH)
    everybody = session.exchange(numbers, tuple(range(COUNT)), what="numbers")
    assert everybody and all(other == numbers for other in everybody)
    if ls.is_main_process():
        Path(sys.argv[1]).write_text(json.dumps(numbers))


def a_state_keeps_its_types():
    key = jax.random.key(3)
    state = ls.replicate({"w": np.ones(3), "lr": 0.5, "n": 2, "key": key, "f": "name"})
    assert state["w"].sharding.is_fully_replicated and state["w"].dtype == jnp.float32
    assert state["lr"].weak_type and state["n"].weak_type and state["f"] == "name"
    host = ls.to_host(state)
    assert host["n"] == 2 and bool(host["key"] == key)


def a_key_in_the_state_goes_through_steps_and_checkpoints():
    def train(state, x):
        key, own = jax.random.split(state["key"])
        noise = jax.random.normal(own, (3,))
        return {"w": state["w"] + noise * x.mean(), "key": key}, {}

    def run(steps, checkpoints=None):
        start = {"w": np.zeros(3, np.float32), "key": jax.random.key(3)}
        own = [np.full(LOCAL, 10.0 * ME + i, np.float32) for i in range(4)]
        trainer = ls.Trainer(train, checkpoints=checkpoints)
        return ls.to_host(trainer.fit(start, own, steps=steps))

    folder = "checkpoints-with-a-key"
    run(2, ls.Checkpointer(folder, every=2))
    resumed, whole = run(4, ls.Checkpointer(folder, every=2)), run(4)
    assert bool(resumed["key"] == whole["key"])
    np.testing.assert_array_equal(resumed["w"], whole["w"])


def another_state_is_replaced_and_named():
    mine = {"b": -0.0, "w": np.full(3, ME, np.float32), "lr": jnp.float32(ME)}
    state = ls.to_host(ls.replicate(mine))
    assert (state["w"] == 0).all() and state["lr"] == 0
    assert np.signbit(state["b"])
    HEARD.assert_only_main_said("state['lr'] differs between the processes: process 1")
    session.current().broadcast = False
    with pytest.raises(RuntimeError, match=r"\['w'\] differs .* process 1 has \[1. 1."):
        ls.replicate({"w": np.full(3, ME == 1, np.float32)})
    session.current().broadcast = True
    with pytest.raises(RuntimeError, match=r"process 1 has float32\[2\], proc"):
        ls.replicate({"w": np.zeros(3 - (ME == 1), np.float32)})


def unequal_rows_are_refused_by_name():
    step = ls.parallelize(lambda w, x: (w, x.mean()))
    rows = LOCAL * (2 + 2 * (ME == 1))
    text = f"process 0 has {2 * LOCAL} rows, process 1 has {4 * LOCAL}"
    with pytest.raises(ValueError, match=text):
        step(0.0, np.ones((rows, 2), np.float32))
    with pytest.raises(ValueError, match=text):
        next(iter(ls.prefetch([np.ones((rows, 2), np.float32)], step)))


def unequal_rows_are_exact_with_padding():
    def masked(w, batch):
        total = (batch["x"] * batch["mask"]).sum()
        return w, ls.Mean(total, batch["mask"].sum())

    step = ls.parallelize(masked, remainder="pad")
    own = np.arange(1.0 + ME, dtype=np.float32) + ME
    _, mean = step(0.0, {"x": own})
    everything = np.concatenate([np.arange(1.0 + p) + p for p in range(COUNT)])
    np.testing.assert_allclose(float(mean), everything.mean(), rtol=1e-6)


def fewer_batches_end_all_together():
    step = ls.parallelize(lambda w, x: (w + 1.0, x.mean()))
    batches = [np.full(LOCAL, i, np.float32) for i in range(5 - 2 * (ME == 1))]
    state = ls.Trainer(step).fit(0.0, batches)
    assert float(state) == 3
    HEARD.assert_only_main_said("process 1 came to the end of its batches after 3")


def fewer_batches_are_filled_up_exactly():
    def mean(w, batch):
        return {"x": batch["x"]}

    own = [{"x": np.full(LOCAL, 10 * ME + i, np.float32)} for i in range(4 - (ME == 1))]
    rows = [10.0 * p + i for p in range(COUNT) for i in range(4 - (p == 1))]
    for remainder in ("pad", "unsplit"):
        found = ls.evaluate(mean, 0.0, own, remainder=remainder)["x"]
        np.testing.assert_allclose(found, np.mean(rows), rtol=1e-6)
        out = ls.predict(lambda w, b: b["x"], 0.0, own, remainder=remainder)
        np.testing.assert_array_equal(np.sort(out)[::LOCAL], np.sort(rows))


def no_batch_at_all_is_named():
    step = ls.parallelize(lambda w, x: (w, x.mean()))
    own = [] if ME == 1 else [np.ones(LOCAL, np.float32)]
    with pytest.raises(ValueError, match="process 1 has no batch, and process 0 has"):
        list(ls.prefetch(own, step))


def equal_first_batches_are_reported():
    HEARD.take()
    notices.reset()
    own = [np.arange(LOCAL, dtype=np.float32) + 100 * (ME > 1) * ME]
    list(ls.prefetch(own, MESH))
    HEARD.assert_only_main_said("processes 0 and 1 have the same first batch")


def batches_are_agreed_on_once():
    data = ls.data.batches(np.arange(70.0), global_batch_size=16)
    with pytest.MonkeyPatch.context() as patch:
        calls, exchange = [], session.exchange
        patch.setattr(
            session, "exchange", lambda *a, **k: calls.append(k) or exchange(*a, **k)
        )
        placed = list(ls.prefetch(data, MESH, remainder="pad"))
    assert len(placed) == 5 and len(calls) == 1
    assert sum(float(batch.mask.sum()) for batch in placed) == 70


def other_orders_of_the_rows_are_named():
    data = ls.data.batches(np.arange(64.0), global_batch_size=16, seed=ME == 1)
    with pytest.raises(ValueError, match="data.batches differs .* process 1 has"):
        list(ls.prefetch(data, MESH))


def other_data_is_named():
    def rows():
        yield np.random.default_rng(ME).permutation(64)  # shuffled without one seed
        yield np.arange(128.0)[ME % 2 :: 2]  # a part of the process's own

    for own in rows():
        data = ls.data.batches({"x": own}, global_batch_size=16, seed=0)
        with pytest.raises(ValueError, match="same data, sizes and seed everywhere"):
            list(ls.prefetch(data, MESH))


def a_loop_that_is_left_leaves_nothing():
    for stop in (1, 3):
        for i, _ in enumerate(ls.prefetch([np.ones(LOCAL) * ME] * 9, MESH), 1):
            if i == stop:
                break


def other_host_numbers_are_named():
    step = ls.parallelize(lambda w, x, rate: (w - rate, x.mean()))
    batch = np.ones(LOCAL, np.float32)
    with pytest.raises(RuntimeError, match=r"rate differs .* process 1 has 0.2, proc"):
        step(0.0, batch, 0.1 + 0.1 * (ME == 1))
    w, _ = step(0.0, batch, 0.25)
    assert float(w) == -0.25


def another_program_is_named():
    step = ls.parallelize(lambda w, x: (w, x.mean() * (3.0 + (ME == 1))))
    with pytest.raises(RuntimeError, match="the program of <lambda> differs .* proce"):
        step(0.0, np.ones(LOCAL, np.float32))


def other_global_shapes_are_named():
    step = ls.parallelize(lambda w, x: (w, x.mean()))
    rows = jax.sharding.NamedSharding(MESH, jax.P("data"))
    own = np.ones((LOCAL * (1 + (ME == 1)),), np.float32)
    trusted = jax.make_array_from_process_local_data(rows, own)
    with pytest.raises(RuntimeError, match=r"form of <lambda>.*process 1 has"):
        step(0.0, trusted)


def dropped_rows_are_those_of_all():
    step = ls.parallelize(lambda w, x: (w, x.sum()), remainder="drop")
    _, total = step(0.0, np.ones(LOCAL + 1 + (ME == 1), np.float32))
    assert float(total) == (LOCAL + 1) // LOCAL * LOCAL * COUNT
    assert step.dropped_rows == COUNT * (LOCAL + 1) + 1 - int(total)


def split_arrays_are_gathered():
    x = ls.shard_batch({"x": np.full((LOCAL, 2), ME, np.float32)})["x"]
    assert not x.is_fully_addressable
    expected = np.repeat(np.arange(COUNT), LOCAL)
    np.testing.assert_array_equal(ls.to_host(x)[:, 0], expected)


def a_model_axis_over_processes():
    mesh = ls.make_mesh({"data": DEVICES // 2, "model": 2})
    step = ls.parallelize(lambda w, x: (w, x.sum()), mesh)
    parts = shards_of(mesh, "data", ME)
    for batch in ls.prefetch([np.array(parts, np.float32)], step):
        assert float(step(0.0, batch)[1]) == sum(range(DEVICES // 2))
    other = np.full(len(parts), ME, np.float32)
    if len({shards_of(mesh, "data", p) for p in range(COUNT)}) < COUNT:
        with pytest.raises(ValueError, match="hold the same part .* batches differ"):
            list(ls.prefetch([other], step))


def a_notice_of_one_process_is_not_lost():
    shared = session.current().line.notices
    before, shared.hold_s = shared.hold_s, 0.5
    if ME == 1:
        notices.say_once("of one", "one says it")
        HEARD.wait_for("one says it")
    shared.hold_s = before
    notices.say_once("of all", "all say it")
    HEARD.assert_only_main_said("all say it")


def only_one_process_writes():
    log = ls.every(1, ls.callbacks.Log(ls.writers.JsonLines(f"log{ME}.jsonl")))
    step = ls.make_train_step(loss, SGD)
    batch = {"x": np.ones((LOCAL, 4), np.float32), "y": np.ones(LOCAL, np.float32)}
    ls.Trainer(step, callbacks=[log]).fit(step.init(params()), [batch] * 2)
    assert Path(f"log{ME}.jsonl").exists() == ls.is_main_process()


CHECKS = (
    initialize_again_changes_nothing,
    the_threads_of_the_backend_give_way,
    numbers_are_those_of_one_device,
    a_state_keeps_its_types,
    a_key_in_the_state_goes_through_steps_and_checkpoints,
    another_state_is_replaced_and_named,
    unequal_rows_are_refused_by_name,
    unequal_rows_are_exact_with_padding,
    fewer_batches_end_all_together,
    fewer_batches_are_filled_up_exactly,
    no_batch_at_all_is_named,
    equal_first_batches_are_reported,
    batches_are_agreed_on_once,
    other_orders_of_the_rows_are_named,
    other_data_is_named,
    a_loop_that_is_left_leaves_nothing,
    other_host_numbers_are_named,
    another_program_is_named,
    other_global_shapes_are_named,
    dropped_rows_are_those_of_all,
    split_arrays_are_gathered,
    a_model_axis_over_processes,
    a_notice_of_one_process_is_not_lost,
    only_one_process_writes,
)

if __name__ == "__main__":
    for check in CHECKS:
        check()
        print(f"holds: {check.__name__}", flush=True)
