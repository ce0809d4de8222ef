"""Callbacks of Keras that set learning rates, on those of tables."""

from __future__ import annotations

import math
from typing import Any, Optional, Sequence

from ._layer import DistributedEmbedding


def on_tables(callback: Any, layer: DistributedEmbedding, tables: Optional[Sequence[str]] = None) -> Any:
    """The callback, as LearningRateScheduler or ReduceLROnPlateau, which from now on sees and sets the rate of tables, and not that of the
    model's optimizer:

        net.fit(..., callbacks=[keras.callbacks.ReduceLROnPlateau("loss"), on_tables(keras.callbacks.ReduceLROnPlateau("loss"), layer)])

    tables: default: all whose optimizer has a number as its rate; those of a stack go together. It sees the rate of the first; those of the others keep their proportion to it.
    """
    set_model = callback.set_model
    callback.set_model = lambda model: set_model(_Model(model, _Rates(layer, tables)))
    return callback


class _Rates:
    """What a callback takes for an optimizer."""

    def __init__(self, layer: DistributedEmbedding, tables: Optional[Sequence[str]]) -> None:
        known = layer.learning_rates
        self._layer, self._tables = layer, list(known if tables is None else tables)
        if not self._tables or not known.keys() >= set(self._tables):
            raise ValueError(f"tables: {', '.join(self._tables) or 'none'} is not allowed; they must be of those with a number above 0 as their rate: "
                             f"{', '.join(known) or 'there are none'}")
        layer._held.turns.check_shared(dict.fromkeys(self._tables, math.inf))  # any new one

    @property
    def learning_rate(self) -> float:
        return self._layer.learning_rates[self._tables[0]]

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        declared = self._layer._held.turns.declared
        self._layer.set_learning_rates({name: float(value) * declared[name] / declared[self._tables[0]] for name in self._tables})


class _Model:
    """A model with another optimizer."""

    def __init__(self, model: Any, optimizer: _Rates) -> None:
        self._model, self.optimizer = model, optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
