import logging

import numpy as np
import pytest

from lockstep.compiles import CompileLog


def test_the_reason_is_the_difference_to_the_nearest_call(caplog):
    log = CompileLog("step")
    log.begin({"state": {"w": np.ones(2)}, "batch": np.ones((8, 2))})
    log.finish(1.5)
    with caplog.at_level(logging.WARNING, logger="lockstep"):
        log.begin({"state": {"w": np.ones(2)}, "batch": np.ones((5, 2))})
    assert log.entries[0].reason == "first call" and log.entries[0].seconds == 1.5
    assert log.entries[1].reason == "batch float64[8,2] -> float64[5,2]"
    assert "batch float64[8,2] -> float64[5,2]: compiling again" in caplog.text
    log.begin({"state": {"w": np.ones(2)}, "batch": np.ones((5, 3))})
    assert log.entries[2].reason == "batch float64[5,2] -> float64[5,3]" or (
        log.entries[2].reason == "batch float64[8,2] -> float64[5,3]"
    )


def test_new_and_lost_leaves_are_named_and_long_lists_are_cut():
    log = CompileLog("step")
    log.begin({"state": {"a": 1}})
    log.begin({"state": {c: 1 for c in "bcdef"}})
    assert "state['b'] is new (weak int[])" in log.entries[1].reason
    assert log.entries[1].reason.endswith("and 3 more")


def test_equal_leaves_point_to_the_static_parts():
    log = CompileLog("step")
    log.begin({"state": 1})
    log.begin({"state": 1})
    assert "other static parts" in log.entries[1].reason


def test_a_limit_raises_before_the_compile():
    log = CompileLog("step", max_compiles=1)
    log.begin({"x": np.ones(2)})
    with pytest.raises(
        RuntimeError, match=r"max_compiles=1: x float64\[2\] -> float64"
    ):
        log.begin({"x": np.ones(3)})
    assert log.count == 1
