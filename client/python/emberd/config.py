"""Descriptions of models: the fields of model.proto, with its names. What is None keeps the server's default.

model.proto has more on each field.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any, Callable, ClassVar, Dict, List, Mapping, Optional, Sequence, Tuple, Union, cast

import numpy as np
import numpy.typing as npt

from ._filling import is_given
from ._native import refuse_kind, text, whole
from .errors import InvalidArgument


def _fields(message: Any) -> Dict[str, Any]:
    """The fields that are set, as JSON has them."""
    result: Dict[str, Any] = {}
    for entry in dataclasses.fields(message):
        value, what = getattr(message, entry.name), f"{type(message).__name__}.{entry.name}"
        if value is None and entry.default is None:
            continue
        if entry.name in ("optimizer", "initializer"):
            value = _described(value, message, entry.name)
        if "Sequence" in str(entry.type) and not isinstance(value, (list, tuple)):
            raise refuse_kind(value, what, "a list")
        if entry.name == "optimizer" and not isinstance(value, Optimizer):
            raise refuse_kind(value, what, "one of emberd, as emberd.Adagrad(learning_rate=0.1), or its name, \"adagrad\"")
        result[entry.name] = text(value, what).decode().upper() if entry.metadata.get("enum") else _as_json(value, what)
    return result


def _described(value: Any, message: Any, field_name: str) -> Any:
    """An optimizer or initializer that may be given by its name, and an initializer that is a function or an array of rows."""
    if isinstance(value, str):
        return named(value, Optimizer if field_name == "optimizer" else Initializer, f"{type(message).__name__}.{field_name}")
    return Assigned() if field_name == "initializer" and is_given(value) else value


def named(value: Any, base: Any, what: str) -> Any:
    """A description with its defaults, if it is given by its name, in either case: "adagrad" is Adagrad()."""
    if not isinstance(value, str):
        return value
    kinds = {one.kind: one for one in _kinds(base) if one not in (Assigned, Custom) and all(entry.default is not dataclasses.MISSING for entry in dataclasses.fields(one))}
    if text(value, what).decode().lower() not in kinds:
        raise InvalidArgument(f"{what}: {value!r} is not allowed; it must be one of {', '.join(map(repr, kinds))}, or a description")
    return kinds[value.lower()]()


def _kinds(base: Any) -> List[Any]:
    own = [base] if base.kind else []
    return own + [kind for one in base.__subclasses__() for kind in _kinds(one)]


def optimizer_of_kind(kind: str) -> "Optimizer":
    """One without values of its own, as Table.optimizer names it."""
    found: Optimizer = next(one for one in _kinds(Optimizer) if one.kind == kind)()
    return found


def _as_json(value: Any, what: str) -> Any:
    if isinstance(value, (Optimizer, Initializer)):
        return value.to_json()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    given: Any = value  # of which type checkers know nothing
    if isinstance(value, (list, tuple)):
        return [_as_json(one, f"{what}[{place}]") for place, one in enumerate(given)]
    if isinstance(value, str):
        return text(value, what).decode()
    number: Any = given.item() if isinstance(value, np.generic) else given
    if isinstance(number, float) and not math.isfinite(number):
        raise InvalidArgument(f"{what}: {number} is not allowed; it must be finite")
    if type(number) is int:
        return whole(number, what, -2**63, 2**64 - 1)
    if isinstance(number, (bool, float)):
        return number
    raise refuse_kind(value, what, "a number, a str, a list of these, or a description")


def _enum(default: Optional[str] = None) -> Any:
    """A field with a name of an enum of model.proto, in either case."""
    return field(default=default, metadata={"enum": True})


@dataclass(frozen=True)
class Initializer:
    """Initial values of a table: one of the classes below."""

    kind: ClassVar[str] = ""

    def to_json(self) -> Dict[str, Any]:
        """As JSON has it in a ModelConfig."""
        return {self.kind: _fields(self)}


@dataclass(frozen=True)
class Zeros(Initializer):
    """Every element is 0."""

    kind: ClassVar[str] = "zeros"


@dataclass(frozen=True)
class Constant(Initializer):
    """Every element is the same.

    value: finite."""

    value: float
    kind: ClassVar[str] = "constant"


@dataclass(frozen=True)
class Uniform(Initializer):
    """In [lower, upper).

    lower: finite, <= upper.
    upper: finite, and so is upper - lower."""

    lower: float
    upper: float
    kind: ClassVar[str] = "uniform"


@dataclass(frozen=True)
class Normal(Initializer):
    """The normal distribution.

    mean: default 0.
    stddev: the standard deviation, >= 0; default 1."""

    mean: float = 0.0
    stddev: float = 1.0
    kind: ClassVar[str] = "normal"


@dataclass(frozen=True)
class TruncatedNormal(Normal):
    """Redrawn while farther than 2 standard deviations from the mean."""

    kind: ClassVar[str] = "truncated_normal"


@dataclass(frozen=True)
class RowId(Initializer):
    """Every column of row r is r."""

    kind: ClassVar[str] = "row_id"


@dataclass(frozen=True)
class Assigned(Initializer):
    """What a function or an array as the initializer of a table is to the cluster: whoever declares the model assigns its rows. Give the function."""

    kind: ClassVar[str] = "assigned"


@dataclass(frozen=True)
class Optimizer:
    """What all optimizers have; use one of the classes below. An update clips the gradient, decays the row, applies the formula with learning
    rate lr, gradient g and row w, and clips the row.

    learning_rate: >= 0, finite; default 0.01. It may also be given step by step.
    clip_gradient_min, clip_gradient_max: bounds of the gradient, after summation; default: none.
    weight_decay_factor: w *= 1 - weight_decay_factor before the formula; >= 0, default 0.
    multiply_weight_decay_factor_by_learning_rate: default false. True: the factor is multiplied by lr.
    clip_weight_min, clip_weight_max: bounds of the updated row; default: none."""

    learning_rate: Optional[float] = None
    clip_gradient_min: Optional[float] = None
    clip_gradient_max: Optional[float] = None
    weight_decay_factor: Optional[float] = None
    multiply_weight_decay_factor_by_learning_rate: Optional[bool] = None
    clip_weight_min: Optional[float] = None
    clip_weight_max: Optional[float] = None
    kind: ClassVar[str] = ""

    def to_json(self) -> Dict[str, Any]:
        """As JSON has it in a ModelConfig."""
        common = {entry.name for entry in dataclasses.fields(Optimizer)}
        given = _fields(self)
        result = {name: value for name, value in given.items() if name in common}
        result[self.kind or "adagrad"] = {name: value for name, value in given.items() if name not in common}
        return result


@dataclass(frozen=True)
class SGD(Optimizer):
    """w -= lr*g"""

    kind: ClassVar[str] = "sgd"


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """a += g^2; w -= lr*g/sqrt(a). Slot: accumulator.

    initial_accumulator: > 0, default 0.1."""

    initial_accumulator: Optional[float] = None
    kind: ClassVar[str] = "adagrad"


@dataclass(frozen=True)
class RowwiseAdagrad(Optimizer):
    """a += mean over columns of g^2; w -= lr*g/(sqrt(a) + epsilon). One accumulator per row. Slot: accumulator.

    initial_accumulator: >= 0, default 0.
    epsilon: >= 0, default 1e-8; below 1e-30 it counts as 0."""

    initial_accumulator: Optional[float] = None
    epsilon: Optional[float] = None
    kind: ClassVar[str] = "rowwise_adagrad"


@dataclass(frozen=True)
class Momentum(Optimizer):
    """m = momentum*m + g; w -= lr*m. Slot: momentum.

    momentum: [0, 1), default 0.9.
    use_nesterov: default false. True: w -= lr*(momentum*m + g)."""

    momentum: Optional[float] = None
    use_nesterov: Optional[bool] = None
    kind: ClassVar[str] = "momentum"


@dataclass(frozen=True)
class AdagradMomentum(Optimizer):
    """a += g^2, or with beta2 < 1: a = beta2*a + (1 - beta2)*g^2; u = g*(a + epsilon)^(-1/exponent); m = momentum*m + u; w -= lr*m.
    Slots: accumulator, momentum.

    momentum: [0, 1), default 0.9.
    beta2: (0, 1], default 1.
    epsilon: > 0, default 1e-10.
    exponent: > 0, default 2.
    use_nesterov: default false. True: w -= lr*(momentum*m + u).
    initial_accumulator: >= 0, default 0.1.
    initial_momentum: default 0."""

    momentum: Optional[float] = None
    beta2: Optional[float] = None
    epsilon: Optional[float] = None
    exponent: Optional[float] = None
    use_nesterov: Optional[bool] = None
    initial_accumulator: Optional[float] = None
    initial_momentum: Optional[float] = None
    kind: ClassVar[str] = "adagrad_momentum"


@dataclass(frozen=True)
class Adam(Optimizer):
    """TensorFlow's; with bias_correction, JAX's and PyTorch's. Slots: momentum, velocity.

    beta1: [0, 1), default 0.9.
    beta2: [0, 1), default 0.999.
    epsilon: > 0, default 1e-7 without bias correction, 1e-8 with it.
    bias_correction: default false. True: updates need the number of the step, which training streams give.
    sum_inside_sqrt: without bias correction only; default true: the divisor is sqrt(v + epsilon^2). False: sqrt(v) + epsilon."""

    beta1: Optional[float] = None
    beta2: Optional[float] = None
    epsilon: Optional[float] = None
    bias_correction: Optional[bool] = None
    sum_inside_sqrt: Optional[bool] = None
    kind: ClassVar[str] = "adam"


@dataclass(frozen=True)
class AdamW(Optimizer):
    """Adam with bias correction and decoupled decay: w -= lr*weight_decay*w before Adam's step. Needs the number of the step.

    beta1: [0, 1), default 0.9.
    beta2: [0, 1), default 0.999.
    epsilon: > 0, default 1e-8.
    weight_decay: >= 0, default 0.01."""

    beta1: Optional[float] = None
    beta2: Optional[float] = None
    epsilon: Optional[float] = None
    weight_decay: Optional[float] = None
    kind: ClassVar[str] = "adamw"


@dataclass(frozen=True)
class Ftrl(Optimizer):
    """Follow the regularized leader. Slots: accumulator, linear. model.proto has its formulas.

    learning_rate_power: <= 0, and initial_accumulator ** -learning_rate_power must be finite; default -0.5.
    l1, l2: of the regularization; >= 0, default 0.
    beta: >= 0, default 0.
    initial_accumulator: > 0, default 0.1.
    initial_linear: default 0.
    multiply_linear_by_learning_rate: default false. True: the other form of the formula."""

    learning_rate_power: Optional[float] = None
    l1: Optional[float] = None
    l2: Optional[float] = None
    beta: Optional[float] = None
    initial_accumulator: Optional[float] = None
    initial_linear: Optional[float] = None
    multiply_linear_by_learning_rate: Optional[bool] = None
    kind: ClassVar[str] = "ftrl"


@dataclass(frozen=True)
class LaProp(Optimizer):
    """Adam whose gradients are normalized before the momentum. Slots: mu, nu. Needs the number of the step.

    beta1: [0, 1), default 0.9.
    beta2: [0, 1), default 0.95.
    epsilon: >= 0, default 1e-30."""

    beta1: Optional[float] = None
    beta2: Optional[float] = None
    epsilon: Optional[float] = None
    kind: ClassVar[str] = "laprop"


@dataclass(frozen=True)
class F2A(Optimizer):
    """Frequency-aware Adagrad: rows that come seldom learn faster. Slots: accumulator, local_step. Needs the number of the step.

    rho: >= 0, default 0.5.
    initial_accumulator: > 0, default 0.1.
    l1, l2: of the regularization; >= 0, default 0.
    max_lr_multiplier: > 0, default 1e6."""

    rho: Optional[float] = None
    initial_accumulator: Optional[float] = None
    l1: Optional[float] = None
    l2: Optional[float] = None
    max_lr_multiplier: Optional[float] = None
    kind: ClassVar[str] = "f2a"


@dataclass(frozen=True)
class RMSProp(Optimizer):
    """v += (1 - decay)*(g^2 - v); m = momentum*m + lr*g/sqrt(v + epsilon); w -= m. Slots: velocity, momentum.

    decay: [0, 1), default 0.9.
    momentum: [0, 1), default 0.
    epsilon: > 0, default 1e-7."""

    decay: Optional[float] = None
    momentum: Optional[float] = None
    epsilon: Optional[float] = None
    kind: ClassVar[str] = "rmsprop"


@dataclass(frozen=True)
class Custom(Optimizer):
    """A rule of your own, which is run by vectors, with the same bits on any machine:

        emberd.Custom(0.01, expression="a = a + g * g; w = w - lr * g / (sqrt(a) + eps)", slots={"a": 0.1}, hyper_parameters={"eps": 1e-8})

    expression: statements `name = value`, separated by ; or line ends. A value has numbers, g (the gradient), w (the weight), lr, step, slots,
      hyper-parameters and names that were set before; + - * /, comparisons (1 or 0), and abs, sign, sqrt, rsqrt, exp, log, tanh, floor, min, max,
      pow, where(condition, a, b). Division is that of IEEE 754: 0 / 0 is NaN.
    stablehlo: instead, a function of gradient, weight, slots, learning rate, hyper-parameters in StableHLO's text form, as JAX lowers one.
    slots: at most 4, by name, 1 to 128 characters of [A-Za-z0-9_], with their initial values.
    hyper_parameters: at most 16, by name, with their values, which may be given step by step, too."""

    expression: Optional[str] = None
    stablehlo: Optional[str] = None
    slots: Optional[Mapping[str, float]] = None
    hyper_parameters: Optional[Mapping[str, float]] = None
    kind: ClassVar[str] = "custom"

    def to_json(self) -> Dict[str, Any]:
        """As JSON has it in a ModelConfig."""
        result = dataclasses.replace(self, slots=None, hyper_parameters=None)._rule()
        for field_name, number in (("slots", "initial_value"), ("hyper_parameters", "value")):
            given: Any = getattr(self, field_name)
            if given is not None and not isinstance(given, Mapping):
                raise refuse_kind(given, f"Custom.{field_name}", "a dict of numbers by name")
            numbers = cast(Mapping[str, Any], given or {})
            result["custom"][field_name] = [{"name": text(name, f"Custom.{field_name}").decode(), number: _as_json(value, f"Custom.{field_name}[{name!r}]")}
                                            for name, value in numbers.items()]
        return result

    def _rule(self) -> Dict[str, Any]:
        return super().to_json()


@dataclass(frozen=True)
class NoOptimizer(Optimizer):
    """For weights that are only looked up: no slots, no updates. All tables of a model have it, or none."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True)
class QuantizationConfig:
    """Rounds looked-up elements to one of num_buckets values; storage stays as it is.

    lower: finite, < upper.
    upper: finite, and so are upper - lower and (num_buckets - 1) / (upper - lower).
    num_buckets: >= 2."""

    lower: float
    upper: float
    num_buckets: int


@dataclass(frozen=True)
class TableResource:
    """Rows that several tables have in common, of one model or of several.

    container: 0 to 128 characters of [A-Za-z0-9_.-].
    name: 1 to 128 of them, unique in the container."""

    name: str
    container: Optional[str] = None


@dataclass(frozen=True)
class TableConfig:
    """One table.

    name: 1 to 128 characters of [A-Za-z0-9_.-], unique in the model.
    vocabulary_size: rows, 1 to 2^40. Ids are 0 to vocabulary_size - 1.
    embedding_dim: columns, 1 to 8192.
    combiner: of the rows of a sample: "mean" (default), "sum" or "sqrtn"; in emberd.torch.EmbeddingBagCollection "max", too.
    initializer: or its name: "zeros", "normal", "truncated_normal", "row_id". Or a function of (offset, shape), which gives the rows from this one on,
      shape [rows, embedding_dim], and is called for one stretch of at most 8 MiB after the other where the model is declared first; or an array
      [vocabulary_size, embedding_dim]. Default: TruncatedNormal(0, 1/sqrt(embedding_dim)).
    optimizer: or its name, as "adagrad". Default: the model's.
    max_ids_per_partition, max_unique_ids_per_partition: limits of a source slot and partition in one mini-batch; default 0: no limit. A
      batch over a limit is cut.
    quantization: of looked-up rows; default: off.
    storage_dtype: "float32" (default), "bfloat16" or "float16". Slots are float32.
    update_rounding: "nearest" (default), or "stochastic" for a storage_dtype of 16 bits.
    on_nonfinite_gradient: "reject" (default), or "skip_row", which leaves the row as it is and counts it.
    result_mode: how shards return rows: "auto" (default), "partial_sums" or "unique_rows". Results do not depend on it.
    resource: has its rows in common with all tables of this resource, where ModelConfig.enable_variable_deduplication is true. Default: they
      are its own.
    residency: "evictable" (default), or "pinned": the model stays on the SparseCores.
    seed_name: stands in the place of the table's name in what initial values depend on; 1 to 128 characters. Default: the name, or what the rows of the resource
      began with."""

    name: str
    vocabulary_size: int
    embedding_dim: int
    combiner: Optional[str] = _enum()
    initializer: Union[Initializer, str, Callable[[int, Tuple[int, int]], Any], npt.ArrayLike, None] = None
    optimizer: Optional[Union[Optimizer, str]] = None
    max_ids_per_partition: Optional[int] = None
    max_unique_ids_per_partition: Optional[int] = None
    quantization: Optional[QuantizationConfig] = None
    storage_dtype: Optional[str] = _enum()
    update_rounding: Optional[str] = _enum()
    on_nonfinite_gradient: Optional[str] = _enum()
    result_mode: Optional[str] = _enum()
    resource: Optional[TableResource] = None
    residency: Optional[str] = _enum()
    seed_name: Optional[str] = None


@dataclass(frozen=True)
class FeatureConfig:
    """One input; several may look up one table.

    name: 1 to 128 characters of [A-Za-z0-9_./-], unique in the model.
    table: the name of the table.
    batch_size: samples of a step that the plan is made for, 1 to 2^31 - 1; default 1, which no limit of a stack bounds. Those of all replicas,
      or with the rules "tensorflow" those of one. A request may carry any number, and a model that is there is found by any, and keeps its plan.
    output_shape: of the activation, without its last dimension; 1 to 8 dimensions, each 1 to 2^31 - 1. Default: [batch_size]. Its first may
      be any in a request. Dense ids are [samples], or have this shape, an id for each position, or one dimension more, as many ids for each."""

    name: str
    table: str
    batch_size: Optional[int] = None
    output_shape: Optional[Sequence[int]] = None


@dataclass(frozen=True)
class StackGroup:
    """Tables that are stacked together in this order.

    tables: their names, at least one; they agree in optimizer and storage.
    name: of the stack; default: the names of the tables joined by "_"."""

    tables: Sequence[str]
    name: Optional[str] = None


@dataclass(frozen=True)
class PlanConfig:
    """How tables are stacked and placed. Results do not depend on it.

    rules: "jax" (default) or "tensorflow".
    sample_layout: "split_then_stack" (default of jax) or "stack_then_split" (of tensorflow).
    bucket_hash: "highway_hash" (default of jax), "id_range" (of tensorflow), "id_modulo" or "local_row_modulo".
    auto_stack: default true: tables that are in no group are stacked automatically. Those of a stack share the hyper-parameters of each step.
    groups: tables that are stacked together, whatever the rules say.
    rotation: partitions by which each table of a stack is rotated, 0 to 1023. Default: an odd number near 0.618 of the partitions; of
      tensorflow the SparseCores of a shard.
    activation_bytes_limit: bytes of a stack on a SparseCore, >= 0; default 2 MiB; 0: no limit.
    shard_bytes_limit: bytes of a stack on a shard, >= 0, of tensorflow only; default 2 GiB; 0: no limit.
    allow_id_dropping: default false: ids that fit no mini-batch are an error. True: they are dropped and counted.
    short_stack_names: cuts names beyond 50 characters; default true, of tensorflow false.
    max_ids_per_chip_per_sample: room of a stack for ids, pads to multiples of 8 for each partition included, for each of its samples: of
      the batch, or as planned by batch_size if these are more; 0 to 65536; 0: no limit. Default: none, of tensorflow 64. A batch that
      needs more is ResourceExhausted, or loses what does not fit where allow_id_dropping is true.
    max_minibatches_per_sparsecore: of a batch, 0 to 64; 0: no limit. Default: none, of tensorflow 64. More are ResourceExhausted."""

    rules: Optional[str] = _enum()
    sample_layout: Optional[str] = _enum()
    bucket_hash: Optional[str] = _enum()
    auto_stack: Optional[bool] = None
    groups: Optional[Sequence[StackGroup]] = None
    rotation: Optional[int] = None
    activation_bytes_limit: Optional[int] = None
    shard_bytes_limit: Optional[int] = None
    allow_id_dropping: Optional[bool] = None
    short_stack_names: Optional[bool] = None
    max_ids_per_chip_per_sample: Optional[int] = None
    max_minibatches_per_sparsecore: Optional[int] = None


@dataclass(frozen=True)
class ModelConfig:
    """A model: its tables, and the features that look them up.

    name: 1 to 128 characters of [A-Za-z0-9_.-]. A cluster holds one model of a name.
    tables: at least one; names are unique.
    features: at least one; every table is used by one or more.
    optimizer: or its name, for tables that name none; default: Adagrad.
    plan: how tables are stacked and placed.
    seed: of the initial values, which depend on it, the table's name, row and column alone; default 0.
    enable_variable_deduplication: default false: resources are ignored. True: tables of one resource have the same rows, in all models."""

    name: str
    tables: Sequence[TableConfig]
    features: Sequence[FeatureConfig]
    optimizer: Optional[Union[Optimizer, str]] = None
    plan: Optional[PlanConfig] = None
    seed: Optional[int] = None
    enable_variable_deduplication: Optional[bool] = None

    def to_json(self) -> str:
        """What declares it, and what a file may hold."""
        return json.dumps(_fields(self))
