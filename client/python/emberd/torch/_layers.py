"""Layers of one table, with the signatures of torch.nn.Embedding and torch.nn.EmbeddingBag."""

from __future__ import annotations

from typing import Any, Dict, Optional, Union

import numpy as np
import torch

from .. import _native, config
from .._jagged import largest, to_array
from ..arrays import Dense, Ids, Ragged, as_ints
from ..client import Client, Model
from ._collection import EmbeddingBagCollection, EmbeddingCollection, _uncompiled
from ._optimizer import EmbeddingOptimizer


class _OneTable(torch.nn.Module):
    """What layers of one table have in common."""

    collection: EmbeddingBagCollection

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


class Embedding(_OneTable):
    """One table with the signature of torch.nn.Embedding; `optimizer()` and `finish()` as in EmbeddingBagCollection, which takes the
    other arguments.

    padding_idx: as torch has it: -1 is the last row. Where it stands among the ids, the activation is zero, and no row is read or updated.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: Optional[int] = None, *, client: Optional[Client] = None,
                 model: Union[str, Model], table: Optional[config.TableConfig] = None, **options: Any) -> None:
        super().__init__()
        described = _table_of(num_embeddings, embedding_dim, table, "sum")
        if padding_idx is not None:
            rows = _native.whole(num_embeddings, "num_embeddings", low=1)
            padding_idx = _native.whole(padding_idx, "padding_idx", low=-rows, high=rows - 1) % rows
        self.padding_idx = padding_idx
        self.feature = described.name
        self.collection = EmbeddingCollection([described], client=client, model=model, padding_idx=padding_idx, **options)

    @_uncompiled
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As torch.nn.Embedding: input [...] gives [..., embedding_dim]."""
        if not isinstance(input, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _native.refuse_kind(input, "input", "a tensor of ids")
        found: Dict[str, torch.Tensor] = self.collection({self.feature: input})
        return found[self.feature]


def _table_of(rows: int, dim: int, table: Optional[config.TableConfig], combiner: str) -> config.TableConfig:
    """That of a layer that has one."""
    described = table or config.TableConfig("weight", rows, dim, combiner=combiner)
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
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, *, client: Optional[Client] = None, model: Union[str, Model], mode: str = "mean",
                 include_last_offset: bool = False, table: Optional[config.TableConfig] = None, **options: Any) -> None:
        super().__init__()
        if mode not in ("mean", "sum", "max"):
            raise ValueError(f"mode: {mode!r} is not allowed; it must be 'mean', 'sum' or 'max'")
        self.mode, self.include_last_offset = mode, include_last_offset
        described = _table_of(num_embeddings, embedding_dim, table, "sum" if mode == "max" else mode)
        self.feature = described.name
        kind = EmbeddingCollection if mode == "max" else EmbeddingBagCollection
        self.collection: EmbeddingBagCollection = kind([described], client=client, model=model, **options)

    @_uncompiled
    def forward(self, input: torch.Tensor, offsets: Optional[torch.Tensor] = None,
                per_sample_weights: Optional[torch.Tensor] = None) -> torch.Tensor:
        """As torch.nn.EmbeddingBag: input [samples, ids of a sample], or [ids] with the offset of each sample."""
        ids: Ids
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
        found: Dict[str, torch.Tensor] = self.collection({self.feature: ids})
        return largest(found[self.feature]) if self.mode == "max" else found[self.feature]
