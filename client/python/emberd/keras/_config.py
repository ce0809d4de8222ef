"""Descriptions of tables and features with the fields of keras-rs, and what they are to the cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Tuple

import keras
import numpy as np

from .. import _filling, config


def _fan_out() -> Any:
    return keras.initializers.VarianceScaling(mode="fan_out")


@dataclasses.dataclass(order=True)
class TableConfig:
    """One table. Several features may look it up.

    initializer: of Keras, called in this process, for the whole table, or where that has more than 64 MiB for stretches of it; or what
      emberd.TableConfig takes: emberd.Normal and so on, for rows that are made on the cluster, a function whose arguments are named (offset, shape), or an
      array. None: emberd.TruncatedNormal(0, 1/sqrt(embedding_dim)).
    optimizer: SGD, Adagrad, Adam or Ftrl of Keras, by name or not; a schedule of its learning rate counts the steps of the
      group of trainers. Or one of emberd's. Rows that a batch does not look up are left alone. Independent of the model's. With
      gradient_accumulation_steps=n, which all tables of a layer have to have, n batches make a step, of the mean of their gradients.
    combiner: "mean", "sum", "sqrtn" or "max". Of "max", the activation has of each column the largest of a sample's rows, and zero where there is none; the
      gradient goes to the first of equal ones. All rows of the batch take part in the update. An id of -1 is none; weights are refused.
    placement: "auto", "sparsecore" and "default_device" are the same: the table is on the cluster.
    max_ids_per_partition, max_unique_ids_per_partition: not needed.
    """

    name: str
    vocabulary_size: int
    embedding_dim: int
    initializer: Any = dataclasses.field(default_factory=_fan_out)
    optimizer: Any = "adam"
    combiner: str = "mean"
    placement: str = "auto"
    max_ids_per_partition: int = 256
    max_unique_ids_per_partition: int = 256

    def get_config(self) -> Dict[str, Any]:
        """What `from_config` takes."""
        values = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        for name in ("initializer", "optimizer"):
            if isinstance(values[name], (config.Initializer, config.Optimizer)):
                values[name] = {"emberd": type(values[name]).__name__, **dataclasses.asdict(values[name])}
            else:
                values[name] = keras.saving.serialize_keras_object(values[name])
        return values

    @classmethod
    def from_config(cls, values: Mapping[str, Any]) -> "TableConfig":
        """Of what `get_config` gave."""
        values = dict(values)
        for name in ("initializer", "optimizer"):
            given = values[name]
            if isinstance(given, Mapping) and "emberd" in given:
                fields = dict(given)
                values[name] = getattr(config, fields.pop("emberd"))(**fields)
            else:
                values[name] = keras.saving.deserialize_keras_object(given)
        return cls(**values)


@dataclasses.dataclass(order=True)
class FeatureConfig:
    """One input. input_shape: (samples,) or (samples, ids of a sample); output_shape: (samples, embedding_dim). Batches of
    another size, and samples of more ids, are allowed; nothing is truncated. With an output_shape of (samples, positions, embedding_dim) it is
    a sequence, whose number of positions is fixed: input_shape is (samples, positions), or (samples, positions, ids of a position), whose rows
    are combined.

    mask_zero: of a sequence with one id for each position: id 0 fills short ones up. Its activation is zero, no row is read or updated for it,
      and the layers behind get a mask, as behind keras.layers.Embedding."""

    name: str
    table: TableConfig
    input_shape: Tuple[Optional[int], ...]
    output_shape: Tuple[Optional[int], ...]
    mask_zero: bool = False

    @property
    def positions(self) -> Tuple[int, ...]:
        """Of a sequence, its dimensions behind the samples; (): it is none."""
        ids, given = tuple(self.input_shape), tuple(self.output_shape)
        if len(given) < 3:
            return ()
        if len(ids) not in (len(given) - 1, len(given)) or given[1:-1] != ids[1:len(given) - 1] or not all(given[1:-1]):
            raise ValueError(f"feature {self.name!r}: input_shape, output_shape: {ids} and {given} are not allowed; those of a sequence are "
                             "(samples, positions) or (samples, positions, ids of a position), and (samples, positions, embedding_dim), with a "
                             "number of positions")
        return tuple(one for one in given[1:-1] if one is not None)

    def get_config(self) -> Dict[str, Any]:
        """What `from_config` takes."""
        return {"name": self.name, "table": self.table.get_config(), "input_shape": self.input_shape,
                "output_shape": self.output_shape, "mask_zero": self.mask_zero}

    @classmethod
    def from_config(cls, values: Mapping[str, Any]) -> "FeatureConfig":
        """Of what `get_config` gave."""
        return cls(values["name"], TableConfig.from_config(values["table"]), tuple(values["input_shape"]),
                   tuple(values["output_shape"]), values.get("mask_zero", False))


Values = Dict[str, Any]


class TableOptimizer:
    """A Keras optimizer as emberd's, and what goes along with each update: traced by JAX, so in operations of Keras.

    rate: None: that of a schedule, or the cluster's default. schedule: equal where rates are in each step. calls: how many make a step.
    """

    def __init__(self, given: Any, table: str) -> None:
        self.declared: config.Optimizer
        self.of_step: Optional[Callable[[Any], Values]] = None
        self.rate: Optional[float] = None
        self.schedule: Any = None
        self.calls = 1
        self._given, self._table = given, table
        if isinstance(given, config.Optimizer):
            self.declared, self.rate = given, getattr(given, "learning_rate", None)
            return
        with _eagerly():
            optimizer: Any = keras.optimizers.get(given)
        self._given = optimizer
        what = f"table {table!r}: optimizer"
        refused = {"clipnorm": None, "clipvalue": None, "global_clipnorm": None, "use_ema": False, "weight_decay": None,
                   "loss_scale_factor": None, "momentum": 0.0, "nesterov": False, "amsgrad": False, "l2_shrinkage_regularization_strength": 0.0}
        for name, allowed in refused.items():
            value = getattr(optimizer, name, allowed)
            if value is not None and value != allowed:
                raise ValueError(f"{what}: {name}: {value} is not allowed; it must be {allowed}")
        rate = optimizer._learning_rate
        schedule = rate if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule) else None
        if schedule is None and callable(rate):
            raise ValueError(f"{what}: learning_rate: the function {rate!r} is not allowed; it must be a number or a LearningRateSchedule")
        with _eagerly():
            constant: Any = None if schedule else float(np.asarray(keras.ops.convert_to_numpy(rate)))
        self.rate, self.calls = constant, optimizer.gradient_accumulation_steps or 1
        self.schedule = schedule
        if schedule is not None:  # described, it is the same when it has been saved and loaded; one of the user's own may have no description
            with _eagerly(), contextlib.suppress(NotImplementedError, TypeError, ValueError):
                self.schedule = keras.saving.serialize_keras_object(schedule)
        self.declared = _declared_of(optimizer, constant, what)
        if isinstance(self.declared, config.Adam):
            # Keras corrects the bias in the rate alone.
            decays = [math.log(beta) if beta > 0 else -math.inf for beta in (optimizer.beta_1, optimizer.beta_2)]

            def corrected(step: Any) -> Values:
                ops: Any = keras.ops
                count = ops.cast(step, "float32") + 1
                first, second = (-ops.expm1(count * decay) for decay in decays)
                return {"learning_rate": (schedule(step) if schedule else constant) * ops.sqrt(second) / first}

            self.of_step = corrected
            self.schedule = self.schedule or ("Adam", constant)  # it sends a rate in each step, where emberd's Adam sends none
        elif schedule is not None:
            self.of_step = lambda step: {"learning_rate": schedule(step)}

    @property
    def kinds(self) -> Tuple[str, ...]:
        """Of tables that are there and may be trained with it: of Keras's Adagrad either one, for the epsilon is theirs."""
        return ("adagrad", "adagrad_momentum") if isinstance(self._given, keras.optimizers.Adagrad) else (self.declared.kind or "adagrad",)

    def as_it_is(self) -> "TableOptimizer":
        """With the numbers that the optimizer has by now. Makes no variable."""
        return TableOptimizer(self._given, self._table)


def _declared_of(optimizer: Any, rate: Any, what: str) -> config.Optimizer:
    """One of Keras as emberd's. rate: None: it is sent with each update. what: whose it is."""
    kind = type(optimizer).__name__
    if kind == "SGD":
        return config.SGD(rate)
    if kind == "Adagrad" and optimizer.epsilon > min(1e-7, 2e-5 * optimizer.initial_accumulator_value):  # Keras's defaults change nothing one would see
        return config.AdagradMomentum(rate, momentum=0.0, epsilon=optimizer.epsilon, initial_accumulator=optimizer.initial_accumulator_value)
    if kind == "Adagrad":
        return config.Adagrad(rate, initial_accumulator=optimizer.initial_accumulator_value)
    if kind == "Adam":
        return config.Adam(rate, bias_correction=False, sum_inside_sqrt=False, beta1=optimizer.beta_1, beta2=optimizer.beta_2, epsilon=optimizer.epsilon)
    if kind == "Ftrl":
        return config.Ftrl(rate, learning_rate_power=optimizer.learning_rate_power, l1=optimizer.l1_regularization_strength,
                           l2=optimizer.l2_regularization_strength, beta=optimizer.beta, initial_accumulator=optimizer.initial_accumulator_value)
    raise ValueError(f"{what}: {kind} is not allowed; it must be SGD, Adagrad, Adam or Ftrl, or one of emberd's")


def initial_rows(given: Any, rows: int, dim: int) -> Any:
    """An initializer of Keras, or what a TableConfig of emberd takes, as the latter."""
    if given is None or isinstance(given, config.Initializer) or (_filling.is_given(given) and (not callable(given) or _filling.takes_offset(given))):
        return given
    initializer: Any = keras.initializers.get(given)
    if type(initializer).__name__ == "Zeros":
        return config.Zeros()

    def call(initializer: Any, shape: Tuple[int, int]) -> Any:
        with _eagerly():
            return np.asarray(keras.ops.convert_to_numpy(initializer(shape, dtype="float32")))

    if 4 * rows * dim <= _filling.WHOLE_BYTES or _of_stretch(initializer, (rows, dim), 0, rows) is None:
        return _filling.of_whole(functools.partial(call, initializer), (rows, dim))
    return lambda offset, shape: call(_of_stretch(initializer, (rows, dim), offset, shape[0]), shape)


def _of_stretch(initializer: Any, whole: Tuple[int, int], offset: int, rows: int) -> Any:
    """One that draws some of the rows from the same distribution, with numbers of their own; None: it is not known how. For Keras gives equal rows to calls
    with equal shapes, and the scale depends on the number of rows."""
    known: Any = keras.initializers
    if isinstance(initializer, (known.Ones, known.Constant)):
        return initializer
    seed = getattr(initializer, "seed", None)
    if isinstance(seed, int):
        seed = int(np.random.SeedSequence([abs(seed), offset]).generate_state(1)[0] >> 1)
    if isinstance(initializer, known.VarianceScaling):
        fan_in = {"fan_in": 1.0, "fan_out": 0.0}.get(initializer.mode, 0.5)  # what of the scale is that of the rows
        fans = [max(1.0, fan_in * count + (1 - fan_in) * whole[1]) for count in (rows, whole[0])]
        return known.VarianceScaling(initializer.scale * fans[0] / fans[1], initializer.mode, initializer.distribution, seed)
    if type(initializer) in (known.RandomNormal, known.RandomUniform, known.TruncatedNormal):
        return type(initializer).from_config({**initializer.get_config(), "seed": seed})
    return None


@contextlib.contextmanager
def _eagerly() -> Iterator[None]:
    """Computes numbers, even where Keras only asks for shapes, as when it builds a layer."""
    with contextlib.ExitStack() as scopes:
        scopes.enter_context(keras.device("cpu"))
        if keras.backend.backend() == "jax":
            import jax

            scopes.enter_context(jax.ensure_compile_time_eval())
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            scopes.enter_context(tf.init_scope())
        yield


def declared(table: TableConfig, optimizer: TableOptimizer) -> config.TableConfig:
    return config.TableConfig(table.name, table.vocabulary_size, table.embedding_dim, optimizer=optimizer.declared,
                              combiner="sum" if table.combiner == "max" else table.combiner,  # the layer takes the largest
                              initializer=initial_rows(table.initializer, table.vocabulary_size, table.embedding_dim))
