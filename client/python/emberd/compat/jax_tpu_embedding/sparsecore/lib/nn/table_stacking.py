"""Which tables lie in one stack, and where they lie on TPUs. The cluster makes the same stacks. It has partitions of its own number and rotates
by its own number of these: results do not depend on it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import types
import warnings
from collections import defaultdict
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import jax
import jax.numpy as jnp
import numpy as np

from emberd.arrays import check_shape
from emberd.compat.jax_tpu_embedding._tables import rows_of
from emberd.compat.jax_tpu_embedding.sparsecore.utils.utils import round_up
from . import embedding_spec
from .embedding_spec import FeatureSpec, TableSettingInStack, TableSpec

LimitsCallable = Callable[[str, int], int]


def get_default_limits(name: str, batch_size: int) -> int:
    return 256


def _samples(feature: FeatureSpec) -> int:
    return math.prod(feature.output_shape[:-1])


def round_up_dim_and_vocab_size(tables: Mapping[str, TableSpec], num_sc: int) -> Tuple[Dict[str, int], Dict[str, int]]:
    """Padded columns and rows by table."""
    return ({name: round_up(table.embedding_dim, 8) for name, table in tables.items()},
            {name: round_up(table.vocabulary_size, 8 * num_sc) for name, table in tables.items()})


def get_table_stacks(table_specs: Any) -> Dict[str, List[TableSpec]]:
    """Tables by stack, in the order of the stack."""
    stacks: Dict[str, List[TableSpec]] = defaultdict(list)
    for table in jax.tree.leaves(table_specs):
        stacks[table.setting_in_stack.stack_name].append(table)
    for tables in stacks.values():
        tables.sort(key=lambda table: table.setting_in_stack.row_offset_in_shard)
    return dict(stacks)


def _parts(value: Any) -> Optional[List[Any]]:
    """What a function or another object is made of; None of a value, which is not taken apart."""
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]  # but for those that are empty
        return [value.__code__, value.__defaults__, value.__kwdefaults__, cells]
    if isinstance(value, (list, tuple)):
        return [type(value), *value]
    if isinstance(value, Mapping):
        return [part for key in sorted(value, key=repr) for part in (key, value[key])]
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        return [type(value), *(getattr(value, field.name) for field in dataclasses.fields(value) if field.compare)]
    return [type(value), vars(value)] if hasattr(value, "__dict__") and getattr(type(value), "__eq__") is object.__eq__ else None


def _are_alike(one: Any, other: Any, within: Tuple[Tuple[Any, Any], ...] = ()) -> bool:
    """Of two fields, or parts of them. Each call of jax.nn.initializers.normal() makes another function, of the same code and numbers."""
    if one is other or any(one is first and other is second for first, second in within):  # what refers to itself
        return True
    parts, others = _parts(one), _parts(other)
    if parts is None or others is None:
        with jax.ensure_compile_time_eval():  # arrays, also while JAX traces an update
            return parts is others and getattr(one, "shape", ()) == getattr(other, "shape", ()) and bool(np.all(one == other))
    return len(parts) == len(others) and all(_are_alike(part, its, (*within, (one, other))) for part, its in zip(parts, others))


def _tables_of(features: Sequence[FeatureSpec]) -> Dict[str, TableSpec]:
    """By name. ValueError where features have tables of one name that are no copies of one."""
    tables: Dict[str, TableSpec] = {}
    for feature in features:
        pair = tables.setdefault(feature.table_spec.name, feature.table_spec), feature.table_spec
        for name in (field.name for field in dataclasses.fields(TableSpec) if field.compare and pair[0] is not pair[1]):
            first, other = (getattr(table, name) for table in pair)
            if not _are_alike(first, other):
                raise ValueError(f"table_spec: {name}: {other!r:.100} of feature {feature.name!r} is not allowed beside "
                                 f"{first!r:.100} of another feature of table {pair[0].name!r}; give both the same TableSpec, or "
                                 "this table another name")
    return tables


def stack_name_of(table_names: Sequence[str], use_short_stack_names: bool = True) -> str:
    name = "_".join(table_names)
    if use_short_stack_names and len(name) > 50:
        return f"{name[:50]}...{hashlib.sha256(name.encode()).hexdigest()[:12]}"
    return name


def auto_stack_tables(features: Any, global_device_count: int, num_sc_per_device: int, rotation: Optional[int] = None,
                      stack_to_max_ids_per_partition: LimitsCallable = get_default_limits,
                      stack_to_max_unique_ids_per_partition: LimitsCallable = get_default_limits, *, use_short_stack_names: bool = True,
                      activation_mem_bytes_limit: Optional[int] = embedding_spec.DEFAULT_ACTIVATION_MEM_BYTES_LIMIT) -> None:
    """Stacks tables of equal padded width, optimizer, combiner and quantization, while their activations fit the limit."""
    limit = activation_mem_bytes_limit or embedding_spec.DEFAULT_ACTIVATION_MEM_BYTES_LIMIT
    specs: List[FeatureSpec] = jax.tree.leaves(features)
    shards = global_device_count * num_sc_per_device
    groups: Dict[Any, List[List[Any]]] = defaultdict(list)  # by what must be equal: stacks of [bytes, names]
    for name, table in _tables_of(specs).items():
        width = round_up(table.embedding_dim, 8)
        size = 4 * width * sum(_samples(feature) // shards for feature in specs if feature.table_spec.name == name)
        stacks = groups[width, table.optimizer, table.combiner, table.quantization_config]
        for stack in stacks:
            if stack[0] + size <= limit:
                stack[0] += size
                stack[1].append(name)
                break
        else:
            stacks.append([size, [name]])
    for stacks in groups.values():
        for _, names in stacks:
            stack_tables(features, names, global_device_count, num_sc_per_device, rotation, stack_to_max_ids_per_partition,
                         stack_to_max_unique_ids_per_partition, stack_name_of(names, use_short_stack_names), activation_mem_bytes_limit=limit)


def stack_tables(features: Any, table_names: Sequence[str], global_device_count: int, num_sc_per_device: int,
                 rotation: Optional[int] = None, stack_to_max_ids_per_partition: LimitsCallable = get_default_limits,
                 stack_to_max_unique_ids_per_partition: LimitsCallable = get_default_limits, stack_name: Optional[str] = None,
                 fail_on_excess_padding: bool = False, *,
                 activation_mem_bytes_limit: int = embedding_spec.DEFAULT_ACTIVATION_MEM_BYTES_LIMIT) -> None:
    """Makes one stack of some tables; the specifications are changed in place.

    rotation: by how many SparseCores each table is shifted against the one before; default: those of a device.
    fail_on_excess_padding: refuses tables that are not equally wide when they are padded to multiples of 8, of which it warns else.
    """
    specs: List[FeatureSpec] = jax.tree.leaves(features)
    known = _tables_of(specs)
    shards = global_device_count * num_sc_per_device
    name = stack_name or stack_name_of(table_names)
    tables = _stackable(known, table_names, name)
    widths, rows = round_up_dim_and_vocab_size({one: known[one] for one in table_names}, shards)
    width = max(widths.values())
    if width != min(widths.values()):
        unequal = f"the tables {', '.join(table_names)} have {', '.join(map(str, widths.values()))} columns with padding"
        if fail_on_excess_padding:
            raise ValueError(f"fail_on_excess_padding: {unequal}; they must have the same number")
        warnings.warn(f"emberd: stack {name!r}: {unequal}; each row takes {width}: stack tables that have the same number", stacklevel=2)
    mine = [feature for feature in specs if feature.table_spec.name in table_names]
    samples = sum(map(_samples, mine))
    alone = tables[0] if len(tables) == 1 else None
    stack = embedding_spec.StackedTableSpec(
        name, sum(rows.values()), width, tables[0].optimizer, tables[0].combiner, samples,
        alone.max_ids_per_partition if alone else stack_to_max_ids_per_partition(name, samples),
        alone.max_unique_ids_per_partition if alone else stack_to_max_unique_ids_per_partition(name, samples),
        quantization_config=tables[0].quantization_config, activation_mem_bytes_limit=activation_mem_bytes_limit)
    places = compute_table_to_setting_in_stack(name, table_names, width, rows, shards, num_sc_per_device if rotation is None else rotation)
    row = 0
    for feature in mine:  # features may point at copies of one table
        table = feature.table_spec
        table.setting_in_stack, table.stacked_table_spec = places[table.name], stack
        table.feature_shapes = {one.name: one.output_shape for one in mine if one.table_spec.name == table.name}
        feature.id_transformation = embedding_spec.FeatureIdTransformation(
            row, places[table.name].row_offset_in_shard * shards, places[table.name].shard_rotation)
        row += _samples(feature)


def _stackable(known: Mapping[str, TableSpec], table_names: Sequence[str], stack_name: str) -> List[TableSpec]:
    """The tables of these names, of which a stack of this name can be made."""
    unknown = [name for name in table_names if name not in known]
    if unknown:
        raise ValueError(f"table_names: {unknown[0]!r} is not a table of these features; they are {', '.join(known)}")
    tables = [known[name] for name in table_names]
    if len({(table.optimizer, table.combiner, table.quantization_config) for table in tables}) != 1:
        raise ValueError(f"table_names: the tables {', '.join(table_names)} must have the same optimizer, combiner and "
                         "quantization to be stacked")
    if len(set(table_names)) != len(table_names) or any(table.is_stacked() for table in tables):
        raise ValueError(f"table_names: each of {', '.join(table_names)} may be in one stack, once")
    taken = [table.name for table in known.values() if table.is_stacked() and table.setting_in_stack.stack_name == stack_name]
    if taken:
        raise ValueError(f"stack_name: {stack_name!r} is not allowed for {', '.join(table_names)}, for it is that of the stack of {', '.join(taken)}; give "
                         "another")
    return tables


def compute_table_to_setting_in_stack(stack_name: str, table_names: Sequence[str], padded_embedding_dim: int,
                                      table_to_padded_vocab_size: Mapping[str, int], num_shards: int,
                                      rotation: int) -> Dict[str, TableSettingInStack]:
    """Where tables lie in a stack, one behind the other."""
    result: Dict[str, TableSettingInStack] = {}
    offset = 0
    for number, name in enumerate(table_names):
        if name not in table_to_padded_vocab_size:
            raise ValueError(f"table_to_padded_vocab_size: the table {name!r} is missing; there are {', '.join(table_to_padded_vocab_size)}")
        rows = table_to_padded_vocab_size[name]
        result[name] = TableSettingInStack(stack_name, rows, padded_embedding_dim, offset, number * rotation % num_shards)
        offset += rows // num_shards
    return result


def set_limits(features: Sequence[FeatureSpec], stack_name: str, **limits: Any) -> None:
    """Gives the tables of a stack other limits."""
    for feature in features:
        stack = feature.table_spec.stacked_table_spec
        if stack is not None and stack.stack_name == stack_name:
            feature.table_spec.stacked_table_spec = stack.replace(**limits)


def compute_physical_row_ids(num_sparse_cores: int, stack_vocab_size: int, shard_rotation: int, row_offset_in_shard: int,
                             row_ids: Any) -> Any:
    """The rows of a stack, SparseCore after SparseCore, in which rows of a table lie. row_ids: a number, or an array."""
    shard = (row_ids + shard_rotation) % num_sparse_cores
    return shard * (stack_vocab_size // num_sparse_cores) + row_offset_in_shard + row_ids // num_sparse_cores


def get_row_ids_in_stacked_table(stack_table_spec: Any, table_spec: Any, row_ids: Sequence[int]) -> List[int]:
    """As compute_physical_row_ids, with the messages that describe the stack and the table."""
    wrong = [row for row in row_ids if not 0 <= row < table_spec.vocab_size]
    if wrong:
        raise ValueError(f"table {table_spec.table_name!r}: row_ids: {wrong[0]} is not allowed; it must be in [0, {table_spec.vocab_size})")
    return [compute_physical_row_ids(stack_table_spec.num_sparsecores, stack_table_spec.stack_vocab_size, table_spec.shard_rotation,
                                     table_spec.row_offset_in_shard, row) for row in row_ids]


def get_row_ids_in_stacked_tables(embedding_spec_proto: Any, row_ids: Mapping[str, Sequence[int]]) -> Dict[str, List[int]]:
    """By stack, the rows in which those of its tables lie. row_ids: by table."""
    result: Dict[str, List[int]] = defaultdict(list)
    for stack in embedding_spec_proto.stacked_table_specs:
        for table in stack.table_specs:
            if table.table_name in row_ids:
                result[stack.stack_name] += get_row_ids_in_stacked_table(stack, table, row_ids[table.table_name])
    return dict(result)


def rows_in_stack(stack: Any, table: Any) -> Any:
    """Where all rows of a table lie, by the messages that describe it and its stack."""
    return compute_physical_row_ids(stack.num_sparsecores, stack.stack_vocab_size, table.shard_rotation, table.row_offset_in_shard,
                                    np.arange(table.vocab_size))


def stack_and_shard_feature_tables(feature_tables: Mapping[str, Any], embedding_specs: Any, delete_input: bool = False) -> Dict[str, Any]:
    """Stacks [rows, columns], SparseCore after SparseCore, of tables by name; padding is zero. embedding_specs: EmbeddingSpecProto.

    delete_input: frees each table when it has been taken.
    """
    result: Dict[str, Any] = {}
    for stack in embedding_specs.stacked_table_specs:
        stacked = np.zeros((stack.stack_vocab_size, stack.stack_embedding_dim), np.float32)
        for table in stack.table_specs:
            if table.table_name not in feature_tables:
                raise ValueError(f"feature_tables: the table {table.table_name!r} is missing; there are {', '.join(feature_tables)}")
            values = feature_tables[table.table_name]
            shape, wanted = np.shape(values), (table.vocab_size, table.embedding_dim)
            if shape != wanted:
                raise ValueError(f"feature_tables: {table.table_name!r}: the shape {list(shape)} is not allowed; it must be {list(wanted)}")
            stacked[rows_in_stack(stack, table), :table.embedding_dim] = values
            if delete_input:
                values.delete()
        result[stack.stack_name] = jnp.asarray(stacked)
    return result


def unstack_and_unshard_stacked_tables(stacked_tables: Mapping[str, Any], embedding_specs: Any, donate: bool = False) -> Dict[str, Any]:
    """The reverse of stack_and_shard_feature_tables: tables by name, without padding. donate: frees each stack."""
    result: Dict[str, Any] = {}
    for stack in embedding_specs.stacked_table_specs:
        if stack.stack_name not in stacked_tables:
            raise ValueError(f"stacked_tables: the stack {stack.stack_name!r} is missing; there are {', '.join(stacked_tables)}")
        stacked, wanted = stacked_tables[stack.stack_name], (stack.stack_vocab_size, stack.stack_embedding_dim)
        check_shape(stacked, f"stacked_tables: {stack.stack_name!r}", stacked.shape == wanted, str(list(wanted)))
        for table in stack.table_specs:
            result[table.table_name] = stacked[rows_in_stack(stack, table), :table.embedding_dim]
        if donate:
            jax.block_until_ready(result)
            stacked.delete()
    return result


def _rows_on_shards(table: TableSpec, num_shards: int, count: int) -> Tuple[Any, Any]:
    """The SparseCores of the first rows of a table, and the rows in these."""
    ids, place = np.arange(count), table.setting_in_stack
    return (ids + place.shard_rotation) % num_shards, place.row_offset_in_shard + ids // num_shards


def stack_and_shard_tables(table_specs: Any, tables: Any, num_shards: int, pad_value: Any = math.nan) -> Dict[str, Any]:
    """Stacks [SparseCores, rows, columns] of tables in the structure of `table_specs`: arrays, or trees of arrays."""
    given: Dict[str, Any] = {}
    jax.tree.map(lambda spec, values: given.update({spec.name: values}), table_specs, tables)

    def stacked(stack: Sequence[TableSpec], *values: Any) -> Any:
        heights = [round_up(table.vocabulary_size, 8 * num_shards) for table in stack]
        spec = stack[0].stacked_table_spec
        height, width = (spec.stack_vocab_size, spec.stack_embedding_dim) if spec else (heights[0], round_up(stack[0].embedding_dim, 8))
        made = np.zeros((num_shards, height // num_shards, width), np.float32)
        for table, rows, array in zip(stack, heights, values):
            shard, row = _rows_on_shards(table, num_shards, rows)
            made[shard, row] = pad_value
            made[shard[:len(array)], row[:len(array)], :table.embedding_dim] = array
        return jnp.asarray(made)

    return {name: jax.tree.map(lambda *values: stacked(stack, *values), *(given[table.name] for table in stack))
            for name, stack in get_table_stacks(table_specs).items()}


def unshard_and_unstack_tables(table_specs: Any, stacked_tables: Mapping[str, Any], num_shards: int) -> Any:
    """The rows as they are on the cluster now, float32 [vocabulary_size, embedding_dim], in the structure of `table_specs`;
    with the slots of the optimizer where whole embedding variables are given. Of stacks that `stack_and_shard_tables` has made, their rows."""

    def part(table: TableSpec, stack: Any) -> Any:
        shard, row = _rows_on_shards(table, num_shards, table.vocabulary_size)
        return stack.reshape(num_shards, -1, stack.shape[-1])[shard, row, :table.embedding_dim]

    def unstack(table: TableSpec) -> Any:
        stack = stacked_tables[table.setting_in_stack.stack_name]
        if jax.tree.leaves(stack)[0].shape[-1] % 8:  # stands for tables: rows of a stack are multiples of 8
            return rows_of(stack, table.name)
        return jax.tree.map(lambda one: part(table, one), stack)

    return jax.tree.map(unstack, table_specs)
