"""Models with other tables: one that goes on from a trained model, and one that takes tables of a checkpoint."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from . import _filling, _loading, _native, errors
from .arrays import Ragged
from .checkpoints import ProgressCallback
from .config import Adam, AdamW, Assigned, F2A, FeatureConfig, LaProp, ModelConfig, NoOptimizer, Optimizer, TableConfig, named

if TYPE_CHECKING:
    from .client import Client, Model


@dataclass(frozen=True)
class ChangedModel:
    """What `Client.change_model` has made, with names of tables. `print` shows it."""

    model: "Model"
    created: bool  # False: it was there already, and nothing was copied now
    added: Tuple[str, ...]
    grown: Tuple[str, ...]  # more rows
    shrunk: Tuple[str, ...]  # fewer
    dropped: Tuple[str, ...]
    kept: Tuple[str, ...]  # as many
    not_taken: Tuple[str, ...]  # in words: all that has initial values, and what of the source is not in the model
    groups: Mapping[str, int]  # the step that each goes on from

    def __str__(self) -> str:
        lines = [f"emberd model {self.model.name!r}: " + ("made" if self.created else "was there already, and nothing was copied")]
        lines += [f"  {what}: {', '.join(names)}" for what in ("kept", "grown", "shrunk", "added", "dropped") for names in [getattr(self, what)] if names]
        lines += [f"  not taken: {one}" for one in self.not_taken]
        return "\n".join(lines + [f"  group {name!r} goes on at step {step}" for name, step in self.groups.items()])


def change(client: "Client", source: Union["Model", str], config: ModelConfig, strict: bool, groups: Sequence[str],
           progress: Optional[ProgressCallback]) -> ChangedModel:
    from .client import Model

    if not isinstance(config, ModelConfig):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _native.refuse_kind(config, "config", "an emberd.ModelConfig")
    if not isinstance(source, (Model, str)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _native.refuse_kind(source, "source", "an emberd.Model, or the name of one")
    if isinstance(groups, str) or not isinstance(groups, (list, tuple)):
        raise _native.refuse_kind(groups, "groups", "a list of names")
    for group in groups:
        _native.text(group, "groups")
    config.to_json()  # is refused here, if it cannot be declared
    if isinstance(source, str):
        name = source
        try:
            source = client.model(name)
        except errors.NotFound as error:
            try:
                return _found(client, config, name)
            except errors.NotFound:
                raise errors.NotFound(f"source: {error}. Nor is there the changed model, {config.name!r}") from None
    if source.name == config.name and source.client.addresses == client.addresses:
        raise errors.InvalidArgument(f"config: name: {config.name!r} is not allowed, for the source has it; the changed model needs another one")
    wanted = {table.name: _wanted(table, config) for table in config.tables}
    found = _loading.compare(wanted, source.tables)
    if strict and found.misfits:
        raise errors.InvalidArgument(f"config: not allowed with strict, for not taken would be: {'; '.join(found.misfits)}")
    for table in config.tables:
        if isinstance(table.initializer, Assigned) and (table.name not in found.rows or table.name in found.grown):
            raise errors.InvalidArgument(f"config: table {table.name!r}: initializer: Assigned() is not allowed for rows that the source does not have; give a function of "
                                         "(offset, shape), an array, or a description")
    described = dataclasses.replace(config, tables=[dataclasses.replace(table, initializer=Assigned()) if table.name in found.rows else table
                                                    for table in config.tables])
    made = client._declare_filled(described, parts=_Parts(client, source, config, found, progress) if found.rows else None)
    made._known, made._source = True, source.name
    reached = {group: _carry(source, made, group) for group in groups}
    left = found.left + [f"table {table.name!r}: the number of steps, which its optimizer counts: no group is named" for table in config.tables
                         if table.name in found.rows and not groups and _counts(table, config)]
    return ChangedModel(made, made.created, tuple(found.added), tuple(found.grown), tuple(found.shrunk), tuple(found.dropped), tuple(found.kept), tuple(left), reached)


def _found(client: "Client", config: ModelConfig, source: str) -> ChangedModel:
    """A model that was made when the source was there."""
    there = client.model(config.name)
    there._source = source
    for table in config.tables:
        known, wanted = there.tables.get(table.name), _wanted(table, config)
        if known is None or (known.vocabulary_size, known.embedding_dim, known.optimizer) != dataclasses.astuple(wanted):
            raise errors.AlreadyExists(f"config: table {table.name!r} is not that of model {config.name!r}, which is there, and the source is not")
    return ChangedModel(there, False, (), (), (), (), (), (), {})


def _optimizer(table: TableConfig, config: ModelConfig) -> Any:
    return named(table.optimizer or config.optimizer or "adagrad", Optimizer, "optimizer")


def _wanted(table: TableConfig, config: ModelConfig) -> _loading.Wanted:
    what = f"table {table.name!r}: "
    return _loading.Wanted(_native.whole(table.vocabulary_size, what + "vocabulary_size", low=1), _native.whole(table.embedding_dim, what + "embedding_dim", low=1),
                           _optimizer(table, config).kind or "adagrad")


def _counts(table: TableConfig, config: ModelConfig) -> bool:
    optimizer = _optimizer(table, config)
    return isinstance(optimizer, (AdamW, LaProp, F2A)) or (isinstance(optimizer, Adam) and bool(optimizer.bias_correction))


class _Parts:
    """Rows and slots of the source, and behind them first rows; each call begins anew."""

    def __init__(self, client: "Client", source: "Model", config: ModelConfig, found: _loading.Difference, progress: Optional[ProgressCallback]) -> None:
        self._client, self._source, self._config, self._found, self._progress = client, source, config, found, progress
        _loading.Reports(0, progress)  # is it a function?

    def __call__(self) -> Iterator[_filling.Part]:
        tables = {table.name: table for table in self._config.tables}
        source, rows = self._source, self._found.rows
        # Where the optimizer is the same, its slots are.
        taken = [(name, slot, count, tables[name].embedding_dim) for name, count in rows.items()
                 for slot in ("", *(() if name in self._found.other_slots else source.tables[name].slots))]
        beyond = sum((tables[name].vocabulary_size - rows[name]) * tables[name].embedding_dim for name in self._found.grown)
        reports = _loading.Reports(4 * (beyond + sum(count * columns for _, _, count, columns in taken)), self._progress)
        for name, slot, count, columns in taken:
            for first, values in _loading.rows_of(source, name, slot, count, columns):
                yield name, slot, np.arange(first, first + len(values)), values
                reports.add(values.nbytes)
        for name in self._found.grown:
            for ids, values in _first_rows(self._client, self._config, tables[name], rows[name]):
                yield name, "", ids, values
                reports.add(values.nbytes)


def _first_rows(client: "Client", config: ModelConfig, table: TableConfig, begin: int) -> Iterator[Tuple[Any, Any]]:
    """Of a table, from a row on, as it would have them if it were declared without a source."""
    function = _filling.function_of(table)
    if function is not None:
        for _, _, ids, values in _filling.called({table.name: table}, {table.name: function}):
            beyond = ids >= begin
            if beyond.any():
                yield ids[beyond], values[beyond]
        return
    # The cluster makes them, of the names of the table and its rows: in a model of this table alone, without slots.
    alone = ModelConfig(f"{config.name[:60]}.{table.name[:50]}.first_rows", [dataclasses.replace(table, optimizer=NoOptimizer(), resource=None)],
                        [FeatureConfig("rows", table.name)], seed=config.seed)
    made = False
    try:
        for low, high in _loading.stretches((table.vocabulary_size - begin, table.embedding_dim)):
            values, made = _exported(client, alone, begin + low, high - low), True
            yield np.arange(begin + low, begin + high), values
    finally:
        if made:
            client.drop_model(alone.name)


def _exported(client: "Client", alone: ModelConfig, first: int, count: int) -> Any:
    """Another process that changes the model, too, may have dropped it; one that was killed may have left an older one."""
    while True:
        try:
            model = client._model(client._declare(alone.to_json(), None))
            return np.concatenate([values for _, values in model.export(alone.tables[0].name, first_row=first, row_count=count)])
        except errors.NotFound:
            continue
        except errors.AlreadyExists:
            older = client.model(alone.name)
            if list(older.features) != ["rows"] or {one.optimizer for one in older.tables.values()} != {"none"}:
                raise  # somebody has given this name to a model
            client.drop_model(alone.name)


def _carry(source: "Model", made: "Model", group: str) -> int:
    """Has a group of the new model go on from the step that it has reached in the source, unless it has begun."""
    with source.train(group) as stream:
        step = stream.next_step
    if not step:
        return 0
    with made.train(group, first_step=step - 1) as stream:
        if stream.next_step == step - 1 and not stream.made_generation:
            stream.lookup({next(iter(made.features)): Ragged(np.zeros(0, np.int64), np.zeros(1, np.int64))}, partial=True)
            stream.skip()
        return stream._send_update


def restore_tables(model: "Model", name: Optional[str], tables: Optional[Sequence[str]], of: Optional[str], strict: bool,
                   progress: Optional[ProgressCallback]) -> List[str]:
    if tables is not None and (isinstance(tables, str) or not isinstance(tables, (list, tuple))):
        raise _native.refuse_kind(tables, "tables", "a list of names")
    for one in tables or ():
        _native.text(one, "tables")
        if one not in model.tables:
            raise errors.NotFound(f"tables: model {model.name!r} has no table {one!r}; it has {', '.join(model.tables)}")
    client, temporary = model.client, f"{model.name[:100]}.restore_tables"
    source = client.serve(model.name if of is None else of, name, serve_as=temporary, progress=progress)
    try:
        found = _loading.compare(model.tables, source.tables)
        missing = [one for one in (*found.added, *found.dropped, *found.grown, *found.shrunk) if tables is None or one in tables]
        misfits = [one for one in tables or model.tables if one in source.tables and one not in found.rows]
        if strict and missing + misfits:
            raise errors.InvalidArgument(f"tables: {', '.join(missing + misfits)}: not allowed with strict, for the checkpoint does not have them, has them alone, "
                                         "or has other sizes")
        return _loading.copy(model, source, False, progress, tables)
    finally:
        client.drop_model(temporary)
