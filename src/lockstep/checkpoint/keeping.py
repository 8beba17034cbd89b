"""Which checkpoints stay: the newest ones, and the best."""

import math
from collections.abc import Iterable

from lockstep.checkpoint.store import Damaged, Store
from lockstep.notices import say_once


class Keeping:
    """What stays in a folder, and which step is worth a save of its own."""

    def __init__(
        self, store: Store, keep: int | None, best: str | None, best_is: str
    ) -> None:
        self._store, self._keep, self._name = store, keep, best
        self._better = min if best_is == "min" else max
        self._known: dict[int, float] = {}
        self._names: set[str] = set()

    @property
    def best_step(self) -> int | None:
        """The step of the best checkpoint; `None` where none has a result."""
        results = self._results()
        best = self._best(results.values())
        return next((step for step, value in results.items() if value == best), None)

    def improves(self, results: dict[str, float]) -> bool:
        """Whether the number is among the results, and the best so far."""
        self._names.update(results)
        value = results.get(self._name or "", math.nan)
        others = self._results().values() if not math.isnan(value) else ()
        return value not in others and self._best([value, *others]) == value

    def remove_old(self) -> None:
        """Delete what is neither new nor the best."""
        if self._keep is None:
            return
        steps = self._store.steps()
        for step in set(steps[: -self._keep]) - {self.best_step}:
            self._known.pop(step, None)
            self._store.remove(step)

    def report(self) -> None:
        """Say that the number by which the best is chosen was never there."""
        if self._name is not None and self._names and self._name not in self._names:
            say_once(
                f"no result {self._name}",
                f"best={self._name!r} is not among the results of this run "
                f"({', '.join(sorted(self._names))}): no best checkpoint was kept",
            )

    def _best(self, values: Iterable[float]) -> float:
        return self._better(values, default=math.nan)

    def _results(self) -> dict[int, float]:
        """The number of each checkpoint that has one."""
        if self._name is None:
            return {}
        steps = self._store.steps()
        for step in steps:
            if step not in self._known:
                self._known[step] = self._read(step)
        known = {step: self._known[step] for step in steps}
        return {step: value for step, value in known.items() if not math.isnan(value)}

    def _read(self, step: int) -> float:
        try:
            results = self._store.read_run(step).get("results", {})
        except Damaged:
            return math.nan
        return results.get(self._name, math.nan)
