"""Tables, features and optimizers, with the names, the order and the defaults of tf.tpu.experimental.embedding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Callable, ClassVar, Dict, Mapping, Optional, Sequence, Tuple, Union

import numpy as np
import tensorflow as tf

from emberd import config
from emberd._filling import WHOLE_BYTES, of_whole, parameters_of, takes_offset

LearningRate = Union[float, Callable[[], Any]]
ClipValue = Union[float, Tuple[float, float], None]


def _check(ok: bool, what: str, value: Any, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{what}: {value!r} is not allowed; it must be {allowed}")


class Optimizer:
    """What all have. learning_rate: a number, or a function of nothing or a tf.Variable, which is asked at each step; clipvalue: bounds of the
    summed gradient of a row, (min, max) or (-value, value). Gradients of a row are summed before the update, whatever
    use_gradient_accumulation says."""

    kind: ClassVar[Any]  # emberd's
    fields: ClassVar[Mapping[str, str]] = {}  # its names of those that are not common
    fixed: ClassVar[Mapping[str, Any]] = {}

    learning_rate: LearningRate
    use_gradient_accumulation: bool
    clip_weight_min: Optional[float]
    clip_weight_max: Optional[float]
    weight_decay_factor: Optional[float]
    multiply_weight_decay_factor_by_learning_rate: Optional[bool]
    clipvalue: ClipValue
    slot_variable_creation_fn: Any = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        _check(self.use_gradient_accumulation or self.clipvalue is None, f"{name}: clipvalue", self.clipvalue,
               "None where use_gradient_accumulation is False")
        _check(self.slot_variable_creation_fn is None, f"{name}: slot_variable_creation_fn", self.slot_variable_creation_fn,
               "None, for slots are on the cluster")
        for field, (ok, allowed) in self._ranges().items():
            _check(ok, f"{name}: {field}", getattr(self, field), allowed)

    def _ranges(self) -> Dict[str, Tuple[bool, str]]:
        return {}

    @property
    def rate_of_step(self) -> Optional[Callable[[], Any]]:
        """What is asked for the learning rate of each step; None: it is a number."""
        rate = self.learning_rate
        return rate.read_value if isinstance(rate, tf.Variable) else rate if callable(rate) else None

    def declared(self) -> config.Optimizer:
        """emberd's."""
        clip = self.clipvalue
        low, high = clip if isinstance(clip, tuple) else (None, None) if clip is None else (-clip, clip)
        given: Any = self.learning_rate
        rate = {"learning_rate": float(given)} if self.rate_of_step is None else {}
        made: config.Optimizer = self.kind(
            **rate, clip_gradient_min=low, clip_gradient_max=high, clip_weight_min=self.clip_weight_min, clip_weight_max=self.clip_weight_max,
            weight_decay_factor=self.weight_decay_factor,
            multiply_weight_decay_factor_by_learning_rate=self.multiply_weight_decay_factor_by_learning_rate,
            **{theirs: getattr(self, ours) for ours, theirs in self.fields.items()}, **self.fixed)
        return made


@dataclass(frozen=True)
class SGD(Optimizer):
    learning_rate: LearningRate = 0.01
    use_gradient_accumulation: bool = True
    clip_weight_min: Optional[float] = None
    clip_weight_max: Optional[float] = None
    weight_decay_factor: Optional[float] = None
    multiply_weight_decay_factor_by_learning_rate: Optional[bool] = None
    clipvalue: ClipValue = None
    low_dimensional_packing_status: bool = False
    kind: ClassVar[Any] = config.SGD


@dataclass(frozen=True)
class Adagrad(Optimizer):
    learning_rate: LearningRate = 0.001
    initial_accumulator_value: float = 0.1
    use_gradient_accumulation: bool = True
    clip_weight_min: Optional[float] = None
    clip_weight_max: Optional[float] = None
    weight_decay_factor: Optional[float] = None
    multiply_weight_decay_factor_by_learning_rate: Optional[bool] = None
    slot_variable_creation_fn: Any = None
    clipvalue: ClipValue = None
    low_dimensional_packing_status: bool = False
    kind: ClassVar[Any] = config.Adagrad
    fields: ClassVar[Mapping[str, str]] = {"initial_accumulator_value": "initial_accumulator"}

    def _ranges(self) -> Dict[str, Tuple[bool, str]]:
        return {"initial_accumulator_value": (self.initial_accumulator_value > 0, "positive")}


@dataclass(frozen=True)
class AdagradMomentum(Optimizer):
    """Accumulators begin at zero."""

    learning_rate: LearningRate = 0.001
    momentum: float = 0.0
    use_nesterov: bool = False
    exponent: float = 2
    beta2: float = 1
    epsilon: float = 1e-10
    use_gradient_accumulation: bool = True
    clip_weight_min: Optional[float] = None
    clip_weight_max: Optional[float] = None
    weight_decay_factor: Optional[float] = None
    multiply_weight_decay_factor_by_learning_rate: Optional[bool] = None
    slot_variable_creation_fn: Any = None
    clipvalue: ClipValue = None
    low_dimensional_packing_status: bool = False
    kind: ClassVar[Any] = config.AdagradMomentum
    fields: ClassVar[Mapping[str, str]] = {name: name for name in ("momentum", "use_nesterov", "exponent", "beta2", "epsilon")}
    fixed: ClassVar[Mapping[str, Any]] = {"initial_accumulator": 0.0}

    def _ranges(self) -> Dict[str, Tuple[bool, str]]:
        return {"epsilon": (self.epsilon > 0, "positive"), "exponent": (self.exponent > 0, "positive")}


@dataclass(frozen=True)
class FTRL(Optimizer):
    learning_rate: LearningRate = 0.001
    learning_rate_power: float = -0.5
    l1_regularization_strength: float = 0.0
    l2_regularization_strength: float = 0.0
    beta: float = 0.0
    initial_accumulator_value: float = 0.1
    use_gradient_accumulation: bool = True
    clip_weight_min: Optional[float] = None
    clip_weight_max: Optional[float] = None
    weight_decay_factor: Optional[float] = None
    multiply_weight_decay_factor_by_learning_rate: Optional[bool] = None
    slot_variable_creation_fn: Any = None
    clipvalue: ClipValue = None
    multiply_linear_by_learning_rate: bool = False
    allow_zero_accumulator: bool = False
    low_dimensional_packing_status: bool = False
    kind: ClassVar[Any] = config.Ftrl
    fields: ClassVar[Mapping[str, str]] = {
        "learning_rate_power": "learning_rate_power", "l1_regularization_strength": "l1", "l2_regularization_strength": "l2", "beta": "beta",
        "initial_accumulator_value": "initial_accumulator", "multiply_linear_by_learning_rate": "multiply_linear_by_learning_rate"}

    def _ranges(self) -> Dict[str, Tuple[bool, str]]:
        return {"initial_accumulator_value": (self.initial_accumulator_value > 0, "positive")}


@dataclass(frozen=True)
class Adam(Optimizer):
    """Without bias correction, and of the rows in the batch alone."""

    learning_rate: LearningRate = 0.001
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-07
    lazy_adam: bool = True
    sum_inside_sqrt: bool = True
    use_gradient_accumulation: bool = True
    clip_weight_min: Optional[float] = None
    clip_weight_max: Optional[float] = None
    weight_decay_factor: Optional[float] = None
    multiply_weight_decay_factor_by_learning_rate: Optional[bool] = None
    slot_variable_creation_fn: Any = None
    clipvalue: ClipValue = None
    low_dimensional_packing_status: bool = False
    kind: ClassVar[Any] = config.Adam
    fields: ClassVar[Mapping[str, str]] = {"beta_1": "beta1", "beta_2": "beta2", "epsilon": "epsilon", "sum_inside_sqrt": "sum_inside_sqrt"}
    fixed: ClassVar[Mapping[str, Any]] = {"bias_correction": False}

    def _ranges(self) -> Dict[str, Tuple[bool, str]]:
        return {"beta_1": (0 <= self.beta_1 < 1, ">= 0 and < 1"), "beta_2": (0 <= self.beta_2 < 1, ">= 0 and < 1"),
                "epsilon": (self.epsilon > 0, "positive"), "lazy_adam": (self.lazy_adam, "True: rows out of the batch do not move")}


@dataclass(frozen=True)
class QuantizationConfig:
    """Of looked-up rows."""

    num_buckets: int
    lower: float
    upper: float

    def __post_init__(self) -> None:
        _check(self.num_buckets >= 2, "num_buckets", self.num_buckets, "at least 2")
        _check(self.lower < self.upper, "lower", self.lower, f"less than upper, {self.upper}")


@dataclass(frozen=True)
class SparseCoreEmbeddingConfig:
    """Of it, disable_table_stacking, max_ids_per_chip_per_sample and allow_id_dropping have an effect; the rest is taken as it is.

    A batch whose ids do not fit, pads to multiples of 8 for each SparseCore included, is ResourceExhausted, or loses what does not fit where
    allow_id_dropping is True. The room is that of the batch `build` was told, or of the samples of the call if these are more."""

    disable_table_stacking: bool = False
    max_ids_per_chip_per_sample: int = 64
    max_ids_per_table: Optional[Dict[str, int]] = None
    max_unique_ids_per_table: Optional[Dict[str, int]] = None
    allow_id_dropping: bool = False
    initialize_tables_on_host: bool = True
    enable_fast_table_initialization: bool = False


@dataclass(frozen=True)
class RowIdInitializer:
    """Every column of row r is offset + r."""

    offset: int = 0

    def __call__(self, shape: Any, dtype: Any = tf.float32) -> Any:
        return tf.range(self.offset, self.offset + shape[0], dtype=dtype)[:, None] * tf.ones(shape, dtype)


@dataclass(eq=False)
class TableConfig:
    """One table; features that have the same object share it.

    initializer: a function of (shape, dtype=), as in tf.initializers, which is called once, with [vocabulary_size, dim], or for a table of more than 64 MiB
      for stretches of it, with partition_shape and partition_offset, where it takes these and has no seed; or what emberd.TableConfig takes: one of emberd's,
      which runs on the cluster, or a function whose arguments are named (offset, shape). Default: emberd.TruncatedNormal(0, 1/sqrt(dim)).
    optimizer: default: that of the embedding.
    name: default: table_N, of the Nth table.
    """

    vocabulary_size: int
    dim: int
    initializer: Any = None
    optimizer: Optional[Optimizer] = None
    combiner: str = "mean"
    name: Optional[str] = None
    quantization_config: Optional[QuantizationConfig] = None
    layout: Any = None
    dtype: Any = tf.float32

    def __post_init__(self) -> None:
        for field in ("vocabulary_size", "dim"):
            value = getattr(self, field)
            _check(isinstance(value, int) and value >= 1, field, value, "an int, at least 1")
        _check(self.initializer is None or callable(self.initializer) or isinstance(self.initializer, config.Initializer), "initializer",
               self.initializer, "a function, or None")
        _check(self.combiner in ("mean", "sum", "sqrtn"), "combiner", self.combiner, "mean, sum or sqrtn")
        _check(self.layout is None, "layout", self.layout, "None, for the cluster lays tables out")
        _check(self.dtype == tf.float32, "dtype", self.dtype, "tf.float32")

    def initial_rows(self) -> Any:
        """The initializer as emberd.TableConfig takes it."""
        given: Any = self.initializer
        if given is None or isinstance(given, config.Initializer) or takes_offset(given):
            return given
        whole = (self.vocabulary_size, self.dim)
        if type(given).__module__.startswith("keras."):
            from emberd.keras._config import initial_rows

            return initial_rows(given, *whole)
        parted = any(one.kind == one.VAR_KEYWORD for one in parameters_of(given)) and getattr(given, "seed", None) is None
        if not parted or 4 * math.prod(whole) <= WHOLE_BYTES:
            return of_whole(lambda shape: np.asarray(given(list(shape), dtype=tf.float32)), whole)
        return lambda offset, shape: np.asarray(given(list(whole), dtype=tf.float32, partition_shape=list(shape), partition_offset=[offset, 0]))


@dataclass(eq=False)
class FeatureConfig:
    """One input.

    max_sequence_length: above 0, without output_shape: ids of a sparse or ragged input are not combined, and activations are
      [samples, max_sequence_length, dim]: zero behind the last id of a sample; what is beyond is cut off.
    output_shape: of the activations without dim. A dense input has one id for each; a ragged one a sample for each, in order; a sparse one, too, where
      samples behind the last id need not be there.
      Default: the shape of a dense input, [samples] or without the last dimension, which must be 1, or the samples of another one.
    """

    table: TableConfig
    max_sequence_length: int = 0
    validate_weights_and_indices: bool = True
    output_shape: Optional[Sequence[int]] = None
    name: Optional[str] = None

    def __post_init__(self) -> None:
        _check(isinstance(self.table, TableConfig), "table", self.table, "a TableConfig")
        _check(isinstance(self.max_sequence_length, int) and self.max_sequence_length >= 0, "max_sequence_length", self.max_sequence_length,
               "an int, at least 0")
        _check(isinstance(self.validate_weights_and_indices, bool), "validate_weights_and_indices", self.validate_weights_and_indices, "a bool")
        if self.output_shape is not None:
            shape: Any = tf.TensorShape(self.output_shape)
            _check(shape.is_fully_defined(), "output_shape", self.output_shape, "known in each dimension")
            self.output_shape = shape.as_list()
