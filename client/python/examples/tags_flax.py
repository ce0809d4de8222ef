"""The strongest of an item's tags decides, in Flax: the combiner max, of tags whose rows are in emberd.

usage: tags_flax.py [--address HOST:PORT]

Without an address a cluster is started for the run. An item has up to six of 200 tags, and is liked if one of them is among twenty. "right" are held-out items.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import emberd
import emberd.jax.nnx

TAGS, DIM, BATCH, STEPS = 200, 8, 128, 200


class Net(nnx.Module):
    def __init__(self, emb, rngs):
        self.embed = emberd.jax.nnx.Embed(emb, max_of=["tags"])
        self.dense = nnx.Linear(DIM, 1, rngs=rngs)

    def __call__(self, ids):
        return self.dense(self.embed(ids)["tags"])[:, 0]


def items(count, seed):
    """Ids [items, 6], of which -1 is none."""
    random = np.random.default_rng(seed)
    tags = random.integers(0, TAGS, (count, 6), dtype=np.int32)
    tags[np.arange(6) >= random.integers(1, 7, (count, 1))] = -1
    return tags, ((tags >= 0) & (tags % 10 == 3)).any(1).astype(np.float32)


def loss_of(net, tags, liked):
    return optax.sigmoid_binary_cross_entropy(net({"tags": tags}), liked).mean()


@nnx.jit
def train_step(net, optimizer, tags, liked):
    loss, gradients = nnx.value_and_grad(loss_of)(net, tags, liked)
    optimizer.update(net, gradients)
    return loss


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="of a coordinator; default: a cluster is started")
    address = parser.parse_args().address
    with (emberd.connect(address) if address else emberd.local().connect()) as client:
        model = client.declare(emberd.ModelConfig("tags-flax", [emberd.TableConfig("tags", TAGS, DIM, initializer=emberd.Normal(0.0, 0.1))],
                                                  [emberd.FeatureConfig("tags", "tags")], optimizer=emberd.Adagrad(learning_rate=0.2)))
        emb = emberd.jax.Embedding(model, group="run")
        net = Net(emb, nnx.Rngs(0))
        optimizer = nnx.Optimizer(net, optax.adam(0.02), wrt=nnx.Param)
        for step in range(STEPS):
            loss = train_step(net, optimizer, *map(jnp.asarray, items(BATCH, step)))
        tags, liked = items(1000, STEPS)
        right = ((net({"tags": jnp.asarray(tags)}) > 0) == liked).mean()
        jax.effects_barrier()
        emb.finish()
        print(f"tags: loss={float(loss):.3f} right={float(right):.3f}")


if __name__ == "__main__":
    main()
