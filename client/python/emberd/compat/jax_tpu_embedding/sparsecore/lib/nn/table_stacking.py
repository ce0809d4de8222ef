"""Which tables lie in one stack, and where. The cluster stores them so; results do not depend on it."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from dataclasses import replace
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import jax

from emberd.compat.jax_tpu_embedding._tables import rows_of
from . import embedding_spec
from .embedding_spec import FeatureSpec, TableSpec

LimitsCallable = Callable[[str, int], int]


def get_default_limits(name: str, batch_size: int) -> int:
    return 256


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _samples(feature: FeatureSpec) -> int:
    return math.prod(feature.output_shape[:-1])


def round_up_dim_and_vocab_size(tables: Mapping[str, TableSpec], num_sc: int) -> Tuple[Dict[str, int], Dict[str, int]]:
    """Padded columns and rows by table."""
    return ({name: _up(table.embedding_dim, 8) for name, table in tables.items()},
            {name: _up(table.vocabulary_size, 8 * num_sc) for name, table in tables.items()})


def get_table_stacks(table_specs: Any) -> Dict[str, List[TableSpec]]:
    """Tables by stack, in the order of the stack."""
    stacks: Dict[str, List[TableSpec]] = defaultdict(list)
    for table in jax.tree.leaves(table_specs):
        stacks[table.setting_in_stack.stack_name if table.setting_in_stack else table.name].append(table)
    for tables in stacks.values():
        tables.sort(key=lambda table: table.setting_in_stack.row_offset_in_shard if table.setting_in_stack else 0)
    return dict(stacks)


def _tables_of(features: Sequence[FeatureSpec]) -> Dict[str, TableSpec]:
    return {feature.table_spec.name: feature.table_spec for feature in features}


def stack_name_of(table_names: Sequence[str], use_short_stack_names: bool = True) -> str:
    name = "_".join(table_names)
    if use_short_stack_names and len(name) > 50:
        return f"{name[:50]}...{hashlib.sha256(name.encode()).hexdigest()[:12]}"
    return name


def auto_stack_tables(feature_specs: Any, global_device_count: int, num_sc_per_device: int,
                      stack_to_max_ids_per_partition: LimitsCallable = get_default_limits,
                      stack_to_max_unique_ids_per_partition: LimitsCallable = get_default_limits,
                      use_short_stack_names: bool = True, *, activation_mem_bytes_limit: Optional[int] = None) -> None:
    """Stacks tables of equal padded width, optimizer, combiner and quantization, while their activations fit the limit."""
    limit = activation_mem_bytes_limit or embedding_spec.DEFAULT_ACTIVATION_MEM_BYTES_LIMIT
    features: List[FeatureSpec] = jax.tree.leaves(feature_specs)
    shards = global_device_count * num_sc_per_device
    groups: Dict[Any, List[List[Any]]] = defaultdict(list)  # by what must be equal: stacks of [bytes, names]
    for name, table in _tables_of(features).items():
        width = _up(table.embedding_dim, 8)
        size = 4 * width * sum(_samples(feature) // shards for feature in features if feature.table_spec.name == name)
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
            stack_tables(feature_specs, names, global_device_count, num_sc_per_device, stack_to_max_ids_per_partition,
                         stack_to_max_unique_ids_per_partition, stack_name=stack_name_of(names, use_short_stack_names),
                         activation_mem_bytes_limit=limit)


def stack_tables(feature_specs: Any, table_names: Sequence[str], global_device_count: int, num_sc_per_device: int,
                 stack_to_max_ids_per_partition: LimitsCallable = get_default_limits,
                 stack_to_max_unique_ids_per_partition: LimitsCallable = get_default_limits,
                 stack_name: Optional[str] = None, rotation: Optional[int] = None, *,
                 activation_mem_bytes_limit: Optional[int] = None) -> None:
    """Makes one stack of some tables; the specifications are changed in place."""
    features: List[FeatureSpec] = jax.tree.leaves(feature_specs)
    known = _tables_of(features)
    unknown = [name for name in table_names if name not in known]
    if unknown:
        raise ValueError(f"table_names: {unknown[0]!r} is not a table of these features; they are {', '.join(known)}")
    tables = [known[name] for name in table_names]
    if len({(table.optimizer, table.combiner, table.quantization_config) for table in tables}) != 1:
        raise ValueError(f"table_names: the tables {', '.join(table_names)} must have the same optimizer, combiner and "
                         "quantization to be stacked")
    if len(set(table_names)) != len(table_names) or any(table.is_stacked() for table in tables):
        raise ValueError(f"table_names: each of {', '.join(table_names)} may be in one stack, once")
    shards = global_device_count * num_sc_per_device
    name = stack_name or stack_name_of(table_names)
    width = max(_up(table.embedding_dim, 8) for table in tables)
    mine = [feature for feature in features if feature.table_spec.name in table_names]
    samples = sum(map(_samples, mine))
    alone = tables[0] if len(tables) == 1 else None
    stack = embedding_spec.StackedTableSpec(
        name, sum(_up(table.vocabulary_size, 8 * shards) for table in tables), width, tables[0].optimizer,
        tables[0].combiner, samples,
        alone.max_ids_per_partition if alone else stack_to_max_ids_per_partition(name, samples),
        alone.max_unique_ids_per_partition if alone else stack_to_max_unique_ids_per_partition(name, samples),
        quantization_config=tables[0].quantization_config,
        activation_mem_bytes_limit=activation_mem_bytes_limit or embedding_spec.DEFAULT_ACTIVATION_MEM_BYTES_LIMIT)
    offset = 0
    for number, table in enumerate(tables):
        rows = _up(table.vocabulary_size, 8 * shards)
        shift = number * (num_sc_per_device if rotation is None else rotation) % shards
        table.setting_in_stack = embedding_spec.TableSettingInStack(name, rows, width, offset, shift)
        table.stacked_table_spec = stack
        table.feature_shapes = {feature.name: feature.output_shape for feature in mine if feature.table_spec.name == table.name}
        offset += rows // shards
    row = 0
    for feature in mine:
        # Features may point at copies of one table.
        first = known[feature.table_spec.name]
        feature.table_spec.setting_in_stack, feature.table_spec.stacked_table_spec = first.setting_in_stack, stack
        feature.table_spec.feature_shapes = first.feature_shapes
        assert first.setting_in_stack is not None
        feature.id_transformation = embedding_spec.FeatureIdTransformation(
            row, first.setting_in_stack.row_offset_in_shard * shards, first.setting_in_stack.shard_rotation)
        row += _samples(feature)


def set_limits(features: Sequence[FeatureSpec], stack_name: str, **limits: Any) -> None:
    """Gives the tables of a stack other limits."""
    for feature in features:
        stack = feature.table_spec.stacked_table_spec
        if stack is not None and stack.stack_name == stack_name:
            feature.table_spec.stacked_table_spec = replace(stack, **limits)


def unshard_and_unstack_tables(table_specs: Any, stacked_tables: Mapping[str, Any], num_shards: int) -> Any:
    """The rows as they are on the cluster now, float32 [vocabulary_size, embedding_dim], in the structure of `table_specs`;
    with the slots of the optimizer where whole embedding variables are given."""

    def unstack(table: TableSpec) -> Any:
        name = table.setting_in_stack.stack_name if table.setting_in_stack else table.name
        return rows_of(stacked_tables[name], table.name)

    return jax.tree.map(unstack, table_specs)
