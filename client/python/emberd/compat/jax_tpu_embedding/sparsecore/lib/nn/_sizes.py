"""How large the buffers of a batch are on TPUs. The cluster has no such buffers."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

import jax

from emberd.compat.jax_tpu_embedding.sparsecore.utils import utils
from .embedding_spec import FeatureSpec

MINIBATCHES = 64  # the most that a batch is split into


def sparsecores(given: Optional[int]) -> int:
    return given or utils.num_sparsecores_per_device()


def compute_row_pointers_size_per_device(*, global_device_count: int, num_sc_per_device: Optional[int] = None,
                                         enable_minibatching: bool = False) -> int:
    cores = sparsecores(num_sc_per_device)
    return max(global_device_count * cores, 8) * cores * (MINIBATCHES if enable_minibatching else 1)


def compute_theoretical_max_coo_buffer_size(max_ids_per_partition: int, global_device_count: int, num_sc_per_device: Optional[int] = None,
                                            enable_minibatching: bool = False) -> int:
    """Where each SparseCore of a device has as many ids as it may for each SparseCore."""
    cores = sparsecores(num_sc_per_device)
    return utils.round_up(max_ids_per_partition, 8) * cores * cores * global_device_count * (MINIBATCHES if enable_minibatching else 1)


def compute_coo_buffer_size_per_device(feature_specs: Any, global_device_count: int, num_sc_per_device: Optional[int] = None,
                                       enable_minibatching: bool = False) -> Dict[str, int]:
    """By stack: what the specifications suggest, or else the largest."""
    features: List[FeatureSpec] = jax.tree.leaves(feature_specs)
    result = {}
    for feature in features:
        stack = feature.table_spec.stacked_table_spec
        if stack is None:
            raise ValueError(f"feature {feature.name!r}: call prepare_feature_specs_for_training before")
        most = compute_theoretical_max_coo_buffer_size(stack.max_ids_per_partition, global_device_count, num_sc_per_device, enable_minibatching)
        suggested = stack.suggested_coo_buffer_size_per_device
        size = most if suggested is None else utils.round_up(suggested, 8 * sparsecores(num_sc_per_device))
        if not 0 < size <= most:
            raise ValueError(f"stack {stack.stack_name!r}: suggested_coo_buffer_size_per_device: {suggested} is not allowed; it must be in (0, "
                             f"{most}], as many ids as max_ids_per_partition, {stack.max_ids_per_partition}, lets a device have")
        result[stack.stack_name] = size
    return result
