"""The click model with keras-rs: documents 4 and 5 of compared.md. test_compared.py runs it, as it stands and with emberd's layer."""

import keras
import keras_rs
from data import BATCH, ITEMS, USERS, clicks

tables = {name: keras_rs.layers.TableConfig(name=name, vocabulary_size=rows, embedding_dim=16, optimizer=keras.optimizers.Adagrad(0.1))
          for name, rows in (("user", USERS), ("item", ITEMS))}
features = {name: keras_rs.layers.FeatureConfig(name=name, table=table, input_shape=(BATCH,), output_shape=(BATCH, 16))
            for name, table in tables.items()}
inputs = {name: keras.Input((), BATCH, dtype="int32") for name in tables}
found = keras_rs.layers.DistributedEmbedding(features)(inputs)
hidden = keras.layers.Dense(32, activation="relu")(keras.layers.Concatenate()([found["user"], found["item"]]))
model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
model.compile(optimizer=keras.optimizers.Adam(0.01), loss=keras.losses.BinaryCrossentropy(from_logits=True))
users, items, clicked = clicks()
history = model.fit({"user": users.astype("int32"), "item": items.astype("int32")}, clicked[:, None], batch_size=BATCH, epochs=2, verbose=0)
print(f"loss {history.history['loss'][-1]:.3f}")
