"""The strongest of an item's tags decides, in Keras: the combiner max, of tags whose rows are in emberd.

usage: tags_keras.py

The cluster is the one at EMBERD_ADDRESS; without that one is started for the run. An item has up to six of 200 tags, and is liked if one of them is among
twenty. "right" are held-out items.
"""

import keras
import numpy as np

from emberd import keras as keras_rs

TAGS, DIM, BATCH, STEPS = 200, 8, 128, 200


def items(count, seed):
    """Lists of tags, and which items are liked."""
    random = np.random.default_rng(seed)
    tags = [random.integers(0, TAGS, random.integers(1, 7)) for _ in range(count)]
    return tags, np.array([[any(one % 10 == 3)] for one in tags], np.float32)


class Net(keras.Model):
    def __init__(self, embedding):
        super().__init__()
        self.embedding, self.dense = embedding, keras.layers.Dense(1)

    def call(self, inputs, training=False):
        return self.dense(self.embedding(inputs, training=training))


def main():
    table = keras_rs.layers.TableConfig("tags", TAGS, DIM, combiner="max", optimizer=keras.optimizers.Adagrad(0.2),
                                        initializer=keras.initializers.RandomNormal(stddev=0.1, seed=1))
    embedding = keras_rs.layers.DistributedEmbedding(keras_rs.layers.FeatureConfig("tags", table, (BATCH, None), (BATCH, DIM)))
    net = Net(embedding)
    net.compile(optimizer=keras.optimizers.Adam(0.02), loss=keras.losses.BinaryCrossentropy(from_logits=True))
    for step in range(STEPS):
        tags, liked = items(BATCH, step)
        loss = net.train_on_batch(embedding.preprocess(tags), liked)
    tags, liked = items(1000, STEPS)
    found = keras.ops.convert_to_numpy(net(embedding.preprocess(tags)))
    embedding.finish()
    print(f"tags: loss={float(loss):.3f} right={((found > 0) == liked).mean():.3f}")


if __name__ == "__main__":
    main()
