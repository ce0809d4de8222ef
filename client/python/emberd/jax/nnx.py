"""Embedding tables of a cluster as a layer of Flax NNX.

    class Net(nnx.Module):
        def __init__(self, emb, rngs):
            self.embed = emberd.jax.nnx.Embed(emb)
            self.dense = nnx.Linear(16, 1, rngs=rngs)

        def __call__(self, ids):
            return self.dense(self.embed(ids)["user"])

    @nnx.jit
    def train_step(net, optimizer, batch):
        loss, gradients = nnx.value_and_grad(loss_of)(net, batch)     # makes the step of the tables
        optimizer.update(net, gradients)                              # of the dense part
        return loss
"""

from __future__ import annotations

from typing import Any, Dict, Mapping

import jax
from flax import nnx

from ..arrays import Ids
from ._embedding import Embedding

__all__ = ["Embed", "Token"]


class Token(nnx.Param[Any]):
    """A zero by which JAX knows that there is something to differentiate. Its gradient is zero, so that optimizers leave it
    alone. Optimizers and gradients must have it among their parameters, as `wrt=nnx.Param` does."""


class Embed(nnx.Module):
    """`Embedding.in_jit` as a layer: ids by feature in, activations float32 [samples, embedding_dim] by feature out.

    The tables and their optimizers are on the cluster: the layer has no parameter but a zero, and states that are saved hold
    no rows. Under nnx.grad or nnx.value_and_grad a call is a step of the tables, otherwise rows are only looked up.
    """

    def __init__(self, embedding: Embedding) -> None:
        self.embedding = embedding
        self.token = Token(embedding.token())

    def __call__(self, ids: Mapping[str, Ids], step: Any = None) -> Dict[str, jax.Array]:
        """As Embedding.in_jit."""
        return self.embedding.in_jit(self.token[...], ids, step)
