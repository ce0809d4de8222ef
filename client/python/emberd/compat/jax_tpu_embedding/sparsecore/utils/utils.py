"""Devices and layouts."""

from __future__ import annotations

from typing import Any

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
