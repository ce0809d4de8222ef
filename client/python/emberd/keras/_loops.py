"""What Keras does around a call of the layer, as the stack of calls shows it: a layer is not told of it."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any, Iterator, Optional

import keras

HOW = ('mixed_bfloat16 needs no scaling; or give the layer dtype="float32", and the model an optimizer without a scale: '
       "compile(..., auto_scale_loss=False)")


def models_of(frame: Any) -> Iterator[Any]:
    """The models whose methods are being run in this frame or around it, the innermost first."""
    while frame is not None:
        if "self" in frame.f_code.co_varnames[:1]:
            model = frame.f_locals.get("self")
            if isinstance(model, keras.Model):
                yield model
        frame = frame.f_back


def check_policy(policy: Any, name: str) -> None:
    if policy.name == "mixed_float16":
        raise ValueError(f"layer {name!r}: dtype: mixed_float16 is not allowed: Keras scales losses with it, and tables would be "
                         f"trained with gradients that are scaled; {HOW}")


def check_scale(name: str) -> None:
    """Refuses optimizers that scale the loss: they divide gradients of variables by it, but those of tables have been sent."""
    for model in models_of(sys._getframe(1)):
        optimizer: Any = getattr(model, "optimizer", None)
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            what = "a LossScaleOptimizer"
        elif getattr(optimizer, "loss_scale_factor", None) not in (None, 1):
            what = f"loss_scale_factor={optimizer.loss_scale_factor}"
        else:
            continue
        raise ValueError(f"layer {name!r}: {what} in the optimizer of model {model.name!r} is not allowed: it scales the loss, and "
                         f"tables would be trained with gradients that are scaled; {HOW}")


def refusal(policy: Any, name: str) -> Optional[ValueError]:
    """What training is refused with, if it is."""
    try:
        check_policy(policy, name)
        check_scale(name)
    except ValueError as error:
        return error.with_traceback(None)  # which refers to frames
    return None


# What follows is for JAX. Where a callback raises there, what was donated to the jitted function is lost, which of Keras is the
# whole model. So callbacks return instead, and the loop of Keras raises what they failed with once it has the results of the batch.
TRAINER = "keras.src.backend.jax.trainer"
OTHERS = ("keras.src.callbacks", "keras.src.trainers.data_adapters", "keras.src.trainers.epoch_iterator")
ENDS = {"fit": "on_train_end", "evaluate": "on_test_end", "predict": "on_predict_end"}
LOOPS = (*ENDS, "train_on_batch", "test_on_batch", "predict_on_batch")


class _Stop(keras.callbacks.Callback):
    """Raises at the end of a batch, or what comes after it, on the thread of the loop."""

    def __init__(self, error: BaseException, callbacks: Any, thread: int) -> None:
        super().__init__()
        self._error, self._callbacks, self._thread = error, callbacks, thread

    def _raise(self, *_: Any, **__: Any) -> None:
        if threading.get_ident() != self._thread:  # Keras may have others call the ends of batches
            return
        if self in self._callbacks.callbacks:
            self._callbacks.callbacks.remove(self)
        model: Any = self.model
        model.jax_state_sync()  # `evaluate` and `predict` do not where they are left
        _exchange(_interrupted, signal.default_int_handler)  # loops around this one are left, too
        raise self._error

    on_train_batch_begin = on_train_batch_end = on_epoch_end = on_train_end = _raise
    on_test_batch_begin = on_test_batch_end = on_test_end = _raise
    on_predict_batch_begin = on_predict_batch_end = on_predict_end = _raise


class _Watch(keras.callbacks.Callback):
    """Puts the handler of Ctrl-C back when the loop has ended."""

    def __init__(self, end: str) -> None:
        super().__init__()
        setattr(self, end, lambda logs=None: _end_of(sys._getframe(1)))


class _Sync:
    """In the place of `jax_state_sync` of a model, the last that a loop of one batch calls. It may be left over of a loop that
    failed before."""

    def __init__(self, loop: Any) -> None:
        self.loop, self.model = loop, loop.f_locals["self"]
        self.error: Optional[BaseException] = None

    def __call__(self) -> None:
        caller = sys._getframe(1)
        try:
            if caller is self.loop:
                jax: Any = sys.modules["jax"]
                jax.effects_barrier()  # what fails later would be known too late
        finally:
            type(self.model).jax_state_sync(self.model)
            if vars(self.model).get("jax_state_sync") is self:
                del vars(self.model)["jax_state_sync"]
        if caller is self.loop:
            _end_of(caller)
            if self.error is not None:
                raise self.error


def _loop_of(frame: Any) -> Any:
    """The frame of the innermost loop of Keras; None where it has not begun, as while it builds the model."""
    while frame is not None and not (frame.f_code.co_name in LOOPS and frame.f_globals.get("__name__") == TRAINER):
        frame = frame.f_back
    return frame if frame is None or _callbacks_of(frame) is not None or frame.f_code.co_name not in ENDS else None


def _callbacks_of(loop: Any) -> Any:
    """None: it is a loop of one batch, or it has not begun."""
    found = loop.f_locals.get("callbacks")
    return found if isinstance(found, keras.callbacks.CallbackList) else None


def _sync_of(loop: Any) -> Optional[_Sync]:
    """None: it is no loop of one batch, or past its end."""
    found = vars(loop.f_locals["self"]).get("jax_state_sync")
    return found if isinstance(found, _Sync) and found.loop is loop else None


def _is_stopping(loop: Any) -> bool:
    callbacks, sync = _callbacks_of(loop), _sync_of(loop)
    if callbacks is None:
        return sync is not None and sync.error is not None
    return any(isinstance(one, _Stop) for one in callbacks.callbacks)


def _stop(loop: Any, error: BaseException, thread: int) -> bool:
    """False: it is too late, for nothing follows in the loop that could raise this."""
    model, callbacks, sync = loop.f_locals["self"], _callbacks_of(loop), _sync_of(loop)
    if callbacks is None:
        if sync is None:
            return False
        sync.error = sync.error or error
        return True
    if loop.f_code.co_name == "predict" and model._jax_state_synced:
        return False
    if not _is_stopping(loop):
        stop = _Stop(error, callbacks, thread)
        stop.set_model(model)
        callbacks.callbacks.insert(0, stop)  # before others save what came of the batch
    return True


class Loops:
    """Those of models that have the layer with these turns."""

    def __init__(self, turns: Any) -> None:
        self._turns = turns

    def are_around(self) -> bool:
        """Whether the caller, which traces or computes a lookup, is called by one of them."""
        loop = _loop_of(sys._getframe(1))
        return loop is not None and self._is_one(loop)

    def _is_one(self, loop: Any) -> bool:
        return any(getattr(getattr(layer, "_held", None), "turns", None) is self._turns
                   for layer in loop.f_locals["self"]._flatten_layers())

    def hand_over(self, error: BaseException) -> bool:
        """From a callback of JAX: has the loop raise this. False: there is none, or it is not known which."""
        here, frame = threading.get_ident(), sys._getframe(1)
        if _is_of_jax(frame):
            found = [(thread, loop) for thread, other in sys._current_frames().items() if thread != here
                     for loop in [_loop_of(other)] if loop is not None and self._is_one(loop)]
        else:
            found = [(here, loop) for loop in [_loop_of(frame)] if loop is not None and self._is_one(loop)]
        return len(found) == 1 and _stop(found[0][1], error, found[0][0])


def _is_of_jax(frame: Any) -> bool:
    """Whether this is a thread of JAX, on which nobody has called anything."""
    while frame.f_back is not None:
        frame = frame.f_back
    return bool(frame.f_globals.get("__name__", "").startswith("jax."))


def note_beginning() -> None:
    """Where Keras asks for the variables of the layer: if that is for a loop, which is about to give them to JAX, from now on
    Ctrl-C waits for the end of a batch where a model would lose them. The second one does not wait. It stays as it is where
    somebody else handles it."""
    frame: Any = sys._getframe(1)
    while frame.f_code.co_name != "_get_jax_state":
        if frame.f_back is None or not frame.f_globals.get("__name__", "").startswith(("keras.src.", "emberd.keras.")):
            return
        frame = frame.f_back
    loop = _loop_of(frame)
    if loop is None or loop is not frame.f_back:
        return
    callbacks = _callbacks_of(loop)
    if callbacks is None:
        if _sync_of(loop) is None:
            vars(loop.f_locals["self"])["jax_state_sync"] = _Sync(loop)
    elif not any(isinstance(one, _Watch) for one in callbacks.callbacks):
        callbacks.callbacks.append(_Watch(ENDS[loop.f_code.co_name]))
    _exchange(signal.default_int_handler, _interrupted)


def _end_of(frame: Any) -> None:
    """Of the innermost loop around this frame."""
    while frame is not None and not (frame.f_code.co_name in LOOPS and frame.f_globals.get("__name__") == TRAINER):
        frame = frame.f_back
    if frame is None or _loop_of(frame.f_back) is None:
        _exchange(_interrupted, signal.default_int_handler)


def _exchange(old: Any, new: Any) -> None:
    """Of handlers of Ctrl-C, where it is the old one."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is old:
        signal.signal(signal.SIGINT, new)


def _interrupted(number: int, frame: Any) -> None:
    loop = _loop_of(frame)
    if (loop is None or _is_stopping(loop) or not _in_batch(frame, loop)
            or not _stop(loop, KeyboardInterrupt(), threading.get_ident())):
        _exchange(_interrupted, signal.default_int_handler)
        signal.default_int_handler(number, frame)


def _in_batch(frame: Any, loop: Any) -> bool:
    """Whether variables of the model may be in nobody's hands. Not where code of others runs that may take long: callbacks of
    Keras, and what gives batches."""
    model = loop.f_locals["self"]
    if model._jax_state_synced and all(one._value is not None for one in model.variables):
        return False  # it has them: Keras takes them away before it says so
    if loop.f_code.co_name in ("evaluate", "predict") or not (model._jax_state_synced or getattr(model, "_jax_state", None)):
        return True  # they leave a model without variables; and nor has Keras any to put back
    while frame is not loop:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("jax."):  # it may also collect garbage, where Python drops what is raised
            return True
        if module.startswith(OTHERS):
            return False
        frame = frame.f_back
    return True
