"""The processes of a run: connected, compared, and ended together.

`initialize` is what people call. `detect` reads what a launcher left, `arrivals` counts
who is there, `hub` and `line` connect them on the host, `lookout` sees who is late or
gone, `session` is what other modules ask. `agreement` compares values, `faults` tells
of a failure, `shared_notices` says once what all have to say, `stopping` ends all after
the same step, `warm_up` opens the way for collectives.
"""

from lockstep.distributed.initialization import initialize
from lockstep.distributed.this_process import Processes, is_main_process, processes

__all__ = ["Processes", "initialize", "is_main_process", "processes"]
