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

from typing import Any, Dict, Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from .. import _native
from .._records import check_mapping
from ..arrays import Ids, Sequences
from ..errors import NotFound
from ._embedding import Embedding
from ._largest import largest

__all__ = ["Embed", "Token"]


class Token(nnx.Param[Any]):
    """A zero by which JAX knows that there is something to differentiate. Its gradient is zero, so that optimizers leave it
    alone. Optimizers and gradients must have it among their parameters, as `wrt=nnx.Param` does."""


class Embed(nnx.Module):
    """`Embedding.in_jit` as a layer: ids by feature in, activations float32 [samples, embedding_dim] by feature out.

    The tables and their optimizers are on the cluster: the layer has no parameter but a zero, and states that are saved hold
    no rows. Under nnx.grad or nnx.value_and_grad a call is a step of the tables, otherwise rows are only looked up.

    max_of: features whose rows are combined by their maximum, whatever the combiner of the table is: see emberd.jax.largest. Their ids are an array
      [samples, ids of a sample], of which -1 is none, or emberd.Sequences.
    """

    def __init__(self, embedding: Embedding, *, max_of: Sequence[str] = ()) -> None:
        if isinstance(max_of, str):
            raise _native.refuse_kind(max_of, "max_of", "a list of features")
        for name in max_of:
            if name not in embedding.model.features:
                raise NotFound(f"max_of: there is no feature {name!r}; there are {', '.join(embedding.model.features)}")
        self.embedding = embedding
        self.max_of = tuple(max_of)
        self.token = Token(embedding.token())

    def __call__(self, ids: Mapping[str, Ids], step: Any = None) -> Dict[str, jax.Array]:
        """As Embedding.in_jit."""
        check_mapping(ids, "ids")
        bags = {name: one if isinstance(one, Sequences) else Sequences(one, padding_idx=-1) for name, one in ids.items() if name in self.max_of}
        for name, one in bags.items():
            if jnp.ndim(one.ids) < 2:
                raise ValueError(f"feature {name!r}: ids of a maximum are an array [samples, ids of a sample], or Sequences of this shape")
        found = self.embedding.in_jit(self.token[...], {**ids, **bags}, step)
        return {name: largest(one, bags[name]) if name in bags else one for name, one in found.items()}
