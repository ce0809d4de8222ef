"""The next word of Shakespeare's sonnets, with a table in emberd and a small network in JAX and Flax.

usage: shakespeare.py [--steps N] [--dense sgd|adam] [--address HOST:PORT] [--text FILE]

It is the model by which the systems that emberd follows are tried out: 16 words give the next, their rows of width 128 are laid
side by side and go through two dense layers. Without an address a cluster is started for the run.
"""

import argparse
import os
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import emberd
import emberd.jax
import emberd.jax.nnx

BATCH, SEQUENCE, VOCABULARY, WIDTH, RATE = 32, 16, 1024, 128, 0.05
TEXT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sonnets.txt")


def load(path):
    """The text as numbers of words, the most frequent first; what is beyond the vocabulary is 0. And the words."""
    with open(path, encoding="utf-8") as file:
        words = re.findall(r"[a-z'-]+", file.read().lower())
    known = ["?", *(word for word, _ in Counter(words).most_common(VOCABULARY - 1))]
    number = {word: i for i, word in enumerate(known)}
    return np.array([number.get(word, 0) for word in words], np.int32), known


def entropy(numbers):
    """What guessing by frequency alone would lose, in nats."""
    share = np.bincount(numbers) / len(numbers)
    return float(-(share[share > 0] * np.log(share[share > 0])).sum())


def batches(numbers, steps, seed=0):
    """Windows of the text in an order that is new in each epoch, and the word after each."""
    random, order = np.random.default_rng(seed), np.zeros(0, np.int64)
    for _ in range(steps):
        if len(order) < BATCH:
            order = random.permutation(len(numbers) - SEQUENCE)
        begin, order = order[:BATCH], order[BATCH:]
        windows = numbers[begin[:, None] + np.arange(SEQUENCE)]
        yield {"ids": {"words": windows.reshape(-1)}, "next": numbers[begin + SEQUENCE]}


def config(name="shakespeare"):
    return emberd.ModelConfig(
        name,
        tables=[emberd.TableConfig("words", VOCABULARY, WIDTH, combiner="sum", initializer=emberd.Normal(0.0, 1.0),
                                   optimizer=emberd.SGD(learning_rate=RATE))],
        features=[emberd.FeatureConfig("words", "words")], seed=1)


class Network(nnx.Module):
    def __init__(self, embedding, rngs):
        self.embed = emberd.jax.nnx.Embed(embedding)
        self.hidden = nnx.Linear(SEQUENCE * WIDTH, WIDTH, rngs=rngs)
        self.output = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, ids, step=None):
        found = self.embed(ids, step)["words"]
        return self.output(self.hidden(found.reshape(BATCH, SEQUENCE * WIDTH)))


def loss_of(network, batch, step):
    return optax.softmax_cross_entropy_with_integer_labels(network(batch["ids"], step), batch["next"]).mean()


@nnx.jit
def train_step(network, optimizer, batch, step):
    loss, gradients = nnx.value_and_grad(loss_of)(network, batch, step)  # the step of the table
    optimizer.update(network, gradients)  # of the dense part
    return loss


def train(client, steps, dense="sgd", path=TEXT, name="shakespeare"):
    """The loss of each step, and the model."""
    numbers, _ = load(path)
    model = client.declare(config(name))
    embedding = emberd.jax.Embedding(model)
    network = Network(embedding, nnx.Rngs(0))
    rule = optax.sgd(RATE) if dense == "sgd" else optax.adam(0.001)
    optimizer = nnx.Optimizer(network, rule, wrt=nnx.Param)
    losses = [train_step(network, optimizer, batch, step) for step, batch in embedding.prefetch(batches(numbers, steps))]
    embedding.finish()
    return np.array(jnp.stack(losses)), model


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--dense", choices=("sgd", "adam"), default="sgd")
    parser.add_argument("--address")
    parser.add_argument("--text", default=TEXT)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if options.address:
        with emberd.connect(options.address) as client:
            losses, _ = train(client, options.steps, options.dense, options.text)
    else:
        with emberd.local(shards=2) as cluster, cluster.connect() as client:
            losses, _ = train(client, options.steps, options.dense, options.text)
    print(f"shakespeare: loss={losses[-20:].mean():.4f} first={losses[0]:.4f} "
          f"entropy={entropy(load(options.text)[0]):.4f} steps={len(losses)}")


if __name__ == "__main__":
    main()
