"""The tensors of torchrec that hold ids and activations by key, after its documentation."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Dict, List, Mapping, Optional, Sequence

import numpy as np
import torch

from .. import _native
from .._jagged import to_array
from ..torch import KeyedTensor as _KeyedTensor

__all__ = ["JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"]


def _to_offsets(lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0).to(lengths.dtype)])


def _to_lengths(lengths: Optional[torch.Tensor], offsets: Optional[torch.Tensor]) -> torch.Tensor:
    if lengths is not None and (offsets is None or np.array_equal(to_array(offsets, "offsets"), _to_offsets(lengths))):
        return lengths
    if lengths is not None or offsets is None:
        raise ValueError("lengths, offsets: one of them must be given, or both that say the same")
    if len(offsets) == 0 or offsets[0] != 0:
        raise ValueError(f"offsets: {offsets.tolist()[:3]}... are not allowed; they must begin with 0")
    return offsets[1:] - offsets[:-1]


class _Jagged:
    """Values, weights where there are any, and how many belong together."""

    def __init__(self, values: torch.Tensor, weights: Optional[torch.Tensor], lengths: Optional[torch.Tensor],
                 offsets: Optional[torch.Tensor]) -> None:
        self._values, self._weights = values, weights
        self._lengths = _to_lengths(lengths, offsets)

    def __repr__(self) -> str:
        keys = f"{self.keys()}, " if isinstance(self, KeyedJaggedTensor) else ""
        return f"{type(self).__name__}({keys}values {list(self._values.shape)}, lengths {list(self._lengths.shape)})"

    def values(self) -> torch.Tensor:
        return self._values

    def lengths(self) -> torch.Tensor:
        return self._lengths

    def offsets(self) -> torch.Tensor:
        return _to_offsets(self._lengths)

    def weights_or_none(self) -> Optional[torch.Tensor]:
        return self._weights

    def weights(self) -> torch.Tensor:
        if self._weights is None:
            raise ValueError("this tensor has no weights")
        return self._weights


class JaggedTensor(_Jagged):
    """Values of which sample i has lengths()[i], one sample after the other."""

    def __init__(self, values: torch.Tensor, weights: Optional[torch.Tensor] = None, lengths: Optional[torch.Tensor] = None,
                 offsets: Optional[torch.Tensor] = None) -> None:
        super().__init__(values, weights, lengths, offsets)

    def to(self, device: Any, non_blocking: bool = False) -> "JaggedTensor":
        values, lengths = (one.to(device, non_blocking=non_blocking) for one in (self._values, self._lengths))
        return JaggedTensor(values, None if self._weights is None else self._weights.to(device, non_blocking=non_blocking), lengths=lengths)

    @staticmethod
    def from_dense(values: Sequence[torch.Tensor], weights: Optional[Sequence[torch.Tensor]] = None) -> "JaggedTensor":
        """Of a tensor of values for each sample."""
        return JaggedTensor(torch.cat(list(values)), None if weights is None else torch.cat(list(weights)),
                            lengths=torch.tensor([len(one) for one in values], device="cpu"))

    def to_dense(self) -> List[torch.Tensor]:
        return list(torch.split(self._values, self._lengths.tolist()))

    def to_padded_dense(self, desired_length: Optional[int] = None, padding_value: float = 0.0) -> torch.Tensor:
        """[samples, positions, ...] of the first `desired_length` values of each sample, by default as many as the longest one has,
        and `padding_value` behind them."""
        longest = int(self._lengths.max()) if len(self._lengths) else 0
        positions = longest if desired_length is None else _native.whole(desired_length, "desired_length")
        places = torch.arange(positions)
        filled = places < self._lengths[:, None]
        result = self._values.new_full((len(self._lengths), positions, *self._values.shape[1:]), padding_value)
        result[filled] = self._values[(self.offsets()[:-1, None] + places)[filled]]
        return result


class KeyedJaggedTensor(_Jagged):
    """Ids of several keys: values of key 0, sample after sample, then those of key 1, ...; lengths by key and sample."""

    def __init__(self, keys: Sequence[str], values: torch.Tensor, weights: Optional[torch.Tensor] = None,
                 lengths: Optional[torch.Tensor] = None, offsets: Optional[torch.Tensor] = None) -> None:
        super().__init__(values, weights, lengths, offsets)
        self._keys = list(keys)
        if self._keys and len(self._lengths) % len(self._keys):
            raise ValueError(f"lengths: {len(self._lengths)} are not allowed; they must be a multiple of the {len(self._keys)} "
                             "keys")

    @staticmethod
    def from_lengths_sync(keys: Sequence[str], values: torch.Tensor, lengths: torch.Tensor,
                          weights: Optional[torch.Tensor] = None) -> "KeyedJaggedTensor":
        return KeyedJaggedTensor(keys, values, weights, lengths=lengths)

    @staticmethod
    def from_offsets_sync(keys: Sequence[str], values: torch.Tensor, offsets: torch.Tensor,
                          weights: Optional[torch.Tensor] = None) -> "KeyedJaggedTensor":
        return KeyedJaggedTensor(keys, values, weights, offsets=offsets)

    @staticmethod
    def from_jt_dict(tensors: Mapping[str, JaggedTensor]) -> "KeyedJaggedTensor":
        return _joined(list(tensors), list(tensors.values()))

    @staticmethod
    def concat(tensors: Sequence["KeyedJaggedTensor"]) -> "KeyedJaggedTensor":
        """The keys of all, for the same samples."""
        return _joined([key for one in tensors for key in one.keys()], [one._part(place) for one in tensors for place in range(len(one.keys()))])

    def keys(self) -> List[str]:
        return list(self._keys)

    def stride(self) -> int:
        """Samples."""
        return len(self._lengths) // len(self._keys) if self._keys else 0

    def length_per_key(self) -> List[int]:
        counts: List[int] = self._lengths.reshape(len(self._keys), self.stride()).sum(1).tolist()
        return counts

    def offset_per_key(self) -> List[int]:
        result = [0]
        for count in self.length_per_key():
            result.append(result[-1] + count)
        return result

    def __getitem__(self, key: str) -> JaggedTensor:
        if key not in self._keys:
            raise KeyError(f"there is no key {key!r}; there are {', '.join(self._keys) or 'none'}")
        return self._part(self._keys.index(key))

    def _part(self, place: int, count: int = 1) -> JaggedTensor:
        """Of so many keys from this one on."""
        offsets, samples = self.offset_per_key(), self.stride()
        begin, end = offsets[place], offsets[place + count]
        return JaggedTensor(self._values[begin:end], None if self._weights is None else self._weights[begin:end],
                            lengths=self._lengths[place * samples:(place + count) * samples])

    def to_dict(self) -> Dict[str, JaggedTensor]:
        return {key: self[key] for key in self._keys}

    def permute(self, indices: Sequence[int]) -> "KeyedJaggedTensor":
        """The keys of these places, in this order."""
        places = [range(len(self._keys))[place] for place in indices]  # also where one counts from the end
        return _joined([self._keys[place] for place in places], [self._part(place) for place in places] or [self._part(0, 0)])

    def split(self, segments: Sequence[int]) -> List["KeyedJaggedTensor"]:
        """So many keys each."""
        return [self.permute(range(end - count, end)) for count, end in zip(segments, accumulate(segments))]

    def to(self, device: Any, non_blocking: bool = False) -> "KeyedJaggedTensor":
        """On the CPU, where the client reads ids."""
        def move(one: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
            return None if one is None else one.to(device, non_blocking=non_blocking)
        return KeyedJaggedTensor(self._keys, self._values.to(device, non_blocking=non_blocking), move(self._weights),
                                 lengths=move(self._lengths))

    def pin_memory(self) -> "KeyedJaggedTensor":
        return self


def _joined(keys: Sequence[str], parts: Sequence[JaggedTensor]) -> KeyedJaggedTensor:
    """parts: one for each key, which may be there twice; without keys, one that is empty."""
    samples = sorted({len(one.lengths()) for one in parts})
    if len(samples) > 1:
        raise ValueError(f"lengths: {samples} samples are not allowed together; all keys must have the same number of samples")
    weights = [one.weights_or_none() for one in parts]
    given = [one for one in weights if one is not None]
    if given and len(given) != len(weights):
        raise ValueError("weights: they must be given for all keys, or for none")
    return KeyedJaggedTensor(keys, torch.cat([one.values() for one in parts]), torch.cat(given) if given else None, lengths=torch.cat([one.lengths() for one in parts]))


def _check_keys(keys: Sequence[str], count: int, what: str) -> None:
    """What has no key of its own would be left out."""
    if len(set(keys)) != count or len(keys) != count:
        raise ValueError(f"keys: {list(keys)} are not allowed for {count} {what}; there must be one for each, and none twice")


class KeyedTensor(_KeyedTensor):
    """Activations by key: columns of one matrix."""

    def __init__(self, keys: Sequence[str], length_per_key: Sequence[int], values: torch.Tensor, key_dim: int = 1) -> None:
        if key_dim != 1:
            raise ValueError(f"key_dim: {key_dim} is not allowed; it must be 1")
        _check_keys(keys, len(length_per_key), "lengths")
        super().__init__(dict(zip(keys, torch.split(values, list(length_per_key), dim=1))), values)

    @staticmethod
    def from_tensor_list(keys: Sequence[str], tensors: Sequence[torch.Tensor], key_dim: int = 1,
                         cat_dim: int = 1) -> "KeyedTensor":
        if cat_dim != 1:
            raise ValueError(f"cat_dim: {cat_dim} is not allowed; it must be 1")
        return KeyedTensor(keys, [one.shape[1] for one in tensors], torch.cat(list(tensors), dim=1), key_dim)

    def key_dim(self) -> int:
        return 1

    def offset_per_key(self) -> List[int]:
        result = [0]
        for width in self.length_per_key():
            result.append(result[-1] + width)
        return result

    @staticmethod
    def regroup(keyed_tensors: Sequence["KeyedTensor"], groups: Sequence[Sequence[str]]) -> List[torch.Tensor]:
        """For each group its keys side by side."""
        found: Dict[str, List[torch.Tensor]] = {}
        for one in keyed_tensors:
            for key in one.keys():
                found.setdefault(key, []).append(one[key])

        def columns(key: str) -> torch.Tensor:
            if len(found[key]) > 1:
                raise ValueError(f"groups: {key!r} is not allowed, for {len(found[key])} of keyed_tensors have this key")
            return found[key][0]

        return [torch.cat([columns(key) for key in group], dim=1) for group in groups]

    @staticmethod
    def regroup_as_dict(keyed_tensors: Sequence["KeyedTensor"], groups: Sequence[Sequence[str]],
                        keys: Sequence[str]) -> Dict[str, torch.Tensor]:
        _check_keys(keys, len(groups), "groups")
        return dict(zip(keys, KeyedTensor.regroup(keyed_tensors, groups)))
