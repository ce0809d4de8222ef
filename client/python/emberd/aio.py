"""Clients, models and streams for asyncio: the methods of `emberd.Client`, `Model` and `TrainStream`, awaited.

    async with await emberd.aio.connect("host:7400") as client:
        model = await client.model("clicks-live")
        found = await model.lookup({"user": users})          # hundreds of requests at a time may wait here
        print(found["user"].shape)

They have the same names, arguments and errors. `client.compile`, `prepare`, `execute`, `run` and `read` are for programs, and `model.apply` and `release`
for what `lookup(train=True)` gave. `client.change_model` gives an emberd.ChangedModel: `emberd.aio.Model(client, changed.model)` is its model, to be awaited.

A call waits on a thread of the client's own, `threads` of them at most; what is more waits its turn. Arguments must not change before it has returned, and
functions among them, as `progress`, are called on that thread. A task that is cancelled no longer waits; a call that has begun goes on by itself: whether
an update was applied is not known then. A stream is closed by that: open it again, and go on from its `next_step`.
"""

from __future__ import annotations

import asyncio
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import (Any, AsyncIterator, Callable, Concatenate, Coroutine, Dict, Mapping, Optional, ParamSpec, Sequence, Tuple, Type, TypeVar, Union,
                    overload)

import numpy.typing as npt

from . import _native, client, errors, train
from .arrays import Floats, Hyper
from .client import Applied, Lookup
from .programs import Argument, Array, Bundle, Chain, PreparedBatch, Program, ProgramResult

Result = TypeVar("Result")
Given = TypeVar("Given")
P = ParamSpec("P")
Awaited = Callable[Concatenate[Any, P], Coroutine[Any, Any, Result]]

__all__ = ["Client", "Model", "TrainStream", "connect"]


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


def _awaited(method: Callable[Concatenate[Any, P], Result]) -> Awaited[P, Result]:
    """This method of `blocking`, to be awaited."""

    @functools.wraps(method)
    async def call(self: Any, /, *arguments: P.args, **options: P.kwargs) -> Result:
        result: Result = await self._run(method, self.blocking, *arguments, **options)
        return result

    return call


def _giving(made: Callable[[Any, Given], Result], method: Callable[Concatenate[Any, P], Given]) -> Awaited[P, Result]:
    """The same, where what it gives has methods to be awaited, too."""
    awaited = _awaited(method)

    @functools.wraps(method)
    async def call(self: Any, /, *arguments: P.args, **options: P.kwargs) -> Result:
        return made(self, await awaited(self, *arguments, **options))

    return call


def _model(of: "Client", found: client.Model) -> "Model":
    return Model(of, found)


def _stream(of: "Model", found: train.TrainStream) -> "TrainStream":
    return TrainStream(of, found)


class Client(_native.Uncopied):
    """Made by `connect`. `blocking` is the emberd.Client that it calls."""

    def __init__(self, blocking: client.Client, threads: int = 64) -> None:
        if not isinstance(blocking, client.Client):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _native.refuse_kind(blocking, "blocking", "an emberd.Client")
        self.blocking = blocking
        self._threads = _Threads(threads)
        self._run = self._threads.run

    def __repr__(self) -> str:
        return f"emberd.aio.Client({', '.join(self.blocking.addresses)})"

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    declare = _giving(_model, client.Client.declare)
    model = _giving(_model, client.Client.model)
    reset_model = _giving(_model, client.Client.reset_model)
    restore = _giving(_model, client.Client.restore)
    serve = _giving(_model, client.Client.serve)
    bundle = _awaited(client.Client.bundle)
    call_statistics = _awaited(client.Client.call_statistics)
    change_memory = _awaited(client.Client.change_memory)
    change_model = _awaited(client.Client.change_model)
    checkpoints = _awaited(client.Client.checkpoints)
    compile = _awaited(client.Client.compile)
    delete_checkpoint = _awaited(client.Client.delete_checkpoint)
    drop_group = _awaited(client.Client.drop_group)
    drop_model = _awaited(client.Client.drop_model)
    memory = _awaited(client.Client.memory)
    models = _awaited(client.Client.models)
    status = _awaited(client.Client.status)

    async def prepare(self, program: Program, ids: Mapping[str, Any]) -> PreparedBatch:
        """As emberd.Program.prepare."""
        return await self._run(_a(Program, program, "program").prepare, ids)

    async def execute(self, program: Program, *arguments: Argument, step: Optional[int] = None,
                      hyper: Optional[Hyper] = None) -> Union[ProgramResult, Applied]:
        """As calling an emberd.Program."""
        return await self._run(_a(Program, program, "program"), *arguments, step=step, hyper=hyper)

    async def run(self, chain: Chain) -> Any:
        """As emberd.Chain.run. Nothing may be added before it has returned."""
        return await self._run(_a(Chain, chain, "chain").run)

    @overload
    async def read(self, batch: Union[PreparedBatch, ProgramResult], *, csr: bool = False) -> Dict[str, Array]: ...

    @overload
    async def read(self, batch: Bundle) -> Tuple[Any, ...]: ...

    async def read(self, batch: Union[PreparedBatch, ProgramResult, Bundle], *, csr: bool = False) -> Any:
        """As `read` of an emberd.PreparedBatch, of a ProgramResult or of a Bundle. csr: of a PreparedBatch only."""
        if isinstance(batch, (ProgramResult, Bundle)):
            if csr:
                raise errors.InvalidArgument(f"csr: True is not allowed for a {type(batch).__name__}; it must be False")
            return await self._run(batch.read)
        return await self._run(_a(PreparedBatch, batch, "batch").read, csr=csr)

    async def cancel(self) -> None:
        """As emberd.Client.cancel. It needs no thread."""
        self.blocking.cancel()

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
        self._run = client._run

    def __repr__(self) -> str:
        return f"emberd.aio.Model({self.name!r})"

    train = _giving(_stream, client.Model.train)
    assign_rows = _awaited(client.Model.assign_rows)
    compile = _awaited(client.Model.compile)
    copy_from = _awaited(client.Model.copy_from)
    hot_rows = _awaited(client.Model.hot_rows)
    limits = _awaited(client.Model.limits)
    load_table = _awaited(client.Model.load_table)
    lookup = _awaited(client.Model.lookup)
    read_rows = _awaited(client.Model.read_rows)
    reset_limits = _awaited(client.Model.reset_limits)
    restore_tables = _awaited(client.Model.restore_tables)
    save_checkpoint = _awaited(client.Model.save_checkpoint)
    set_limits = _awaited(client.Model.set_limits)
    statistics = _awaited(client.Model.statistics)
    table = _awaited(client.Model.table)

    async def apply(self, lookup: Lookup, gradients: Mapping[str, npt.ArrayLike], *, step: Optional[int] = None,
                    hyper: Optional[Hyper] = None, deadline: Optional[float] = None) -> Applied:
        """As emberd.Lookup.apply, of a lookup of this model that was made with `train`."""
        return await self._run(_a(Lookup, lookup, "lookup").apply, gradients, step=step, hyper=hyper, deadline=deadline)

    async def release(self, lookup: Lookup) -> None:
        """As emberd.Lookup.release."""
        await self._run(_a(Lookup, lookup, "lookup").release)

    async def export(self, table: str, *, slot: str = "", first_row: int = 0, row_count: Optional[int] = None,
                     rows_at_a_time: Optional[int] = None) -> AsyncIterator[Tuple[int, Floats]]:
        """As emberd.Model.export: `async for first, rows in model.export("users")`."""
        runs = self.blocking.export(table, slot=slot, first_row=first_row, row_count=row_count, rows_at_a_time=rows_at_a_time)
        while (run := await self._run(lambda: next(runs, None))) is not None:
            yield run


class TrainStream(_native.Uncopied):
    """Made by `Model.train`, for `async with`. `blocking` is the emberd.TrainStream that it calls. Each call that waits has a thread of the client, so that
    it needs one for a task that sends beside one for a task that receives."""

    def __init__(self, model: Model, blocking: train.TrainStream) -> None:
        self.model = model
        self.blocking = blocking
        self.group, self.next_step = blocking.group, blocking.next_step

    def __repr__(self) -> str:
        return repr(self.blocking).replace("emberd.", "emberd.aio.", 1)

    async def __aenter__(self) -> "TrainStream":
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is None:
            await self._run(self.blocking.__exit__, None)
        else:
            self.blocking.close()

    async def _run(self, function: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
        try:
            return await self.model._run(function, *arguments, **options)
        except asyncio.CancelledError:  # nobody would get its answer
            self.blocking.close()
            raise

    empty_gradients = _awaited(train.TrainStream.empty_gradients)
    finish = _awaited(train.TrainStream.finish)
    lookup = _awaited(train.TrainStream.lookup)
    receive_lookup = _awaited(train.TrainStream.receive_lookup)
    receive_update = _awaited(train.TrainStream.receive_update)
    send_lookup = _awaited(train.TrainStream.send_lookup)
    send_skip = _awaited(train.TrainStream.send_skip)
    send_update = _awaited(train.TrainStream.send_update)
    skip = _awaited(train.TrainStream.skip)
    update = _awaited(train.TrainStream.update)

    async def close(self) -> None:
        """As emberd.TrainStream.close. It needs no thread."""
        self.blocking.close()


async def connect(addresses: Union[str, Sequence[str]], *, threads: int = 64, **options: Any) -> Client:
    """A client of a cluster; options are those of emberd.connect. threads: calls that are made at a time, 1 to 4096."""
    _native.whole(threads, "threads", 1, 4096)
    found = await asyncio.to_thread(functools.partial(client.connect, addresses, **options))
    return Client(found, threads)
