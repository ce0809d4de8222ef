"""Two towers in JAX, with and without the lookup inside of the jitted function.

It needs `pip install "emberd[jax]" optax`, and matplotlib for its plot.
"""

# %% [markdown]
# ## The tables
#
# Ratings of items by users, made from three numbers of each that nobody sees. The tables have the names, sizes and optimizers that a description says.

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax
from plots import draw

import emberd
import emberd.jax

USERS, ITEMS, BATCH, STEPS = 500, 400, 256, 150
random = np.random.default_rng(0)
hidden = {"user": random.normal(size=(USERS, 3)), "item": random.normal(size=(ITEMS, 3))}


def batch():
    ids = {"user": random.integers(USERS, size=BATCH, dtype=np.int32), "item": random.integers(ITEMS, size=BATCH, dtype=np.int32)}
    return {"ids": ids, "rating": (hidden["user"][ids["user"]] * hidden["item"][ids["item"]]).sum(1).astype(np.float32)}


batches = [batch() for _ in range(STEPS)]
cluster = emberd.local(shards=2)
client = cluster.connect()


def tables(name):
    return client.declare(emberd.ModelConfig(
        name, [emberd.TableConfig("user", USERS, 8, initializer=emberd.Normal(0.0, 0.5)), emberd.TableConfig("item", ITEMS, 8, initializer=emberd.Normal(0.0, 0.5))],
        [emberd.FeatureConfig("user", "user"), emberd.FeatureConfig("item", "item")], emberd.Adagrad(learning_rate=0.2, initial_accumulator=1e-6), seed=1))


# %% [markdown]
# ## A loop around the jitted function
#
# `prefetch` sends the ids of the next batch ahead. The jitted function gets activations, and gives their gradients; `update` sends these. Nothing of the
# cluster is seen by JAX.


# %%
def loss_of(dense, activations, rating):
    found = (jnp.tanh(activations["user"] @ dense["user"]) * jnp.tanh(activations["item"] @ dense["item"])) @ dense["out"]
    return jnp.mean((found - rating) ** 2)


optimizer = optax.adam(0.01)


def first_dense():
    keys = jax.random.split(jax.random.key(0), 3)
    dense = {name: 0.5 * jax.random.normal(key, shape) for name, key, shape in zip(("user", "item", "out"), keys, ((8, 16), (8, 16), (16,)))}
    return dense, optimizer.init(dense)


@jax.jit
def outside(dense, state, activations, rating):
    loss, (of_dense, of_activations) = jax.value_and_grad(loss_of, argnums=(0, 1))(dense, activations, rating)
    updates, state = optimizer.update(of_dense, state)
    return loss, optax.apply_updates(dense, updates), state, of_activations


embedding, (dense, state), losses = emberd.jax.Embedding(tables("outside"), group="run"), first_dense(), []
for step, one in embedding.prefetch(batches):
    loss, dense, state, gradients = outside(dense, state, embedding.receive(step), one["rating"])
    embedding.update(step, gradients)
    losses.append(float(loss))
embedding.finish()
print(f"outside: loss {losses[0]:.2f} at first, {np.mean(losses[-10:]):.2f} at the end")

# %% [markdown]
# ## The lookup inside
#
# `in_jit` is a function with a gradient: its forward pass receives, its backward pass sends the update. The token is a zero, by which JAX knows that there is
# something to differentiate. The numbers are the same.

# %%
embedding, (dense, state), again = emberd.jax.Embedding(tables("inside"), group="run"), first_dense(), []


@jax.jit
def inside(dense, state, token, one, step):
    def loss_inside(dense, token):
        return loss_of(dense, embedding.in_jit(token, one["ids"], step), one["rating"])

    loss, (of_dense, _) = jax.value_and_grad(loss_inside, argnums=(0, 1))(dense, token)
    updates, state = optimizer.update(of_dense, state)
    return loss, optax.apply_updates(dense, updates), state


for step, one in embedding.prefetch(batches):
    loss, dense, state = inside(dense, state, embedding.token(), one, step)
    again.append(float(loss))
embedding.finish()
print(f"inside: the losses differ by {np.abs(np.subtract(losses, again)).max():.1e} at most")
draw("jax_loop_learning.png", {"outside": losses, "inside": again}, "step", "squared error")
client.close()
cluster.close()
