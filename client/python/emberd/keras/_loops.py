"""What Keras does around a call of the layer, as the stack of calls shows it: a layer is not told of it."""

from __future__ import annotations

import sys
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
        raise ValueError(f"layer {name!r}: dtype: mixed_float16 is not allowed: Keras scales losses with it, and tables would be trained with "
                         f"gradients that are scaled; {HOW}")


def check_scale(name: str) -> None:
    """Refuses optimizers that scale the loss: they divide the gradients of variables by it, but those of tables have been sent before."""
    for model in models_of(sys._getframe(1)):
        optimizer = getattr(model, "optimizer", None)
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            what = "a LossScaleOptimizer"
        elif getattr(optimizer, "loss_scale_factor", None) not in (None, 1):
            what = f"loss_scale_factor={optimizer.loss_scale_factor}"
        else:
            continue
        raise ValueError(f"layer {name!r}: {what} in the optimizer of model {model.name!r} is not allowed: it scales the loss, and tables would be "
                         f"trained with gradients that are scaled; {HOW}")
