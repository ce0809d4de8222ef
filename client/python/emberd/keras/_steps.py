"""A step in each backend: activations in the forward pass, the update in the backward pass. Without `training=True` it is
not known before the backward pass that there is one, but on JAX: the step begins there.

JAX has `emberd.jax.Embedding.in_jit` for this. The others call in order, and on one thread.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple, Union

import keras
import numpy as np

from ..arrays import Dense, Hyper, Ragged, Sequences, activation_shape, are_same, as_int32, as_ints, cut, map_arrays
from ..client import Model
from ..trainer import Trainer
from . import _loops
from ._turns import Turns

Found = Dict[str, Any]
Ids = Union[Dense, Ragged, Sequences]
Rates = Mapping[str, Optional[float]]
HyperOfStep = Optional[Callable[[Any], Mapping[str, Any]]]
Refusal = Optional[ValueError]  # of training, where the call does not say whether it trains
to_numpy: Callable[[Any], Any] = keras.ops.convert_to_numpy


def on_host(ids: Ids) -> Ids:
    """Ids of any backend as NumPy's."""
    found = map_arrays(to_numpy, ids)
    return cut(found) if isinstance(found, Ragged) else found


def as_ids(values: Any, what: str, sent: bool) -> Any:
    """NumPy's ids as the backend takes them, which JAX cuts to 32 bits. sent: they go to the cluster as they are."""
    values = as_ints(values, what)
    if keras.backend.backend() == "jax" and not sent:
        import jax

        if jax.dtypes.canonicalize_dtype(np.int64) != np.int64:
            return as_int32(values, what, 'set jax.config.update("jax_enable_x64", True), or send them ahead by `prefetch`')
    return values


def shapes_of(model: Model, ids: Mapping[str, Ids]) -> Dict[str, Any]:
    """Of the activations."""
    return {name: activation_shape(value, model.features[name].output_shape, model.features[name].embedding_dim) for name, value in ids.items()}


def unlearned(name: str) -> ValueError:
    """Of weights that are trained: their gradient would be zero, in silence."""
    return ValueError(f"feature {name!r}: weights: the loss is differentiated with respect to them, which this layer does not do; give keras.ops.stop_gradient(weights)")


class HostTurns(Turns):
    """Steps that are made one after the other, on one thread, with what goes along with each update."""

    def __init__(self, hyper: HyperOfStep, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._hyper = hyper
        self._open = -1  # the step that has no update yet

    def begin(self, ids: Mapping[str, Any], number: Optional[int] = None) -> Tuple[int, Any]:
        """The same ids once more, before the update, are the same step: keras.RematScope, and what TensorFlow and PyTorch have like it, make the forward
        pass again for the backward pass."""
        of_open = self._ids_of_open()
        if of_open is not None and (are_same(of_open, ids) if number is None else number == self._open):
            return self._open, self._trainer.look_up(of_open)
        self._open = -1
        begun = super().begin({name: map_arrays(np.array, one) for name, one in ids.items()}, number)  # the caller may use its memory again
        self._open = begun[0]
        return begun

    def _ids_of_open(self) -> Optional[Mapping[str, Any]]:
        """Of what has begun and has no gradient yet: a step, or a part of one."""
        if self._calls == 1:
            return self._trainer.ids_in_progress(self._open)
        return self._parts[-1][0] if self._open >= 0 and self._parts and not self._parts[-1][1] else None

    def begin_late(self, ids: Mapping[str, Ids], number: Optional[int], begun: int) -> int:
        """In the backward pass. begun: what it was when the rows were looked up. A gradient that comes behind that of another call, or a
        second time, would be that of other rows, or be made twice."""
        if begun != self.begun:
            raise ValueError("another gradient is not allowed, for a step has begun since these rows were looked up. A step has one lookup, of "
                             "all features, and one gradient")
        return self.begin(ids, number)[0]

    def end(self, number: int, gradients: Mapping[str, Any], begun: int) -> None:
        """begun: see `update`."""
        self._open = -1  # where the update is refused, too
        hyper: Optional[Hyper] = None if self._hyper is None else {
            table: {name: float(to_numpy(value)) for name, value in values.items()}
            for table, values in self._hyper(number).items()}
        self.update(number, gradients, hyper, begun=begun)


def in_jax(model: Model, hyper: HyperOfStep, rates: Rates, calls: int, **options: Any) -> Any:
    from ..jax import Embedding

    embedding = Embedding(model, **options)
    embedding._in_jit._trainer = turns = Turns(embedding._trainer, rates, calls)
    embedding._in_jit.loops = _loops.Loops(turns)  # Keras donates all variables of a model

    def call(token: Any, ids: Mapping[str, Ids], training: bool, step: Any = None, refused: Refusal = None) -> Found:
        def refuse(_: Any) -> Any:
            assert refused is not None
            raise refused

        of_step = hyper if refused is None else refuse  # which is called where the loss is differentiated
        found: Found = embedding.in_jit(token.value, ids, None if step is None else step[0], hyper=of_step)
        return found

    return embedding, call, turns


def in_torch(model: Model, hyper: HyperOfStep, rates: Rates, calls: int, **options: Any) -> Any:
    import torch

    from ..torch._collection import _rank_and_size, refuse_tracing

    options["rank"], options["size"] = _rank_and_size(options["rank"], options["size"])
    trainer = Trainer(model, **options)
    turns = HostTurns(hyper, trainer, rates, calls)

    class Lookup(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, token: Any, ids: Any, step: Any, training: bool, refused: Any) -> Any:
            if training:
                context.number, found = turns.begin(ids, step)
                context.begun = turns.begun
            else:
                context.number, found = None, turns.look_up(ids)
                context.later = (ids, step, turns.begun, refused)
            context.names = list(ids)
            return tuple(torch.from_numpy(found[name]).to(token.device) for name in context.names)

        @staticmethod
        def backward(context: Any, *gradients: Any) -> Any:
            if context.number is None:
                ids, step, begun, refused = context.later
                if refused is not None:
                    raise refused
                context.number, context.begun = turns.begin_late(ids, step, begun), turns.begun
            turns.end(context.number, {name: gradient.cpu().numpy() for name, gradient in zip(context.names, gradients)}, context.begun)
            return gradients[0].new_zeros(()), None, None, None, None

    def call(token: Any, ids: Mapping[str, Ids], training: bool, step: Any = None, refused: Refusal = None) -> Found:
        refuse_tracing()
        if any(getattr(one, "is_meta", False) for value in ids.values() for one in vars(value).values()):
            # Keras asks for shapes.
            return {name: torch.empty(shape, device="meta") for name, shape in shapes_of(model, ids).items()}
        for name, value in ids.items():
            if torch.is_grad_enabled() and not isinstance(value, Sequences) and getattr(value.weights, "requires_grad", False):
                refused = unlearned(name)
                if training:
                    raise refused
        on_cpu = {name: on_host(value) for name, value in ids.items()}
        if torch.is_grad_enabled() and token.value.requires_grad:
            names: List[str] = list(on_cpu)
            number = None if step is None else int(step[0])
            return dict(zip(names, Lookup.apply(token.value, on_cpu, number, training, refused)))
        return {name: torch.from_numpy(values).to(token.value.device) for name, values in turns.look_up(on_cpu).items()}

    return trainer, call, turns


def _as_arrays(ids: Mapping[str, Ids]) -> Tuple[List[Any], Callable[[Any], Dict[str, Ids]]]:
    """What goes through TensorFlow, and what makes ids of NumPy of it again, and of whatever follows it."""
    parts: List[Tuple[str, Any, List[Any]]] = [(name, type(one), list(vars(one).values())) for name, one in ids.items()]

    def back(arrays: Any) -> Dict[str, Ids]:
        left = iter(arrays)
        return {name: on_host(kind(*(None if one is None else next(left) for one in values))) for name, kind, values in parts}

    return [one for _, _, values in parts for one in values if one is not None], back


def _unlearnable(name: str, weights: Any) -> Any:
    """The weights. Tapes of TensorFlow that go on to what they are made of come here."""
    import tensorflow as tf

    @tf.custom_gradient
    def same(given: Any) -> Any:
        def backward(_: Any) -> Any:
            raise unlearned(name)

        return tf.identity(given), backward

    return same(tf.convert_to_tensor(weights))


def in_tensorflow(model: Model, hyper: HyperOfStep, rates: Rates, calls: int, **options: Any) -> Any:
    import tensorflow as tf

    from .._in_tensorflow import numpy_function

    trainer = Trainer(model, **options)
    turns = HostTurns(hyper, trainer, rates, calls)

    def call(token: Any, ids: Mapping[str, Ids], training: bool, step: Any = None, refused: Refusal = None) -> Found:
        names = list(ids)
        given, ids_of = _as_arrays(ids)
        sent = [] if step is None else [step]

        def sent_of(arrays: Any) -> Tuple[Dict[str, Ids], Optional[int]]:
            return ({}, int(arrays[-1][0])) if sent else (ids_of(arrays), None)

        def receive(*arrays: Any) -> Any:
            number, found = turns.begin(*sent_of(arrays))
            return [np.array([number, turns.begun], np.int64), *(found[name] for name in names)]

        def look_up(*arrays: Any) -> Any:
            found = turns.look_up(ids_of(arrays))
            return [np.array([-1, turns.begun], np.int64), *(found[name] for name in names)]

        def run(function: Callable[..., Any], arguments: Any) -> Any:
            result = numpy_function(function, arguments, [tf.int64] + [tf.float32] * len(names))
            shapes = shapes_of(model, ids)
            for name, one in zip(names, result[1:]):
                one.set_shape(shapes[name])
            return result

        @tf.custom_gradient
        def begin(_: Any, *weights: Any) -> Any:
            arrays = [tf.identity(one) for one in given + sent]  # of the graph that is being traced, as a branch of tf.cond: its backward pass may use them
            called, *found = run(receive if training else look_up, arrays)
            later = [] if training else arrays

            def backward(*gradients: Any) -> Any:
                if not training and refused is not None:
                    raise refused

                def on_call(called: Any, *arrays: Any) -> Any:
                    number, begun = map(int, called)
                    if later:
                        number, begun = turns.begin_late(*sent_of(arrays[len(names):]), begun), turns.begun
                    turns.end(number, dict(zip(names, arrays)), begun)
                    return np.float32(0)

                done = numpy_function(on_call, [called, *gradients, *later], tf.float32)
                done.set_shape(())
                return (done, *map(tf.zeros_like, weights))

            return found, backward

        if token.trainable and token._value is not None:  # built frozen, it is a variable that tapes never watch
            token._value._trainable = True
        weighted = [_unlearnable(name, one.weights) for name, one in ids.items() if not isinstance(one, Sequences) and one.weights is not None]
        found = begin(token.value, *weighted) if token.trainable else run(look_up, given)[1:]
        return dict(zip(names, found))

    return trainer, call, turns


def make(model: Model, hyper: HyperOfStep, rates: Rates, calls: int, **options: Any) -> Any:
    """The trainer, the function that looks up in it, and its turns."""
    backends = {"jax": in_jax, "torch": in_torch, "tensorflow": in_tensorflow}
    backend = keras.backend.backend()
    if backend not in backends:
        raise ValueError(f"the Keras backend {backend!r} is not supported; it must be one of {', '.join(backends)}")
    return backends[backend](model, hyper, rates, calls, **options)
