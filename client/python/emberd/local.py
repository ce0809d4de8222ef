"""A cluster of this process's own: the real server, `emberd up`, which ends with this process however that ends."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import threading
import time
import weakref
from typing import Any, Dict, Iterable, List, Optional, Tuple, Union

from . import _native, errors
from .client import Client, connect

_READY = re.compile(rb"^emberd: ready coordinator=(\S+) http=(\S*)", re.MULTILINE)
_STOPS = 30  # seconds, after which a server is killed


class _Server(_native.Uncopied):
    """A process of `emberd up`. `shares`: the clusters that use it, which ends with the last of them."""

    def __init__(self, arguments: List[str], timeout: float) -> None:
        self.log, self.owner = tempfile.TemporaryFile(), os.getpid()
        self.shares = 1
        # A session of its own: Ctrl-C in the terminal is for this process. The server ends when the pipe to its standard
        # input is closed, which the kernel does if nobody else.
        self.process = subprocess.Popen([str(_native.program_path()), "up", "--stop-on-eof", *arguments],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
                                        start_new_session=True)
        _running.add(self)
        try:
            ready = self._wait_ready(timeout)
        except BaseException:
            self.process.kill()
            self.stop()
            raise
        self.addresses: List[str] = ready[1].decode().split(",")
        self.http: str = ready[2].decode()

    def text(self) -> str:
        size = os.fstat(self.log.fileno()).st_size
        return os.pread(self.log.fileno(), size, 0).decode("utf-8", "replace")

    def stop(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(_STOPS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.log.close()

    def _wait_ready(self, timeout: float) -> "re.Match[bytes]":
        lines: List[bytes] = []
        stdout = self.process.stdout
        assert stdout is not None
        reader = threading.Thread(target=_read_lines, args=(stdout, lines), daemon=True)
        reader.start()
        end = time.monotonic() + timeout
        while True:
            ready = _READY.search(b"".join(lines))
            if ready is not None:
                return ready
            if self.process.poll() is not None or time.monotonic() > end:
                refused = self.process.poll() == 2
                raise (errors.InvalidArgument if refused else RuntimeError)(f"`emberd up` did not become ready:\n{self.text()}")
            time.sleep(0.01)


_running: "weakref.WeakSet[_Server]" = weakref.WeakSet()
_shared: Dict[Tuple[str, ...], _Server] = {}  # by the arguments
_lock = threading.RLock()  # a collection of garbage may let a cluster go while this thread has it


def _leave(server: _Server) -> None:
    """One cluster fewer. The last one stops the server."""
    if os.getpid() != server.owner:  # in a forked child it is the parent's
        return
    with _lock:
        server.shares -= 1
        if server.shares:
            return
        for arguments in [one for one, shared in _shared.items() if shared is server]:
            del _shared[arguments]
        server.stop()


class LocalCluster(_native.Uncopied):
    """Made by `local`. A context manager; `addresses` are those of the coordinators. It is closed when nothing refers to it any
    more, no client of `connect` either."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self.addresses, self.http = list(server.addresses), server.http
        self._leave = weakref.finalize(self, _leave, server)
        self._leave.atexit = False  # the kernel closes the pipe

    @property
    def address(self) -> str:
        """host:port of the first coordinator."""
        return self.addresses[0]

    @property
    def pid(self) -> int:
        """Of the server, which other clusters of the same arguments share."""
        return self._server.process.pid

    def log(self) -> str:
        """The log of the server: what it has written to standard error."""
        return self._server.text()

    def connect(self, **options: Any) -> Client:
        """A client: `emberd.connect` with the addresses of this cluster."""
        client = connect(self.addresses, **options)
        client._cluster = self
        return client

    def __repr__(self) -> str:
        return f"emberd.LocalCluster({', '.join(self.addresses)}; pid {self.pid})"

    def __enter__(self) -> "LocalCluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops the server and waits for its end, unless another cluster of `local` shares it. Rows that are not in `data` are
        lost. In a forked child, and the second time: does nothing."""
        self._leave()


def _read_lines(stdout: Iterable[bytes], lines: List[bytes]) -> None:
    try:
        for line in stdout:
            lines.append(line)
    except ValueError:
        pass  # closed


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()
    _shared.clear()
    # A forked child must not keep the server alive.
    for server in list(_running):
        if server.process.stdin is not None:
            server.process.stdin.close()


os.register_at_fork(after_in_child=_after_fork)


def _text(value: Any, what: str) -> str:
    return os.fsdecode(_native.text(value, what, path=True))


def local(shards: int = 2, *, sparsecores: int = 2, coordinators: int = 1, processes: Optional[bool] = None,
          listen: str = "127.0.0.1:0", http: str = "", data: Union[str, "os.PathLike[str]", None] = None,
          durability: Optional[str] = None, timeout: float = 60.0, new: bool = False) -> LocalCluster:
    """A cluster on this machine: started, or that which this process has started with the same arguments, with its rows. It ends when
    it has been closed, or forgotten, as often as it was asked for; with its clients, if it was forgotten. Its rows live as long as it
    does, and its checkpoints, which need `data`, longer.

    processes: a process for each shard and coordinator; otherwise all in one, which is faster. Several coordinators need it.
    http: "127.0.0.1:0" for the status page and metrics on a free port; `LocalCluster.http` has the address.
    data: the folder for checkpoints; created if it does not exist.
    durability: needs data, but for "memory". "checkpoint" (the default with data): some are saved
    automatically, and lost rows are restored from the newest one; "log": every change is on disk
    before it is answered, and a process that is killed loses nothing; "memory": neither.
    timeout: seconds in which it must be ready.
    new: starts one that no other call gives.
    """
    if durability not in (None, "memory") and data is None:
        raise ValueError(
            f"durability: {durability!r} needs a folder to write to; name one with data")
    counts = {"shards": shards, "sparsecores": sparsecores, "coordinators": coordinators}
    arguments = [f"--{name}={_native.whole(count, name, low=1, high=2**31 - 1)}" for name, count in counts.items()]
    arguments += ["--listen", _text(listen, "listen"), "--http", _text(http, "http")]
    if data is not None:
        arguments += ["--data", os.path.abspath(_text(data, "data")), "--durability", "checkpoint" if durability is None else _text(durability, "durability")]
    if coordinators > 1 if processes is None else processes:
        arguments.append("--processes")
    seconds = _native.milliseconds(timeout, "timeout") / 1000
    if new:
        return LocalCluster(_Server(arguments, seconds))
    with _lock:
        server = _shared.get(tuple(arguments))
        if server is not None:
            server.shares += 1  # before a collection of garbage finds the other clusters
            if server.process.poll() is not None:
                server.shares -= 1
                server = None
        if server is None:
            server = _shared[tuple(arguments)] = _Server(arguments, seconds)
        return LocalCluster(server)
