"""First rows that come from this process: a function or an array as the initializer of a table.

They are given to the cluster stretch by stretch, so that no more than a stretch is here at a time. Until all are there, calls of other clients on the model
end with Unavailable.
"""

from __future__ import annotations

import inspect
from itertools import chain
from typing import TYPE_CHECKING, Any, Callable, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from . import _native, arrays, errors
from ._loading import stretches
from ._native import Call
from .arrays import Floats

if TYPE_CHECKING:
    from .client import Client, Model
    from .config import ModelConfig, TableConfig

WHOLE_BYTES = 64 << 20  # of a table for which an initializer that knows only whole shapes is called once, so that its rows are those of its framework
ATTEMPTS = 3  # of filling a model whose shards have been started again meanwhile

Function = Callable[[int, Tuple[int, int]], Any]  # (offset, shape): the rows from this one on, [rows, embedding_dim]
Part = Tuple[str, str, Any, Any]  # table, slot, ids and rows
Parts = Callable[[], Iterator[Part]]  # each call begins at the first


def is_given(initializer: Any) -> bool:
    """Whether rows come from it: a function, or an array of them."""
    if isinstance(initializer, (type, str)):
        return False
    return callable(initializer) or isinstance(initializer, (list, tuple)) or hasattr(initializer, "__array__") or hasattr(initializer, "__dlpack__")


def function_of(table: "TableConfig") -> Optional[Function]:
    """What gives the rows of a table; None: its description. InvalidArgument for an array of another shape than the table's."""
    given: Any = table.initializer
    if not is_given(given) or callable(given):
        return given if is_given(given) else None
    what = f"table {table.name!r}: initializer"
    rows = arrays.shaped(given, what)
    shape = (table.vocabulary_size, table.embedding_dim)
    arrays.check_shape(rows, what, rows.shape == shape, f"[vocabulary_size, embedding_dim], {list(shape)}, or that of a function of (offset, shape)")
    return lambda offset, stretch: rows[offset:offset + stretch[0]]


def parameters_of(function: Any) -> List[inspect.Parameter]:
    """None, where they are not known."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []


def takes_offset(function: Any) -> bool:
    """Whether it is one of (offset, shape), and none as frameworks have them, by the name of its first argument."""
    return [one.name for one in parameters_of(function)][:1] == ["offset"]


def of_whole(call: Callable[[Tuple[int, int]], Any], shape: Tuple[int, int]) -> Function:
    """Of what is called once, with the shape of the whole table. It is kept until its last stretch."""
    kept: List[Any] = []

    def function(offset: int, stretch: Tuple[int, int]) -> Any:
        if offset == 0:
            kept[:] = [call(shape)]
        rows = kept[0][offset:offset + stretch[0]]
        if offset + stretch[0] == shape[0]:
            kept.clear()
        return rows

    return function


def parts_of(config: "ModelConfig") -> Optional[Parts]:
    """The rows that come from initializers; None: the cluster makes all."""
    tables = {table.name: table for table in config.tables}
    functions = {name: function for name, function in ((name, function_of(table)) for name, table in tables.items()) if function is not None}
    return (lambda: called(tables, functions)) if functions else None


def called(tables: Mapping[str, "TableConfig"], functions: Mapping[str, Function]) -> Iterator[Part]:
    for name, function in functions.items():
        dim = tables[name].embedding_dim
        for begin, end in stretches((tables[name].vocabulary_size, dim)):
            yield name, "", np.arange(begin, end), _called(function, begin, (end - begin, dim), f"table {name!r}: initializer")


def _called(function: Function, offset: int, shape: Tuple[int, int], what: str) -> Floats:
    try:
        made = function(offset, shape)
    except (TypeError, AttributeError) as error:  # as of a function of the shape alone, or of a tensor
        raise TypeError(f"{what}: {error}; it was called with ({offset}, {shape}), for it must be a function of (offset, shape) that gives the rows from this one on") from error
    rows = arrays.as_given_rows(made, what)
    arrays.check_shape(rows, what, rows.shape == shape, f"{list(shape)}, for it was called with ({offset}, {shape})")
    return rows


def fill(client: "Client", text: str, model: "Model", parts: Sequence[Parts]) -> "Model":
    """A model that was declared with this text, once all its rows are there. Another client that declares it meanwhile begins anew, and this one waits for it."""
    for _ in range(ATTEMPTS):
        if not model._unfilled:
            return model
        if not parts:
            raise ValueError(f"config: model {model.name!r} has a table whose initializer is `assigned`; give a ModelConfig with a function of (offset, shape), "
                             "or with an array, as the initializer")
        try:
            for table, slot, ids, rows in chain.from_iterable(one() for one in parts):
                try:
                    model.assign_rows(table, ids, rows, slot=slot)
                except errors.InvalidArgument as error:
                    raise errors.InvalidArgument(f"table {table!r}: first rows from row {ids[0]} on: {error}") from None
                del rows  # before the next ones are made
            return client._model(Call(_native.lib().declare_filled(client._handle.get(), _native.text(text, "config"), model._unfilled)))
        except errors.Aborted:
            return _await(client, model.name)
        except errors.DataLoss:  # of a shard that was started again
            model = client._model(client._declare(text, None))
    raise errors.DataLoss(f"model {model.name!r}: shards lost its first rows {ATTEMPTS} times while they were given")


def _await(client: "Client", name: str) -> "Model":
    """As long as rows go on coming."""
    said = ""
    while True:
        try:
            return client.model(name)
        except (errors.Unavailable, errors.DeadlineExceeded) as error:
            if str(error) == said:
                raise
            said = str(error)
