"""Steps that are identified by their numbers, and lookups sent ahead of them: what the layers of all frameworks share.

The number of a step goes through JAX or Keras from the forward pass to the backward pass. There a callback, on a thread of the
framework, finds the step by it.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Callable, Deque, Iterable, Iterator, List, Mapping, Optional, Tuple, TypeVar

import numpy as np

from . import _native, errors
from ._pace import Pace
from .arrays import Hyper, Ids, Ragged, copied, unmasked
from .client import Lookup, Model
from .steps import Step, Steps

Sent = TypeVar("Sent")


def ids_of(batch: Any) -> Any:
    """The ids of a batch, where nobody says otherwise: its item or attribute "ids", the first part of a pair, or the batch itself."""
    given: Any = batch
    if isinstance(batch, (tuple, list)) and not hasattr(given, "ids"):
        if len(given) != 2:
            raise TypeError(f"ids: a batch that is a {type(given).__name__} of {len(given)} parts is not allowed without `ids`; say which of them are ids: "
                            'ids=lambda batch: {"name of the feature": batch[0]}')
        if not hasattr(given[0], "keys"):
            raise TypeError(f"ids: the first part of the pair is a {type(given[0]).__name__}, not a mapping; say which feature's ids it "
                            'has: ids=lambda pair: {"name of the feature": pair[0]}')
        return given[0]
    if isinstance(batch, Mapping):
        return given["ids"] if "ids" in given else given
    return getattr(given, "ids", given)


def ahead(batches: Iterable[Any], send: Callable[[Any], Sent], pace: Pace, forget: Callable[[List[Sent]], None],
          begin: Optional[Callable[[], None]] = None, sends: Callable[[], bool] = lambda: True) -> Iterator[Tuple[Sent, Any]]:
    """What `send` gave for a batch, and the batch. Before one is given, as many as `pace` says have been sent, its own included. `forget`
    hears at the end of those that were sent and not given, as where a loop is left; `begin` is called before the first is sent.
    While `sends` says no, none is taken from `batches` before its turn. An error of `batches` or `send` is raised once those before it have been given."""
    waiting: Deque[Tuple[Sent, Any]] = deque()
    failure: Optional[Exception] = None
    if begin is not None:
        begin()
    pace.pause()
    try:
        left, end = iter(batches), object()
        while True:
            while len(waiting) >= (pace.depth if sends() else 1):
                yield waiting.popleft()
                pace.step()
            try:
                batch = next(left, end)
                if batch is end:
                    break
                waiting.append((send(batch), batch))
            except Exception as error:
                failure = error
                break
        while waiting:
            yield waiting.popleft()
        if failure is not None:
            raise failure
    finally:
        failure = None  # which refers to this frame
        forget([sent for sent, _ in waiting])


def _copies(gradients: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: None if value is None else np.array(unmasked(value, f'gradient of feature "{name}"')) for name, value in gradients.items()}


class Checkpointed:
    """Checkpoints that go with steps, as the trainers of all frameworks have them."""

    def _behind(self) -> Steps:
        raise NotImplementedError

    def _wait(self) -> None:
        """Until what the framework has been given to compute has been computed."""

    @property
    def checkpoints(self) -> Mapping[str, str]:
        """The checkpoints that were requested with a step and have ended: by name, why saving failed; "": it was saved."""
        return dict(self._behind().checkpoints)

    def request_checkpoint(self, name: str) -> None:
        """Saves a checkpoint of this name with the next step, of exactly the steps up to that one, of all ranks: it goes with the
        state of the dense part after the same step. Any one rank asks. A step that is skipped, or whose update is refused, leaves it to
        the next update after that is known, which is later where steps are pipelined. `wait_checkpoint` waits for it, `finish` too, and
        `checkpoints` has its outcome."""
        self._wait()
        self._behind().request_checkpoint(name)

    def wait_checkpoint(self, name: str, timeout: Optional[float] = None) -> None:
        """Until a checkpoint that was requested with a step has been saved. Of a pipelined trainer it is begun when the ids of the
        next step are sent.

        timeout: seconds, after which TimeoutError is raised; default: the trainer's `patience`.
        NotFound if no step has asked for it. FailedPrecondition with the reason if it was not saved, as where the model has one of
        this name, of another run, or if a pipelined trainer has not begun it. Who does not wait is warned with a later step.
        """
        self._wait()
        self._behind().wait_checkpoint(name, timeout)


class Trainer(_native.Uncopied, Checkpointed):
    """Steps of a rank, by their numbers. Thread-safe; the arguments are those of Steps."""

    def __init__(self, model: Model, group: str, rank: Optional[int] = None, size: Optional[int] = None, **options: Any) -> None:
        self.model = model
        self._steps = Steps(model, group, 0 if rank is None else rank, 1 if size is None else size, **options)
        self._sent: Deque[Step] = deque()  # lookups whose update has not been sent
        self._loop: Optional[object] = None  # that sends steps ahead
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"emberd.trainer.Trainer({self.model.name!r}, group={self._steps.group!r})"

    @property
    def next_step(self) -> int:
        """The step whose update comes next. Joins the group, which waits for its other ranks."""
        with self._lock:
            return self._steps.next_step

    @property
    def reached(self) -> int:
        """As in Steps."""
        with self._lock:
            return self._steps.reached

    def _behind(self) -> Steps:
        return self._steps

    @property
    def partial(self) -> bool:
        """Whether a step may leave features out."""
        return self._steps.partial

    def send_of_loop(self, ids: Mapping[str, Ids]) -> int:
        """As `send`, of ids that may change. The step may be left out, as by `continue`."""
        with self._lock:
            number = self.send({name: copied(one) for name, one in ids.items()})
            self._sent[-1].of_loop = True
            return number

    def send(self, ids: Mapping[str, Ids]) -> int:
        """Sends the ids of the next step and gives its number. They must not change before its update has been made."""
        with self._lock:
            step = self._steps.send(ids)
            if any(before.forgotten for before in self._sent):
                # One of them was refused, which ended the stream. They are sent again when they are received; so is this
                # one, for now it stands where the first of them was.
                self._steps.forget()
                step.number = self._sent[-1].number + 1
            self._sent.append(step)
            return step.number

    def begin_loop(self, loop: object) -> None:
        """Before this loop sends steps ahead. One before it may have been left at any time."""
        with self._lock:
            self._loop = loop
            self._abandon()

    def _abandon(self) -> None:
        """Of steps without an update, those that were received are skipped, and the others are as if they had not been sent."""
        self._skip_received()
        if self._sent:
            self._sent.clear()
            self._steps.forget()

    def _skip_received(self) -> None:
        while self._sent and self._sent[0].received and not self._sent[0].forgotten:
            step = self._sent[0]
            try:
                self._steps.skip(step)
            finally:
                if step.gradients is not None:  # also where waiting for it was interrupted
                    self._sent.popleft()

    def forget(self, numbers: List[int], loop: object) -> None:
        """Steps that were sent last, by this loop, and have not been received are as if they had not been sent."""
        with self._lock:
            if not numbers or loop is not self._loop:  # a loop that has begun since has forgotten them
                return
            self._sent = deque(step for step in self._sent if step.number not in numbers)
            self._steps.forget()  # those before, which are wanted, are sent again

    def receive(self, number: int) -> Lookup:
        """The activations of a step. After an error the steps that were sent behind it are forgotten, too."""
        with self._lock:
            try:
                while self._sent and self._sent[0].number < number and self._sent[0].of_loop and not self._sent[0].received:
                    self._leave_out()
                for place, step in enumerate(list(self._sent)):
                    if step.number > number:
                        break
                    if step.forgotten and not step.received:  # a request that was refused has taken it along
                        self._sent[place] = self._steps.send(step.ids, step.concat)
                        self._sent[place].of_loop = step.of_loop
                return self._steps.receive(self._at(number))
            except errors.Error:
                self._sent = deque(step for step in self._sent if not step.forgotten)
                raise

    def _leave_out(self) -> None:
        """The first step: it counts, so that numbers which the loop has been given stay, but has no samples; its ids may be wrong."""
        self._steps.forget()  # those behind it are sent again
        self._sent[0] = self._steps.send({next(iter(self.model.features)): Ragged(np.zeros(0, np.int64), np.zeros(1, np.int64))}, partial=True)
        self._sent[0].of_loop = True
        self._steps.receive(self._sent[0])
        self._skip_received()

    def begin(self, ids: Mapping[str, Ids], number: Optional[int] = None) -> Tuple[int, Lookup]:
        """The number and the activations of the next step, whose ids are sent now, unless they have been, as `number`. A step
        before it that was not ended is skipped: it counts, and no row changes. Where the ids are sent now, those that were sent before and not
        received are forgotten, as of a loop that was left."""
        with self._lock:
            if number is None:
                self._abandon()
                number = self.send(ids)
            else:
                self._skip_received()
            return number, self.receive(number)

    def update(self, number: int, gradients: Mapping[str, Any], hyper: Optional[Hyper] = None,
               checkpoint: Optional[str] = None, *, own: bool = True) -> None:
        """Ends a step. own: the gradients stay as they are until the update has been made, even if that is after this."""
        with self._lock:
            step = self._at(number)
            if not own and (self._steps.pipelined or len(self._sent) > 1):
                gradients, own = _copies(gradients), True
            try:
                self._steps.update(step, gradients, hyper, checkpoint)
            finally:
                if step.gradients is not None:  # also where waiting for it was interrupted: Steps sees to it
                    self._sent.remove(step)
                    if not own and step in self._steps._under_way:  # to be sent again
                        step.gradients = _copies(step.gradients)

    def ids_in_progress(self, number: int) -> Optional[Mapping[str, Ids]]:
        """Of a step that has been received, and whose update is still to be sent; None: it is no such step."""
        with self._lock:
            return next((step.ids for step in self._sent if step.number == number and step.received), None)

    def look_up(self, ids: Mapping[str, Ids]) -> Lookup:
        """Rows as they are after all updates, but for the last one where steps are pipelined, without a step."""
        with self._lock:
            self._steps.confirm()
        return self.model.lookup(ids, partial=self._steps.partial)

    def restart(self, step: int) -> None:
        """Goes on from this step: forgets those in progress, and joins the group anew. RowsLost where its tables are at another
        one."""
        with self._lock:
            self._sent.clear()
            self._steps.restart(step)

    def finish(self) -> None:
        """Leaves the group, once all updates have been made and checkpoints saved. The next step joins again."""
        with self._lock:
            self._sent.clear()
            self._steps.finish()

    def _at(self, number: int) -> Step:
        for step in self._sent:
            if step.number == number and not step.forgotten:
                return step
        raise ValueError(f"step {number} is not in progress; steps in progress: {[step.number for step in self._sent]}. A step has one "
                         "lookup, of all features, and one update")
