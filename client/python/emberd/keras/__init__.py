"""Embedding tables of a cluster in Keras 3, with the names of keras-rs:

    from emberd import keras as keras_rs

    users = keras_rs.layers.TableConfig(name="users", vocabulary_size=1000, embedding_dim=16, optimizer="adagrad")
    embedding = keras_rs.layers.DistributedEmbedding({
        "user": keras_rs.layers.FeatureConfig(name="user", table=users, input_shape=(64,), output_shape=(64, 16))})

On the backends jax, torch and tensorflow.
"""

import sys

from ._config import FeatureConfig, TableConfig
from ._layer import DistributedEmbedding
from ._rates import on_tables

layers = sys.modules[__name__]  # where keras-rs has them

__all__ = ["DistributedEmbedding", "FeatureConfig", "TableConfig", "layers", "on_tables"]
