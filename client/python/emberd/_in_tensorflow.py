"""Calls out of TensorFlow's functions, which makes errors of its own of what they raise."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Generator, List

import tensorflow as tf

_failures: List[BaseException] = []  # the last one


def numpy_function(function: Callable[..., Any], arrays: Any, kinds: Any) -> Any:
    """tf.numpy_function, whose failure `typed_errors` knows."""
    def noted(*given: Any) -> Any:
        try:
            return function(*given)
        except BaseException as error:
            _failures[:] = [error]
            raise

    graph: Any = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while hasattr(graph, "mark_as_unsaveable"):  # a branch of tf.cond does not tell the function that it is in
        graph.mark_as_unsaveable("rows are on the cluster, and no other process could run what is exported here: export the dense part alone, and give it the "
                                 "activations")
        graph = graph.outer_graph
    return tf.numpy_function(noted, arrays, kinds)


def read(rows: Callable[[], Any], shape: Any) -> Any:
    """float32, as it is when it is called: in a tf.function, in each call of that."""
    if tf.executing_eagerly():
        return tf.convert_to_tensor(rows())
    found = numpy_function(rows, [], tf.float32)
    found.set_shape(shape)
    return found


def convert(table: Any, dtype: Any = None, name: Any = None, as_ref: bool = False) -> Any:
    """For tf.register_tensor_conversion_function."""
    found = table.read_value()
    return found if dtype is None or dtype == found.dtype else NotImplemented


@contextlib.contextmanager
def typed_errors() -> Generator[None, None, None]:
    """Raises what lookups and updates in the block fail with as it is, an IndexError for an id beyond its table, in place of the tf.errors.OpError
    that a tf.function makes of it, and which is its cause:

        with typed_errors():
            loss = train_step(batch)
    """
    _failures.clear()
    try:
        yield
    except tf.errors.OpError as error:
        if not _failures or str(_failures[0]) not in error.message:  # another one, behind one that the block has caught
            raise
        raise _failures.pop() from error
