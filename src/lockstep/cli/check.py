"""`lockstep check`: code of the pmap era, read and mended."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.application import app


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
