"""The rows of a comparison as text, as JSON and as a picture."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.bench.timing import Row
from lockstep.memory import in_units


def best(rows: Sequence[Row], *, ours: bool) -> Row:
    """The fastest row, of all or of lockstep's."""
    return min((r for r in rows if r.ours or not ours), key=lambda row: row.median)


def as_table(title: str, rows: Sequence[Row], base: str) -> str:
    """Aligned text: milliseconds a step, spread, ratio to the row called `base`."""
    reference = next(row.median for row in rows if row.name == base)
    width = max(len(row.name) for row in rows)
    lines = [f"{title:<{width}}   ms a step   spread   ratio   first step"]
    for row in rows:
        memory = "" if row.nbytes is None else f"   {in_units(row.nbytes)} a device"
        lines.append(
            f"{row.name:<{width}}   {row.median:9.3f}   {row.spread:5.0%}   "
            f"{row.median / reference:6.2f}   {row.first_step_s:8.1f} s{memory}"
        )
    return "\n".join(lines)


def write_json(path: Path, tables: Mapping[str, Sequence[Row]], about: Any) -> None:
    """All tables with every single time, and what machine it was."""
    content = {
        "about": about,
        "tables": {
            title: [
                {
                    "name": row.name,
                    "ours": row.ours,
                    "median_ms": row.median,
                    "spread": row.spread,
                    "first_step_s": row.first_step_s,
                    "step_ms": row.step_ms,
                    "bytes_per_device": row.nbytes,
                }
                for row in rows
            ]
            for title, rows in tables.items()
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1))


def draw(path: Path, tables: Mapping[str, Sequence[Row]]) -> None:
    """One panel of bars a table; lockstep's are dark. Needs matplotlib."""
    from matplotlib.figure import Figure

    columns = min(2, len(tables))
    height = -(-len(tables) // columns)
    figure = Figure(figsize=(7 * columns, 2.6 * height), layout="constrained")
    panels = figure.subplots(height, columns, squeeze=False).flat
    for panel, (title, rows) in zip(panels, tables.items(), strict=False):
        colors = ["#24476b" if row.ours else "#b9c6d3" for row in rows]
        panel.barh([row.name for row in rows], [r.median for r in rows], color=colors)
        panel.invert_yaxis()
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("ms a step")
        panel.tick_params(labelsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
