"""Two processes on this machine (gloo, loopback): lockstep, by hand, PyTorch's DDP.

    python benchmarks/two_processes.py [--with-torch] [--models mlp deep lm]

Each process has one core. All of them start at once, wait, and get their turns one
after the other, so that the ratios come from one run. Beside them stand lockstep and
DDP in one process with both cores: time on one over time on two is the efficiency.
`--torch-python` names another Python that has torch.
"""

import argparse
import contextlib
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

import portpicker

HERE = Path(__file__).parent
GOALS = {"mlp": 0.8, "deep": 0.5}
OURS, THEIRS = "lockstep", "DDP"
TURN_MS = 500
CORES = os.cpu_count() or 1


class Team:
    """The processes of one contender; they run when they are told to."""

    def __init__(self, command, model, processes):
        address = f"127.0.0.1:{portpicker.pick_unused_port()}"
        cores = [str(i % CORES) for i in range(processes)]
        if processes == 1:
            cores = ["0,1"]
        self._members = [
            subprocess.Popen(
                ["taskset", "-c", core, *command]
                + [model, address, str(processes), str(number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number, core in enumerate(cores)
        ]

    def run(self, steps):
        """Milliseconds a step, of the slowest member."""
        for member in self._members:
            print(steps, file=member.stdin, flush=True)
        return max(self._answer(member) for member in self._members)

    def close(self):
        for member in self._members:
            member.kill()
        for member in self._members:
            member.communicate()

    def _answer(self, member):
        for line in member.stdout:
            if line.startswith("ms "):
                return float(line.split()[1])
        raise RuntimeError(f"a process ended with exit code {member.wait()}")


def contenders(torch_python):
    """Name -> the command of one process, and how many there are."""
    ours = sys.executable, HERE / "worker_jax.py"
    rows = {
        OURS: ((*ours, "lockstep"), 2),
        "hand-written jit": ((*ours, "jit"), 2),
        "hand-written shard_map": ((*ours, "shard_map"), 2),
        f"{OURS}, one process": ((*ours, "lockstep"), 1),
    }
    if torch_python:
        command = torch_python, HERE / "worker_torch.py"
        rows |= {THEIRS: (command, 2), f"{THEIRS}, one process": (command, 1)}
    return rows


def measure(model, rows, turns):
    times = {name: [] for name in rows}
    with contextlib.ExitStack() as cleanup:
        teams = {}
        for name, (command, processes) in rows.items():
            teams[name] = Team(command, model, processes)
            cleanup.callback(teams[name].close)
        for team in teams.values():
            team.run(3)  # compiles
        counts = {
            name: max(3, round(TURN_MS / team.run(5))) for name, team in teams.items()
        }
        draw, order = random.Random(0), list(rows)
        for _ in range(turns):
            draw.shuffle(order)
            for name in order:
                times[name].append(teams[name].run(counts[name]))
    return {name: statistics.median(found) for name, found in times.items()}


def report(model, times):
    print(f"{model}, two processes with one core each")
    for name, took in times.items():
        print(f"  {name:<24}{took:9.2f} ms a step{took / times[OURS]:8.2f}")
    for name in (OURS, THEIRS):
        if name in times:
            efficiency = times[f"{name}, one process"] / times[name]
            print(f"  efficiency of {name}: {efficiency:.2f}")
    if THEIRS in times:
        ratio, goal = times[OURS] / times[THEIRS], GOALS.get(model)
        verdict = (
            f" (goal {goal}: {'met' if ratio <= goal else 'missed'})" if goal else ""
        )
        print(f"  {OURS} / {THEIRS}: {ratio:.2f}{verdict}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=["mlp", "deep", "lm"])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--with-torch", action="store_true")
    parser.add_argument("--torch-python")
    options = parser.parse_args()
    python = options.torch_python or (sys.executable if options.with_torch else None)
    for model in options.models:
        report(model, measure(model, contenders(python), options.turns))


if __name__ == "__main__":
    main()
