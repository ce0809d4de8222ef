"""Rows that go to a table in parts, so that no message and no copy holds all of them."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, Iterator, List, Mapping, Optional, Tuple

import numpy as np

from . import _native, arrays, errors
from ._records import check_mapping
from .checkpoints import Progress, ProgressCallback

if TYPE_CHECKING:
    from .client import Model

STRETCH_BYTES = 8 << 20

Part = Tuple[str, str, int, Any]  # table, slot, first row and rows


def stretches(shape: Tuple[int, ...]) -> Iterator[Tuple[int, int]]:
    """Begin and end of parts of rows of this shape, of STRETCH_BYTES each."""
    rows = max(1, STRETCH_BYTES // (4 * math.prod(shape[1:])))
    for begin in range(0, shape[0], rows):
        yield begin, min(shape[0], begin + rows)


class _Reports:
    """How far it is, after each part."""

    def __init__(self, total_bytes: int, progress: Optional[ProgressCallback]) -> None:
        if progress is not None and not callable(progress):
            raise _native.refuse_kind(progress, "progress", "a function")
        self._progress, self._total, self._bytes, self._begin = progress, total_bytes, 0, time.monotonic()

    def add(self, count: int) -> None:
        self._bytes += count
        if self._progress is not None:
            self._progress(Progress("loading", self._bytes, self._total, time.monotonic() - self._begin))


def load(model: "Model", table: str, weights: Any, slots: Mapping[str, Any], first_row: int, progress: Optional[ProgressCallback]) -> None:
    check_mapping(slots, "slots")
    if _native.text(table, "table") and table not in model.tables:
        raise errors.NotFound(f"table: model {model.name!r} has no table {table!r}; it has {', '.join(model.tables)}")
    info, first = model.tables[table], _native.whole(first_row, "first_row")
    given = {"": arrays.shaped(weights, "weights")}
    for slot, values in slots.items():
        if slot not in info.slots:
            raise errors.InvalidArgument(f"slots: {slot!r} is not allowed; the optimizer {info.optimizer} of table {table!r} has {', '.join(info.slots) or 'none'}")
        given[slot] = arrays.shaped(values, f"slots: {slot!r}")
    count = len(given[""]) if given[""].ndim else 0
    for slot, values in given.items():
        what, columns = f"weights, slots: {slot!r}" if slot else "weights", info.embedding_dim
        if slot and values.shape == (count, 1):
            columns = 1  # the server knows which
        arrays.check_shape(values, what, values.shape == (count, columns), f"[rows, {info.embedding_dim}]" if not slot else
                           f"[{count}, {info.embedding_dim}], or [{count}, 1] of a slot with one value per row")
        _check_finite(values, what)
    if first + count > info.vocabulary_size:
        raise errors.OutOfRange(f"first_row, weights: {first} and {count} rows are not allowed; table {table!r} has {info.vocabulary_size} rows")

    def parts() -> Iterator[Part]:
        for slot, values in given.items():
            for begin, end in stretches(values.shape):
                yield table, slot, first + begin, values[begin:end]

    _assign(model, parts(), _Reports(sum(4 * math.prod(values.shape) for values in given.values()), progress))


def _check_finite(values: Any, what: str) -> None:
    """Before a part of them is sent."""
    for begin, end in stretches(values.shape):
        bad = np.argwhere(~np.isfinite(arrays.as_given_rows(values[begin:end], what)))
        if len(bad):
            raise errors.InvalidArgument(f"{what}[{begin + bad[0][0]}, {bad[0][1]}] is not finite; values must be finite")


def copy(model: "Model", source: "Model", strict: bool, progress: Optional[ProgressCallback]) -> List[str]:
    taken: List[Tuple[str, str, int, int]] = []  # table, slot, rows, columns at most
    left: List[str] = [f"table {name!r} of the source" for name in source.tables if name not in model.tables]
    for name, table in model.tables.items():
        other = source.tables.get(name)
        if other is None or other.embedding_dim != table.embedding_dim:
            left.append(f"table {name!r}: the source has " + (f"embedding_dim {other.embedding_dim}, not {table.embedding_dim}" if other else "none"))
            continue
        rows = min(table.vocabulary_size, other.vocabulary_size)
        if table.vocabulary_size != other.vocabulary_size:
            beyond = max(table.vocabulary_size, other.vocabulary_size) - 1
            left.append(f"table {name!r}: rows {rows} to {beyond}" + (" of the source" if rows < other.vocabulary_size else ", which the source does not have"))
        same = table.optimizer == other.optimizer
        if not same:
            left.append(f"table {name!r}: slots, for its optimizer is {table.optimizer}, and that of the source {other.optimizer}")
        taken += [(name, slot, rows, table.embedding_dim) for slot in ("", *(table.slots if same else ()))]
    if strict and left:
        raise errors.InvalidArgument(f"source: {source.name!r} is not allowed with strict, for not taken would be: {'; '.join(left)}")
    reports = _Reports(sum(4 * rows * columns for _, _, rows, columns in taken), progress)
    for name, slot, rows, columns in taken:
        part = next(stretches((rows, columns)))[1]
        _assign(model, ((name, slot, first, values) for first, values in source.export(name, slot=slot, row_count=rows, rows_at_a_time=part)), reports)
    return left


def _assign(model: "Model", parts: Iterator[Part], reports: _Reports) -> None:
    for table, slot, first, given in parts:
        values = arrays.as_given_rows(given, "values")
        model.assign_rows(table, np.arange(first, first + len(values)), values, slot=slot)
        reports.add(values.nbytes)
