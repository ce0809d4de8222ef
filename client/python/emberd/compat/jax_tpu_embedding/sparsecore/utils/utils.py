"""Devices and layouts."""

from __future__ import annotations

import math
from typing import Any, Dict

import jax

# SparseCores of the chips; other devices get as many as a v5p has: the cluster emulates them.
NUM_SC_PER_DEVICE_MAP = {"TPU v5": 4, "TPU v5p": 4, "TPU v6e": 2, "TPU v6 lite": 2, "TPU7x": 2}
EMULATED = 4


def num_sparsecores_per_device(device: Any = None) -> int:
    """SparseCores of a device, by default of the first."""
    chosen = jax.devices()[0] if device is None else device
    return NUM_SC_PER_DEVICE_MAP.get(chosen.device_kind, EMULATED)


def embedding_table_format(mesh: Any, partition_spec: Any) -> Any:
    """The sharding of embedding variables, for out_shardings."""
    return jax.sharding.NamedSharding(mesh, partition_spec)


def embedding_table_format_with_sharding(sharding: Any) -> Any:
    return sharding


def round_up(value: float, multiple: int) -> int:
    return int(-(-value // multiple)) * multiple


def _check_strategy(sharding_strategy: str) -> None:
    if sharding_strategy != "MOD":
        raise ValueError(f"sharding_strategy: {sharding_strategy!r} is not allowed; it must be 'MOD'")


def shard_emb_table(table: Any, *, num_devices: int, num_sc_per_device: int, sharding_strategy: str = "MOD") -> Any:
    """[devices, rows of a device, columns] of a table [rows, columns]: row i lies on SparseCore i modulo their number, and those of a
    device follow each other."""
    _check_strategy(sharding_strategy)
    by_core = table.reshape(-1, num_devices, num_sc_per_device, *table.shape[1:])
    return by_core.transpose(1, 2, 0, *range(3, by_core.ndim)).reshape(num_devices, -1, *table.shape[1:])


def unshard_emb_table(sharded_table: Any, num_sc_per_device: int, sharding_strategy: str = "MOD") -> Any:
    """The reverse of shard_emb_table."""
    _check_strategy(sharding_strategy)
    by_core = sharded_table.reshape(len(sharded_table), num_sc_per_device, -1, *sharded_table.shape[2:])
    return by_core.transpose(2, 0, 1, *range(3, by_core.ndim)).reshape(-1, *sharded_table.shape[2:])


def estimate_preprocessing_parameters(*, global_batch_size: int, global_device_count: int, num_sc_per_device: int, valency: float,
                                      hot_shard_fraction: float = 0.2, headroom_factor: float = 1.25) -> Dict[str, int]:
    """Limits of a stack for skewed ids, before any batch was seen.

    valency: ids of a sample, on average, of all features of the stack.
    hot_shard_fraction: of the ids of a SparseCore, the part that one SparseCore owns; the rest is spread evenly.
    headroom_factor: by how much the limits are larger than what is expected.
    """
    for name, value in (("global_batch_size", global_batch_size), ("global_device_count", global_device_count),
                        ("num_sc_per_device", num_sc_per_device), ("valency", valency)):
        if not value > 0:
            raise ValueError(f"{name}: {value} is not allowed; it must be larger than 0")
    of_device = global_batch_size // global_device_count
    ids = of_device // num_sc_per_device * valency  # of a SparseCore
    cores = global_device_count * num_sc_per_device
    # To the hot SparseCore, beside its even part of the rest; two standard deviations of a Poisson distribution on top.
    peak = headroom_factor * (hot_shard_fraction * ids + (1 - hot_shard_fraction) * ids / cores + 2 * math.sqrt(ids / cores))
    most = round_up(peak, 8)
    # A fifth more ids than expected, and what fills the parts for each SparseCore up to multiples of 8.
    buffer = max(num_sc_per_device * most, 1.2 * of_device * valency + 14 * cores)
    return {"max_ids_per_partition": most, "max_unique_ids_per_partition": round_up(0.5 * peak, 8),
            "suggested_coo_buffer_size_per_device": round_up(buffer, 8 * num_sc_per_device)}
