"""Steps of training that survive the failure of a stream. The layers of all frameworks are built on them.

A step is one lookup and one update. When a stream fails because a coordinator, a connection or another rank has gone, it
is opened again: `next_step` then says which updates were made, and the others are sent again, with the same ids and the
same gradients. So an update is made once, and none is lost; where rows were lost, or another trainer has made a step,
RowsLost is raised.
"""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections import deque
from typing import Any, Callable, Deque, Dict, Generator, Iterable, Mapping, Optional, Set

from . import _native, errors
from .arrays import Hyper, Ids
from .checkpoints import Checkpoint, checkpoint_name
from .client import Applied, Lookup, Model
from .train import TrainStream

# What may be over after a while.
PASSING = (errors.Unavailable, errors.Aborted, errors.DeadlineExceeded, errors.FailedPrecondition)


class RowsLost(errors.DataLoss):
    """The tables are at another step than the trainer: a shard lost its rows, or another trainer uses this group."""


class Step:
    """A lookup that has been sent, until its update has been made."""

    def __init__(self, number: int, ids: Mapping[str, Ids], concat: bool = False, partial: bool = False) -> None:
        self.number = number
        self.ids = ids
        self.concat = concat
        self.partial = partial
        self.received = False
        self.forgotten = False  # by a request that was refused: to be sent again
        self.gradients: Optional[Mapping[str, Any]] = None  # once its update has been sent
        self.of_loop = False  # over prefetched batches, which may leave it out
        self.skipped = False  # and its update changes no row
        self.refused = False  # the last update that was sent for it
        self.hyper: Optional[Hyper] = None
        self.checkpoint: Optional[str] = None
        self.was_wanted = False  # the checkpoint is that of request_checkpoint, which the next update asks for where this one is refused

    def __repr__(self) -> str:
        return f"emberd.steps.Step({self.number}, features={list(self.ids)})"


class Steps:
    """Not thread-safe. Joins the group at the first lookup.

    patience: seconds after which a failure that persists is raised.
    partial: a step may leave features out, as in TrainStream.send_lookup.
    """

    def __init__(self, model: Model, group: str, rank: int = 0, size: int = 1, *, pipelined: bool = False,
                 consistency: str = "sync", staleness_bound: int = 0, first_step: int = 0, step_timeout: float = 60.0,
                 patience: float = 60.0, partial: bool = False) -> None:
        self.model = model
        self.partial = partial
        self.group, self.rank, self.size, self.pipelined = group, rank, size, pipelined
        self.patience = _native.milliseconds(patience, "patience") / 1000
        self.expected: Optional[int] = None  # where the tables must be when the group is joined
        self._unread = False  # no rows have been read since a state, or the original of a copy, said what is expected
        self._is_copy = False  # made by copy or pickle: its model is found by its name, so that model._goes_on says nothing
        self._first_step = _native.whole(first_step, "first_step")
        self._goes_on = False  # whoever trains knows that the tables may have been trained
        self.applied: Optional[Applied] = None  # of the last update that was made
        self._wanted: Optional[str] = None  # a checkpoint that the next update is to ask for
        self._asked: Dict[str, int] = {}  # checkpoints whose end is not known, and after which step they are
        self.checkpoints: Dict[str, str] = {}  # that were asked for and have ended: why there is none; "": saved
        self._options = dict(consistency=consistency, staleness_bound=staleness_bound, first_step=first_step,
                             step_timeout=step_timeout, pipelined=pipelined)
        self._stream: Optional[TrainStream] = None
        self._opened = False  # the last attempt had a stream
        self._next: Optional[int] = None  # of the next lookup; None: not joined yet
        self._generations: Set[int] = {0}  # in which the steps were made: those of its streams, that before, and "not known"
        self._under_way: Deque[Step] = deque()

    def __repr__(self) -> str:
        return f"emberd.steps.Steps({self.model.name!r}, group={self.group!r}, {len(self._under_way)} under way)"

    def __getstate__(self) -> Dict[str, Any]:
        """A copy has no step under way and asks for no checkpoint. It joins the group anew, where the tables must be at the step of now; where it reads rows of
        later steps before that, it says so: it has none of its own."""
        return {**self.__dict__, "expected": self.noted, "_unread": self.noted is not None, "_is_copy": True, "_stream": None, "_next": None,
                "_under_way": deque(), "_wanted": None, "_asked": {}, "checkpoints": {}}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        """Also of those that were pickled before they had these."""
        self.__dict__.update({"_unread": False, "_is_copy": True, "_first_step": 0, **state})

    @property
    def next_step(self) -> int:
        """The step whose update is to be given next. Joins the group."""
        self._goes_on = True  # who asks goes on from there
        return self.reached

    @property
    def reached(self) -> int:
        """The same, without going on deliberately: joining the group warns of trained tables."""
        if self._next is None:
            self._try(lambda: None, None)
        assert self._next is not None
        waiting = [step for step in self._under_way if step.gradients is None]
        return waiting[0].number if waiting else self._next

    @property
    def noted(self) -> Optional[int]:
        """The same as far as it is known without joining: of a copy, or after `expect`, the step from which it is to go on. None: it is not known."""
        return self.reached if self.joined else self.expected

    def expect(self, step: Optional[int]) -> None:
        """Of what has not joined: RowsLost when it joins, where the tables are at another step. None: at whichever they are."""
        self.expected, self._unread = step, step is not None

    def warn_of_other_rows(self) -> None:
        """Before rows are read without joining: says once where they are known to be those of another step than the expected one."""
        if not self._unread:
            return
        self._unread = False
        if self.joined or self.expected is None or (self.model._goes_on and not self._is_copy):
            return
        found = self.model._reached_by(self.group)
        if found is not None and (found > self.expected or found == 0 < self.expected):
            warn(f"emberd: the dense part is at step {self.expected}, the tables of model {self.model.name!r}, group {self.group!r}, "
                  + (f"have been trained for {found} steps or more" if found else "are new") + "; load a dense part and tables of the same step"
                  + (". A copy of a module has no rows of its own: keep those of a step by save_checkpoint, and give an average the state of now" if self._is_copy else ""))

    @property
    def at_rest(self) -> bool:
        """From a lookup to its update no row changes."""
        return not self.pipelined and self._options["consistency"] == "sync"

    @property
    def only_looked_up(self) -> bool:
        """Whether there are no steps, for no table has an optimizer."""
        return all(table.optimizer == "none" for table in self.model.tables.values())

    @property
    def joined(self) -> bool:
        """Whether the number of the next step is known."""
        return self._next is not None

    def send(self, ids: Mapping[str, Ids], concat: bool = False, partial: Optional[bool] = None) -> Step:
        """Sends a lookup. `ids` must not change before the update has been made. concat, partial: as in TrainStream.send_lookup; partial None: as it is now of all."""
        step = Step(-1, ids, concat, self.partial if partial is None else partial)

        def attempt() -> None:
            assert self._next is not None
            with self._sending() as stream:
                stream.send_lookup(ids, concat=concat, partial=step.partial)
                step.number = self._next
                self._next += 1
                self._under_way.append(step)

        self._try(attempt, None)
        return step

    def receive(self, step: Step) -> Lookup:
        """The activations of the oldest lookup that has not been received."""

        def attempt() -> Lookup:
            assert self._stream is not None
            return self._stream.receive_lookup()

        first = self._to_receive()
        if step is not first:
            raise RuntimeError(f"step {step.number} is not the next to be received"
                               + (f"; that is step {first.number}, which is received and updated first" if first else ""))
        open_steps = [one.number for one in self._under_way if one.received and one.gradients is None]
        if len(open_steps) > int(self.pipelined):
            raise errors.FailedPrecondition(f"step {step.number} is received once the steps before it have been updated or skipped, "
                                            f"but step {open_steps[0]} has no update yet")
        self.confirm()
        try:
            lookup: Lookup = self._try(attempt, step)
        except errors.Error:
            self._forget_lookups()
            raise
        step.received = True
        return lookup

    def is_next(self, step: Step) -> bool:
        """Whether it is to be received next: not behind one for which nobody waits any more, as after Ctrl-C, nor behind a later
        batch, as where one before that was found to be refused when it was sent. `forget` them then."""
        return step is self._to_receive()

    def _to_receive(self) -> Optional[Step]:
        return next((one for one in self._under_way if not one.received), None)

    def update(self, step: Step, gradients: Mapping[str, Any], hyper: Optional[Hyper] = None,
               checkpoint: Optional[str] = None) -> None:
        """The update of the oldest step without one. Unless pipelined, it has been made when this returns. The gradients must
        not change before that. checkpoint: as in TrainStream.send_update."""
        self._check_turn(step)
        wanted = self._wanted if checkpoint is None else checkpoint
        asks = None if wanted is None or wanted == "" else checkpoint_name(wanted, "checkpoint")

        def attempt() -> None:
            try:
                with self._sending(step) as stream:
                    step.gradients, step.hyper, step.checkpoint, step.was_wanted = gradients, hyper, asks, asks == self._wanted
                    stream.send_update(gradients, hyper=hyper, checkpoint=asks)
            finally:
                if asks and step.gradients is not None:
                    self.checkpoints.pop(asks, None)
                    self._asked[asks] = step.number

        try:
            self._try(attempt, step, step)
            self.confirm(given=step)
        finally:
            if wanted == self._wanted and step.gradients is not None:
                self._wanted = None

    def skip(self, step: Step) -> None:
        """Counts the oldest step without an update, but changes no row. Every rank of a group skips it, or none."""
        self._check_turn(step)

        def attempt() -> None:
            with self._sending(step) as stream:
                step.gradients, step.skipped = {}, True
                stream.send_skip()

        self._try(attempt, step, step)
        self.confirm(given=step)

    @contextlib.contextmanager
    def _sending(self, step: Optional[Step] = None) -> Generator[TrainStream, None, None]:
        """Where a signal interrupts this, as by Ctrl-C, nobody may know whether a request was sent: joining anew tells. step: whose update
        it is; noted beforehand, it counts as sent then."""
        assert self._stream is not None
        stream, before = self._stream, self._stream._sent
        try:
            yield stream
        except BaseException:
            if stream._sent != before:
                self._leave()
            elif step is not None:
                step.gradients, step.skipped = None, False
            raise

    def confirm(self, all_of_them: bool = False, given: Optional[Step] = None) -> None:
        """Waits for the updates that were sent. If pipelined, the last one is left to overlap with what the trainer does. One
        that is refused has changed nothing: that of `given` may be given again, or skipped; an earlier one is skipped."""

        def ready() -> bool:
            sent = sum(step.gradients is not None for step in self._under_way)
            return sent > (0 if all_of_them else int(self.pipelined))

        def attempt() -> None:
            if ready():  # not so if it turned out that the update had been made
                assert self._stream is not None
                self.applied = self._stream.receive_update()
                self._under_way.popleft()  # first: a warning of the checkpoint may be raised
                if self.applied.checkpoint:
                    self._note_end(self.applied.checkpoint, self.applied.checkpoint_error, self.applied.checkpoint_step)

        while ready():
            self._try(attempt, self._under_way[0], given)

    def forget(self) -> None:
        """Forgets the lookups that have not been received."""
        if self._under_way and not self._under_way[-1].received:
            self._leave()
            self._forget_lookups()

    def finish(self) -> None:
        """All updates have been made when it returns; lookups without one are forgotten. The next lookup joins again."""
        if any(step.gradients is None for step in self._under_way):
            self._leave()  # they would hold the answers of updates back
            while self._under_way and self._under_way[-1].gradients is None:
                forgotten = self._under_way.pop()
                forgotten.forgotten = True
                self._next = forgotten.number
        if self.pipelined and self._under_way:

            def attempt() -> None:  # no lookup follows that the last update could wait for
                if self._under_way:
                    assert self._stream is not None
                    self._stream.finish()

            self._try(attempt, self._under_way[-1])
        self.confirm(all_of_them=True)
        self._end()
        for name in list(self._asked):
            self._await_checkpoint(name, time.monotonic() + self.patience)

    def request_checkpoint(self, name: str) -> None:
        """Has the next update ask for a checkpoint, unless that names another one."""
        self._wanted = checkpoint_name(name, "name")

    def wait_checkpoint(self, name: str, timeout: Optional[float] = None) -> None:
        """Until a checkpoint that was asked for with a step has been saved. FailedPrecondition with the reason if it was not.
        TimeoutError after `timeout` seconds, by default `patience`."""
        end = time.monotonic() + (_native.milliseconds(timeout, "timeout", optional=True) / 1000 or self.patience)
        _native.text(name, "name")
        if name not in self.checkpoints and name not in self._asked:
            raise errors.NotFound(f"name: no step of this trainer has asked for a checkpoint {name!r}")
        asked = self._asked.get(name)
        if self.pipelined and asked is not None and self._stream is not None and self._next == asked + 1:
            raise errors.FailedPrecondition(f"checkpoint {name!r} begins when the ids of the next step are sent, or with finish(), for the trainer is pipelined")
        self._await_checkpoint(name, end)
        if self.checkpoints[name]:
            raise errors.FailedPrecondition(f"checkpoint {name!r} was not saved: {self.checkpoints[name]}")

    def _note_end(self, name: str, error: str, step: int) -> None:
        """Of what this step has asked for. It is not the end of a later one's, where that has asked for the name again."""
        if step == -1 or self._asked.get(name) == step:  # -1: an older coordinator, which does not say it
            self.checkpoints[name] = error
            self._asked.pop(name, None)
        if error:
            warnings.warn(f"checkpoint {name!r} of model {self.model.name!r} was not saved: {error}", RuntimeWarning, stacklevel=2)

    def _await_checkpoint(self, name: str, end: float) -> None:
        while (after := self._asked.get(name)) is not None:
            found = self._saved(name)
            if found:
                fits = self._holds(found, after + 1)
                self._note_end(name, "" if fits else f"there is another checkpoint {name!r}, of another step", after)
            elif time.monotonic() > end:
                raise errors.DeadlineExceeded(f"checkpoint {name!r} has not been saved yet; the log of the server says why")
            else:
                time.sleep(0.05)

    def _saved(self, name: str) -> Optional[Checkpoint]:
        return next((one for one in self.model.client.checkpoints(self.model.name) if one.name == name), None)

    def _holds(self, saved: Checkpoint, after: int) -> bool:
        """Whether it is of the steps before `after`; of ranks that go on without each other, also of later ones."""
        if self._options["consistency"] == "sync":
            return saved.groups.get(self.group) == after
        return saved.groups.get(f"{self.group}#{self.rank}", -1) >= after

    def _note_refused(self, step: Step) -> None:
        step.refused = True
        if step.checkpoint is not None and self._asked.get(step.checkpoint) == step.number:
            del self._asked[step.checkpoint]
            self.checkpoints[step.checkpoint] = f"the update of step {step.number} was refused"
            if step.was_wanted and self._wanted is None:
                self._wanted = step.checkpoint

    def restart(self, expected: int) -> None:
        """Forgets all steps, and joins the group anew. RowsLost where its tables are not at step `expected`."""
        self.expected = _native.whole(expected, "step")
        self._leave()
        for step in self._under_way:
            step.forgotten = True
        self._under_way.clear()
        self._next = None
        try:
            self.next_step
        except RowsLost:
            self.expected = None
            raise

    def _check_turn(self, step: Step) -> None:
        first = next((one for one in self._under_way if one.gradients is None), None)
        if step is not first or not step.received:
            raise RuntimeError(f"step {step.number} is not the next to be updated or skipped")

    def _forget_lookups(self, last: Optional[Step] = None) -> None:
        """Those after `last`; None: those that have not been received."""
        while self._under_way and self._under_way[-1] is not last and self._under_way[-1].gradients is None:
            if last is None and self._under_way[-1].received:
                return
            forgotten = self._under_way.pop()
            forgotten.forgotten = True
            self._next = forgotten.number

    def _leave(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _end(self) -> None:
        """Leaves in order, where nothing is under way: a stream that is closed before it has ended counts as one that has failed."""
        stream = self._stream
        try:
            if stream is not None and not stream._finishing:
                stream.finish()
        except errors.Error:
            pass  # all updates have been made
        finally:
            self._leave()

    def _settle(self, given: Optional[Step]) -> None:
        """After a refusal: which update was it? Each that was sent is made on a stream of its own, or skipped."""
        while self._under_way and self._under_way[0].gradients is not None:
            first = self._under_way[0]
            if first is given:  # to be given again
                self._note_refused(first)
                first.gradients, first.skipped = None, False
                return
            try:
                self._join(only=first)
                if self._stream is not None and first in self._under_way:
                    self._stream.finish()
                    self._under_way.popleft()
            except (RowsLost, *PASSING):
                return
            except errors.Error:
                if first.refused:
                    return
                self._note_refused(first)
                first.gradients, first.skipped = {}, True
            finally:
                self._leave()

    def _try(self, attempt: Callable[[], Any], last: Optional[Step], given: Optional[Step] = None) -> Any:
        """Retries until it succeeds, or cannot succeed. `last` is the step that it is for, or None for a new one; `given` that
        whose update it is."""
        began: Optional[float] = None
        pause, refused = 0.05, False
        while True:
            try:
                self._opened = self._stream is not None
                if self._stream is None:
                    self._join()
                return attempt()
            except RowsLost:
                self._leave()
                raise
            except PASSING:
                self._leave()
                now = time.monotonic()
                began = began or now
                if now - began > self.patience or self.only_looked_up:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, 1.0)
            except errors.Error:
                # A stream ends with the first request that is refused, which may be one that was sent ahead: without those
                # it is tried once more.
                self._leave()
                if refused:
                    if self._opened:
                        self._settle(given)
                    raise
                refused = True
                self._forget_lookups(last)

    def _join(self, only: Optional[Step] = None) -> None:
        known = self.model._goes_on
        stream = self.model.train(self.group, self.rank, self.size, **self._options)  # type: ignore[arg-type]
        self._opened = True
        try:
            self._check_place(stream.next_step, stream.made_generation, known)
            self._generations.add(stream.generation)
            self._send_again(stream, [step for step in self._under_way if only in (None, step)])
        except BaseException:
            stream.close()
            raise
        self._stream = stream

    def _check_place(self, reached: int, made_generation: int, known: bool) -> None:
        """All steps before `reached` have been made, the last of them in this generation. known: it is no surprise that there are some."""
        if self._next is None:
            if self.expected is not None and reached != self.expected:
                source = self.model._source
                raise RowsLost(f"the dense part is at step {self.expected}, the tables of model {self.model.name!r}, group "
                               f"{self.group!r}, are at step {reached}; load a dense part and tables of the same step" + (
                                   f", or name the group: client.change_model({source!r}, config, groups=[{self.group!r}])" if source and not reached else ""))
            begins = 0 < reached == self._first_step  # it was said where it does
            if self.expected is None and not (self._goes_on or known or self.rank or begins):
                trained = {self.group: reached} if reached else {} if self.model.created else self.model._trained_by()
                if any(trained.values()):
                    self._warn_of_trained(*max(trained.items(), key=lambda one: one[1]))
            self._goes_on = True
            self._next = reached
            self._generations = {0, made_generation}
            return
        first = self._under_way[0].number if self._under_way else self._next
        sent = sum(step.gradients is not None for step in self._under_way)
        if not first <= reached <= first + sent or made_generation not in self._generations:
            why = "rows were lost" if reached < first else (
                f"another trainer uses this group, and has made step {reached - 1}; give each trainer a group of its own")
            raise RowsLost(f"this trainer is at step {first}, the tables of model {self.model.name!r}, group "
                           f"{self.group!r}, are at step {reached}: {why}")
        while self._under_way and self._under_way[0].number < reached:
            self._under_way.popleft()

    def _warn_of_trained(self, group: str, reached: int) -> None:
        name = self.model.name
        by = f"group {group!r} has trained its tables for {reached} step{'s' * (reached > 1)}" if group else "its tables have been trained"
        warn(
            f"emberd: model {name!r} was there already, and {by}, from which this run goes on. To begin anew, "
            f"drop the model by client.drop_model({name!r}) before it is declared, or give it another name or another data= of emberd.local. To go on, load the "
            "state of the dense part of the same step. A run that asks for `next_step` first, restores the model or takes it from client.model is not warned")

    def _send_again(self, stream: TrainStream, steps: Iterable[Step]) -> None:
        for step in steps:
            stream.send_lookup(step.ids, concat=step.concat, partial=step.partial)
            if step.received:
                stream.receive_lookup()  # the gradients are those of what came the first time
            if step.skipped:
                stream.send_skip()
            elif step.gradients is not None:
                stream.send_update(step.gradients, hyper=step.hyper, checkpoint=step.checkpoint)


def warn(said: str) -> None:
    """Where the user's code is."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("emberd", "torch", "jax", "keras"):
        level, frame = level + 1, frame.f_back
    warnings.warn(said, stacklevel=level)
