"""Statistics of batches in files of NumPy."""

from __future__ import annotations

import os
from typing import Any, Mapping, Union

import numpy as np

from .fdo_client import FilesOfProcesses


class NPZFileFDOClient(FilesOfProcesses):
    """Keeps the largest counts of this process, and those that all processes have published in a folder."""

    extension = "npz"

    def __init__(self, base_dir: Union[str, "os.PathLike[str]"]) -> None:
        super().__init__(base_dir, retain_history=False)

    def _write(self, path: str, counts: Mapping[str, Any]) -> None:
        with open(path, "wb") as file:
            np.savez(file, **counts)

    def _read(self, path: str) -> Mapping[str, Any]:
        with np.load(path) as stored:
            return dict(stored)
