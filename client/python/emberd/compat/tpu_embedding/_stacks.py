"""Tables as chips hold them: stacked, padded, and a part of the rows on each chip."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Tuple

import numpy as np
import tensorflow as tf

from emberd._in_tensorflow import convert, read
from emberd._loading import assign_in_parts, stretches
from emberd.arrays import Floats, unmasked
from emberd.client import Model

SLOTS: Dict[str, str] = {"accumulator": "accumulators", "momentum": "momenta", "velocity": "velocities", "linear": "linears"}  # as they are called there


class StackedTable:
    """The tables of a stack, or a slot of their optimizer: float32 [rows of all chips, padded dim]. A shard of the cluster is a chip. On a chip
    SparseCore follows SparseCore, and on each of these table follows table: row e of a table is on SparseCore (e + rotation of the table) mod
    (SparseCores of all chips), in the order of e. The cluster keeps no padding: it is read as zeros, and what is assigned to it is dropped."""

    def __init__(self, model: Model, stack: str, slot: str) -> None:
        described = model.description
        found = {one["name"]: one for one in described["stacks"]}
        self.model, self._slot = model, slot
        self._tables: List[Dict[str, Any]] = [one for one in described["tables"] if one["stack"] == stack]
        self._cores, self._rows = described["sparsecores_per_shard"], found[stack]["rows_per_partition"]
        self.name, self.dtype = f"{stack}/{SLOTS.get(slot, slot)}" if slot else stack, tf.float32
        self.devices = [f"/job:localhost/replica:0/task:0/device:TPU:{chip}" for chip in range(described["shards"])]
        self.shape = tf.TensorShape([len(self.devices) * self._cores * self._rows, found[stack]["embedding_dim"]])

    def __repr__(self) -> str:
        return f"StackedTable({self.name!r}, shape={self.shape.as_list()}, tables={[one['name'] for one in self._tables]})"

    def numpy(self) -> Floats:
        """All chips, one after the other."""
        return self._read(0, len(self.devices))

    def read_value(self) -> Any:
        return read(self.numpy, self.shape)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def assign(self, value: Any) -> "StackedTable":
        """value: of `shape`."""
        self._assign(0, len(self.devices), value)
        return self

    def read_from_device(self, device: str) -> Any:
        """The rows of one chip. device: one of `devices`, or shorter, "TPU:1"."""
        chip = self._chip(device)
        return read(lambda: self._read(chip, 1), [self._cores * self._rows, self.shape[1]])

    def assign_on_device(self, device: str, value: Any) -> None:
        """value: as `read_from_device` gives it."""
        self._assign(self._chip(device), 1, value)

    def _chip(self, device: str) -> int:
        spec = tf.DeviceSpec.from_string(device)
        chip = spec.device_index
        if spec.device_type != "TPU" or spec.task or chip is None or chip >= len(self.devices):
            raise ValueError(f"device: {device!r} is not allowed; it must be one of {', '.join(self.devices)}")
        return int(chip)

    def _places(self, first: int, chips: int) -> Iterator[Tuple[str, int, Any, Any]]:
        """Of each table, its name and dim, the ids that are on these chips, and in which of their rows."""
        cores = len(self.devices) * self._cores
        begin, end = first * self._cores, (first + chips) * self._cores
        for table in self._tables:
            rotation = table["shard_rotation"]
            ids = np.concatenate([np.arange((core - rotation) % cores, table["vocabulary_size"], cores) for core in range(begin, end)])
            rows = ((ids + rotation) % cores - begin) * self._rows + table["row_offset"] + ids // cores
            yield table["name"], table["embedding_dim"], ids, rows

    def _read(self, first: int, chips: int) -> Floats:
        block = np.zeros([chips * self._cores * self._rows, self.shape[1]], np.float32)
        for table, dim, ids, rows in self._places(first, chips):
            for begin, end in stretches((len(ids), dim)):
                block[rows[begin:end], :dim] = self.model.read_rows(table, ids[begin:end], slot=self._slot)
        return block

    def _assign(self, first: int, chips: int, value: Any) -> None:
        values, shape = np.asarray(unmasked(value, "value"), np.float32), [chips * self._cores * self._rows, self.shape[1]]
        if list(values.shape) != shape:
            raise ValueError(f"value: the shape {list(values.shape)} is not allowed for {self.name!r}; it must be {shape}")
        found = [(table, ids, values[rows, :dim]) for table, dim, ids, rows in self._places(first, chips)]
        for table, ids, mine in found:  # before the first of them is assigned
            if not np.isfinite(mine).all():
                raise ValueError(f"value: a number that is not finite is not allowed; row {ids[~np.isfinite(mine).all(1)][0]} of table {table!r} has one")
        for table, ids, mine in found:
            assign_in_parts(self.model, table, ids, mine, self._slot)


tf.register_tensor_conversion_function(StackedTable, convert)
