"""The layer of Flax NNX of jax-tpu-embedding: its "gradient" is what stands for the tables after the update."""

from __future__ import annotations

import functools
from typing import Any

import jax
from flax import nnx

from emberd.compat.jax_tpu_embedding.sparsecore.utils import utils
from emberd.compat.jax_tpu_embedding.sparsecore.lib.nn import embedding


class EmbeddingVariablesParam(nnx.Param[Any]):
    """Embedding variables, which the optimizer of the dense part leaves alone."""


def is_embedding_variables(_: Any, value: Any) -> bool:
    return isinstance(value, EmbeddingVariablesParam)


def is_non_embedding_variables(_: Any, value: Any) -> bool:
    return not isinstance(value, EmbeddingVariablesParam)


def get_named_sharding(node: Any, mesh: Any) -> Any:
    """The shardings of a model or an optimizer, for in_shardings of nnx.jit."""

    def sharding_of(_: Any, value: Any) -> Any:
        if isinstance(value, EmbeddingVariablesParam):
            return value.embedding_sharding
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    return nnx.StateSharding(nnx.map_state(sharding_of, nnx.state(node)))


class PartitionedOptimizer(nnx.Optimizer[Any]):
    """Updates the dense part; the tables have been updated when their "gradient" is known."""

    def __init__(self, model: Any, dense_optimizer: Any) -> None:
        super().__init__(model, dense_optimizer, wrt=is_non_embedding_variables)

    def update(self, model: Any, grads: Any, /, **kwargs: Any) -> Any:
        nnx.update(model, nnx.state(grads, is_embedding_variables))
        return super().update(model, grads, **kwargs)


class SparseCoreEmbed(nnx.Module):
    """Preprocessed ids in, activations in the structure of feature_specs out; under nnx.grad the tables are updated."""

    def __init__(self, feature_specs: Any, sharding_axis: str, mesh: Any, rngs: Any, *, enable_minibatching: bool = False,
                 table_sharding_strategy: str = "MOD") -> None:
        self.feature_specs = feature_specs
        self.sharding_axis, self.mesh = sharding_axis, mesh
        self.table_sharding_strategy, self.enable_minibatching = table_sharding_strategy, enable_minibatching
        self.num_sc_per_device = utils.num_sparsecores_per_device(mesh.devices.item(0))
        self.embedding_table_partition = jax.sharding.PartitionSpec(sharding_axis, None)
        self.data_partition = jax.sharding.PartitionSpec(sharding_axis)
        self.num_shards = mesh.shape[sharding_axis]
        sharding = utils.embedding_table_format(mesh, self.embedding_table_partition)
        variables = embedding.init_embedding_variables(rngs.params(), embedding.get_table_specs(feature_specs), sharding,
                                                       self.num_sc_per_device)
        self.embedding_table = EmbeddingVariablesParam(variables, embedding_sharding=sharding)

    def __call__(self, embedding_lookup_inputs: Any, step: Any = None) -> Any:
        """step: for optimizers and learning rates that count."""
        return _look_up(_Layer(self), self.embedding_table.get_value(), embedding_lookup_inputs, step)


class _Layer:
    """What is fixed of a layer; JAX asks whether two are the same."""

    def __init__(self, layer: SparseCoreEmbed) -> None:
        self.specs, self.mesh = layer.feature_specs, layer.mesh
        self.data, self.tables = layer.data_partition, layer.embedding_table_partition
        self._key = (id(layer.feature_specs), layer.mesh, layer.sharding_axis)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Layer) and self._key == other._key


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _look_up(layer: Any, variables: Any, inputs: Any, step: Any) -> Any:
    function = functools.partial(embedding.tpu_sparse_dense_matmul, feature_specs=layer.specs,
                                 global_device_count=layer.mesh.size)
    return jax.shard_map(function, mesh=layer.mesh, in_specs=(layer.data, layer.tables), out_specs=layer.data,
                         check_vma=False)(inputs, variables)


def _forward(layer: Any, variables: Any, inputs: Any, step: Any) -> Any:
    return _look_up(layer, variables, inputs, step), (variables, inputs, step)


def _backward(layer: Any, kept: Any, gradients: Any) -> Any:
    variables, inputs, step = kept

    def update(gradients: Any, inputs: Any, variables: Any, step: Any) -> Any:
        return embedding.tpu_sparse_dense_matmul_grad(gradients, inputs, variables, layer.specs, step=step)

    after = jax.shard_map(update, mesh=layer.mesh,
                          in_specs=(layer.data, layer.data, layer.tables, jax.sharding.PartitionSpec()),
                          out_specs=layer.tables, check_vma=False)(gradients, inputs, variables, step)
    return jax.tree.unflatten(jax.tree.structure(variables), jax.tree.leaves(after)), None, None


_look_up.defvjp(_forward, _backward)
