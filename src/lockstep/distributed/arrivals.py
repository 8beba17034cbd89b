"""Who is there: counted by name, before JAX is asked to connect the processes.

JAX waits for all of them in native code and, when one does not come, ends every process
by a signal that says no name. So the processes first meet on the coordinator's port.
"""

import errno
import os
import selectors
import socket
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.distributed.messages import Messages

_RETRY_S = 0.02
_LATER_S = 30  # process 0 decides when to give up; it may have begun to count later
_REMINDER_S = 10.0


class Hello(NamedTuple):
    """What a process says of itself when it arrives."""

    process: int
    count: int
    host: str
    pid: int
    versions: dict[str, str]

    def __str__(self) -> str:
        return f"process {self.process} ({self.host}, pid {self.pid})"


class Address(NamedTuple):
    """Where process 0 is found."""

    host: str
    port: int

    def __str__(self) -> str:
        return (
            f"[{self.host}]:{self.port}"
            if ":" in self.host
            else ":".join(map(str, self))
        )

    @classmethod
    def of(cls, text: str) -> "Address":
        """Read `host:port`.

        Raises:
            ValueError: there is no port, or one that cannot be.

        Example:
            >>> print(Address.of("127.0.0.1:4711"), Address.of("[::1]:4711"))
            127.0.0.1:4711 [::1]:4711
        """
        host, _, port = text.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 2**16:
            raise ValueError(
                f"coordinator_address={text!r}: it is host:port, such as 10.0.0.1:4711"
            )
        return cls(host.strip("[]"), int(port))


def receive_all(
    address: Address, bind: str, hello: Hello, timeout_s: float
) -> dict[int, tuple[Hello, Messages]]:
    """Process 0: wait for all others, and welcome them or send them all away.

    Raises:
        RuntimeError: not all came in time, or somebody came who does not fit.
    """
    listener = _listen(address, bind)
    arrived: dict[int, tuple[Hello, Messages]] = {}
    everybody: list[Messages] = []
    try:
        with listener:
            _collect(listener, hello, arrived, everybody, timeout_s)
        problem = _unlike([hello, *(other for other, _ in arrived.values())])
        if problem:
            raise RuntimeError(problem)
    except RuntimeError as error:
        for guest in everybody:
            _try_send(guest, {"refused": str(error)})
            guest.close()
        raise
    # The listener is closed by now: a guest that knocks again meets JAX.
    welcome = [guest for _, guest in arrived.values()]
    for guest in everybody:
        if guest in welcome:
            guest.send({"welcome": True})
        else:
            guest.close()
    return arrived


def join(address: Address, hello: Hello, timeout_s: float) -> Messages:
    """Any other process: arrive at process 0, and wait until all have come.

    Raises:
        RuntimeError: process 0 is not there, or says that the run cannot start.
    """
    deadline = time.monotonic() + timeout_s
    host = Messages(_knock(address, deadline, hello, timeout_s))
    host.send(hello._asdict())
    wait_s = timeout_s + _LATER_S
    try:
        answer = host.receive(wait_s)[0]
    except EOFError:
        answer = {
            "refused": f"process 0 at {address} took the arrival of process "
            f"{hello.process} and then went away: it failed, all had arrived already "
            f"(is there another process {hello.process}?), or something else answers "
            "at this address"
        }
    except IndexError:
        answer = {
            "refused": f"what listens at {address} has not answered process "
            f"{hello.process} in {wait_s:g} s: it is another run or program, "
            "not process 0 of this one"
        }
    if "refused" in answer:
        host.close()
        raise RuntimeError(answer["refused"])
    return host


def wait_for_service(address: Address, timeout_s: float) -> None:
    """Wait until JAX listens: its own first retry would come a second later."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            socket.create_connection(address, timeout=timeout_s).close()
            return
        except OSError:
            time.sleep(_RETRY_S)


def _listen(address: Address, bind: str) -> socket.socket:
    try:
        family = socket.getaddrinfo(bind, address.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((bind, address.port), family=family, backlog=4096)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise RuntimeError(
                f"port {address.port} on {bind} is in use, by another run perhaps: "
                "give each run a port of its own (coordinator_address=, "
                "JAX_COORDINATOR_PORT)"
            ) from None
        raise RuntimeError(
            f"process 0 cannot listen on {bind}, port {address.port} "
            f"({error.strerror or error}): coordinator_address must be a name of the "
            "machine that process 0 runs on; where that differs from what the machine "
            "calls itself, give bind_address="
        ) from None


def _collect(
    listener: socket.socket,
    hello: Hello,
    arrived: dict[int, tuple[Hello, Messages]],
    everybody: list[Messages],
    timeout_s: float,
) -> None:
    started = time.monotonic()
    reminder = started + _REMINDER_S
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while len(arrived) < hello.count - 1:
            now = time.monotonic()
            _check_that_none_has_ended()
            if now > started + timeout_s:
                raise RuntimeError(_missing(hello, arrived, timeout_s))
            if now > reminder:
                print(_missing(hello, arrived, now - started), file=sys.stderr)
                reminder = now + _REMINDER_S
            for key, _ in selector.select(timeout=0.2):
                if key.fileobj is listener:
                    guest = Messages(listener.accept()[0])
                    everybody.append(guest)
                    selector.register(guest, selectors.EVENT_READ)
                    continue
                guest: Any = key.fileobj
                selector.unregister(guest)
                _take_in(guest, hello, arrived)


def _take_in(
    guest: Messages, own: Hello, arrived: dict[int, tuple[Hello, Messages]]
) -> None:
    try:
        hello = Hello(**guest.receive()[0])
    except (EOFError, IndexError, TypeError):
        guest.close()  # not one of ours: a scanner of ports, or JAX without lockstep
        return
    if hello.count != own.count:
        raise RuntimeError(
            f"{hello} was told that the run has {hello.count} processes, and {own} "
            f"that it has {own.count}: give all of them the same num_processes"
        )
    known = {0: own} | {number: other for number, (other, _) in arrived.items()}
    if hello.process in known:
        raise RuntimeError(
            f"two processes say that they are number {hello.process}: "
            f"{known[hello.process]} and {hello}. Give each its own process_id"
        )
    arrived[hello.process] = hello, guest


def _knock(
    address: Address, deadline: float, hello: Hello, timeout_s: float
) -> socket.socket:
    while True:
        try:
            connection = socket.create_connection(address, timeout=5)
            connection.settimeout(None)
            return connection
        except OSError as error:
            _check_that_none_has_ended()
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"process {hello.process} found no process 0 at {address} in "
                    f"{timeout_s:g} s ({error.strerror or error}): is it started, and "
                    "is this its address?"
                ) from None
            time.sleep(_RETRY_S)


def _check_that_none_has_ended() -> None:
    """`lockstep run` sees the end of a process, and writes it down for the others."""
    try:
        ended = Path(os.environ["LOCKSTEP_ENDED"]).read_text().splitlines()
    except (KeyError, OSError):
        return
    if ended:
        raise RuntimeError(
            f"{ended[0]} before all had arrived in lockstep.initialize(), which every "
            "process must call"
        )


def _missing(own: Hello, arrived: dict[int, Any], seconds: float) -> str:
    missing = sorted(set(range(own.count)) - {0, *arrived})
    names = ", ".join(map(str, missing[:20])) + ", ..." * (len(missing) > 20)
    return (
        f"{len(arrived) + 1} of {own.count} processes arrived in {seconds:.0f} s; "
        f"missing: {names}"
    )


def _unlike(hellos: list[Hello]) -> str | None:
    """Which process has other versions than most, in words."""
    for name in hellos[0].versions:
        by_version: dict[str, list[Hello]] = {}
        for hello in hellos:
            by_version.setdefault(hello.versions.get(name, "none"), []).append(hello)
        if len(by_version) > 1:
            usual, *odd = sorted(by_version, key=lambda v: -len(by_version[v]))
            others = "; ".join(
                f"{by_version[version][0]} has {version}" for version in odd
            )
            return (
                f"the processes run other versions of {name}: {others}, and "
                f"{by_version[usual][0]} has {usual}. Install the same everywhere"
            )
    return None


def _try_send(guest: Messages, message: dict[str, Any]) -> None:
    try:
        guest.send(message)
    except OSError:
        pass
