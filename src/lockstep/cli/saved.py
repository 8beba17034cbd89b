"""What runs have left on disk: checkpoints, and steps that were not finite."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.application import app


@app.command()
def checkpoints(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="run/checkpoints")],
) -> None:
    """List the checkpoints of a run: steps, sizes, and whether they are whole.

    Exits with 1 if there is none.
    """
    from lockstep.checkpoint.listing import NoCheckpoint, listing

    try:
        typer.echo(listing(directory))
    except NoCheckpoint as error:
        typer.echo(f"lockstep checkpoints: {error}", err=True)
        raise typer.Exit(1) from None


@app.command()
def plan(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="run/checkpoints")],
    devices: Annotated[int, typer.Option(min=1, help="How many it will go on with.")],
    policy: Annotated[
        str, typer.Option(help="keep-global-batch or linear-scaling.")
    ] = "keep-global-batch",
    step: Annotated[int | None, typer.Option(help="Of the newest if left out.")] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Of now, to see what becomes of it.")
    ] = None,
    warmup_steps: Annotated[
        int | None, typer.Option(help="Of now, to see what becomes of them.")
    ] = None,
) -> None:
    """Print the batch of a saved run on another number of devices.

    Exits with 1 if the policy cannot hold on so many, and with 2 without a checkpoint.

    Example: lockstep plan run/checkpoints --devices 4
    """
    from lockstep.checkpoint.listing import NoCheckpoint, planned

    try:
        path, change = planned(directory, devices, policy, step)
    except (NoCheckpoint, ValueError) as error:
        typer.echo(f"lockstep plan: {error}", err=True)
        raise typer.Exit(1 if isinstance(error, ValueError) else 2) from None
    typer.echo(f"{'checkpoint':<14} {path}")
    typer.echo(change.describe(learning_rate, warmup_steps))


@app.command()
def replay(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="run/nan_step_120")],
) -> None:
    """Repeat a step that was not finite, on one device, and say where it goes wrong.

    DIR was saved by nan_guard, NanGuard or run --watch. The script that saved it runs
    again as far as its first step. Exits with 1 if the step is still not finite.
    """
    from lockstep import replay as replaying

    try:
        replaying.replay(directory)
    except (replaying.CannotReplay, replaying.launch.CannotStart) as error:
        typer.echo(f"lockstep replay: {error}", err=True)
        raise typer.Exit(2) from None
