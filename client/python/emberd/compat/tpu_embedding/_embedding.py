"""Lookups and updates, in eager mode and in tf.function."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any, Callable, Deque, Dict, Iterator, List, Mapping, Optional, Tuple, TypeVar

import numpy as np
import tensorflow as tf

from emberd import config, nested
from emberd._in_tensorflow import convert, numpy_function, read
from emberd._loading import assign_in_parts, check_finite
from emberd._place import planned_samples
from emberd._stacking import apart, kind_of
from emberd.arrays import Floats, Ragged, check_shape, unmasked
from emberd.client import Client, Model
from emberd.trainer import Trainer
from .._in_turn import InTurn, Place
from . import _statistics
from ._config import FeatureConfig, Optimizer, SparseCoreEmbeddingConfig, TableConfig
from ._stacks import SLOTS, StackedTable
from ._statistics import PartitionedCsrFormatTensor

place = Place("tpu_embedding")
# By feature: ids int64 [n], where each sample begins and the last ends int64 [samples + 1], weights float32 [n] or [0], the shape of the
# activations without dim.
Prepared = Dict[str, Tuple[Any, Any, Any, Any]]


Function = TypeVar("Function", bound=Callable[..., Any])


def as_it_is(function: Function) -> Function:
    """tf.function traces it, and does not rewrite it."""
    made: Function = tf.autograph.experimental.do_not_convert(function)
    return made


def use(client: Client, *, model: str = "tpu_embedding", group: str = "train") -> None:
    """Makes the next tables on the cluster of this client, in models named `model`, `model`_1 and so on."""
    place.use(client, model, group)


class EmbeddingTable:
    """A table, or a slot of its optimizer, on the cluster: float32 [vocabulary_size, dim], in the order of ids. Each call reads all of it."""

    def __init__(self, model: Model, table: str, slot: str) -> None:
        self.model, self._table, self._slot = model, table, slot
        self.name, self.dtype = f"{table}/{SLOTS.get(slot, slot)}" if slot else table, tf.float32
        self.shape = tf.TensorShape([model.tables[table].vocabulary_size, model.tables[table].embedding_dim])

    def __repr__(self) -> str:
        return f"EmbeddingTable({self.name!r}, shape={self.shape.as_list()})"

    def __len__(self) -> int:
        return self.model.tables[self._table].vocabulary_size

    def numpy(self) -> Floats:
        return self.model.table(self._table, slot=self._slot)

    def read_value(self) -> Any:
        return read(self.numpy, self.shape)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def assign(self, value: Any) -> "EmbeddingTable":
        values = np.asarray(unmasked(value, "value"))
        check_shape(values, "value", values.ndim == 2 and len(values) == len(self) and values.shape[1] > 0, str(self.shape.as_list()))
        check_finite(values, "value")  # before the first part is assigned
        assign_in_parts(self.model, self._table, np.arange(len(self)), values, self._slot)
        return self

    def read_from_device(self, device: str) -> Any:
        """Of the stack of this table, as StackedTable.read_from_device."""
        return self._stack().read_from_device(device)

    def assign_on_device(self, device: str, value: Any) -> None:
        """The same."""
        self._stack().assign_on_device(device, value)

    def _stack(self) -> StackedTable:
        return StackedTable(self.model, self.model.tables[self._table].stack, self._slot)


tf.register_tensor_conversion_function(EmbeddingTable, convert)


class BaseEmbedding:
    """What both have."""

    def __init__(self, feature_config: Any, optimizer: Optional[Optimizer] = None, pipeline_execution_with_tensor_core: bool = False,
                 sparse_core_embedding_config: Optional[SparseCoreEmbeddingConfig] = None) -> None:
        self._structure, self._config = feature_config, sparse_core_embedding_config
        self.features: Dict[str, FeatureConfig] = {}
        self.paths: Dict[str, str] = {}  # to the name of the feature
        self._names: Dict[TableConfig, str] = {}
        self._optimizers: Dict[str, Optional[Optimizer]] = {}
        # In the order in which tf.nest has them.
        by_path = nested.flatten({"feature": feature_config} if isinstance(feature_config, FeatureConfig) else feature_config)
        for path, feature in by_path.items():
            if not isinstance(feature, FeatureConfig):
                raise ValueError(f"feature_config: {path}: {feature!r} is not allowed; it must be a FeatureConfig")
            # TensorFlow lets features share a name: one that is taken, or the path of another, is none.
            self.paths[path] = path if not feature.name or feature.name in self.features or feature.name in by_path else feature.name
            self.features[self.paths[path]] = feature
            if feature.table not in self._names:
                self._add_table(feature.table, optimizer)
        self._in_turn: Optional[InTurn] = None
        self._batch: Optional[int] = None  # of one replica, where `build` was told

    def _add_table(self, table: TableConfig, optimizer: Optional[Optimizer]) -> None:
        name = table.name or f"table_{len(self._names)}"
        if name in self._optimizers:
            raise ValueError(f"name: {name!r} is not allowed for two tables; names of tables must be unique")
        chosen = table.optimizer or optimizer
        if chosen is not None and not isinstance(chosen, Optimizer):
            raise ValueError(f"optimizer: {chosen!r} is not allowed; it must be one of this package, as Adagrad(0.1)")
        self._names[table], self._optimizers[name] = name, chosen

    @property
    def model(self) -> Model:
        """The tables on the cluster."""
        return self._built().trainer.model

    def _built(self) -> InTurn:
        if self._in_turn is None:
            with tf.init_scope():  # not as a part of the function that is being traced
                self._in_turn = InTurn(Trainer(self._made(), place.group))
        return self._in_turn

    def _made(self) -> Model:
        return place.declare(self._declared)

    def _declared(self, name: str) -> config.ModelConfig:
        tables = []
        for table, table_name in self._names.items():
            optimizer, quantized = self._optimizers[table_name], table.quantization_config
            tables.append(config.TableConfig(
                table_name, table.vocabulary_size, table.dim, combiner=table.combiner,
                optimizer=config.NoOptimizer() if optimizer is None else optimizer.declared(),
                initializer=table.initial_rows(),
                quantization=config.QuantizationConfig(quantized.lower, quantized.upper, quantized.num_buckets) if quantized else None))
        chosen = self._config or SparseCoreEmbeddingConfig()
        rates = {table: one.rate_of_step for table, one in self._optimizers.items() if one}
        groups = apart(rates, {one.name: kind_of(one.embedding_dim, one.optimizer) for one in tables})
        return config.ModelConfig(name, tables, [config.FeatureConfig(one, self._names[feature.table], planned_samples(
            feature.output_shape or (self._batch, feature.max_sequence_length or 1))) for one, feature in self.features.items()],
                                  plan=config.PlanConfig(rules="tensorflow", auto_stack=not chosen.disable_table_stacking, groups=groups or None,
                                                         max_ids_per_chip_per_sample=chosen.max_ids_per_chip_per_sample if self._config else None,
                                                         allow_id_dropping=chosen.allow_id_dropping))

    def _tables(self) -> Iterator[Tuple[TableConfig, str, Dict[str, EmbeddingTable]]]:
        model = self.model
        for table, name in self._names.items():
            slots: Dict[str, EmbeddingTable] = {SLOTS[slot] if slot in SLOTS else slot: EmbeddingTable(model, name, slot) for slot in model.tables[name].slots}
            yield table, name, {"parameters": EmbeddingTable(model, name, ""), **slots}

    def _prepare(self, features: Any, weights: Any) -> Prepared:
        tf.nest.assert_same_structure(self._structure, features)
        given = tf.nest.flatten(features)
        if weights is None:
            scales: List[Any] = [None] * len(given)
        else:
            tf.nest.assert_same_structure(self._structure, weights)
            scales = tf.nest.flatten(weights)
        return {name: as_samples(name, feature, ids, scale)
                for (name, feature), ids, scale in zip(self.features.items(), given, scales)}

    def _look_up(self, prepared: Prepared, trains: Callable[[], bool] = lambda: True) -> Any:
        """trains: asked on the host: whether an update may follow."""
        in_turn, trained = self._built(), any(self._optimizers.values())

        def look_up(ids: Dict[str, Ragged]) -> Mapping[str, Floats]:
            return in_turn.look_up(ids) if trained and trains() else in_turn.trainer.look_up(ids)  # which makes no step

        return looked_up(look_up, prepared, {name: feature.table.dim for name, feature in self.features.items()}, self._structure)

    def _check_built(self) -> InTurn:
        if self._in_turn is None:
            raise RuntimeError("apply_gradients: there is nothing to update yet; look up before, or call build")
        return self._in_turn

    def _update(self, gradients: Any, prepared: Prepared, sent: Callable[[], object] = lambda: None) -> None:
        """sent: as in InTurn.update."""
        tf.nest.assert_same_structure(self._structure, gradients)
        given = {}
        for (name, feature), gradient in zip(self.features.items(), tf.nest.flatten(gradients)):
            if gradient is None:
                continue  # it is zero
            if not tf.is_tensor(gradient):
                raise ValueError(f"gradients: a {type(gradient).__name__} is not allowed for feature {name!r}; it must be a tensor")
            given[name] = _rows_of_gradient(name, tf.cast(gradient, tf.float32), prepared[name][3], feature.table.dim)
        asked = {name: one.rate_of_step for name, one in self._optimizers.items() if one is not None}
        rates = {name: tf.cast(ask(), tf.float32) for name, ask in asked.items() if ask is not None}
        in_turn, names, of_ids = self._check_built(), list(prepared), 3 * len(prepared)

        def on_host(*arrays: Any) -> Any:
            values, hyper = arrays[of_ids:of_ids + len(given)], arrays[of_ids + len(given):]
            in_turn.update(_ids(names, arrays[:of_ids]), dict(zip(given, values)),
                           {name: {"learning_rate": float(rate)} for name, rate in zip(rates, hyper)}, sent)
            return np.int64(0)

        numpy_function(on_host, [*_arrays(prepared), *given.values(), *rates.values()], tf.int64)


def _rows_of_gradient(name: str, gradient: Any, shape: Any, dim: int) -> Any:
    """float32 [n, dim]. shape: of the activations without dim."""
    gradient = tf.convert_to_tensor(gradient)
    known = _known(shape).concatenate([dim])
    if not gradient.shape.is_compatible_with(known):
        raise ValueError(f"feature {name!r}: a gradient of the shape {gradient.shape} is not allowed; it must be that of the activations, {known}")
    checks: List[Any] = []
    if not (known.is_fully_defined() and gradient.shape.is_fully_defined()):
        found, wanted = tf.shape(gradient), tf.concat([shape, [dim]], 0)
        checks = [tf.debugging.Assert(_are_equal(found, wanted), [
            f"feature {name!r}: the shape of the gradient must be that of the activations: it is", found, "and not", wanted])]
    with tf.control_dependencies([one for one in checks if one is not None]):  # eagerly there are none
        return tf.reshape(gradient, [-1, dim])


def _known(shape: Any) -> Any:
    """As far as tf.function knows it when it is traced."""
    value = tf.get_static_value(shape, partial=True)
    return tf.TensorShape([None] * shape.shape[0] if value is None else value)


def _are_equal(one: Any, other: Any) -> Any:
    """Tensors of one rank, which may be of different shapes."""
    return tf.reduce_all([tf.reduce_all(tf.raw_ops.Equal(x=left, y=right, incompatible_shape_error=False))
                          for left, right in ((tf.shape(one), tf.shape(other)), (one, other))])


def looked_up(look_up: Callable[[Dict[str, Ragged]], Mapping[str, Floats]], prepared: Prepared, widths: Mapping[str, int], structure: Any) -> Any:
    """Activations in a structure. look_up: gives rows by feature; widths: columns by feature."""
    names = list(prepared)

    def on_host(*arrays: Any) -> List[Floats]:
        found = look_up(_ids(names, arrays))
        return [found[name] for name in names]

    found = tf.nest.flatten(numpy_function(on_host, _arrays(prepared), [tf.float32] * len(names)))  # eagerly, a list of one is none
    return tf.nest.pack_sequence_as(structure, [
        tf.reshape(rows, tf.concat([prepared[name][3], [widths[name]]], 0)) for name, rows in zip(names, found)])


def _arrays(prepared: Prepared) -> List[Any]:
    return [array for one in prepared.values() for array in one[:3]]


def _ids(names: List[str], arrays: Any) -> Dict[str, Ragged]:
    parts = iter(arrays)
    result = {}
    for name in names:
        values, splits, weights = next(parts), next(parts), next(parts)
        result[name] = Ragged(values, splits, weights if len(weights) or not len(values) else None)
    return result


def as_samples(name: str, feature: FeatureConfig, ids: Any, weights: Any) -> Tuple[Any, Any, Any, Any]:
    """Ids of any kind as those of samples one after the other."""
    kind: Any = next((kind for kind in (tf.SparseTensor, tf.RaggedTensor) if isinstance(ids, kind)), tf.Tensor)
    if kind is tf.Tensor:
        ids, weights = (one if one is None or isinstance(one, (tf.SparseTensor, tf.RaggedTensor)) else tf.convert_to_tensor(one)
                        for one in (ids, weights))
    if weights is not None and not isinstance(weights, kind):
        raise ValueError(f"feature {name!r}: weights: a {type(weights).__name__} is not allowed; it must be a {kind.__name__}, as the ids are")
    if not ids.dtype.is_integer:
        raise ValueError(f"feature {name!r}: {ids.dtype.name} is not allowed; ids are whole numbers")
    values, splits, shape = _of_places(name, feature, ids) if kind is tf.Tensor else _of_samples(name, feature, ids, weights)
    scales = tf.zeros([0])
    if weights is not None:
        flat = tf.reshape(tf.cast(weights if kind is tf.Tensor else weights.values, tf.float32), [-1])
        with tf.control_dependencies(weights_belong(name, ids, weights)):
            scales = tf.broadcast_to(flat, tf.shape(values))
    return tf.cast(values, tf.int64), splits, scales, tf.cast(shape, tf.int32)


def weights_belong(name: str, ids: Any, weights: Any) -> List[Any]:
    """Checks that there is one for each id, in its place; of a dense input, one may be for all."""
    if isinstance(ids, tf.SparseTensor):
        what, one, other = "indices", ids.indices, weights.indices
    elif isinstance(ids, tf.RaggedTensor):
        what, one, other = "row splits", ids.row_splits, weights.row_splits
    elif weights.shape.num_elements() == 1:
        return []
    else:
        what, one, other = "shape", tf.shape(ids), tf.shape(weights)
    if one is other:
        return []
    one, other = tf.cast(one, tf.int64), tf.cast(other, tf.int64)
    check = tf.debugging.Assert(_are_equal(one, other), [
        f"feature {name!r}: the {what} of the weights must equal the {what} of the ids:", other, "is not", one])
    return [] if check is None else [check]  # eagerly there is none


def _of_places(name: str, feature: FeatureConfig, ids: Any) -> Tuple[Any, Any, Any]:
    """Ids, splits and the shape of the activations of a dense input."""
    count, wanted = ids.shape.num_elements(), feature.output_shape
    if wanted and count is not None and count != np.prod(wanted):
        raise ValueError(f"feature {name!r}: the shape {ids.shape.as_list()} is not allowed for output_shape {wanted}; a dense input has one id "
                         "for each activation")
    if not wanted and ids.shape.rank != 1 and ids.shape[-1:] != [1]:
        raise ValueError(f"feature {name!r}: the shape {ids.shape} is not allowed without output_shape; it must be [samples] or [..., 1]")
    values = tf.reshape(ids, [-1])
    return values, tf.range(tf.size(values, tf.int64) + 1), wanted or (tf.shape(ids) if ids.shape.rank == 1 else tf.shape(ids)[:-1])


def _of_samples(name: str, feature: FeatureConfig, ids: Any, weights: Any) -> Tuple[Any, Any, Any]:
    """The same of a sparse or a ragged one."""
    samples, rows, columns, values = _coordinates(name, ids)
    shape: Any = [samples]
    checks: List[Any] = []
    if feature.output_shape:
        given, samples, shape = samples, int(np.prod(feature.output_shape)), feature.output_shape
        if isinstance(ids, tf.RaggedTensor):  # those of a sparse one behind its last id are empty
            checks = [tf.debugging.Assert(tf.equal(given, samples), [
                f"feature {name!r}: ragged ids must have a sample for each activation of output_shape {shape}; they have so many samples:", given])]
    elif feature.max_sequence_length:
        if weights is not None:
            raise ValueError(f"feature {name!r}: weights are not allowed for ids that are not combined (max_sequence_length)")
        length = feature.max_sequence_length
        kept = columns < length
        rows, values = tf.boolean_mask(rows * length + columns, kept), tf.boolean_mask(values, kept)
        samples, shape = samples * length, [samples, length]
    samples = tf.cast(samples, tf.int64)
    checks += [tf.debugging.Assert(tf.reduce_all(rows < samples), [f"feature {name!r}: there are more samples than", samples]),
               tf.debugging.Assert(tf.math.is_non_decreasing(rows), [f"feature {name!r}: samples must be in order"])]
    with tf.control_dependencies([one for one in checks if one is not None]):  # eagerly there are none
        return values, tf.searchsorted(rows, tf.range(samples + 1), out_type=tf.int64), tf.stack([tf.cast(one, tf.int64) for one in shape])


def _coordinates(name: str, ids: Any) -> Tuple[Any, Any, Any, Any]:
    """How many samples there are, and the sample, the place in it, and the id of each."""
    if ids.shape.rank != 2:
        raise ValueError(f"feature {name!r}: the rank {ids.shape.rank} is not allowed; sparse and ragged ids are [samples, ids]")
    if isinstance(ids, tf.SparseTensor):
        return ids.dense_shape[0], ids.indices[:, 0], ids.indices[:, 1], ids.values
    rows = ids.value_rowids()
    columns = tf.range(tf.size(rows, rows.dtype)) - tf.gather(ids.row_starts(), rows)
    return ids.nrows(), tf.cast(rows, tf.int64), tf.cast(columns, tf.int64), ids.values


def _check_device(device: Optional[str]) -> Optional[int]:
    """Its number, if it has one. ValueError for what is no TPU."""
    spec = None if device is None else tf.DeviceSpec.from_string(device)
    if spec is not None and spec.device_type != "TPU":
        raise ValueError(f"device: {device!r} is not allowed; it must be a TPU, or None")
    number: Optional[int] = None if spec is None else spec.device_index
    return number


class TPUEmbeddingV2(BaseEmbedding):
    """A lookup gives what its update takes: activations in the structure of feature_config, float32 [..., dim], and the prepared ids. The first one after
    an update begins a step; one that is never updated counts, and changes no row. TPUEmbeddingForServing looks up without steps."""

    def build(self) -> None:
        """Makes the tables, or finds them."""
        self._built()

    @property
    def embedding_tables(self) -> Dict[str, EmbeddingTable]:
        """By the name of the table."""
        return {name: variables["parameters"] for _, name, variables in self._tables()}

    @property
    def variables(self) -> Dict[str, Dict[str, EmbeddingTable]]:
        """By the name of the table: "parameters", and the slots of the optimizer by their names in TensorFlow."""
        return {name: variables for _, name, variables in self._tables()}

    @property
    def stacked_variables(self) -> Dict[str, Dict[str, StackedTable]]:
        """As TensorFlow has `variables`: by the name of the stack, "parameters", and the slots of the optimizer by their names in TensorFlow."""
        model = self.model
        return {stack: {"parameters": StackedTable(model, stack, ""), **{SLOTS.get(slot, slot): StackedTable(model, stack, slot) for slot in slots}}
                for stack, slots in {one.stack: one.slots for one in model.tables.values()}.items()}

    @property
    def embedding_table_shards(self) -> Dict[str, List[Tuple[str, Any]]]:
        """By the name of the stack, the device of each chip, and its rows, float32 [rows, padded dim]: see StackedTable."""
        return {stack: [(device, variables["parameters"].read_from_device(device)) for device in variables["parameters"].devices]
                for stack, variables in self.stacked_variables.items()}

    @classmethod
    def compute_sparse_core_stats(cls, features: Any, feature_config: Any, num_tpu_chips: int, num_sc_per_chip: int = 4,
                                  optimizer: Optional[Optimizer] = None,
                                  sparse_core_embedding_config: Optional[SparseCoreEmbeddingConfig] = None) -> Tuple[Dict[str, int], Dict[str, int]]:
        """By stack, the most ids, and the most different ids, that a SparseCore of a chip has for one SparseCore, of a batch of one chip: what
        limits would have to allow on TPUs. Needs no cluster, and makes no tables."""
        return _statistics.of_batch(*cls(feature_config, optimizer, False, sparse_core_embedding_config)._on_tpus(features, None),
                                    num_tpu_chips, num_sc_per_chip)

    @classmethod
    def compute_partitioned_csr(cls, features: Any, feature_config: Any, num_tpu_chips: int, num_sc_per_chip: int = 4,
                                optimizer: Optional[Optimizer] = None, sparse_core_embedding_config: Optional[SparseCoreEmbeddingConfig] = None,
                                weights: Any = None) -> Dict[str, PartitionedCsrFormatTensor]:
        """By stack, what `enqueue` would give on TPUs: the CSR-wrapped COO of a batch of one chip, where it has the limits that it needs for one
        mini-batch. Needs no cluster, and makes no tables."""
        return _statistics.partitioned(*cls(feature_config, optimizer, False, sparse_core_embedding_config)._on_tpus(features, weights),
                                       num_tpu_chips, num_sc_per_chip)

    def _on_tpus(self, features: Any, weights: Any) -> Tuple[config.ModelConfig, Dict[str, Ragged]]:
        """The model whose stacks are those of TPUs for a batch of this size, and the batch."""
        prepared = self._prepare(features, weights)
        names = {name: f"f{index}" for index, name in enumerate(prepared)}  # of files
        model = self._declared("model")
        model = dataclasses.replace(model, features=[
            dataclasses.replace(one, name=names[one.name], batch_size=max(1, len(prepared[one.name][1]) - 1)) for one in model.features],
                                    plan=dataclasses.replace(model.plan or config.PlanConfig(), max_ids_per_chip_per_sample=0, allow_id_dropping=False))
        return model, {names[name]: one for name, one in _ids(list(prepared), [array.numpy() for array in _arrays(prepared)]).items()}

    @as_it_is
    def __call__(self, features: Any, weights: Any = None) -> Tuple[Any, Prepared]:
        return self.embedding_lookup(features, weights)

    @as_it_is
    def embedding_lookup(self, features: Any, weights: Any = None) -> Tuple[Any, Prepared]:
        """features: tf.Tensor, tf.SparseTensor or tf.RaggedTensor of integers in the structure of feature_config; weights: of the same kinds and
        places, or None for all or for some; of a dense input also one number for all ids."""
        return self.dequeue(self.enqueue(features, weights))

    @as_it_is
    def enqueue(self, features: Any, weights: Any = None, device: Optional[str] = None) -> Prepared:
        """Prepares ids for `dequeue`, and looks nothing up. device: a TPU, whichever it is."""
        _check_device(device)
        return self._prepare(features, weights)

    @as_it_is
    def dequeue(self, partitioned_tensors: Prepared) -> Tuple[Any, Prepared]:
        return self._look_up(partitioned_tensors), partitioned_tensors

    @as_it_is
    def apply_gradients(self, gradients: Any, preserved_outputs: Prepared) -> None:
        """One update of each row that was looked up. gradients: in the structure of feature_config, of the shapes of the activations; None: zero."""
        self._check_built()
        if not isinstance(preserved_outputs, Mapping) or set(preserved_outputs) != set(self.features):
            raise ValueError("preserved_outputs: it must be the second output of the lookup")
        self._update(gradients, preserved_outputs)


class TPUEmbedding(BaseEmbedding):
    """Lookups go through a queue: `enqueue` puts ids into it, `dequeue` gives the activations of the oldest, and `apply_gradients` updates those of the
    oldest that was dequeued for training and has had no update."""

    def __init__(self, feature_config: Any, optimizer: Optional[Optimizer], pipeline_execution_with_tensor_core: bool = False) -> None:
        super().__init__(feature_config, optimizer, pipeline_execution_with_tensor_core)
        self._queue: Deque[Tuple[bool, List[Any]]] = deque()
        self._awaiting: Deque[List[Any]] = deque()
        self._tried: Optional[List[Any]] = None  # the first of these, if its update is under way or was refused
        self._taken: Tuple[bool, List[Any]] = (False, [])  # out of the queue by the last dequeue
        self._shapes: Optional[List[Any]] = None  # static ones of the activations, as far as they are known

    def build(self, per_replica_input_shapes: Any = None, per_replica_batch_size: Optional[int] = None) -> None:
        """Makes the tables, or finds them. The shapes are those of what is enqueued first; new tables are stacked for per_replica_batch_size, where
        features have no output_shape."""
        self._batch = per_replica_batch_size
        self._built()

    @property
    def embedding_tables(self) -> Dict[TableConfig, EmbeddingTable]:
        return {table: variables["parameters"] for table, _, variables in self._tables()}

    @as_it_is
    def __call__(self, features: Any, weights: Any = None) -> Any:
        """Activations without the queue, for evaluation: no step begins."""
        return self._look_up(self._prepare(features, weights), lambda: False)

    @as_it_is
    def enqueue(self, features: Any, weights: Any = None, training: bool = True, name: Optional[str] = None,
                device: Optional[str] = None) -> None:
        """As TPUEmbeddingV2.embedding_lookup has features and weights. training: `apply_gradients` follows. device: the first TPU, for a process
        is one replica."""
        if _check_device(device):
            raise ValueError(f"device: {device!r} is not allowed; it must be the first TPU, or None: a process is one replica, and others are ranks of its group")
        self._built()
        prepared = self._prepare(features, weights)
        self._shapes = [_known(one[3]) for one in prepared.values()]

        def on_host(*arrays: Any) -> Any:
            self._queue.append((training, list(arrays)))
            return np.int64(0)

        numpy_function(on_host, [array for one in prepared.values() for array in one], tf.int64)

    @as_it_is
    def dequeue(self, name: Optional[str] = None) -> Any:
        """Activations in the structure of feature_config, float32 [..., dim]. Those that were not enqueued for training begin no step. In a
        tf.function they have the shape of what had been enqueued last when it was traced; those of another one are refused when it runs:
        enqueue, or trace, with an unknown number of samples."""
        if self._shapes is None:
            raise RuntimeError("dequeue: nothing has been enqueued; the function that enqueues is called, or traced, before")
        kinds = [tf.int64, tf.int64, tf.float32, tf.int32] * len(self.features)

        def on_host() -> List[Any]:
            if not self._queue:
                raise RuntimeError("dequeue: the queue is empty")
            self._taken = self._queue.popleft()
            return self._taken[1]

        def on_host_afterwards() -> Any:
            training, arrays = self._taken
            if training:
                if self._awaiting and self._awaiting[0] is self._tried:
                    self._awaiting.popleft()  # it has been given up
                self._awaiting.append(arrays)
            return np.int64(0)

        activations = tf.nest.flatten(self._look_up(self._with_shapes(numpy_function(on_host, [], kinds)), lambda: self._taken[0]))
        if not tf.executing_eagerly():  # eagerly each has the shape that it has, whatever was enqueued last
            activations = [tf.ensure_shape(one, shape.concatenate(one.shape[-1:])) for one, shape in zip(activations, self._shapes)]
        with tf.control_dependencies(activations):  # what could not be looked up has no update
            numpy_function(on_host_afterwards, [], tf.int64)
        return tf.nest.pack_sequence_as(self._structure, activations)

    @as_it_is
    def apply_gradients(self, gradients: Any, name: Optional[str] = None) -> None:
        """As TPUEmbeddingV2.apply_gradients has gradients. Where they are refused, the batch stays for others, until the next one for
        training is dequeued."""

        def on_host() -> List[Any]:
            if not self._awaiting:
                raise RuntimeError("apply_gradients: nothing was dequeued that was enqueued for training")
            self._tried = self._awaiting[0]
            return self._tried

        def sent() -> None:
            if self._awaiting and self._awaiting[0] is self._tried:  # else a dequeue on another thread has given it up
                self._awaiting.popleft()
            self._tried = None

        kinds = [tf.int64, tf.int64, tf.float32, tf.int32] * len(self.features)
        self._update(gradients, self._with_shapes(numpy_function(on_host, [], kinds)), sent)

    def _with_shapes(self, arrays: Any) -> Prepared:
        assert self._shapes is not None
        prepared: Prepared = {}
        for index, (name, shape) in enumerate(zip(self.features, self._shapes)):
            values, splits, weights, found = arrays[4 * index:4 * index + 4]
            found.set_shape([shape.rank])
            prepared[name] = values, splits, weights, found
        return prepared
