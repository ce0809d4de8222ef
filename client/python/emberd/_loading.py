"""Rows that go to a table in parts, so that no message and no copy holds all of them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from . import _native, arrays, errors
from ._records import check_mapping
from .checkpoints import Progress, ProgressCallback

if TYPE_CHECKING:
    from .client import Model, Table

STRETCH_BYTES = 8 << 20

Part = Tuple[str, str, int, Any]  # table, slot, first row and rows


def stretches(shape: Tuple[int, ...]) -> Iterator[Tuple[int, int]]:
    """Begin and end of parts of rows of this shape, of STRETCH_BYTES each."""
    rows = max(1, STRETCH_BYTES // (4 * math.prod(shape[1:])))
    for begin in range(0, shape[0], rows):
        yield begin, min(shape[0], begin + rows)


class Reports:
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
    _native.text(table, "table")
    if table not in model.tables:
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
            columns = 1
        arrays.check_shape(values, what, values.shape == (count, columns), f"[rows, {info.embedding_dim}]" if not slot else
                           f"[{count}, {info.embedding_dim}], or [{count}, 1] of a slot with one value per row")
        check_finite(values, what)
    if first + count > info.vocabulary_size:
        raise errors.OutOfRange(f"first_row, weights: {first} and {count} rows are not allowed; table {table!r} has {info.vocabulary_size} rows")
    for slot in list(slots) if count else []:  # before weights are written. Only the server knows whether it has one value per row
        columns = model.read_rows(table, [first], slot=slot).shape[1]
        arrays.check_shape(given[slot], f"slots: {slot!r}", given[slot].shape[1] == columns, f"[{count}, {columns}]")

    def parts() -> Iterator[Part]:
        for slot, values in given.items():
            for begin, end in stretches(values.shape):
                yield table, slot, first + begin, values[begin:end]

    _assign(model, parts(), Reports(sum(4 * math.prod(values.shape) for values in given.values()), progress))


def assign_in_parts(model: "Model", table: str, ids: Any, values: Any, slot: str) -> None:
    """Model.assign_rows of any number of rows, which have been checked."""
    for begin, end in stretches(values.shape):
        model.assign_rows(table, ids[begin:end], values[begin:end], slot=slot)


def check_finite(values: Any, what: str) -> None:
    """Before a part of them is sent."""
    for begin, end in stretches(values.shape):
        bad = np.argwhere(~np.isfinite(arrays.as_given_rows(values[begin:end], what)))
        if len(bad):
            raise errors.InvalidArgument(f"{what}[{begin + bad[0][0]}, {bad[0][1]}] is not finite; values must be finite")


@dataclass(frozen=True)
class Wanted:
    """A table as a model has it, or is to have it. optimizer: its kind."""

    vocabulary_size: int
    embedding_dim: int
    optimizer: str


@dataclass
class Difference:
    """Between the tables that a model is to have and those of another one, by name."""

    added: List[str] = field(default_factory=lambda: list[str]())
    dropped: List[str] = field(default_factory=lambda: list[str]())
    grown: List[str] = field(default_factory=lambda: list[str]())
    shrunk: List[str] = field(default_factory=lambda: list[str]())
    kept: List[str] = field(default_factory=lambda: list[str]())
    left: List[str] = field(default_factory=lambda: list[str]())  # what is not taken, in words
    misfits: List[str] = field(default_factory=lambda: list[str]())  # of it, what nobody asks for who only adds, grows, cuts or drops tables
    rows: Dict[str, int] = field(default_factory=lambda: dict[str, int]())  # how many are taken, of the tables that fit
    other_slots: List[str] = field(default_factory=lambda: list[str]())  # of these tables, those whose slots are not


def compare(wanted: Mapping[str, Union[Wanted, "Table"]], source: Mapping[str, "Table"]) -> Difference:
    found = Difference(dropped=[name for name in source if name not in wanted])
    found.left = [f"table {name!r} of the source" for name in found.dropped]
    for name, table in wanted.items():
        other = source.get(name)
        if other is None or other.embedding_dim != table.embedding_dim:
            found.left.append(f"table {name!r}: the source has " + (f"embedding_dim {other.embedding_dim}, not {table.embedding_dim}" if other else "none"))
            (found.misfits if other else found.added).append(found.left[-1] if other else name)
            continue
        rows = found.rows[name] = min(table.vocabulary_size, other.vocabulary_size)
        if table.vocabulary_size == other.vocabulary_size:
            found.kept.append(name)
        else:
            grown = rows == other.vocabulary_size
            (found.grown if grown else found.shrunk).append(name)
            beyond = max(table.vocabulary_size, other.vocabulary_size) - 1
            found.left.append(f"table {name!r}: rows {rows} to {beyond}" + (", which the source does not have" if grown else " of the source"))
        if table.optimizer != other.optimizer:
            found.other_slots.append(name)
            found.left.append(f"table {name!r}: slots, for its optimizer is {table.optimizer}, and that of the source {other.optimizer}")
            found.misfits.append(found.left[-1])
    return found


def copy(model: "Model", source: "Model", strict: bool, progress: Optional[ProgressCallback], only: Optional[Sequence[str]] = None) -> List[str]:
    """only: names of tables; others of both are as if they were not there."""
    def named(tables: Mapping[str, "Table"]) -> Dict[str, "Table"]:
        return {name: table for name, table in tables.items() if only is None or name in only}

    found = compare(named(model.tables), named(source.tables))
    if strict and found.left:
        raise errors.InvalidArgument(f"source: {source.name!r} is not allowed with strict, for not taken would be: {'; '.join(found.left)}")
    taken = taken_of(model, found)
    reports = Reports(sum(4 * rows * columns for _, _, rows, columns in taken), progress)
    for name, slot, rows, columns in taken:
        _assign(model, ((name, slot, first, values) for first, values in rows_of(source, name, slot, rows, columns)), reports)
    return found.left


def taken_of(model: "Model", found: Difference) -> List[Tuple[str, str, int, int]]:
    """Table, slot, rows, and columns at most."""
    return [(name, slot, rows, model.tables[name].embedding_dim) for name, rows in found.rows.items()
            for slot in ("", *(() if name in found.other_slots else model.tables[name].slots))]


def rows_of(source: "Model", table: str, slot: str, rows: int, columns: int) -> Iterator[Tuple[int, Any]]:
    """The first rows of a table, in parts."""
    return source.export(table, slot=slot, row_count=rows, rows_at_a_time=next(stretches((rows, columns)))[1])


def _assign(model: "Model", parts: Iterator[Part], reports: Reports) -> None:
    for table, slot, first, given in parts:
        values = arrays.as_given_rows(given, "values")
        model.assign_rows(table, np.arange(first, first + len(values)), values, slot=slot)
        reports.add(values.nbytes)
