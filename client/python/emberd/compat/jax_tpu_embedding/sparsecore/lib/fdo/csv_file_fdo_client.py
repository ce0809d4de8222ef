"""Statistics of batches in files of text: a name and the counts behind it, a line for each row."""

from __future__ import annotations

import csv
import os
from typing import Any, Dict, List, Mapping, Union

import numpy as np

from .fdo_client import FilesOfProcesses


class CSVFileFDOClient(FilesOfProcesses):
    """retain_history: keeps the counts of all batches, and not the largest alone."""

    extension = "csv"

    def __init__(self, base_dir: Union[str, "os.PathLike[str]"], retain_history: bool = True) -> None:
        super().__init__(base_dir, retain_history)

    def _write(self, path: str, counts: Mapping[str, Any]) -> None:
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["key", "values"])
            writer.writerows([key, " ".join(map(str, row))] for key, rows in counts.items() for row in rows)

    def _read(self, path: str) -> Mapping[str, Any]:
        rows: Dict[str, List[List[int]]] = {}
        with open(path, newline="", encoding="utf-8") as file:
            for line in csv.DictReader(file):
                rows.setdefault(line["key"], []).append([int(float(count)) for count in line["values"].split()])
        return {key: np.array(one) for key, one in rows.items()}
