"""Does the next item fit the last ones? Sequences whose padding is masked, in Keras, with tables in emberd.

usage: sequences_keras.py

It needs keras-rs, for one of its layers. The cluster is the one at EMBERD_ADDRESS; without that one is started for the run. Each user likes one of four kinds
of items, and 9 of 10 in a history are of it; half of the next items are. "right" are held-out users.
"""

import keras
import numpy as np

from emberd import keras as keras_rs

ITEMS, DIM, LAST, BATCH, EPOCHS, KINDS = 200, 16, 12, 64, 10, 4  # id 0 is padding; the kind of an item is its id modulo 4
TOGETHER = 2  # batches that make a step


def users(count, seed):
    """Histories of 4 to 12 items, filled up with 0 behind, the item that comes next, and whether it is of the user's kind."""
    random = np.random.default_rng(seed)
    kind = random.integers(0, KINDS, (count, 1))

    def items(chance, places):
        of = np.where(random.random((count, places)) < chance, kind, random.integers(0, KINDS, (count, places)))
        return (random.integers(1, ITEMS // KINDS, (count, places)) * KINDS + of).astype(np.int32)

    history, after = items(0.9, LAST), items(1 / 3, 1)
    history[np.arange(LAST) >= random.integers(4, LAST + 1, (count, 1))] = 0
    return {"history": history, "next": after[:, 0]}, (after % KINDS == kind).astype(np.float32)


class Net(keras.Model):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        self.pool = keras.layers.GlobalAveragePooling1D()  # takes the mask: the mean of the items that are there
        self.cross = keras_rs.layers.FeatureCross()  # of keras-rs, by the same import
        self.dense = keras.layers.Dense(1)

    def call(self, inputs, training=False):
        found = self.embedding(inputs, training=training)
        return self.dense(self.cross(self.pool(found["history"]), found["next"]))


def main():
    keras.utils.set_random_seed(1)
    table = keras_rs.layers.TableConfig("items", ITEMS, DIM, initializer=keras.initializers.RandomNormal(stddev=0.5, seed=1), combiner="sum",
                                        optimizer=keras.optimizers.Adam(0.02, gradient_accumulation_steps=TOGETHER))
    embedding = keras_rs.layers.DistributedEmbedding({
        "history": keras_rs.layers.FeatureConfig("history", table, (BATCH, LAST), (BATCH, LAST, DIM), mask_zero=True),
        "next": keras_rs.layers.FeatureConfig("next", table, (BATCH,), (BATCH, DIM))})
    net = Net(embedding)
    net.compile(optimizer=keras.optimizers.Adam(0.02, gradient_accumulation_steps=TOGETHER), loss=keras.losses.BinaryCrossentropy(from_logits=True))
    # The rates of the dense part and of the tables each follow the loss.
    plateaus = [keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.005) for _ in range(2)]
    inputs, fits = users(4096, seed=1)
    with embedding.typed_errors():  # an error is emberd's own, and not one of JAX or TensorFlow
        history = net.fit(inputs, fits, batch_size=BATCH, epochs=EPOCHS, verbose=0,
                          callbacks=[plateaus[0], keras_rs.on_tables(plateaus[1], embedding)])
    inputs, fits = users(1024, seed=2)
    right = ((net.predict(inputs, batch_size=BATCH, verbose=0) > 0) == fits).mean()
    try:
        with embedding.typed_errors():
            net.predict({**inputs, "next": inputs["next"] + ITEMS}, batch_size=BATCH, verbose=0)
    except IndexError as error:
        print(f"refused: {error}")
    embedding.finish()
    print(f"sequences: loss={history.history['loss'][-1]:.3f} right={right:.3f} rate={embedding.learning_rates['items']:.4f}")


if __name__ == "__main__":
    main()
