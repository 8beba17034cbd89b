"""Lets `python -m lockstep` stand for the command `lockstep`."""

from lockstep.cli import main

if __name__ == "__main__":
    main()
