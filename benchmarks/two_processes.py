"""Two processes on this machine (gloo, loopback): lockstep, by hand, PyTorch's DDP.

    python benchmarks/two_processes.py [--with-torch] [--models mlp deep lm]

`make bench` runs it as well. Each process has one core. All of them start at once,
wait, and get their turns one after the other, so that the ratios come from one run.
Beside them stand lockstep and DDP in one process with both cores: time on one over time
on two is the efficiency. `--torch-python` names another Python that has torch.
"""

import argparse
import contextlib
import sys
from functools import partial
from pathlib import Path

from teams import Team

from lockstep.bench import report
from lockstep.bench.contender import Contender
from lockstep.bench.timing import take_turns

HERE = Path(__file__).parent
MODELS = "mlp", "deep", "lm"
GOALS = {"mlp": 0.8, "deep": 0.5}
OURS, THEIRS, ALONE = "lockstep", "DDP", "{}, one process"


def commands(torch_python):
    """Name -> the command of one process, and how many there are."""
    ours = sys.executable, HERE / "worker_jax.py"
    rows = {
        "hand-written jit": ((*ours, "jit"), 2),
        "hand-written shard_map": ((*ours, "shard_map"), 2),
        OURS: ((*ours, "lockstep"), 2),
        ALONE.format(OURS): ((*ours, "lockstep"), 1),
    }
    if torch_python:
        command = torch_python, HERE / "worker_torch.py"
        rows |= {THEIRS: (command, 2), ALONE.format(THEIRS): (command, 1)}
    return rows


def measure(model, torch_python, turns):
    """One row for each way to train."""
    with contextlib.ExitStack() as cleanup:

        def start(name, command, processes):
            team = Team(command, model, processes)
            cleanup.callback(team.close)
            return Contender(name, team.run, ours=name.startswith(OURS))

        makers = {
            name: partial(start, name, command, processes)
            for name, (command, processes) in commands(torch_python).items()
        }
        return take_turns(makers, turns=turns)


def verdicts(model, rows):
    """How the work of one process spreads over two, and how DDP compares."""
    time = {row.name: row.median for row in rows}
    for name in (OURS, THEIRS):
        if name in time:
            yield f"efficiency of {name}: {time[ALONE.format(name)] / time[name]:.2f}"
    if THEIRS in time:
        ratio, goal = time[OURS] / time[THEIRS], GOALS.get(model)
        verdict = (
            f" (goal {goal}: {'met' if ratio <= goal else 'missed'})" if goal else ""
        )
        yield f"{OURS} / {THEIRS}: {ratio:.2f}{verdict}"


def show(model, rows):
    print(report.as_table(title(model), rows, base=OURS))
    for line in verdicts(model, rows):
        print("  " + line)
    print(flush=True)


def title(model):
    return f"{model} in two processes"


def at_least_one(text):
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return int(text)


def add_options(parser, turns):
    parser.add_argument("--turns", type=at_least_one, default=turns)
    parser.add_argument("--with-torch", action="store_true")
    parser.add_argument("--torch-python")


def torch_python(options):
    """The Python that runs DDP; `None` leaves it out."""
    return options.torch_python or (sys.executable if options.with_torch else None)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    add_options(parser, turns=10)
    options = parser.parse_args()
    for model in options.models:
        show(model, measure(model, torch_python(options), options.turns))


if __name__ == "__main__":
    main()
