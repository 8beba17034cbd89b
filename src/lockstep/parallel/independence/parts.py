"""In which parts a step computes its loss: devices, fixed shards, microbatches."""

import dataclasses

from lockstep.parallel.options import Options

DEVICE, SHARD, MICROBATCH = "device", "shard", "microbatch"


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a batch that a loss sees one at a time.

    Attributes:
        name: what messages call one of them.
        count: how many there are on all devices, microbatches of shards included.
        axis: the mesh axis that the loss may name; `None` in the global view.
    """

    name: str
    count: int
    axis: str | None

    @classmethod
    def of(cls, options: Options) -> "Parts":
        """Those of a train step; nobody knows how another step computes."""
        fn, axis = options.fn, options.device_axis
        if not options.is_train_step:
            return cls(MICROBATCH, 1, axis)
        shards = 1 if axis is None else options.device_mesh.shape[axis]
        name = DEVICE
        if fn.fixed_shards:
            shards, name = fn.fixed_shards, SHARD
        if shards == 1:
            name = MICROBATCH
        return cls(name, shards * fn.accumulate, axis)

    @property
    def several(self) -> str:
        """The name for more than one."""
        return "microbatches" if self.name == MICROBATCH else f"{self.name}s"

    @property
    def preposition(self) -> str:
        """A loss is computed on a device, and in a shard."""
        return "on" if self.name == DEVICE else "in"

    def way_out(self, accumulate: int) -> str:
        """What to do where rows meet inside a part."""
        further = " and accumulate" if accumulate > 1 else ""
        whole = (
            f"use the global view (make_train_step without axis_name{further}), where "
            "the loss sees the whole batch"
        )
        ways = ["Return one value a row or Mean(total, count)"]
        if self.name == DEVICE:
            ways.append(
                "gather the other devices' rows in the loss "
                f"(lax.all_gather(x, {self.axis!r}, tiled=True))"
            )
        if self.name == MICROBATCH:
            whole = f"leave out accumulate={accumulate}: the loss then sees all rows"
        ways += [
            whole,
            f"write make_train_step(rows='local') if each {self.name} is to treat its "
            "own rows by themselves",
        ]
        return "; or ".join(ways)
