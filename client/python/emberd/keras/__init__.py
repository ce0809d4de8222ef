"""Embedding tables of a cluster in Keras 3, with the names of keras-rs:

    from emberd import keras as keras_rs

    users = keras_rs.layers.TableConfig(name="users", vocabulary_size=1000, embedding_dim=16, optimizer="adagrad")
    embedding = keras_rs.layers.DistributedEmbedding({
        "user": keras_rs.layers.FeatureConfig(name="user", table=users, input_shape=(64,), output_shape=(64, 16))})

On the backends jax, torch and tensorflow. Whatever else keras-rs has, layers, losses and metrics, is keras-rs's own, where it is installed.
"""

import sys
from typing import TYPE_CHECKING

from ._config import FeatureConfig, TableConfig
from ._layer import DistributedEmbedding
from ._rates import on_tables

layers = sys.modules[__name__]  # where keras-rs has them

__all__ = ["DistributedEmbedding", "FeatureConfig", "TableConfig", "layers", "on_tables"]

if not TYPE_CHECKING:
    def __getattr__(name):
        """What is only in keras-rs: of its layers, then of itself."""
        if not name.startswith("_"):
            try:
                import keras_rs
            except ImportError as error:
                raise AttributeError(f"module {__name__!r} has no attribute {name!r}; if it is one of keras-rs, whose own layers, losses and metrics "
                                     "are reached from here: pip install keras-rs") from error
            for module in (keras_rs.layers, keras_rs):
                if hasattr(module, name):
                    return getattr(module, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
