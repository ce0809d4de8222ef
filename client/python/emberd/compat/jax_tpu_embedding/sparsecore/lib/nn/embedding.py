"""Preprocessing, lookup and update, with the names and signatures of jax-tpu-embedding."""

from __future__ import annotations

import math
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, TypeVar, Union

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from emberd.arrays import Ragged, as_array, as_int32, as_ints, unmasked
from emberd.compat.jax_tpu_embedding._tables import EmbeddingVariables, make, of
from emberd.compat.jax_tpu_embedding.sparsecore.utils import utils
from . import table_stacking
from ._sizes import compute_coo_buffer_size_per_device, compute_row_pointers_size_per_device, compute_theoretical_max_coo_buffer_size
from ._sizes import sparsecores as _sparsecores
from ._statistics import SparseDenseMatmulInputStats
from .embedding_spec import FeatureSpec, StackedTableSpec, TableSpec
from .table_stacking import LimitsCallable, get_default_limits

__all__ = ["EmbeddingVariables", "PreprocessedInput", "SparseDenseMatmulInput", "SparseDenseMatmulInputStats",
           "auto_stack_tables", "compute_coo_buffer_size_per_device", "compute_row_pointers_size_per_device",
           "compute_theoretical_max_coo_buffer_size", "create_proto_from_feature_specs", "dense_input",
           "eval_preprocess_sparse_dense_matmul_input_shape", "get_all_reduce_interface", "get_stacked_table_specs", "get_table_specs",
           "init_embedding_variables", "prepare_feature_specs_for_training", "preprocess_sparse_dense_matmul_input",
           "preprocess_sparse_dense_matmul_input_from_sparse_tensor", "tpu_sparse_dense_matmul",
           "tpu_sparse_dense_matmul_grad", "update_preprocessing_parameters"]

T = TypeVar("T")
ArrayLike = Any
Nested = Union[T, Sequence[T], Mapping[str, T]]


class SparseDenseMatmulInput(NamedTuple):
    """Ids by the name of the feature: those of sample i are lhs_embedding_ids[lhs_row_pointers[i]:lhs_row_pointers[i + 1]].

    What is beyond the last pointer fills ragged ids up to a power of two, so that little is compiled anew.
    """

    lhs_row_pointers: Mapping[str, Any]
    lhs_embedding_ids: Mapping[str, Any]
    lhs_sample_ids: Mapping[str, Any]  # none: the pointers say it
    lhs_gains: Mapping[str, Any]  # weights, of the features that have some


class PreprocessedInput(NamedTuple):
    sparse_dense_matmul_input: SparseDenseMatmulInput
    num_minibatches: Any = np.array(1)

    def replace(self, **updates: Any) -> "PreprocessedInput":
        """With other values of these fields."""
        return self._replace(**updates)

    @property
    def lhs_row_pointers(self) -> Mapping[str, Any]:
        return self.sparse_dense_matmul_input.lhs_row_pointers

    @property
    def lhs_embedding_ids(self) -> Mapping[str, Any]:
        return self.sparse_dense_matmul_input.lhs_embedding_ids

    @property
    def lhs_sample_ids(self) -> Mapping[str, Any]:
        return self.sparse_dense_matmul_input.lhs_sample_ids

    @property
    def lhs_gains(self) -> Mapping[str, Any]:
        return self.sparse_dense_matmul_input.lhs_gains


def _check_strategy(sharding_strategy: str) -> None:
    if sharding_strategy.upper() != "MOD":
        raise ValueError(f"sharding_strategy: {sharding_strategy!r} is not allowed; it must be 'MOD'")


def _check_leading(has_leading_dimension: bool) -> None:
    if has_leading_dimension:
        raise ValueError("has_leading_dimension: True is not allowed; pmap is not supported, use jit")


def get_table_specs(feature_specs: Any) -> Dict[str, TableSpec]:
    """Tables by name. Features may have copies of one. ValueError for different tables, and for features, of one name."""
    features: List[FeatureSpec] = jax.tree.leaves(feature_specs)
    names = [feature.name for feature in features]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise ValueError(f"feature_specs: the name {repeated[0]!r} is given to {names.count(repeated[0])} features")
    return table_stacking._tables_of(features)


def get_stacked_table_specs(feature_specs: Any) -> Dict[str, StackedTableSpec]:
    """Stacks by name."""
    stacks = {}
    for table in get_table_specs(feature_specs).values():
        if table.stacked_table_spec is None:
            raise ValueError(f"table {table.name!r}: call prepare_feature_specs_for_training before")
        stacks[table.stacked_table_spec.stack_name] = table.stacked_table_spec
    return stacks


def prepare_feature_specs_for_training(feature_specs: Any, global_device_count: int,
                                       num_sc_per_device: Optional[int] = None) -> None:
    """Makes a stack of its own of each table that is in none. The specifications are changed in place."""
    in_order = sorted(jax.tree.leaves(feature_specs), key=lambda feature: str(feature.name))  # of their samples in the stack
    for name, table in get_table_specs(feature_specs).items():
        if not table.is_stacked():
            table_stacking.stack_tables(in_order, [name], global_device_count, _sparsecores(num_sc_per_device))
            table_stacking.set_limits(in_order, name, suggested_coo_buffer_size_per_device=table.suggested_coo_buffer_size_per_device)


def auto_stack_tables(feature_specs: Any, global_device_count: int, num_sc_per_device: Optional[int] = None,
                      stack_to_max_ids_per_partition: LimitsCallable = get_default_limits,
                      stack_to_max_unique_ids_per_partition: LimitsCallable = get_default_limits,
                      use_short_stack_names: bool = True, *, activation_mem_bytes_limit: Optional[int] = None) -> None:
    """Stacks tables of equal width and optimizer. The specifications are changed in place."""
    table_stacking.auto_stack_tables(feature_specs, global_device_count, _sparsecores(num_sc_per_device), None,
                                     stack_to_max_ids_per_partition, stack_to_max_unique_ids_per_partition,
                                     use_short_stack_names=use_short_stack_names, activation_mem_bytes_limit=activation_mem_bytes_limit)


def init_embedding_variables(rng: Any, table_specs: Any, global_sharding: Any,
                             num_sparsecore_per_device: Optional[int] = None,
                             bypass_mesh_check: bool = False) -> Dict[str, EmbeddingVariables]:
    """Makes the tables on the cluster; by stack, what stands for them. See `use` for which cluster that is."""
    if len(global_sharding.spec) != 2:
        raise ValueError(f"global_sharding: {global_sharding.spec} is not allowed; it must be PartitionSpec(axis, None)")
    devices = global_sharding.mesh.size
    if devices != jax.process_count():
        raise ValueError(f"global_sharding: a mesh of {devices} devices is not allowed; it must have one for each of the "
                         f"{jax.process_count()} processes: tables are spread over the shards of the cluster instead")
    stacks = table_stacking.get_table_stacks(table_specs)
    made = make(rng, stacks, devices * _sparsecores(num_sparsecore_per_device), global_sharding)
    # An array of its own each time: they may be donated.
    return {name: EmbeddingVariables(made + 0, tables[0].optimizer.slot_type(*(
        made[:, 2:] for _ in range(tables[0].optimizer.slot_variables_count())))) for name, tables in stacks.items()}


def preprocess_sparse_dense_matmul_input(
        features: Nested[Any], features_weights: Optional[Nested[Any]], feature_specs: Nested[Any], local_device_count: int,
        global_device_count: int, *, num_sc_per_device: Optional[int] = None, sharding_strategy: str = "MOD",
        has_leading_dimension: bool = False, allow_id_dropping: bool = False, batch_number: int = 0,
        enable_minibatching: bool = False, all_reduce_interface: Any = None,
) -> Tuple[PreprocessedInput, SparseDenseMatmulInputStats]:
    """Ids, and weights if any, as arrays of NumPy. No id is ever dropped.

    features: in the structure of feature_specs, arrays [samples, ids of a sample], or of arrays of ids.
    """
    _check_strategy(sharding_strategy)
    _check_leading(has_leading_dimension)
    specs: List[FeatureSpec] = jax.tree.leaves(feature_specs)
    weights = {} if features_weights is None else by_name(feature_specs, features_weights, "features_weights")
    pointers: Dict[str, Any] = {}
    ids: Dict[str, Any] = {}
    gains: Dict[str, Any] = {}
    given = by_name(feature_specs, features, "features")
    for spec in specs:
        pointers[spec.name], ids[spec.name], some = _compressed(given[spec.name], weights.get(spec.name), spec)
        if some is not None:
            gains[spec.name] = some
    made = PreprocessedInput(SparseDenseMatmulInput(pointers, ids, {}, gains), np.full(local_device_count, 1))
    return made, SparseDenseMatmulInputStats.of_batch(specs, pointers, ids, local_device_count, global_device_count,
                                                      _sparsecores(num_sc_per_device))


def preprocess_sparse_dense_matmul_input_from_sparse_tensor(
        indices: Nested[Any], values: Nested[Any], dense_shapes: Nested[Any], feature_specs: Nested[Any], local_device_count: int,
        global_device_count: int, *, num_sc_per_device: Optional[int] = None, sharding_strategy: str = "MOD",
        has_leading_dimension: bool = False, allow_id_dropping: bool = False, batch_number: int = 0,
        enable_minibatching: bool = False, all_reduce_interface: Any = None,
) -> Tuple[PreprocessedInput, SparseDenseMatmulInputStats]:
    """As preprocess_sparse_dense_matmul_input. indices: [n, 2], by sample; values: [n]; dense_shapes: [2]."""
    parts = [by_name(feature_specs, part, what)
             for part, what in ((indices, "indices"), (values, "values"), (dense_shapes, "dense_shapes"))]
    features = jax.tree.map(lambda spec: _rows_of(spec.name, *(part[spec.name] for part in parts)), feature_specs)
    return preprocess_sparse_dense_matmul_input(
        features, None, feature_specs, local_device_count, global_device_count, num_sc_per_device=num_sc_per_device,
        sharding_strategy=sharding_strategy, has_leading_dimension=has_leading_dimension, allow_id_dropping=allow_id_dropping,
        batch_number=batch_number, enable_minibatching=enable_minibatching, all_reduce_interface=all_reduce_interface)


def _rows_of(name: str, indices: Any, values: Any, shape: Any) -> Any:
    """Arrays of ids by sample, of ids with coordinates."""
    places, ids = as_ints(indices, f"feature {name!r}: indices"), as_ints(values, f"feature {name!r}: values")
    count = int(np.asarray(shape)[0])
    if places.ndim != 2 or ids.shape != places.shape[:1]:
        raise ValueError(f"feature {name!r}: indices of the shape {list(places.shape)} are not allowed for values of the shape {list(ids.shape)}; they must be "
                         "[n, 2] for [n]")
    samples = places[:, 0]
    if len(samples) and not 0 <= samples.min() <= samples.max() < count:
        wrong = samples[(samples < 0) | (samples >= count)][0]
        raise ValueError(f"feature {name!r}: indices: the sample {wrong} is not allowed; dense_shape[0] allows [0, {count})")
    after = np.flatnonzero(samples[1:] < samples[:-1]) + 1
    if len(after):
        raise ValueError(f"feature {name!r}: indices: the sample {samples[after[0]]} is not allowed behind {samples[after[0] - 1]}; samples must be in order")
    rows = np.empty(count, object)
    rows[:] = np.split(ids, np.searchsorted(samples, np.arange(1, count))) if count else []
    return rows


def eval_preprocess_sparse_dense_matmul_input_shape(
        feature_specs: Nested[Any], local_device_count: int, global_device_count: int, *, num_sc_per_device: Optional[int] = None,
        has_leading_dimension: bool = False, enable_minibatching: bool = False) -> PreprocessedInput:
    """The shapes of what `preprocess_sparse_dense_matmul_input` gives for arrays of ids of the features' input_shape, without weights; where
    that is [samples]: for one id of each position of output_shape. How many ragged ids there are is not known before."""
    _check_leading(has_leading_dimension)
    local = {spec.name: math.prod(spec.output_shape[:-1]) * local_device_count // global_device_count for spec in jax.tree.leaves(feature_specs)}
    valency = {spec.name: spec.input_shape[-1] if len(spec.input_shape) > 1 and spec.input_shape[1:] != spec.output_shape[1:-1] else 1
               for spec in jax.tree.leaves(feature_specs)}
    return PreprocessedInput(SparseDenseMatmulInput(
        {name: jax.ShapeDtypeStruct((samples + 1,), jnp.int32) for name, samples in local.items()},
        {name: jax.ShapeDtypeStruct((samples * valency[name],), jnp.int32) for name, samples in local.items()}, {}, {}),
        jax.ShapeDtypeStruct((local_device_count,), jnp.int32))


def get_all_reduce_interface(peer_addresses: Sequence[str], minibatching_port: int, host_id: Optional[int] = None,
                             host_count: Optional[int] = None) -> None:
    """None, which preprocessing takes: the cluster splits batches, so that hosts have nothing to agree on."""


_NARROW = "ids are int32 here, as in jax-tpu-embedding; emberd.jax.Embedding.send takes int64"


def _as_ids(array: Any, name: str) -> Any:
    what = f"feature {name!r}"
    return as_int32(as_ints(array, what), what, _NARROW)


def by_name(feature_specs: Nested[Any], tree: Nested[Any], what: str) -> Dict[str, Any]:
    """By the name of the feature, what stands in its place in a tree."""

    def leaves(specs: Any, part: Any, path: str) -> Iterator[Tuple[str, Any]]:
        if isinstance(specs, Mapping):  # of whatever kind: Flax makes FrozenDict of a dict
            if not isinstance(part, Mapping) or set(part) != set(specs):
                raise ValueError(f"{path}: it must have the structure of feature_specs, a mapping of {', '.join(map(str, specs))}; "
                                 f"got {', '.join(map(str, part)) if isinstance(part, Mapping) else type(part).__name__}")
            for key in specs:
                yield from leaves(specs[key], part[key], f"{path}[{key!r}]")
        elif isinstance(specs, (list, tuple)):
            if not isinstance(part, (list, tuple)) or len(part) != len(specs):
                raise ValueError(f"{path}: it must have the structure of feature_specs, a sequence of {len(specs)}; got {type(part).__name__}")
            for place, spec in enumerate(specs):
                yield from leaves(spec, part[place], f"{path}[{place}]")
        else:
            yield specs.name, part

    return dict(leaves(feature_specs, tree, what))


def _dense_pointers(shape: Tuple[int, ...], spec: FeatureSpec, devices: int = 1) -> Any:
    """Row pointers of ids of a shape: that of the activations without columns, one id for each; or with one dimension more."""
    inner, flat = spec.output_shape[1:-1], math.prod(spec.output_shape[:-1]) // jax.process_count()
    if len(shape) == 1 or shape[1:] == inner:
        samples, count = math.prod(shape), 1
    elif shape[1:-1] == inner or (len(shape) == 2 and shape[0] == flat):  # positions may be samples, too
        samples, count = math.prod(shape[:-1]), shape[-1]
    else:
        wanted = "".join(f", {one}" for one in inner)
        raise ValueError(f"feature {spec.name!r}: the shape {list(shape)} is not allowed for output_shape {list(spec.output_shape)}; it must be "
                         f"[samples{wanted}], [samples{wanted}, ids], or [{flat}, ids]")
    if samples % (devices * math.prod(inner)):
        raise ValueError(f"feature {spec.name!r}: {samples} ids or rows of ids are not allowed for output_shape {list(spec.output_shape)}")
    return np.tile(np.arange(samples // devices + 1, dtype=np.int32) * np.int32(count), devices)


def dense_input(features: Nested[Any], feature_specs: Nested[Any], device_count: int = 1) -> PreprocessedInput:
    """Arrays of ids as they are, also inside of jitted functions, as preprocessed input. See FeatureSpec for their shapes."""
    pointers: Dict[str, Any] = {}
    ids: Dict[str, Any] = {}
    given = by_name(feature_specs, features, "features")
    for spec in jax.tree.leaves(feature_specs):
        array = given[spec.name]
        if not isinstance(array, jax.Array):  # of those, JAX has cut the ids to 32 bits before
            array = _as_ids(array, spec.name)
        elif not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"feature {spec.name!r}: {array.dtype} is not allowed; ids are whole numbers")
        pointers[spec.name], ids[spec.name] = _dense_pointers(array.shape, spec, device_count), array.reshape(-1)
    return PreprocessedInput(SparseDenseMatmulInput(pointers, ids, {}, {}), np.full(device_count, 1))


def _compressed(values: Any, weights: Any, spec: FeatureSpec) -> Tuple[Any, Any, Any]:
    """Row pointers, ids and weights of a feature."""
    name = spec.name
    array: Any = values if isinstance(values, list) else as_array(values, f"feature {name!r}")
    if isinstance(array, np.ndarray) and array.dtype != object:
        flat = None if weights is None else _dense_weights(name, weights, array.shape)
        return _dense_pointers(array.shape, spec), _as_ids(array.reshape(-1), name), flat
    if len(array) % math.prod(spec.output_shape[1:-1]):
        raise ValueError(f"feature {name!r}: {len(array)} rows of ids are not allowed for output_shape {list(spec.output_shape)}")
    rows = [as_ints(row, f"feature {name!r}").reshape(-1) for row in array]  # one by one: an empty list is one of floats
    splits = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32)
    size = 1 << max(0, int(splits[-1]) - 1).bit_length()
    ids = np.zeros(size, np.int32)
    ids[:splits[-1]] = _as_ids(np.concatenate(rows), name) if rows else []
    if weights is None:
        return splits, ids, None
    floats = np.zeros(size, np.float32)
    floats[:splits[-1]] = _ragged_weights(name, weights, rows)
    return splits, ids, floats


def _dense_weights(name: str, weights: Any, shape: Tuple[int, ...]) -> Any:
    try:
        floats = np.asarray(unmasked(weights, f"feature {name!r}: weights"), np.float32)
    except ValueError as error:  # rows of different lengths
        raise ValueError(f"feature {name!r}: weights for ids of the shape {list(shape)}: {error}") from error
    if floats.shape != shape:
        raise ValueError(f"feature {name!r}: weights of the shape {list(floats.shape)} are not allowed for ids of the shape {list(shape)}; "
                         "there must be one for each id")
    return floats.reshape(-1)


def _ragged_weights(name: str, weights: Any, ids: Sequence[Any]) -> Any:
    rows = [np.asarray(unmasked(row, f"feature {name!r}: weights"), np.float32).reshape(-1) for row in weights]
    if len(rows) != len(ids):
        raise ValueError(f"feature {name!r}: {len(rows)} rows of weights are not allowed for {len(ids)} rows of ids")
    for place, (row, of) in enumerate(zip(rows, ids)):
        if len(row) != len(of):
            raise ValueError(f"feature {name!r}: {len(row)} weights in row {place} are not allowed for its {len(of)} ids; there must be one for each id")
    return np.concatenate(rows) if rows else []


def _inputs(preprocessed: Any) -> SparseDenseMatmulInput:
    found: SparseDenseMatmulInput = getattr(preprocessed, "sparse_dense_matmul_input", preprocessed)
    return found


def _ids(inputs: SparseDenseMatmulInput) -> Dict[str, Ragged]:
    """In a callback."""
    result = {}
    for name, pointers in inputs.lhs_row_pointers.items():
        splits, values = np.asarray(pointers), np.asarray(inputs.lhs_embedding_ids[name])
        gains = inputs.lhs_gains.get(name)
        if gains is not None and np.shape(gains) != values.shape:
            raise ValueError(f"feature {name!r}: lhs_gains of the shape {list(np.shape(gains))} are not allowed for lhs_embedding_ids of the shape "
                             f"{list(values.shape)}")
        result[name] = Ragged(values[:splits[-1]], splits, None if gains is None else np.asarray(gains)[:splits[-1]])
    return result


def activation_shapes(preprocessed: Any, feature_specs: Nested[Any]) -> Dict[str, jax.ShapeDtypeStruct]:
    """Of the activations, with all columns of the table, by the name of the feature."""
    shapes = {}
    for spec in jax.tree.leaves(feature_specs):
        if spec.output_shape[-1] > spec.table_spec.embedding_dim:
            raise ValueError(f"feature {spec.name!r}: output_shape {list(spec.output_shape)} is not allowed; it may have {spec.table_spec.embedding_dim} columns, "
                             f"as many as table {spec.table_spec.name!r}")
        inner, samples = spec.output_shape[1:-1], len(preprocessed.lhs_row_pointers[spec.name]) - 1
        shapes[spec.name] = jax.ShapeDtypeStruct((samples // math.prod(inner), *inner, spec.table_spec.embedding_dim), jnp.float32)
    return shapes


def _call(callback: Any, result: Any, *arguments: Any) -> Any:
    # One after the other, which JAX has where there is one device; elsewhere the variables order them.
    return io_callback(callback, result, *arguments, ordered=jax.device_count() == 1)


def tpu_sparse_dense_matmul(
        preprocessed_inputs: Any, embedding_variables: Mapping[str, EmbeddingVariables], feature_specs: Nested[Any], *,
        global_device_count: int, sharding_strategy: str = "MOD", num_sc_per_device: Optional[int] = None,
        enable_minibatching: bool = False, perform_unstacking: bool = True,
        use_activation_unstack_primitive: bool = False) -> Any:
    """Activations in the structure of feature_specs, float32 [samples, columns], or as output_shape has them. In jit, shard_map or
    neither. The first lookup after an update begins a step; one that is never updated counts, and changes no row."""
    _check_strategy(sharding_strategy)
    if not perform_unstacking:
        raise ValueError("perform_unstacking: False is not allowed; activations come by feature")
    return looked_up(preprocessed_inputs, embedding_variables, feature_specs, trains=True)


def looked_up(preprocessed_inputs: Any, embedding_variables: Mapping[str, EmbeddingVariables], feature_specs: Nested[Any], *, trains: bool) -> Any:
    """As tpu_sparse_dense_matmul. trains: an update may follow, for which the lookup begins a step."""
    inputs = _inputs(preprocessed_inputs)
    shapes = activation_shapes(inputs, feature_specs)

    def look_up(table: Any, given: SparseDenseMatmulInput) -> Any:
        tables, ids = of(table), _ids(given)
        return tables.look_up(ids) if trains else dict(tables.trainer.look_up(ids))

    found = _call(look_up, shapes, _first(embedding_variables), inputs)
    return jax.tree.map(lambda spec: found[spec.name][..., :spec.output_shape[-1]], feature_specs)


def tpu_sparse_dense_matmul_grad(
        activation_gradients: Nested[Any], preprocessed_inputs: Any, embedding_variables: Mapping[str, EmbeddingVariables],
        feature_specs: Nested[Any], *, global_device_count: Optional[int] = None, sharding_strategy: str = "MOD", label: str = "",
        step: Any = None, num_sc_per_device: Optional[int] = None, enable_minibatching: bool = False,
        perform_stacking: bool = True, use_gradient_stacking_primitive: bool = False,
        embedding_var_limits: Optional[Mapping[str, Tuple[Optional[float], Optional[float]]]] = None,
) -> Dict[str, EmbeddingVariables]:
    """One update of each row that was looked up; the variables that stand for the tables after it."""
    _check_strategy(sharding_strategy)
    if not perform_stacking:
        raise ValueError("perform_stacking: False is not allowed; give gradients by feature")
    gradients = by_name(feature_specs, activation_gradients, "activation_gradients")
    for spec in jax.tree.leaves(feature_specs):
        gradient, of_sample = gradients[spec.name].astype(jnp.float32), spec.output_shape[1:]
        if gradient.shape[1:] not in (of_sample, of_sample[-1:]):  # all positions may be one dimension
            raise ValueError(f"feature {spec.name!r}: a gradient of the shape {list(gradient.shape)} is not allowed; it must "
                             f"be that of the activations, [samples, {', '.join(map(str, of_sample))}]")
        behind = spec.table_spec.embedding_dim - of_sample[-1]
        gradients[spec.name] = jnp.pad(gradient.reshape(-1, *of_sample), [(0, 0)] * len(of_sample) + [(0, behind)])
    tables = get_table_specs(feature_specs)
    stacks = {table.setting_in_stack.stack_name for table in tables.values()}
    for name in embedding_var_limits or ():
        if name not in stacks:
            raise ValueError(f"embedding_var_limits: {name!r} is not allowed; it must be one of the stacks {', '.join(sorted(stacks))}")
    rates = {name: table.optimizer.get_learning_rate(table.optimizer.no_step if step is None else step) for name, table in tables.items()}
    count = jnp.asarray(0 if step is None else step, jnp.int32)

    def update(table: Any, given: SparseDenseMatmulInput, gradients: Any, rates: Any, count: Any) -> Any:
        of(table).update(_ids(given), {name: np.asarray(value) for name, value in gradients.items()}, {
            name: {**one.optimizer.step_values(float(np.asarray(rates[name])), int(np.asarray(count))),
                   **_limits_of(one, embedding_var_limits)} for name, one in tables.items()})
        return np.asarray(table) + np.array([[0, 0, 0, 1]], np.float32)

    first = _first(embedding_variables)
    after = _call(update, jax.ShapeDtypeStruct(first.shape, first.dtype), first, _inputs(preprocessed_inputs), gradients,
                  rates, count)
    return {name: EmbeddingVariables(after, variables[1]) for name, variables in embedding_variables.items()}


def _first(variables: Mapping[str, EmbeddingVariables]) -> Any:
    """All stacks are of one model, so that any stands for all."""
    return next(iter(variables.values()))[0]


def _limits_of(table: TableSpec, limits: Any) -> Dict[str, float]:
    return {name: float(limit) for name, limit in zip(("clip_weight_min", "clip_weight_max"),
                                                      (limits or {}).get(table.setting_in_stack.stack_name, ())) if limit is not None}


def create_proto_from_feature_specs(feature_specs: Nested[Any], global_device_count: Optional[int],
                                    num_sparsecore_per_device: Optional[int] = None) -> Any:
    """See embedding_proto_utils, which needs protobuf."""
    from . import embedding_proto_utils

    return embedding_proto_utils.create_proto_from_feature_specs(feature_specs, global_device_count, num_sparsecore_per_device)


def update_preprocessing_parameters(feature_specs: Any, updated_params: SparseDenseMatmulInputStats,
                                    num_sc_per_device: int) -> None:
    """Sets limits in the specifications, for who reads them: the cluster does not need them."""
    features: List[FeatureSpec] = jax.tree.leaves(feature_specs)
    for stack in get_stacked_table_specs(feature_specs):
        seen = {"suggested_coo_buffer_size_per_device": updated_params.get_required_buffer_size_per_device(stack, num_sc_per_device)}
        for limit in ("max_ids_per_partition", "max_unique_ids_per_partition"):
            counts = getattr(updated_params, limit).get(stack)
            seen[limit] = None if counts is None else int(np.max(counts))
        table_stacking.set_limits(features, stack, **{name: value for name, value in seen.items() if value is not None})
