"""Clients and models for asyncio: the methods of `emberd.Client` and `emberd.Model`, awaited.

    async with await emberd.aio.connect("host:7400") as client:
        model = await client.model("clicks-live")
        found = await model.lookup({"user": users})          # hundreds of requests at a time may wait here
        print(found["user"].shape)

A call waits on a thread of the client's own, `threads` of them at most; what is more waits its turn. A task that is cancelled no longer waits, but
the call goes on by itself: whether an update was applied is not known then. Streams of training have `send_…` and `receive_…`, which need no thread of
asyncio: see emberd.TrainStream.
"""

from __future__ import annotations

import asyncio
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, AsyncIterator, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Type, TypeVar, Union

import numpy.typing as npt

from . import _native, client, errors
from .arrays import Floats, Hyper, Ids
from .checkpoints import Checkpoint, Checkpoints
from .client import Applied, Lookup, ModelStatus
from .programs import Argument, Array, Bundle, Chain, PreparedBatch, Program, ProgramResult
from .statistics import HotRow, ModelStatistics, ShardMemory

Result = TypeVar("Result")

__all__ = ["Client", "Model", "connect"]


class _Threads:
    """Where calls wait."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(_native.whole(threads, "threads", 1, 4096), thread_name_prefix="emberd.aio")
        self._ended = False

    async def run(self, function: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
        _native.lib()  # in a forked child, whose threads are gone, it raises
        loop = asyncio.get_running_loop()
        try:
            waiting = loop.run_in_executor(self._pool, lambda: self._call(lambda: function(*arguments, **options)))
        except RuntimeError as error:  # it has been shut down
            raise ValueError("this client, model or stream has been closed") from error
        return await waiting

    def _call(self, function: Callable[[], Result]) -> Result:
        cancelled = "the client was closed before this call had ended"
        if self._ended:  # it has waited for this thread
            raise errors.Cancelled(cancelled)
        try:
            return function()
        except ValueError as error:
            if self._ended and type(error) is ValueError:  # it has just begun
                raise errors.Cancelled(cancelled) from error
            raise

    def end(self) -> None:
        self._ended = True
        self._pool.shutdown(wait=False)


def _a(kind: Type[Result], given: Result, argument: str) -> Result:
    if not isinstance(given, kind):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _native.refuse_kind(given, argument, f"an emberd.{kind.__name__}")
    return given


class Client(_native.Uncopied):
    """Made by `connect`. `blocking` is the emberd.Client that it calls."""

    def __init__(self, blocking: client.Client, threads: int = 64) -> None:
        if not isinstance(blocking, client.Client):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _native.refuse_kind(blocking, "blocking", "an emberd.Client")
        self.blocking = blocking
        self._threads = _Threads(threads)

    def __repr__(self) -> str:
        return f"emberd.aio.Client({', '.join(self.blocking.addresses)})"

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def model(self, name: str) -> "Model":
        """As emberd.Client.model."""
        return Model(self, await self._threads.run(self.blocking.model, name))

    async def declare(self, config: Any, *, restore_from: Optional[str] = None) -> "Model":
        """As emberd.Client.declare."""
        return Model(self, await self._threads.run(self.blocking.declare, config, restore_from=restore_from))

    async def models(self) -> List[ModelStatus]:
        """As emberd.Client.models."""
        return await self._threads.run(self.blocking.models)

    async def memory(self) -> List[ShardMemory]:
        """As emberd.Client.memory."""
        return await self._threads.run(self.blocking.memory)

    async def checkpoints(self, model: Optional[str] = None) -> Checkpoints:
        """As emberd.Client.checkpoints."""
        return await self._threads.run(self.blocking.checkpoints, model)

    async def restore(self, model: str, name: Optional[str] = None) -> "Model":
        """As emberd.Client.restore."""
        return Model(self, await self._threads.run(self.blocking.restore, model, name))

    async def serve(self, model: str, name: Optional[str] = None, *, serve_as: Optional[str] = None,
                    storage_dtype: Optional[str] = None) -> "Model":
        """As emberd.Client.serve."""
        return Model(self, await self._threads.run(self.blocking.serve, model, name, serve_as=serve_as, storage_dtype=storage_dtype))

    async def compile(self, spec: Mapping[str, Any]) -> Program:
        """As emberd.Client.compile. A program may also be called as it is, where nothing else waits."""
        return await self._threads.run(self.blocking.compile, spec)

    async def bundle(self, *elements: Any) -> Bundle:
        """As emberd.Client.bundle. Arrays in it must not change before it has returned."""
        return await self._threads.run(self.blocking.bundle, *elements)

    async def prepare(self, program: Program, ids: Mapping[str, Any]) -> PreparedBatch:
        """As emberd.Program.prepare. The ids must not change before it has returned."""
        return await self._threads.run(_a(Program, program, "program").prepare, ids)

    async def execute(self, program: Program, *arguments: Argument, step: Optional[int] = None,
                      hyper: Optional[Hyper] = None) -> Union[ProgramResult, Applied]:
        """As calling an emberd.Program. The arguments must not change before it has returned."""
        return await self._threads.run(_a(Program, program, "program"), *arguments, step=step, hyper=hyper)

    async def run(self, chain: Chain) -> List[Any]:
        """As emberd.Chain.run. Nothing may be added before it has returned."""
        return await self._threads.run(_a(Chain, chain, "chain").run)

    async def read(self, batch: PreparedBatch, *, csr: bool = False) -> Dict[str, Array]:
        """As emberd.PreparedBatch.read."""
        return await self._threads.run(_a(PreparedBatch, batch, "batch").read, csr=csr)

    async def close(self) -> None:
        """Cancels calls that wait, which raise Cancelled, and disconnects."""
        self._threads.end()
        self.blocking.close()


class Model(_native.Uncopied):
    """A declared model. `blocking` is the emberd.Model that it calls: its `tables` and `features` say what there is."""

    def __init__(self, client: Client, blocking: client.Model) -> None:
        self.client = client
        self.blocking = blocking
        self.name = blocking.name

    def __repr__(self) -> str:
        return f"emberd.aio.Model({self.name!r})"

    def _run(self, function: Callable[..., Result], *arguments: Any, **options: Any) -> Any:
        return self.client._threads.run(function, *arguments, **options)

    async def lookup(self, ids: Mapping[str, Ids], *, train: bool = False, partial: bool = False,
                     deadline: Optional[float] = None) -> Lookup:
        """As emberd.Model.lookup. The ids must not change before it has returned."""
        found: Lookup = await self._run(self.blocking.lookup, ids, train=train, partial=partial, deadline=deadline)
        return found

    async def apply(self, lookup: Lookup, gradients: Mapping[str, npt.ArrayLike], *, step: Optional[int] = None,
                    hyper: Optional[Hyper] = None, deadline: Optional[float] = None) -> Applied:
        """As emberd.Lookup.apply, of a lookup of this model that was made with `train`."""
        if not isinstance(lookup, Lookup):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _native.refuse_kind(lookup, "lookup", "a Lookup, as `lookup` gives it")
        applied: Applied = await self._run(lookup.apply, gradients, step=step, hyper=hyper, deadline=deadline)
        return applied

    async def compile(self, kind: str = "lookup", features: Optional[Sequence[str]] = None, *, samples: Optional[int] = None,
                      dynamic: bool = False, **fields: Any) -> Program:
        """As emberd.Model.compile; Client has what runs programs."""
        program: Program = await self._run(self.blocking.compile, kind, features, samples=samples, dynamic=dynamic, **fields)
        return program

    async def read_rows(self, table: str, ids: Any, *, slot: str = "") -> Floats:
        """As emberd.Model.read_rows."""
        rows: Floats = await self._run(self.blocking.read_rows, table, ids, slot=slot)
        return rows

    async def assign_rows(self, table: str, ids: Any, values: Any, *, slot: str = "") -> None:
        """As emberd.Model.assign_rows."""
        await self._run(self.blocking.assign_rows, table, ids, values, slot=slot)

    async def export(self, table: str, *, slot: str = "", first_row: int = 0, row_count: Optional[int] = None,
                     rows_at_a_time: Optional[int] = None) -> AsyncIterator[Tuple[int, Floats]]:
        """As emberd.Model.export: `async for first, rows in model.export("users")`."""
        runs = self.blocking.export(table, slot=slot, first_row=first_row, row_count=row_count, rows_at_a_time=rows_at_a_time)
        while (run := await self._run(next, runs, None)) is not None:
            yield run

    async def save_checkpoint(self, name: Optional[str] = None, *, incremental: bool = False) -> Checkpoint:
        """As emberd.Model.save_checkpoint."""
        saved: Checkpoint = await self._run(self.blocking.save_checkpoint, name, incremental=incremental)
        return saved

    async def statistics(self, hot_rows: int = 0) -> ModelStatistics:
        """As emberd.Model.statistics."""
        found: ModelStatistics = await self._run(self.blocking.statistics, hot_rows)
        return found

    async def hot_rows(self, table: str, count: int = 10) -> List[HotRow]:
        """As emberd.Model.hot_rows."""
        found: List[HotRow] = await self._run(self.blocking.hot_rows, table, count)
        return found


async def connect(addresses: Union[str, Sequence[str]], *, threads: int = 64, **options: Any) -> Client:
    """A client of a cluster; options are those of emberd.connect. threads: calls that are made at a time, 1 to 4096."""
    _native.whole(threads, "threads", 1, 4096)
    found = await asyncio.to_thread(functools.partial(client.connect, addresses, **options))
    return Client(found, threads)
