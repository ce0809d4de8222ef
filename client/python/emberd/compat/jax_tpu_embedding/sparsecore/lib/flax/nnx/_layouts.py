"""Where the tables of a checkpoint lie in its stacks, by its description; and by that of the same tables on another number of SparseCores."""

from __future__ import annotations

import math
from typing import Any, Dict, Iterator, Mapping, Optional, Tuple

import jax
import numpy as np

from ...nn import embedding, embedding_proto_utils, embedding_spec, table_stacking
from ...proto import embedding_spec_pb2


def places(spec: Any) -> Iterator[Tuple[Any, Any, Any]]:
    """The stack and the description of each table, and where its rows lie in the stack: by SparseCore, then by table."""
    for stack in spec.stacked_table_specs:
        for table in stack.table_specs:
            yield stack, table, table_stacking.rows_in_stack(stack, table)


def alone(source: Any) -> Any:
    """The description of the same tables, each alone as it was declared."""
    target = embedding_spec_pb2.EmbeddingSpecProto()
    for stack in source.stacked_table_specs:
        for table in stack.table_specs:
            made = target.stacked_table_specs.add()
            made.CopyFrom(stack)
            del made.table_specs[:]
            made.stack_name, made.stack_vocab_size, made.stack_embedding_dim = table.table_name, table.vocab_size, table.embedding_dim
            made.num_sparsecores = 1
            only = made.table_specs.add()
            only.CopyFrom(table)
            only.padded_vocab_size, only.padded_embedding_dim = table.vocab_size, table.embedding_dim
            only.row_offset_in_shard = only.shard_rotation = 0
            for feature in only.feature_specs:
                feature.row_offset = feature.col_offset = feature.col_shift = 0
    return target


def planned(source: Any, devices: int, sparsecores: int, batch_size: Optional[int]) -> Any:
    """The description of the same tables for another topology."""
    told = all(table.combiner and table.HasField("optimizer") for stack in source.stacked_table_specs for table in stack.table_specs)
    features = []
    for stack in source.stacked_table_specs:
        for table in stack.table_specs:
            made = embedding_spec.TableSpec(
                table.table_name, table.vocab_size, table.embedding_dim, max_ids_per_partition=stack.max_ids_per_partition,
                max_unique_ids_per_partition=stack.max_unique_ids_per_partition, combiner=table.combiner or "mean",
                optimizer=embedding_proto_utils.proto_to_optimizer_spec(table.optimizer) if told else embedding_spec.SGDOptimizerSpec())
            features += [embedding_spec.FeatureSpec(one.feature_name, made, (batch_size or one.input_shape[0], *one.input_shape[1:]),
                                                    (batch_size or one.output_shape[0], *one.output_shape[1:])) for one in table.feature_specs]
    limits = {stack.activation_mem_bytes_limit for stack in source.stacked_table_specs if stack.activation_mem_bytes_limit}
    limit = min(limits, default=embedding_spec.DEFAULT_ACTIVATION_MEM_BYTES_LIMIT)
    if told:
        table_stacking.auto_stack_tables(features, devices, sparsecores, activation_mem_bytes_limit=limit)
        return embedding.create_proto_from_feature_specs(features, devices, sparsecores)
    for stack in source.stacked_table_specs:
        names = [table.table_name for table in stack.table_specs]
        table_stacking.stack_tables(features, names, devices, sparsecores, None, lambda *_, one=stack: one.max_ids_per_partition,
                                    lambda *_, one=stack: one.max_unique_ids_per_partition, stack.stack_name, activation_mem_bytes_limit=limit)
        size = sum(4 * one.table_spec.setting_in_stack.padded_embedding_dim * (math.prod(one.output_shape[:-1]) // (devices * sparsecores))
                   for one in features if one.table_spec.name in names)
        if len(names) > 1 and size > limit:
            raise ValueError(f"stack {stack.stack_name!r}: {size} bytes of activations on each SparseCore are above the limit of {limit}; "
                             "give target_feature_specs with other stacks")
    target = embedding.create_proto_from_feature_specs(features, devices, sparsecores)
    for stack in target.stacked_table_specs:
        for table in stack.table_specs:
            table.ClearField("optimizer")
            table.ClearField("combiner")
    return target


def restacked(stacks: Mapping[str, Any], source: Any, target: Any) -> Dict[str, Any]:
    """The same rows and slots where another description has them; padding is zero."""
    held = {}
    for stack, table, rows in places(source):
        held[table.table_name] = (table.vocab_size, table.embedding_dim), jax.tree.map(
            lambda one: np.asarray(one)[rows, :table.embedding_dim], stacks[stack.stack_name])
    result: Dict[str, Any] = {}
    for stack, table, rows in places(target):
        size, parts = held.pop(table.table_name, (None, None))
        if size != (table.vocab_size, table.embedding_dim):
            raise ValueError(f"target_feature_specs: table {table.table_name!r} is {table.vocab_size} x {table.embedding_dim}; in the checkpoint it is "
                             f"{'not there' if size is None else '%d x %d' % size}")
        made = result.setdefault(stack.stack_name, jax.tree.map(
            lambda one: np.zeros((stack.stack_vocab_size, stack.stack_embedding_dim), one.dtype), parts))
        if jax.tree.structure(made) != jax.tree.structure(parts):
            raise ValueError(f"target_feature_specs: stack {stack.stack_name!r}: table {table.table_name!r} has other slots than those before it")
        for whole, part in zip(jax.tree.leaves(made), jax.tree.leaves(parts)):
            whole[rows, :table.embedding_dim] = part
    if held:
        raise ValueError(f"target_feature_specs: table {next(iter(held))!r} of the checkpoint is missing")
    return result
