"""The tools of `lockstep.debug` over two processes; see `debug_in_two_processes.py`."""

from pathlib import Path

import pytest
from two_processes import outputs_of

SCRIPT = Path(__file__).with_name("debug_in_two_processes.py")


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What each of the two processes wrote, after both have ended."""
    return outputs_of(SCRIPT, tmp_path_factory)


@pytest.mark.parametrize(
    "check",
    [
        "equal_copies_pass",
        "one_flipped_bit_is_found_by_both",
        "a_bad_row_is_named_by_both",
        "a_bad_row_is_named_in_the_device_view",
        "rows_that_meet_are_refused_by_both",
        "one_process_alone_saves_it",
    ],
)
def test_holds_in_both_processes(both, check):
    for output in both:
        assert f"holds: {check}\n" in output, output[-3000:]
