"""`lockstep run --processes`: one script in several processes of this machine.

`child` starts one, `output` shows what they write, `supervise` watches and ends them.
"""

from lockstep.processes.supervise import run_processes

__all__ = ["run_processes"]
