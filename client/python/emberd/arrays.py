"""From what a trainer has in its hands to arrays that the library reads where they lie, and back."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np
import numpy.typing as npt

from . import _native

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Dense:
    """The same number of ids for every sample, with weights: of the shape of `ids`, or one for all."""

    ids: Any
    weights: Any = None


@dataclass(frozen=True)
class Ragged:
    """Sample i has the ids values[row_splits[i]:row_splits[i + 1]]; weights one per id, or one for all."""

    values: Any
    row_splits: Any
    weights: Any = None

    @staticmethod
    def from_lists(samples: Sequence[Sequence[int]], weights: Optional[Sequence[Sequence[float]]] = None) -> "Ragged":
        """Of a list of ids for each sample."""
        lengths = [len(ids) for ids in samples]
        splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        values = np.fromiter((one for ids in samples for one in ids), np.int64, count=sum(lengths))
        if weights is None:
            return Ragged(values, splits)
        if [len(some) for some in weights] != lengths:
            raise ValueError("weights: they must be as many as the ids of each sample")
        return Ragged(values, splits, np.fromiter((one for some in weights for one in some), np.float32))


@dataclass(frozen=True)
class Sparse:
    """Coordinates of a sparse [samples, …] matrix of ids: indices [n, 2], the samples in column 0 non-decreasing."""

    indices: Any
    values: Any
    samples: int
    weights: Any = None


# An array [B] or [B, k] of integers is Dense.
Ids = Union[Dense, Ragged, Sparse, npt.NDArray[Any], Sequence[int], Any]


def as_array(value: Any, what: str) -> npt.NDArray[Any]:
    """NumPy's view of an array, a buffer, or whatever speaks DLPack."""
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
        return np.from_dlpack(value)
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise type(error)(f"{what}: {error}") from error


def as_ints(value: Any, what: str) -> npt.NDArray[Any]:
    """int32 and int64 stay where they are; other integers are converted."""
    array = as_array(value, what)
    if array.dtype not in (np.int32, np.int64):
        if array.size == 0 and array.dtype == np.float64:  # an empty list
            array = array.astype(np.int64)
        elif array.dtype.kind not in "iu" or array.dtype == np.uint64:
            raise TypeError(f"{what}: {array.dtype} is not allowed; ids are int32 or int64")
        else:
            array = array.astype(np.int64)
    return np.ascontiguousarray(array)


def as_floats(value: Any, what: str) -> Floats:
    """float32 that lies in one piece stays where it is; other numbers are converted."""
    array = as_array(value, what)
    if array.dtype.kind not in "fiu":
        raise TypeError(f"{what}: {array.dtype} is not allowed; give float32")
    return np.ascontiguousarray(array, dtype=np.float32)


def as_rows(value: Any, what: str) -> Floats:
    """As as_floats, for matrices whose rows may have gaps between them, as columns of a larger matrix have."""
    array = as_array(value, what)
    if array.dtype == np.float32 and array.ndim == 2 and _row_stride(array) >= array.shape[1] > 0:
        return array
    return as_floats(value, what)


def _row_stride(array: npt.NDArray[Any]) -> int:
    """Numbers from one row of a matrix to the next; 0: it is no such array."""
    rows, columns = array.shape
    size = array.itemsize
    if columns != 1 and array.strides[1] != size:
        return 0
    if rows < 2:  # its stride says nothing
        return columns
    stride: int = array.strides[0]
    return stride // size if stride % size == 0 else 0


def _as_ragged(ids: Ids, what: str) -> Tuple[npt.NDArray[Any], npt.NDArray[Any], Optional[Floats]]:
    """Values, the number of ids of each sample, and a weight for each id, if any."""
    if isinstance(ids, Sparse):
        values, weights = as_ints(ids.values, what), ids.weights
        samples = np.asarray(ids.indices).reshape(-1, 2)[:, 0]
        lengths = np.bincount(samples, minlength=ids.samples)
    elif isinstance(ids, Ragged):
        values, weights = as_ints(ids.values, what), ids.weights
        lengths = np.diff(np.asarray(ids.row_splits))
    else:
        weights = ids.weights if isinstance(ids, Dense) else None
        array = as_ints(ids.ids if isinstance(ids, Dense) else ids, what)
        values = array.reshape(-1)
        lengths = np.full(len(array), array.shape[1] if array.ndim == 2 else 1)
    if weights is None:
        return values, lengths, None
    return values, lengths, np.broadcast_to(as_floats(weights, what).reshape(-1), values.shape)


def concatenate(parts: Sequence[Ids], what: str) -> Ragged:
    """The batches one after the other."""
    split = [_as_ragged(part, what) for part in parts]
    values = np.concatenate([one[0].astype(np.int64, copy=False) for one in split])
    splits = np.concatenate([[0], np.cumsum(np.concatenate([one[1] for one in split]))]).astype(np.int64)
    if all(one[2] is None for one in split):
        return Ragged(values, splits)
    return Ragged(values, splits, np.concatenate([np.ones(len(one[0]), np.float32) if one[2] is None else one[2]
                                                  for one in split]))


def _address(array: npt.NDArray[Any]) -> Optional[int]:
    return int(array.__array_interface__["data"][0]) if array.size else None


def _fill(row: _native.FeatureIds, name: str, ids: Ids) -> List[npt.NDArray[Any]]:
    """Gives what the row points at."""
    what = f'feature "{name}"'
    index = None
    if isinstance(ids, Ragged):
        row.layout, row.samples = 1, 0
        values, weights = as_ints(ids.values, what + ": values"), ids.weights
        index = as_ints(ids.row_splits, what + ": row_splits")
    elif isinstance(ids, Sparse):
        row.layout, row.samples = 2, ids.samples
        values, weights = as_ints(ids.values, what + ": values"), ids.weights
        index = as_ints(ids.indices, what + ": indices")
    else:
        row.layout, row.samples = 0, 0
        weights = ids.weights if isinstance(ids, Dense) else None
        values = as_ints(ids.ids if isinstance(ids, Dense) else ids, what)
        if values.ndim not in (1, 2):
            raise ValueError(f"{what}: ids of the shape {list(values.shape)} are not allowed; they must be [samples] or "
                             "[samples, ids of a sample], or use Ragged")
        row.ids_per_sample = values.shape[1] if values.ndim == 2 else 1
    row.ids, row.id_count, row.id_bytes = _address(values), values.size, values.itemsize
    kept = [values]
    row.index, row.index_count = None, 0
    if index is not None:
        row.index, row.index_count, row.index_bytes = _address(index), index.size, index.itemsize
        kept.append(index)
    row.weights, row.weight_count = None, 0
    if weights is not None:
        floats = as_floats(weights, what + ": weights")
        row.weights, row.weight_count = _address(floats), floats.size
        kept.append(floats)
        if values.size and not floats.size:
            raise ValueError(f"{what}: weights: there are none; give one per id, or a single one for all")
    return kept


def pack_ids(features: Mapping[str, Ids]) -> Tuple[Any, int, Any]:
    """The array for the library, its size, and what it points at."""
    rows = (_native.FeatureIds * max(1, len(features)))()
    kept: List[Any] = [rows]
    for row, (name, ids) in zip(rows, features.items()):
        row.feature = name.encode()
        kept += _fill(row, name, ids)
    return rows, len(features), kept


def pack_gradients(gradients: Mapping[str, Any]) -> Tuple[Any, int, Any]:
    """As pack_ids; features whose gradient is None are left out."""
    rows, _, count, kept = _pack_gradients(gradients, as_floats)
    return rows, count, kept


def pack_strided_gradients(gradients: Mapping[str, Any]) -> Tuple[Any, Any, int, Any]:
    """The same with row strides, in second place: columns of a larger matrix stay where they lie."""
    return _pack_gradients(gradients, as_rows)


def _pack_gradients(gradients: Mapping[str, Any], read: Callable[[Any, str], Floats]) -> Tuple[Any, Any, int, Any]:
    given = {name: value for name, value in gradients.items() if value is not None}
    rows = (_native.Gradient * max(1, len(given)))()
    strides = (ctypes.c_int64 * max(1, len(given)))()
    kept: List[Any] = [rows, strides]
    for i, (row, (name, value)) in enumerate(zip(rows, given.items())):
        array = read(value, f'gradient of feature "{name}"')
        if array.ndim != 2:
            raise ValueError(f'gradient of feature "{name}": the shape {list(array.shape)} is not allowed; it must be '
                             "that of the activations, [samples, embedding_dim]")
        row.feature, row.values = name.encode(), _address(array)
        row.samples, row.dim = array.shape
        strides[i] = _row_stride(array)
        kept.append(array)
    return rows, strides, len(given), kept


Hyper = Mapping[str, Union[float, Mapping[str, float]]]


def pack_hyper(hyper: Optional[Hyper]) -> Tuple[Any, int]:
    """{"learning_rate": 0.1} for every table, {"table": {"learning_rate": 0.1}} for one."""
    flat: List[Tuple[str, str, float]] = []
    for key, value in (hyper or {}).items():
        if isinstance(value, Mapping):
            flat += [(key, name, float(number)) for name, number in value.items()]
        else:
            flat.append(("", key, float(value)))
    rows = (_native.Hyperparameter * max(1, len(flat)))()
    for row, (table, name, number) in zip(rows, flat):
        row.table, row.name, row.value = table.encode(), name.encode(), number
    return rows, len(flat)


class _Memory:
    """Memory of the library as an array's base, which keeps its handle."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, address: int, shape: Tuple[int, ...], owner: _native.Handle) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": shape, "typestr": "<f4", "version": 3}
        self.owner = owner


def view(address: Optional[int], shape: Tuple[int, ...], owner: _native.Handle) -> Floats:
    """Floats of the library where they lie; the array keeps them alive."""
    if not address or 0 in shape:
        return np.empty(shape, np.float32)
    return np.asarray(_Memory(address, shape, owner))


def unpack_activations(lookup: _native.Handle, expected: int) -> Tuple[Dict[str, Floats], Optional[Floats]]:
    """By feature; and all side by side, if they were received so: the former are columns of it."""
    rows = (_native.Activation * expected)()
    count = _native.lib().lookup_activations(lookup.get(), rows, expected)
    assert count <= expected, (count, expected)
    whole = _native.Activation()
    if not _native.lib().lookup_concat(lookup.get(), ctypes.byref(whole)):
        return {row.feature.decode(): view(row.values, (row.samples, row.dim), lookup) for row in rows[:count]}, None
    concat = view(whole.values, (whole.samples, whole.dim), lookup)
    begins = [(row.values - whole.values) // concat.itemsize for row in rows[:count]]
    return {row.feature.decode(): concat[:, begin:begin + row.dim] for row, begin in zip(rows, begins)}, concat


def null() -> Any:
    """A place for a handle that the library fills."""
    return ctypes.c_void_p()
