"""Statistics of batches in files, so that limits can be set by what was seen. The cluster itself needs no limits.

The files are those of jax-tpu-embedding: fdo_stats_PROCESS_TIME, with an array for each stack and kind of count, by the name STACK_max_ids
and so on: of one row, or of one for each batch.
"""

from __future__ import annotations

import abc
import os
import re
import time
from typing import Any, ClassVar, Dict, List, Mapping, Tuple, Union

import jax
import numpy as np

from ..nn.embedding import SparseDenseMatmulInputStats

SUFFIXES = {"max_ids_per_partition": "_max_ids", "max_unique_ids_per_partition": "_max_unique_ids",
            "required_buffer_size_per_sc": "_required_buffer_size", "id_drop_counters": "_id_drop_counters"}


class FDOClient(abc.ABC):
    """Keeps the counts of this process, and gives those of all."""

    @abc.abstractmethod
    def record(self, data: SparseDenseMatmulInputStats) -> None:
        """Adds the counts of a batch."""

    @abc.abstractmethod
    def publish(self) -> None:
        """Lets the other processes see what this one has recorded."""

    @abc.abstractmethod
    def load(self) -> SparseDenseMatmulInputStats:
        """The largest of what the processes have published last."""


class FilesOfProcesses(FDOClient):
    """Keeps counts in files of a folder, a new one each time; the newest of each process counts."""

    extension: ClassVar[str]

    def __init__(self, base_dir: Union[str, "os.PathLike[str]"], retain_history: bool) -> None:
        self._folder, self._retain_history = os.fspath(base_dir), retain_history
        self._seen: Dict[str, Any] = {}  # by the name in the file: int64 [1 or batches, counts]

    def record(self, data: SparseDenseMatmulInputStats) -> None:
        for kind, suffix in SUFFIXES.items():
            for stack, counts in getattr(data, kind).items():
                row = np.atleast_2d(np.asarray(counts, np.int64))
                seen = np.concatenate([self._seen.get(stack + suffix, row[:0]), row])
                self._seen[stack + suffix] = seen if self._retain_history else seen.max(0, keepdims=True)

    def publish(self) -> None:
        os.makedirs(self._folder, exist_ok=True)
        name = os.path.join(self._folder, f"fdo_stats_{jax.process_index()}_{time.time_ns()}.{self.extension}")
        self._write(name + ".part", self._seen)
        os.rename(name + ".part", name)  # no other process sees a part of it

    def load(self) -> SparseDenseMatmulInputStats:
        result: Dict[str, Dict[str, Any]] = {kind: {} for kind in SUFFIXES}
        for path in self._newest():
            for key, counts in self._read(path).items():
                for kind, suffix in SUFFIXES.items():
                    if key.endswith(suffix):
                        stack = key[:-len(suffix)]
                        most = np.atleast_2d(counts).max(0)
                        result[kind][stack] = np.maximum(result[kind].get(stack, most), most)
                        break
                else:
                    raise ValueError(f"{path}: the name {key!r} is not allowed; it must end with {', '.join(SUFFIXES.values())}")
        return SparseDenseMatmulInputStats(**result)

    def _newest(self) -> List[str]:
        newest: Dict[str, Tuple[int, str]] = {}
        for name in os.listdir(self._folder) if os.path.isdir(self._folder) else ():
            found = re.fullmatch(rf"fdo_stats_(\d+)_(\d+)\.{self.extension}", name)
            if found:
                newest[found[1]] = max(newest.get(found[1], (-1, "")), (int(found[2]), name))
        if not newest:
            raise FileNotFoundError(f"{self._folder} has no fdo_stats_*.{self.extension}; publish first")
        return [os.path.join(self._folder, name) for _, name in newest.values()]

    @abc.abstractmethod
    def _write(self, path: str, counts: Mapping[str, Any]) -> None:
        """Makes a file."""

    @abc.abstractmethod
    def _read(self, path: str) -> Mapping[str, Any]:
        """What a file holds: arrays of integers."""
