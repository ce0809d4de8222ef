"""The lookup of the layers of Flax: a function whose "gradient" for the embedding variables is what stands for the tables after the update."""

from __future__ import annotations

import functools
from typing import Any, Dict

import jax
import jax.numpy as jnp

from emberd.compat.jax_tpu_embedding.sparsecore.utils import utils
from ..nn import embedding


def make_variables(rng: Any, feature_specs: Any, mesh: Any, partition: Any) -> Dict[str, Any]:
    """Embedding variables of features, whose specifications are prepared where they have not been."""
    sparsecores = utils.num_sparsecores_per_device(mesh.devices.item(0))
    embedding.prepare_feature_specs_for_training(feature_specs, mesh.size, sparsecores)
    return embedding.init_embedding_variables(rng, embedding.get_table_specs(feature_specs),
                                              utils.embedding_table_format(mesh, partition), sparsecores)


class Layer:
    """What is fixed of a layer; JAX asks whether two are the same."""

    def __init__(self, layer: Any) -> None:
        self.specs, self.mesh = layer.feature_specs, layer.mesh
        self.data, self.tables = layer.data_partition, layer.embedding_table_partition
        self._key = (id(layer.feature_specs), layer.mesh, layer.sharding_axis)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layer) and self._key == other._key


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def look_up(layer: Any, token: Any, variables: Any, inputs: Any, step: Any) -> Any:
    """token: None, or a zero by which JAX knows that there is something to differentiate where the variables are not. Its gradient is zero.

    Where nothing is differentiated no step begins."""
    return _looked_up(layer, token, variables, inputs, trains=False)


def _looked_up(layer: Any, token: Any, variables: Any, inputs: Any, *, trains: bool) -> Any:
    if token is not None:  # it comes from the update before, so that this lookup sees the rows after it
        variables = jax.tree.map(lambda one: one + 0 * token, variables)
    function = functools.partial(embedding.looked_up, feature_specs=layer.specs, trains=trains)
    return jax.shard_map(function, mesh=layer.mesh, in_specs=(layer.data, layer.tables), out_specs=layer.data,
                         check_vma=False)(inputs, variables)


def _forward(layer: Any, token: Any, variables: Any, inputs: Any, step: Any) -> Any:
    return _looked_up(layer, token, variables, inputs, trains=True), (token, variables, inputs, step)


def update(layer: Layer, variables: Any, inputs: Any, gradients: Any, step: Any = None) -> Any:
    """The variables, in the structure that they have, after an update of the rows that were looked up."""

    def of_device(gradients: Any, inputs: Any, variables: Any, step: Any) -> Any:
        return embedding.tpu_sparse_dense_matmul_grad(gradients, inputs, variables, layer.specs, step=step)

    after = jax.shard_map(of_device, mesh=layer.mesh,
                          in_specs=(layer.data, layer.data, layer.tables, jax.sharding.PartitionSpec()),
                          out_specs=layer.tables, check_vma=False)(gradients, inputs, variables, step)
    return jax.tree.unflatten(jax.tree.structure(variables), jax.tree.leaves(after))


def _backward(layer: Any, kept: Any, gradients: Any) -> Any:
    token, variables, inputs, step = kept
    after = update(layer, variables, inputs, gradients, step)
    of_token = None if token is None else jnp.zeros_like(token) + 0 * jax.tree.leaves(after)[0][0, 0].astype(token.dtype)
    return of_token, after, None, None


look_up.defvjp(_forward, _backward)
