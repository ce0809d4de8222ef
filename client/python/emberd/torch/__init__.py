"""Embedding tables of a cluster in PyTorch, from version 1.13 on.

    ebc = emberd.torch.EmbeddingBagCollection(tables, client=client, model="ctr", group="run-7")
    opt, sparse = torch.optim.Adam(net.parameters()), ebc.optimizer(lr=0.02)
    for batch in emberd.torch.Prefetcher(loader, ebc, ids=lambda batch: batch.ids):
        loss = bce(net(batch.dense, ebc(batch.ids)), batch.label)
        loss.backward(); opt.step(); sparse.step(); opt.zero_grad(); sparse.zero_grad()

Gradients of the ranks of a group are **summed**; `reduction="mean"` scales them by 1 / size, as DDP does.
"""

from ._collection import EmbeddingBagCollection, EmbeddingCollection, KeyedTensor
from ._layers import Embedding, EmbeddingBag
from ._optimizer import EmbeddingOptimizer
from ._prefetcher import Prefetcher

__all__ = ["Embedding", "EmbeddingBag", "EmbeddingBagCollection", "EmbeddingCollection", "EmbeddingOptimizer", "KeyedTensor", "Prefetcher"]
