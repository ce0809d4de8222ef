"""How many ids each SparseCore would exchange with each other for a batch: counted when it is asked for."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

import numpy as np

from .embedding_spec import FeatureSpec

Counts = Dict[str, Any]


class SparseDenseMatmulInputStats:
    """By stack: of each device's SparseCores the most ids, and different ids, to each SparseCore; the buffer that each needs."""

    def __init__(self, max_ids_per_partition: Optional[Mapping[str, Any]] = None,
                 max_unique_ids_per_partition: Optional[Mapping[str, Any]] = None,
                 required_buffer_size_per_sc: Optional[Mapping[str, Any]] = None,
                 id_drop_counters: Optional[Mapping[str, int]] = None) -> None:
        given = (max_ids_per_partition, max_unique_ids_per_partition, required_buffer_size_per_sc, id_drop_counters)
        self._counts: List[Counts] = [dict(one or {}) for one in given]
        self._count: Optional[Callable[[], Sequence[Counts]]] = None

    @classmethod
    def of_batch(cls, specs: Sequence[FeatureSpec], pointers: Mapping[str, Any], ids: Mapping[str, Any], local_devices: int,
                 global_devices: int, sparsecores: int) -> "SparseDenseMatmulInputStats":
        made = cls()
        made._count = lambda: _count(specs, pointers, ids, local_devices, global_devices, sparsecores)
        return made

    def replace(self, **updates: Any) -> "SparseDenseMatmulInputStats":
        """With other counts."""
        kept = {name: getattr(self, name) for name in ("max_ids_per_partition", "max_unique_ids_per_partition", "required_buffer_size_per_sc",
                                                       "id_drop_counters") if name not in updates}
        return SparseDenseMatmulInputStats(**kept, **updates)

    def get_required_buffer_size_per_device(self, table_name: str, num_sc_per_device: Optional[int] = None) -> Optional[int]:
        """table_name: of a stack. num_sc_per_device: default: as many as were counted. None: nothing was."""
        sizes = self.required_buffer_size_per_sc.get(table_name)
        return None if sizes is None else int(np.max(sizes) * (num_sc_per_device or np.size(sizes)))

    def set_required_buffer_size_per_device(self, table_name: str, required_buffer_size_per_device: int,
                                            num_sc_per_device: Optional[int] = None) -> None:
        """table_name: of a stack. num_sc_per_device: default: as many as were counted."""
        cores = num_sc_per_device or np.size(self.required_buffer_size_per_sc.get(table_name, ()))
        if not cores:
            raise ValueError(f"num_sc_per_device: None is not allowed where nothing was counted for the stack {table_name!r}; give it")
        self.required_buffer_size_per_sc[table_name] = np.full(cores, required_buffer_size_per_device / cores)

    def _get(self, index: int) -> Counts:
        if self._count is not None:
            self._counts, self._count = [dict(one) for one in self._count()], None
        return self._counts[index]

    @property
    def max_ids_per_partition(self) -> Counts:
        return self._get(0)

    @property
    def max_unique_ids_per_partition(self) -> Counts:
        return self._get(1)

    @property
    def required_buffer_size_per_sc(self) -> Counts:
        return self._get(2)

    @property
    def id_drop_counters(self) -> Dict[str, int]:
        return self._get(3)


def _count(specs: Sequence[FeatureSpec], pointers: Mapping[str, Any], ids: Mapping[str, Any], local_devices: int,
           global_devices: int, sparsecores: int) -> Sequence[Counts]:
    sources, owners = local_devices * sparsecores, global_devices * sparsecores
    pairs: Dict[str, Any] = {}
    sample = 0
    for spec in specs:
        place, moved = spec.table_spec.setting_in_stack, spec.id_transformation
        if moved is None:
            raise ValueError(f"feature {spec.name!r}: call prepare_feature_specs_for_training before")
        splits = np.asarray(pointers[spec.name]).astype(np.int64)
        values = np.asarray(ids[spec.name])[:splits[-1]].astype(np.int64)
        column = (values + moved.col_shift) % owners + (values - values % owners) + moved.col_offset
        row = np.repeat(np.arange(len(splits) - 1), np.diff(splits))
        source = np.minimum(row // max(1, (len(splits) - 1) // sources), sources - 1)
        pairs.setdefault(place.stack_name, []).append(np.stack([source, column, row + sample], axis=1))
        sample += len(splits) - 1
    result: Sequence[Counts] = ({}, {}, {}, {})
    for stack, parts in pairs.items():
        entries = np.unique(np.concatenate(parts), axis=0)
        counts = []
        for different in (entries, np.unique(entries[:, :2], axis=0)):
            count = np.zeros((sources, owners), np.int32)
            np.add.at(count, (different[:, 0], different[:, 1] % owners), 1)
            counts.append(count)
        for index in range(2):
            result[index][stack] = counts[index].reshape(local_devices, sparsecores, owners).max(1).reshape(-1)
        result[2][stack] = (-(-counts[0] // 8) * 8).sum(1)
        result[3][stack] = 0
    return result
