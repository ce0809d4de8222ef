"""The combiner max, made where the gradient is."""

from __future__ import annotations

from typing import Any, Optional

import jax
import jax.numpy as jnp

from ..arrays import Sequences


def largest(rows: jax.Array, ids: Optional[Sequences] = None) -> jax.Array:
    """Of activations [..., positions, embedding_dim] of Sequences, the largest of each column: [..., embedding_dim]. The gradient goes to the first of
    equal ones, as torch.nn.EmbeddingBag has it with mode="max".

        tags = emberd.Sequences(ids, padding_idx=-1)                    # [samples, ids of a sample]
        bag = emberd.jax.largest(emb.in_jit(token, {"tags": tags})["tags"], tags)

    ids: of which those that are padding do not count. Where all are, it is zero. None: all count.
    All rows of the batch take part in the update, those that gave no maximum with a gradient of zero.
    """
    if rows.ndim < 2:
        raise ValueError(f"rows: the shape {list(rows.shape)} is not allowed; it must be [..., positions, embedding_dim], as of emberd.Sequences")
    if not rows.shape[-2]:
        return rows.sum(-2)
    counted: Any = jax.lax.stop_gradient(rows)
    if ids is not None:
        mask = jnp.asarray(ids.mask)
        if mask.shape != rows.shape[:-1]:
            raise ValueError(f"ids: the shape {list(mask.shape)} is not allowed; it must be that of the rows without embedding_dim, {list(rows.shape[:-1])}")
        counted = jnp.where(mask[..., None], counted, -jnp.inf)  # the activation of padding is zero
    return jnp.take_along_axis(rows, jnp.argmax(counted, axis=-2, keepdims=True), axis=-2)[..., 0, :]
