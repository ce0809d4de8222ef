"""The next item of a sequence, in PyTorch.

It needs `pip install "emberd[torch]"`, and matplotlib for its plot.
"""

# %% [markdown]
# ## The data
#
# Users go from item to item: the next one depends on the last, but for a tenth of their moves. Their histories are of different lengths, and
# id 0 fills short ones up.

# %%
import torch
from plots import draw

import emberd
import emberd.torch

ITEMS, LAST, DIM, BATCH = 200, 12, 16, 64


def histories(users, seed):
    random = torch.Generator().manual_seed(seed)
    items = torch.randint(1, ITEMS + 1, (users, LAST + 1), generator=random)
    for place in range(1, LAST + 1):
        moved = torch.rand(users, generator=random) < 0.9
        items[:, place] = torch.where(moved, (items[:, place - 1] * 7) % ITEMS + 1, items[:, place])
    lengths = torch.randint(3, LAST + 2, (users, 1), generator=random)
    return items * (torch.arange(LAST, -1, -1) < lengths)


train_set, held_out = histories(1024, 1), histories(256, 2)
print(f"data: {train_set[0].tolist()}")

# %% [markdown]
# ## The table
#
# An `EmbeddingCollection` combines no rows: ids `[users, positions]` give activations `[users, positions, embedding_dim]`. Where the padding
# stands they are zero, and no row is read or trained; `mask` says where that is.

# %%
cluster = emberd.local(shards=2)
client = cluster.connect()
items = emberd.torch.EmbeddingCollection(
    [emberd.TableConfig("items", ITEMS + 1, DIM, initializer=emberd.Normal(0.0, 0.3))], client=client, model="next-item", padding_idx=0,
    optimizer=emberd.Adam(learning_rate=0.02, bias_correction=True), seed=1)
ids = {"items": train_set[:2, :-1]}
print(f"activations: {list(items.eval()(ids)['items'].shape)}; padding in the first: {int((~items.mask(ids)['items'][0]).sum())}")

# %% [markdown]
# ## The network
#
# A GRU over the activations, and scores of all items behind each position. The loss ignores positions before which there is no item.

# %%
torch.manual_seed(1)
gru, scores = torch.nn.GRU(DIM, 48, batch_first=True), torch.nn.Linear(48, ITEMS + 1)
dense, sparse = torch.optim.Adam([*gru.parameters(), *scores.parameters()], lr=0.01), items.train().optimizer()
losses = []
for epoch in range(8):
    order = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(epoch))
    batches = [({"items": train_set[some, :-1]}, train_set[some, 1:]) for some in order.split(BATCH)]
    for ids, after in emberd.torch.Prefetcher(batches, items):
        found = scores(gru(items(ids)["items"])[0])
        loss = torch.nn.functional.cross_entropy(found.flatten(0, 1), after.flatten(), ignore_index=0)
        for one in (dense, sparse):
            one.zero_grad()
        loss.backward()
        for one in (dense, sparse):
            one.step()
        losses.append(float(loss))
draw("sequences_learning.png", {"loss": losses}, "step", "nats")

# %% [markdown]
# ## What it has learned
#
# In `eval()` rows are looked up, and no step is made. No model can hit more than nine of ten.

# %%
items.finish()
items.eval()
with torch.no_grad():
    best = scores(gru(items({"items": held_out[:, :-1]})["items"])[0])[:, -1].argmax(1)
print(f"sequences: loss {losses[0]:.2f} at first, {losses[-1]:.2f} at the end; {(best == held_out[:, -1]).float().mean():.2f} of the next items are hit")
print(f"padding: its row is still {items.model.read_rows('items', [0]).std() > 0 and 'the first one'}")
client.close()
cluster.close()
