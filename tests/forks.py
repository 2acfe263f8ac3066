"""Processes that need not start: forks of one that has imported what they need and has no threads.

An interpreter that imports kvxfer takes most of a second, a fork of one that has takes milliseconds. `Fork` is such a
process, with the part of Popen's face that tests use. What counts before an interpreter starts (preloaded libraries,
PYTHONPATH, PYTHONIOENCODING) does not count here: for that, start one.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from kvxfer.cli import COMMANDS

CHECKOUT = Path(__file__).parents[1]
IMPORTED = (
    *(f"kvxfer.cli.{command.module}" for command in COMMANDS.values()), "tests.store.peer", "tests.engine.crash_child",
)  # fmt: skip
_ENVIRONMENT = {**os.environ}  # before any test has changed it
_NUMBER = struct.Struct("i")  # what is said of a process: its id, and later its exit status


class Fork:
    """A process that runs the function `main` of a module, as `python -m` would the module.

    Args:
        streams: descriptors of its standard input, output and error. They stay the caller's.
        env: in place of this process's environment.
    """

    def __init__(self, module: str, *arguments: str, streams: tuple[int, int, int], env: dict[str, str]) -> None:
        self.returncode: int | None = None
        self._report, report = os.pipe()
        task = json.dumps({"module": module, "arguments": arguments, "env": env}).encode()
        try:
            socket.send_fds(_server(), [task], [*streams, report])
        finally:
            os.close(report)
        self.pid = self._heard(None)

    def _heard(self, timeout: float | None) -> int:
        if not select.select([self._report], [], [], timeout)[0]:
            raise TimeoutError
        return int(_NUMBER.unpack(os.read(self._report, _NUMBER.size))[0])

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, once it has one; -n: signal n.

        Raises:
            TimeoutExpired: it has none yet.
        """
        if self.returncode is None:
            try:
                self.returncode = self._heard(timeout)
            except TimeoutError:
                raise subprocess.TimeoutExpired("a fork", timeout or 0.0) from None
            os.close(self._report)
        return self.returncode

    def poll(self) -> int | None:
        """As `wait`; None where it has none yet."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        """Nothing, where it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def run(
    module: str, *arguments: object, stdin: int | None = None, stderr: int | None = None,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Runs one to its end, as `subprocess.run` does that captures what is printed; `env` is added to this process's."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors, open(os.devnull) as nothing:
        streams = (nothing.fileno() if stdin is None else stdin, out.fileno(), stderr or errors.fileno())
        fork = Fork(module, *map(str, arguments), streams=streams, env=os.environ | (env or {}))
        try:
            code = fork.wait(100)
        except subprocess.TimeoutExpired:
            fork.kill()
            raise
        for file in (out, errors):
            file.seek(0)
        return subprocess.CompletedProcess(arguments, code, out.read(), errors.read())


@cache
def _server() -> socket.socket:
    """The connection to the process that forks: started at the first use, ended with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.forks", str(theirs.fileno())], pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL, cwd=CHECKOUT, env=_ENVIRONMENT | {"PYTHONPATH": str(CHECKOUT)},
        )  # fmt: skip

    def end() -> None:
        ours.close()
        process.wait(10)

    atexit.register(end)
    return ours


# ---- the process that forks


def main() -> None:
    """Forks until nobody is left who could ask. In a fork: runs what was asked for."""
    for name in IMPORTED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    control = socket.socket(fileno=int(sys.argv[1]))
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 4)
        if not message:
            return
        if not os.fork():
            control.close()
            _keep(json.loads(message), descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)


def _keep(task: dict[str, Any], descriptors: list[int]) -> None:
    """Forks once more, and says what becomes of that process; returns there, when it has run."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *streams, report = descriptors
    if child := os.fork():
        for descriptor in streams:
            os.close(descriptor)
        os.write(report, _NUMBER.pack(child))
        _, status = os.waitpid(child, 0)
        os.write(report, _NUMBER.pack(os.waitstatus_to_exitcode(status)))
        os._exit(0)
    os.close(report)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for name in ("stdin", "stdout", "stderr"):  # those there are believe in other files
        there = getattr(sys, name)
        made = open(there.fileno(), there.mode, encoding=there.encoding, errors=there.errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, made)
    os.environ.clear()
    os.environ.update(task["env"])
    sys.argv = [task["module"], *task["arguments"]]
    run: Callable[[], int | None] = importlib.import_module(task["module"]).main
    sys.exit(run())


if __name__ == "__main__":
    main()
