"""From training to serving: checkpoints that are served while training goes on.

It needs `pip install emberd`, and matplotlib for its plot.
"""

# %% [markdown]
# ## A model that trains
#
# The cluster has a folder for its checkpoints. The model learns which items go with a user, in NumPy.

# %%
import asyncio
import tempfile
import time

import numpy as np
from plots import draw

import emberd
import emberd.aio

USERS = ITEMS = 400
folder = tempfile.TemporaryDirectory()
cluster = emberd.local(shards=2, data=folder.name)
client = cluster.connect()
model = client.declare(emberd.ModelConfig(
    "scores", [emberd.TableConfig(name, USERS, 16, initializer=emberd.Normal(0.0, 0.1)) for name in ("user", "item")],
    [emberd.FeatureConfig(name, name) for name in ("user", "item")], emberd.Adagrad(learning_rate=0.2), seed=1))
random = np.random.default_rng(0)


def some(count):
    ids = {"user": random.integers(USERS, size=count), "item": random.integers(ITEMS, size=count)}
    return ids, (ids["user"] + ids["item"]) % 3 == 0


def scores(found):
    return 1 / (1 + np.exp(-(found["user"] * found["item"]).sum(1)))


def train(stream, steps):
    for _ in range(steps):
        ids, label = some(512)
        found = stream.lookup(ids)
        error = (scores(found) - label)[:, None]
        stream.update({"user": error * found["item"], "item": error * found["user"]})


# %% [markdown]
# ## Checkpoints, one served after the other
#
# `serve` makes a model for lookups alone, here with weights of 16 bits, which take half of the memory. Called again it puts a newer checkpoint in the place of
# the older one, and no request fails meanwhile. What is served does not move while training goes on.

# %%
held_out, label = some(4000)
right = []
with model.train("run") as stream:
    for version in range(8):
        train(stream, 25)
        model.save_checkpoint(f"v{version}")
        live = client.serve("scores", f"v{version}", serve_as="scores-live", storage_dtype="BFLOAT16")
        right.append(((scores(live.lookup(held_out)) > 0.5) == label).mean())
draw("serving_versions.png", {"served": right}, "version", "share of right answers")
print(f"serving: {right[0]:.2f} of the answers are right at first, {right[-1]:.2f} at the end")
print("bytes:", {one.name: one.table_bytes for one in client.models()})

# %% [markdown]
# ## Many requests at a time
#
# A web server answers on asyncio. `emberd.aio` has the calls of a client to be awaited; `examples/serving.py` puts requests that come together into one batch.


# %%
async def ask(address, requests):
    async with await emberd.aio.connect(address) as served:
        served_model, took = await served.model("scores-live"), []

        async def one(user):
            begin = time.perf_counter()
            found = await served_model.lookup({"user": np.array([user]), "item": np.arange(0, ITEMS, 50)[:1]})
            took.append(1000 * (time.perf_counter() - begin))
            return scores(found)[0]

        for begin in range(0, requests, 16):  # 16 at a time
            await asyncio.gather(*(one(user % USERS) for user in range(begin, begin + 16)))
        return np.sort(took)


took = asyncio.run(ask(cluster.address, 480))
draw("serving_latency.png", {"requests, 16 at a time": took}, "requests, the fastest first", "ms")
print(f"requests: half of them took less than {took[len(took) // 2]:.1f} ms")
client.close()
cluster.close()
folder.cleanup()
