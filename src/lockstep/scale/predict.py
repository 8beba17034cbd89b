"""The time of a synchronous step on N devices, from the costs of its messages.

Formulas, for n bytes on p devices, latency a and bandwidth b:

- ring all-reduce: 2 (p - 1) (a + n / (p b)), which moves the fewest bytes (Patarasuk
  and Yuan, "Bandwidth optimal all-reduce algorithms", 2009);
- two binary trees, pipelined: 2 log2(p) a + 2 n / b (Sanders, Speck and Traeff,
  "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009);
- several hosts: reduce-scatter inside each host, all-reduce of the parts between the
  hosts, all-gather inside.
"""

import dataclasses
import math
from collections.abc import Iterable

from lockstep.scale.network import ALGORITHMS, Link, Network

# All-reduces of the whole gradient that a step pays, by how it is sharded. FSDP gathers
# the parameters twice and scatters the gradient: three halves of an all-reduce.
ROUNDS = {"replicated": 1.0, "zero1": 1.0, "fsdp": 1.5}


@dataclasses.dataclass(frozen=True)
class Training:
    """A step, as measured on one device.

    Attributes:
        compute_s: seconds a step without communication, for the rows of one device.
        nbytes: bytes that are all-reduced in a step: the gradients.
        messages: in how many all-reduces; 1 where the gradients are packed.
        hidden: the part of the communication that runs beside the backward pass. 0 is
            what a step with one all-reduce at its end has.
        sharding: "replicated", "zero1" or "fsdp".
    """

    compute_s: float
    nbytes: float
    messages: int = 1
    hidden: float = 0.0
    sharding: str = "replicated"

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: one is out of its range.
        """
        finite = math.isfinite(self.compute_s) and math.isfinite(self.nbytes)
        positive = self.compute_s > 0 and self.nbytes >= 0 and self.messages >= 1
        if not (finite and positive):
            raise ValueError(
                f"compute_s={self.compute_s}, nbytes={self.nbytes}, messages="
                f"{self.messages}: a step takes time, and sends what there is"
            )
        if not 0 <= self.hidden <= 1:
            raise ValueError(f"hidden={self.hidden} is a part, between 0 and 1")
        if self.sharding not in ROUNDS:
            raise ValueError(f"sharding={self.sharding!r} is none of {[*ROUNDS]}")


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One row of the table.

    Attributes:
        devices: how many.
        step_s: seconds a step.
        exposed_s: the part of it in which devices only communicate.
        algorithm: the faster of ring and tree.
    """

    devices: int
    step_s: float
    exposed_s: float
    algorithm: str

    @property
    def efficiency(self) -> float:
        """The time on one device over this one, at equal rows a device."""
        return 1 - self.exposed_s / self.step_s


def predict(
    training: Training, network: Network, devices: Iterable[int]
) -> list[Prediction]:
    """What the step takes on each number of devices, at equal rows a device.

    Example:
        >>> from lockstep.scale.network import PRESETS
        >>> step = Training(compute_s=0.1, nbytes=400e6)
        >>> [p] = predict(step, PRESETS["a100-hdr"], [64])
        >>> round(p.efficiency, 2)
        0.94
    """
    rows = []
    for count in devices:
        times = {
            name: training.messages
            * all_reduce_s(training.nbytes / training.messages, count, network, name)
            for name in network.algorithms
        }
        best = min(times, key=lambda name: times[name])
        exposed = times[best] * ROUNDS[training.sharding] * (1 - training.hidden)
        rows.append(Prediction(count, training.compute_s + exposed, exposed, best))
    return rows


def all_reduce_s(
    nbytes: float, devices: int, network: Network, algorithm: str = "ring"
) -> float:
    """Seconds of one all-reduce.

    Args:
        nbytes: bytes on each device.
        devices: how many devices; whole hosts, or fewer than one.
        network: what connects them.
        algorithm: "ring" or "tree" between the hosts.

    Raises:
        ValueError: not a whole number of hosts.
    """
    local = min(devices, network.devices_per_host)
    hosts, rest = divmod(devices, local)
    if rest:
        raise ValueError(
            f"{devices} devices are no whole number of hosts of "
            f"{network.devices_per_host}: name a multiple of it"
        )
    halves = 2 * (local - 1) * network.inside.seconds(nbytes / local)
    # Each device all-reduces its part with those of the other hosts, all at once:
    # together they send n bytes through the host's own link.
    return halves + _between(nbytes, hosts, network.between, algorithm)


def _between(nbytes: float, hosts: int, link: Link, algorithm: str) -> float:
    if hosts == 1:
        return 0.0
    if algorithm == "ring":
        return 2 * (hosts - 1) * link.seconds(nbytes / hosts)
    if algorithm == "tree":
        depth = math.ceil(math.log2(hosts))
        return 2 * (depth * link.latency_s + link.seconds(nbytes) - link.latency_s)
    raise ValueError(f"algorithm={algorithm!r} is none of {ALGORITHMS}")
