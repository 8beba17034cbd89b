"""The batch of a run on another number of devices: what stays, what has to change.

Two named policies, and no guess where neither fits:

- `keep-global-batch`: the same rows in each step, so the same training; fewer devices
  accumulate more microbatches of the size that fitted before.
- `linear-scaling`: the same rows on each device, so another global batch; k times the
  rows take k times the learning rate, with a warm-up (Goyal et al. 2017, "Accurate,
  Large Minibatch SGD", section 2).
"""

import dataclasses
import math

KEEP, LINEAR = "keep-global-batch", "linear-scaling"
POLICIES = (KEEP, LINEAR)
_WARMUP_EPOCHS = 5  # Goyal et al., section 2.2


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a run cuts its batches.

    Attributes:
        devices: devices that hold rows of their own.
        rows: rows of one global batch, padding included.
        accumulate: microbatches of one step.
        step: steps that are done.
        total: steps of the whole run, `None` where it is not known.
        epoch_rows: rows of the data set, `None` where it is not known.
        fixed_shards: of a run that is the same bit for bit on any device count.
    """

    devices: int
    rows: int
    accumulate: int = 1
    step: int = 0
    total: int | None = None
    epoch_rows: int | None = None
    fixed_shards: int | None = None

    def __str__(self) -> str:
        over = _count(self.devices, "device")
        if self.rows % self.devices:
            return f"global {_count(self.rows, 'row')} over {over}"
        each = self.rows // self.devices
        return f"global {self.rows:,} = {over} x {_count(each, 'row')}"

    @property
    def microbatch(self) -> int:
        """Rows that one device computes at a time, rounded up."""
        return math.ceil(self.rows / (self.devices * self.accumulate))


@dataclasses.dataclass(frozen=True)
class Change:
    """A plan for other devices, and by how much it moves the learning rate.

    Attributes:
        old: the plan of the checkpoint.
        new: the plan to go on with.
        policy: one of `POLICIES`.
    """

    old: Plan
    new: Plan
    policy: str

    @property
    def scale(self) -> float:
        """The factor of the learning rate: new rows over old rows."""
        return self.new.rows / self.old.rows

    def describe(
        self, learning_rate: float | None = None, warmup_steps: int | None = None
    ) -> str:
        """The plan in lines to print; numbers for the given rate and warm-up."""
        old, new = self.old, self.new
        lines = {
            "policy": self.policy,
            "batch": f"{new} (was {old})",
            "accumulate": f"{new.accumulate} x {_count(new.microbatch, 'row')} a device"
            f" (was {old.accumulate} x {old.microbatch:,})",
            "steps left": self._steps_left(),
            "learning rate": self._rate(learning_rate),
            "warm-up": self._warmup(warmup_steps),
        }
        return "\n".join(f"{name:<14} {text}" for name, text in lines.items())

    def _steps_left(self) -> str:
        if self.new.total is None:
            return "not known: there was no steps=, and the batches have no length"
        left = self.new.total - self.new.step
        return f"{left:,} of {self.new.total:,}"

    def _rate(self, rate: float | None) -> str:
        if self.scale == 1:
            return "unchanged" if rate is None else f"{rate:g}, unchanged"
        made = "" if rate is None else f": {rate:g} -> {rate * self.scale:g}"
        return f"x {self.scale:g}{made}"

    def _warmup(self, steps: int | None) -> str:
        if self.scale == 1:
            return "unchanged" if steps is None else f"{steps:,} steps, unchanged"
        text = f"the same rows, so {'fewer' if self.scale > 1 else 'more'} steps"
        if steps is not None:
            text = f"{steps:,} -> {math.ceil(steps / self.scale):,} steps, as many rows"
        if self.scale < 1:
            return text
        again = f"{_WARMUP_EPOCHS} epochs"
        if self.new.epoch_rows is not None:
            rows = _WARMUP_EPOCHS * self.new.epoch_rows
            again += f" ({math.ceil(rows / self.new.rows):,} steps)"
        return f"{text}; if it is over, raise the rate to its new value over {again}"


def replan(old: Plan, devices: int, policy: str = KEEP) -> Change:
    """The plan for another number of devices.

    Raises:
        ValueError: the policy cannot hold on so many devices; says which counts fit.

    Example:
        >>> change = replan(Plan(devices=8, rows=64, step=10, total=50), devices=2)
        >>> print(change.new, change.new.accumulate)
        global 64 = 2 devices x 32 rows 4
        >>> replan(Plan(devices=8, rows=64), 4, policy="linear-scaling").scale
        0.5
    """
    check_policy(policy)
    if devices < 1:
        raise ValueError(f"devices={devices}: a run has at least 1")
    if old.fixed_shards and (old.fixed_shards % devices or policy != KEEP):
        raise ValueError(
            f"this run has fixed_shards={old.fixed_shards}, the same bits on any "
            f"devices: it goes on with the same batch on {_divisors(old.fixed_shards)} "
            "devices"
        )
    make = _keep_rows if policy == KEEP else _keep_rows_per_device
    return Change(old, make(old, devices), policy)


def check_policy(policy: str) -> None:
    """Raise a ValueError for a policy that is none."""
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r} is not one of {POLICIES}")


def _keep_rows(old: Plan, devices: int) -> Plan:
    if old.rows % devices:
        near = [n for n in range(1, 2 * devices + 1) if old.rows % n == 0]
        raise ValueError(
            f"a global batch of {old.rows:,} rows does not divide over {devices} "
            f"devices: use {' or '.join(map(str, near[-2:]))} devices, keep the batch "
            f"with remainder='pad', or say {LINEAR} and train with another batch"
        )
    each = old.rows // devices
    parts = next(
        k for k in range(1, each + 1) if each % k == 0 and each // k <= old.microbatch
    )
    return dataclasses.replace(old, devices=devices, accumulate=parts)


def _keep_rows_per_device(old: Plan, devices: int) -> Plan:
    rows, over = divmod(old.rows * devices, old.devices)
    if over:
        raise ValueError(
            f"{old.rows:,} rows on {old.devices} devices are no whole number of rows a "
            f"device, so {LINEAR} has no batch for {devices} devices: use {KEEP}"
        )
    total = old.total
    if total is not None:
        total = old.step + math.ceil((total - old.step) * old.rows / rows)
    return dataclasses.replace(old, devices=devices, rows=rows, total=total)


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'s' * (n != 1)}"


def _divisors(n: int) -> str:
    return ", ".join(str(k) for k in range(1, n + 1) if n % k == 0)
