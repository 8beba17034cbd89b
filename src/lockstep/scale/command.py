"""What `lockstep scale` prints."""

import dataclasses
from pathlib import Path

from lockstep.bench import workload
from lockstep.distributed import initialize, is_main_process
from lockstep.memory import in_units
from lockstep.scale import link, report
from lockstep.scale.measured import measure
from lockstep.scale.network import PRESETS, Network
from lockstep.scale.predict import ROUNDS, Training, predict

HERE = "here"


def scale(
    where: str | None,
    *,
    network: str,
    compute_ms: float | None,
    gradient_mb: float | None,
    messages: int | None,
    hidden: float,
    last: int,
    plot: Path | None,
) -> str:
    """The table, with what it rests on; draws all ways of sharding if asked.

    Of several processes that measure their link only the main one gets a text.

    Raises:
        ValueError: an unknown network, or only one device to measure a link with, or
            neither a maker nor both numbers.
    """
    links = _links(network)
    training = _training(where, compute_ms, gradient_mb)
    training = dataclasses.replace(
        training, messages=messages or training.messages, hidden=hidden
    )
    if network == HERE and not is_main_process():
        return ""
    counts = report.device_counts(1, last)
    if plot is not None:
        curves = {
            kind: predict(dataclasses.replace(training, sharding=kind), links, counts)
            for kind in ROUNDS
        }
        report.draw(plot, curves)
    return "\n".join(
        [
            f"{1e3 * training.compute_s:.2f} ms a step on one device, "
            f"{in_units(training.nbytes)} all-reduced in {training.messages} message"
            f"{'s' * (training.messages > 1)}, {hidden:.0%} of it hidden",
            f"{network}: {links.source}",
            report.as_table(predict(training, links, counts)),
        ]
    )


def _links(network: str) -> Network:
    if network == HERE:
        initialize()
        return link.measure()
    if network not in PRESETS:
        names = ", ".join(PRESETS)
        raise ValueError(
            f"--network {network}: the presets are {names}; "
            f"{HERE!r} measures that of this run"
        )
    return PRESETS[network]


def _training(
    where: str | None, compute_ms: float | None, gradient_mb: float | None
) -> Training:
    if where is not None:
        work = workload.load(where)
        if not isinstance(work, workload.Workload):
            raise ValueError(
                "a step of your own does not tell its gradients: return (loss, "
                "optimizer, params, batch), or give --compute-ms and --gradient-mb"
            )
        return measure(work)
    if compute_ms is None or gradient_mb is None:
        raise ValueError("give FILE.py:MAKE, or both --compute-ms and --gradient-mb")
    return Training(compute_s=compute_ms / 1e3, nbytes=gradient_mb * 1e6)
