"""Moving from Keras: a model with keras.layers.Embedding, and the same with its tables on a cluster.

It needs `pip install "emberd[keras]"` and a backend of Keras, and matplotlib for its plot.
"""

# %% [markdown]
# ## The model as it was

# %%
import keras
import numpy as np
from plots import draw

import emberd
import emberd.keras

ROWS, DIM, BATCH, STEPS = 500, 8, 128, 100
random = np.random.default_rng(0)
users, items = (random.integers(ROWS, size=BATCH * STEPS).astype(np.int32) for _ in range(2))
label = ((users + items) % 2).astype(np.float32)[:, None]
first = {name: random.normal(size=(ROWS, DIM)).astype(np.float32) * 0.3 for name in ("user", "item")}


class Losses(keras.callbacks.Callback):
    """Of each batch, by itself."""

    def __init__(self):
        super().__init__()
        self.losses, self.summed = [], 0.0

    def on_epoch_begin(self, epoch, logs=None):
        self.summed = 0.0

    def on_train_batch_end(self, batch, logs=None):
        summed = (batch + 1) * float(logs["loss"])  # Keras gives the mean since the epoch began
        self.losses.append(summed - self.summed)
        self.summed = summed


def fit(net, inputs, epochs=3):
    net.compile(optimizer=keras.optimizers.SGD(20.0), loss=keras.losses.BinaryCrossentropy(from_logits=True))
    seen = Losses()
    net.fit(inputs, label, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=[seen])
    return seen.losses


def scores(user, item):
    return keras.ops.sum(user * item, axis=1, keepdims=True)


class Before(keras.Model):
    def __init__(self):
        super().__init__()
        self.user, self.item = (keras.layers.Embedding(ROWS, DIM, weights=[first[name]]) for name in ("user", "item"))

    def call(self, inputs):
        return scores(self.user(inputs["user"]), self.item(inputs["item"]))


losses = fit(Before(), {"user": users, "item": items})
print(f"before: loss {losses[0]:.3f} at first, {losses[-1]:.3f} at the end")

# %% [markdown]
# ## The model with its tables on a cluster
#
# One layer has all tables. Each says its own optimizer, for the optimizer of the model does not see rows. `initializer` may be an array: rows that there are
# already come along.

# %%
cluster = emberd.local(shards=2)
client = cluster.connect()


def feature(name):
    table = emberd.keras.TableConfig(name, ROWS, DIM, initializer=first[name], optimizer=keras.optimizers.SGD(20.0))
    return emberd.keras.FeatureConfig(name, table, (BATCH,), (BATCH, DIM))


class After(keras.Model):
    def __init__(self):
        super().__init__()
        self.tables = emberd.keras.DistributedEmbedding({name: feature(name) for name in ("user", "item")}, client=client, model="moved")

    def call(self, inputs, training=False):
        found = self.tables(inputs, training=training)
        return scores(found["user"], found["item"])


net = After()
again = fit(net, {"user": users, "item": items})
print(f"after: loss {again[-1]:.3f} at the end; the losses differ by {np.abs(np.subtract(losses, again)).max():.1e} at most")
draw("from_keras_learning.png", {"keras.layers.Embedding": losses, "on the cluster": again}, "step", "loss")

# %% [markdown]
# ## What is on the cluster
#
# `evaluate` and `predict` make no step. A saved model holds where its tables are, and `save_checkpoint` saves these.

# %%
before = net.tables.next_step
net.predict({"user": users[:BATCH], "item": items[:BATCH]}, verbose=0)
print(f"steps: {before}, and after predict {net.tables.next_step}")
print(f"rows: {net.tables.get_embedding_tables()['user'].shape}")
net.tables.finish()
client.close()
cluster.close()
