"""A cluster of this process's own: the real server, `emberd up`, which ends with this process however that ends."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import threading
import time
import weakref
from typing import Any, Iterable, List, Optional, Union

from . import _native, errors
from .client import Client, connect

_READY = re.compile(rb"^emberd: ready coordinator=(\S+) http=(\S*)", re.MULTILINE)
_running: "weakref.WeakSet[LocalCluster]" = weakref.WeakSet()


class LocalCluster(_native.Uncopied):
    """Made by `local`. A context manager; `addresses` are those of the coordinators."""

    def __init__(self, arguments: List[str], timeout: float) -> None:
        self._log, self._owner = tempfile.TemporaryFile(), os.getpid()
        # A session of its own: Ctrl-C in the terminal is for this process. The server ends when the pipe to its standard
        # input is closed, which the kernel does if nobody else.
        self._process = subprocess.Popen([str(_native.program_path()), "up", "--stop-on-eof", *arguments],
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
                                         start_new_session=True)
        _running.add(self)
        try:
            ready = self._wait_ready(timeout)
        except BaseException:
            self._process.kill()
            self.close()
            raise
        self.addresses: List[str] = ready[1].decode().split(",")
        self.http: str = ready[2].decode()

    @property
    def address(self) -> str:
        return self.addresses[0]

    @property
    def pid(self) -> int:
        return self._process.pid

    def log(self) -> str:
        """The log of the server: what it has written to standard error."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode("utf-8", "replace")

    def connect(self, **options: Any) -> Client:
        """A client: `emberd.connect` with the addresses of this cluster."""
        return connect(self.addresses, **options)

    def __enter__(self) -> "LocalCluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops the server and waits for its end. Rows that are not in `data` are lost. In a forked child: does nothing."""
        if os.getpid() != self._owner:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def _wait_ready(self, timeout: float) -> "re.Match[bytes]":
        lines: List[bytes] = []
        stdout = self._process.stdout
        assert stdout is not None
        reader = threading.Thread(target=_read_lines, args=(stdout, lines), daemon=True)
        reader.start()
        end = time.monotonic() + timeout
        while True:
            ready = _READY.search(b"".join(lines))
            if ready is not None:
                return ready
            if self._process.poll() is not None or time.monotonic() > end:
                refused = self._process.poll() == 2
                raise (errors.InvalidArgument if refused else RuntimeError)(f"`emberd up` did not become ready:\n{self.log()}")
            time.sleep(0.01)


def _read_lines(stdout: Iterable[bytes], lines: List[bytes]) -> None:
    try:
        for line in stdout:
            lines.append(line)
    except ValueError:
        pass  # closed


def _after_fork() -> None:
    # A forked child must not keep the server alive.
    for cluster in list(_running):
        if cluster._process.stdin is not None:
            cluster._process.stdin.close()


os.register_at_fork(after_in_child=_after_fork)


def _text(value: Any, what: str) -> str:
    return os.fsdecode(_native.text(value, what, path=True))


def local(shards: int = 2, *, sparsecores: int = 2, coordinators: int = 1, processes: Optional[bool] = None,
          listen: str = "127.0.0.1:0", http: str = "", data: Union[str, "os.PathLike[str]", None] = None,
          durability: Optional[str] = None, timeout: float = 60.0) -> LocalCluster:
    """Starts a cluster on this machine. Its rows live as long as it does, and its checkpoints, which need `data`, longer.

    processes: a process for each shard and coordinator; otherwise all in one, which is faster. Several coordinators need it.
    http: "127.0.0.1:0" for the status page and metrics on a free port; `LocalCluster.http` has the address.
    data: the folder for checkpoints; created if it does not exist.
    durability: needs data, but for "memory". "checkpoint" (the default with data): some are saved
    automatically, and lost rows are restored from the newest one; "log": every change is on disk
    before it is answered, and a process that is killed loses nothing; "memory": neither.
    """
    if durability not in (None, "memory") and data is None:
        raise ValueError(
            f"durability: {durability!r} needs a folder to write to; name one with data")
    counts = {"shards": shards, "sparsecores": sparsecores, "coordinators": coordinators}
    arguments = [f"--{name}={_native.whole(count, name, low=1, high=2**31 - 1)}" for name, count in counts.items()]
    arguments += ["--listen", _text(listen, "listen"), "--http", _text(http, "http")]
    if data is not None:
        arguments += ["--data", _text(data, "data"), "--durability", "checkpoint" if durability is None else _text(durability, "durability")]
    if coordinators > 1 if processes is None else processes:
        arguments.append("--processes")
    return LocalCluster(arguments, _native.milliseconds(timeout, "timeout") / 1000)
