"""Everything that holds in several healthy processes, one launch a topology."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from fresh_process import run_lockstep

HERE = Path(__file__).with_name("topologies")
SCRIPT = HERE / "healthy.py"

sys.path.insert(0, str(HERE))
from training import all_numbers  # noqa: E402  # pyright: ignore[reportMissingImports]

TOPOLOGIES = [
    pytest.param((2, 1), id="2x1"),
    pytest.param((2, 2), id="2x2", marks=pytest.mark.full),
    pytest.param((4, 1), id="4x1", marks=pytest.mark.full),
]


@pytest.fixture(scope="module", params=TOPOLOGIES)
def launch(request, tmp_path_factory):
    """Processes, devices of each, the result of the run, and its numbers."""
    processes, devices = request.param
    folder = tmp_path_factory.mktemp("topology")
    options = ["--processes", str(processes), "--simulate", str(devices)]
    result = run_lockstep("run", *options, str(SCRIPT), "numbers.json", cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr[-6000:]
    return processes, devices, result, json.loads((folder / "numbers.json").read_text())


def test_every_check_holds_in_every_process(launch):
    processes, _, result, _ = launch
    source = SCRIPT.read_text()
    names = source[source.index("CHECKS = (") :].split(")")[0].split("(")[1]
    expected = [name.strip() for name in names.split(",") if name.strip()]
    assert len(expected) > 15
    for process in range(processes):
        start = f"[{process}] holds: "
        held = [line for line in result.stdout.splitlines() if line.startswith(start)]
        assert held == [start + name for name in expected]


def test_the_table_is_shown_once(launch):
    processes, devices, result, _ = launch
    total = f"{processes} processes (lockstep run), {processes * devices} devices of"
    assert result.stderr.count(total) == 1
    for process in range(processes):
        assert f"[0]   process {process}  " in result.stderr


def test_the_numbers_are_those_of_one_device(launch, alone):
    _, _, _, numbers = launch
    assert numbers.keys() == alone.keys()
    for name, expected in alone.items():
        np.testing.assert_allclose(
            numbers[name], expected, rtol=1e-6, atol=1e-6, err_msg=name
        )
    assert numbers["fixed"] == alone["fixed"]  # the same bits


@pytest.fixture(scope="module")
def alone(mesh_of):
    """The numbers of one device in one process."""
    return all_numbers(mesh_of(1))
