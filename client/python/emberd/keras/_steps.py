"""A step in each backend: activations in the forward pass, the update in the backward pass.

JAX has `emberd.jax.Embedding.in_jit` for this. The others call in order, and on one thread.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Optional, Union

import keras
import numpy as np

from ..arrays import Dense, Floats, Hyper, Ragged
from ..client import Model
from ..steps import Step, Steps

Found = Dict[str, Any]
Ids = Union[Dense, Ragged]
HyperOfStep = Optional[Callable[[Any], Mapping[str, Any]]]


def host(value: Any) -> Any:
    return None if value is None else keras.ops.convert_to_numpy(value)


def on_host(ids: Ids) -> Ids:
    """Ids of any backend as NumPy's."""
    if isinstance(ids, Dense):
        return Dense(host(ids.ids), host(ids.weights))
    splits = host(ids.row_splits)
    weights = host(ids.weights)
    return Ragged(host(ids.values)[:splits[-1]], splits, None if weights is None else weights[:splits[-1]])


class OneAtATime:
    """Steps that are made one after the other. One without its update is skipped by the next: it counts, and no
    row changes."""

    def __init__(self, model: Model, hyper: HyperOfStep, **options: Any) -> None:
        self.model, self._hyper = model, hyper
        self._steps = Steps(model, options.pop("group"), **options)
        self._current: Optional[Step] = None

    def begin(self, ids: Mapping[str, Ids]) -> Mapping[str, Floats]:
        if self._current is not None and not self._current.forgotten:
            self._steps.skip(self._current)
        self._current = None
        step = self._steps.send(ids)
        found = self._steps.receive(step)
        self._current = step
        return found

    def update(self, number: int, gradients: Mapping[str, Any]) -> None:
        if self._current is None or self._current.number != number:
            raise RuntimeError(f"step {number} is not under way: a model calls the layer once, with all features, and runs "
                               "backward once")
        hyper: Optional[Hyper] = None if self._hyper is None else {
            table: {name: float(host(value)) for name, value in values.items()}
            for table, values in self._hyper(number).items()}
        self._steps.update(self._current, gradients, hyper)
        self._current = None

    def number(self) -> int:
        assert self._current is not None
        return self._current.number

    def look_up(self, ids: Mapping[str, Ids]) -> Mapping[str, Floats]:
        self._steps.confirm()
        return self.model.lookup(ids)

    @property
    def next_step(self) -> int:
        return self._steps.next_step

    def finish(self) -> None:
        self._current = None
        self._steps.finish()


def in_jax(model: Model, hyper: HyperOfStep, **options: Any) -> Any:
    from ..jax import Embedding

    embedding = Embedding(model, **options)

    def call(token: Any, ids: Mapping[str, Ids], training: bool) -> Found:
        found: Found = embedding.in_jit(token.value, ids, hyper=hyper)
        return found

    return embedding, call


def in_torch(model: Model, hyper: HyperOfStep, **options: Any) -> Any:
    import torch

    from ..torch import _rank_and_size

    options["rank"], options["size"] = _rank_and_size(options["rank"], options["size"])
    steps = OneAtATime(model, hyper, **options)

    class Lookup(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, token: Any, ids: Any) -> Any:
            found = steps.begin(ids)
            context.number, context.names = steps.number(), list(found)
            return tuple(torch.from_numpy(found[name]).to(token.device) for name in context.names)

        @staticmethod
        def backward(context: Any, *gradients: Any) -> Any:
            steps.update(context.number, {name: gradient.cpu().numpy() for name, gradient in zip(context.names, gradients)})
            return gradients[0].new_zeros(()), None

    def call(token: Any, ids: Mapping[str, Ids], training: bool) -> Found:
        if any(getattr(one, "is_meta", False) for value in ids.values() for one in vars(value).values()):
            # Keras asks for shapes.
            return {name: torch.empty((_samples(value), model.features[name].embedding_dim), device="meta")
                    for name, value in ids.items()}
        on_cpu = {name: on_host(value) for name, value in ids.items()}
        if torch.is_grad_enabled() and token.value.requires_grad and training:
            names: List[str] = list(on_cpu)
            return dict(zip(names, Lookup.apply(token.value, on_cpu)))
        return {name: torch.from_numpy(values).to(token.value.device) for name, values in steps.look_up(on_cpu).items()}

    return steps, call


def in_tensorflow(model: Model, hyper: HyperOfStep, **options: Any) -> Any:
    import tensorflow as tf

    steps = OneAtATime(model, hyper, **{**options, "rank": options["rank"] or 0, "size": options["size"] or 1})

    def call(token: Any, ids: Mapping[str, Ids], training: bool) -> Found:
        names = list(ids)
        kinds: Any = [type(ids[name]) for name in names]
        flat = [one for name in names for one in vars(ids[name]).values()]
        given = [one for one in flat if one is not None]

        def ids_of(arrays: Any) -> Dict[str, Ids]:
            left = list(arrays)
            parts = iter([left.pop(0) if one is not None else None for one in flat])
            return {name: on_host(kind(*(next(parts) for _ in vars(ids[name])))) for name, kind in zip(names, kinds)}

        def run(function: Callable[[Mapping[str, Ids]], Mapping[str, Floats]], number: bool) -> Any:
            def on_call(*arrays: Any) -> Any:
                found = function(ids_of(arrays))
                return [np.int64(steps.number() if number else 0), *(found[name] for name in names)]

            result = tf.numpy_function(on_call, given, [tf.int64] + [tf.float32] * len(names))
            for name, one in zip(names, result[1:]):
                one.set_shape((_samples(ids[name]), model.features[name].embedding_dim))
            return result

        @tf.custom_gradient
        def begin(_: Any) -> Any:
            number, *found = run(steps.begin, True)

            def backward(*gradients: Any) -> Any:
                def on_call(number: Any, *arrays: Any) -> Any:
                    steps.update(int(number), dict(zip(names, arrays)))
                    return np.float32(0)

                done = tf.numpy_function(on_call, [number, *gradients], tf.float32)
                done.set_shape(())
                return done

            return found, backward

        found = begin(token.value) if training else run(steps.look_up, False)[1:]
        return dict(zip(names, found))

    return steps, call


def _samples(ids: Ids) -> Any:
    if isinstance(ids, Ragged):
        length = ids.row_splits.shape[0]
        return None if length is None else length - 1
    return ids.ids.shape[0]


def make(model: Model, hyper: HyperOfStep, **options: Any) -> Any:
    """The trainer, and the function that looks up in it."""
    backends = {"jax": in_jax, "torch": in_torch, "tensorflow": in_tensorflow}
    backend = keras.backend.backend()
    if backend not in backends:
        raise ValueError(f"the Keras backend {backend!r} is not supported; it must be one of {', '.join(backends)}")
    return backends[backend](model, hyper, **options)
