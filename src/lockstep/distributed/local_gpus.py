"""Which GPUs of its machine a process takes when several processes share it."""

import os
from collections.abc import Mapping

from lockstep.distributed.detect import Launched


def own_devices(launched: Launched, visible: int) -> list[int] | None:
    """The numbers of this process's share of the visible GPUs; `None` takes all.

    A launcher that shows each process its own GPUs has shared them out already; then
    a process sees fewer than there are processes, or as many as it is to use.

    Raises:
        RuntimeError: `lockstep run` started more processes than there are GPUs.

    Example:
        >>> two_of_two = Launched("SLURM", 2, 1, None, local_index=1, local_count=2)
        >>> own_devices(two_of_two, 8)
        [4, 5, 6, 7]
        >>> own_devices(two_of_two, 1) is None
        True
    """
    if launched.by == "lockstep run" and 0 < visible < launched.local_count:
        raise RuntimeError(
            f"{launched.local_count} processes on this machine see {visible} "
            f"GPU{'s' * (visible > 1)}, and each needs one of its own: use --processes "
            f"{visible}, or --simulate for a trial on the CPU"
        )
    if launched.local_count < 2 or visible < launched.local_count:
        return None
    share = visible // launched.local_count
    first = share * launched.local_index
    return list(range(first, first + share))


def shared_gpus(environ: Mapping[str, str]) -> int:
    """The NVIDIA GPUs that this process sees together with others on its machine.

    0 where SLURM shows it fewer than the job has there: those are its own; and where
    JAX is told to use the CPU.
    """
    if environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return 0
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        count = len([name for name in shown.split(",") if name.strip()])
        of_the_job = environ.get("SLURM_GPUS_ON_NODE", "")
        return 0 if of_the_job.isdigit() and count < int(of_the_job) else count
    try:
        nodes = os.listdir("/proc/driver/nvidia/gpus")
    except OSError:
        return 0
    return len(nodes)
