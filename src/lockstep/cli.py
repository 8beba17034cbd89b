"""The command `lockstep`: a thin list of commands that import their work when run."""

from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Synchronous data-parallel training for JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

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
    Path | None,
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


def main() -> None:
    """Runs the command line; the entry point of the installed command."""
    # Not app(): that replaces sys.excepthook, which is the script's to set.
    typer.main.get_command(app)(prog_name="lockstep")


def _print_version(asked: bool) -> None:
    if asked:
        version = import_module("lockstep").__version__
        typer.echo(f"lockstep {version}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    pass


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
    from lockstep.processes import child, run_processes

    if processes is not None:
        again = [*_options_of(context, "processes", "max_restarts"), script]
        again += args or ()
        raise typer.Exit(run_processes(processes, again, max_restarts=max_restarts))
    child.end_with_launcher()
    program = launch.Program(script, tuple(args or ()), module)
    with ExitStack() as setup:
        if count := simulate or rehearse:
            setup.enter_context(launch.simulated(count))
        if compile_cache:
            import_module("lockstep").cache_compiles(compile_cache)
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
        except ValueError as error:
            typer.echo(f"lockstep bench: {error}", err=True)
            raise typer.Exit(2) from None
        mesh = make_mesh()
        rows = compare.compare(work, mesh, turns=turns)
        typer.echo(compare.describe(rows, work, mesh))


@app.command()
def scale(
    where: Annotated[
        str | None, typer.Argument(metavar="[FILE.py:MAKE]", help="As for bench.")
    ] = None,
    network: Annotated[str, typer.Option(help="One of the presets.")] = "h100-ndr",
    compute_ms: Annotated[
        float | None, typer.Option(help="A step on one device, without MAKE.")
    ] = None,
    gradient_mb: Annotated[
        float | None, typer.Option(help="Bytes all-reduced in a step, without MAKE.")
    ] = None,
    messages: Annotated[int, typer.Option(help="In so many all-reduces.")] = 1,
    hidden: Annotated[
        float, typer.Option(help="Part of them that runs beside the backward pass.")
    ] = 0.0,
    last: Annotated[int, typer.Option(help="Devices in the last line.")] = 16_384,
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
    typer.echo(text)


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


@app.command()
def check(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", exists=True)],
    json: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
    sarif: Annotated[bool, typer.Option("--sarif", help="Report as SARIF.")] = False,
    github: Annotated[
        bool, typer.Option("--github", help="Report as GitHub annotations.")
    ] = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="First rewrite names that are only renamed.")
    ] = False,
) -> None:
    """Read code of the pmap era and say what breaks, what changed, what to write.

    PATH is a script, a notebook, a list of requirements or a folder of them; nothing
    is run. Exits with 1 if the code uses what is gone.
    """
    from lockstep.compat.check import REPORTS, Level, check

    asked = {"json": json, "sarif": sarif, "github": github}
    kind, *others = [kind for kind, is_asked in asked.items() if is_asked] or ["text"]
    if others:
        raise typer.BadParameter(f"--{kind} and --{others[0]}: one report at a time")
    if fix:
        from lockstep.compat.fix import fix as rewrite

        for path in rewrite(paths):
            typer.echo(f"rewrote {path}", err=True)
    findings = check(paths)
    typer.echo(REPORTS[kind](findings))
    raise typer.Exit(any(finding.level is Level.ERROR for finding in findings))
