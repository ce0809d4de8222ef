"""What Keras does around a call of the layer, as the stack of calls shows it: a layer is not told of it."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any, Iterator

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


# What follows is for JAX. Where a callback raises there, what was donated to the jitted function is lost, which of Keras is the
# whole model. So callbacks return instead, and the loop of Keras raises what they failed with once it has the results of the batch.
TRAINER = "keras.src.backend.jax.trainer"
OTHERS = ("keras.src.callbacks", "keras.src.trainers.data_adapters", "keras.src.trainers.epoch_iterator")
LOOPS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


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
        raise self._error

    on_train_batch_begin = on_train_batch_end = on_epoch_end = on_train_end = _raise
    on_test_batch_begin = on_test_batch_end = on_test_end = _raise
    on_predict_batch_begin = on_predict_batch_end = on_predict_end = _raise


def _loop_of(frame: Any) -> Any:
    """The frame of the innermost loop of Keras; None where it has not begun, as while it builds the model."""
    while frame is not None and not (frame.f_code.co_name in LOOPS and frame.f_globals.get("__name__") == TRAINER):
        frame = frame.f_back
    return frame if frame is None or frame.f_code.co_name.endswith("on_batch") or _callbacks_of(frame) is not None else None


def _callbacks_of(loop: Any) -> Any:
    """None: it is a loop of one batch, or it has not begun."""
    found = loop.f_locals.get("callbacks")
    return found if isinstance(found, keras.callbacks.CallbackList) else None


def _is_stopping(loop: Any) -> bool:
    callbacks = _callbacks_of(loop)
    if callbacks is None:
        return "jax_state_sync" in vars(loop.f_locals["self"])
    return any(isinstance(one, _Stop) for one in callbacks.callbacks)


def _stop(loop: Any, error: BaseException, thread: int) -> None:
    model, callbacks = loop.f_locals["self"], _callbacks_of(loop)
    if callbacks is not None:
        stop = _Stop(error, callbacks, thread)
        stop.set_model(model)
        callbacks.callbacks.insert(0, stop)  # before others save what came of the batch
        return

    def synced() -> None:
        del vars(model)["jax_state_sync"]
        model.jax_state_sync()
        raise error

    vars(model)["jax_state_sync"] = synced  # the last that a loop of one batch calls


def hand_over(error: BaseException) -> bool:
    """From a callback of JAX: has the loop raise this. False: there is none, or it is not known which."""
    here = threading.get_ident()
    loop = _loop_of(sys._getframe(1))
    found = [(here, loop)] if loop is not None else [(thread, loop) for thread, frame in sys._current_frames().items()
                                                     for loop in [_loop_of(frame)] if loop is not None and thread != here]
    if len(found) != 1:
        return False
    if not _is_stopping(found[0][1]):
        _stop(found[0][1], error, found[0][0])
    return True


def watch_interrupts() -> None:
    """From now on Ctrl-C waits for the end of a batch where a model would lose its variables. The second one does not wait.
    Elsewhere it is as Python has it, and where somebody else handles it."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)


def _interrupted(number: int, frame: Any) -> None:
    loop = _loop_of(frame)
    if loop is None or _is_stopping(loop) or not _in_batch(frame, loop):
        signal.default_int_handler(number, frame)
    _stop(loop, KeyboardInterrupt(), threading.get_ident())


def _in_batch(frame: Any, loop: Any) -> bool:
    """Whether variables of the model may be in nobody's hands. Not where code of others runs that may take long: callbacks of
    Keras, and what gives batches."""
    model = loop.f_locals["self"]
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
