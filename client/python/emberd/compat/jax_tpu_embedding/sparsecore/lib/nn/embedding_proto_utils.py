"""Specifications as the messages of embedding_spec_pb2, and back. Needs protobuf, which Flax brings."""

from __future__ import annotations

from typing import Any, Dict, Optional

import jax

from emberd.compat.jax_tpu_embedding.sparsecore.utils import utils
from ..proto import embedding_spec_pb2
from . import embedding_spec
from .embedding_spec import CallablePlaceholder, OptimizerSpec

_Proto = embedding_spec_pb2.OptimizerSpecProto
_KINDS = {_Proto.SGD: embedding_spec.SGDOptimizerSpec, _Proto.ADAGRAD: embedding_spec.AdagradOptimizerSpec,
          _Proto.ADAM: embedding_spec.AdamOptimizerSpec, _Proto.FTRL: embedding_spec.FTRLOptimizerSpec,
          _Proto.F2A: embedding_spec.F2AOptimizerSpec, _Proto.ADAGRAD_MOMENTUM: embedding_spec.AdagradMomentumOptimizerSpec}


def get_optimizer_class(optimizer_type: int) -> Any:
    """None: there is none of this type."""
    return _KINDS.get(optimizer_type)


def get_optimizer_type(optimizer_class: Any) -> int:
    return int(next((number for number, kind in _KINDS.items() if kind is optimizer_class), _Proto.CUSTOM))


def optimizer_spec_to_proto(opt: Optional[OptimizerSpec]) -> Any:
    """A learning rate that is a function is described by its `tag`, or by its name; a rule of your own by its StableHLO, among the parameters, where
    jax-tpu-embedding, which has no place for it, does not look."""
    if opt is None:
        return None
    rate: Any = opt.learning_rate
    name = getattr(rate, "tag", None) or f"{getattr(rate, '__module__', '')}.{getattr(rate, '__qualname__', '<lambda>')}"
    if name.endswith("<lambda>"):  # two of them are two functions
        name += f"_{id(rate)}"
    return _Proto(type=get_optimizer_type(type(opt)), float_params=opt.get_float_params(), bool_params=opt.get_bool_params(),
                  **({"learning_rate_tag": name} if callable(rate) else {"learning_rate": float(rate)}))


def proto_to_optimizer_spec(proto: Any) -> OptimizerSpec:
    """ValueError for one that is none of embedding_spec. LaProp and a rule of your own have no type of their own, and are known by their parameters."""
    kind = get_optimizer_class(proto.type)
    if kind is None and "b1" in proto.float_params:
        kind = embedding_spec.LaPropOptimizerSpec
    if kind is None and embedding_spec.CustomOptimizerSpec._rule_in(proto.bool_params):
        kind = embedding_spec.CustomOptimizerSpec
    if kind is None and proto.type == _Proto.CUSTOM:
        raise ValueError("optimizer: the type CUSTOM is not allowed without its rule, which jax-tpu-embedding does not write. Give it where the tables are "
                         "specified, in target_feature_specs of a conversion: CustomOptimizerSpec(learning_rate, custom_computation_fn=..., "
                         "slot_variable_initializers_tuple=...)")
    if kind is None:
        raise ValueError(f"optimizer: the type {proto.type} is not allowed; it must be one of {', '.join(one.__name__ for one in _KINDS.values())}")
    tagged = proto.WhichOneof("learning_rate_spec") == "learning_rate_tag"
    made: OptimizerSpec = kind.from_float_and_bool_params(
        dict(proto.float_params), dict(proto.bool_params), CallablePlaceholder(proto.learning_rate_tag) if tagged else proto.learning_rate)
    return made


def create_proto_from_feature_specs(feature_specs: Any, global_device_count: Optional[int],
                                    num_sparsecore_per_device: Optional[int] = None) -> Any:
    """The stacks, their tables and features, and where they lie: EmbeddingSpecProto. The specifications must have been prepared."""
    sparsecores = (num_sparsecore_per_device or utils.num_sparsecores_per_device()) * (global_device_count or jax.device_count())
    result = embedding_spec_pb2.EmbeddingSpecProto()
    stacks: Dict[str, Any] = {}
    tables: Dict[str, Any] = {}
    for feature in jax.tree.leaves(feature_specs):
        table, moved = feature.table_spec, feature.id_transformation
        stack, place = table.stacked_table_spec, table.setting_in_stack
        if stack is None or moved is None:
            raise ValueError(f"feature {feature.name!r}: call prepare_feature_specs_for_training before")
        if stack.stack_name not in stacks:
            stacks[stack.stack_name] = result.stacked_table_specs.add(num_sparsecores=sparsecores, **{name: getattr(stack, name) for name in (
                "stack_name", "stack_vocab_size", "stack_embedding_dim", "total_sample_count", "max_ids_per_partition",
                "max_unique_ids_per_partition", "activation_mem_bytes_limit")})
        if table.name not in tables:
            tables[table.name] = stacks[stack.stack_name].table_specs.add(
                table_name=table.name, vocab_size=table.vocabulary_size, embedding_dim=table.embedding_dim, combiner=table.combiner,
                padded_vocab_size=place.padded_vocab_size, padded_embedding_dim=place.padded_embedding_dim,
                row_offset_in_shard=place.row_offset_in_shard, shard_rotation=place.shard_rotation,
                optimizer=optimizer_spec_to_proto(table.optimizer))
        tables[table.name].feature_specs.add(
            feature_name=feature.name, input_shape=feature.input_shape, output_shape=feature.output_shape, row_offset=moved.row_offset,
            col_offset=moved.col_offset, col_shift=moved.col_shift)
    return result
