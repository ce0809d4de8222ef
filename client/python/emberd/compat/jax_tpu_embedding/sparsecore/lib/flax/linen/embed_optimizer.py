"""The optimizer of a model of Flax Linen with embedding layers: the "update" of embedding variables is what they are after it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from . import embed


def _is_of_tables(path: Any) -> bool:
    return any(getattr(part, "key", None) == embed.EMBEDDING_PARAM_NAME for part in path)


def create_optimizer_for_sc_model(params: Any, tc_optimizer: Any) -> Any:
    """tc_optimizer: of optax, for the dense part. Its updates go to `apply_updates_for_sc_model`."""
    labels = jax.tree_util.tree_map_with_path(lambda path, _: "tables" if _is_of_tables(path) else "dense", params)
    return optax.multi_transform({"dense": tc_optimizer, "tables": optax.identity()}, labels)


def apply_updates_for_sc_model(params: Any, updates: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, before, update: update if _is_of_tables(path) else jnp.asarray(before + update).astype(before.dtype), params, updates)
