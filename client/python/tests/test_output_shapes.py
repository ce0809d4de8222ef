"""Dense ids in the shape of their activation, of features with random output shapes, against loops over positions; and updates,
bit for bit, against those of flat ids of a model without output shapes.

What this would catch: rows of positions that are combined as if they were ids of one sample, an id whose row or gradient goes to another
position, and a shape that could be read in two ways and is answered.
"""

import itertools
import math
import os
import random as seeds
import unittest

from cluster import ClusterTest, emberd, has_torch, main

import numpy as np

try:
    import jax

    import emberd.jax
    import emberd.jax.nnx
    jax.config.update("jax_platforms", "cpu")
except ImportError:
    jax = None
try:
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras

    import emberd.keras
except ImportError:
    keras = None

SEED = int(os.environ.get("EMBERD_TEST_SEED", seeds.randrange(10**6)))
ROWS, DIM = 32, 4
print("EMBERD_TEST_SEED =", SEED)


def output_shapes(of_rank=3):
    random = np.random.default_rng(SEED)
    return [tuple(map(int, random.integers(1, 5, rank))) for rank in (1, 2, 3, 4) for _ in range(of_rank)]


def forms(random, output):
    """Ids and weights in every shape that is allowed, of any first dimension."""
    for empty, ids_of_one in itertools.product((False, True), (None, 1, int(random.integers(2, 4)))):
        positions = (0 if empty else int(random.integers(1, 5)), *output[1:])
        for shape in {positions, (math.prod(positions),)} if ids_of_one is None else [(*positions, ids_of_one)]:
            ids = random.integers(0, ROWS, shape)
            for weights in (None, random.integers(-3, 4, shape).astype(np.float32), np.float32([2])):
                yield ids, weights


def given(ids, weights):
    return ids if weights is None else emberd.Dense(ids, weights)


class Table:
    """What the server has, of rows that are sums of whole numbers: floats hold them exactly."""

    def __init__(self, output):
        self.output = output
        self.rows = np.repeat(np.arange(ROWS, dtype=np.float32), DIM).reshape(ROWS, DIM)

    def ids_of(self, ids, weights):
        """(position, id, weight), one after the other."""
        weights = np.broadcast_to(1 if weights is None else weights, ids.shape)
        for place in np.ndindex(*ids.shape[:1 if ids.ndim == 1 else len(self.output)]):
            for one, weight in zip(ids[place].reshape(-1), weights[place].reshape(-1)):
                yield place, one, weight

    def look_up(self, ids, weights):
        found = np.zeros((*ids.shape[:1 if ids.ndim == 1 else len(self.output)], DIM), np.float32)
        for place, one, weight in self.ids_of(ids, weights):
            found[place] += weight * self.rows[one]
        return found.reshape(-1, *self.output[1:], DIM)

    def update(self, ids, weights, gradient):
        flat = gradient.reshape(*ids.shape[:1 if ids.ndim == 1 else len(self.output)], DIM)
        for place, one, weight in self.ids_of(ids, weights):
            self.rows[one] -= weight * flat[place]


def config(name, output, optimizer=emberd.SGD(learning_rate=1.0), initializer=emberd.RowId(), combiner="sum", others=()):
    table = emberd.TableConfig("t", ROWS, DIM, combiner=combiner, initializer=initializer, optimizer=optimizer)
    return emberd.ModelConfig(name, [table], [emberd.FeatureConfig("x", "t", output_shape=output), *others], seed=3)


class Case(ClusterTest):
    def cases(self, of_rank=3):
        """Models, and what they should hold."""
        for place, output in enumerate(output_shapes(of_rank)):
            yield config(f"{self.id().split('.')[-1]}_{place}_{'_'.join(map(str, output))}", output), Table(output), np.random.default_rng((SEED, place))

    def step(self, table, random, ids, weights, found, update):
        expected = table.look_up(ids, weights)
        self.assertEqual(tuple(found.shape), expected.shape)
        np.testing.assert_array_equal(np.asarray(found), expected)
        gradient = random.integers(-2, 3, expected.shape).astype(np.float32)
        update(gradient)
        table.update(ids, weights, gradient)


class ArraysTest(Case):
    def test_a_position_has_its_own_ids(self):
        tcp = self.cluster.connect(transport="tcp")
        self.addCleanup(tcp.close)
        for described, table, random in self.cases():
            models = [client.declare(described) for client in (self.client, tcp)]
            for kind, (ids, weights) in zip(itertools.cycle((np.int64, np.int32, np.asfortranarray, np.ndarray.tolist)), forms(random, table.output)):
                made = ids.astype(kind) if isinstance(kind, type) else ids if not ids.size else kind(ids)
                for model in models:
                    found = model.lookup({"x": given(made, weights)}, train=True)
                    self.step(table, random, ids, weights, found["x"], lambda gradient: found.apply({"x": gradient}))
            np.testing.assert_array_equal(model.table("t"), table.rows)

    def test_on_a_stream(self):
        for described, table, random in self.cases():
            model = self.client.declare(described)
            with model.train("run") as stream:
                for place, (ids, weights) in enumerate(forms(random, table.output)):
                    found = stream.lookup({"x": given(ids, weights)}, concat=place % 2 == 1)

                    def update(gradient):
                        made = stream.empty_gradients(found)
                        made["x"][:] = gradient
                        stream.update(made)

                    self.step(table, random, ids, weights, found["x"], update)
            np.testing.assert_array_equal(model.table("t"), table.rows)

    def test_updates_have_the_bits_of_flat_ids(self):
        options = {"optimizer": emberd.Adagrad(learning_rate=0.3), "initializer": emberd.Normal(0.0, 1.0), "combiner": "mean"}
        for described, table, random in self.cases():
            name, output = described.name, table.output
            models = [self.client.declare(config(name + way, shape, **options)) for way, shape in (("shaped", output), ("flat", None))]
            for ids, weights in forms(random, output):
                samples = math.prod(ids.shape[:1 if ids.ndim == 1 else len(output)])
                flat = ids.reshape(samples, -1) if ids.size else np.zeros(samples, int)
                shaped = random.standard_normal((samples, DIM)).astype(np.float32)
                both = []
                for model, one, some in zip(models, (ids, flat), (weights, weights if weights is None or weights.size != flat.size else weights.reshape(flat.shape))):
                    found = model.lookup({"x": given(one, some)}, train=True)
                    found.apply({"x": shaped.reshape(found["x"].shape)})
                    both.append(found["x"].tobytes())
                self.assertEqual(*both)
            for slot in ("", "accumulator"):
                self.assertEqual(*(model.table("t", slot=slot).tobytes() for model in models))

    def test_all_other_shapes_are_refused(self):
        refused = 0
        for described, table, random in self.cases():
            model, output = self.client.declare(described), table.output
            inner, block = list(output[1:]), math.prod(output[1:])
            before = model.table("t").tobytes()
            for rank in range(1, len(output) + 3):
                near = [int(random.integers(1, 4)), *inner, 1, 2][:rank]
                for shape in [near, near[::-1], [*near[:-1], near[-1] + 1], *random.integers(1, 5, (4, rank)).tolist()]:
                    ids = np.zeros(shape, np.int64)
                    if rank == 1 and shape[0] % block == 0 or rank in (len(output), len(output) + 1) and shape[1:len(output)] == inner:
                        model.lookup({"x": ids})
                        continue
                    refused += 1
                    for one in (ids, emberd.Dense(ids, np.ones(shape, np.float32)), emberd.Dense(ids, [1.0])):
                        with self.assertRaises(emberd.InvalidArgument) as raised:
                            model.lookup({"x": one}, train=True)
                        said = str(raised.exception)
                        self.assertIn("'x'", said)
                        if rank == 1:
                            self.assertIn(f"has {shape[0]} samples; its output_shape {list(output)} needs a multiple of {block}", said)
                        elif len(output) == 1:
                            self.assertIn(f"shape is {shape}; it must be [samples] or [samples, ids_per_sample]", said)
                        else:
                            text = ", ".join(map(str, inner))
                            self.assertIn(f"shape is {shape}; it must be [samples], [any, {text}] or [any, {text}, ids_per_sample], "
                                          f"because output_shape is {list(output)}", said)
            wrong = np.zeros((2, *(extent + 1 for extent in inner)) if inner else (2, 2, 2), np.int64)
            with self.assertRaisesRegex(emberd.InvalidArgument, "shape is"), model.train("run") as stream:
                stream.lookup({"x": wrong})
            self.assertEqual(model.table("t").tobytes(), before)
        self.assertGreater(refused, 50)

    def test_models_read_the_same_name_in_their_own_ways(self):
        """How the batch before was sent, which a later one of the same kind is sent by, says nothing of another model."""
        ids = np.arange(12).reshape(4, 3)
        flat, shaped = (self.client.declare(config(name, output)) for name, output in (("own_flat", None), ("own_shaped", (4, 3))))
        for _ in range(3):
            found = flat.lookup({"x": ids})
            self.assertEqual([(name, one.shape) for name, one in found.items()], [("x", (4, DIM))])
            np.testing.assert_array_equal(next(iter(found.values()))[:, 0], ids.sum(axis=1))
            np.testing.assert_array_equal(shaped.lookup({"x": ids})["x"][..., 0], ids)

    def test_weights_have_the_shape_of_the_ids(self):
        model = self.client.declare(config("weights", (3, 2)))
        ids = np.arange(24).reshape(4, 2, 3)
        for shape in ((24,), (8, 3), (4, 3, 2), (4, 2), (1, 1, 1), (2,)):
            with self.assertRaisesRegex(emberd.InvalidArgument, r"weights.*\[4, 2, 3\]"):
                model.lookup({"x": emberd.Dense(ids, np.ones(shape, np.float32))})

    def test_sequences_ragged_and_sparse(self):
        """Sequences have the shape of their ids; ragged and sparse ids have a sample for each position."""
        model = self.client.declare(config("flat", (5, 2, 3)))
        ids = np.arange(12).reshape(2, 2, 3)
        shaped = model.lookup({"x": ids})["x"]
        for same in (emberd.Sequences(ids), emberd.Sequences(ids, -1), ids.reshape(-1), emberd.Ragged(ids.reshape(-1), np.arange(13)),
                     emberd.Sparse(np.arange(12), ids.reshape(-1), 12)):
            np.testing.assert_array_equal(model.lookup({"x": same})["x"], shaped)
        self.assertEqual(model.lookup({"x": emberd.Sequences(ids.reshape(-1))})["x"].shape, (12, DIM))
        for few in (emberd.Ragged([1, 2], [0, 1, 2]), emberd.Sparse([0, 1], [1, 2], 2), emberd.Sequences([[1, 2]])):
            with self.assertRaisesRegex(emberd.InvalidArgument, r"2 samples; its output_shape \[5, 2, 3\] needs a multiple of 6"):
                model.lookup({"x": few})


@unittest.skipUnless(has_torch(), "SKIP: PyTorch is not installed")
class TorchTest(Case):
    def collection(self, described, **options):
        import emberd.torch
        made = emberd.torch.EmbeddingBagCollection(described.tables, client=self.client, model=described.name, features=described.features,
                                                   seed=3, **options)
        self.addCleanup(made.finish)
        return made, made.optimizer()

    def test_tensors(self):
        import torch
        for accumulate in (False, True):
            for described, table, random in self.cases(1):
                described = config(f"{described.name}_{accumulate}", table.output)
                made, sparse = self.collection(described, accumulate=accumulate)
                for ids, weights in forms(random, table.output):
                    found = made({"x": given(torch.from_numpy(ids), None if weights is None else torch.from_numpy(weights))})["x"]

                    def update(gradient):
                        (found * torch.from_numpy(gradient)).sum().backward()
                        sparse.step()
                        sparse.zero_grad()

                    self.step(table, random, ids, weights, found.detach(), update)
                np.testing.assert_array_equal(made.model.table("t"), table.rows)

    def test_learned_weights(self):
        import torch
        for described, table, random in self.cases(1):
            made, sparse = self.collection(described)
            for ids, weights in forms(random, table.output):
                if weights is None or weights.size == 1 != ids.size:
                    continue
                learned = torch.from_numpy(weights).requires_grad_()
                found = made({"x": emberd.Dense(torch.from_numpy(ids), learned)})["x"]
                np.testing.assert_array_equal(found.detach(), table.look_up(ids, weights))
                gradient = random.integers(-2, 3, found.shape).astype(np.float32)
                of_place = gradient.reshape(*ids.shape[:1 if ids.ndim == 1 else len(table.output)], DIM)
                expected = [of_place[place] @ table.rows[one] for place, one, _ in table.ids_of(ids, weights)]
                (found * torch.from_numpy(gradient)).sum().backward()
                np.testing.assert_array_equal(learned.grad.reshape(-1), np.float32(expected))
                sparse.step()
                table.update(ids, weights, gradient)

    def test_a_keyed_jagged_tensor_is_flat(self):
        import torch

        from emberd.compat.torchrec import KeyedJaggedTensor
        for accumulate in (False, True):
            described = config(f"jagged_{accumulate}", (4, 3), others=[emberd.FeatureConfig("y", "t")])
            made, sparse = self.collection(described, accumulate=accumulate)
            table = Table((1,))
            keyed = KeyedJaggedTensor(["x", "y"], torch.arange(12), lengths=torch.ones(12, dtype=torch.int64))
            for training in (True, False):
                found = made.train(training)(keyed)
                self.assertEqual((tuple(found.values().shape), found.length_per_key()), ((6, 2 * DIM), [DIM, DIM]))
                for key, ids in (("x", np.arange(6)), ("y", np.arange(6, 12))):
                    np.testing.assert_array_equal(found[key].detach(), table.look_up(ids, None))
                if training:
                    gradient = np.arange(12 * DIM, dtype=np.float32).reshape(6, 2 * DIM)
                    (found.values() * torch.from_numpy(gradient)).sum().backward()
                    sparse.step()
                    sparse.zero_grad()
                    table.update(np.arange(6), None, gradient[:, :DIM])
                    table.update(np.arange(6, 12), None, gradient[:, DIM:])
            np.testing.assert_array_equal(made.model.table("t"), table.rows)

    def test_jagged_sequences(self):
        import emberd.torch
        import torch

        from emberd.compat.torchrec import KeyedJaggedTensor
        described = config("jagged_sequences", (4, 3))
        made = emberd.torch.EmbeddingCollection(described.tables, client=self.client, model=described.name, features=described.features, seed=3)
        self.addCleanup(made.finish)
        sparse = made.optimizer()
        found = made(KeyedJaggedTensor(["x"], torch.arange(6), lengths=torch.tensor([4, 0, 2])))["x"].values()
        self.assertEqual(found[:, 0].tolist(), list(range(6)))
        self.assertEqual(tuple(found.shape), (6, DIM))
        found.sum().backward()
        sparse.step()
        self.assertEqual(made.model.table("t")[:7, 0].tolist(), [-1, 0, 1, 2, 3, 4, 6])


@unittest.skipUnless(jax, "SKIP: JAX is not installed")
class JaxTest(Case):
    def test_inside_and_outside_of_jitted_functions(self):
        for described, table, random in self.cases(1):
            emb = emberd.jax.Embedding(self.client.declare(described))
            self.addCleanup(emb.finish)
            layer = emberd.jax.nnx.Embed(emb)
            look_up = jax.jit(lambda token, ids: emb.in_jit(token, ids))
            step_of = jax.jit(jax.grad(lambda token, ids, gradient: (emb.in_jit(token, ids)["x"] * gradient).sum()))
            for ids, weights in forms(random, table.output):
                one = {"x": given(ids.astype(np.int32), weights)}
                number = emb.send(one)
                self.step(table, random, ids, weights, emb.receive(number)["x"], lambda gradient: emb.update(number, {"x": gradient}))
                self.step(table, random, ids, weights, look_up(emb.token(), one)["x"], lambda gradient: step_of(emb.token(), one, gradient))
                np.testing.assert_array_equal(layer(one)["x"], table.look_up(ids, weights))
            emb.finish()
            np.testing.assert_array_equal(emb.model.table("t"), table.rows)

    def test_a_wrong_shape_is_named(self):
        emb = emberd.jax.Embedding(self.client.declare(config("wrong", (5, 3))))
        look_up = jax.jit(lambda token, ids: emb.in_jit(token, {"x": ids})["x"])
        for shape in ((3, 5), (6, 1), (2, 3, 2, 2)):
            with self.assertRaises(emberd.InvalidArgument) as raised, emb.typed_errors():
                jax.block_until_ready(look_up(emb.token(), np.zeros(shape, np.int32)))
            self.assertIn(f"shape is {list(shape)}; it must be [samples], [any, 3] or [any, 3, ids_per_sample], because output_shape is [5, 3]", str(raised.exception))


@unittest.skipUnless(keras, "SKIP: Keras is not installed")
class KerasTest(Case):
    def test_positions_with_several_ids_and_weights(self):
        for described, table, random in self.cases(1):
            output = table.output
            if len(output) == 1:  # of one dimension there are no positions
                continue
            for ids_of_one in (None, 2):
                own = () if ids_of_one is None else (ids_of_one,)
                mine = emberd.keras.TableConfig("t", ROWS, DIM, emberd.RowId(), emberd.SGD(learning_rate=1.0), "sum")
                for model in (f"{described.name}_{ids_of_one}", self.client.declare(config(f"{described.name}_{ids_of_one}_declared", output))):
                    layer = emberd.keras.DistributedEmbedding(
                        emberd.keras.FeatureConfig("x", mine, (None, *output[1:], *own), (None, *output[1:], DIM)), client=self.client, model=model)
                    self.addCleanup(layer.finish)
                    expected = Table(output)

                    class Net(keras.Model):
                        def __init__(self):
                            super().__init__()
                            self.layer = layer

                        def call(self, inputs, training=False):
                            return keras.ops.sum(keras.ops.reshape(self.layer(inputs["ids"], training=training) * inputs["gradient"], (2, -1)), axis=1)

                    class Sum(keras.losses.Loss):
                        def call(self, label, found):
                            return found

                    net = Net()
                    net.compile(optimizer="sgd", loss=Sum(reduction="sum"))
                    ids = random.integers(0, ROWS, (2, *output[1:], *own)).astype(np.int32)
                    for weights in (None, random.integers(-3, 4, ids.shape).astype(np.float32)):
                        prepared = layer.preprocess(ids, weights)
                        np.testing.assert_array_equal(keras.ops.convert_to_numpy(layer(prepared)), expected.look_up(ids, weights))
                        gradient = random.integers(-2, 3, (2, *output[1:], DIM)).astype(np.float32)
                        net.train_on_batch({"ids": prepared, "gradient": gradient}, np.zeros(2, np.float32))
                        expected.update(ids, weights, gradient)
                    layer.finish()
                    np.testing.assert_array_equal(layer.tables.table("t"), expected.rows)
                    if isinstance(model, emberd.Model):
                        for shapes in ((None, 2), (None, DIM)), ((None, 9), (None, 9, DIM)):
                            other = emberd.keras.DistributedEmbedding(emberd.keras.FeatureConfig("x", mine, *shapes), client=self.client, model=model)
                            with self.assertRaisesRegex(ValueError, "model: feature 'x' has the output_shape"):
                                other.build()
                    with self.assertRaisesRegex(ValueError, "'x': weights of the shape"):
                        layer.preprocess(ids, np.ones((*ids.shape, 1), np.float32))
                    with self.assertRaisesRegex(ValueError, "'x': the shape .* is not allowed; a sequence is"):
                        layer.preprocess(np.zeros((2, *(extent + 1 for extent in output[1:])), np.int32))


if __name__ == "__main__":
    main()
