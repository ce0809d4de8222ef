"""Specifications of tables, features and optimizers, with the names and defaults of jax-tpu-embedding."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from typing import Any, Callable, ClassVar, Dict, Mapping, NamedTuple, Optional, Tuple, Type, TypeVar, Union

import jax
import jax.numpy as jnp
import numpy as np

from emberd import config

DEFAULT_ACTIVATION_MEM_BYTES_LIMIT = 2048 * 1024
LearningRate = Union[float, Callable[..., Any]]
Spec = TypeVar("Spec", bound="OptimizerSpec")


def takes_nothing(function: Callable[..., Any]) -> bool:
    """Whether it is called without arguments."""
    return not inspect.signature(function).parameters


class CallablePlaceholder:
    """Stands for a learning rate of which a description has no more than the tag. Those of equal tags are equal."""

    def __init__(self, tag: str) -> None:
        self.tag = tag

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        raise RuntimeError(f"learning_rate: a description holds the tag of a function, here {self.tag!r}, and not the function; give it")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CallablePlaceholder) and self.tag == other.tag

    def __hash__(self) -> int:
        return hash(self.tag)

    def __repr__(self) -> str:
        return f"CallablePlaceholder({self.tag!r})"


class SGDSlotVariables(NamedTuple):
    """It has none."""


class AdagradSlotVariables(NamedTuple):
    accumulator: Any


class AdamSlotVariables(NamedTuple):
    momentum: Any
    velocity: Any


class AdagradMomentumSlotVariables(NamedTuple):
    accumulator: Any
    momentum: Any


class FTRLSlotVariables(NamedTuple):
    accumulator: Any
    linear: Any


class LaPropSlotVariables(NamedTuple):
    mu: Any
    nu: Any


class F2ASlotVariables(NamedTuple):
    accumulator: Any
    local_step: Any


@dataclasses.dataclass(frozen=True)
class OptimizerSpec:
    """What all optimizers have. learning_rate: a number, or a function of the step, or of nothing."""

    learning_rate: LearningRate = 0.001
    kind: ClassVar[Any] = None  # emberd's
    fields: ClassVar[Mapping[str, str]] = {}  # its names of the others
    fixed: ClassVar[Mapping[str, Any]] = {}
    slot_type: ClassVar[Any] = SGDSlotVariables
    no_step: ClassVar[Optional[int]] = None  # the step of an update that is told none

    def slot_variables_initializers(self) -> Any:
        """Constants, by the names of the slots."""
        return self.slot_type(*(jax.nn.initializers.constant(getattr(self, f"initial_{slot}_value", 0.0)) for slot in self.slot_type._fields))

    def slot_variables_count(self) -> int:
        return len(self.slot_type._fields)

    def get_learning_rate(self, step: Any = None) -> Any:
        """The rate of a step, a float32 scalar."""
        rate: Any = self.learning_rate
        if callable(rate):
            if takes_nothing(rate):
                rate = rate()
            elif step is None:
                raise ValueError(f"learning_rate: {rate} is a function of the step; give `step`")
            else:
                rate = rate(step)
        return jnp.asarray(rate, jnp.float32)

    def get_hyperparameters(self, step: Any = None) -> Tuple[Any, ...]:
        """The learning rate, and what else an update takes."""
        return (self.get_learning_rate(step),)

    def _with_rate(self, step: Any, *names: str) -> Tuple[Any, ...]:
        values = (getattr(self, name) for name in names)
        return (self.get_learning_rate(step), *(jnp.asarray(one, bool if isinstance(one, bool) else jnp.float32) for one in values))

    def step_values(self, rate: float, step: int) -> Dict[str, float]:
        """What goes along with an update, by emberd's names."""
        return {"learning_rate": rate} if callable(self.learning_rate) else {}

    def declared(self) -> config.Optimizer:
        """emberd's optimizer, as it is declared."""
        rate = {} if callable(self.learning_rate) else {"learning_rate": float(self.learning_rate)}
        values = {theirs: float(getattr(self, ours)) if not isinstance(getattr(self, ours), bool) else getattr(self, ours)
                  for ours, theirs in self.fields.items()}
        made: config.Optimizer = self.kind(**rate, **values, **self.fixed)
        return made

    def _parameters(self, kind: type) -> Dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)[1:]}
        return {name: kind(value) for name, value in values.items() if value is not None and isinstance(value, bool) == (kind is bool)}

    def get_float_params(self) -> Dict[str, float]:
        """All but the learning rate, by name."""
        return self._parameters(float)

    def get_bool_params(self) -> Dict[str, bool]:
        return self._parameters(bool)

    @classmethod
    def from_float_and_bool_params(cls: Type[Spec], float_params: Mapping[str, float], bool_params: Mapping[str, bool],
                                   learning_rate: LearningRate) -> Spec:
        return cls(learning_rate, **float_params, **bool_params)

    def short_name(self) -> str:
        return type(self).__name__.replace("OptimizerSpec", "").lower()


@dataclasses.dataclass(frozen=True)
class SGDOptimizerSpec(OptimizerSpec):
    """w -= lr * g"""

    kind: ClassVar[Any] = config.SGD


@dataclasses.dataclass(frozen=True)
class AdagradOptimizerSpec(OptimizerSpec):
    """a += g^2; w -= lr * g / sqrt(a)"""

    initial_accumulator_value: float = 0.1
    kind: ClassVar[Any] = config.Adagrad
    slot_type: ClassVar[Any] = AdagradSlotVariables
    fields: ClassVar[Mapping[str, str]] = {"initial_accumulator_value": "initial_accumulator"}


@dataclasses.dataclass(frozen=True)
class AdamOptimizerSpec(OptimizerSpec):
    """With bias correction by `step` of tpu_sparse_dense_matmul_grad, from 0; without a step it is that of the first."""

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-8
    kind: ClassVar[Any] = config.Adam
    slot_type: ClassVar[Any] = AdamSlotVariables
    no_step: ClassVar[Optional[int]] = 0
    fields: ClassVar[Mapping[str, str]] = {"beta_1": "beta1", "beta_2": "beta2", "epsilon": "epsilon"}
    fixed: ClassVar[Mapping[str, Any]] = {"bias_correction": False, "sum_inside_sqrt": False}  # the values of each step correct

    def get_hyperparameters(self, step: Any = None) -> Tuple[Any, ...]:
        """With what corrects the bias in the learning rate and in epsilon."""
        rate, beta_1, beta_2, epsilon = self._with_rate(0 if step is None else step, "beta_1", "beta_2", "epsilon")
        count = 1 if step is None else step + 1
        correction = jnp.sqrt(1 - beta_2 ** count)
        return rate * correction / (1 - beta_1 ** count), beta_1, beta_2, epsilon * correction

    def step_values(self, rate: float, step: int) -> Dict[str, float]:
        correction = math.sqrt(1 - self.beta_2 ** (step + 1))
        return {"learning_rate": rate * correction / (1 - self.beta_1 ** (step + 1)), "epsilon": self.epsilon * correction}


@dataclasses.dataclass(frozen=True)
class AdagradMomentumOptimizerSpec(OptimizerSpec):
    momentum: float = 0.9
    beta2: float = 1.0
    epsilon: float = 1e-10
    exponent: float = 2.0
    use_nesterov: bool = False
    initial_accumulator_value: float = 0.1
    initial_momentum_value: float = 0.0
    kind: ClassVar[Any] = config.AdagradMomentum
    slot_type: ClassVar[Any] = AdagradMomentumSlotVariables
    fields: ClassVar[Mapping[str, str]] = {
        "momentum": "momentum", "beta2": "beta2", "epsilon": "epsilon", "exponent": "exponent", "use_nesterov": "use_nesterov",
        "initial_accumulator_value": "initial_accumulator", "initial_momentum_value": "initial_momentum"}

    def get_hyperparameters(self, step: Any = None) -> Tuple[Any, ...]:
        return self._with_rate(step, "momentum", "beta2", "epsilon", "exponent", "use_nesterov")

    def short_name(self) -> str:
        return "adagrad_momentum"


@dataclasses.dataclass(frozen=True)
class FTRLOptimizerSpec(OptimizerSpec):
    learning_rate: LearningRate = 0.01
    learning_rate_power: float = -0.5
    l1_regularization_strength: float = 0.0
    l2_regularization_strength: float = 0.0
    beta: float = 0.0
    initial_accumulator_value: float = 0.1
    initial_linear_value: float = 0.0
    multiply_linear_by_learning_rate: bool = False
    kind: ClassVar[Any] = config.Ftrl
    slot_type: ClassVar[Any] = FTRLSlotVariables
    fields: ClassVar[Mapping[str, str]] = {
        "learning_rate_power": "learning_rate_power", "l1_regularization_strength": "l1",
        "l2_regularization_strength": "l2", "beta": "beta", "initial_accumulator_value": "initial_accumulator",
        "initial_linear_value": "initial_linear", "multiply_linear_by_learning_rate": "multiply_linear_by_learning_rate"}

    def get_hyperparameters(self, step: Any = None) -> Tuple[Any, ...]:
        return self._with_rate(step, "learning_rate_power", "l1_regularization_strength", "l2_regularization_strength", "beta")


@dataclasses.dataclass(frozen=True)
class LaPropOptimizerSpec(OptimizerSpec):
    """Counts the steps of the group of trainers, from 0."""

    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-30
    rms_clip_threshold: Optional[float] = None
    initial_slot_value: float = 0.0
    kind: ClassVar[Any] = config.LaProp
    slot_type: ClassVar[Any] = LaPropSlotVariables
    fields: ClassVar[Mapping[str, str]] = {"b1": "beta1", "b2": "beta2", "eps": "epsilon"}

    def __post_init__(self) -> None:
        if self.rms_clip_threshold is not None or self.initial_slot_value != 0:
            raise ValueError("LaPropOptimizerSpec: rms_clip_threshold must be None and initial_slot_value 0")

    def get_decay_rate(self, step: Any = None) -> Any:
        """Of the squares, in a step: b2 without what corrects its bias."""
        return jnp.asarray(self.b2 if step is None else self.b2 * (1 - self.b2 ** step) / (1 - self.b2 ** (step + 1)), jnp.float32)

    def get_hyperparameters(self, step: Any = None) -> Tuple[Any, ...]:
        rate, b1, eps = self._with_rate(step, "b1", "eps")
        return rate, b1, self.get_decay_rate(step), eps


@dataclasses.dataclass(frozen=True)
class F2AOptimizerSpec(OptimizerSpec):
    """Counts the steps of the group of trainers, from 0."""

    learning_rate: LearningRate = 0.01
    rho: float = 0.5
    initial_accumulator_value: float = 0.1
    initial_local_step_value: float = 0.0
    l1_regularization_strength: float = 0.0
    l2_regularization_strength: float = 0.0
    max_lr_multiplier: float = 1e6
    kind: ClassVar[Any] = config.F2A
    slot_type: ClassVar[Any] = F2ASlotVariables
    no_step: ClassVar[Optional[int]] = 0
    fields: ClassVar[Mapping[str, str]] = {
        "rho": "rho", "initial_accumulator_value": "initial_accumulator", "l1_regularization_strength": "l1",
        "l2_regularization_strength": "l2", "max_lr_multiplier": "max_lr_multiplier"}

    def __post_init__(self) -> None:
        if self.initial_local_step_value != 0:
            raise ValueError(f"F2AOptimizerSpec: initial_local_step_value: {self.initial_local_step_value} is not allowed; it "
                             "must be 0")

    def get_hyperparameters(self, step: Any = None) -> Tuple[Any, ...]:
        count = 0 if step is None else step
        return (*self._with_rate(count, "rho", "l1_regularization_strength", "l2_regularization_strength", "max_lr_multiplier"),
                jnp.asarray(count, jnp.float32))


@functools.lru_cache(maxsize=1024)
def _constant(value: float) -> Any:
    """An initializer; of equal values the same one, so that optimizers that have it are equal."""
    return jax.nn.initializers.constant(value)


def _constant_of(initializer: Any) -> float:
    """Of a slot: it has one initial value."""
    values = np.asarray(initializer(jax.random.key(0), (2, 2), jnp.float32))
    if (values != values[0, 0]).any():
        raise ValueError(f"slot_variable_initializers_tuple: {initializer} is not allowed; each must give one number, as jax.nn.initializers.constant(0)")
    return float(values[0, 0])


# Before a text among the parameters of a message.
_RULE, _SHORT_NAME = "stablehlo:", "short_name:"


@dataclasses.dataclass(frozen=True)
class CustomOptimizerSpec(OptimizerSpec):
    """A rule of your own: a function of (gradient, table, *slots, learning rate, *hyper-parameters), or what StableHLO has of one, which gives
    (table, *slots). Operations are elementwise, on float32. Hyper-parameters are what get_hyperparameters of a class of yours gives
    besides the rate, at step 0."""

    custom_computation_fn: Optional[Callable[..., Any]] = None
    stablehlo: Any = None
    slot_variable_initializers_tuple: Tuple[Any, ...] = ()
    short_name_str: str = "custom"
    hyper_parameters: Tuple[float, ...] = ()  # at step 0, where the specification was read from a message
    slot_type: ClassVar[Any] = staticmethod(lambda *slots: slots)

    def get_hyperparameters(self, step: Any = None) -> Tuple[Any, ...]:
        return (*super().get_hyperparameters(step), *(jnp.float32(one) for one in self.hyper_parameters))

    def slot_variables_initializers(self) -> Tuple[Any, ...]:
        return self.slot_variable_initializers_tuple

    def slot_variables_count(self) -> int:
        return len(self.slot_variable_initializers_tuple)

    def short_name(self) -> str:
        return self.short_name_str

    def _numbers(self) -> Dict[str, Dict[str, float]]:
        """By the names that the cluster has for them."""
        others = self.get_hyperparameters(0)[1:]
        return {"slots": {f"slot_{i}": _constant_of(one) for i, one in enumerate(self.slot_variable_initializers_tuple)},
                "hyper_parameters": {f"hyper_parameter_{i}": float(one) for i, one in enumerate(others)}}

    def get_float_params(self) -> Dict[str, float]:
        """The first value of each slot, and the hyper-parameters."""
        numbers = self._numbers()
        return {**numbers["slots"], **numbers["hyper_parameters"]}

    def get_bool_params(self) -> Dict[str, bool]:
        """The rule and the name, as keys: there is no other place for texts."""
        return {_RULE + self.text(): True, _SHORT_NAME + self.short_name(): True}

    @classmethod
    def _rule_in(cls, bool_params: Mapping[str, bool]) -> str:
        """The StableHLO that get_bool_params gave; "": there is none."""
        return next((name[len(_RULE):] for name in bool_params if name.startswith(_RULE)), "")

    @classmethod
    def from_float_and_bool_params(cls, float_params: Mapping[str, float], bool_params: Mapping[str, bool], learning_rate: LearningRate) -> Any:
        def numbers(kind: str) -> Tuple[float, ...]:
            count = sum(name.startswith(kind) for name in float_params)
            return tuple(float(float_params[f"{kind}{i}"]) for i in range(count))

        name = next((one[len(_SHORT_NAME):] for one in bool_params if one.startswith(_SHORT_NAME)), cls.short_name_str)
        return CustomOptimizerSpec(learning_rate, stablehlo=cls._rule_in(bool_params), slot_variable_initializers_tuple=tuple(map(_constant, numbers("slot_"))),
                                   short_name_str=name, hyper_parameters=numbers("hyper_parameter_"))

    @classmethod
    def lower_to_stablehlo(cls, custom_computation_fn: Callable[..., Any], embedding_dim: int = 1, num_slot_variables: int = 0,
                           num_hyperparameters: int = 1, min_value: Optional[float] = None, max_value: Optional[float] = None) -> str:
        """What JAX makes of the function, with the updated table between the limits."""
        def limited(*values: Any) -> Any:
            made = custom_computation_fn(*values)
            table, *slots = made if isinstance(made, (list, tuple)) else (made,)
            return (jnp.clip(table, min_value, max_value), *slots)

        row = jax.ShapeDtypeStruct((1, embedding_dim), jnp.float32)
        free = min_value is None and max_value is None
        lowered = jax.jit(custom_computation_fn if free else limited, keep_unused=True).lower(*[row] * (2 + num_slot_variables + num_hyperparameters))
        return str(lowered.as_text(dialect="stablehlo"))

    def text(self) -> str:
        """The rule, as StableHLO."""
        if (self.custom_computation_fn is None) == (self.stablehlo is None):
            raise ValueError("CustomOptimizerSpec: give one of custom_computation_fn and stablehlo")
        if self.custom_computation_fn is None:
            return self.stablehlo.decode() if isinstance(self.stablehlo, bytes) else str(self.stablehlo)
        return self.lower_to_stablehlo(self.custom_computation_fn, 8, self.slot_variables_count(), len(self.get_hyperparameters(0)))

    def declared(self) -> config.Optimizer:
        rate: Dict[str, Any] = {} if callable(self.learning_rate) else {"learning_rate": float(self.learning_rate)}
        numbers: Dict[str, Any] = self._numbers()
        return config.Custom(stablehlo=self.text(), **rate, **numbers)


@dataclasses.dataclass(frozen=True)
class QuantizationConfig:
    min_value: float
    max_value: float
    num_buckets: int

    def __post_init__(self) -> None:
        if not self.min_value < self.max_value:
            raise ValueError(f"QuantizationConfig: min_value: {self.min_value} is not allowed; it must be less than max_value, {self.max_value}")
        if self.num_buckets < 2:
            raise ValueError(f"QuantizationConfig: num_buckets: {self.num_buckets} is not allowed; it must be at least 2")

    def as_tuple(self) -> Tuple[float, float, int]:
        return self.min_value, self.max_value, self.num_buckets


@dataclasses.dataclass(frozen=True)
class TableSettingInStack:
    """Where a table lies in each shard of its stack."""

    stack_name: str
    padded_vocab_size: int
    padded_embedding_dim: int
    row_offset_in_shard: int = 0
    shard_rotation: int = 0


@dataclasses.dataclass(frozen=True)
class FeatureIdTransformation:
    row_offset: int = 0
    col_offset: int = 0
    col_shift: int = 0


@dataclasses.dataclass(frozen=True)
class StackedTableSpec:
    stack_name: str
    stack_vocab_size: int
    stack_embedding_dim: int
    optimizer: OptimizerSpec
    combiner: str
    total_sample_count: int
    max_ids_per_partition: int = 256
    max_unique_ids_per_partition: int = 256
    suggested_coo_buffer_size_per_device: Optional[int] = None
    quantization_config: Optional[QuantizationConfig] = None
    activation_mem_bytes_limit: int = DEFAULT_ACTIVATION_MEM_BYTES_LIMIT

    def replace(self, **updates: Any) -> "StackedTableSpec":
        """One with other values of these fields."""
        return dataclasses.replace(self, **updates)


@dataclasses.dataclass(eq=True, unsafe_hash=True)
class TableSpec:
    """One table.

    initializer: a function of a key and the shape of a part of the table, as in jax.nn.initializers, or of nothing, which gives the
      whole table, at least [vocabulary_size, embedding_dim]; or what emberd.TableConfig takes: one of emberd's, or a function whose arguments are named
      (offset, shape), which needs little memory here. Default: emberd.TruncatedNormal(0, 1/sqrt(embedding_dim)).
    In a stack it does not change: AttributeError.
    """

    name: str
    vocabulary_size: int
    embedding_dim: int
    initializer: Any = None
    optimizer: OptimizerSpec = None  # type: ignore[assignment] # must be given, by name where there is no initializer
    combiner: str = "mean"
    max_ids_per_partition: int = 256
    max_unique_ids_per_partition: int = 256
    suggested_coo_buffer_size_per_device: Optional[int] = None
    quantization_config: Optional[QuantizationConfig] = None
    # Set by embedding.prepare_feature_specs_for_training and by stacking; before, a table is a stack of its own, without padding.
    setting_in_stack: TableSettingInStack = dataclasses.field(default=None, compare=False)  # type: ignore[assignment]
    stacked_table_spec: Optional[StackedTableSpec] = dataclasses.field(default=None, compare=False)
    feature_shapes: Mapping[str, Tuple[int, ...]] = dataclasses.field(default_factory=dict, compare=False)  # output_shape by name

    def __post_init__(self) -> None:
        if not isinstance(self.optimizer, OptimizerSpec):
            raise TypeError(f"table {self.name!r}: optimizer: {self.optimizer!r} is not allowed; give one as SGDOptimizerSpec()")
        if self.setting_in_stack is None:
            self.setting_in_stack = TableSettingInStack(self.name, self.vocabulary_size, self.embedding_dim)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("setting_in_stack", "stacked_table_spec", "feature_shapes") and self.is_stacked():
            raise AttributeError(f"table {self.name!r}: {name}: it cannot be set once the table is in a stack, here {self.setting_in_stack.stack_name!r}; set it "
                                 "before, in another TableSpec, or set limits of the stack by update_preprocessing_parameters")
        super().__setattr__(name, value)

    def is_stacked(self) -> bool:
        return self.stacked_table_spec is not None


@dataclasses.dataclass(eq=True, unsafe_hash=True)
class FeatureSpec:
    """One input. input_shape: [samples] or [samples, ids of a sample]; output_shape: [samples, columns], or with more dimensions
    between them: ids [samples, positions] give activations [samples, positions, columns]."""

    name: str
    table_spec: TableSpec
    input_shape: Tuple[int, ...]
    output_shape: Tuple[int, ...]
    id_transformation: Optional[FeatureIdTransformation] = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        self.input_shape, self.output_shape = tuple(self.input_shape), tuple(self.output_shape)
