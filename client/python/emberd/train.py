"""Training on a stream: lookups and updates of many steps, several under way at once, alone or as a rank of a group.

    with model.train("run-7", rank=rank, size=2) as stream:
        for step in range(stream.next_step, steps):
            found = stream.lookup({"user": users})
            …  # forward and backward on found["user"]
            stream.update({"user": gradient})

Lookups may be sent ahead: the ids of step k + 1 while step k computes. A stream that has failed raises the same error
from then on; open another one and go on from its `next_step`: all steps before it have been applied, no other. Where its
`made_generation` is the `generation` of no stream that you had, somebody else has made the last of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from typing import Any, Dict, Generator, Mapping, Optional, Tuple

import numpy as np

from . import _native, _records, errors
from ._native import Call, Handle
from .arrays import Floats, Hyper, Ids
from .client import Applied, Lookup, Model

CONSISTENCY = {"sync": 0, "async": 1, "bounded": 2}


def open_stream(model: Model, group: str, rank: int, size: int, consistency: str, pipelined: bool,
                staleness_bound: int, first_step: int, step_timeout: float) -> "TrainStream":
    options = _native.TrainOptions(
        ctypes.sizeof(_native.TrainOptions), _native.text(group, "group"), _native.whole(rank, "rank", high=2**31 - 1),
        _native.whole(size, "size", high=2**31 - 1), _native.choice(consistency, "consistency", CONSISTENCY), int(bool(pipelined)),
        _native.whole(staleness_bound, "staleness_bound"), _native.whole(first_step, "first_step"),
        _native.milliseconds(step_timeout, "step_timeout"))
    call = _native.lib().train(model.client._handle.get(), model._handle.get(), ctypes.byref(options))
    stream = TrainStream(model, Call(call).take("stream"), pipelined, group)
    model._known = True  # the stream says which step is next
    return stream


class TrainStream(_native.Uncopied):
    """One thread may send while another receives; a single thread may do both. Sending does not wait for the server, but
    half a second at the most where it has to give more shared memory and is silent. Ctrl-C while it sends closes the stream."""

    def __init__(self, model: Model, handle: Handle, pipelined: bool, group: str) -> None:
        self.model = model
        self.group = group
        self.pipelined = pipelined
        self._handle = handle
        self.next_step = int(_native.lib().stream_next_step(handle.get()))
        self.generation = int(_native.lib().stream_generation(handle.get()))  # grows whenever members join anew
        self.made_generation = int(_native.lib().stream_made_generation(handle.get()))  # of the step before; 0: not known
        # Of the step whose turn it is.
        self._send_lookup = self._receive_lookup = self._send_update = self._receive_update = self.next_step
        self._finishing = False
        self._asked: Dict[int, _records.Asked] = {}  # of lookups under way
        # Answers that came when the wait for them was interrupted.
        self._late: Optional[Handle] = None  # to a lookup
        self._late_update: Optional[_native.Update] = None
        self._checkpoints = 0  # that were asked for, and whose outcome has not come
        self._shapes: Dict[int, Mapping[str, Tuple[int, ...]]] = {}  # of rows of gradients, where they are not those of the model

    def __repr__(self) -> str:
        return f"emberd.TrainStream({self.model.name!r}, group={self.group!r}, next step {self._send_update})"

    def __enter__(self) -> "TrainStream":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None and self._handle.open and not _native.forked():
                self.finish()
        finally:
            self.close()

    def send_lookup(self, ids: Mapping[str, Ids], *, concat: bool = False, partial: bool = False) -> int:
        """Sends the ids of the next step, which are copied, and returns its number. concat: the activations of all
        features, which have the same number of samples, are received side by side, so that `Lookup.concat` is no copy, unless
        features are missing. partial: they may be, as in Model.lookup; their rows stay as they are."""
        rows, count, _, asked = _records.pack_batch(ids, self.model._dims, partial)
        step = self._send_lookup
        library = _native.lib()
        send = library.stream_send_lookup_concat if concat and asked.wanted == count else library.stream_send_lookup
        with self._sending():
            error = send(self._handle.get(), step, rows, count)
            if not error:
                self._asked[step] = asked
                if asked.shapes:
                    self._shapes[step] = asked.rows(self.model._row_shapes)
                self._send_lookup += 1
        _native.check(error)
        return step

    def receive_lookup(self, timeout: Optional[float] = None) -> Lookup:
        """The activations of the oldest lookup that was sent and not received. TimeoutError after `timeout` seconds; they
        can still be received later."""
        step = self._receive_lookup
        if step < self._send_lookup and step - int(self.pipelined) > self._send_update:
            raise errors.FailedPrecondition(
                f"the lookup of step {step} is answered once the update of step {step - 1 - int(self.pipelined)} has been "
                "made; send that first")
        handle, self._late = self._late, None
        if handle is None:
            found = _native.null()
            try:
                self._receive("stream_receive_lookup", found, timeout)
            except BaseException:  # Ctrl-C may come with the answer
                self._late = Handle(found.value, "lookup_free") if found.value else None
                raise
            assert found.value is not None
            handle = Handle(found.value, "lookup_free")
        lookup = Lookup(self.model, handle, self._asked.pop(step))
        self._receive_lookup += 1
        return lookup

    def send_update(self, gradients: Mapping[str, Any], *, hyper: Optional[Hyper] = None, copy: bool = False,
                    checkpoint: Optional[str] = None) -> int:
        """Sends the gradients of the next step, and returns its number. A feature that is missing, or None, has a zero
        gradient: its rows are updated all the same.

        gradients: by feature, of the shape of its activations, finite unless the table's
        `on_nonfinite_gradient` is "skip_row".
        float32 gradients are sent from where they lie, columns of a larger matrix too, and must not change until
        `receive_update`, unless copy is true. To a coordinator on this machine they are copied once, into memory that is
        shared, unless they were made by empty_gradients.
        hyper: as in Lookup.apply; every rank of a synchronous group gives the same.
        checkpoint: saves a checkpoint of this name that holds exactly the steps up to this one, of all ranks; any one rank
        asks. It is written while training goes on; `Applied.checkpoint` of a later step has its outcome.
        InvalidArgument for gradients that cannot be sent; the stream goes on. What the server
        refuses, `receive_update` raises, and the stream is over: InvalidArgument for a wrong shape,
        feature or value, Aborted if another rank failed.
        """
        step = self._send_update
        shapes = self._shapes.get(step, self.model._row_shapes)
        rows, strides, count, kept = _records.pack_gradients(gradients, shapes, strides=True)
        hypers, hyper_count, _ = _records.pack_hyper(hyper, self.model.tables)
        lease, name, send = _native.null(), _native.text(checkpoint, "checkpoint", optional=True), _native.lib().stream_send_update_strided
        try:
            with self._sending():
                error = send(self._handle.get(), step, rows, strides, count, hypers, hyper_count, name, None if copy else ctypes.byref(lease))
                if not error:
                    self._note_update(checkpoint)
        finally:
            _native.hold(lease.value, kept)
        _native.check(error)
        return step

    def empty_gradients(self, like: Mapping[str, Any]) -> Dict[str, Floats]:
        """Arrays for gradients, with any contents: by feature, float32 of the shapes of `like`, as of a Lookup.

        A coordinator on this machine reads them where they lie, so that not even the client copies what is written into
        them. Make them once, and use them for step after step: they must not change until `receive_update`. They may outlive
        the stream.
        """
        _records.check_mapping(like, "like")
        shapes: Dict[str, Tuple[int, ...]] = {}
        row_shapes = like._row_shapes if isinstance(like, Lookup) else self.model._row_shapes
        for name, one in like.items():
            if name not in self.model.features:
                raise errors.NotFound(f"like: feature {name!r} is not known; there are {', '.join(self.model.features)}")
            shape, of_row = np.shape(one), row_shapes[name]
            if shape[1:] != of_row or not shape:
                raise errors.InvalidArgument(f'like: feature "{name}": the shape {list(shape)} is not allowed; it must be that of '
                                             f"the activations, [samples, {', '.join(map(str, of_row))}]")
            shapes[name] = tuple(map(int, shape))
        sizes = [_records.aligned(math.prod(shape)) for shape in shapes.values()]
        held = _native.null()
        library = _native.lib()
        _native.check(library.stream_allocate_gradients(self._handle.get(), sum(sizes), ctypes.byref(held)))
        assert held.value is not None
        owner = Handle(held.value, "floats_free")
        return _records.cut_floats(library.floats_data(held.value), shapes, sizes, owner)

    def send_skip(self, *, checkpoint: Optional[str] = None) -> int:
        """Counts the next step without changing a row, and gives its number: for a step that is abandoned after its lookup,
        as where a gradient scaler meets an overflow. Every rank of a synchronous group does the same. Its answer is that of
        an update. checkpoint: as in send_update.
        """
        step, name, send = self._send_update, _native.text(checkpoint, "checkpoint", optional=True), _native.lib().stream_send_skip
        with self._sending():
            error = send(self._handle.get(), step, name)
            if not error:
                self._note_update(checkpoint)
        _native.check(error)
        return step

    @contextlib.contextmanager
    def _sending(self) -> Generator[None, None, None]:
        """What is raised in here comes from the handler of a signal, as of Ctrl-C. Nobody knows then whether the request was sent, so the
        stream is over."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    @property
    def _sent(self) -> Tuple[bool, int, int]:
        """Changes with each request that was sent, and where nobody knows whether one was."""
        return self._handle.open, self._send_lookup, self._send_update

    def _note_update(self, checkpoint: Optional[str]) -> None:
        self._checkpoints += bool(checkpoint)
        self._shapes.pop(self._send_update, None)
        self._send_update += 1

    def receive_update(self, timeout: Optional[float] = None) -> Applied:
        """The result of the oldest update that was sent and not received. TimeoutError after
        `timeout` seconds. Raises what the stream ended with, if that was before."""
        step = self._receive_update
        if self.pipelined and step < self._send_update and self._send_lookup <= step + 1 and not self._finishing:
            raise errors.FailedPrecondition(
                f"pipelined: the update of step {step} is answered once the lookup of step {step + 1} has been sent, or "
                "finish called; do that first")
        update, self._late_update = self._late_update, None
        if update is None:
            update = _native.Update(step=-1)
            try:
                self._receive("stream_receive_update", update, timeout)
            except BaseException:  # Ctrl-C may come with the answer
                self._late_update = update if update.step >= 0 else None
                raise
        self._receive_update += 1
        _native.sweep_leases()
        end = _native.lib().stream_take_checkpoint(self._handle.get()) if self._checkpoints else None
        if not end:
            return Applied(update.step, update.rows_updated, update.rows_skipped)
        self._checkpoints -= 1
        said = _native.text_of(Handle(end, "text_free"))
        return Applied(update.step, update.rows_updated, update.rows_skipped, checkpoint=said["checkpoint"],
                       checkpoint_error=said["error"], checkpoint_step=said.get("step", -1))

    def _receive(self, function: str, result: Any, timeout: Optional[float]) -> None:
        self.model.client._handle.get()  # an answer may have come before the client was closed
        receive = getattr(_native.lib(), function)
        error = _native.null()
        left = None if timeout is None else _native.milliseconds(timeout, "timeout")
        found, wrong = ctypes.byref(result), ctypes.byref(error)
        while True:
            wait = _native.WAIT_MS if left is None else min(left, _native.WAIT_MS)
            if receive(self._handle.get(), wait, found, wrong):
                return _native.check(error.value)
            if left is not None:
                left -= wait
                if left <= 0:
                    raise TimeoutError(f"no answer within {timeout} s; it can still be received later")

    def lookup(self, ids: Mapping[str, Ids], *, concat: bool = False, partial: bool = False) -> Lookup:
        """Sends a lookup and receives it. None may be under way. concat, partial: as in send_lookup."""
        if self._receive_lookup != self._send_lookup:
            raise errors.FailedPrecondition("a lookup is in progress; receive it with receive_lookup")
        self.send_lookup(ids, concat=concat, partial=partial)
        return self.receive_lookup()

    def update(self, gradients: Mapping[str, Any], *, hyper: Optional[Hyper] = None,
               checkpoint: Optional[str] = None) -> Applied:
        """Sends an update and receives it. None may be under way. Arguments and errors are those of
        send_update and receive_update."""
        if self._receive_update != self._send_update:
            raise errors.FailedPrecondition("an update is in progress; receive it with receive_update")
        self.send_update(gradients, hyper=hyper, checkpoint=checkpoint)
        return self.receive_update()

    def skip(self, *, checkpoint: Optional[str] = None) -> Applied:
        """Counts a step without changing a row, as send_skip does, and receives the answer. None may be under way."""
        if self._receive_update != self._send_update:
            raise errors.FailedPrecondition("an update is in progress; receive it with receive_update")
        self.send_skip(checkpoint=checkpoint)
        return self.receive_update()

    def finish(self) -> None:
        """No more requests: waits until those sent are answered. Raises what the stream ended with."""
        self._finishing = True
        Call(_native.lib().stream_finish(self._handle.get()))

    def close(self) -> None:
        """Cancels what is under way. Activations stay."""
        self._late = self._late_update = None
        self._handle.close()
