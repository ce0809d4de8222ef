"""Embedding tables of a cluster in Keras 3, with the names of keras-rs:

    from emberd import keras as keras_rs

    users = keras_rs.layers.TableConfig(name="users", vocabulary_size=1000, embedding_dim=16, optimizer="adagrad")
    embedding = keras_rs.layers.DistributedEmbedding({
        "user": keras_rs.layers.FeatureConfig(name="user", table=users, input_shape=(64,), output_shape=(64, 16))})

On the backends jax, torch and tensorflow; with tensorflow this module is imported before the first client is made.
"""

import ctypes
import os
import sys

import keras

from .. import _native

from ._config import FeatureConfig, TableConfig
from ._layer import DistributedEmbedding

if keras.backend.backend() == "tensorflow" and _native.library_path().exists():
    # TensorFlow gives its Abseil and protobuf to the whole process, under the names that the library has for its own: it
    # must look among its own first, which is settled when it is loaded for the first time.
    ctypes.CDLL(str(_native.library_path()), mode=os.RTLD_LOCAL | os.RTLD_NOW | os.RTLD_DEEPBIND)

layers = sys.modules[__name__]  # where keras-rs has them

__all__ = ["DistributedEmbedding", "FeatureConfig", "TableConfig", "layers"]
