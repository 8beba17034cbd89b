import pytest
from fresh_process import run_lockstep, run_python
from typer.testing import CliRunner

import lockstep
from lockstep import doctor, launch
from lockstep.cli import app
from lockstep.devices.report import DeviceReport

REPORT = {
    "backend": "cpu",
    "total_devices": 1,
    "local_devices": 1,
    "kinds": {"cpu": 1},
    "memory_bytes": (None,),
    "process_index": 0,
    "process_count": 1,
    "versions": {},
}


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def launched(monkeypatch):
    """What `lockstep run` would launch, instead of launching it."""
    calls = []
    monkeypatch.setattr(launch, "run", calls.append)
    return calls


def test_version():
    result = invoke("--version")
    assert (result.exit_code, result.output) == (
        0,
        f"lockstep {lockstep.__version__}\n",
    )


def test_without_a_command_it_lists_the_commands():
    output = invoke().output
    assert "doctor" in output and "run" in output


def test_an_unknown_command_is_a_usage_error():
    result = invoke("docter")
    assert result.exit_code == 2
    assert "docter" in result.output


def test_help_imports_no_jax():
    script = (
        "import sys; from lockstep.cli import main\n"
        "try: main()\n"
        "finally: print(sorted({'jax', 'numpy', 'lockstep.launch'} & {*sys.modules}))"
    )
    result = run_python("-c", script, "run", "--help")
    assert "--simulate" in result.stdout
    assert result.stdout.splitlines()[-1] == "[]"


def test_run_hands_everything_after_the_script_to_the_script(launched):
    result = invoke("run", "train.py", "--simulate", "9", "--", "-m", "--help", "")
    assert result.exit_code == 0, result.output
    (program,) = launched
    assert program.target == "train.py"
    assert program.arguments == ("--simulate", "9", "--", "-m", "--help", "")
    assert program.module is False


def test_run_takes_its_own_options_before_the_script(launched):
    result = invoke("run", "--simulate", "8", "-m", "package.train", "--lr", "1")
    assert result.exit_code == 0, result.output
    assert launched == [launch.Program("package.train", ("--lr", "1"), module=True)]


@pytest.mark.parametrize("count", ["0", "-1", "two"])
def test_run_refuses_counts(launched, count):
    result = invoke("run", "--simulate", count, "train.py")
    assert result.exit_code == 2
    assert "--simulate" in result.output
    assert launched == []


def test_run_needs_a_script(launched):
    assert invoke("run", "--simulate", "2").exit_code == 2
    assert launched == []


def test_run_of_a_missing_script(tmp_path):
    result = run_lockstep("run", "nope.py", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == (
        "lockstep run: cannot read nope.py: No such file or directory\n"
    )


def test_doctor_times_an_all_reduce_over_all_devices():
    result = invoke("doctor", "--size-mib", "1")
    assert result.exit_code == 0, result.output
    assert "8 x cpu (simulated)" in result.output
    assert "all-reduce  1 MiB a device over 8 devices: " in result.output
    assert result.output.rstrip().endswith("GB/s")


@pytest.mark.parametrize(
    ("report", "code"),
    [
        (DeviceReport(**REPORT), 0),
        (DeviceReport(**REPORT, advice=("the advice",)), 0),
        (DeviceReport(**REPORT, advice=("the advice",), idle_hardware=True), 1),
        (DeviceReport(**REPORT | {"total_devices": 0, "kinds": {}}), 1),
    ],
)
def test_doctor_fails_where_hardware_is_idle(monkeypatch, report, code):
    monkeypatch.setattr(doctor, "describe_devices", lambda: report)
    result = invoke("doctor")
    assert result.exit_code == code
    assert ("the advice" in result.output) == bool(report.advice)
    assert "all-reduce" not in result.output
