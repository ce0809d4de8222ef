"""What client/COMING_FROM.md says of PyTorch, by running both: the same ids, weights and gradients through torch and
through emberd. Skips without PyTorch (Debian's python3-torch).

What this would catch: a page that tells a newcomer the wrong formula, and an optimizer that drifts from the one that it
is said to equal.

Usage: coming_from_test.py EMBERD ROOT_OF_REPOSITORY
"""

import importlib
import os
import sys
import tempfile
import unittest

EMBERD, ROOT = sys.argv[1:3]
del sys.argv[1:]
sys.path.insert(0, os.path.join(ROOT, "tests", "testing"))

import grpc  # noqa: E402
import numpy as np  # noqa: E402
from google.protobuf import text_format  # noqa: E402
from processes import Program  # noqa: E402
from stubs import generate_stubs  # noqa: E402

try:
    import torch
except ImportError:
    torch = None

SKIPPED = 77  # CMakeLists.txt
ROWS, DIM = 10, 8


class Table:
    """One table of a model of its own."""

    def __init__(self, test, name, settings):
        self.test, self.name, self.sequence = test, name, 0
        config = test.model.ModelConfig()
        text_format.Parse(f'name: "{name}" tables {{ name: "t" vocabulary_size: {ROWS} embedding_dim: {DIM} {settings} }} '
                          'features { name: "f" table: "t" }', config)
        self.id = test.stub.DeclareModel(test.api.DeclareModelRequest(config=config)).model_id

    def tensor(self, dtype, array, kind):
        return self.test.types.Tensor(dtype=dtype, shape=np.shape(array), data=np.asarray(array, kind).tobytes())

    def lookup(self, bags, weights=None):
        splits = np.cumsum([0] + [len(bag) for bag in bags])
        ragged = self.test.batch.RaggedIds(row_splits=self.tensor(self.test.types.INT64, splits, "<i8"),
                                           values=self.tensor(self.test.types.INT64, sum(bags, []), "<i8"))
        if weights is not None:
            ragged.weights.CopyFrom(self.tensor(self.test.types.FLOAT32, weights, "<f4"))
        feature = self.test.batch.FeatureIds(feature="f", ragged=ragged)
        self.found = self.test.stub.Lookup(self.test.api.LookupRequest(model_id=self.id, features=[feature]))
        values = self.found.activations[0].activation
        return np.frombuffer(values.data, "<f4").reshape(values.shape)

    def apply(self, gradient=None):
        """None: the feature has no gradient."""
        self.sequence += 1
        gradients = [] if gradient is None else [self.test.batch.FeatureGradient(
            feature="f", gradient=self.tensor(self.test.types.FLOAT32, gradient, "<f4"))]
        self.test.stub.ApplyGradients(self.test.api.ApplyGradientsRequest(
            model_id=self.id, batch_handle=self.found.batch_handle, gradients=gradients, step=self.sequence - 1,
            mutation=self.test.types.MutationId(client_id=self.name, sequence=self.sequence)))

    def rows(self):
        answer = self.test.stub.ReadRows(self.test.api.ReadRowsRequest(
            model_id=self.id, table="t", ids=self.tensor(self.test.types.INT64, np.arange(ROWS), "<i8")))
        return np.frombuffer(answer.values.data, "<f4").reshape(ROWS, DIM)


class ComingFromTest(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        generate_stubs(os.path.join(ROOT, "proto"), folder.name)
        for name, module in (("api", "embedding_service_pb2"), ("batch", "batch_pb2"), ("types", "types_pb2"),
                             ("model", "model_pb2")):
            setattr(self, name, importlib.import_module(f"emberd.v1.{module}"))
        program = Program([EMBERD, "up", "--shards", "2", "--listen", "127.0.0.1:0", "--http", ""],
                          os.path.join(folder.name, "log"))
        self.addCleanup(program.stop)
        channel = grpc.insecure_channel(program.wait_for_line(r"^emberd: ready coordinator=(\S+)")[1],
                                        [("grpc.enable_http_proxy", 0)])
        self.addCleanup(channel.close)
        self.stub = importlib.import_module("emberd.v1.embedding_service_pb2_grpc").EmbeddingServiceStub(channel)

    def bag(self, table, mode, sparse=False):
        """A torch.nn.EmbeddingBag with the rows of the table."""
        return torch.nn.EmbeddingBag.from_pretrained(torch.tensor(table.rows()), freeze=False, mode=mode, sparse=sparse)

    def run_bag(self, bag, bags, weights=None):
        offsets = torch.tensor(np.cumsum([0] + [len(one) for one in bags])[:-1])
        return bag(torch.tensor(sum(bags, []), dtype=torch.int64), offsets,
                   per_sample_weights=None if weights is None else torch.tensor(weights))

    def train_both(self, name, settings, make_optimizer, steps, sparse=True):
        """Largest difference of a row afterwards; the gradients of a step are the rows that it found."""
        table = Table(self, name, f"combiner: SUM {settings}")
        bag = self.bag(table, "sum", sparse)
        optimizer = make_optimizer(bag.parameters())
        for bags in steps:
            found = table.lookup(bags)
            optimizer.zero_grad()
            out = self.run_bag(bag, bags)
            (0.5 * out * out).sum().backward()
            optimizer.step()
            table.apply(found)
        return np.abs(table.rows() - bag.weight.detach().numpy()).max()

    def test_sums_and_means_without_weights_are_equal(self):
        bags = [[1, 2, 2], [], [9]]
        for mode, combiner in (("sum", "SUM"), ("mean", "MEAN")):
            table = Table(self, mode, f"combiner: {combiner}")
            np.testing.assert_allclose(table.lookup(bags), self.run_bag(self.bag(table, mode), bags).detach(), rtol=1e-6)

    def test_weights(self):
        bags, weights = [[1, 2], [3]], [0.5, 1.5, 4.0]
        table = Table(self, "weighted_sum", "combiner: SUM")
        np.testing.assert_allclose(table.lookup(bags, weights), self.run_bag(self.bag(table, "sum"), bags, weights).detach(),
                                   rtol=1e-6)
        table = Table(self, "weighted_mean", "combiner: MEAN")
        with self.assertRaisesRegex(NotImplementedError, "per_sample_weights"):
            self.run_bag(self.bag(table, "mean"), bags, weights)
        rows = table.rows()
        np.testing.assert_allclose(table.lookup(bags, weights), [(0.5 * rows[1] + 1.5 * rows[2]) / 2, rows[3]], rtol=1e-6)

    def test_optimizers_that_are_equal(self):
        steps = [[[1, 2], [3]], [[2], [4, 4]], [[1], [2]], [[2, 9], []]]
        self.assertLess(self.train_both("sgd", "optimizer { learning_rate: 0.1 sgd {} }",
                                        lambda p: torch.optim.SGD(p, lr=0.1), steps), 1e-6)
        self.assertLess(self.train_both(
            "adagrad", "optimizer { learning_rate: 0.1 adagrad { initial_accumulator: 0.1 } }",
            lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1), steps), 1e-6)
        self.assertLess(self.train_both(
            "adam", "optimizer { learning_rate: 0.01 adam { bias_correction: true epsilon: 1e-8 } }",
            lambda p: torch.optim.SparseAdam(p, lr=0.01, eps=1e-8), steps), 1e-5)

    def test_dense_adam_moves_rows_outside_of_the_batch(self):
        steps = [[[1]], [[2]]]
        table = Table(self, "lazy", "combiner: SUM optimizer { learning_rate: 0.01 adam { bias_correction: true } }")
        bag = self.bag(table, "sum")
        optimizer = torch.optim.Adam(bag.parameters(), lr=0.01)
        for number, bags in enumerate(steps):
            before, torch_before = table.rows(), bag.weight.detach().clone()
            found = table.lookup(bags)
            optimizer.zero_grad()
            self.run_bag(bag, bags).sum().backward()
            optimizer.step()
            table.apply(np.ones_like(found))
            if number == 1:
                self.assertFalse(torch.equal(bag.weight[1], torch_before[1]))
                np.testing.assert_array_equal(table.rows()[1], before[1])

    def test_a_missing_gradient_is_zero_and_still_an_update(self):
        table = Table(self, "missing", "combiner: SUM optimizer { learning_rate: 0.1 momentum { momentum: 0.9 } }")
        found = table.lookup([[1]])
        table.apply(np.ones_like(found))
        before = table.rows()
        table.lookup([[1]])
        table.apply()
        self.assertFalse(np.array_equal(table.rows()[1], before[1]))
        # PyTorch leaves out a parameter without a gradient.
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        weight.grad = torch.ones(3)
        optimizer.step()
        after_one = weight.detach().clone()
        weight.grad = None
        optimizer.step()
        self.assertTrue(torch.equal(weight, after_one))


if __name__ == "__main__":
    if torch is None:
        print("SKIP: there is no PyTorch")
        sys.exit(SKIPPED)
    unittest.main(verbosity=2)
