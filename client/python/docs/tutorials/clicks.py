"""Clicks on hashed ids, in PyTorch.

It needs `pip install "emberd[torch]"`, and matplotlib for its plots.
"""

# %% [markdown]
# ## The data
#
# A log of who was shown what, and who clicked. Users and items are texts. Each has a taste that nobody sees, and clicks go by the product of
# the tastes; without them no model can be better than a loss of 0.69.

# %%
import zlib

import numpy as np
import torch
from plots import draw

import emberd
import emberd.torch

random = np.random.default_rng(0)
USERS, ITEMS, SHOWN, BATCH = 600, 300, 40_000, 500
taste = {name: random.choice([-1.0, 1.0], (count, 3)) for name, count in (("user", USERS), ("item", ITEMS))}
users, items = random.integers(USERS, size=SHOWN), random.integers(ITEMS, size=SHOWN)
chance = 1 / (1 + np.exp(-2 * (taste["user"][users] * taste["item"][items]).sum(1)))
clicked = torch.from_numpy((random.random(SHOWN) < chance).astype(np.float32))
texts = {"user": [f"user-{one}" for one in users], "item": [f"item-{one}" for one in items]}
print(f"data: {SHOWN} lines, {clicked.mean():.2f} of them with a click; the first is of {texts['user'][0]} and {texts['item'][0]}")

# %% [markdown]
# ## Ids
#
# A table has rows by number, so that a text is hashed first. Texts with equal hashes share a row: a large table costs memory, and a small
# one accuracy. How large it should be is tried below.


# %%
def hashed(rows):
    return {name: torch.tensor([zlib.crc32(one.encode()) % rows for one in of_name]) for name, of_name in texts.items()}


# %% [markdown]
# ## The model
#
# The tables are on the cluster: `emberd.local()` starts one for this process, and `emberd.connect("host:7400")` takes its place later. The rest is
# PyTorch: activations of both tables, a product, and a bias. `sparse` is an optimizer of torch like the other one.

# %%
cluster = emberd.local(shards=2)
client = cluster.connect()


def train(rows, epochs=4):
    ids = hashed(rows)
    tables = [emberd.TableConfig(name, rows, 8, initializer=emberd.Normal(0.0, 0.3)) for name in texts]
    bags = emberd.torch.EmbeddingBagCollection(tables, client=client, model=f"clicks-{rows}", seed=1,
                                                 optimizer=emberd.Adagrad(learning_rate=0.1, initial_accumulator=1e-8))
    bias = torch.nn.Parameter(torch.zeros(()))
    dense, sparse, losses = torch.optim.Adam([bias], lr=0.01), bags.optimizer(), []
    batches = [({name: one[begin:begin + BATCH] for name, one in ids.items()}, clicked[begin:begin + BATCH]) for begin in range(0, SHOWN, BATCH)]
    seen, held_out = batches[:-10], batches[-10:]
    for batch, label in emberd.torch.Prefetcher(seen * epochs, bags):  # the ids of the next batch are sent ahead
        found = bags(batch)
        loss = torch.nn.functional.binary_cross_entropy_with_logits((found["user"] * found["item"]).sum(1) + bias, label)
        for one in (dense, sparse):
            one.zero_grad()
        loss.backward()
        for one in (dense, sparse):
            one.step()
        losses.append(float(loss))
    bags.finish()
    bags.eval()
    with torch.no_grad():
        of_part = [torch.nn.functional.binary_cross_entropy_with_logits((found["user"] * found["item"]).sum(1) + bias, label)
                   for found, label in ((bags(batch), label) for batch, label in held_out)]
    return losses, float(torch.stack(of_part).mean())


# %% [markdown]
# ## The learning curve
#
# The same model with tables of three sizes. The loss of lines that were held out falls as fewer texts share a row.

# %%
SIZES = [2 ** 6, 2 ** 9, 2 ** 12]
curves, ends = {}, []
for rows in SIZES:
    losses, end = train(rows)
    curves[f"{rows} rows"] = np.convolve(losses, np.full(20, 1 / 20), "valid")
    ends.append(end)
    print(f"clicks: {rows:5d} rows: held-out loss {end:.3f}")
draw("clicks_learning.png", curves, "step", "loss, mean of 20 steps")
draw("clicks_rows.png", {"held out": ends}, "rows of a table", "loss", at=SIZES, log=True)

# %% [markdown]
# ## Hot rows
#
# The cluster counts lookups of rows, so that one sees what the ids are like without a pass over the data.

# %%
statistics = client.model(f"clicks-{SIZES[0]}").statistics(hot_rows=3)
print(f"hot rows: {[(row.table, row.id, row.lookups) for row in statistics.hot_rows]}")
client.close()
cluster.close()
