"""The application that all commands belong to, and its version."""

from importlib import import_module
from typing import Annotated

import typer

app = typer.Typer(
    help="Synchronous data-parallel training for JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
