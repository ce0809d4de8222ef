"""A client written from the .proto files alone, in another language.

protoc generates stubs at run time, Debian's grpcio carries them, and NumPy computes what every
answer must be. What this would catch: an API that only our own C++ client can speak (wrong bytes,
shapes or order of tensors), formulas that differ from those in the comments of model.proto, and
servers without reflection or health.

Usage: python_client_test.py PATH_OF_EMBERD PATH_OF_PROTO_FOLDER
"""

import importlib
import os
import queue
import re
import subprocess
import sys
import tempfile
import unittest

import grpc
from google.protobuf import text_format
import numpy as np

EMBERD, PROTOS = sys.argv[1:3]
del sys.argv[1:3]
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "testing"))

from processes import WITH_PARENT  # noqa: E402
from stubs import generate_stubs  # noqa: E402

# The standard services, as far as they are used here. Their field numbers are public and frozen.
HEALTH_PROTO = """
syntax = "proto3";
package grpc.health.v1;
service Health { rpc Check(HealthCheckRequest) returns (HealthCheckResponse); }
message HealthCheckRequest { string service = 1; }
message HealthCheckResponse {
  enum ServingStatus { UNKNOWN = 0; SERVING = 1; NOT_SERVING = 2; SERVICE_UNKNOWN = 3; }
  ServingStatus status = 1;
}
"""
REFLECTION_PROTO = """
syntax = "proto3";
package grpc.reflection.v1alpha;
service ServerReflection {
  rpc ServerReflectionInfo(stream ServerReflectionRequest)
      returns (stream ServerReflectionResponse);
}
message ServerReflectionRequest {
  string host = 1;
  oneof message_request { string file_containing_symbol = 4; string list_services = 7; }
}
message ServerReflectionResponse {
  oneof message_response {
    FileDescriptorResponse file_descriptor_response = 4;
    ListServiceResponse list_services_response = 6;
  }
}
message FileDescriptorResponse { repeated bytes file_descriptor_proto = 1; }
message ListServiceResponse { repeated ServiceResponse service = 1; }
message ServiceResponse { string name = 1; }
"""

VOCABULARY, DIM = 50, 6
LEARNING_RATE, INITIAL_ACCUMULATOR = np.float32(0.1), np.float32(0.1)
MODEL = f"""
name: "from_python" seed: 5
tables {{
  name: "words" vocabulary_size: {VOCABULARY} embedding_dim: {DIM} combiner: MEAN
  optimizer {{
    learning_rate: {LEARNING_RATE}
    adagrad {{ initial_accumulator: {INITIAL_ACCUMULATOR} }}
  }}
}}
features {{ name: "title" table: "words" }}
"""


def start_cluster(log):
    """Starts a coordinator and two shards; gives the process and the coordinator's address."""
    process = subprocess.Popen(
        [*WITH_PARENT, EMBERD, "up", "--shards", "2", "--processes",
         "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"],
        stdout=subprocess.PIPE, stderr=log, text=True)
    for line in process.stdout:
        found = re.match(r"emberd: ready coordinator=(\S+)", line)
        if found:
            return process, found.group(1)
    log.seek(0)
    raise RuntimeError("emberd did not get ready:\n" + log.read())


def to_bfloat16(values):
    """The upper halves of float32s, rounded to nearest even."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def from_bfloat16(halves):
    return (np.asarray(halves, dtype="<u2").astype("<u4") << 16).view("<f4")


class Batch:
    """Ragged ids with weights: an empty sample, and an id that stands twice in one."""

    def __init__(self, rng, samples):
        lengths = rng.integers(0, 6, samples)
        lengths[1] = 0
        lengths[2] = 3
        self.splits = np.concatenate([[0], np.cumsum(lengths)]).astype("<i8")
        self.ids = rng.integers(0, VOCABULARY, self.splits[-1]).astype("<i4")
        self.ids[self.splits[2] + 1] = self.ids[self.splits[2]]
        self.weights = rng.uniform(0.1, 2, self.splits[-1]).astype("<f4")
        self.samples = samples

    def gains(self):
        """[samples, vocabulary]: by how much each row counts in each activation, in float64."""
        gains = np.zeros((self.samples, VOCABULARY))
        for s in range(self.samples):
            part = slice(self.splits[s], self.splits[s + 1])
            weights = self.weights[part].astype(np.float64)
            if len(weights):
                np.add.at(gains[s], self.ids[part], weights / weights.sum())
        return gains


class PythonClientTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        generate_stubs(PROTOS, cls.folder.name,
                       {"health.proto": HEALTH_PROTO, "reflection.proto": REFLECTION_PROTO})
        cls.api = importlib.import_module("emberd.v1.embedding_service_pb2")
        cls.train = importlib.import_module("emberd.v1.train_pb2")
        cls.batch = importlib.import_module("emberd.v1.batch_pb2")
        cls.types = importlib.import_module("emberd.v1.types_pb2")
        log = open(os.path.join(cls.folder.name, "log"), "w+")
        cls.addClassCleanup(log.close)
        process, cls.address = start_cluster(log)

        def stop():
            process.terminate()
            process.wait(30)
            process.stdout.close()
        cls.addClassCleanup(stop)
        cls.channel = grpc.insecure_channel(cls.address, options=[("grpc.enable_http_proxy", 0)])
        cls.addClassCleanup(cls.channel.close)
        services = importlib.import_module("emberd.v1.embedding_service_pb2_grpc")
        cls.stub = services.EmbeddingServiceStub(cls.channel)
        cls.sequence = 0

    def declare(self):
        model = importlib.import_module("emberd.v1.model_pb2").ModelConfig()
        text_format.Parse(MODEL, model)
        request = self.api.DeclareModelRequest(config=model)
        return self.stub.DeclareModel(request, timeout=120).model_id

    def tensor(self, dtype, array):
        return self.types.Tensor(dtype=dtype, shape=array.shape, data=array.tobytes())

    def read(self, model_id, slot=""):
        """The whole table, or one of its slots."""
        ids = np.arange(VOCABULARY, dtype="<i8")
        request = self.api.ReadRowsRequest(
            model_id=model_id, table="words", slot=slot,
            ids=self.tensor(self.types.INT64, ids))
        values = self.stub.ReadRows(request, timeout=120).values
        self.assertEqual(values.dtype, self.types.FLOAT32)
        return np.frombuffer(values.data, "<f4").reshape(values.shape).copy()

    def lookup(self, model_id, batch, dtype):
        response = self.stub.Lookup(self.api.LookupRequest(
            model_id=model_id, activation_dtype=dtype, features=[self.feature(batch)]), timeout=120)
        return response.batch_handle, self.activations(response.activations, batch, dtype)

    def feature(self, batch):
        ragged = self.batch.RaggedIds(
            row_splits=self.tensor(self.types.INT64, batch.splits),
            values=self.tensor(self.types.INT32, batch.ids),
            weights=self.tensor(self.types.FLOAT32, batch.weights))
        return self.batch.FeatureIds(feature="title", ragged=ragged)

    def activations(self, activations, batch, dtype):
        """Those of the one feature, [samples, DIM]."""
        self.assertEqual([a.feature for a in activations], ["title"])
        activation = activations[0].activation
        self.assertEqual(activation.dtype, dtype)
        self.assertEqual(list(activation.shape), [batch.samples, DIM])
        if dtype == self.types.BFLOAT16:
            values = from_bfloat16(np.frombuffer(activation.data, "<u2"))
        else:
            values = np.frombuffer(activation.data, "<f4")
        return values.reshape(batch.samples, DIM)

    def apply(self, model_id, handle, gradient, dtype):
        PythonClientTest.sequence += 1
        data = to_bfloat16(gradient) if dtype == self.types.BFLOAT16 else gradient
        tensor = self.types.Tensor(dtype=dtype, shape=gradient.shape, data=data.tobytes())
        return self.stub.ApplyGradients(self.api.ApplyGradientsRequest(
            model_id=model_id, batch_handle=handle,
            mutation=self.types.MutationId(client_id="python", sequence=self.sequence),
            gradients=[self.batch.FeatureGradient(feature="title", gradient=tensor)]), timeout=120)

    def step(self, dtype, seed):
        """A lookup and an update, against NumPy in float64."""
        rng = np.random.default_rng(seed)
        model_id = self.declare()
        batch = Batch(rng, 17)
        table, accumulator = self.read(model_id), self.read(model_id, "accumulator")
        gains = batch.gains()

        handle, activations = self.lookup(model_id, batch, dtype)
        expected = gains @ table.astype(np.float64)
        if dtype == self.types.BFLOAT16:
            # Half a unit in the last of eight bits, besides what float32 loses.
            np.testing.assert_allclose(activations, expected, rtol=2**-8 * 1.01, atol=1e-6)
        else:
            np.testing.assert_allclose(activations, expected, rtol=1e-5, atol=1e-6)
        self.assertTrue((activations[1] == 0).all())

        gradient = rng.normal(size=(batch.samples, DIM)).astype("<f4")
        if dtype == self.types.BFLOAT16:
            gradient = from_bfloat16(to_bfloat16(gradient)).reshape(gradient.shape)
        applied = self.apply(model_id, handle, gradient, dtype)
        touched = np.unique(batch.ids)
        self.assertEqual(applied.rows_updated, len(touched))
        self.assertFalse(applied.replayed)
        row_gradient = gains.T @ gradient.astype(np.float64)
        self.check_update(model_id, table, accumulator, touched, row_gradient)

    def check_update(self, model_id, table, accumulator, touched, row_gradient):
        """Adagrad, as model.proto says: a += g^2; w -= lr*g/sqrt(a), for rows of the batch only."""
        new_accumulator = accumulator.astype(np.float64)
        new_table = table.astype(np.float64)
        new_accumulator[touched] += row_gradient[touched]**2
        new_table[touched] -= (
            LEARNING_RATE * row_gradient[touched] / np.sqrt(new_accumulator[touched]))
        after_table, after_accumulator = self.read(model_id), self.read(model_id, "accumulator")
        np.testing.assert_allclose(after_table, new_table, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(after_accumulator, new_accumulator, rtol=1e-5, atol=1e-6)
        untouched = np.setdiff1d(np.arange(VOCABULARY), touched)
        np.testing.assert_array_equal(after_table[untouched], table[untouched])
        self.assertFalse(np.array_equal(after_table[touched], table[touched]))

    def join(self, model_id, rank, size):
        """Opens a Train stream; gives the queue of its requests (None ends them) and the answers."""
        requests = queue.Queue()
        options = self.train.GroupOptions(size=size, step_timeout_ms=60_000)
        requests.put(self.train.TrainRequest(start=self.train.TrainStart(
            model_id=model_id, group="from-python", rank=rank, options=options)))
        return requests, self.stub.Train(iter(requests.get, None), timeout=120)

    def test_two_ranks_of_a_group_make_one_update(self):
        """Both ranks see the tables as they are before the step; one update has all gradients."""
        rng = np.random.default_rng(9)
        model_id = self.declare()
        streams = [self.join(model_id, rank, size=2) for rank in range(2)]
        for _, answers in streams:
            self.assertEqual(next(answers).started.next_step, 0)
        for step in range(3):
            table, accumulator = self.read(model_id), self.read(model_id, "accumulator")
            batches = [Batch(rng, 9), Batch(rng, 14)]
            for (requests, _), batch in zip(streams, batches):
                requests.put(self.train.TrainRequest(lookup=self.train.TrainLookup(
                    step=step, features=[self.feature(batch)])))
            row_gradient = np.zeros((VOCABULARY, DIM))
            for (requests, answers), batch in zip(streams, batches):
                found = next(answers).lookup
                self.assertEqual((found.step, found.continues), (step, False))
                self.assertEqual(found.statistics.num_minibatches, 1)
                np.testing.assert_allclose(
                    self.activations(found.activations, batch, self.types.FLOAT32),
                    batch.gains() @ table.astype(np.float64), rtol=1e-5, atol=1e-6)
                gradient = rng.normal(size=(batch.samples, DIM)).astype("<f4")
                row_gradient += batch.gains().T @ gradient.astype(np.float64)
                requests.put(self.train.TrainRequest(update=self.train.TrainUpdate(
                    step=step, gradients=[self.batch.FeatureGradient(
                        feature="title", gradient=self.tensor(self.types.FLOAT32, gradient))])))
            touched = np.unique(np.concatenate([batch.ids for batch in batches]))
            for _, answers in streams:
                updated = next(answers).update
                self.assertEqual((updated.step, updated.rows_updated), (step, len(touched)))
            self.check_update(model_id, table, accumulator, touched, row_gradient)
        for requests, _ in streams:
            requests.put(None)
        for _, answers in streams:
            self.assertEqual(list(answers), [])
            self.assertEqual(answers.code(), grpc.StatusCode.OK)

    def test_float32(self):
        for seed in range(3):
            self.step(self.types.FLOAT32, seed)

    def test_bfloat16(self):
        for seed in range(3):
            self.step(self.types.BFLOAT16, seed)

    def test_errors_have_a_code_and_say_what_is_wrong(self):
        with self.assertRaises(grpc.RpcError) as caught:
            self.stub.Lookup(self.api.LookupRequest(model_id=self.declare()), timeout=120)
        self.assertEqual(caught.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
        self.assertIn("title", caught.exception.details())

    def test_health(self):
        health = importlib.import_module("health_pb2")
        stub = importlib.import_module("health_pb2_grpc").HealthStub(self.channel)
        for service in ("", "emberd.v1.EmbeddingService"):
            status = stub.Check(health.HealthCheckRequest(service=service), timeout=120).status
            self.assertEqual(status, health.HealthCheckResponse.SERVING, service)
        with self.assertRaises(grpc.RpcError) as caught:
            stub.Check(health.HealthCheckRequest(service="no.such.Service"), timeout=120)
        self.assertEqual(caught.exception.code(), grpc.StatusCode.NOT_FOUND)

    def test_reflection(self):
        reflection = importlib.import_module("reflection_pb2")
        stub = importlib.import_module("reflection_pb2_grpc").ServerReflectionStub(self.channel)
        request = reflection.ServerReflectionRequest
        listed, described = stub.ServerReflectionInfo(iter([
            request(list_services=""),
            request(file_containing_symbol="emberd.v1.EmbeddingService"),
        ]), timeout=120)
        names = {service.name for service in listed.list_services_response.service}
        self.assertLessEqual({"emberd.v1.EmbeddingService", "emberd.v1.AdminService",
                              "grpc.health.v1.Health"}, names)
        files = described.file_descriptor_response.file_descriptor_proto
        self.assertTrue(any(b"ApplyGradients" in file for file in files))


if __name__ == "__main__":
    unittest.main(verbosity=2)
