"""A trainer whose gradients follow from the rows it looked up: one bit off in one step, and all later rows differ."""

import hashlib
import importlib

import grpc
from google.protobuf import text_format
import numpy as np

# Two stacks, so that a step has parts of both on each shard.
TABLES = {"words": (1000, 8), "users": (5000, 24)}
MODEL = """
name: "contained" seed: 11
tables {
  name: "words" vocabulary_size: 1000 embedding_dim: 8 combiner: MEAN
  optimizer { learning_rate: 0.1 adagrad { initial_accumulator: 0.1 } }
}
tables {
  name: "users" vocabulary_size: 5000 embedding_dim: 24 combiner: SUM
  optimizer { learning_rate: 0.05 adagrad { initial_accumulator: 0.1 } }
}
features { name: "title" table: "words" batch_size: 64 }
features { name: "reader" table: "users" batch_size: 64 }
"""
FEATURES = {"title": ("words", 5), "reader": ("users", 2)}  # table, ids of each sample
SAMPLES = 64


class Trainer:
    """Trains through the coordinator at `address`. Every call fails after `timeout` seconds at most."""

    def __init__(self, address, timeout=30, credentials=None):
        self.timeout = timeout
        self.api = importlib.import_module("emberd.v1.embedding_service_pb2")
        self.batch = importlib.import_module("emberd.v1.batch_pb2")
        self.types = importlib.import_module("emberd.v1.types_pb2")
        options = [("grpc.enable_http_proxy", 0), ("grpc.max_reconnect_backoff_ms", 500)]
        self.channel = (grpc.secure_channel(address, credentials, options) if credentials
                        else grpc.insecure_channel(address, options))
        services = importlib.import_module("emberd.v1.embedding_service_pb2_grpc")
        self.stub = services.EmbeddingServiceStub(self.channel)
        self.next_step = 0
        model = importlib.import_module("emberd.v1.model_pb2").ModelConfig()
        text_format.Parse(MODEL, model)
        self.model_id = self.stub.DeclareModel(
            self.api.DeclareModelRequest(config=model), timeout=timeout, wait_for_ready=True).model_id

    def close(self):
        self.channel.close()

    def tensor(self, dtype, array):
        return self.types.Tensor(dtype=dtype, shape=array.shape, data=array.tobytes())

    def lookup(self, timeout=None):
        """Of the next step; gives what `apply` takes."""
        rng = np.random.default_rng([7, self.next_step])
        features = []
        for name, (table, count) in FEATURES.items():
            ids = rng.integers(0, TABLES[table][0], (SAMPLES, count)).astype("<i8")
            features.append(self.batch.FeatureIds(
                feature=name, dense=self.batch.DenseIds(ids=self.tensor(self.types.INT64, ids))))
        return self.stub.Lookup(self.api.LookupRequest(model_id=self.model_id, features=features),
                                timeout=timeout or self.timeout)

    def apply(self, found, timeout=None):
        """The update of the next step. After a failure it may be called again: it is applied once."""
        gradients = []
        for activation in found.activations:
            values = np.frombuffer(activation.activation.data, "<f4").reshape(activation.activation.shape)
            gradient = np.float32(0.5) * values + np.float32(0.01)
            gradients.append(self.batch.FeatureGradient(
                feature=activation.feature, gradient=self.tensor(self.types.FLOAT32, gradient)))
        applied = self.stub.ApplyGradients(self.api.ApplyGradientsRequest(
            model_id=self.model_id, batch_handle=found.batch_handle, gradients=gradients,
            mutation=self.types.MutationId(client_id="contained", sequence=self.next_step + 1)),
            timeout=timeout or self.timeout)
        self.next_step += 1
        return applied

    def train(self, steps):
        for _ in range(steps):
            self.apply(self.lookup())

    def sha256(self):
        """Of all rows and slots."""
        digest = hashlib.sha256()
        for table, (rows, _) in TABLES.items():
            for slot in ("", "accumulator"):
                ids = np.arange(rows, dtype="<i8")
                digest.update(self.stub.ReadRows(self.api.ReadRowsRequest(
                    model_id=self.model_id, table=table, slot=slot,
                    ids=self.tensor(self.types.INT64, ids)), timeout=self.timeout).values.data)
        return digest.hexdigest()
