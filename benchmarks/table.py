"""The benchmark table: every way to train, on five models, on 2 and 8 devices.

    python benchmarks/table.py [--models mlp deep] [--devices 2 8] [--turns 8]
                               [--with-torch]

All ways have the same model, optimizer, batch and donation, and take turns in one
process, so that whatever else the machine does hits them alike; the table shows the
medians, and the ratio to the hand-written `jit` + `NamedSharding`. The batch lies on
the devices, but for the guides' loop and flax, which bring it from the host in every
step as they teach it, and "from the host", which does so through `prefetch`. At the end
come two processes (two_processes.py), on request beside PyTorch's DDP.
"""

import argparse
import platform
from functools import partial
from pathlib import Path

import jax
import pmap_loops
import two_processes
from workloads import WORKLOADS

import lockstep as ls
from lockstep.bench import report
from lockstep.bench.compare import makers_for
from lockstep.bench.timing import take_turns

BASE = "hand-written jit"
COUNTS = 1, 2, 4, 8  # they divide the rows of every model, and the 8 fixed shards
GUIDES = "the guides' pmap loop"


def contenders(work, mesh):
    makers = makers_for(work, mesh)
    pmaps = {GUIDES: partial(pmap_loops.guides, work, mesh)}
    pmaps["flax prefetch + pmap"] = partial(pmap_loops.flax, work, mesh)
    first = list(makers)[:3]
    return {name: makers[name] for name in first} | pmaps | makers


def verdicts(title, rows):
    """The goals of this model, and whether they are met."""
    model, devices = title.split(" on ")[0], int(title.split()[2])
    time = {row.name: row.median for row in rows}
    theirs = min(time[BASE], time["hand-written shard_map"])
    ours = report.best(rows, ours=True).median
    goals = [("best of lockstep / best hand-written", ours / theirs, 1.03)]
    goals += [
        ("parallelize / hand-written jit", time["parallelize"] / time[BASE], 1.03)
    ]
    if model == "lm" and devices == 8:
        same = time["train step, same bits"] / time["train step, device view"]
        goals += [("same bits / device view", same, 1.15)]
    if model == "deep":
        goals += [("deep", ours / theirs, 0.30 if devices == 2 else 0.25)]
    if model == "mlp" and devices == 8:
        goals += [("mlp / hand-written jit", ours / time[BASE], 0.8)]
    if model in ("mlp", "deep", "cnn"):
        host = time["device view, from the host"]
        goals += [("from the host / the guides' loop", host / time[GUIDES], 0.75)]
    for name, ratio, goal in goals:
        verdict = "met" if ratio <= goal else "missed"
        yield f"{name}: {ratio:.2f} (goal {goal}: {verdict})"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument(
        "--devices", nargs="+", type=int, choices=COUNTS, default=[2, 8]
    )
    parser.add_argument("--out", type=Path, default=Path("run/bench"))
    two_processes.add_options(parser, turns=8)
    options = parser.parse_args()
    ls.simulate_devices(max(options.devices))
    tables = {}
    for model in options.models:
        work = WORKLOADS[model]()
        for count in options.devices:
            mesh = ls.make_mesh(devices=jax.devices()[:count])
            title = f"{model} on {count} devices"
            # BatchNorm over the global batch has no fixed shards: said, and left out.
            rows = take_turns(
                contenders(work, mesh), turns=options.turns, leave_out=True
            )
            print(report.as_table(title, rows, BASE))
            for line in verdicts(title, rows):
                print("  " + line)
            print(flush=True)
            tables[title] = rows
    torch = two_processes.torch_python(options)
    for model in filter(two_processes.MODELS.__contains__, options.models):
        rows = two_processes.measure(model, torch, options.turns)
        two_processes.show(model, rows)
        tables[two_processes.title(model)] = rows
    about = {"jax": jax.__version__, "python": platform.python_version()}
    report.write_json(options.out / "table.json", tables, about)
    report.draw(options.out / "table.png", tables)
    print(f"written: {options.out}/table.json and table.png")


if __name__ == "__main__":
    main()
