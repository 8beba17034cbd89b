"""`lockstep run`: a script or notebook, on the devices and with the help asked for."""

from contextlib import ExitStack
from importlib import import_module
from typing import Annotated, Any

import typer

from lockstep.cli.application import app

# Options end at the script's name: what follows belongs to the script.
_OPTIONS_FIRST = {"allow_interspersed_args": False}

_Args = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGS", help="Its arguments, options included."),
]
_Module = Annotated[
    bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")
]
_Simulate = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Run on N simulated CPU devices."),
]
_Compat = Annotated[
    bool, typer.Option("--compat", help="Restore the names of the pmap era.")
]
_EraRandom = Annotated[
    bool,
    typer.Option("--era-random", help="As --compat, with the random numbers of then."),
]
_Watch = Annotated[
    bool, typer.Option("--watch", help="Tell what goes wrong in its steps.")
]
_WatchEvery = Annotated[
    int,
    typer.Option(min=1, metavar="N", help="--watch compares the copies in each N."),
]
_CompileCache = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Keep compiled programs there for the next run."),
]
_Rehearse = Annotated[
    int | None,
    typer.Option(
        min=2,
        metavar="N",
        help="Only compare the first step on 1 and on N simulated CPU devices.",
    ),
]
_HangTimeout = Annotated[
    float | None,
    typer.Option(
        min=0.1,
        metavar="SECONDS",
        help="Say where the program stands once no step moved for so long.",
    ),
]
_Processes = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Run in N processes of this machine, each with --simulate's devices.",
    ),
]
_MaxRestarts = Annotated[
    int,
    typer.Option(
        min=0, metavar="K", help="After a failure, start all processes again."
    ),
]


@app.command(context_settings=_OPTIONS_FIRST)
def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script to run.")],
    args: _Args = None,
    module: _Module = False,
    simulate: _Simulate = None,
    compat: _Compat = False,
    era_random: _EraRandom = False,
    rehearse: _Rehearse = None,
    watch: _Watch = False,
    watch_every: _WatchEvery = 100,
    hang_timeout: _HangTimeout = None,
    compile_cache: _CompileCache = None,
    processes: _Processes = None,
    max_restarts: _MaxRestarts = 0,
) -> None:
    """Run a training script or notebook, as python would; exit with its exit code.

    Options of lockstep come before the script, its own options after it.

    Example: lockstep run --simulate 8 train.py --lr 3e-4
    """
    from lockstep import launch
    from lockstep.processes import run_processes

    if processes is not None:
        again = [*_options_of(context, "processes", "max_restarts"), script]
        again += args or ()
        raise typer.Exit(run_processes(processes, again, max_restarts=max_restarts))
    program = launch.Program(script, tuple(args or ()), module)
    with ExitStack() as setup:
        if count := simulate or rehearse:
            setup.enter_context(launch.simulated(count))
        if compile_cache is not None:
            _keep_compiles(compile_cache)
        if compat or era_random:
            import_module("lockstep.compat").install(era_random=era_random)
        if rehearse:
            setup.enter_context(import_module("lockstep.rehearse").rehearsed(rehearse))
        if hang_timeout:
            setup.enter_context(
                import_module("lockstep.debug").hang_guard(hang_timeout)
            )
        if watch:
            setup.enter_context(import_module("lockstep.watch").watched(watch_every))
        _launch(program)


def _keep_compiles(folder: str) -> None:
    from lockstep.compile_cache import cache_compiles

    try:
        cache_compiles(folder)
    except (OSError, ValueError) as error:
        typer.echo(f"lockstep run: --compile-cache: {error}", err=True)
        raise typer.Exit(2) from None


def _launch(program: Any) -> None:
    from lockstep import launch

    try:
        launch.run(program)
    except launch.CannotStart as error:
        typer.echo(f"lockstep run: {error}", err=True)
        raise typer.Exit(2) from None


def _options_of(context: typer.Context, *left_out: str) -> list[str]:
    """The options of a command as they were given, for another process."""
    given = []
    for option in context.command.params:
        value = context.params.get(option.name or "")
        if option.param_type_name != "option" or option.name in left_out:
            continue
        if value is True:
            given.append(option.opts[0])
        elif value not in (None, False):
            given += [option.opts[0], str(value)]
    return given
