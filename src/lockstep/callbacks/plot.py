"""`Plot`: the curves of a run as one picture."""

from collections.abc import Mapping
from pathlib import Path

from lockstep.callbacks.log import Log

_SPEED = ("examples_per_second", "seconds_per_step")


class Plot(Log):
    """Draw what `Log` would write into a picture, when the run is over.

    One panel for each kind of number: `loss` and `valid/loss` share theirs.

    Args:
        path: the file; its ending says the format (png, svg, pdf).

    Example:
        >>> import lockstep as ls
        >>> plot = ls.every(20, Plot("run/loss.png"))
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(_Picture(Path(path)))


class _Picture:
    """A writer that keeps the points and draws them when it is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.curves: dict[str, tuple[list[int], list[float]]] = {}

    def open(self) -> None:
        """Fail before the training if it could not be drawn after it."""
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "Plot needs matplotlib: pip install 'lockstep-jax[plot]'"
            ) from error
        if self.path.is_dir():
            raise IsADirectoryError(
                f"Plot({str(self.path)!r}): this is a folder; give the path of a "
                f"file, such as {str(self.path / 'loss.png')!r}"
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Keep one point of each curve."""
        for name, value in scalars.items():
            if name not in _SPEED:
                steps, values = self.curves.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)

    def close(self) -> None:
        """Draw the curves so far."""
        if not self.curves:
            return
        # Not pyplot: it would keep the figure, and ask for a display.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        # The loss first, and in each panel the training before the evaluations.
        names = sorted(
            self.curves, key=lambda name: (_kind(name) != "loss", "/" in name)
        )
        kinds = list(dict.fromkeys(map(_kind, names)))
        figure = Figure(figsize=(5 * len(kinds), 3.5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, len(kinds), squeeze=False)[0]
        panels = dict(zip(kinds, axes, strict=True))
        for name in names:
            steps, values = self.curves[name]
            marker = "o" if len(steps) < 20 else None
            panels[_kind(name)].plot(steps, values, marker=marker, label=name)
        for kind, panel in panels.items():
            panel.set(xlabel="step", ylabel=kind)
            panel.grid(alpha=0.3)
            panel.legend()
        figure.savefig(self.path, dpi=120)


def _kind(name: str) -> str:
    """What is measured, wherever it was measured: `loss` of `valid/loss`."""
    return name.rpartition("/")[2]
