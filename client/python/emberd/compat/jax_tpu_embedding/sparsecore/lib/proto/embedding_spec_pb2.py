"""The messages of jax-tpu-embedding that describe specifications, by name and number as there: their checkpoints hold them as text.

They are made here, by whatever protobuf is installed, in a pool of their own: jax-tpu-embedding may be loaded, too.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "third_party.py.jax_tpu_embedding.sparsecore_lib_proto"
_Field = descriptor_pb2.FieldDescriptorProto
_KINDS = {"bool": _Field.TYPE_BOOL, "float": _Field.TYPE_FLOAT, "int64": _Field.TYPE_INT64, "string": _Field.TYPE_STRING,
          "OptimizerType": _Field.TYPE_ENUM}
_OPTIMIZERS = ("OPTIMIZER_TYPE_UNSPECIFIED", "SGD", "ADAGRAD", "ADAM", "FTRL", "F2A", "ADAGRAD_MOMENTUM", "CUSTOM")

# "number name type"; * behind a type: repeated; ? optional; | one of learning_rate_spec; map<type>: by a text.
_MESSAGES = {
    "FeatureSpecProto": """1 feature_name string, 2 input_shape int64*, 3 output_shape int64*, 4 row_offset int64, 5 col_offset int64,
        6 col_shift int64""",
    "OptimizerSpecProto": """1 type OptimizerType, 2 learning_rate float|, 3 learning_rate_tag string|, 4 float_params map<float>,
        5 bool_params map<bool>""",
    "TableSpecProto": """1 table_name string, 2 vocab_size int64, 3 embedding_dim int64, 5 max_ids_per_partition int64,
        6 max_unique_ids_per_partition int64, 7 padded_vocab_size int64, 8 padded_embedding_dim int64, 9 row_offset_in_shard int64,
        10 shard_rotation int64, 11 feature_specs FeatureSpecProto*, 12 combiner string, 13 optimizer OptimizerSpecProto""",
    "StackedTableSpecProto": """1 stack_name string, 2 stack_vocab_size int64, 3 stack_embedding_dim int64, 6 total_sample_count int64,
        7 max_ids_per_partition int64, 8 max_unique_ids_per_partition int64, 9 num_sparsecores int64, 10 table_specs TableSpecProto*,
        11 activation_mem_bytes_limit int64?""",
    "EmbeddingSpecProto": "1 stacked_table_specs StackedTableSpecProto*",
}


def _add_field(message: Any, number: int, name: str, kind: str) -> None:
    field = message.field.add(name=name, number=number, label=_Field.LABEL_REPEATED if kind[-1] in "*>" else _Field.LABEL_OPTIONAL)
    if kind.startswith("map<"):
        entry = message.nested_type.add(name="".join(map(str.capitalize, name.split("_"))) + "Entry")
        entry.options.map_entry = True
        _add_field(entry, 1, "key", "string")
        _add_field(entry, 2, "value", kind[4:-1])
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{message.name}.{entry.name}"
        return
    if kind[-1] in "|?":
        field.oneof_index, field.proto3_optional = 0, kind[-1] == "?"
        if not message.oneof_decl:
            message.oneof_decl.add(name="learning_rate_spec" if kind[-1] == "|" else f"_{name}")
    bare = kind.rstrip("*|?")
    field.type = _KINDS.get(bare, _Field.TYPE_MESSAGE)
    if bare not in _KINDS:
        field.type_name = f".{_PACKAGE}.{bare}"
    elif bare == "OptimizerType":
        field.type_name = f".{_PACKAGE}.{message.name}.{bare}"
        kinds = message.enum_type.add(name=bare)
        for value, optimizer in enumerate(_OPTIMIZERS):
            kinds.value.add(name=optimizer, number=value)


def _make() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="embedding_spec.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields.split(","):
            number, field_name, kind = field.split()
            _add_field(message, int(number), field_name, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    made = message_factory.GetMessageClassesForFiles([file.name], pool)
    for kind in made.values():
        kind.__module__ = __name__  # by which it is pickled
    return made


_made = _make()
FeatureSpecProto: Any = _made[f"{_PACKAGE}.FeatureSpecProto"]
OptimizerSpecProto: Any = _made[f"{_PACKAGE}.OptimizerSpecProto"]
TableSpecProto: Any = _made[f"{_PACKAGE}.TableSpecProto"]
StackedTableSpecProto: Any = _made[f"{_PACKAGE}.StackedTableSpecProto"]
EmbeddingSpecProto: Any = _made[f"{_PACKAGE}.EmbeddingSpecProto"]
