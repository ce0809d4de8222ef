"""Batches whose ids have been sent ahead."""

from __future__ import annotations

import functools
from typing import Any, Callable, Iterable, Iterator, Optional

import torch

from .. import _native
from ..steps import warn
from ..trainer import ahead, ids_of
from ._ahead import Ahead
from ._collection import EmbeddingBagCollection


class Prefetcher:
    """Iterates over `loader`; the ids of later batches are on their way before a batch is given. A loop over it may be left at any time, and
    may leave a batch out: those behind it are then sent again, and the group is joined anew, by all its ranks, so that a loop which leaves
    many out does better to have them filtered by its loader. The loader may fill one buffer of ids anew: they are copied as they are
    sent; a loop that changes ids does so in `loader`. In evaluation no batch is taken from it before its turn.

    Where the trainer itself takes all cores of the cluster's machine, this makes steps slower; so after 20 steps, and after each 1,000,
    40 steps are made by turns with the ids of later batches and without, and then the faster way is gone on with. Results are the same.

    ids: gives the ids of a batch, those that are given to the module: by default its item or attribute "ids", the first part of a
      pair as (ids, label), or the batch itself. Where that has other names than features, a warning
      says so, and no ids are sent ahead.
    depth: lookups in progress at a time, including that of the batch yielded. At least 2 for `pipelined`.
    """

    def __init__(self, loader: Iterable[Any], collection: EmbeddingBagCollection, depth: int = 2,
                 ids: Optional[Callable[[Any], Any]] = None) -> None:
        self._pace = collection._paces.of(depth)
        self.loader, self.collection, self.depth = loader, collection, depth
        self.ids = ids_of if ids is None else ids
        if not callable(self.ids):
            raise _native.refuse_kind(ids, "ids", "a function")
        self._sends = True
        self._loop = object()  # the last one that was begun

    def __repr__(self) -> str:
        return f"emberd.torch.Prefetcher of {self.collection.model.name!r}, depth={self.depth}"

    def __iter__(self) -> Iterator[Any]:
        self.collection._forget_ahead(self._loop)  # an error that is kept, as a notebook does, keeps its loop from ending
        self._loop = loop = object()
        for one, batch in ahead(self.loader, functools.partial(self._send, loop), self._pace, lambda _: self.collection._forget_ahead(loop), sends=self._is_sending):
            if one is None:  # it was not sent: of those before it, which have all been given, some may only have been evaluated
                self.collection._forget_ahead(loop)
            self.collection._note_given(one, loop)
            yield batch

    def _is_sending(self) -> bool:
        """If not, as in evaluation, batches are given as they come: a loader may fill one buffer anew."""
        return self._sends and self.collection.training and torch.is_grad_enabled()

    def _send(self, loop: object, batch: Any) -> Optional[Ahead]:
        """What the collection knows the batch by, if its ids have been sent ahead."""
        if not self._is_sending():
            return None
        ids = self.ids(batch)
        if self.ids is ids_of:
            self._check_names(ids)
        return self.collection._prefetch(ids, loop) if self._sends else None

    def _check_names(self, ids: Any) -> None:
        """Of a batch the ids may be taken later; they would be others than these."""
        names = list(ids.keys() if callable(getattr(ids, "keys", None)) else ())
        unknown = [name for name in names if name not in self.collection.model.features]
        if unknown or not callable(getattr(ids, "keys", None)):
            self._sends = False
            known = ", ".join(map(repr, self.collection.model.features))
            what = f"{unknown[0]!r} of a batch is no feature" if unknown else f"a batch is a {type(ids).__name__}"
            warn(f"emberd: this Prefetcher sends no ids ahead: {what}; say which are the ids of {known}: "
                 f"ids=lambda batch: {{name: batch[name] for name in ({known},)}}")

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]
