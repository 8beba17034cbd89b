"""`FirstCall`: reports on a step, made of its first call, before that runs."""

from collections.abc import Callable
from typing import Any


class FirstCall:
    """An observer of steps that shows reports on the first call of each.

    It leaves a step alone after its first call, so later ones cost nothing. For a
    `Trainer` there is `callbacks.Inspect`, which uses this.

    Args:
        tools: functions of `(step, *args, **kwargs)`, as `debug.collectives`.
        show: what is done with each report.

    Example:
        >>> step = ls.parallelize(lambda w, x: (w - 0.1 * x.mean(0), x.sum()))
        >>> def rows(step, w, x):
        ...     return f"{len(x)} rows"
        >>> step.observers.append(FirstCall(rows))
        >>> w, total = step(jnp.zeros(3), np.ones((16, 3), np.float32))
        16 rows
        >>> step.observers
        []
    """

    def __init__(
        self, *tools: Callable[..., Any], show: Callable[[str], Any] = print
    ) -> None:
        self.tools, self.show = tools, show

    def before(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Show what the tools find, and leave the step."""
        step.observers.remove(self)
        for tool in self.tools:
            try:
                report = tool(step, *args, **kwargs)
            except RuntimeError as error:  # a backend that does not tell
                report = f"{tool.__name__}: {error}"
            self.show(str(report))

    def after(self, step: Any, outputs: Any) -> None:
        """Nothing is left to see."""
