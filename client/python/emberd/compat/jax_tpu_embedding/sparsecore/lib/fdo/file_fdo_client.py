"""Statistics of batches in files, so that limits can be set by what was seen. The cluster itself needs no limits."""

from __future__ import annotations

import glob
import os
import time
from typing import Any, Dict, Union

import jax
import numpy as np

from ..nn.embedding import SparseDenseMatmulInputStats

_KINDS = ("max_ids_per_partition", "max_unique_ids_per_partition", "required_buffer_size_per_sc", "id_drop_counters")


class NPZFileFDOClient:
    """Keeps the largest counts of this process, and those that all processes have published in a folder."""

    def __init__(self, base_dir: Union[str, "os.PathLike[str]"]) -> None:
        self._folder = os.fspath(base_dir)
        self._seen: Dict[str, Any] = {}

    def record(self, data: SparseDenseMatmulInputStats) -> None:
        for kind in _KINDS:
            for stack, counts in getattr(data, kind).items():
                key = f"{kind}/{stack}"
                self._seen[key] = np.maximum(self._seen.get(key, 0), counts)

    def publish(self) -> None:
        os.makedirs(self._folder, exist_ok=True)
        name = os.path.join(self._folder, f"fdo_stats_{jax.process_index()}_{time.time_ns()}.npz")
        with open(name, "wb") as file:
            np.savez(file, **self._seen)

    def load(self) -> SparseDenseMatmulInputStats:
        """The largest of all that was published."""
        files = glob.glob(os.path.join(glob.escape(self._folder), "fdo_stats_*.npz"))
        if not files:
            raise FileNotFoundError(f"{self._folder} has no fdo_stats_*.npz; publish first")
        result: Dict[str, Dict[str, Any]] = {kind: {} for kind in _KINDS}
        for name in files:
            with np.load(name) as stored:
                for key, counts in stored.items():
                    kind, stack = key.split("/", 1)
                    result[kind][stack] = np.maximum(result[kind].get(stack, 0), counts)
        return SparseDenseMatmulInputStats(**result)
