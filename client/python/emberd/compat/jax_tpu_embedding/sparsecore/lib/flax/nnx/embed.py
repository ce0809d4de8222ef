"""The layer of Flax NNX of jax-tpu-embedding: its "gradient" is what stands for the tables after the update."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from emberd.compat.jax_tpu_embedding.sparsecore.utils import utils
from .._lookup import Layer, look_up, make_variables
from ...nn.embedding import Nested as Nested


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
        self.embedding_table = EmbeddingVariablesParam(
            make_variables(rngs.params(), feature_specs, mesh, self.embedding_table_partition),
            embedding_sharding=utils.embedding_table_format(mesh, self.embedding_table_partition))

    def __call__(self, embedding_lookup_inputs: Any, step: Any = None) -> Any:
        """step: for optimizers and learning rates that count."""
        return look_up(Layer(self), None, self.embedding_table.get_value(), embedding_lookup_inputs, step)
