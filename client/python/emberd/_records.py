"""Arrays as the records of emberd.h, and the library's memory as arrays.

A step of a model with 26 features has 78 records: `struct` writes them all at once, for to set the fields of a ctypes
structure one by one takes several times as long. From step to step only addresses change, so that those of the step before
are copied, and the new addresses written over the old ones.
"""

from __future__ import annotations

import ctypes
import difflib
import functools
import itertools
import struct
import sys
from typing import Any, Callable, Collection, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, cast

import numpy as np

from . import _native, errors
from .arrays import (INTS, Dense, Floats, Hyper, Ids, Ragged, Sequences, Sparse, activation_shape, as_ints, as_rows, as_weights,
                     check_shape, sparse_indices, without_ids)

# The fields of the structs of emberd.h, as `struct` spells them.
_FEATURE_IDS = "PiiPqqPqiiqPq"
_GRADIENT = "PPqq"
_HYPERPARAMETER = "PPd"
_ACTIVATION = "PPqq"
_IDS_COLUMN, _GRADIENT_COLUMN = 2, 1  # where a record has the address of its values, in words of 8 bytes
_FLOAT32 = np.dtype(np.float32)
_FLOAT_BYTES = 4
_GAP = 16  # floats, at most, between the activations of two features: each begins at 64 bytes

DENSE, RAGGED, SPARSE = 0, 1, 2

_Block = ctypes.c_int64 * 5  # emberd_block: address, features, samples, dim, floats from one feature to the next

_FIRST_OF_TUPLE = tuple.__basicsize__  # where the addresses of its items begin

addressof = ctypes.addressof
byte_at: Callable[[Any], ctypes.c_char] = ctypes.c_char.from_buffer


@functools.lru_cache(maxsize=256)
def _layout(record: str, count: int) -> struct.Struct:
    """Of so many records."""
    return struct.Struct(record * count)


@functools.lru_cache(maxsize=4096)
def _text(text: str) -> Tuple[int, bytes]:
    """Where C finds a text, and what lies there."""
    data = _native.text(text, "feature")
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0, data


@functools.lru_cache(maxsize=4096)
def _extents(shape: Tuple[int, ...]) -> Any:
    """A shape as C reads it."""
    return np.array(shape, np.int64)


def address_of(array: Any) -> int:
    if array.size == 0:
        return 0
    if array.flags.carray:  # in one piece and writable: a third of the time of what works always
        return addressof(byte_at(array))
    address: int = array.__array_interface__["data"][0]
    return address


@functools.lru_cache(maxsize=1)
def _reads_numpy() -> bool:
    """Whether the library finds the values of NumPy's arrays in this Python: it knows how CPython lays them out."""
    if sys.implementation.name != "cpython" or object.__basicsize__ != 16:  # as where there is no global lock
        return False
    form = _Form(0)
    for one in (np.arange(6, dtype=np.int32).reshape(3, 2), np.ones(5, np.float32)):
        form.note((one,), struct.pack("P", 0), None)
        found = form.fill((one,))
        if found is None or struct.unpack("P", found[0]) != (one.__array_interface__["data"][0],):
            return False
        if any(form.fill((other,)) for other in (one.astype(np.int64), one[:-1], one[::-1], one[None])):
            return False
    return True


class _Form:
    """The records of some features, as the step before had them."""

    __slots__ = ("_column", "_last")

    def __init__(self, column: int) -> None:
        self._column = column  # of the address of the values, in words of 8 bytes
        self._last: Optional[Tuple[bytes, bytes, Any, Any]] = None  # kinds of arrays, records, their type, what to keep

    def fill(self, arrays: Tuple[Any, ...]) -> Optional[Tuple[Any, Any]]:
        """The records of these arrays, and what they point at besides them. None if an array is of another kind than before,
        or cannot be read where it lies."""
        if self._last is None:
            return None
        kinds, records, kind_of_records, (kept, _) = self._last
        count = len(arrays)
        filled = kind_of_records.from_buffer_copy(records)
        if _native.lib().numpy_addresses(id(arrays) + _FIRST_OF_TUPLE, kinds, count, filled, len(records) // count, 8 * self._column):
            return filled, kept
        return None

    def learn(self, arrays: Tuple[Any, ...], records: bytes, kept: Any) -> None:
        """Arrays and their records, for later steps. kept: what the records point at besides them."""
        if _reads_numpy():
            self.note(arrays, records, kept)

    def note(self, arrays: Tuple[Any, ...], records: bytes, kept: Any) -> None:
        """The same, whether or not the library can read arrays."""
        if arrays and all(type(one) is np.ndarray and one.size and one.ndim <= 2 for one in arrays):
            dtypes = [one.dtype for one in arrays]  # kept, so that no other one is made in their place
            kinds = b"".join(struct.pack("PPqqqq", id(np.ndarray), id(one.dtype), one.ndim, *(one.shape + (0,))[:2],
                                         one.itemsize) for one in arrays)
            self._last = kinds, records, ctypes.c_char * len(records), (kept, dtypes)


@functools.lru_cache(maxsize=256)
def _gradient_form(_: Tuple[str, ...]) -> _Form:
    """Of the records of these features and shapes."""
    return _Form(_GRADIENT_COLUMN)


class RowShapes(Dict[str, Tuple[int, ...]]):
    """Of the gradients of a model, by feature, without the first dimension. They do not change."""

    def __init__(self, shapes: Mapping[str, Tuple[int, ...]]) -> None:
        super().__init__(shapes)

        def make(_: Tuple[str, ...]) -> _Form:
            return _Form(_GRADIENT_COLUMN)

        self.form: Callable[[Tuple[str, ...]], _Form] = functools.lru_cache(maxsize=16)(make)


def _add_ids(name: str, ids: Ids, shaped: Collection[str], fields: List[Any], kept: List[Any]) -> bool:
    """The fields of one record, and what they point at. Whether that is a plain array. shaped: as in Dims."""
    name_address, name_bytes = _text(name)
    if type(ids) is np.ndarray and ids.dtype in INTS and ids.flags.carray and 0 < ids.ndim <= 2 and ids.size:  # the common case
        fields += (name_address, DENSE, ids.itemsize, addressof(byte_at(ids)), ids.size)
        if name in shaped:
            shape = _extents(ids.shape)
            kept += ((name_bytes, shape), ids)
            fields += (0, address_of(shape), ids.ndim, shape.itemsize, 0, 0, 0, 0)
        else:
            kept += (name_bytes, ids)
            fields += (ids.shape[1] if ids.ndim == 2 else 1, 0, 0, 0, 0, 0, 0, 0)
        return True
    what = f'feature "{name}"'
    samples = 0
    if isinstance(ids, Ragged):
        layout, weights = RAGGED, ids.weights
        values = as_ints(ids.values, what + ": values")
        index = as_ints(ids.row_splits, what + ": row_splits")
        check_shape(index, what + ": row_splits", index.ndim == 1, "[samples + 1]")
    elif isinstance(ids, Sparse):
        layout, weights, samples = SPARSE, ids.weights, _native.whole(ids.samples, what + ": samples")
        values = as_ints(ids.values, what + ": values")
        from_torch = type(ids.indices).__module__ == "torch"
        index = sparse_indices(ids.indices, values.size, samples, what + ": indices", from_torch)
    else:
        layout, weights = DENSE, None
        if isinstance(ids, Dense):
            ids, weights = ids.ids, ids.weights
        values = as_ints(ids, what)
        check_shape(values, what, values.ndim > 0, "[samples] or [samples, ids of a sample]")
        if values.ndim == 2 and not values.shape[1]:
            return _add_ids(name, without_ids(values, weights, what), shaped, fields, kept)
        index = _extents(values.shape)
    if layout != DENSE:
        check_shape(values, what + ": values", values.ndim == 1, "[ids]")
    kept += (name_bytes, values, index)
    weights_address = weight_count = 0
    if weights is not None:
        floats = as_weights(weights, what + ": weights", values.shape)
        weights_address, weight_count = address_of(floats), floats.size
        kept.append(floats)
        if values.size and not weight_count:
            raise ValueError(f"{what}: weights: empty; give one per id, or a single one for all ids")
    fields += (name_address, layout, values.itemsize, address_of(values), values.size, 0, address_of(index), index.size, index.itemsize,
               0, samples, weights_address, weight_count)
    return False


def check_mapping(given: Any, what: str) -> None:
    if type(given) is not dict and not isinstance(given, Mapping):
        raise _native.refuse_kind(given, what, "a mapping: " + ('{"learning_rate": 0.1}' if what == "hyper" else '{"name of a feature": array, ...}'))


class Asked(NamedTuple):
    """What is to come of a lookup."""

    sent: Sequence[str]  # features, in the order of the request
    wanted: int  # of these, how many the caller named; the others have no ids
    shapes: Mapping[str, Tuple[int, ...]]  # of activations whose shape is that of their ids

    def rows(self, shapes: Mapping[str, Tuple[int, ...]]) -> Mapping[str, Tuple[int, ...]]:
        """Of gradients, without the first dimension; `shapes`: those of the model."""
        return {**shapes, **{name: shape[1:] for name, shape in self.shapes.items()}} if self.shapes else shapes


_NO_IDS = np.empty(0, np.int64)


def check_features(given: Collection[str], features: Collection[str], partial: bool) -> None:
    """InvalidArgument for what is no feature, and if features are missing."""
    for name in given:
        if name not in features:
            _native.text(name, "ids: feature")
            like = difflib.get_close_matches(name, features, 1)
            hint = f"did you mean {like[0]!r}? There" if like else "there"
            raise errors.InvalidArgument(f"ids: feature {name!r}: the model has no such feature; {hint} are {', '.join(features)}")
    if partial and not given:
        raise errors.InvalidArgument(f"ids: {{}} is not allowed; it must name at least one of the features, {', '.join(features)}")
    missing = () if partial else [name for name in features if name not in given]
    if missing:
        are = "features are" if len(missing) > 1 else "a feature is"
        raise errors.InvalidArgument(f"ids: {are} missing: {', '.join(missing)}; there are ids of {', '.join(given) or 'none'}. Give all; or partial=True in this lookup "
                                     "or, of a module, where it is made: then those that are given are looked up and trained, and no other")


class Dims(Dict[str, int]):
    """Of the embedding of each feature of a model. They do not change.

    shaped: features whose ids may have more dimensions than [samples, ids of a sample], for their output_shape has more than one."""

    def __init__(self, dims: Mapping[str, int], shaped: Collection[str]) -> None:
        super().__init__(dims)
        self.shaped = shaped
        # Of batches of plain arrays for all features, in this order: what is to come, and the records.
        self.known: Dict[Tuple[str, ...], Tuple[Asked, _Form]] = {}


def pack_batch(ids: Mapping[str, Ids], dims: Dims, partial: bool) -> Tuple[bytes, int, Any, Asked]:
    """The records, how many they are, what they point at, which must stay as long as they are read, and what is to come. partial: features that
    are missing get no ids."""
    check_mapping(ids, "ids")
    names = tuple(ids)
    known = dims.known.get(names)
    if known is not None:
        asked, form = known
        arrays = tuple(ids.values())
        filled = form.fill(arrays)
        if filled is not None:
            return filled[0], len(arrays), (filled, arrays), asked
    if ids.keys() != dims.keys():
        check_features(ids, dims, partial)
    given, wanted = ids, len(ids)
    shapes: Dict[str, Tuple[int, ...]] = {}
    if Sequences in set(map(type, ids.values())):
        sequences = {name: value for name, value in ids.items() if type(value) is Sequences}
        given = {**ids, **{name: value.unrolled(f'feature "{name}"') for name, value in sequences.items()}}
        shapes = {name: activation_shape(value, (), dims.get(name, 0)) for name, value in sequences.items()}
    if wanted < len(dims):
        given = {**given, **{name: _NO_IDS for name in dims if name not in ids}}
    count = len(given)
    fields: List[Any] = []
    kept: List[Any] = []
    plain = [_add_ids(name, value, dims.shaped, fields, kept) for name, value in given.items()]
    records = _layout(_FEATURE_IDS, count).pack(*fields)
    asked = Asked(tuple(given), wanted, shapes)
    if all(plain) and not shapes and (known or len(dims.known) < 16):
        _, form = dims.known.setdefault(names, (asked, _Form(_IDS_COLUMN)))
        form.learn(tuple(given.values()), records, kept[::2])  # the very names that the records point at
    return records, count, (records, kept), asked


def pack_gradients(gradients: Mapping[str, Any], shapes: Mapping[str, Tuple[int, ...]], *, strides: bool = False) -> Tuple[bytes, bytes, int, Any]:
    """The same, with the row strides in second place; features whose gradient is None are left out.

    shapes: of a row of the activations of each feature.
    strides: columns of a larger matrix stay where they lie; otherwise every gradient is in one piece.
    """
    check_mapping(gradients, "gradients")
    arrays = tuple(gradients.values())
    names = tuple(gradients)
    form = shapes.form(names) if type(shapes) is RowShapes else _gradient_form((*names, *map(str, shapes.values())))
    filled = form.fill(arrays)
    if filled is not None:
        return filled[0], filled[1][0], len(arrays), (filled, arrays)
    fields: List[Any] = []
    steps: List[int] = []
    kept: List[Any] = []
    plain = True
    for name, value in gradients.items():
        if value is None:
            plain = False
            continue
        if type(value) is np.ndarray and value.dtype is _FLOAT32 and value.shape[1:] == shapes.get(name) and value.ndim == 2 \
                and value.flags.carray:
            array, step = value, value.shape[1]  # the common case
        else:
            array, step = as_rows(value, f'gradient of feature "{name}"', shapes.get(name))
            plain = False
        samples, dim = array.shape
        if step != dim and not strides:
            array, step = np.ascontiguousarray(array), dim
        name_address, name_bytes = _text(name)
        fields += (name_address, address_of(array), samples, dim)
        steps.append(step)
        kept += (name_bytes, array)
    records, packed_steps = _layout(_GRADIENT, len(steps)).pack(*fields), _layout("q", len(steps)).pack(*steps)
    if plain:
        form.learn(arrays, records, (packed_steps, kept[::2]))
    return records, packed_steps, len(steps), (records, packed_steps, kept)


def flatten_hyper(hyper: Hyper, tables: Optional[Collection[str]]) -> List[Tuple[str, str, float]]:
    """Table ("": all), name and value of each. tables: that the model has; None: somebody else looks."""
    check_mapping(hyper, "hyper")
    flat: List[Tuple[str, str, float]] = []
    for key, value in hyper.items():
        if isinstance(value, Mapping):
            if tables is not None and key not in tables:
                raise errors.InvalidArgument(f"hyper: {key}: {value!r} is not allowed; it must be a number, for all tables, or {key!r} one of "
                                             f"the tables, {', '.join(tables)}")
            flat += [(key, name, _native.real(number, f"hyper: {key}: {name}")) for name, number in value.items()]
        else:
            flat.append(("", key, _native.real(value, f"hyper: {key}")))
    return flat


def pack_hyper(hyper: Optional[Hyper], tables: Collection[str]) -> Tuple[bytes, int, Any]:
    """The records, how many they are, and what they point at. tables: that the model has."""
    if hyper is None:
        return b"", 0, None
    flat = flatten_hyper(hyper, tables)
    fields: List[Any] = []
    kept: List[Any] = []
    for table, name, number in flat:
        (table_address, table_bytes), (name_address, name_bytes) = _text(table), _text(name)
        fields += (table_address, name_address, number)
        kept += (table_bytes, name_bytes)
    records = _layout(_HYPERPARAMETER, len(flat)).pack(*fields)
    kept.append(records)
    return records, len(flat), kept


class _Memory(_native.Uncopied, ctypes.c_char * sys.maxsize):  # type: ignore[misc]  # where it ends, the arrays say
    """The library's memory from an address on, as the base of an array, which keeps its handle."""

    __slots__ = ("owner",)


def view(address: Optional[int], shape: Tuple[int, ...], owner: _native.Handle,
         strides: Optional[Tuple[int, ...]] = None, dtype: "np.dtype[Any]" = _FLOAT32) -> Floats:
    """Numbers of the library where they lie; the array keeps them alive. strides: in bytes; default: in one piece."""
    if not address or 0 in shape:
        return cast(Floats, np.empty(shape, dtype))
    memory: Any = _Memory.from_address(address)
    memory.owner = owner
    return cast(Floats, np.ndarray(shape, dtype, memory, 0, strides))


def aligned(floats: int) -> int:
    """Up to the next 64 bytes."""
    return -(-floats // _GAP) * _GAP


def cut_floats(address: Optional[int], shapes: Mapping[str, Tuple[int, ...]], sizes: Sequence[int],
               owner: _native.Handle) -> Dict[str, Floats]:
    """Arrays of these shapes one after the other in memory of the library, in pieces of `sizes` floats."""
    block = view(address, (sum(sizes),), owner)
    begins = itertools.accumulate(sizes, initial=0)
    return {name: np.ndarray(shape, _FLOAT32, block, _FLOAT_BYTES * begin) for (name, shape), begin in zip(shapes.items(), begins)}


def unpack_activations(lookup: _native.Handle, names: Sequence[str]) -> Tuple[Dict[str, Floats], Optional[Floats]]:
    """By feature, in the order of the request; and all side by side, if they were received so: the former are columns of
    it."""
    library, handle = _native.lib(), lookup.get()
    block = _Block()
    if library.lookup_block(handle, block):
        address, _, samples, dim, distance = block[:]
        strides = (_FLOAT_BYTES * distance, _FLOAT_BYTES * dim, _FLOAT_BYTES)
        return dict(zip(names, view(address, (len(names), samples, dim), lookup, strides))), None  # an array each
    layout = _layout(_ACTIVATION, len(names))
    records = ctypes.create_string_buffer(max(layout.size, 1))
    count = library.lookup_activations(handle, records, len(names))
    assert count == len(names), (count, names)
    fields = layout.unpack_from(records)
    addresses, shapes = fields[1::4], list(zip(fields[2::4], fields[3::4]))
    one = _layout(_ACTIVATION, 1)
    side_by_side = ctypes.create_string_buffer(one.size)
    if not library.lookup_concat(handle, side_by_side):
        return dict(zip(names, _views(addresses, shapes, lookup))), None
    _, address, *shape = one.unpack_from(side_by_side)
    whole = view(address, tuple(shape), lookup)
    begins = [(begin - address) // _FLOAT_BYTES for begin in addresses]
    return {name: whole[:, begin:begin + dim] for name, begin, (_, dim) in zip(names, begins, shapes)}, whole


def _views(addresses: Sequence[int], shapes: Sequence[Tuple[int, int]], lookup: _native.Handle) -> List[Floats]:
    """As `view`, but faster for what lies in one block, as the activations of a stream do."""
    sizes = [samples * dim for samples, dim in shapes]
    if sizes and 0 not in sizes:
        begin = addresses[0]
        floats = (addresses[-1] - begin) // _FLOAT_BYTES + sizes[-1]
        if min(addresses) == begin and max(addresses) == addresses[-1] and floats <= sum(sizes) + _GAP * len(sizes):
            block = view(begin, (floats,), lookup)
            return [np.ndarray(shape, _FLOAT32, block, address - begin) for address, shape in zip(addresses, shapes)]
    return [view(address, shape, lookup) for address, shape in zip(addresses, shapes)]
