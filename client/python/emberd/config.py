"""Descriptions of models: the fields of model.proto, with its names. What is None keeps the server's default.

model.proto has the meaning, range and default of each field.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Dict, List, Optional, Sequence, Union

import numpy as np

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
        result[entry.name] = text(value, what).decode().upper() if entry.metadata.get("enum") else _as_json(value, what)
    return result


def _described(value: Any, message: Any, field_name: str) -> Any:
    """An optimizer or initializer that may be given by its name; of others, what to write in its place."""
    what = f"{type(message).__name__}.{field_name}"
    if isinstance(value, str):
        return named(value, Optimizer if field_name == "optimizer" else Initializer, what)
    is_class = isinstance(value, type)
    if field_name == "initializer" and not is_class and (callable(value) or isinstance(value, (list, tuple)) or hasattr(value, "__array__")):
        refused = refuse_kind(value, what, "Zeros, Normal or another description, or the name of one")
        raise TypeError(f"{refused}. For rows of your own leave it out, and give them once: model = client.declare(config); if model.created: "
                        f"model.assign_rows({message.name!r}, np.arange({message.vocabulary_size}), rows)")
    return value


def named(value: Any, base: Any, what: str) -> Any:
    """A description with its defaults, if it is given by its name, in either case: "adagrad" is Adagrad()."""
    if not isinstance(value, str):
        return value
    kinds = {one.kind: one for one in _kinds(base) if all(entry.default is not dataclasses.MISSING for entry in dataclasses.fields(one))}
    if text(value, what).decode().lower() not in kinds:
        raise InvalidArgument(f"{what}: {value!r} is not allowed; it must be one of {', '.join(map(repr, kinds))}, or a description")
    return kinds[value.lower()]()


def _kinds(base: Any) -> List[Any]:
    own = [base] if base.kind else []
    return own + [kind for one in base.__subclasses__() for kind in _kinds(one)]


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
        return {self.kind: _fields(self)}


@dataclass(frozen=True)
class Zeros(Initializer):
    kind: ClassVar[str] = "zeros"


@dataclass(frozen=True)
class Constant(Initializer):
    value: float
    kind: ClassVar[str] = "constant"


@dataclass(frozen=True)
class Uniform(Initializer):
    """[lower, upper)"""

    lower: float
    upper: float
    kind: ClassVar[str] = "uniform"


@dataclass(frozen=True)
class Normal(Initializer):
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
class Optimizer:
    """What all optimizers have; use one of the classes below. `learning_rate` may also be given step by step."""

    learning_rate: Optional[float] = None
    clip_gradient_min: Optional[float] = None
    clip_gradient_max: Optional[float] = None
    weight_decay_factor: Optional[float] = None
    multiply_weight_decay_factor_by_learning_rate: Optional[bool] = None
    clip_weight_min: Optional[float] = None
    clip_weight_max: Optional[float] = None
    kind: ClassVar[str] = ""

    def to_json(self) -> Dict[str, Any]:
        common = {entry.name for entry in dataclasses.fields(Optimizer)}
        given = _fields(self)
        result = {name: value for name, value in given.items() if name in common}
        result[self.kind or "adagrad"] = {name: value for name, value in given.items() if name not in common}
        return result


@dataclass(frozen=True)
class SGD(Optimizer):
    kind: ClassVar[str] = "sgd"


@dataclass(frozen=True)
class Adagrad(Optimizer):
    initial_accumulator: Optional[float] = None
    kind: ClassVar[str] = "adagrad"


@dataclass(frozen=True)
class RowwiseAdagrad(Optimizer):
    initial_accumulator: Optional[float] = None
    epsilon: Optional[float] = None
    kind: ClassVar[str] = "rowwise_adagrad"


@dataclass(frozen=True)
class Momentum(Optimizer):
    momentum: Optional[float] = None
    use_nesterov: Optional[bool] = None
    kind: ClassVar[str] = "momentum"


@dataclass(frozen=True)
class AdagradMomentum(Optimizer):
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
    """TensorFlow's; with bias_correction, JAX's and PyTorch's."""

    beta1: Optional[float] = None
    beta2: Optional[float] = None
    epsilon: Optional[float] = None
    bias_correction: Optional[bool] = None
    sum_inside_sqrt: Optional[bool] = None
    kind: ClassVar[str] = "adam"


@dataclass(frozen=True)
class AdamW(Optimizer):
    beta1: Optional[float] = None
    beta2: Optional[float] = None
    epsilon: Optional[float] = None
    weight_decay: Optional[float] = None
    kind: ClassVar[str] = "adamw"


@dataclass(frozen=True)
class Ftrl(Optimizer):
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
    beta1: Optional[float] = None
    beta2: Optional[float] = None
    epsilon: Optional[float] = None
    kind: ClassVar[str] = "laprop"


@dataclass(frozen=True)
class F2A(Optimizer):
    rho: Optional[float] = None
    initial_accumulator: Optional[float] = None
    l1: Optional[float] = None
    l2: Optional[float] = None
    max_lr_multiplier: Optional[float] = None
    kind: ClassVar[str] = "f2a"


@dataclass(frozen=True)
class RMSProp(Optimizer):
    decay: Optional[float] = None
    momentum: Optional[float] = None
    epsilon: Optional[float] = None
    kind: ClassVar[str] = "rmsprop"


@dataclass(frozen=True)
class NoOptimizer(Optimizer):
    """For weights that are only looked up: no slots, no updates. All tables of a model have it, or none."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True)
class QuantizationConfig:
    """Rounds looked-up elements; storage stays as it is."""

    lower: float
    upper: float
    num_buckets: int


@dataclass(frozen=True)
class TableResource:
    """Rows that the tables of several models have in common."""

    name: str
    container: Optional[str] = None


@dataclass(frozen=True)
class TableConfig:
    name: str
    vocabulary_size: int
    embedding_dim: int
    combiner: Optional[str] = _enum()  # "mean" (default), "sum", "sqrtn"
    initializer: Optional[Union[Initializer, str]] = None  # or its name: "zeros", "normal", "truncated_normal", "row_id"
    optimizer: Optional[Union[Optimizer, str]] = None  # or its name, as "adagrad"; default: the model's
    max_ids_per_partition: Optional[int] = None
    max_unique_ids_per_partition: Optional[int] = None
    quantization: Optional[QuantizationConfig] = None
    storage_dtype: Optional[str] = _enum()  # "float32" (default), "bfloat16", "float16"
    update_rounding: Optional[str] = _enum()  # "nearest" (default), "stochastic"
    on_nonfinite_gradient: Optional[str] = _enum()  # "reject" (default), "skip_row"
    result_mode: Optional[str] = _enum()  # "auto" (default), "partial_sums", "unique_rows"
    resource: Optional[TableResource] = None  # needs ModelConfig.enable_variable_deduplication
    residency: Optional[str] = _enum()  # "evictable" (default), "pinned": the model stays on the SparseCores


@dataclass(frozen=True)
class FeatureConfig:
    """One input; several may look up one table."""

    name: str
    table: str
    batch_size: Optional[int] = None  # samples that the plan is made for; a request may carry any number
    output_shape: Optional[Sequence[int]] = None  # of the activation, without its last dimension


@dataclass(frozen=True)
class StackGroup:
    tables: Sequence[str]
    name: Optional[str] = None


@dataclass(frozen=True)
class PlanConfig:
    rules: Optional[str] = _enum()  # "jax" (default), "tensorflow"
    # "split_then_stack" (default of jax), "stack_then_split" (of tensorflow)
    sample_layout: Optional[str] = _enum()
    # "highway_hash" (default of jax), "id_range" (of tensorflow), "id_modulo", "local_row_modulo"
    bucket_hash: Optional[str] = _enum()
    auto_stack: Optional[bool] = None
    groups: Optional[Sequence[StackGroup]] = None
    rotation: Optional[int] = None
    activation_bytes_limit: Optional[int] = None
    shard_bytes_limit: Optional[int] = None
    allow_id_dropping: Optional[bool] = None
    short_stack_names: Optional[bool] = None


@dataclass(frozen=True)
class ModelConfig:
    name: str
    tables: Sequence[TableConfig]
    features: Sequence[FeatureConfig]
    optimizer: Optional[Union[Optimizer, str]] = None  # of tables that name none
    plan: Optional[PlanConfig] = None
    seed: Optional[int] = None
    enable_variable_deduplication: Optional[bool] = None  # tables with a resource share its rows with other models

    def to_json(self) -> str:
        """What declares it, and what a file may hold."""
        return json.dumps(_fields(self))
