"""The device report: as plain text, in a terminal and in a notebook."""

import html
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class DeviceReport:
    """The devices that JAX runs on, and advice if there should be more.

    `kinds` counts the devices of all processes by kind. `memory_bytes` has one number
    for each local device: what JAX may allocate there, or `None` where it does not
    tell, as on a CPU. `idle_hardware` is true if the advice says that this machine has
    accelerators that JAX does not use.
    """

    backend: str
    total_devices: int
    local_devices: int
    kinds: Mapping[str, int]
    memory_bytes: tuple[int | None, ...]
    process_index: int
    process_count: int
    versions: Mapping[str, str]
    advice: tuple[str, ...] = ()
    idle_hardware: bool = False

    def __str__(self) -> str:
        return "\n".join(f"{label:<10}{value}" for label, value in self._lines())

    def __rich__(self) -> "Table":
        from rich.table import Table
        from rich.text import Text  # markup would swallow the [cuda13] of an advice

        table = Table.grid(padding=(0, 2))
        for label, value in self._lines():
            style = "yellow" if label == "advice" else ""
            table.add_row(Text(label, style="bold"), Text(value, style=style))
        return table

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><th style="text-align: left">{label}</th>'
            f'<td style="text-align: left">{html.escape(value)}</td></tr>'
            for label, value in self._lines()
        )
        return f"<table>{rows}</table>"

    def _lines(self) -> list[tuple[str, str]]:
        versions = ", ".join(f"{name} {v}" for name, v in self.versions.items())
        return [
            ("backend", self.backend),
            ("devices", self._devices()),
            ("memory", self._memory()),
            ("process", f"{self.process_index} of {self.process_count}"),
            ("versions", versions),
            *(("advice", text) for text in self.advice),
        ]

    def _devices(self) -> str:
        if not self.kinds:
            return "none"
        text = ", ".join(f"{count} x {kind}" for kind, count in self.kinds.items())
        if self.backend == "cpu" and self.local_devices > 1:
            text += " (simulated)"
        if self.local_devices != self.total_devices:
            text += f", {self.local_devices} of them local"
        return text

    def _memory(self) -> str:
        if not any(self.memory_bytes):
            return "not reported"
        sizes = [f"{(size or 0) / 2**30:.1f} GiB" for size in self.memory_bytes]
        return f"{sizes[0]} a device" if len(set(sizes)) == 1 else ", ".join(sizes)
