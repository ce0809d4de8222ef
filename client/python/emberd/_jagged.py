"""What modules of torch are given, ids by feature or a KeyedJaggedTensor, as arrays of NumPy; and activations side by side."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np
import numpy.typing as npt
import torch

from . import errors
from ._records import check_mapping
from .arrays import Dense, Floats, Ids, Ragged, Sequences, Sparse, as_ints, as_ragged, as_row_ids, map_arrays, sparse_indices
from .client import Model


def to_array(value: Any, what: str) -> Any:
    """A tensor as NumPy sees it, without a copy where it is on the CPU."""
    try:
        # The common case, in half the time. Not all of PyTorch's stubs know is_cpu.
        if type(value) is torch.Tensor and value.is_cpu and not value.requires_grad:  # pyright: ignore[reportAttributeAccessIssue]
            return value.numpy()
        return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
    except (RuntimeError, TypeError) as error:
        if value.dtype == torch.bfloat16:  # which NumPy does not have
            return to_array(value.float(), what)
        if value.layout == torch.sparse_coo:  # torch says to make it dense, where each sample without an id would have the id 0
            raise TypeError(f"{what}: a sparse tensor is not allowed; give emberd.Sparse(ids.indices(), ids.values(), len(ids)), where ids is its coalesce()") from error
        raise TypeError(f"{what}: this tensor cannot be read: {error}") from error


def is_jagged(ids: Any) -> bool:
    """A KeyedJaggedTensor of torchrec, or what has its methods."""
    return all(hasattr(ids, name) for name in ("keys", "values", "lengths", "weights_or_none"))


def has_lengths(ids: Any) -> bool:
    """A JaggedTensor of torchrec, or what has its methods."""
    return all(callable(getattr(ids, name, None)) for name in ("values", "lengths", "offsets", "weights_or_none"))


def as_ragged_ids(ids: Any, what: str) -> Any:
    """Of a JaggedTensor, Ragged; other ids as they are. TypeError for a KeyedJaggedTensor: of which key would they be?"""
    if is_jagged(ids):
        raise TypeError(f"{what}: a {type(ids).__name__} is not allowed for one feature; give it in place of the mapping, or ids[key] for the feature")
    return Ragged(ids.values(), ids.offsets(), ids.weights_or_none()) if has_lengths(ids) else ids


def _strides(ids: Any, keys: int, lengths: int) -> List[int]:
    """Samples of each key: not all have as many where torchrec's tensor has variable batch sizes."""
    if callable(getattr(ids, "inverse_indices_or_none", None)) and ids.inverse_indices_or_none() is not None:
        raise ValueError("inverse_indices: not allowed, for activations are given as the samples are, without a repetition; give a KeyedJaggedTensor without "
                         "them, and index its activations")
    if callable(getattr(ids, "stride_per_key", None)):
        strides = [int(one) for one in ids.stride_per_key()]
        if len(strides) != keys or sum(strides) != lengths:
            raise ValueError(f"stride_per_key: {strides} are not allowed; they must be one for each of the {keys} keys, and {lengths} in all, as lengths are")
        return strides
    if keys and lengths % keys:
        raise ValueError(f"lengths: {lengths} are not allowed; they must be a multiple of the {keys} keys")
    return [lengths // keys] * keys if keys else []


def split_jagged(ids: Any) -> Dict[str, Ids]:
    keys, values, weights = list(ids.keys()), to_array(ids.values(), "values"), ids.weights_or_none()
    floats = None if weights is None else to_array(weights, "weights")
    lengths = as_row_ids(to_array(ids.lengths(), "lengths"), "lengths")
    result: Dict[str, Ids] = {}
    begin = 0
    for key, of_key in zip(keys, np.split(lengths, np.cumsum(_strides(ids, len(keys), lengths.size))[:-1])):
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
    """What a module is given, as NumPy's arrays. Of a KeyedJaggedTensor the activations lie side by side."""
    if is_jagged(ids):
        split = split_jagged(ids)
        samples = {name: len(one.row_splits) - 1 for name, one in split.items() if isinstance(one, Ragged)}
        if len(set(samples.values())) > 1:
            raise ValueError(f"stride_per_key: {samples} are not allowed; activations of one KeyedTensor have the same number of samples. Give the ids by feature, as "
                             "a mapping of emberd.Ragged")
        return split
    check_mapping(ids, "ids")
    result: Dict[str, Ids] = {name: to_array(value, f'feature "{name}"') if type(value) is torch.Tensor else
                              map_arrays(functools.partial(to_array, what=f'feature "{name}"'), as_ragged_ids(value, f'feature "{name}"')) for name, value in ids.items()}
    for name, value in ids.items():
        if isinstance(value, Sparse) and isinstance(value.indices, torch.Tensor):
            found: Any = result[name]
            result[name] = dataclasses.replace(found, indices=sparse_indices(
                found.indices, np.size(found.values), value.samples, f'feature "{name}": indices', from_torch=True))
    return result


def learned_weights(ids: Any) -> Dict[str, torch.Tensor]:
    """The weights that require gradients, by feature."""
    if is_jagged(ids):
        weights = ids.weights_or_none()
        if weights is None or not getattr(weights, "requires_grad", False):
            return {}
        split = split_jagged(ids)
        parts: Any = torch.split(weights, [as_ragged(one, name)[0].size for name, one in split.items()])
        return dict(zip(split, parts))
    check_mapping(ids, "ids")
    given = {name: getattr(as_ragged_ids(value, f'feature "{name}"'), "weights", None) for name, value in ids.items() if type(value) is not torch.Tensor}
    return {name: weights for name, weights in given.items() if isinstance(weights, torch.Tensor) and weights.requires_grad}


def rows_looked_up(model: Model, table: str, ids: npt.NDArray[Any]) -> Floats:
    """Rows as a lookup takes them: with `quantization` of the table rounded, bit for bit as shards round them."""
    rows, rounding = model.read_rows(table, ids), model.tables[table].quantization
    if rounding is None:
        return rows
    lower, upper, last = np.float32(rounding.lower), np.float32(rounding.upper), np.float32(rounding.num_buckets - 1)
    bucket = (np.clip(rows, lower, upper) - lower) * (last / (upper - lower))
    rounded: Floats = np.floor(bucket + np.float32(0.5)) * ((upper - lower) / last) + lower
    return rounded


def pass_to_weights(activations: torch.Tensor, weights: torch.Tensor, ids: Ids, output_shape: Tuple[int, ...], combiner: str,
                    read_rows: Callable[[npt.NDArray[Any]], Floats]) -> torch.Tensor:
    """The same activations, whose gradient goes to the weights as well: their rows are read, each once, and combined here."""
    values, lengths, _ = as_ragged(ids, "ids", output_shape)
    values = values[:lengths.sum()]
    distinct, places = np.unique(values, return_inverse=True)
    rows = torch.from_numpy(read_rows(distinct))[torch.from_numpy(places.reshape(-1))]
    samples = torch.repeat_interleave(torch.from_numpy(lengths))
    flat = weights.reshape(-1).to("cpu", torch.float32)
    flat = flat.expand(values.size) if flat.numel() == 1 else flat[:values.size]

    def total(terms: torch.Tensor) -> torch.Tensor:
        return terms.new_zeros((len(lengths), *terms.shape[1:])).index_add(0, samples, terms)

    combined = total(rows * flat[:, None])
    if combiner != "sum":
        # In float64, for squares of weights below about 1e-19 lose bits in float32, or vanish; the server scales them.
        divisor = total(flat if combiner == "mean" else flat.double().square())
        combined = torch.where(divisor[:, None] == 0, 0.0, combined)  # as on the server
        divisor = torch.where(divisor == 0, 1.0, divisor)
        combined = combined / (divisor if combiner == "mean" else divisor.sqrt().float())[:, None]
    combined = combined.reshape(activations.shape)
    return activations + (combined - combined.detach())


class Columns(torch.Tensor):
    """Columns of a leaf, as a parameter: its gradient is those columns of the leaf's."""

    _leaf: torch.Tensor
    _range: slice

    @staticmethod
    def of(leaf: torch.Tensor, begin: int, end: int) -> "Columns":
        columns: Columns = leaf.detach()[:, begin:end].as_subclass(Columns)
        columns._leaf, columns._range = leaf, slice(begin, end)
        return columns

    def __deepcopy__(self, memo: Dict[int, Any]) -> torch.Tensor:
        """A leaf of its own."""
        copied: torch.Tensor = torch.Tensor.as_subclass(self, torch.Tensor).detach().clone().requires_grad_(self.requires_grad)
        return copied

    @property
    def grad(self) -> Optional[torch.Tensor]:  # type: ignore[override]
        whole = self._leaf.grad
        return None if whole is None else whole[:, self._range]

    @grad.setter
    def grad(self, gradient: Optional[torch.Tensor]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if gradient is not None:
            raise ValueError("the gradient of these columns is a slice of a larger one; change it in place, or set it to None")
        self._leaf.grad = None


def as_jagged(values: torch.Tensor, ids: Ragged, given: Any) -> Any:
    """Of the class of what was given, if that is a JaggedTensor."""
    from .compat.jagged import JaggedTensor
    kind: Any = type(given) if has_lengths(given) else JaggedTensor
    return kind(values=values, lengths=torch.from_numpy(np.diff(as_ints(ids.row_splits, "row_splits"))))


def largest(found: Any) -> torch.Tensor:
    """Of activations [samples, positions, embedding_dim], or of a JaggedTensor, the largest of each column of a sample."""
    dense = isinstance(found, torch.Tensor)
    rows: torch.Tensor = found if dense else found.to_padded_dense(padding_value=-math.inf)
    if not rows.shape[1]:
        return rows.sum(1)
    largest = rows.gather(1, rows.detach().argmax(1, keepdim=True)).squeeze(1)  # the first of equal ones
    return largest if dense else largest.masked_fill((found.lengths() == 0)[:, None], 0)


def largest_of(found: torch.Tensor, ids: Any) -> torch.Tensor:
    """`largest` of the rows of ids that `by_id` sent; one id of each sample is the largest of its own, and Sequences are not combined."""
    if isinstance(ids, Ragged):
        return largest(as_jagged(found, ids, None))
    return largest(found) if not isinstance(ids, Sequences) and np.ndim(ids) == 2 else found


def by_id(given: Any, name: str, why: str, padding_idx: Optional[int] = None) -> Sequences:
    """Ids of which a row comes for each. why: no weights are taken."""
    if isinstance(given, (Dense, Sparse)) or (isinstance(given, Ragged) and given.weights is not None):
        raise TypeError(f'feature "{name}": {"weights are" if isinstance(given, Ragged) else f"a {type(given).__name__} is"} not allowed {why}')
    return (Sequences(checked_ragged(given, name).values) if isinstance(given, Ragged) else
            given if isinstance(given, Sequences) else Sequences(given, padding_idx))


def checked_ragged(ids: Ragged, name: str) -> Ragged:
    """Whose row splits the server does not see."""
    values = np.shape(to_array(ids.values, f'feature "{name}": values'))
    splits = as_ints(to_array(ids.row_splits, f'feature "{name}": row_splits'), f'feature "{name}": row_splits')
    if splits.ndim != 1 or len(values) != 1 or splits.size == 0 or splits[0] != 0 or splits[-1] != values[0] or (np.diff(splits) < 0).any():
        raise errors.InvalidArgument(f'feature "{name}": row_splits: {splits[:20].tolist()} are not allowed; they must be one-dimensional, begin with 0, not '
                                     f"decrease, and end with the number of values, {list(values)}")
    return ids
