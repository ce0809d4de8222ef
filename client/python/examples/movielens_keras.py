"""Who likes which film: MovieLens-100K with embedding tables in emberd and a small network in Keras.

usage: movielens_keras.py FOLDER [--address HOST:PORT] [--plain]

FOLDER holds *.inter, *.item and *.user, tab-separated with a header (ml-100k.inter and so on). Without an address a
cluster is started for the run. --plain trains the same model with tables in this process instead, from the same initial
rows, to compare. KERAS_BACKEND says on which backend: jax, torch or tensorflow.
"""

import argparse
import glob
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

import emberd
from emberd import keras as keras_rs

BATCH, EPOCHS, GENRES = 512, 6, 8
RATE, FIRST_SUM = 0.05, 1e-3  # of Adagrad; gradients of a mean over the batch are small
KINDS = {"user": (943, 16), "item": (1682, 16), "age": (128, 8), "gender": (2, 8), "occupation": (64, 8),
         "genres": (32, 8)}  # rows and width


def read(folder, kind):
    """The rows of a file without its header."""
    with open(glob.glob(os.path.join(folder, "*." + kind))[0], encoding="utf-8") as file:
        return [line.rstrip("\n").split("\t") for line in file][1:]


def load(folder):
    """Every rating as ids by feature and a label: 1 if the film was liked. Every fifth is held out."""
    numbers = {}

    def number(kind, token):  # tokens in the order in which they first appear
        known = numbers.setdefault(kind, {})
        return known.setdefault(token, len(known))

    of_user = {row[0]: (min(int(row[1]), 127), number("gender", row[2]), number("occupation", row[3]))
               for row in read(folder, "user")}
    of_item = {row[0]: [number("genres", one) for one in row[3].split()] for row in read(folder, "item")}
    ratings = sorted(read(folder, "inter"), key=lambda row: (row[3], row[0], row[1]))
    examples = [(number("user", user), number("item", item), *of_user[user], of_item[item], float(float(rating) >= 4))
                for user, item, rating, _ in ratings]
    return [one for i, one in enumerate(examples) if i % 5], examples[::5]


def batch_of(examples):
    columns = list(zip(*examples))
    ids = {name: np.array(values, np.int32) for name, values in zip(KINDS, columns[:5])}
    return {**ids, "genres": list(columns[5])}, np.array(columns[6], np.float32)


def batches(examples, order):
    for begin in range(0, len(order), BATCH):
        yield batch_of([examples[i] for i in order[begin:begin + BATCH]])


def in_emberd(client):
    tables = {name: keras_rs.layers.TableConfig(
        name, rows, dim, initializer=keras.initializers.RandomNormal(0.0, 0.01, seed=seed),
        optimizer=keras.optimizers.Adagrad(RATE, FIRST_SUM), combiner="mean") for seed, (name, (rows, dim)) in enumerate(KINDS.items())}
    layer = keras_rs.layers.DistributedEmbedding(
        {name: keras_rs.layers.FeatureConfig(name, table, (BATCH, None) if name == "genres" else (BATCH,),
                                             (BATCH, table.embedding_dim)) for name, table in tables.items()},
        client=client, model="movielens-keras")
    return layer, layer.preprocess


class Embedding(keras.layers.Embedding):
    """TensorFlow's gradient of a lookup has an entry for each id, and Adagrad squares each: a row that occurs twice gets another
    accumulator than on JAX and PyTorch, which square the sum. That of a product has the sum."""

    def call(self, inputs):
        return keras.ops.take(self.embeddings * 1.0, inputs, axis=0)


class Plain(keras.layers.Layer):
    """The same tables in this process."""

    def __init__(self):
        super().__init__()
        self.tables = [Embedding(rows, dim, keras.initializers.RandomNormal(0.0, 0.01, seed=seed))
                       for seed, (rows, dim) in enumerate(KINDS.values())]

    def call(self, inputs):
        found = {name: table(inputs[name]) for name, table in zip(KINDS, self.tables)}
        found["genres"] = keras.ops.sum(found["genres"] * inputs["share"][:, :, None], axis=1)
        return found


def padded(ids):
    genres = np.zeros((len(ids["user"]), GENRES), np.int32)
    share = np.zeros(genres.shape, np.float32)
    for i, some in enumerate(ids["genres"]):
        genres[i, :len(some)], share[i, :len(some)] = some, 1 / max(1, len(some))
    return {**ids, "genres": genres, "share": share}


class Network(keras.Model):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        seeded = [keras.initializers.GlorotUniform(seed=seed) for seed in (11, 12)]
        self.hidden = keras.layers.Dense(32, activation="relu", kernel_initializer=seeded[0])
        self.output_layer = keras.layers.Dense(1, kernel_initializer=seeded[1])

    def call(self, inputs, training=False):
        found = self.embedding(inputs) if isinstance(self.embedding, Plain) else self.embedding(inputs, training=training)
        return self.output_layer(self.hidden(keras.ops.concatenate([found[name] for name in KINDS], axis=1)))[:, 0]


def auc(label, score):
    """The chance that a liked film scores above another."""
    ranks = np.empty(len(score))
    ranks[np.argsort(score, kind="stable")] = np.arange(1, len(score) + 1)
    liked = label > 0.5
    n = liked.sum()
    return (ranks[liked].sum() - n * (n + 1) / 2) / max(1, n * (len(label) - n))


def train(client, folder, plain):
    train_set, test_set = load(folder)
    embedding, prepare = (Plain(), padded) if plain else in_emberd(client)
    network = Network(embedding)
    network.compile(optimizer=keras.optimizers.Adagrad(RATE, FIRST_SUM), loss=keras.losses.BinaryCrossentropy(from_logits=True))
    for epoch in range(EPOCHS):
        order = np.random.default_rng(epoch).permutation(len(train_set))
        for ids, label in batches(train_set, order):
            loss = network.train_on_batch(prepare(ids), label)
    score = np.concatenate([keras.ops.convert_to_numpy(network.predict_on_batch(prepare(ids)))
                            for ids, _ in batches(test_set, range(len(test_set)))])
    if not plain:
        embedding.finish()
    return float(loss), auc(np.array([one[-1] for one in test_set]), score)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--address")
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    if options.plain:
        loss, found = train(None, options.folder, True)
    elif options.address:
        with emberd.connect(options.address) as client:
            loss, found = train(client, options.folder, False)
    else:
        with emberd.local(shards=2) as cluster, cluster.connect() as client:
            loss, found = train(client, options.folder, False)
    print(f"movielens: loss={loss:.6f} auc={found:.4f}")


if __name__ == "__main__":
    main()
