"""Trains a model on made-up ids until it is told to stop, as a child process: unary calls and a group of two ranks.

usage: trainer.py ADDRESS FOLDER_OF_PROTO_FILES     (ends when its standard input does)

What goes wrong does not end it: it says so on standard error, and tries again.
"""

import importlib
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import grpc
from google.protobuf import text_format
import numpy as np

MODEL = """
name: "ads_ranker" seed: 11
tables { name: "user" vocabulary_size: 400000 embedding_dim: 32 max_ids_per_partition: 96 max_unique_ids_per_partition: 64 }
tables { name: "item" vocabulary_size: 150000 embedding_dim: 32 max_ids_per_partition: 96 max_unique_ids_per_partition: 64 }
tables { name: "query" vocabulary_size: 90000 embedding_dim: 32 max_ids_per_partition: 96 max_unique_ids_per_partition: 64 }
tables { name: "seller" vocabulary_size: 31000 embedding_dim: 16 }
tables { name: "brand" vocabulary_size: 9000 embedding_dim: 16 }
tables { name: "city" vocabulary_size: 3100 embedding_dim: 14 }
tables { name: "category" vocabulary_size: 1210 embedding_dim: 16 combiner: MEAN }
tables { name: "tag" vocabulary_size: 20000 embedding_dim: 8 combiner: SQRTN storage_dtype: BFLOAT16
         optimizer { learning_rate: 0.001 adam { beta1: 0.9 beta2: 0.999 bias_correction: true } } }
features { name: "user_id" table: "user" batch_size: 256 }
features { name: "item_id" table: "item" batch_size: 256 }
features { name: "history" table: "item" batch_size: 256 }
features { name: "query_id" table: "query" batch_size: 256 }
features { name: "seller_id" table: "seller" batch_size: 256 }
features { name: "brand_id" table: "brand" batch_size: 256 }
features { name: "city_id" table: "city" batch_size: 256 }
features { name: "category_ids" table: "category" batch_size: 256 }
features { name: "tags" table: "tag" batch_size: 256 }
optimizer { learning_rate: 0.05 adagrad { initial_accumulator: 0.1 } }
"""
IDS = {"history": 8, "category_ids": 2, "tags": 4}  # of each sample; others 1
SAMPLES = 256


def import_stubs(protos, folder):
    names = ["types", "model", "plan", "statistics", "shared_memory", "batch", "train", "embedding_service"]
    # Not grpc_tools: the compiler in Debian's package is too old for `optional` fields.
    plugin = f"--plugin=protoc-gen-grpc_python={shutil.which('grpc_python_plugin')}"
    subprocess.run(["protoc", f"-I{protos}", f"--python_out={folder}", f"--grpc_python_out={folder}", plugin,
                    *(f"emberd/v1/{name}.proto" for name in names)], check=True)
    sys.path.insert(0, folder)
    stubs = {name: importlib.import_module(f"emberd.v1.{name}_pb2") for name in names}
    return stubs, importlib.import_module("emberd.v1.embedding_service_pb2_grpc")


class Trainer:
    def __init__(self, address, protos, folder):
        stubs, services = import_stubs(protos, folder)
        self.types, self.batch, self.train = stubs["types"], stubs["batch"], stubs["train"]
        self.api = stubs["embedding_service"]
        self.channel = grpc.insecure_channel(address, options=[
            ("grpc.enable_http_proxy", 0), ("grpc.max_reconnect_backoff_ms", 500)])
        self.stub = services.EmbeddingServiceStub(self.channel)
        self.model = text_format.Parse(MODEL, stubs["model"].ModelConfig())
        self.stopping = threading.Event()

    def declare(self):
        return self.stub.DeclareModel(self.api.DeclareModelRequest(config=self.model), timeout=60).model_id

    def features(self, rng):
        """Ids as they come in practice: a few of them often, most of them seldom."""
        vocabularies = {table.name: table.vocabulary_size for table in self.model.tables}
        features = []
        for feature in self.model.features:
            shape = [SAMPLES, IDS.get(feature.name, 1)]
            ids = ((rng.zipf(1.15, shape) - 1) % vocabularies[feature.table]).astype("<i8")
            tensor = self.types.Tensor(dtype=self.types.INT64, shape=shape, data=ids.tobytes())
            features.append(self.batch.FeatureIds(feature=feature.name, dense=self.batch.DenseIds(ids=tensor)))
        return features

    def gradients(self, activations):
        return [self.batch.FeatureGradient(feature=one.feature, gradient=one.activation) for one in activations]

    def step(self, model_id, rng, client, sequence):
        found = self.stub.Lookup(
            self.api.LookupRequest(model_id=model_id, features=self.features(rng)), timeout=60)
        self.stub.ApplyGradients(self.api.ApplyGradientsRequest(
            model_id=model_id, batch_handle=found.batch_handle, step=sequence,
            mutation=self.types.MutationId(client_id=client, sequence=sequence + 1),
            gradients=self.gradients(found.activations)), timeout=60)

    def run_alone(self):
        """Steps by unary calls, a few a second."""
        rng = np.random.default_rng(1)
        model_id = self.declare()
        client = f"alone-{time.time_ns()}"
        for sequence in range(1 << 30):
            if self.stopping.wait(0.08 * (1.2 + np.sin(sequence / 15))):
                return
            self.step(model_id, rng, client, sequence)

    def run_rank(self, rank):
        """Steps on a stream, as one of two ranks, of which the second is often late."""
        rng = np.random.default_rng(2 + rank)
        requests = queue.Queue()
        options = self.train.GroupOptions(size=2, step_timeout_ms=20_000)
        requests.put(self.train.TrainRequest(start=self.train.TrainStart(
            model_id=self.declare(), group="nightly", rank=rank, options=options)))
        answers = self.stub.Train(iter(requests.get, None))
        try:
            step = next(answers).started.next_step
            while not self.stopping.wait(0.2 if rank == 0 else 0.12 + 0.24 * rng.random()):
                requests.put(self.train.TrainRequest(lookup=self.train.TrainLookup(
                    step=step, features=self.features(rng))))
                found = next(answers).lookup
                requests.put(self.train.TrainRequest(update=self.train.TrainUpdate(
                    step=step, gradients=self.gradients(found.activations))))
                next(answers)
                step += 1
        finally:
            requests.put(None)
            answers.cancel()

    def persist(self, work, *arguments):
        while not self.stopping.is_set():
            try:
                work(*arguments)
            except (grpc.RpcError, StopIteration) as error:
                detail = error.details() if isinstance(error, grpc.RpcError) else "the stream ended"
                print(f"trainer: {work.__name__}: {detail}", file=sys.stderr, flush=True)
                self.stopping.wait(0.5)

    def run(self):
        works = [(self.run_alone,), (self.run_rank, 0), (self.run_rank, 1)]
        threads = [threading.Thread(target=self.persist, args=work, daemon=True) for work in works]
        for thread in threads:
            thread.start()
        sys.stdin.read()
        self.stopping.set()
        self.channel.close()
        for thread in threads:
            thread.join(20)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as stubs_folder:
        Trainer(sys.argv[1], sys.argv[2], stubs_folder).run()
    sys.stdout.flush()
    os._exit(0)  # a channel of Debian's gRPC may keep threads that never end
