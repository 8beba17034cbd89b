"""The command `lockstep`: a thin list of commands that import their work when run."""

# Each module adds its commands to the application.
from lockstep.cli import check, measure, run, saved
from lockstep.cli.application import app, main

__all__ = ["app", "check", "main", "measure", "run", "saved"]
