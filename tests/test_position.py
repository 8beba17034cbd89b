"""Positions of batches: through JSON and back, and refused where they do not fit."""

import json

import numpy as np
import pytest

from lockstep.loop import position


@pytest.mark.parametrize(
    "state",
    [
        None,
        {"epoch": 2, "row": 16, "rows": 40, "seed": None},
        {"next_index": np.int64(7)},
        b"\x00\xff",
        {"workers": [{"raw": b"abc"}, {"at": 0.5}], "done": True, "name": "a"},
    ],
)
def test_comes_back_from_json(state):
    got = position.decode(json.loads(json.dumps(position.encode(state))))
    assert got == state


def test_arrays_and_tuples_become_lists():
    state = {"order": np.arange(3), "at": (1, 2)}
    assert position.decode(position.encode(state)) == {"order": [0, 1, 2], "at": [1, 2]}


@pytest.mark.parametrize(
    ("state", "says"),
    [({"at": {1}}, "holds a set"), ({1: 2}, r"names that are no text: \[1\]")],
)
def test_what_json_cannot_keep_is_refused(state, says):
    with pytest.raises(TypeError, match=says):
        position.encode(state)
