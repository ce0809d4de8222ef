"""The tables on the cluster that embedding variables stand for."""

from __future__ import annotations

import math
import secrets
from typing import Any, Callable, Dict, Iterable, Iterator, Mapping, NamedTuple, Sequence, Tuple

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental import io_callback

from emberd import _filling, config
from emberd._loading import stretches
from emberd._place import planned_samples
from emberd.client import Client, Model
from emberd.compat._in_turn import InTurn, Place
from emberd.jax import Embedding
from .sparsecore.lib.nn.embedding_spec import TableSpec, takes_nothing


class EmbeddingVariables(NamedTuple):
    """Stands for the rows of a stack, and for its slots. table: float32 [devices, 4], which tables these are and how often
    they have been updated; slot: empty columns by the names of the optimizer's slots."""

    table: Any
    slot: Any


_place = Place("jax_tpu_embedding")
# By the digits in the variables, which are random: those of another process stand for nothing here. Each fits in bfloat16, to which parameters may be cast.
_all: Dict[Tuple[float, ...], "Tables"] = {}


def use(client: Client, *, model: str = "jax_tpu_embedding", group: str = "train") -> None:
    """Makes the next tables on the cluster of this client, in models named `model`, `model`_1 and so on.

    A model of this name that is there already is gone on with: its rows stay as they are.
    Without it, the cluster at the address in EMBERD_ADDRESS is taken, or one is started.
    """
    _place.use(client, model, group)


class Tables(InTurn):
    """Those of a model."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__(embedding._trainer)
        self.embedding = embedding


def of(table: Any) -> Tables:
    """Those that the table of embedding variables stands for."""
    digits = tuple(map(float, np.asarray(table).reshape(-1)[:3]))
    if digits not in _all:
        raise ValueError("embedding variables: these do not stand for tables of this process; they hold no rows, so that it does not help to "
                         "save and restore them: use lib.flax.nnx.checkpoint_utils, or a checkpoint of the cluster, `model_of(variables)`")
    return _all[digits]


def _any_of(variables: Any) -> Tables:
    return of(jax.tree.leaves(variables)[0].addressable_shards[0].data)


def model_of(variables: Any) -> Model:
    """The model of embedding variables: to read and assign rows, or to save a checkpoint."""
    jax.effects_barrier()
    jax.block_until_ready(variables)
    return _any_of(variables).embedding.model


def rows_of(variables: Any, table: str) -> Any:
    """A table as it is now; with slots, if given whole embedding variables."""
    model = model_of(variables)
    if isinstance(variables, EmbeddingVariables):
        return EmbeddingVariables(model.table(table), type(variables.slot)(*(
            model.table(table, slot=slot) for slot in model.tables[table].slots)))
    return model.table(table)


def make(rng: Any, stacks: Mapping[str, Sequence[TableSpec]], shards: int, sharding: Any) -> Any:
    """Declares the tables and gives them their initial rows: float32 [devices, 4], what stands for them. In a jitted function they are made
    when it is called, each time."""
    tables = [table for stack in stacks.values() for table in stack]
    for table in tables:
        if not table.feature_shapes:
            raise ValueError(f"table {table.name!r}: no feature is known that looks it up; call "
                             "prepare_feature_specs_for_training before")
    groups = [config.StackGroup([table.name for table in stack], stack_name) for stack_name, stack in stacks.items()
              if len(stack) > 1]
    alone = len(stacks) - len(groups)  # tables that the specifications do not stack, so that each has a rate and limits of its own
    plan = config.PlanConfig(auto_stack=False if alone > 1 else None, groups=groups or None) if groups or alone > 1 else None

    def declare(parts: Callable[[], Iterable[Tuple[str, Any, Any]]]) -> Any:
        def in_stretches() -> Iterator[_filling.Part]:
            for name, ids, given in parts():
                values = np.asarray(given)
                for begin, end in stretches(values.shape):
                    yield name, "", ids[begin:end], values[begin:end]

        model = _place.declare(lambda name: config.ModelConfig(
            name, [_declared(table) for table in tables],
            [config.FeatureConfig(feature, table.name, planned_samples(shape[:-1]), shape[:-1] if len(shape) > 2 else None)
             for table in tables for feature, shape in table.feature_shapes.items()],
            plan=plan), in_stretches if any(map(_is_called, tables)) else None)
        digits = tuple(map(float, secrets.token_bytes(3)))
        _all[digits] = Tables(Embedding(model, _place.group))
        return np.array([[*digits, 0]], np.float32)

    keys = jax.random.split(rng, shards * len(stacks))

    def initial() -> Iterator[Tuple[str, Any, Any]]:
        for number, stack in enumerate(stacks.values()):
            for table in stack:
                yield from _initial(table, keys[number * shards:(number + 1) * shards])

    if not isinstance(rng, Tracer):
        made = declare(initial)
        return jax.make_array_from_callback((sharding.mesh.size, 4), sharding, lambda _: made)
    places = list(initial())
    return jax.shard_map(
        lambda *values: io_callback(lambda *arrays: declare(lambda: ((name, ids, one) for (name, ids, _), one in zip(places, arrays))),
                                    jax.ShapeDtypeStruct((1, 4), np.float32), *values),
        mesh=sharding.mesh, in_specs=jax.sharding.PartitionSpec(), out_specs=sharding.spec, check_vma=False)(
            *(values for _, _, values in places))


def _declared(table: TableSpec) -> config.TableConfig:
    quantization = None if table.quantization_config is None else config.QuantizationConfig(
        table.quantization_config.min_value, table.quantization_config.max_value, table.quantization_config.num_buckets)
    return config.TableConfig(table.name, table.vocabulary_size, table.embedding_dim, combiner=table.combiner,
                              initializer=config.Assigned() if _is_called(table) else config.Zeros() if _is_zeros(table) else table.initializer,
                              optimizer=table.optimizer.declared(), quantization=quantization)


def _is_zeros(table: TableSpec) -> bool:
    return table.initializer is jax.nn.initializers.zeros


def _is_called(table: TableSpec) -> bool:
    """Whether the initializer is one of JAX's, and not what a TableConfig of emberd takes."""
    return callable(table.initializer) and not _is_zeros(table) and not _filling.takes_offset(table.initializer)


def _initial(table: TableSpec, keys: Any) -> Iterator[Tuple[str, Any, Any]]:
    """Rows of a table, and which they are. Calls the initializer once for each SparseCore, as on a TPU: the same keys give the same rows."""
    if not _is_called(table):
        return
    if takes_nothing(table.initializer):
        whole = table.initializer()
        if whole.ndim != 2 or len(whole) < table.vocabulary_size or whole.shape[1] < table.embedding_dim:
            raise ValueError(f"table {table.name!r}: initializer: the shape {list(whole.shape)} is not allowed; it must be at least "
                             f"[{table.vocabulary_size}, {table.embedding_dim}]")
        yield table.name, np.arange(table.vocabulary_size), whole[:table.vocabulary_size, :table.embedding_dim]
        return
    shards, place = len(keys), table.setting_in_stack
    rows = math.ceil(table.vocabulary_size / (8 * shards)) * 8
    for shard in range(shards):
        ids = np.arange((shard - place.shard_rotation) % shards, table.vocabulary_size, shards)
        if ids.size:
            yield table.name, ids, table.initializer(keys[shard], (rows, place.padded_embedding_dim))[:ids.size, :table.embedding_dim]
