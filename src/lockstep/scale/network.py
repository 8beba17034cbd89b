"""Links between devices and between hosts, by latency and bandwidth.

The bandwidths are those of the data sheets, in one direction; what a program gets of
them is `achieved`, as all-reduce benchmarks report it for large messages.
"""

import dataclasses

ALGORITHMS = ("ring", "tree")


@dataclasses.dataclass(frozen=True)
class Link:
    """What a message of n bytes costs: `latency_s + n / bandwidth`.

    Attributes:
        latency_s: seconds until the first byte arrives.
        bandwidth: bytes a second in one direction.
        achieved: the part of the bandwidth that large messages get.
    """

    latency_s: float
    bandwidth: float
    achieved: float = 1.0

    def seconds(self, nbytes: float) -> float:
        """The time of one message.

        Example:
            >>> Link(latency_s=1e-6, bandwidth=1e9).seconds(1000)
            2e-06
        """
        return self.latency_s + nbytes / (self.bandwidth * self.achieved)


@dataclasses.dataclass(frozen=True)
class Network:
    """Hosts of equal size.

    Attributes:
        devices_per_host: devices that share a host.
        inside: the link of each device to the others of its host.
        between: the link of a whole host, which its devices share.
        source: where the figures come from.
        algorithms: ways of an all-reduce between hosts; the faster one is taken.
    """

    devices_per_host: int
    inside: Link
    between: Link
    source: str
    algorithms: tuple[str, ...] = ALGORITHMS


def _gbit(number: float) -> float:
    return number * 1e9 / 8


# NVLink 3 and 4: 600 and 900 GB/s a GPU in both directions together (NVIDIA A100 and
# H100 data sheets). Latencies are the order of magnitude of a step of a collective.
_NVLINK3 = Link(3e-6, 300e9, achieved=0.8)
_NVLINK4 = Link(3e-6, 450e9, achieved=0.8)
_PCIE4 = Link(5e-6, 32e9, achieved=0.7)

PRESETS = {
    "h100-ndr": Network(
        8,
        _NVLINK4,
        Link(5e-6, 8 * _gbit(400), achieved=0.9),
        "8 H100 with NVLink 4; eight NDR InfiniBand ports of 400 Gbit/s a host",
    ),
    "a100-hdr": Network(
        8,
        _NVLINK3,
        Link(5e-6, 8 * _gbit(200), achieved=0.9),
        "8 A100 with NVLink 3; eight HDR InfiniBand ports of 200 Gbit/s a host",
    ),
    "ethernet-100": Network(
        8,
        _NVLINK3,
        Link(20e-6, _gbit(100), achieved=0.8),
        "8 A100 with NVLink 3; one Ethernet port of 100 Gbit/s a host",
    ),
    "ethernet-25": Network(
        4,
        _PCIE4,
        Link(30e-6, _gbit(25), achieved=0.8),
        "4 GPUs on PCIe 4.0 x16; one Ethernet port of 25 Gbit/s a host",
    ),
}
