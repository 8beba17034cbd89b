"""Predictions as a table and as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.scale.predict import Prediction

MOST_DEVICES = 16_384


def device_counts(first: int = 1, last: int = MOST_DEVICES) -> list[int]:
    """Doubling from `first` to `last`.

    Example:
        >>> device_counts(8, 40)
        [8, 16, 32]
    """
    counts = [first]
    while counts[-1] * 2 <= last:
        counts.append(counts[-1] * 2)
    return counts


def as_table(rows: Sequence[Prediction]) -> str:
    """Aligned text, one line a number of devices."""
    lines = ["devices   ms a step   waiting   efficiency   all-reduce"]
    for row in rows:
        algorithm = row.algorithm if row.exposed_s else "none"
        lines.append(
            f"{row.devices:7d}   {1e3 * row.step_s:9.2f}   "
            f"{row.exposed_s / row.step_s:7.1%}   {row.efficiency:10.1%}   {algorithm}"
        )
    return "\n".join(lines)


def draw(path: Path, curves: Mapping[str, Sequence[Prediction]]) -> None:
    """Efficiency over the number of devices, a line a choice. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, rows in curves.items():
        axes.plot([r.devices for r in rows], [r.efficiency for r in rows], label=name)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("devices")
    axes.set_ylabel("efficiency")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
