"""A trainer written after the documentation of keras-rs. test_keras.py runs it as it stands, and with emberd's layer.

Nested features, two of which share a table; dense ids and weights; a functional model with fit, evaluate and predict.
"""

import keras
import keras_rs
import numpy as np

BATCH, ROWS, DIM, RATE = 16, 50, 8, 0.2


def table(name, seed, combiner):
    return keras_rs.layers.TableConfig(
        name=name, vocabulary_size=ROWS, embedding_dim=DIM, combiner=combiner, placement="auto",
        initializer=keras.initializers.RandomUniform(-0.5, 0.5, seed=seed), optimizer=keras.optimizers.SGD(RATE))


def feature(name, table, ids):
    shape = (BATCH,) if ids == 1 else (BATCH, ids)
    return keras_rs.layers.FeatureConfig(name=name, table=table, input_shape=shape, output_shape=(BATCH, DIM))


words = table("words", 1, "mean")
feature_configs = {"user": feature("user", table("users", 2, "sum"), 1),
                   "item": {"title": feature("title", words, 4), "text": feature("text", words, 6)},
                   "seen": [feature("seen", table("items", 3, "sqrtn"), 3)]}


def data(batches):
    random = np.random.default_rng(4)
    ids = lambda *shape: random.integers(0, ROWS, (batches * BATCH, *shape)).astype("int32")  # noqa: E731
    inputs = {"user": ids(), "item": {"title": ids(4), "text": ids(6)}, "seen": [ids(3)]}
    return inputs, random.standard_normal((batches * BATCH, 1)).astype("float32")


def model_of(embedding):
    inputs = {"user": keras.Input((), BATCH, dtype="int32"),
              "item": {"title": keras.Input((4,), BATCH, dtype="int32"), "text": keras.Input((6,), BATCH, dtype="int32")},
              "seen": [keras.Input((3,), BATCH, dtype="int32")]}
    found = embedding(inputs)
    both = keras.layers.Concatenate()([found["user"], found["item"]["title"], found["item"]["text"], found["seen"][0]])
    output = keras.layers.Dense(1, kernel_initializer=keras.initializers.RandomUniform(-0.3, 0.3, seed=9))(both)
    return keras.Model(inputs=inputs, outputs=output)


def run():
    """Predictions before and after twenty steps, losses, and tables at the end."""
    embedding = keras_rs.layers.DistributedEmbedding(feature_configs, table_stacking="auto")
    model = model_of(embedding)
    model.compile(optimizer=keras.optimizers.SGD(RATE), loss="mse")
    before = model.predict(data(1)[0], batch_size=BATCH, verbose=0)
    history = model.fit(*data(10), batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    after = model.predict(data(1)[0], batch_size=BATCH, verbose=0)
    evaluated = model.evaluate(*data(1), batch_size=BATCH, verbose=0)
    tables = {name: keras.ops.convert_to_numpy(values) for name, values in embedding.get_embedding_tables().items()}
    return embedding, before, after, history.history["loss"] + [evaluated], tables
