"""The click model with TFRA: documents 6 and 7 of compared.md. One optimizer is that of all parts. It is not run here."""

import tensorflow as tf
from data import BATCH, clicks
from tensorflow_recommenders_addons import dynamic_embedding as de

names = ["user", "item"]
inputs = {name: tf.keras.Input((1,), dtype=tf.int64, name=name) for name in names}
rows = [tf.keras.layers.Flatten()(de.keras.layers.Embedding(16, name=f"t_{name}")(inputs[name])) for name in names]
hidden = tf.keras.layers.Dense(32, activation="relu")(tf.keras.layers.Concatenate()(rows))
model = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(hidden))
optimizer = de.DynamicEmbeddingOptimizer(tf.keras.optimizers.Adagrad(0.1))
model.compile(optimizer=optimizer, loss=tf.keras.losses.BinaryCrossentropy(from_logits=True))
users, items, clicked = clicks()
history = model.fit({"user": users[:, None], "item": items[:, None]}, clicked[:, None], batch_size=BATCH, epochs=2, verbose=0)
print(f"loss {history.history['loss'][-1]:.3f}")
