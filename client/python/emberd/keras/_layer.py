"""The layer."""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import sys
import warnings
from typing import Any, Callable, Container, ContextManager, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple, Union

import keras
import numpy as np

from .. import config
from .._loading import check_finite
from .._pace import Paces
from .._place import checked, default_client, find_again, planned_samples
from .._stacking import apart, kind_of, unequal
from ..arrays import Dense, Ragged, Sequences, Sparse, as_floats, as_ints, map_arrays, unmasked
from ..client import Client, Model
from ..errors import OutOfRange
from ..steps import Steps
from ..trainer import Checkpointed, Trainer, ahead
from . import _loops, _steps
from ._config import FeatureConfig, TableOptimizer, declared

PREPROCESSED = "preprocessed_inputs_per_placement"
RATES = "learning_rates"  # among the saved variables: learning_rates.TABLE; before, all in the order of the tables
STEP = "next_step"  # there, too: of the tables
ASKING = ("tables", "learning_rates", "next_step", "checkpoints")
PLACEMENTS = ("auto", "default_device", "sparsecore")
NAMED = "named_tuple"  # in the config of the layer: name and fields of one
NONE = -1  # the id that fills samples up where the combiner is max


def _leaves(structure: Any, values: Any, partial: bool = False, path: Tuple[Any, ...] = ()) -> Iterator[Tuple[FeatureConfig, Any]]:
    """Features of a nested structure, each with what `values` has at its place. partial: dicts may leave some of them out."""
    if isinstance(structure, Mapping):
        given = set(values) if isinstance(values, Mapping) else set()
        if given != set(structure) and not (partial and given and given < set(structure)):
            has = sorted(map(str, values)) if isinstance(values, Mapping) else type(values).__name__
            only_missing = given and given < set(structure)
            raise ValueError(f"inputs{''.join(f'[{one!r}]' for one in path)}: {has} is not allowed; the structure must be that "
                             f"of feature_configs, a dict of {', '.join(map(str, structure))}"
                             + (". Give all; or make the layer with partial=True: then those that are given are looked up and trained" if only_missing else ""))
        for key in (key for key in structure if key in given):
            yield from _leaves(structure[key], values[key], partial, (*path, key))
    elif isinstance(structure, (list, tuple)):
        if not isinstance(values, (list, tuple)) or len(values) != len(structure):
            raise ValueError(f"inputs{''.join(f'[{one!r}]' for one in path)}: the structure must be that of feature_configs, a "
                             f"list of {len(structure)}")
        for index, one in enumerate(structure):
            yield from _leaves(one, values[index], partial, (*path, index))
    else:
        yield structure, values


def _pack(structure: Any, names: Container[str], get: Callable[[FeatureConfig], Any]) -> Any:
    """Of the features with these names."""
    if isinstance(structure, Mapping):
        return {key: _pack(one, names, get) for key, one in structure.items() if any(feature.name in names for feature, _ in _leaves(one, one))}
    if isinstance(structure, (list, tuple)):
        return _like(structure, (_pack(one, names, get) for one in structure))
    return get(structure)


def _described(structure: Any, get: Callable[[FeatureConfig], Any]) -> Any:
    """What JSON keeps: of a named tuple, which it would make a list of, its name and fields, too."""
    if isinstance(structure, Mapping):
        return {key: _described(one, get) for key, one in structure.items()}
    if not isinstance(structure, (list, tuple)):
        return get(structure)
    parts = [_described(one, get) for one in structure]
    fields = getattr(structure, "_fields", None)
    return type(structure)(parts) if fields is None else {NAMED: [type(structure).__name__, *fields], "parts": parts}


def _like(sequence: Any, parts: Iterable[Any]) -> Any:
    """Of the type of the sequence, which may be a named tuple."""
    return type(sequence)(*parts) if hasattr(sequence, "_fields") else type(sequence)(parts)


class _Tables:
    """What the layer holds that Keras need not follow."""

    def __init__(self, structure: Any, options: Dict[str, Any]) -> None:
        self.structure, self.options = structure, options
        self.features = {feature.name: feature for feature, _ in _leaves(structure, structure)}
        self.tables = {feature.table.name: feature.table for feature in self.features.values()}
        if len(self.features) != sum(1 for _ in _leaves(structure, structure)):
            raise ValueError("feature_configs: the names of features must be unique")
        for feature in self.features.values():
            _check_mask(feature)
            if getattr(feature.table, "placement", "auto") not in PLACEMENTS:
                raise ValueError(f"table {feature.table.name!r}: placement: {feature.table.placement!r} is not allowed; it must be one of "
                                 f"{', '.join(PLACEMENTS)}, which all are the cluster")
            if feature.table != self.tables[feature.table.name]:
                raise ValueError(f"feature_configs: two tables have the name {feature.table.name!r}")
        # Made here, for they have variables, which Keras does not allow where it builds a layer while it traces.
        self.optimizers = {name: TableOptimizer(table.optimizer, name) for name, table in self.tables.items()}
        self.model: Optional[Model] = None
        self.trainer: Any = None
        self.call: Any = None
        self.turns: Any = None
        self.paces = Paces()

    def declare(self, name: str) -> Model:
        """Makes the tables, or finds them."""
        if self.model is not None:
            return self.model
        options = dict(self.options)
        given, client = options.pop("model"), options.pop("client")
        stacking = options.pop("table_stacking")
        optimizers = {name: one.as_it_is() for name, one in self.optimizers.items()}  # its rate may have been set since
        calls = {name: one.calls for name, one in optimizers.items()}
        if options["partial"] and max(calls.values()) > 1:
            raise ValueError("partial: True is not allowed with gradient_accumulation_steps, whose calls make one step of the same features")
        if len(set(calls.values())) > 1:
            raise ValueError(f"gradient_accumulation_steps: {calls} are not allowed; the optimizers of all tables of a layer must have the same")
        self.accumulates = max(calls.values()) > 1
        if isinstance(given, Model):
            model = given
            for feature in self.features.values():
                _check_feature(model, feature, optimizers[feature.table.name])
            _check_shared(optimizers, {name: model.tables[name].stack for name in optimizers if model.tables[name].optimizer != "none"})
        else:
            plan = _plan(stacking, self.tables, optimizers)
            model = (client or default_client()).declare(config.ModelConfig(
                given or name, [declared(table, optimizers[name]) for name, table in self.tables.items()],
                [config.FeatureConfig(name, feature.table.name, planned_samples(feature.output_shape[:-1]))
                 for name, feature in self.features.items()], plan=plan))
        counting = {name: one.of_step for name, one in optimizers.items() if one.of_step is not None}
        hyper = (lambda step: {name: of_step(step) for name, of_step in counting.items()}) if counting else None
        self.trainer, self.call, self.turns = _steps.make(model, hyper, {name: one.rate for name, one in optimizers.items()}, max(calls.values()),
                                                          **options)
        self.turns.always = isinstance(given, Model)  # which rates it was declared with is not known
        self.model = model
        return model


def _check_feature(model: Model, feature: Any, optimizer: TableOptimizer) -> None:
    """Refuses what differs from a model that is there, as far as that says what it is."""
    name, table = feature.name, feature.table
    if name not in model.features:
        raise ValueError(f"model: there is no feature {name!r}; model {model.name!r} has {', '.join(model.features)}")
    found = model.tables[model.features[name].table]
    for what, mine, its in (("name", table.name, found.name), ("vocabulary_size", table.vocabulary_size, found.vocabulary_size),
                            ("embedding_dim", table.embedding_dim, found.embedding_dim),
                            ("combiner", found.combiner if table.combiner == "max" else table.combiner, found.combiner),  # the layer takes the largest
                            ("optimizer", found.optimizer if found.optimizer in optimizer.kinds else optimizer.kinds[0], found.optimizer)):
        if mine != its and its != "none":  # without an optimizer it is only looked up
            raise ValueError(f"feature {name!r}: table: {what}: {mine!r} is not allowed, for that of model {model.name!r} is {its!r}")
    shape = model.features[name].output_shape
    if shape[1:] not in ((), _positions(feature)):
        raise ValueError(f"model: feature {name!r} has the output_shape {list(shape)}; that of its FeatureConfig must be "
                         f"(samples, {', '.join(map(str, shape[1:]))}, embedding_dim)")


def _check_shared(optimizers: Mapping[str, TableOptimizer], stacks: Mapping[str, Any]) -> None:
    """stacks: by table."""
    found = unequal({name: (optimizers[name].rate, optimizers[name].schedule) for name in stacks}, stacks)
    if found:
        raise ValueError(f"table {found[1]!r}: optimizer: a learning rate other than that of table {found[0]!r} is not allowed, for they are in one stack, "
                         "whose tables share one; give both the same, or make the layer with table_stacking=None and a model of its own")


def _plan(table_stacking: Any, tables: Mapping[str, Any], optimizers: Mapping[str, TableOptimizer]) -> Optional[config.PlanConfig]:
    if table_stacking == "auto":
        groups = apart({name: one.schedule for name, one in optimizers.items()},
                       {name: kind_of(tables[name].embedding_dim, one.declared) for name, one in optimizers.items()})
        return config.PlanConfig(groups=groups) if groups else None
    if table_stacking is None:
        return config.PlanConfig(auto_stack=False)
    lists = [table_stacking] if table_stacking and isinstance(table_stacking[0], str) else table_stacking
    _check_shared(optimizers, {name: place for place, names in enumerate(lists) for name in names if name in optimizers})
    return config.PlanConfig(auto_stack=False, groups=[config.StackGroup(list(names)) for names in lists])


@keras.saving.register_keras_serializable("emberd")
class DistributedEmbedding(Checkpointed, keras.layers.Layer):
    """keras-rs's layer, on a cluster of emberd: ids in a nested structure in, float32 (samples, embedding_dim) in the same
    structure out.

    feature_configs: a nested structure of FeatureConfig; those of keras-rs do as well.
    table_stacking: "auto", None, or names of tables that are to be stacked, in lists. Tables of a stack share one learning rate
      in each step; else results do not depend on it. With "auto", those with different schedules are not stacked.
    update_stats: not needed; the cluster tunes itself.
    client: of the cluster. Default: the one at the address in EMBERD_ADDRESS, or one that is started for this process.
    model: the name under which the tables are declared, by default that of the layer. If they are there already, they are gone
      on with, rows and all. Or a declared emberd.Model with these tables and features: ValueError if a name, a size, a combiner
      but for "max" of the layer, or the kind of an optimizer is another. It trains at the learning rates of the layer. Whatever
      else its tables were declared with stays as it is and is not compared: initializers, and other numbers of optimizers, as
      Adam's, which is to have bias_correction=False and sum_inside_sqrt=False.
    group, rank, size, patience: as in emberd.jax.Embedding. The gradients of all ranks are summed.
    partial: a call may leave features of a dict out, as one tower of two does: it looks up, trains and returns those that it has.

    In training a call makes a step: its backward pass sends the update, which the optimizer of each table makes. A model calls
    the layer once, with all features. Evaluation and prediction only look up. A call without `training=True`, as in a loop of
    one's own or in a model whose `call` has no such argument, trains, too, where it is differentiated; on PyTorch and
    TensorFlow its step begins in the backward pass, which looks the rows up once more. Set `trainable = False`, or put
    keras.ops.stop_gradient around what the layer gives, where a loss is differentiated for something else than training, as
    with respect to an input: a tape of TensorFlow comes by here whatever it is asked for. An update that is refused, as with a
    gradient that is NaN, changes no row, and the step is skipped. On JAX, which would lose the variables of the model, it
    warns; the error is raised by the next `preprocess` in Python, and by `next_step`, `get_embedding_tables` and `finish`. What
    else fails there, as a lookup of an id beyond its table, and Ctrl-C, `fit` raises when the batch has ended; where its lookup
    failed, the dense part has made that step with activations of zero.

    The loss must not be scaled, as mixed_float16 and `loss_scale_factor` of the model's optimizer do: training refuses them. A
    loop of one's own that scales it trains tables with scaled gradients.

    The one weight of the layer is a zero, which tells the backend that there is something to differentiate. Saved models hold
    no rows (see `tables`.save_checkpoint) but where the tables are: addresses of the cluster and name of the model, by which a
    loaded layer finds them, or is refused.

    On JAX, which cuts ids to 32 bits unless jax_enable_x64 is set, `preprocess` refuses those that do not fit. Those that a
    model is given directly have been cut before the layer sees them.
    """

    def __init__(self, feature_configs: Any, *, table_stacking: Any = "auto", update_stats: bool = False,
                 client: Optional[Client] = None, model: Union[str, Model, None] = None, group: str = "train",
                 rank: Optional[int] = None, size: Optional[int] = None, patience: float = 60.0, partial: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._convert_input_args = False  # ragged ids are lists of arrays
        self.supports_masking = any(_masks(feature) for feature, _ in _leaves(feature_configs, feature_configs))
        self._allow_non_tensor_positional_args = True
        self.supports_jit = keras.backend.backend() != "tensorflow"  # XLA of TensorFlow, which Keras takes where there is a GPU, has no calls of Python
        self.update_stats = update_stats
        self._held = _Tables(feature_configs, dict(client=checked(client), model=model, group=group, rank=rank, size=size,
                                                   patience=patience, partial=partial, table_stacking=table_stacking))

    def __dir__(self) -> List[str]:
        """Without what asks the cluster, or waits for other ranks, where Keras looks at all there is for parts to save."""
        saving = sys._getframe(1).f_globals.get("__name__", "").startswith("keras.src.saving")
        return [name for name in super().__dir__() if not saving or name not in ASKING]

    @property
    def tables(self) -> Model:
        """The model on the cluster: to read rows and to save checkpoints."""
        return self._held.declare(self.name)

    @property
    def learning_rates(self) -> Dict[str, float]:
        """By table, of those whose optimizer has a number above 0 as its rate."""
        self._held.declare(self.name)
        return dict(self._held.turns.rates)

    def set_learning_rates(self, rates: Mapping[str, float]) -> None:
        """Rates of some tables, from the next step on. Tables of a stack share one. They are saved with the weights of a model.
        `on_tables` lets callbacks of Keras set them."""
        self._held.declare(self.name)
        self._wait()
        self._held.turns.set_rates(rates)

    @property
    def next_step(self) -> int:
        """The step that comes next. Joins the group, which waits for its other ranks."""
        self._held.declare(self.name)
        self._wait()
        step: int = self._held.trainer.next_step
        return step

    built: bool

    def build(self, input_shapes: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # as in keras-rs
        """Makes the tables, or finds them."""
        if not self.built:
            self._held.declare(self.name)
            self.token = self.add_weight(name="token", shape=(), initializer="zeros", dtype="float32")
            self.built = True

    @property
    def variables(self) -> List[Any]:
        """As Keras has them."""
        if keras.backend.backend() == "jax":
            _loops.note_beginning()
        found: List[Any] = super().variables
        return found

    def save_own_variables(self, store: Any) -> None:
        """As Keras calls it: also the learning rates of tables, and at which step they are."""
        super().save_own_variables(store)
        for table, rate in self.learning_rates.items():
            store[f"{RATES}.{table}"] = np.array([rate])
        if not self.learning_rates:
            store[RATES] = np.zeros(0)  # which a layer that has some refuses
        self._finish_computing()
        steps = self._behind()
        step = steps.reached if steps.joined else self._held.turns.loaded  # joining might wait for other ranks
        if step is not None:
            store[STEP] = np.array([step])

    def load_own_variables(self, store: Any) -> None:
        """As Keras calls it: also the learning rates of tables, where they were saved. Warns where the tables are at another
        step than when they were."""
        names, of_table = list(store.keys()), f"{RATES}."
        super().load_own_variables({name: store[name] for name in names if name not in (RATES, STEP) and not name.startswith(of_table)})
        known = list(self.learning_rates)
        rates = {name[len(of_table):]: float(np.asarray(store[name])[0]) for name in names if name.startswith(of_table)}
        if RATES in names:
            before = np.asarray(store[RATES])
            if before.shape != (len(known),):
                raise ValueError(f"layer {self.name!r}: {before.size} learning rates of tables were saved; it has {len(known)}: {', '.join(known) or 'none'}")
            rates = dict(zip(known, map(float, before)))
        if rates:
            if set(rates) != set(known):
                raise ValueError(f"layer {self.name!r}: the learning rates of {', '.join(sorted(rates))} were saved; it has those of "
                                 f"{', '.join(sorted(known)) or 'no table'}")
            self.set_learning_rates(rates)
        if STEP in names:
            self._finish_computing()
            self._held.turns.note_loaded(int(np.asarray(store[STEP])[0]), self._behind())
        self._held.declare(self.name)._known = True  # who loads goes on

    def preprocess(self, inputs: Any, weights: Any = None, training: bool = False) -> Any:
        """Inputs, ragged ones too, as arrays that a jitted function takes. The result goes into `inputs` of the layer.

        Ragged ids are lists of lists, or of arrays, or tf.RaggedTensor. They are filled up to a power of two, so that little is
        compiled anew, which nothing is looked up for.
        """
        return self._prepare(inputs, weights)

    def _prepare(self, inputs: Any, weights: Any = None, sent: bool = False) -> Any:
        """sent: the ids go to the cluster from here, and not through the backend."""
        self._raise_refused()
        given = {feature.name: value for feature, value in self._given(inputs)}
        scales = {} if weights is None else {feature.name: value for feature, value in self._given(weights)}
        if weights is not None and set(scales) != set(given):
            raise ValueError(f"weights: those of {', '.join(scales)} are not allowed; they must be of the features that inputs have, {', '.join(given)}")
        for name, value in given.items():
            _check_kind(name, value)
            _check_shapes(self._held.features[name], value, scales.get(name))
        arrays = {name: _arrays(value, scales.get(name), name, sent) for name, value in given.items()}
        for name, parts in arrays.items():
            _check_range(self._held.features[name], parts.get("ids", parts.get("values")))
        return {PREPROCESSED: {"emberd": {name: _side_by_side(one) if _largest(self._held.features[name]) else one for name, one in arrays.items()}}}

    def _ids(self, prepared: Any) -> Dict[str, Any]:
        """Each position of a sequence is a sample of its own, unless the model has it so; Keras has to see batches of equal
        size before."""
        ids: Dict[str, Any] = _ids(prepared)
        for name, one in ids.items():
            rank = 1 + len(_positions(self._held.features[name]))
            if isinstance(one, Dense) and not _largest(self._held.features[name]) and rank > 1 >= len(self.tables.features[name].output_shape):
                ids[name] = map_arrays(functools.partial(_flattened, rank=rank), one)
            if _masks(self._held.features[name]):
                ids[name] = Sequences(ids[name].ids, mask_zero=True)
            elif _largest(self._held.features[name]):
                ids[name] = Sequences(ids[name].ids, padding_idx=NONE)
        return ids

    def _given(self, inputs: Any) -> Iterator[Tuple[FeatureConfig, Any]]:
        return _leaves(self._held.structure, inputs, self._held.options["partial"])

    def _packed(self, names: Container[str], get: Callable[[FeatureConfig], Any]) -> Any:
        return _pack(self._held.structure, names, get)

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        """In the structure of feature_configs: where an id stands that is not padding, bool (samples, positions), of the
        features with mask_zero, and None for others."""
        prepared = inputs[PREPROCESSED]["emberd"] if isinstance(inputs, Mapping) and PREPROCESSED in inputs else None
        given = {name: parts["ids"] if _masks(self._held.features[name]) else None for name, parts in prepared.items()} if prepared else {
            feature.name: value if _masks(feature) else None for feature, value in self._given(inputs)}
        return self._packed(given, lambda feature: keras.ops.not_equal(given[feature.name], 0) if _masks(feature) else None)

    def call(self, inputs: Any, weights: Any = None, training: bool = False) -> Any:
        """inputs: integers (samples,) or (samples, ids of a sample) in the structure of feature_configs; or what `preprocess`
        gave. weights: floats of the same shapes; they have no gradient, and ValueError refuses those that are trained: give
        keras.ops.stop_gradient(weights). A sequence, (samples, positions) or (samples, positions, ids of a position), gives
        (samples, positions, embedding_dim)."""
        refused = _loops.refusal(self.dtype_policy, self.name) if self.trainable else None
        if training and refused is not None:
            raise refused
        if not (isinstance(inputs, Mapping) and PREPROCESSED in inputs):
            inputs = self.preprocess(inputs, weights, training)
        elif weights is not None:
            raise ValueError("weights: not allowed with what `preprocess` gave, which holds its own; give them to `preprocess`")
        prepared = inputs[PREPROCESSED]
        ids = self._ids(prepared)
        found = self._held.call(self.token, ids, bool(training), prepared.get("step"), refused)
        return self._packed(ids, lambda feature: _rolled(feature, _combined(feature, found[feature.name], ids[feature.name])))

    def prefetch(self, batches: Iterable[Any], depth: int = 2,
                 inputs: Optional[Callable[[Any], Any]] = None) -> Iterator[Tuple[Any, Any]]:
        """What `preprocess` makes of the inputs of a batch, and the batch, one after the other; the ids of the next batches are
        on their way by then. Each is for one step of training, in this order:

            for prepared, (_, labels) in embedding.prefetch(batches):
                model.train_on_batch(prepared, labels)

        inputs: gives the inputs of a batch: by default its first part, or the batch itself if it is no tuple.
        depth: lookups that are under way at a time, that of the batch given included.
        `fit` takes `((prepared, labels) for prepared, (_, labels) in ...)`. It may draw batches beforehand: where it ends
        before they do, the next loop forgets what was sent, and so do `finish` and a step without `prefetch`.
        """
        self._held.declare(self.name)
        if self._held.accumulates:
            raise ValueError("prefetch: not allowed with gradient_accumulation_steps, where the ids of a step are known only when it ends")

        def send(batch: Any) -> Any:
            prepared = self._prepare(inputs(batch) if inputs else batch[0] if isinstance(batch, tuple) else batch, sent=True)
            ids = {name: _steps.on_host(value) for name, value in self._ids(prepared[PREPROCESSED]).items()}
            prepared[PREPROCESSED]["step"] = np.full(1, trainer.send_of_loop(ids), np.int32)
            return prepared

        loop = object()
        trainer = self._held.trainer if isinstance(self._held.trainer, Trainer) else self._held.trainer._trainer

        def begin() -> None:
            self._wait()
            trainer.begin_loop(loop)

        def forget(batches: List[Any]) -> None:
            self._wait()
            trainer.forget([int(one[PREPROCESSED]["step"][0]) for one in batches], loop)

        return ahead(batches, send, self._held.paces.of(depth), forget, begin)

    def compute_output_shape(self, input_shapes: Any) -> Any:
        """In the structure of feature_configs."""
        names: Container[str] = self._held.features
        if self._held.options["partial"]:
            names = input_shapes[PREPROCESSED]["emberd"] if PREPROCESSED in input_shapes else [feature.name for feature, _ in self._given(input_shapes)]
        return self._packed(names, lambda feature: tuple(feature.output_shape))

    def get_embedding_tables(self) -> Dict[str, Any]:
        """Copies of the tables as they are now, (vocabulary_size, embedding_dim) by name. Of large ones read parts:
        `tables.export`."""
        self._wait()
        return {name: keras.ops.convert_to_tensor(self.tables.table(name)) for name in self._held.tables}

    def set_embedding_tables(self, tables: Mapping[str, Any]) -> None:
        """Overwrites whole tables; the slots of optimizers stay."""
        self._wait()
        given: Dict[str, Any] = {}
        for name, values in tables.items():  # before the first is written
            if name not in self._held.tables:
                raise ValueError(f"tables: {name!r} is not a table of this layer; they are {', '.join(self._held.tables)}")
            array = as_floats(values if isinstance(values, np.ndarray) else keras.ops.convert_to_numpy(values), f"tables: {name!r}")
            table = self._held.tables[name]
            if array.shape != (table.vocabulary_size, table.embedding_dim):
                raise ValueError(f"tables: {name!r}: the shape {array.shape} is not allowed; it must be "
                                 f"{(table.vocabulary_size, table.embedding_dim)}")
            check_finite(array, f"tables: {name!r}")
            given[name] = array
        for name, array in given.items():
            self.tables.load_table(name, array)

    def typed_errors(self) -> ContextManager[None]:
        """Raises what steps in the block fail with as it is, an IndexError for an id beyond its table, in place of the error
        that JAX or TensorFlow makes of it, and which is its cause:

            with layer.typed_errors():
                model.fit(...)
        """
        self._held.declare(self.name)
        backend = keras.backend.backend()
        if backend == "jax":
            jax: ContextManager[None] = self._held.trainer.typed_errors()
            return jax
        if backend == "tensorflow":
            from .._in_tensorflow import typed_errors

            return typed_errors()
        return contextlib.nullcontext()

    def _wait(self) -> None:
        """Until what JAX has been given to compute has been computed."""
        self._finish_computing()
        self._raise_refused()

    def _finish_computing(self) -> None:
        if self._held.trainer is not None and keras.backend.backend() == "jax":
            self._held.trainer._in_jit.wait()

    def _raise_refused(self) -> None:
        if self._held.trainer is not None and keras.backend.backend() == "jax":
            self._held.trainer._in_jit.raise_refused()

    def _behind(self) -> Steps:
        self._held.declare(self.name)
        steps: Steps = self._held.trainer._behind()
        return steps

    def restart(self, step: int) -> None:
        """As emberd.jax.Embedding.restart: goes on from this step of the tables, as after a restore."""
        self._held.declare(self.name)
        self._held.trainer.restart(step)
        self._held.turns.forget()

    def finish(self) -> None:
        """Leaves the group, once all updates have been made and checkpoints saved. The next step joins again."""
        if self._held.trainer is not None:
            self._held.trainer.finish()
            self._held.turns.forget()
            self._raise_refused()

    @classmethod
    def has_sparsecores(cls) -> bool:
        """The cluster emulates them."""
        return True

    def get_config(self) -> Dict[str, Any]:
        """What `from_config` takes."""
        names = list(self._held.tables)

        def serialized(feature: FeatureConfig) -> Dict[str, Any]:
            return {"name": feature.name, "table": names.index(feature.table.name), "input_shape": feature.input_shape,
                    "output_shape": feature.output_shape, "mask_zero": _masks(feature)}

        given = {name: value for name, value in self._held.options.items() if name != "client"}
        model = self._held.model or given["model"]
        if isinstance(model, Model):  # the tables are there
            given.update(model=model.name, cluster=model.client.addresses, is_given=isinstance(given["model"], Model))
        tables: List[Any] = [table.get_config() for table in self._held.tables.values()]
        return {**super().get_config(), **given, "update_stats": self.update_stats, "tables": tables,
                "feature_configs": _described(self._held.structure, serialized)}

    @classmethod
    def from_config(cls, config: Dict[str, Any]) -> "DistributedEmbedding":
        """Finds the tables again, if they were there; else a client is that of `default_client`. "client" may be put into the
        config."""
        from ._config import TableConfig

        values = dict(config)
        cluster, is_given = values.pop("cluster", None), values.pop("is_given", False)
        if cluster:
            values["client"] = find_again(values.get("client"), cluster, values["model"])
            if is_given:  # its tables may have been declared otherwise than those of the layer
                values["model"] = values["client"].model(values["model"])
        tables = [TableConfig.from_config(table) for table in values.pop("tables")]

        def made(one: Any) -> Any:
            if isinstance(one, Mapping) and isinstance(one.get("name"), str) and "input_shape" in one:
                return FeatureConfig(one["name"], tables[one["table"]], tuple(one["input_shape"]), tuple(one["output_shape"]),
                                     one.get("mask_zero", False))
            if isinstance(one, Mapping) and set(one) == {NAMED, "parts"} and isinstance(one[NAMED], (list, tuple)):
                name, *fields = one[NAMED]
                return collections.namedtuple(name, fields, rename=True)(*map(made, one["parts"]))
            if isinstance(one, Mapping):
                return {key: made(part) for key, part in one.items()}
            return _like(one, (made(part) for part in one))

        return cls(made(values.pop("feature_configs")), **values)


def _ids(prepared: Mapping[str, Any]) -> Dict[str, Any]:
    return {name: Ragged(parts["values"], parts["row_splits"], parts.get("weights")) if "row_splits" in parts
            else Dense(parts["ids"], parts.get("weights")) for name, parts in prepared["emberd"].items()}


def _positions(feature: Any) -> Tuple[int, ...]:
    positions: Tuple[int, ...] = FeatureConfig.positions.fget(feature)  # type: ignore[attr-defined]  # that of keras-rs has none
    return positions


def _masks(feature: Any) -> bool:
    return bool(getattr(feature, "mask_zero", False))  # that of keras-rs has none


def _largest(feature: Any) -> bool:
    """Whether rows come for each id, of which the layer takes the largest."""
    return feature.table.combiner == "max" and not _masks(feature)  # with mask_zero each position has one id


def _side_by_side(parts: Dict[str, Any]) -> Dict[str, Any]:
    """Ragged ids as an array (samples, ids of a sample), filled up to a power of two; of TensorFlow's, while it traces, as far
    as the longest."""
    if "row_splits" not in parts:
        return parts
    if not isinstance(parts["row_splits"], np.ndarray):
        import tensorflow as tf

        from_row_splits: Any = getattr(tf.RaggedTensor, "from_row_splits")  # the stubs that checkers have lack it
        return {"ids": from_row_splits(parts["values"], parts["row_splits"]).to_tensor(NONE)}
    lengths = np.diff(parts["row_splits"])
    ids = np.full((len(lengths), 1 << max(0, int(lengths.max(initial=1)) - 1).bit_length()), NONE, parts["values"].dtype)
    ids[np.arange(ids.shape[1]) < lengths[:, None]] = parts["values"][:parts["row_splits"][-1]]
    return {"ids": ids}


def _combined(feature: Any, found: Any, ids: Any) -> Any:
    """The largest of the rows of a sample. Keras's max would give each of equal ones a part of the gradient."""
    if not _largest(feature) or len(ids.ids.shape) < 2 + len(_positions(feature)):
        return found
    ops: Any = keras.ops
    counted = ops.where(ops.expand_dims(ops.not_equal(ids.ids, NONE), -1), ops.stop_gradient(found), -math.inf)  # the row of none is zero
    if not found.shape[-2]:  # perhaps no sample has an id: zeros behind the rows, which are taken where there are none
        behind = [[0, 0]] * (len(found.shape) - 2) + [[0, 1], [0, 0]]
        found, counted = ops.pad(found, behind), ops.pad(counted, behind, constant_values=-math.inf)
    return ops.squeeze(ops.take_along_axis(found, ops.argmax(counted, axis=-2, keepdims=True), axis=-2), -2)


def _check_mask(feature: Any) -> None:
    if _masks(feature) and (not _positions(feature) or len(feature.input_shape) >= len(feature.output_shape)):
        raise ValueError(f"feature {feature.name!r}: mask_zero: True is not allowed for input_shape {tuple(feature.input_shape)} and output_shape "
                         f"{tuple(feature.output_shape)}; it is for sequences of one id for each position: (samples, positions) and (samples, "
                         "positions, embedding_dim)")
    _positions(feature)


def _check_shapes(feature: Any, values: Any, weights: Any) -> None:
    if _largest(feature) and weights is not None:
        raise ValueError(f"feature {feature.name!r}: weights: not allowed with combiner 'max', which combines rows as they are")
    positions = _positions(feature)
    shape, of_weights = tuple(getattr(values, "shape", ())), tuple(getattr(weights, "shape", ()))
    if positions and (hasattr(values, "row_splits") or positions not in (shape[1:], shape[1:-1])):
        text = ", ".join(map(str, positions))
        raise ValueError(f"feature {feature.name!r}: {f'the shape {shape}' if shape else f'a {type(values).__name__}'} is not allowed; a sequence is "
                         f"an array of the shape (samples, {text}) or (samples, {text}, ids of a position), filled up")
    if _masks(feature) and (weights is not None or shape[1:] != positions):
        raise ValueError(f"feature {feature.name!r}: {'weights' if weights is not None else f'the shape {shape}'}: not allowed with mask_zero, which takes "
                         "one id for each position, without weights")
    if positions and weights is not None and of_weights not in (shape, (1,)):
        raise ValueError(f"feature {feature.name!r}: weights of the shape {of_weights} are not allowed; they must have that of the ids, {shape}")
    if not positions and not isinstance(values, (list, tuple)) and len(values.shape) not in (1, 2):
        raise ValueError(f"feature {feature.name!r}: the shape {shape} is not allowed; it must be (samples,) or (samples, ids of a sample)")


def _flattened(array: Any, rank: int) -> Any:
    """So many dimensions as one."""
    shape: Any = array.shape if isinstance(array, np.ndarray) else keras.ops.shape(array)
    return (np.reshape if isinstance(array, np.ndarray) else keras.ops.reshape)(array, (-1, *shape[rank:]))


def _rolled(feature: Any, found: Any) -> Any:
    positions = _positions(feature)
    return keras.ops.reshape(found, (-1, *positions, found.shape[-1])) if positions else found


def _check_kind(name: str, values: Any) -> None:
    """Of tensors. Arrays of NumPy and ragged ones are looked at where they are converted."""
    if hasattr(values, "dense_shape") or hasattr(values, "todense") or isinstance(values, (Dense, Ragged, Sequences, Sparse)):  # Keras would put id 0 where there is none
        raise TypeError(f"feature {name!r}: a {type(values).__name__} is not allowed; give a list of ids for each sample, or a tf.RaggedTensor")
    if isinstance(values, np.ndarray) or not hasattr(values, "dtype") or (hasattr(values, "row_splits") and not _is_traced(values)):
        return
    kind = keras.backend.standardize_dtype(values.dtype)
    if not kind.lstrip("u").startswith("int"):
        raise TypeError(f"feature {name!r}: {kind} is not allowed; ids are int32 or int64, and so is what keras.Input gives: "
                        'dtype="int32"')


def _is_traced(ragged: Any) -> bool:
    """Whether TensorFlow traces a function, as `fit` does, and the ids are not known yet."""
    return not hasattr(ragged.flat_values, "numpy")


def _check_range(feature: Any, ids: Any) -> None:
    """Of ids of NumPy. Others are seen when they are looked up."""
    if isinstance(ids, np.ndarray) and ids.size:
        rows, lowest = feature.table.vocabulary_size, NONE if _largest(feature) else 0
        for one in (int(ids.min()), int(ids.max())):
            if not lowest <= one < rows:
                raise OutOfRange(f"feature {feature.name!r}: id {one} is not allowed; table {feature.table.name!r} has the rows "
                                 f"[0, {rows})")


def _arrays(values: Any, weights: Any, name: str, sent: bool) -> Dict[str, Any]:
    """One feature as arrays: "ids", or "values" and "row_splits"; and "weights"."""
    what = f"feature {name!r}"
    if hasattr(values, "row_splits"):  # tf.RaggedTensor
        if weights is not None and not hasattr(weights, "row_splits"):
            raise ValueError(f"{what}: weights: a {type(weights).__name__} is not allowed for a RaggedTensor of ids; they must be one, too")
        if _is_traced(values):
            return _traced(values, weights, what)
        splits, flat, ids = np.asarray(values.row_splits), None, np.asarray(values.flat_values)
        if weights is not None:
            _check_rows(what, np.diff(np.asarray(weights.row_splits)), np.diff(splits))
            flat = np.asarray(weights.flat_values)
        return _filled(_steps.as_ids(ids if ids.size else np.zeros(0), what, sent), splits, flat)
    if isinstance(values, (list, tuple)) or (isinstance(values, np.ndarray) and values.dtype == object):
        rows = [as_ints(row, what).reshape(-1) for row in values]  # one by one: an empty list is one of floats
        lengths, flat = [len(row) for row in rows], None
        if weights is not None:
            some = [np.asarray(unmasked(row, f"{what}: weights"), np.float32).reshape(-1) for row in weights]
            _check_rows(what, [len(row) for row in some], lengths)
            flat = np.concatenate(some) if some else np.zeros(0, np.float32)
        return _filled(_steps.as_ids(np.concatenate(rows) if rows else np.zeros(0), what, sent), np.cumsum([0, *lengths]), flat)
    if isinstance(values, np.ndarray):
        values = _steps.as_ids(values, what, sent)
    return {"ids": values} if weights is None else {"ids": values, "weights": unmasked(weights, f"{what}: weights")}


def _traced(values: Any, weights: Any, what: str) -> Dict[str, Any]:
    """Of a tf.RaggedTensor in a function: its sizes are known where it is looked up."""
    parts = {"values": values.flat_values, "row_splits": values.row_splits}
    if weights is not None:
        import tensorflow as tf

        tf.debugging.assert_equal(tf.cast(weights.row_splits, tf.int64), tf.cast(values.row_splits, tf.int64), f"{what}: weights: there must be one for each id")
        parts["weights"] = tf.cast(weights.flat_values, tf.float32)
    return parts


def _check_rows(what: str, weights: Any, ids: Any) -> None:
    """Of how many there are in each sample."""
    if len(weights) != len(ids):
        raise ValueError(f"{what}: {len(weights)} rows of weights are not allowed for {len(ids)} rows of ids")
    for place in np.flatnonzero(np.not_equal(weights, ids))[:1]:
        raise ValueError(f"{what}: {weights[place]} weights in row {place} are not allowed for its {ids[place]} ids; there must be "
                         "one for each id")


def _filled(values: Any, splits: Any, weights: Any) -> Dict[str, Any]:
    size = 1 << max(0, len(values) - 1).bit_length()
    missing = size - len(values)
    parts = {"values": np.pad(values, (0, missing)), "row_splits": splits.astype(np.int32)}
    if weights is not None:
        parts["weights"] = np.pad(weights.astype(np.float32), (0, missing))
    return parts
