"""Lookups without training: tables that are being trained, or were restored, on the same cluster."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Mapping, Optional

import numpy as np
import tensorflow as tf

from emberd import nested
from emberd.client import Model
from ._config import FeatureConfig, Optimizer, QuantizationConfig, TableConfig
from ._embedding import BaseEmbedding, EmbeddingTable, as_it_is, as_samples, looked_up, place, weights_belong


@as_it_is
def serving_embedding_lookup(inputs: Any, weights: Optional[Any], tables: Mapping[TableConfig, EmbeddingTable], feature_config: Any) -> Any:
    """Activations in the structure of inputs, which may have a part of the features of feature_config: of a dense input, float32 [its shape, dim];
    of a sparse or a ragged one, [samples, dim], or [samples, max_sequence_length, dim] where the feature has no output_shape. A ragged one with
    an output_shape gets that: of combined samples, or, where it is N times their number, of the first N ids of each.

    tables: the `embedding_tables` of a TPUEmbedding, or of a TPUEmbeddingForServing, not of several.
    ValueError as for TPUEmbeddingForServing.
    """
    for table in tables.values():
        if not isinstance(table, EmbeddingTable):
            raise TypeError(f"tables: a {type(table).__name__} is not allowed; it must be an EmbeddingTable; for variables of TensorFlow there is "
                            "tf.tpu.experimental.embedding.serving_embedding_lookup")
    models = {table.model.name: table.model for table in tables.values()}
    if len(models) != 1:
        raise ValueError(f"tables: those of {' and '.join(models) or 'no model'} are not allowed; a lookup is of one model")
    names = {table: one._table for table, one in tables.items()}
    (model,) = models.values()
    return _look_up(inputs, weights, model, BaseEmbedding(feature_config), names)


def _look_up(inputs: Any, weights: Optional[Any], model: Model, there: BaseEmbedding, names: Mapping[TableConfig, str]) -> Any:
    """names: of the model's tables, by the descriptions that stand for them."""
    scales = {} if weights is None else _by_path(weights)
    of_inputs = _by_path(inputs)
    for path, scale in scales.items():
        if scale is not None and path not in of_inputs:
            raise ValueError(f"weights: {path} is not in inputs, whose structure they must have; there are {', '.join(of_inputs)}")
    given: Dict[str, Any] = {}
    for path, ids in of_inputs.items():
        if path not in there.paths:
            raise ValueError(f"inputs: {path} is not a feature of feature_config; it has {', '.join(there.paths)}")
        name = there.paths[path]
        table = there.features[name].table
        _check_table(name, there.features[name], names.get(table) or table.name, model)
        given[name] = _of_any_shape(name, there.features[name], ids, scales.get(path))
    widths = {name: feature.table.dim for name, feature in there.features.items()}
    return looked_up(lambda ids: model.lookup(ids, partial=True), given, widths, inputs)


def _check_table(name: str, feature: FeatureConfig, table_name: Optional[str], model: Model) -> None:
    """Refuses what would be other activations than those that were trained. table_name: None: it has none."""
    if name not in model.features:
        return  # which the lookup says
    table, found = feature.table, model.tables[model.features[name].table]
    if table_name not in (None, found.name):
        raise ValueError(f"feature {name!r}: table: {table_name!r} is not allowed, for in model {model.name!r} this feature looks up table {found.name!r}")
    combined = feature.output_shape or not feature.max_sequence_length  # rows of sequences are not
    for what, mine, its in (("dim", table.dim, found.embedding_dim), ("combiner", table.combiner if combined else found.combiner, found.combiner),
                            ("quantization_config", _as_stored(table.quantization_config), _as_stored(found.quantization))):
        if mine != its:
            raise ValueError(f"feature {name!r}: table: {what}: {mine!r} is not allowed, for that of table {found.name!r} of model "
                             f"{model.name!r} is {its!r}")


def _as_stored(one: Any) -> Optional[QuantizationConfig]:
    """A QuantizationConfig, ours or emberd's, with the numbers that a model has: float32."""
    return None if one is None else QuantizationConfig(one.num_buckets, float(np.float32(one.lower)), float(np.float32(one.upper)))


def _by_path(tree: Any) -> Dict[str, Any]:
    return nested.flatten(tree if isinstance(tree, (Mapping, list, tuple)) else {"feature": tree})


def _of_any_shape(name: str, feature: FeatureConfig, ids: Any, weights: Any) -> Any:
    """As in training, but for the shape: that of the input, whatever was declared."""
    wanted = feature.output_shape
    feature = dataclasses.replace(feature, output_shape=None, max_sequence_length=0 if wanted else feature.max_sequence_length)
    if isinstance(ids, tf.RaggedTensor) and wanted:
        samples, places = ids.shape[0], int(np.prod(wanted))
        if not samples or places % samples:
            raise ValueError(f"feature {name!r}: {samples or 'an unknown number of'} samples are not allowed for output_shape {wanted}")
        if places != samples:
            feature = dataclasses.replace(feature, max_sequence_length=places // samples)
        return (*as_samples(name, feature, ids, weights)[:3], tf.constant(wanted))
    if isinstance(ids, (tf.SparseTensor, tf.RaggedTensor)):
        return as_samples(name, feature, ids, weights)
    ids = tf.convert_to_tensor(ids)
    if weights is not None:
        weights = tf.convert_to_tensor(weights)
        with tf.control_dependencies(weights_belong(name, ids, weights)):
            weights = tf.reshape(weights, [-1])
    flat = as_samples(name, feature, tf.reshape(ids, [-1]), weights)
    return (*flat[:3], tf.shape(ids))


class TPUEmbeddingForServing(BaseEmbedding):
    """Rows of the model that `use` names, where it is on the cluster: one that is trained, or restored. Where it is not, its tables are made.
    Rows are rounded as in training: by the quantization_config of their table. ValueError where the table of a feature, or its dim, combiner or
    quantization_config, is another than there. experimental_sparsecore_restore_info: not needed."""

    def __init__(self, feature_config: Any, optimizer: Optional[Optimizer], experimental_sparsecore_restore_info: Optional[Dict[str, Any]] = None) -> None:
        super().__init__(feature_config, optimizer)

    def _made(self) -> Model:
        return place.find() or super()._made()

    def build(self) -> None:
        """Finds the tables, or makes them."""
        self._built()

    @property
    def embedding_tables(self) -> Dict[TableConfig, EmbeddingTable]:
        return {table: variables["parameters"] for table, _, variables in self._tables()}

    @property
    def variables(self) -> Dict[str, Dict[str, EmbeddingTable]]:
        """By the name of the table: "parameters", and the slots of the optimizer by their names in TensorFlow."""
        return {name: variables for _, name, variables in self._tables()}

    @as_it_is
    def __call__(self, features: Any, weights: Any = None) -> Any:
        return self.embedding_lookup(features, weights)

    @as_it_is
    def embedding_lookup(self, features: Any, weights: Any = None) -> Any:
        """As serving_embedding_lookup has them."""
        return _look_up(features, weights, self.model, self, {})
