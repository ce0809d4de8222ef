"""Embedding tables of any size for PyTorch, JAX, Keras or NumPy, on a cluster of emberd.

    import emberd, numpy as np

    with emberd.local(shards=2) as cluster, cluster.connect() as client:
        model = client.declare(emberd.ModelConfig(
            "clicks", tables=[emberd.TableConfig("users", vocabulary_size=1000, embedding_dim=16)],
            features=[emberd.FeatureConfig("user", "users")], optimizer=emberd.Adagrad(learning_rate=0.1)))
        found = model.lookup({"user": np.array([3, 1, 4])}, train=True)
        found.apply({"user": found["user"] - 1})

`local` starts a cluster and `connect` reaches one. A Client declares models, finds them, restores and serves them, and lets a trained one go on with other tables:
`change_model`. A Model looks rows up,
reads and assigns them, saves checkpoints, and trains on a stream: `Model.train`. `Model.compile` makes programs, which a Chain runs in one call. `watch` shows what a model does. ModelConfig, TableConfig and so on describe a model,
and have the range and default of each field. Errors are of the class Error, and ValueError, LookupError and so on where Python has one.

    import emberd.torch     modules for PyTorch: EmbeddingBagCollection, EmbeddingCollection, EmbeddingBag, Embedding, Prefetcher
    import emberd.jax       Embedding, around jitted functions and in them; emberd.jax.nnx for Flax
    import emberd.keras     keras-rs's DistributedEmbedding, on JAX, PyTorch and TensorFlow
    import emberd.aio       the same client for asyncio
    import emberd.ray       a cluster on the nodes of a cluster of Ray
    import emberd.compat.torchrec, emberd.compat.jax_tpu_embedding, emberd.compat.tpu_embedding      scripts of others by changed imports
    emberd.nested           features in nested structures

`python -m emberd` shows what is installed.
"""

from typing import TYPE_CHECKING

from ._changing import ChangedModel
from .arrays import Dense, Floats, Ids, Ragged, Sequences, Sparse
from .checkpoints import Checkpoint, Checkpoints, Progress
from .client import Applied, Client, Feature, Lookup, Model, ModelStatus, Table, Tls, connect
from .config import (F2A, SGD, Adagrad, AdagradMomentum, Adam, AdamW, Constant, Custom, FeatureConfig, Ftrl, Initializer,
                     LaProp, ModelConfig, Momentum, NoOptimizer, Normal, Optimizer, PlanConfig, QuantizationConfig, RMSProp, RowId,
                     RowwiseAdagrad, StackGroup, TableConfig, TableResource, TruncatedNormal, Uniform, Zeros)
from .errors import (Aborted, AlreadyExists, Cancelled, DataLoss, DeadlineExceeded, Error, FailedPrecondition,
                     ForkedProcess, Internal, InvalidArgument, NotFound, OutOfRange, PermissionDenied,
                     ResourceExhausted, Unauthenticated, Unavailable, Unimplemented, Unknown)
from .local import LocalCluster, local
from .programs import Bundle, BundlePart, Chain, ChainedResult, PreparedBatch, Program, ProgramResult
from .statistics import CallStatistics, HotRow, Limits, MemoryChange, ModelStatistics, ShardMemory
from .steps import RowsLost
from .train import TrainStream
from .watching import Watch, watch

__version__ = "0.1.0"

__all__ = [
    "Aborted", "Adagrad", "AdagradMomentum", "Adam", "AdamW", "AlreadyExists", "Applied", "Bundle", "BundlePart",
    "CallStatistics", "Cancelled",
    "Chain", "ChainedResult", "ChangedModel", "Checkpoint", "Checkpoints", "Client", "Constant", "Custom", "DataLoss", "DeadlineExceeded", "Dense", "Error",
    "F2A", "FailedPrecondition", "Feature", "FeatureConfig", "Floats", "ForkedProcess", "Ftrl", "HotRow", "Ids", "Initializer", "Internal",
    "InvalidArgument", "LaProp", "Limits", "LocalCluster", "Lookup", "MemoryChange", "Model", "ModelConfig", "ModelStatistics", "ModelStatus", "Momentum",
    "NoOptimizer", "Normal", "NotFound", "Optimizer", "OutOfRange", "PermissionDenied", "PlanConfig", "PreparedBatch", "Program", "ProgramResult", "Progress",
    "QuantizationConfig", "RMSProp", "Ragged", "ResourceExhausted", "RowId", "RowsLost", "RowwiseAdagrad", "SGD",
    "Sequences", "ShardMemory", "Sparse", "StackGroup", "Table", "TableConfig", "TableResource", "Tls", "TrainStream", "TruncatedNormal",
    "Unauthenticated", "Unavailable", "Uniform", "Unimplemented", "Unknown", "Watch", "Zeros", "connect", "local", "watch",
]

if not TYPE_CHECKING:
    def __getattr__(name):
        if name == "aio":
            raise AttributeError("emberd.aio is not imported by default: import emberd.aio")
        if name in ("torch", "jax", "keras", "ray"):
            raise AttributeError(f"emberd.{name} is not imported by default; with {name} installed: import emberd.{name}")
        raise AttributeError(f"module 'emberd' has no attribute {name!r}")
