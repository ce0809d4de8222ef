"""Moving from TensorFlow: a loop with tf.nn.embedding_lookup, and the same with its tables on a cluster.

It needs `pip install "emberd[tensorflow]"`, and matplotlib for its plot.
"""

# %% [markdown]
# ## The loop as it was
#
# Two variables hold the tables, and SGD trains them.

# %%
import numpy as np
import tensorflow as tf
from plots import draw

from emberd.compat import tpu_embedding as tpu

ROWS, DIM, BATCH, STEPS = 400, 8, 128, 120
random = np.random.default_rng(0)
first = {name: tf.constant(random.normal(size=(ROWS, DIM)) * 0.3, tf.float32) for name in ("user", "item")}
batches = [{name: tf.constant(random.integers(ROWS, size=BATCH), tf.int32) for name in first} for _ in range(STEPS)]


def loss_of(activations, ids):
    label = tf.cast((ids["user"] + ids["item"]) % 2, tf.float32)
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(label, tf.reduce_sum(activations["user"] * activations["item"], 1)))


variables = {name: tf.Variable(rows) for name, rows in first.items()}
optimizer = tf.keras.optimizers.SGD(20.0)
optimizer.build(list(variables.values()))


@tf.function
def before(ids):
    with tf.GradientTape() as tape:
        loss = loss_of({name: tf.nn.embedding_lookup(one, ids[name]) for name, one in variables.items()}, ids)
    optimizer.apply_gradients(zip(tape.gradient(loss, list(variables.values())), variables.values()))
    return loss


losses = [float(before(ids)) for ids in batches]
print(f"before: loss {losses[0]:.3f} at first, {losses[-1]:.3f} at the end")

# %% [markdown]
# ## The loop with tables on a cluster
#
# The calls are those of `tf.tpu.experimental.embedding`, without a TPU. A lookup gives activations, and what the update of its rows takes. The cluster is the one at
# `EMBERD_ADDRESS`; without that, one is started for this process.

# %%
embedding = tpu.TPUEmbeddingV2(
    {name: tpu.FeatureConfig(tpu.TableConfig(ROWS, DIM, lambda shape, dtype, name=name: first[name], name=name, combiner="sum"), output_shape=[BATCH])
     for name in first}, tpu.SGD(20.0))


@tf.function
def after(ids):
    activations, kept = embedding(ids)
    with tf.GradientTape() as tape:
        tape.watch(activations)
        loss = loss_of(activations, ids)
    embedding.apply_gradients(tape.gradient(loss, activations), kept)
    return loss


again = [float(after(ids)) for ids in batches]
print(f"after: loss {again[-1]:.3f} at the end; the losses differ by {np.abs(np.subtract(losses, again)).max():.1e} at most")
draw("from_tensorflow_learning.png", {"tf.Variable": losses, "on the cluster": again}, "step", "loss")

# %% [markdown]
# ## Rows, and errors
#
# Tables are read as they were declared. In a `tf.function` an id beyond its table is one of TensorFlow's errors; `typed_errors` raises it as Python has it.

# %%
table = embedding.embedding_tables["user"]
print(f"rows: {table.shape}, at most {np.abs(table.numpy() - variables['user'].numpy()).max():.1e} away from the variable's")
try:
    with tpu.typed_errors():
        after({name: tf.fill([BATCH], ROWS) for name in first})
except IndexError as error:
    print(f"refused: {type(error).__name__}: {error}")
