"""What modules of torch are given: ids by feature, or a KeyedJaggedTensor, as arrays of NumPy."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict

import numpy as np
import torch

from ._records import check_mapping
from .arrays import Ids, Ragged, Sparse, map_arrays, sparse_indices


def _array(value: Any) -> Any:
    """A tensor as NumPy sees it, without a copy where it is on the CPU."""
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value


def is_jagged(ids: Any) -> bool:
    """A KeyedJaggedTensor of torchrec, or what has its methods."""
    return all(hasattr(ids, name) for name in ("keys", "values", "lengths", "weights_or_none"))


def split_jagged(ids: Any) -> Dict[str, Ids]:
    keys, values, weights = list(ids.keys()), _array(ids.values()), ids.weights_or_none()
    floats = None if weights is None else _array(weights)
    lengths = _array(ids.lengths()).astype(np.int64)
    if keys and lengths.size % len(keys):
        raise ValueError(f"lengths: {lengths.size} are not allowed; they must be a multiple of the {len(keys)} keys")
    result: Dict[str, Ids] = {}
    begin = 0
    for key, of_key in zip(keys, lengths.reshape(len(keys), -1)):
        splits = np.concatenate([[0], np.cumsum(of_key)])
        end = begin + int(splits[-1])
        if key in result or (of_key < 0).any() or end > len(values):
            raise ValueError(f"key {key!r}: " + ("it is given twice" if key in result else
                             f"lengths {of_key.tolist()} from value {begin} on are not allowed; there are {len(values)} values"))
        result[key] = Ragged(values[begin:end], splits, None if floats is None else floats[begin:end])
        begin = end
    if begin != len(values) or (floats is not None and floats.shape != values.shape):
        raise ValueError(f"key {keys[-1] if keys else ''!r}: it ends at value {begin}, but there are {len(values)} values"
                         + ("" if floats is None else f" and {len(floats)} weights"))
    return result


def prepare(ids: Any) -> Dict[str, Ids]:
    """What a module is given, as NumPy's arrays."""
    if is_jagged(ids):
        return split_jagged(ids)
    check_mapping(ids, "ids")
    result: Dict[str, Ids] = {name: map_arrays(_array, value) for name, value in ids.items()}
    for name, value in ids.items():
        if isinstance(value, Sparse) and isinstance(value.indices, torch.Tensor):
            found: Any = result[name]
            result[name] = dataclasses.replace(found, indices=sparse_indices(
                found.indices, np.size(found.values), value.samples, f'feature "{name}": indices', from_torch=True))
    return result
