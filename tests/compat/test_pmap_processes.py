"""`compat.pmap` over two processes; see `pmap_in_two_processes.py`."""

from pathlib import Path

import pytest
from two_processes import outputs_of

SCRIPT = Path(__file__).with_name("pmap_in_two_processes.py")


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What each of the two processes wrote, after both have ended."""
    return outputs_of(SCRIPT, tmp_path_factory)


def names_of_checks():
    text = SCRIPT.read_text().partition("CHECKS = (")[2].partition(")")[0]
    return [name.strip(" ,") for name in text.strip().splitlines()]


@pytest.mark.parametrize("check", names_of_checks())
def test_holds_in_both_processes(both, check):
    for output in both:
        assert f"holds: {check}\n" in output, output[-3000:]
