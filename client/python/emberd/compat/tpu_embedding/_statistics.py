"""What a batch would need on SparseCores, as the planner says, without a cluster."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from typing import Any, Dict, Mapping, NamedTuple, Tuple

import numpy as np
import numpy.typing as npt

from emberd import config
from emberd._native import program_path
from emberd.arrays import Floats, Ragged

Counts = Dict[str, int]
Ints = npt.NDArray[np.int32]


class PartitionedCsrFormatTensor(NamedTuple):
    """Of one stack, for one chip: its CSR-wrapped COO, as far as TensorFlow's arrays are used. Pads are 2147483647, of gains 2147483648.0."""

    row_pointers: Ints  # by SparseCore and mini-batch the end of each SparseCore's ids, and as many pads as make a multiple of 8
    sorted_sample_ids: Ints  # in the SparseCore's part of the samples
    sorted_token_ids: Ints  # rows of the SparseCore that has them
    sorted_gains: Floats
    sample_count: int
    num_minibatches_per_physical_sparse_core: int


def of_batch(model: config.ModelConfig, batch: Mapping[str, Ragged], chips: int, sparsecores: int) -> Tuple[Counts, Counts]:
    """By stack, of the SparseCores of a chip, the most ids, and the most different ids, that one has for one SparseCore."""
    stacks = _explained(model, batch, chips, sparsecores, "--json")["stacks"]

    def most(kind: str) -> Counts:
        return {one["stack"]: int(np.max(one[kind])) for one in stacks}

    return most("ids_per_partition"), most("unique_ids_per_partition")


def partitioned(model: config.ModelConfig, batch: Mapping[str, Ragged], chips: int, sparsecores: int) -> Dict[str, PartitionedCsrFormatTensor]:
    """By stack."""
    stacks = _explained(model, batch, chips, sparsecores, "--format", "tensorflow")["chips"][0]

    def field(name: str, value: Any) -> Any:
        return np.array(value, np.float32 if name == "sorted_gains" else np.int32) if isinstance(value, list) else value

    return {stack: PartitionedCsrFormatTensor(**{name: field(name, one[name]) for name in PartitionedCsrFormatTensor._fields})
            for stack, one in stacks.items()}


def _explained(model: config.ModelConfig, batch: Mapping[str, Ragged], chips: int, sparsecores: int, *form: str) -> Dict[str, Any]:
    """What `emberctl explain` says."""
    with tempfile.TemporaryDirectory() as folder:
        description = os.path.join(folder, "model.json")
        with open(description, "w", encoding="utf-8") as file:
            file.write(model.to_json())
        for name, one in batch.items():
            for part, array in (("values", one.values), ("row_splits", one.row_splits), ("weights", one.weights)):
                if array is not None:
                    np.save(os.path.join(folder, f"{name}.{part}.npy"), array)
        done = subprocess.run([program_path("emberctl"), "explain", *form, "--model", description, "--batch", folder, "--shards", str(chips),
                               "--sparsecores", str(sparsecores)], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise ValueError(done.stderr.strip())
    answer: Dict[str, Any] = json.loads(done.stdout)
    return answer
