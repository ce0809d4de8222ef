"""tf.tpu.experimental.embedding on a cluster of emberd: the same names and arguments, without a TPU and without a strategy.

    from emberd.compat import tpu_embedding as tpu        # was: tpu = tf.tpu.experimental.embedding

    users = tpu.TableConfig(vocabulary_size=1000, dim=16, name="users", combiner="sum")
    embedding = tpu.TPUEmbeddingV2({"user": tpu.FeatureConfig(users, output_shape=[64])}, tpu.Adagrad(0.05))

    @tf.function
    def train_step(features, labels):
        activations, kept = embedding(features)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(activations)
            loss = loss_of(model(activations), labels)
        embedding.apply_gradients(tape.gradient(loss, activations), kept)
        ...

The rows are on the cluster; `use` says which: without it, the one at the address in EMBERD_ADDRESS, or one that is started in child
processes that end with this one. `embedding.model` is the emberd.Model, to save checkpoints. A model of the name that is there already is
gone on with.

What differs: an id outside of its table is an error, and ids of 64 bits are not cut; TPUEmbeddingV2 needs no output_shape
either; tables are read and assigned as they were declared (as chips would hold them, stacked and padded: `stacked_variables`,
`embedding_table_shards`, `read_from_device` and `assign_on_device`); layouts and
limits are the cluster's own; `pipeline_execution_with_tensor_core` changes no number. There is no custom optimizer or combiner, and no
optimizer that moves rows which are not in the batch (`lazy_adam=False`). In a tf.function an error is one of tf.errors; `with tpu.typed_errors():`
around a step raises it as it is.
"""

from emberd._in_tensorflow import typed_errors

from ._config import (FTRL, SGD, Adagrad, AdagradMomentum, Adam, FeatureConfig, QuantizationConfig, RowIdInitializer,
                      SparseCoreEmbeddingConfig, TableConfig)
from ._embedding import EmbeddingTable, TPUEmbedding, TPUEmbeddingV2, use
from ._serving import TPUEmbeddingForServing, serving_embedding_lookup
from ._stacks import StackedTable
from ._statistics import PartitionedCsrFormatTensor

__all__ = ["FTRL", "SGD", "Adagrad", "AdagradMomentum", "Adam", "EmbeddingTable", "FeatureConfig", "PartitionedCsrFormatTensor", "QuantizationConfig",
           "RowIdInitializer", "SparseCoreEmbeddingConfig", "StackedTable", "TPUEmbedding", "TPUEmbeddingForServing", "TPUEmbeddingV2", "TableConfig",
           "serving_embedding_lookup", "typed_errors", "use"]
