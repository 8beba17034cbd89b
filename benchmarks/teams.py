"""Processes that train together and run when they are told to."""

import os
import subprocess
import sys
import tempfile

import portpicker

CORES = os.cpu_count() or 1


class Team:
    """The processes of one contender: each reads "steps" and answers "ms a step".

    Several have one core each, one alone has two.
    """

    def __init__(self, command, model, processes):
        address = f"127.0.0.1:{portpicker.pick_unused_port()}"
        cores = [str(i % CORES) for i in range(processes)]
        if processes == 1:
            cores = ["0,1"]
        # What a killed team says at its end is of no interest; of a failed one it is.
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._members = [
            subprocess.Popen(
                ["taskset", "-c", core, *command]
                + [model, address, str(processes), str(number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                text=True,
            )
            for number, core in enumerate(cores)
        ]

    def run(self, steps):
        """Milliseconds a step, of the slowest member."""
        for member in self._members:
            print(steps, file=member.stdin, flush=True)
        return max(self._answer(member) for member in self._members)

    def close(self):
        for member in self._members:
            member.kill()
        for member in self._members:
            member.communicate()
        self._said.close()

    def _answer(self, member):
        for line in member.stdout:
            if line.startswith("ms "):
                return float(line.split()[1])
        self._said.seek(0)
        print(self._said.read(), file=sys.stderr)
        raise RuntimeError(f"a process ended with exit code {member.wait()}")
