"""Converts a trainer's arrays and tensors to NumPy arrays, which the library reads without a copy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import Any, Callable, Iterable, List, Mapping, Optional, Sequence, Tuple, TypeVar, Union, cast

import numpy as np
import numpy.typing as npt

from . import _native, errors

Floats = npt.NDArray[np.float32]
Kind = TypeVar("Kind")

INTS = frozenset([np.dtype(np.int32), np.dtype(np.int64)])
_FLOAT32 = np.dtype(np.float32)


class _Movable:
    """A batch that is moved as a whole, as by Lightning, calls `to` of what it has."""

    def to(self: Kind, *where: Any, **options: Any) -> Kind:
        """With tensors of PyTorch moved as their `to` does it; other arrays stay."""
        return map_arrays(lambda one: one.to(*where, **options) if hasattr(one, "to") else one, self)


@dataclass(frozen=True)
class Dense(_Movable):
    """The same number of ids for every sample, of a shape as FeatureConfig.output_shape says, with weights: of the shape of `ids`, or one for all."""

    ids: Any
    weights: Any = None


def _lists(given: Any, what: str, of: str) -> List[Any]:
    try:
        lists = list(given)
    except TypeError as error:
        raise _native.refuse_kind(given, what, f"a list of {of} for each sample") from error
    for place, one in enumerate(lists):
        try:
            len(one)
        except TypeError as error:  # also a tensor without dimensions, though it has __len__
            raise _native.refuse_kind(one, f"{what}[{place}]", f"a list of {of}") from error
    return lists


@dataclass(frozen=True)
class Ragged(_Movable):
    """Sample i has the ids values[row_splits[i]:row_splits[i + 1]]; weights one per id, or one for all."""

    values: Any
    row_splits: Any
    weights: Any = None

    @staticmethod
    def from_lists(samples: Iterable[Sequence[int]], weights: Optional[Iterable[Sequence[float]]] = None) -> "Ragged":
        """Of a list of ids for each sample."""
        samples = _lists(samples, "samples", "ids")
        lengths = [len(ids) for ids in samples]
        splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        values = as_ints(list(chain.from_iterable(samples)), "samples")
        check_shape(values, "samples", values.ndim == 1, "a list of ids for each sample")
        if weights is None:
            return Ragged(values, splits)
        weights = _lists(weights, "weights", "weights")
        if [len(some) for some in weights] != lengths:
            raise ValueError("weights: each sample must have as many weights as ids")
        return Ragged(values, splits, as_weights(list(chain.from_iterable(weights)), "weights", values.shape))


@dataclass(frozen=True)
class Sparse(_Movable):
    """Coordinates of a sparse [samples, …] matrix of ids: indices [n, 2], the samples in column 0 non-decreasing; or [2, n], as
    torch has them; or the samples alone, [n]."""

    indices: Any
    values: Any
    samples: int
    weights: Any = None


@dataclass(frozen=True)
class Sequences(_Movable):
    """Ids whose rows are not combined: ids [samples, positions] give activations [samples, positions, embedding_dim], and ids of any
    other shape have the embedding as one more dimension, too, whatever the output_shape of the feature is, as long as
    they are a multiple of its positions.

    padding_idx: the id that fills short sequences up, any int64, which need not be a row of the table. Where it stands, the activation
      is zero, and no row is read or updated. None: there is none.
    mask_zero: the same as padding_idx=0, by the name that Keras gives it.
    """

    ids: Any
    padding_idx: Optional[int] = None
    mask_zero: bool = False

    @staticmethod
    def from_lists(samples: Iterable[Sequence[int]], positions: Optional[int] = None, padding_idx: int = 0) -> "Sequences":
        """Of a list of ids for each sample, filled up behind its last id. positions: how many each gets, and of a longer list the last ids, as
        the last 50 items of a user; default: as many as the longest list has. InvalidArgument for an id that is padding_idx."""
        ragged = Ragged.from_lists(samples)
        lengths = np.diff(ragged.row_splits)
        longest = int(lengths.max()) if len(lengths) else 0
        count = longest if positions is None else _native.whole(positions, "positions", 1, 2**31 - 1)
        padding = _native.whole(padding_idx, "padding_idx", low=-2**63)
        if (ragged.values == padding).any():
            raise errors.InvalidArgument(f"samples: the id {padding} is not allowed, for it is padding_idx; ids begin behind it, or it is another one, as -1")
        ids = np.full((len(lengths), count), padding, np.int64)
        kept = np.minimum(lengths, count)
        places = np.arange(count)
        filled = places < kept[:, None]
        ids[filled] = ragged.values[((ragged.row_splits[1:] - kept)[:, None] + places)[filled]]
        return Sequences(ids, padding)

    @property
    def mask(self) -> Any:
        """True where an id stands that is not padding: of the shape and the library of the ids."""
        padding = self._padding("Sequences")
        ids = self.ids if hasattr(self.ids, "shape") else as_array(self.ids, "Sequences: ids")
        return ids == ids if padding is None else ids != padding

    def _padding(self, what: str) -> Optional[int]:
        if self.padding_idx is None:
            return 0 if self.mask_zero else None
        padding = _native.whole(self.padding_idx, what + ": padding_idx", low=-2**63)
        if self.mask_zero and padding != 0:
            raise errors.InvalidArgument(f"{what}: padding_idx, mask_zero: {padding} and True are not allowed; mask_zero says that it is 0")
        return padding

    def unrolled(self, what: str) -> "Ids":
        """Each id as a sample of its own; a sample without ids where there is padding."""
        array = as_ints(self.ids, what)
        check_shape(array, what, array.ndim > 0, "[samples, positions]")
        flat, padding = array.reshape(-1), self._padding(what)
        kept = np.ones(flat.shape, np.bool_) if padding is None else flat != padding
        if kept.all():
            return flat
        splits = np.zeros(len(flat) + 1, np.int64)
        np.cumsum(kept, out=splits[1:])
        return Ragged(flat[kept], splits)


# An array [B] or [B, k] of integers, or of a shape as FeatureConfig.output_shape says, is Dense.
Ids = Union[Dense, Ragged, Sparse, Sequences, npt.NDArray[Any], Sequence[int], Any]


def map_arrays(function: Callable[[Any], Any], ids: Kind) -> Kind:
    """Ids of the same kind, of what the function makes of each array."""
    def of(one: Any) -> Any:
        return None if one is None else function(one)

    given: Any = ids
    result: Any
    if isinstance(given, Dense):
        result = Dense(of(given.ids), of(given.weights))
    elif isinstance(given, Ragged):
        result = Ragged(of(given.values), of(given.row_splits), of(given.weights))
    elif isinstance(given, Sparse):
        result = Sparse(of(given.indices), of(given.values), given.samples, of(given.weights))
    elif isinstance(given, Sequences):
        result = Sequences(of(given.ids), given.padding_idx, given.mask_zero)
    else:
        result = of(given)
    made: Kind = result
    return made


def copied(ids: Kind) -> Kind:
    """The same, in memory of its own: a loader may fill its buffers anew before the step, which may be sent again, has ended."""

    def copy(values: Any) -> Any:
        if isinstance(values, np.ndarray):
            return cast(Any, values).copy()
        try:
            return values.clone() if type(values).__module__ == "torch" else np.array(as_array(values, "ids"))
        except Exception:  # it is refused later, as it is, with the name of its feature
            return list(map(copy, cast(Any, values))) if isinstance(values, (list, tuple)) else values

    return map_arrays(copy, ids)


def are_same(one: Mapping[str, Ids], other: Mapping[str, Ids]) -> bool:
    """Whether batches have equal ids and weights, in the same order."""

    def parts(ids: Any) -> Any:
        return [type(ids), *vars(ids).values()] if isinstance(ids, (Dense, Ragged, Sparse, Sequences)) else [None, ids]

    def equal(left: Any, right: Any) -> bool:
        return left is right or np.array_equal(left, right)

    return set(one) == set(other) and all(len(parts(one[name])) == len(parts(other[name])) and all(
        map(equal, parts(one[name]), parts(other[name]))) for name in one)


def cut(ids: Ragged) -> Ragged:
    """Without the padding after the last sample."""
    end = int(ids.row_splits[-1])
    weights = ids.weights if ids.weights is None or np.size(ids.weights) == 1 else ids.weights[:end]
    return Ragged(ids.values[:end], ids.row_splits, weights)


def samples_of(ids: Ids, output_shape: Tuple[int, ...] = ()) -> Any:
    """The number of samples, from the shapes of the ids and of the activations; None: they do not determine it."""
    if isinstance(ids, Sparse):
        return ids.samples
    if isinstance(ids, Ragged):
        splits = _shape_of(ids.row_splits)[0]
        return None if splits is None else splits - 1
    shape = tuple(_shape_of(ids.ids if isinstance(ids, Dense) else ids))[:len(output_shape) or 1]
    return None if None in shape else math.prod(shape)


def activation_shape(ids: Ids, output_shape: Tuple[int, ...], dim: int) -> Tuple[Any, ...]:
    """Of the activations of a feature, as far as the shapes of the ids determine it."""
    if isinstance(ids, Sequences):
        return (*_shape_of(ids.ids), dim)
    samples, inner = samples_of(ids, output_shape), output_shape[1:]
    return (None if samples is None else samples // math.prod(inner), *inner, dim)


def _shape_of(array: Any) -> Any:
    return array.shape if hasattr(array, "shape") else np.shape(array)


def unmasked(value: Any, what: str) -> Any:
    """The value; TypeError for a masked array, of which np.asarray would take what is masked, too."""
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{what}: a masked array is not allowed, for what is masked would be used; give what is left, or filled()")
    return value


def as_array(value: Any, what: str) -> npt.NDArray[Any]:
    """NumPy's view of an array, a buffer, or an object that supports DLPack."""
    array: npt.NDArray[Any] = unmasked(value, what)
    if isinstance(value, np.ndarray):
        return array
    if hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
        return np.from_dlpack(value)
    of_jax = hasattr(value, "aval")
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        lists = isinstance(value, (list, tuple)) and "inhomogeneous" in str(error)
        if of_jax and isinstance(error, TypeError):  # traced; what was deleted is a RuntimeError
            raise TypeError(f"{what}: an array of a jitted function has no values yet; there, emberd.jax.Embedding.in_jit looks rows up") from error
        raise type(error)(f"{what}: " + (LISTS if lists else str(error))) from error


LISTS = "lists of different lengths are not allowed; give emberd.Ragged.from_lists, or for sequences emberd.Sequences.from_lists"
HASH = ". Texts are hashed first: [zlib.crc32(text.encode()) % vocabulary_size for text in texts]"


def _check_objects(array: npt.NDArray[Any], what: str) -> None:
    """Refuses what has anything but ints within int64, as a column of pandas may."""
    for place, one in enumerate(cast(List[Any], array.ravel().tolist())):
        is_int = isinstance(one, (int, np.integer)) and not isinstance(one, bool)
        if not is_int or not -(2**63) <= one < 2**63:
            where = f": {list(map(int, cast(Any, np.unravel_index(place, array.shape))))}" if array.ndim else ""
            named = f"{one}" if is_int or one is None or isinstance(one, float) else f"a {type(cast(Any, one)).__name__}"
            raise TypeError(f"{what}{where}: {named} is not allowed; ids are int32 or int64" + (
                HASH if isinstance(one, (str, bytes)) else ". Of a list for each sample, give emberd.Ragged.from_lists" if isinstance(one, (list, tuple, np.ndarray)) else ""))


def as_ints(value: Any, what: str) -> npt.NDArray[Any]:
    """int32 and int64 stay where they are; other integers are converted, Python's in an array of objects, too."""
    array = as_array(value, what)
    if array.dtype not in INTS:
        if array.size == 0 and array.dtype.kind == "f":  # an empty list, as PyTorch and NumPy read it
            array = array.astype(np.int64)
        elif array.dtype.kind == "O":
            _check_objects(array, what)
            array = array.astype(np.int64)
        elif array.dtype.kind not in "iu":
            raise TypeError(f"{what}: {array.dtype} is not allowed; ids are int32 or int64" + (HASH if array.dtype.kind in "US" else ""))
        elif array.dtype.kind == "u" and array.dtype.itemsize == 8 and array.size and array.max() >= 2**63:
            raise errors.OutOfRange(f"{what}: {array.max()} is not allowed; ids are below 2^63")
        else:
            array = array.astype(np.int64)
    return np.asarray(array, order="C")


def as_int32(array: npt.NDArray[Any], what: str, instead: str) -> npt.NDArray[Any]:
    """For what has no larger integers; of integers. An id that does not fit would become another one. instead: what to do."""
    if array.size and array.dtype.itemsize >= 4:
        for one in (array.min(), array.max()):
            if not -2**31 <= one < 2**31:
                raise errors.OutOfRange(f"{what}: {one} does not fit in int32; {instead}")
    return array.astype(np.int32, copy=False)


def as_floats(value: Any, what: str) -> Floats:
    """float32 that lies in one piece stays where it is; other numbers are converted."""
    array = as_array(value, what)
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":  # which is JAX's, and none of NumPy's kinds
        raise TypeError(f"{what}: {array.dtype} is not allowed; give float32")
    return np.asarray(array, np.float32, order="C")


def as_given_rows(value: Any, what: str) -> Floats:
    """As as_floats, for rows that are only read: also of tensors that require a gradient, on other devices, and of bfloat16."""
    return as_floats(_readable(value), what)


def shaped(value: Any, what: str) -> Any:
    """The same, to be read later, part by part: something with a shape, of which as_given_rows takes parts."""
    return value if hasattr(value, "detach") else as_array(value, what)


def _readable(value: Any) -> Any:
    if hasattr(value, "detach"):
        value = value.detach()
        return (value.float() if str(value.dtype) == "torch.bfloat16" else value).cpu()
    dtype = getattr(value, "dtype", None)
    return np.asarray(value).astype(np.float32) if getattr(dtype, "name", "") == "bfloat16" else value


def check_shape(array: npt.NDArray[Any], what: str, allowed: bool, wanted: str) -> None:
    if not allowed:
        raise errors.InvalidArgument(f"{what}: the shape {list(array.shape)} is not allowed; it must be {wanted}")


def as_row_ids(ids: Any, what: str = "ids") -> npt.NDArray[Any]:
    """int64 [n]."""
    array = as_ints(ids, what)
    check_shape(array, what, array.ndim == 1, "[n]")
    return np.ascontiguousarray(array, dtype=np.int64)


def as_weights(weights: Any, what: str, shape: Sequence[int]) -> Floats:
    """One for each id, of the shape of the ids; or a single one."""
    floats = as_floats(weights, what)
    single = floats.size == 1 and floats.ndim <= 1
    check_shape(floats, what, single or floats.shape == tuple(shape), f"that of the ids, {list(shape)}, or [1]")
    return floats


def sparse_indices(indices: Any, ids: int, samples: int, what: str, from_torch: bool = False) -> npt.NDArray[Any]:
    """[ids, 2], of that, of the layout of torch [2, ids], or of the samples alone."""
    array = as_ints(indices, what)
    if array.shape == (ids,):
        return np.stack([array, np.zeros_like(array)], axis=1)
    check_shape(array, what, array.shape in ((ids, 2), (2, ids)), f"[{ids}, 2] for {ids} ids, [2, {ids}], or the samples alone")
    transposed = np.transpose(array)
    if ids != 2:
        return np.ascontiguousarray(array if array.shape == (ids, 2) else transposed)
    ways = [one for one in (array, transposed) if 0 <= one[0, 0] <= one[1, 0] < samples] if from_torch else [array]
    if len(ways) == 2 and array[0, 1] != array[1, 0]:
        raise ValueError(f"{what}: {array.tolist()} of two ids can be read as [ids, 2] and as [2, ids]; give the samples alone, [2]")
    return np.ascontiguousarray(ways[0] if ways else array)


def as_rows(value: Any, what: str, shape: Optional[Tuple[int, ...]] = None) -> Tuple[Floats, int]:
    """As as_floats, for matrices whose rows may have gaps between them, as columns of a larger matrix have; and the numbers
    from one row to the next. All dimensions but the last count rows. shape: that it must have behind the first dimension."""
    array = as_array(value, what)
    if shape is not None:
        check_shape(array, what, array.shape[1:] == shape, f"that of the activations, [samples, {', '.join(map(str, shape))}]")
    if array.ndim > 2:
        array = array.reshape(math.prod(array.shape[:-1]), array.shape[-1])
    if array.ndim != 2:
        raise ValueError(f"{what}: the shape {list(array.shape)} is not allowed; it must be that of the activations, "
                         "[samples, embedding_dim]")
    rows, columns = array.shape
    if array.dtype != _FLOAT32 or columns == 0:
        return as_floats(array, what), columns
    if array.flags.c_contiguous:
        return array, columns
    # A stride says something only where there is a second number for it to lead to.
    stride, rest = divmod(array.strides[0], array.itemsize)
    if rows > 1 and rest == 0 and stride >= columns and (columns == 1 or array.strides[1] == array.itemsize):
        return array, stride
    return as_floats(array, what), columns


def as_ragged(ids: Ids, what: str, output_shape: Tuple[int, ...] = ()) -> Tuple[npt.NDArray[Any], npt.NDArray[Any], Optional[Floats]]:
    """Values, the number of ids of each sample, and a weight for each id, if any. output_shape: of the feature."""
    if isinstance(ids, Sequences):
        ids = ids.unrolled(what)
    if isinstance(ids, Sparse):
        values, weights = as_ints(ids.values, what), ids.weights
        samples = sparse_indices(ids.indices, values.size, ids.samples, what)[:, 0]
        lengths = np.bincount(samples, minlength=ids.samples)
    elif isinstance(ids, Ragged):
        values, weights = as_ints(ids.values, what), ids.weights
        lengths = np.diff(np.asarray(ids.row_splits))
    else:
        weights = ids.weights if isinstance(ids, Dense) else None
        array = as_ints(ids.ids if isinstance(ids, Dense) else ids, what)
        values = array.reshape(-1)
        lengths = np.full(samples_of(array, output_shape), math.prod(array.shape[len(output_shape) or 1:]))
    if weights is None:
        return values, lengths, None
    return values, lengths, np.broadcast_to(as_floats(weights, what).reshape(-1), values.shape)


def without_ids(values: npt.NDArray[Any], weights: Any, what: str) -> Ragged:
    """What an array [samples, 0] holds: samples without ids."""
    if weights is not None:
        as_weights(weights, what + ": weights", values.shape)
    return Ragged(values.reshape(-1), np.zeros(len(values) + 1, np.int64))


def concatenate(parts: Sequence[Ids], what: str, output_shape: Tuple[int, ...] = ()) -> Ragged:
    """The batches of a feature one after the other."""
    split = [as_ragged(part, what, output_shape) for part in parts]
    values = np.concatenate([one[0].astype(np.int64, copy=False) for one in split])
    splits = np.concatenate([[0], np.cumsum(np.concatenate([one[1] for one in split]))]).astype(np.int64)
    if all(one[2] is None for one in split):
        return Ragged(values, splits)
    return Ragged(values, splits, np.concatenate([np.ones(len(one[0]), np.float32) if one[2] is None else one[2]
                                                  for one in split]))


# {"learning_rate": 0.1} for every table, {"table": {"learning_rate": 0.1}} for one.
Hyper = Mapping[str, Union[float, Mapping[str, float]]]
