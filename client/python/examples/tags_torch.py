"""The strongest of an item's tags decides, in PyTorch: EmbeddingBag with mode="max", in loops that are left early and begun again.

usage: tags_torch.py

A cluster is started for the run. An item has up to six of 200 tags, and is liked if one of them is among twenty. "right" are held-out items, "steps" those that
the cluster has made: ids that were sent ahead, when a loop was left, make none.
"""

import torch

import emberd
import emberd.torch

TAGS, DIM, BATCH, STEPS = 200, 8, 128, 200


def items(count, seed):
    """Tags of all items side by side, where those of each begin and the last ones end, and which items are liked."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (count,), generator=random)
    tags, offsets = torch.randint(TAGS, (int(lengths.sum()),), generator=random), torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    liked = torch.zeros(count).index_add(0, torch.arange(count).repeat_interleave(lengths), (tags % 10 == 3).float()) > 0
    return tags, offsets, liked.float()


def main():
    torch.manual_seed(1)
    with emberd.local(shards=2) as cluster, cluster.connect() as client:
        table = emberd.TableConfig("tags", TAGS, DIM, initializer=emberd.Normal(0.0, 0.1), optimizer=emberd.Adagrad(learning_rate=2.0))
        bag = emberd.torch.EmbeddingBag(TAGS, DIM, client=client, model="tags-torch", mode="max", include_last_offset=True, table=table)
        dense = torch.nn.Linear(DIM, 1)
        optimizers = [torch.optim.Adam(dense.parameters(), lr=0.02), bag.optimizer()]
        batches = [items(BATCH, step) for step in range(STEPS)]
        # The ids of the next batch are sent while this one computes: those of the layer's feature, which has the name of the table.
        prefetcher = emberd.torch.Prefetcher(batches, bag.collection, ids=lambda batch: {"tags": emberd.Ragged(batch[0], batch[1])})
        for loop in ("short", "whole"):
            for number, (tags, offsets, liked) in enumerate(prefetcher):
                if loop == "short" and number == 20:
                    break  # the ids of this batch, and of those behind it, are forgotten
                loss = torch.nn.functional.binary_cross_entropy_with_logits(dense(bag(tags, offsets))[:, 0], liked)
                loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        steps = bag.collection.next_step
        bag.eval()
        tags, offsets, liked = items(1000, STEPS)
        with torch.no_grad():
            right = ((dense(bag(tags, offsets))[:, 0] > 0) == (liked > 0)).float().mean()
        bag.finish()
    print(f"tags: steps={steps} loss={float(loss):.3f} right={right:.3f}")


if __name__ == "__main__":
    main()
