"""Watching a model: rates, hot rows, limits and memory, and tables that begin anew.

It needs `pip install emberd`, and matplotlib for its plot; where PyTorch and TensorBoard are installed, it writes for them.
"""

# %% [markdown]
# ## A model that trains
#
# A few items are looked up often, and most of them seldom, as in what people buy.

# %%
import io
import tempfile

import numpy as np
from plots import draw

import emberd

ITEMS, BATCH = 5000, 400
cluster = emberd.local(shards=2)
client = cluster.connect()
model = client.declare(emberd.ModelConfig(
    "shop", [emberd.TableConfig("items", ITEMS, 16)], [emberd.FeatureConfig("item", "items")], emberd.Adagrad(learning_rate=0.1)))
random = np.random.default_rng(0)


def train(stream, steps):
    for _ in range(steps):
        found = stream.lookup({"item": (random.zipf(1.3, BATCH) - 1) % ITEMS})
        stream.update({"item": found["item"] - 1})


# %% [markdown]
# ## A line while it trains
#
# In a `with` block `emberd.watch` shows itself, once a second: as a line on stderr, or below the cell of a notebook. Here the lines go to a file.

# %%
lines = io.StringIO()
with model.train("run") as stream, emberd.watch(model, interval=0.2, file=lines):
    train(stream, 300)
print("one of the lines: " + "; ".join(lines.getvalue().splitlines()[-2:][0].split("; ")[:3]))

# %% [markdown]
# ## TensorBoard
#
# `write` asks the cluster, and gives the figures to a SummaryWriter beside those of your loss.

# %%
watch = emberd.watch(model)
try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError:
    print("TensorBoard is not installed; it would get " + ", ".join(watch.scalars()))
else:
    with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer, model.train("run") as stream:
        for _ in range(3):
            train(stream, 10)
            watch.write(writer, stream.next_step)
        print(f"TensorBoard got {', '.join(watch.scalars())} of step {stream.next_step}")

# %% [markdown]
# ## What the ids are like
#
# Statistics count from the start of the cluster on; of about a thousand lookups one counts among the hot rows.

# %%
statistics = model.statistics(hot_rows=20)
print(f"statistics: {statistics.ids} ids in {statistics.batches} batches, {statistics.unique_ids} of them unique in their batch; {statistics.dropped_ids} lost")
hottest = statistics.hot_rows[0]
print(f"hot rows: row {hottest.id} of {hottest.table} has {hottest.share:.0%} of the lookups")
draw("watching_hot_rows.png", {"of all lookups": [row.share for row in statistics.hot_rows]}, "hot row", "share")

# %% [markdown]
# ## Limits and memory
#
# `limits` says what batches needed beside what they may need; `set_limits` changes that while the model trains. 0 is no limit.

# %%
limits = model.limits()[model.tables["items"].stack]
print(f"limits: {limits.largest_unique_ids_per_partition} unique ids of a batch were in one partition; allowed: {limits.max_unique_ids_per_partition}")
for shard in client.memory():
    print(f"memory: shard {shard.shard} holds {shard.table_bytes} bytes of tables, and may hold {shard.table_budget_bytes}")

# %% [markdown]
# ## Beginning anew
#
# `reset_model` gives all rows their initial values, and groups begin at step 0. `drop_model` removes the model, so that its name is free for another one.

# %%
trained = model.table("items")
model = client.reset_model("shop")
print(f"reset: {(model.table('items') != trained).any(1).sum()} rows are as they were at first")
with model.train("run") as stream:
    print(f"the group begins at step {stream.next_step}")
print(f"dropped: {client.drop_model('shop')}; models: {[one.name for one in client.models()]}")
client.close()
cluster.close()
