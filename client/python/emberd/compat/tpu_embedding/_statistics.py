"""What a batch would need on SparseCores, as the planner says, without a cluster."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from typing import Any, Dict, Tuple

import numpy as np

from emberd import config
from emberd._native import program_path

Counts = Dict[str, int]


def of_batch(model: config.ModelConfig, batch: Any, chips: int, sparsecores: int) -> Tuple[Counts, Counts]:
    """By stack, of the SparseCores of a chip, the most ids, and the most different ids, that one has for one SparseCore.
    batch: by feature, ids and where each sample begins and the last ends."""
    with tempfile.TemporaryDirectory() as folder:
        description = os.path.join(folder, "model.json")
        with open(description, "w", encoding="utf-8") as file:
            file.write(model.to_json())
        for name, (ids, splits) in batch.items():
            np.save(os.path.join(folder, f"{name}.values.npy"), ids)
            np.save(os.path.join(folder, f"{name}.row_splits.npy"), splits)
        done = subprocess.run([program_path("emberctl"), "explain", "--json", "--model", description, "--batch", folder, "--shards", str(chips),
                               "--sparsecores", str(sparsecores)], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise ValueError(done.stderr.strip())
    stacks = json.loads(done.stdout)["stacks"]

    def most(kind: str) -> Counts:
        return {one["stack"]: int(np.max(one[kind])) for one in stacks}

    return most("ids_per_partition"), most("unique_ids_per_partition")
