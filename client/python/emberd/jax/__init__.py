"""Embedding tables of a cluster in JAX.

    emb = emberd.jax.Embedding(model, group="run-7")
    for step, batch in emb.prefetch(batches, depth=2):
        activations = emb.receive(step)                    # dict of float32 [B, D]
        loss, gradients = train_step(state, activations, batch)   # your jitted function
        emb.update(step, gradients)

The cluster is outside of the jitted function: a step receives activations, and gives their gradients back.
`Embedding.in_jit` is for code whose lookup is inside of it, and `emberd.jax.nnx.Embed` the same as a layer of Flax. `largest` is the combiner max.
Gradients of the ranks of a group are **summed**.
"""

from ._embedding import Embedding
from ._largest import largest

__all__ = ["Embedding", "largest"]
