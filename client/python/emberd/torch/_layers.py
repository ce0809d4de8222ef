"""Layers of one table, with the signatures of torch.nn.Embedding and torch.nn.EmbeddingBag."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Mapping, Optional, Tuple, Type, TypeVar, Union

import numpy as np
import torch

from .. import _native, _tables, arrays, config, errors
from .._jagged import checked_ragged, largest, to_array
from .._loading import stretches
from ..arrays import Dense, Ids, Ragged, as_ints
from ..client import Client, Model
from ._collection import EmbeddingBagCollection, EmbeddingCollection, _uncompiled
from ._optimizer import EmbeddingOptimizer
from ._rows import HOW, Rows

MOST_BYTES = 1 << 30  # of a table that `weight` reads

# Arguments of torch's layers that are none here: the values that are taken, for they describe what happens here, and why no others are.
_MEANT_BY_TORCH: Mapping[str, Tuple[Tuple[Any, ...], str]] = {
    "max_norm": ((None,), "a lookup changes no row; `clip_weight_min` and `clip_weight_max` of the optimizer bound what an update gives"),
    "norm_type": ((2.0, 2), "it belongs to max_norm, which is not allowed either"),
    "scale_grad_by_freq": ((False,), "gradients of a row are summed, however often it occurs in the batch"),
    "sparse": ((False, True), "an update changes the rows of the batch and no other, whatever it says"),
    "device": ((None, "cpu", torch.device("cpu")), "rows are on the cluster, and activations on the CPU: move these by their `to`"),
    "dtype": ((None, torch.float32), "activations are float32; `table=emberd.TableConfig(..., storage_dtype=...)` stores rows in 16 bits"),
    "_weight": ((None,), "from_pretrained makes a layer of given rows"),
}


def _without_torchs(options: Dict[str, Any]) -> Dict[str, Any]:
    """Those of EmbeddingBagCollection among the options of a layer."""
    for name in _MEANT_BY_TORCH.keys() & options.keys():
        allowed, why = _MEANT_BY_TORCH[name]
        if not any(type(options[name]) is type(one) and options[name] == one for one in allowed):
            raise errors.InvalidArgument(f"{name}: {options[name]!r} is not allowed, only {' or '.join(map(repr, allowed))}: {why}")
    return {name: value for name, value in options.items() if name not in _MEANT_BY_TORCH}


class _Own(torch.autograd.Function):
    """The same activations, as what an operation gave."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def _changeable(found: torch.Tensor) -> torch.Tensor:
    """Operations in place are allowed on what torch's layers give. Autograd refuses them for a leaf."""
    changeable: torch.Tensor = _Own.apply(found) if found.is_leaf and found.requires_grad else found  # type: ignore[no-untyped-call]
    return changeable


Layer = TypeVar("Layer", bound="_OneTable")


class _OneTable(torch.nn.Module):
    """What layers of one table have in common."""

    collection: EmbeddingBagCollection

    @property
    def weight(self) -> torch.Tensor:
        """The rows as they are now, float32 [num_embeddings, embedding_dim]: a copy, read with each access. It requires a gradient unless the table is
        frozen, as with torch; a gradient that reaches it, a change of it and an assignment raise, for they would be lost.

        ResourceExhausted above 1 GiB: read some rows by `collection.model.read_rows`, or all in parts by `collection.model.export`. Of a pipelined
        layer the last update may be missing.
        """
        model, (table,) = self.collection.model, self.collection.config.tables
        needed = 4 * table.vocabulary_size * table.embedding_dim
        if needed > MOST_BYTES:
            raise errors.ResourceExhausted(
                f"weight: {table.vocabulary_size} x {table.embedding_dim} are {_tables.size(needed)}, which is above {_tables.size(MOST_BYTES)}; read some rows by "
                f"collection.model.read_rows({table.name!r}, ids), or all in parts by collection.model.export({table.name!r})")
        self.collection._confirm()
        return Rows.read(model.table(table.name), table.name not in self.collection.frozen)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise AttributeError(f"weight: it cannot be assigned, for rows are on the cluster; {HOW}")
        super().__setattr__(name, value)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: List[str], unexpected_keys: List[str],
                              error_msgs: List[str]) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if prefix + "weight" in state_dict:
            name = self.collection.config.tables[0].name
            error_msgs.append(f"{prefix}weight: rows are on the cluster, and not in the state of a module; load them by collection.model.load_table({name!r}, rows) of the "
                              "layer, or make it by from_pretrained, and leave the key out of the state")

    def optimizer(self, lr: Optional[float] = None, weight_decay: Optional[float] = None) -> EmbeddingOptimizer:
        """A torch.optim.Optimizer whose step is the update. As EmbeddingBagCollection.optimizer has the arguments."""
        return self.collection.optimizer(lr, weight_decay)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Freezes the table, or thaws it, as EmbeddingBagCollection.requires_grad_ does."""
        self.collection.requires_grad_(requires_grad)
        return self

    def finish(self) -> None:
        """Leaves the group, once all updates have been made and checkpoints saved."""
        self.collection.finish()

    @classmethod
    def _of_rows(cls: Type[Layer], embeddings: Any, freeze: bool, table: Optional[config.TableConfig], **options: Any) -> Layer:
        """What from_pretrained makes."""
        rows = _given_rows(embeddings)
        count, dim = map(int, rows.shape)
        mode = options.get("mode", "sum")
        described = _table_of(count, dim, table, "sum" if mode == "max" else mode)
        if described.initializer is not None:
            raise errors.InvalidArgument("table: initializer: it must be None with from_pretrained, whose `embeddings` are the first rows")
        kind: Any = cls
        made: Layer = kind(count, dim, table=dataclasses.replace(described, initializer=rows), **options)
        if freeze or isinstance(options["model"], Model):
            made._check_there(rows)
        if freeze:
            made.requires_grad_(False)
        return made

    def _check_there(self, rows: Any) -> None:
        """A model that was there already keeps its rows: are they these?"""
        model, name = self.collection.model, self.collection.config.tables[0].name
        for begin, end in stretches(rows.shape):
            given = arrays.as_given_rows(rows[begin:end], "embeddings")
            there = np.isclose(model.read_rows(name, np.arange(begin, end)), given, rtol=0.01, atol=1e-6).all(1)  # near, if they are stored in 16 bits
            if not there.all():
                raise errors.FailedPrecondition(
                    f"embeddings: row {begin + int(np.argmin(there))} of table {name!r} is another one in model {model.name!r}, which is there already and keeps its "
                    f"rows. Overwrite them by model.load_table({name!r}, embeddings), drop that model by client.drop_model({model.name!r}), or give this one another name")


class Embedding(_OneTable):
    """One table with the signature of torch.nn.Embedding; `optimizer()` and `finish()` as in EmbeddingBagCollection, which takes the
    other arguments.

    padding_idx: as torch has it: -1 is the last row. Where it stands among the ids, the activation is zero, and no row is read or updated.
    Of torch's other arguments, those that change what a layer does are refused; see `from_pretrained`.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: Optional[int] = None, *, client: Optional[Client] = None,
                 model: Union[str, Model], table: Optional[config.TableConfig] = None, **options: Any) -> None:
        super().__init__()
        described = _table_of(num_embeddings, embedding_dim, table, "sum")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = _padding_of(padding_idx, num_embeddings)
        self.feature = described.name
        self.collection = EmbeddingCollection([described], client=client, model=model, padding_idx=self.padding_idx, **_without_torchs(options))

    @classmethod
    def from_pretrained(cls, embeddings: Any, freeze: bool = True, padding_idx: Optional[int] = None, max_norm: Optional[float] = None, norm_type: float = 2.0,
                        scale_grad_by_freq: bool = False, sparse: bool = False, *, table: Optional[config.TableConfig] = None, **options: Any) -> "Embedding":
        """A layer whose first rows are given, as torch.nn.Embedding.from_pretrained makes it; `model` and the other arguments are those of the class.

        embeddings: [num_embeddings, embedding_dim], a tensor or an array; zeros in the row of padding_idx. They go to the cluster when the model is made, 8 MiB at a time.
        freeze: the rows stay as they are until `requires_grad_()`. A model that is there already keeps its rows. If they are others: FailedPrecondition
          where `freeze` is set or `model` is an emberd.Model, else the layer goes on with the rows that are there.
        max_norm, norm_type, scale_grad_by_freq: InvalidArgument unless they are torch's defaults. sparse: either is as True is with torch.
        table: an emberd.TableConfig without an initializer, which has the optimizer and so on; default: one named "weight".
        """
        rows = _given_rows(embeddings)
        place = _padding_of(padding_idx, len(rows))
        if place is not None and np.any(arrays.as_given_rows(rows[place:place + 1], "embeddings")):
            raise errors.InvalidArgument(f"embeddings: row {place} is not allowed, for padding_idx is {padding_idx} and its activation is zero here, where torch gives the "
                                         "row; it must be zeros, or padding_idx None")
        return cls._of_rows(rows, freeze, table, padding_idx=padding_idx, max_norm=max_norm, norm_type=norm_type,
                            scale_grad_by_freq=scale_grad_by_freq, sparse=sparse, **options)

    @_uncompiled
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As torch.nn.Embedding: input [...] gives [..., embedding_dim]."""
        if not isinstance(input, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _native.refuse_kind(input, "input", "a tensor of ids")
        found: Dict[str, torch.Tensor] = self.collection({self.feature: input if input.dim() else input[None]})
        own = _changeable(found[self.feature])
        return own if input.dim() else own[0]


def _given_rows(embeddings: Any) -> Any:
    """Something with a shape, of which as_given_rows takes parts."""
    rows = arrays.shaped(embeddings, "embeddings")
    arrays.check_shape(rows, "embeddings", rows.ndim == 2, "[num_embeddings, embedding_dim]")
    return rows


def _padding_of(padding_idx: Optional[int], num_embeddings: int) -> Optional[int]:
    """As torch has it: -1 is the last row."""
    if padding_idx is None:
        return None
    rows = _native.whole(num_embeddings, "num_embeddings", low=1)
    return _native.whole(padding_idx, "padding_idx", low=-rows, high=rows - 1) % rows


def _table_of(rows: int, dim: int, table: Optional[config.TableConfig], combiner: str) -> config.TableConfig:
    """That of a layer that has one."""
    if table is not None and not isinstance(table, config.TableConfig):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _native.refuse_kind(table, "table", "an emberd.TableConfig")
    described = config.TableConfig("weight", rows, dim, combiner=combiner) if table is None else table
    if (rows, dim) != (described.vocabulary_size, described.embedding_dim):
        raise ValueError(f"num_embeddings, embedding_dim: {rows!r} and {dim!r} are not allowed; they must be those "
                         f"of table, {described.vocabulary_size} and {described.embedding_dim}")
    return described


class EmbeddingBag(_OneTable):
    """One table with the signature of torch.nn.EmbeddingBag; `optimizer()` and `finish()` as in EmbeddingBagCollection,
    which takes the other arguments.

    mode: "mean", "sum" or "max". Of "max", the activation has of each column the largest of a sample's rows, and zero where there is none;
      the gradient goes to the first of equal ones. A row comes for each id, `collection` is an EmbeddingCollection, and all rows of the
      batch take part in the update, those that gave no maximum with a gradient of zero.
    padding_idx: as torch has it: -1 is the last row. Where it stands among the ids, it counts in no mode, and no row is read or updated.
    Of torch's other arguments, those that change what a layer does are refused; see `from_pretrained`.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, *, client: Optional[Client] = None, model: Union[str, Model], mode: str = "mean",
                 include_last_offset: bool = False, padding_idx: Optional[int] = None, table: Optional[config.TableConfig] = None, **options: Any) -> None:
        super().__init__()
        if mode not in ("mean", "sum", "max"):
            raise ValueError(f"mode: {mode!r} is not allowed; it must be 'mean', 'sum' or 'max'")
        self.mode, self.include_last_offset = mode, include_last_offset
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = _padding_of(padding_idx, num_embeddings)
        described = _table_of(num_embeddings, embedding_dim, table, "sum" if mode == "max" else mode)
        self.feature = described.name
        kind = EmbeddingCollection if mode == "max" else EmbeddingBagCollection
        self.collection: EmbeddingBagCollection = kind([described], client=client, model=model, **_without_torchs(options))

    @classmethod
    def from_pretrained(cls, embeddings: Any, freeze: bool = True, max_norm: Optional[float] = None, norm_type: float = 2.0, scale_grad_by_freq: bool = False,
                        mode: str = "mean", sparse: bool = False, include_last_offset: bool = False, padding_idx: Optional[int] = None, *,
                        table: Optional[config.TableConfig] = None, **options: Any) -> "EmbeddingBag":
        """A layer whose first rows are given, as torch.nn.EmbeddingBag.from_pretrained makes it. The arguments are those of the class, and of
        `Embedding.from_pretrained`."""
        return cls._of_rows(embeddings, freeze, table, mode=mode, include_last_offset=include_last_offset, padding_idx=padding_idx, max_norm=max_norm,
                            norm_type=norm_type, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse, **options)

    @_uncompiled
    def forward(self, input: torch.Tensor, offsets: Optional[torch.Tensor] = None,
                per_sample_weights: Optional[torch.Tensor] = None) -> torch.Tensor:
        """As torch.nn.EmbeddingBag: input [samples, ids of a sample], or [ids] with the offset of each sample."""
        ids: Ids
        if not isinstance(input, torch.Tensor) and (offsets is not None or self.mode == "max" or self.padding_idx is not None):  # pyright: ignore
            raise _native.refuse_kind(input, "input", "a tensor of ids")
        if self.mode == "max" and per_sample_weights is not None:
            raise ValueError("per_sample_weights: not allowed with mode 'max', which combines rows as they are; give none, or take mode 'sum'")
        if self.mode == "max" and offsets is None and input.dim() != 2:
            raise ValueError(f"input: the shape {list(input.shape)} is not allowed; with mode 'max' and no offsets it is [samples, ids of a sample]")
        if offsets is None:
            ids = input if per_sample_weights is None else Dense(input, per_sample_weights)
        else:
            splits = as_ints(to_array(offsets, "offsets"), "offsets")
            if input.dim() != 1 or splits.ndim != 1:
                raise ValueError(f"input, offsets: the shapes {list(input.shape)} and {list(splits.shape)} are not allowed; with "
                                 "offsets both have one dimension")
            if not self.include_last_offset:
                splits = np.append(splits, input.numel())
            ids = Ragged(input, splits, per_sample_weights)
        if self.padding_idx is not None:
            ids = self._without_padding(input, ids, per_sample_weights)
        found: Dict[str, torch.Tensor] = self.collection({self.feature: ids})
        return largest(found[self.feature]) if self.mode == "max" else _changeable(found[self.feature])

    def _without_padding(self, input: torch.Tensor, ids: Any, weights: Optional[torch.Tensor]) -> Ragged:
        """The ids that are no padding, by the splits of a Ragged or the rows of a matrix."""
        if weights is not None and weights.shape != input.shape and not (weights.numel() == 1 and weights.dim() <= 1):
            raise errors.InvalidArgument(f"per_sample_weights: the shape {list(weights.shape)} is not allowed; it must be that of input, {list(input.shape)}, or [1]")
        kept = (input != self.padding_idx).reshape(-1)
        before = np.append(0, np.cumsum(to_array(kept, "input")))  # how many stay, of those before each id
        samples = len(input) if input.dim() else 1
        splits = (checked_ragged(ids, self.feature).row_splits if isinstance(ids, Ragged) else
                  np.arange(samples + 1) * (input.numel() // max(1, samples)))
        if weights is not None and weights.shape == input.shape:
            weights = weights.reshape(-1)[kept]
        return Ragged(input.reshape(-1)[kept], before[splits], weights)
