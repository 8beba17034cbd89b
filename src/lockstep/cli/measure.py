"""What this machine has, and what a step takes on it and on more."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.application import app


@app.command()
def doctor(
    size_mib: Annotated[
        int, typer.Option(min=1, help="Size of the timed all-reduce, MiB a device.")
    ] = 16,
) -> None:
    """Show the devices that JAX sees, advice, and one timed all-reduce over them.

    Exits with 1 if this machine has accelerators that JAX does not use, or if JAX
    cannot start.
    """
    from lockstep.doctor import examine

    raise typer.Exit(0 if examine(size_mib) else 1)


@app.command()
def bench(
    where: Annotated[str, typer.Argument(metavar="FILE.py:MAKE", help="Its maker.")],
    simulate: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Run on N simulated CPU devices."),
    ] = None,
    turns: Annotated[int, typer.Option(min=2, help="Turns of 0.1 s for each.")] = 10,
) -> None:
    """Time the ways to train your own step, and say which is fastest here.

    MAKE is a function without arguments that returns (loss, optimizer, params, batch),
    or (step, state, batch). The ways take turns: hand-written jit and shard_map,
    parallelize, and make_train_step in both views.

    Example: lockstep bench --simulate 8 my_step.py:make
    """
    from lockstep import launch

    with ExitStack() as setup:
        if simulate:
            setup.enter_context(launch.simulated(simulate))
        from lockstep.bench import compare, workload
        from lockstep.devices import make_mesh

        try:
            work = workload.load(where)
            mesh = make_mesh()
            rows = compare.compare(work, mesh, turns=turns)
        except ValueError as error:
            typer.echo(f"lockstep bench: {error}", err=True)
            raise typer.Exit(2) from None
        typer.echo(compare.describe(rows, work, mesh))


_Network = Annotated[
    str, typer.Option(help="A preset, or 'here': measure that of this run.")
]
_Messages = Annotated[
    int | None,
    typer.Option(min=1, help="In so many all-reduces (default: MAKE's)."),
]


@app.command()
def scale(
    where: Annotated[
        str | None, typer.Argument(metavar="[FILE.py:MAKE]", help="As for bench.")
    ] = None,
    network: _Network = "h100-ndr",
    compute_ms: Annotated[
        float | None, typer.Option(help="A step on one device, without MAKE.")
    ] = None,
    gradient_mb: Annotated[
        float | None, typer.Option(help="Bytes all-reduced in a step, without MAKE.")
    ] = None,
    messages: _Messages = None,
    hidden: Annotated[
        float, typer.Option(help="Part of them that runs beside the backward pass.")
    ] = 0.0,
    last: Annotated[
        int, typer.Option(min=1, help="Double the devices up to so many.")
    ] = 16_384,
    plot: Annotated[Path | None, typer.Option(help="Draw it into this file.")] = None,
) -> None:
    """Predict the time of a step on up to 16,384 devices, at equal rows a device.

    MAKE's step is timed here, on one device with the batch that it returns; or give
    the two numbers.

    Example: lockstep scale --compute-ms 180 --gradient-mb 100 --network ethernet-100
    """
    from lockstep.scale import command

    try:
        text = command.scale(
            where,
            network=network,
            compute_ms=compute_ms,
            gradient_mb=gradient_mb,
            messages=messages,
            hidden=hidden,
            last=last,
            plot=plot,
        )
    except ValueError as error:
        typer.echo(f"lockstep scale: {error}", err=True)
        raise typer.Exit(2) from None
    if text:
        typer.echo(text)
