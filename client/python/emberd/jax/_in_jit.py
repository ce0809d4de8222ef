"""Lookups inside of jitted functions: a function with a gradient of its own over callbacks in the order of the program.

A callback gets arrays of JAX and touches nothing but NumPy: work for JAX that waits for the thread it is called on would
never end.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any, Dict, Mapping, Optional, Tuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from .. import errors
from ..arrays import Dense, Ids, Ragged, Sequences, Sparse, activation_shape, as_int32, as_ints, cut, map_arrays
from ..client import Model
from ..trainer import Trainer

# Ids may be arguments of jitted functions.
for _kind, _arrays, _fixed in ((Dense, ("ids", "weights"), ()), (Ragged, ("values", "row_splits", "weights"), ()),
                               (Sparse, ("indices", "values", "weights"), ("samples",)),
                               (Sequences, ("ids",), ("padding_idx", "mask_zero"))):
    jax.tree_util.register_dataclass(_kind, list(_arrays), list(_fixed))


def on_host(ids: Ids) -> Ids:
    """Ids as NumPy sees them. Of ragged ids, what fills the array up is cut off."""
    found = map_arrays(lambda one: np.asarray(one) if isinstance(one, jax.Array) else one, ids)
    filled = isinstance(ids, Ragged) and isinstance(ids.values, jax.Array)
    return cut(found) if filled and isinstance(found, Ragged) else found


NO_STEP = -1  # the number of one that has failed

WIDER = "JAX cuts ids to 32 bits: jax.config.update(\"jax_enable_x64\", True) lets it keep them, or send them ahead"


def check_ids(ids: Mapping[str, Ids], model: Model) -> None:
    """Refuses what are no integers, and ids that JAX would cut, or may have cut already, to 32 bits."""
    narrow = jax.dtypes.canonicalize_dtype(np.int64) != np.int64
    for name in set(ids).intersection(model.features):
        value, rows, what = ids[name], model.tables[model.features[name].table].vocabulary_size, f"feature {name!r}"
        one: Any = value.ids if isinstance(value, (Dense, Sequences)) else value.values if isinstance(value, (Ragged, Sparse)) else value
        if not any(isinstance(leaf, jax.Array) for leaf in jax.tree_util.tree_leaves(one)):
            array = as_ints(one, what)
            if narrow:
                as_int32(array, what, WIDER)
        elif isinstance(one, jax.Array):
            if not jnp.issubdtype(one.dtype, jnp.integer):
                raise TypeError(f"{what}: {one.dtype} is not allowed; ids are int32 or int64")
            if narrow and one.dtype.itemsize == 4 and rows > jnp.iinfo(one.dtype).max:
                raise ValueError(f"{what}: {one.dtype} is not allowed for a table of {rows} rows; {WIDER}")


def in_order(callback: Any, result: Any, *arguments: Any) -> Any:
    """A callback in the order of the program. ValueError under vmap, whose order would be nobody's."""
    call: Any = jax.custom_batching.custom_vmap(lambda *given: io_callback(callback, result, *given, ordered=True))

    def refuse(*_: Any) -> Any:
        raise ValueError("in_jit: a lookup is not allowed under jax.vmap; look the ids of all samples up in one call, [samples, k], outside of it")

    call.def_vmap(refuse)
    return call(*arguments)


def _refuse_learned(ids: Mapping[str, Any]) -> None:
    """Of what JAX says about arguments of a function with a gradient of its own. The gradient of weights is not known here: it would be zero, in silence."""
    for name, one in ids.items():
        if any(leaf.perturbed for leaf in jax.tree_util.tree_leaves(one, is_leaf=lambda leaf: hasattr(leaf, "perturbed"))):
            raise ValueError(f"feature {name!r}: weights: the loss is differentiated with respect to them, which this does not do; give jax.lax.stop_gradient(weights), "
                             "or look the ids up as emberd.Sequences, and multiply their activations by the weights")


def _nothing(shape: jax.ShapeDtypeStruct) -> Any:
    """In the place of activations, or of the number of a step."""
    return np.full(shape.shape, NO_STEP if shape.dtype == np.int32 else 0, shape.dtype)


class Lookups:
    """The function that `Embedding.in_jit` is made of.

    `failure` is what the last callback raised: JAX makes an error of its own of it, and what was donated to the jitted function
    is lost. Hence `loops`, of Keras: where an update is refused the step is skipped, with a warning, and `raise_refused`
    raises. Where something else fails in a loop of theirs, the activations are zero, nothing is updated, and that loop raises
    it.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer  # Keras puts something before it
        self.failure: Optional[BaseException] = None
        self.loops: Any = None
        self._refused: Optional[errors.Error] = None
        self._calling: Optional[int] = None  # the thread of the callback that is being made
        self.used = False
        self.function = jax.custom_vjp(self._primal, nondiff_argnums=(3,))
        self.function.defvjp(self._forward, self._backward, symbolic_zeros=True)

    def wait(self) -> None:
        """Until the callbacks of what has been started have been made. Not so in one, where an iterator may come to its end."""
        if self.used and self._calling != threading.get_ident():
            jax.effects_barrier()

    def _shapes(self, ids: Mapping[str, Ids]) -> Dict[str, jax.ShapeDtypeStruct]:
        features = self._trainer.model.features
        wrong = sorted(set(ids) - set(features) if self._trainer.partial else set(features).symmetric_difference(ids))
        if wrong:
            what = "are missing" if wrong[0] in features else "are not allowed"
            raise ValueError(f"ids: those of feature {wrong[0]!r} {what}; give the ids of all features of model "
                             f"{self._trainer.model.name!r}: {', '.join(features)}")
        self.used = True
        return {name: jax.ShapeDtypeStruct(activation_shape(value, features[name].output_shape, features[name].embedding_dim), jnp.float32)
                for name, value in ids.items()}

    def _primal(self, token: Any, ids: Mapping[str, Ids], step: Any, hyper: Any) -> Any:
        """Without a gradient: a lookup that is no step."""
        result = self._shapes(ids)
        return in_order(self._noting(self._evaluate, result), result, ids)

    def _forward(self, token: Any, ids: Any, step: Any, hyper: Any) -> Any:
        _refuse_learned(ids)
        token, ids, step = jax.tree_util.tree_map(lambda one: one.value, (token, ids, step), is_leaf=lambda one: hasattr(one, "perturbed"))
        result = (jax.ShapeDtypeStruct((2,), jnp.int32), self._shapes(ids))
        if step is None:
            called, found = in_order(self._noting(self._send_and_receive, result), result, ids)
        else:  # the ids have been sent, and are not carried through JAX again
            called, found = in_order(self._noting(self._receive, result), result, step)
        return found, (called, token)

    def _backward(self, hyper: Any, kept: Tuple[Any, Any], gradients: Any) -> Any:
        called, token = kept
        gradients = {name: jnp.zeros(one.shape, jnp.float32) if isinstance(one, jax.custom_derivatives.SymbolicZero) else one for name, one in gradients.items()}
        values = {} if hyper is None else hyper(called[0])
        in_order(self._noting(self._update, None), None, called, gradients, values)
        return jnp.zeros_like(token), None, None

    def _noting(self, callback: Any, result: Any) -> Any:
        """result: shapes of what it returns."""
        loops = self.loops if self.loops is not None and self.loops.are_around() else None

        def noted(*arguments: Any) -> Any:
            self._calling = threading.get_ident()
            try:
                return callback(*arguments)
            except BaseException as error:
                self.failure = error
                if loops is None or not loops.hand_over(error):
                    raise
                return jax.tree_util.tree_map(_nothing, result)
            finally:
                self._calling = None

        return noted

    def _evaluate(self, ids: Mapping[str, Ids]) -> Any:
        return dict(self._trainer.look_up({name: on_host(value) for name, value in ids.items()}))

    def _send_and_receive(self, ids: Mapping[str, Ids]) -> Any:
        # Copied: the step may have to be sent again, when JAX uses this memory for something else.
        return self._begin({name: copied(on_host(value)) for name, value in ids.items()})

    def _receive(self, step: Any) -> Any:
        return self._begin({}, int(np.asarray(step)))

    def _begin(self, ids: Mapping[str, Ids], step: Optional[int] = None) -> Any:
        """With the number of the step goes what tells apart Keras's calls of one step."""
        number, found = self._trainer.begin(ids, step)
        return np.array([number, getattr(self._trainer, "begun", 0)], np.int32), dict(found)

    def _update(self, called: Any, gradients: Mapping[str, Any], hyper: Any) -> None:
        values = jax.tree_util.tree_map(lambda one: float(np.asarray(one)), hyper)
        step, begun = map(int, np.asarray(called))
        if step == NO_STEP:
            return
        try:
            self._trainer.update(step, {name: np.asarray(value) for name, value in gradients.items()}, values, own=False,
                                 **({"begun": begun} if hasattr(self._trainer, "begun") else {}))
        except errors.InvalidArgument as error:
            if self.loops is None:
                raise
            self.failure = self._refused = error
            warnings.warn(f"emberd: the update of step {step} was refused, and no row changes: {error}", RuntimeWarning)

    def forget(self) -> None:
        self.failure = self._refused = None

    def raise_refused(self) -> None:
        """Once, outside of jitted functions."""
        error, self._refused = self._refused, None
        if error is not None:
            raise error


def copied(ids: Ids) -> Ids:
    return map_arrays(np.array, ids)
