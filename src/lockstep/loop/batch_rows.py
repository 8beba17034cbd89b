"""The rows of a run's global batches, watched so that a resumed run keeps them."""

from typing import Any

import jax


class BatchRows:
    """How many rows the global batches of a run have.

    Example:
        >>> import numpy as np
        >>> rows = BatchRows([], remainder="error")
        >>> rows.see([np.zeros(16), np.zeros(9)], starts_epoch=True)
        >>> rows.count
        16

    Attributes:
        most: the most rows that a batch had, padding included.
    """

    def __init__(self, batches: Any, remainder: str) -> None:
        plan = getattr(batches, "plan", None)  # data.batches knows beforehand
        self._planned: int | None = getattr(plan, "global_rows", None)
        self._exact = remainder != "pad"
        self.most = 0
        self._wanted: int | None = None
        self._short = 0

    @property
    def count(self) -> int:
        """Rows of a full batch, as far as it is known."""
        return self._planned or self.most

    def want(self, rows: int) -> None:
        """Refuse batches of other sizes from now on; a short last one is no other.

        Raises:
            ValueError: the plan of the batches has another size.
        """
        if self._planned is not None and self._planned != rows:
            raise _other_size(self._planned, rows)
        self._wanted = rows if self._planned is None and self._exact else None

    def see(self, group: list[Any], *, starts_epoch: bool) -> None:
        """Count the rows of placed batches that come next.

        Raises:
            ValueError: they are not of the size that is wanted.
        """
        self._short = 0 if starts_epoch else self._short
        for batch in group:
            rows = rows_of(batch)
            self.most = max(self.most, rows)
            if self._wanted is not None:
                # Only the last batch of an epoch may be short: no other follows it.
                if rows > self._wanted or self._short:
                    raise _other_size(self._short or rows, self._wanted)
                self._short = rows if rows < self._wanted else 0


def rows_of(batch: Any) -> int:
    """Rows of a placed global batch, padding included; 1 for a batch without rows."""
    for leaf in jax.tree.leaves(batch):
        if getattr(leaf, "ndim", 0):
            return leaf.shape[0]
    return 1


def _other_size(rows: int, wanted: int) -> ValueError:
    return ValueError(
        f"the run goes on with global batches of {wanted} rows, and these have {rows}: "
        f"use global_batch_size={wanted}, with accumulate= if that is too much for "
        "fewer devices. Another batch is another training: to go on with it, scale the "
        "learning rate (`lockstep plan DIR --devices N --policy linear-scaling` prints "
        "by how much) and say Checkpointer(policy='linear-scaling'), or policy=None"
    )
