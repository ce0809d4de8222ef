"""The layer of Flax Linen of jax-tpu-embedding."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Mapping, Optional

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.core import meta

from emberd.compat.jax_tpu_embedding.sparsecore.utils import utils
from .._lookup import Layer, look_up, make_variables, update
from ...nn import embedding, embedding_spec
from ...nn.embedding import Nested as Nested

EmbeddingLookupInput = embedding.PreprocessedInput
EMBEDDING_PARAM_NAME = "sc_embedding_variables"
COLLECTION = "embedding"


class SparseCoreEmbed(nn.Module):
    """Ids in, activations in the structure of feature_specs out. There are two ways to use it:

    Activations have the dtype of the variables of their table: float32, unless these were cast, as to bfloat16; sums are made in float32.

    With preprocessed ids, `preprocess_inputs`, its embedding variables are among "params": their "gradient" is what stands for the tables
    after the update, as embed_optimizer takes it.

    With arrays of ids as they are, also in jitted functions, the variables are in the collection "embedding", as
    `create_embedding_variables` makes them: {"params": params, "embedding": variables}. Differentiating with respect to "params" updates the
    tables; a zero among them, `token`, is how JAX comes to know of it. The variables stay as they are.
    """

    feature_specs: Any
    sharding_axis: str = "sparsecore_sharding"
    _mesh: Any = None
    table_sharding_strategy: str = "MOD"
    enable_minibatching: bool = False
    num_sc_per_device: int = -1
    mesh: Any = dataclasses.field(default=None, kw_only=True)  # _mesh under the name that it had before

    def __post_init__(self) -> None:
        self.mesh = self._mesh = self._mesh or self.mesh or jax.sharding.Mesh(jax.devices(), [self.sharding_axis])
        self.num_sc_per_device = utils.num_sparsecores_per_device(self.mesh.devices.item(0))
        super().__post_init__()

    @property
    def embedding_table_partition(self) -> Any:
        return jax.sharding.PartitionSpec(self.sharding_axis, None)

    @property
    def data_partition(self) -> Any:
        return jax.sharding.PartitionSpec(self.sharding_axis)

    @property
    def num_shards(self) -> int:
        return int(self.mesh.shape[self.sharding_axis])

    @property
    def embedding_table(self) -> Optional[Mapping[str, Any]]:
        """The embedding variables that are among "params"."""
        if not self.has_variable("params", EMBEDDING_PARAM_NAME):
            return None
        found: Mapping[str, Any] = meta.unbox(self.get_variable("params", EMBEDDING_PARAM_NAME))
        return found

    @staticmethod
    def create_embedding_variables(feature_specs: Nested[embedding_spec.FeatureSpec], rng: Any, mesh: Any = None,
                                   sharding_axis: str = "sparsecore_sharding") -> Dict[str, Any]:
        """Makes the tables on the cluster; by stack, what stands for them. Specifications that have not been prepared are, in place."""
        mesh = mesh or jax.sharding.Mesh(jax.devices(), [sharding_axis])
        return make_variables(rng, feature_specs, mesh, jax.sharding.PartitionSpec(sharding_axis, None))

    def preprocess_inputs(self, step: int, features: Nested[Any], features_weights: Optional[Nested[Any]] = None,
                          all_reduce_interface: Any = None) -> embedding.PreprocessedInput:
        return embedding.preprocess_sparse_dense_matmul_input(
            features, features_weights, self.feature_specs, self.mesh.local_mesh.size, self.mesh.size,
            num_sc_per_device=self.num_sc_per_device, sharding_strategy=self.table_sharding_strategy, batch_number=step,
            enable_minibatching=self.enable_minibatching, all_reduce_interface=all_reduce_interface)[0]

    @nn.compact
    def __call__(self, embedding_lookup_inputs: Any) -> Any:
        if isinstance(embedding_lookup_inputs, (embedding.PreprocessedInput, embedding.SparseDenseMatmulInput)):
            if self.embedding_table is None:
                self.param(EMBEDDING_PARAM_NAME, nn.with_partitioning(self._make, (self.sharding_axis, None), mesh=self.mesh))
            return self._in_dtype_of(self.embedding_table, look_up(Layer(self), None, _in_float32(self.embedding_table), embedding_lookup_inputs, None))
        token = self.param("token", nn.initializers.zeros, ())
        if self.is_initializing():  # of the dense part, which does not depend on rows
            shapes = embedding.activation_shapes(embedding.dense_input(embedding_lookup_inputs, self.feature_specs), self.feature_specs)
            return jax.tree.map(lambda spec: jnp.zeros((*shapes[spec.name].shape[:-1], spec.output_shape[-1])), self.feature_specs)
        inputs = embedding.dense_input(embedding_lookup_inputs, self.feature_specs, self.mesh.size)
        held = self._found()
        return self._in_dtype_of(held, look_up(Layer(self), token, _in_float32(held), inputs, None))

    def apply_gradient(self, gradients: Nested[Any], embedding_lookup_inputs: Any) -> Dict[str, Any]:
        """Updates the tables; the variables after it by their path."""
        held = self.embedding_table
        after = update(Layer(self), _in_float32(held), embedding_lookup_inputs, _in_float32(gradients))
        return {"/".join((*self.path, EMBEDDING_PARAM_NAME)): jax.tree.map(lambda one, before: one.astype(before.dtype), after, held)}

    def _in_dtype_of(self, variables: Any, activations: Any) -> Any:
        """Activations of each table in the dtype of its variables, as where all parameters were cast to bfloat16."""
        return jax.tree.map(lambda one, spec: one.astype(variables[spec.table_spec.setting_in_stack.stack_name].table.dtype), activations, self.feature_specs)

    def _make(self, rng: Any) -> Dict[str, Any]:
        return make_variables(rng, self.feature_specs, self.mesh, self.embedding_table_partition)

    def _found(self) -> Dict[str, Any]:
        """The variables of these features in the collection, wherever in the model the layer is."""
        assert self.scope is not None
        held = self.scope.root.variables().get(COLLECTION, {})
        for part in self.path:
            held = held.get(part, held)
        stacks = {table.setting_in_stack.stack_name for table in embedding.get_table_specs(self.feature_specs).values()}
        missing = sorted(stacks - set(held))
        if missing:
            raise ValueError(f'variables: the collection "{COLLECTION}" has {", ".join(held) or "nothing"}, and not {missing[0]!r}; give {{"params": '
                             f'params, "{COLLECTION}": SparseCoreEmbed.create_embedding_variables(feature_specs, key)}}')
        return {name: held[name] for name in sorted(stacks)}


def _in_float32(tree: Any) -> Any:
    return jax.tree.map(lambda one: one.astype(np.float32), tree)
