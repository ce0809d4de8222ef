"""The same ids and the same gradients give the same tables, bit for bit, whichever layer they go through.

What this would catch: gradients that a layer rounds, scales, sums in another order or sends for another step, and a step that is
made twice. The digest of what the client alone makes stands here, so that environments with other frameworks compare with it.
"""

import hashlib
import unittest

from cluster import ClusterTest, emberd, main

import numpy as np

ROWS, DIM, SAMPLES, STEPS = 96, 8, 24, 6
DIGEST = "5b60e4dd9a4289dc042d4f1f757e0eb3e48c22d53de1ae8323950baf006c8d31"


def has(module):
    try:
        __import__(module)
    except ImportError:
        return False
    return True


def config(name):
    return emberd.ModelConfig(
        name,
        tables=[emberd.TableConfig("users", ROWS, DIM, combiner="sum", initializer=emberd.Normal(0.0, 0.1),
                                   optimizer=emberd.Adagrad(learning_rate=0.3)),
                emberd.TableConfig("words", ROWS, DIM, combiner="mean", initializer=emberd.Uniform(-0.1, 0.1),
                                   optimizer=emberd.Adam(learning_rate=0.05, bias_correction=True))],
        features=[emberd.FeatureConfig("user", "users"), emberd.FeatureConfig("title", "words"),
                  emberd.FeatureConfig("text", "words")], seed=5)


def steps():
    """Ids, and gradients that are no round numbers."""
    random = np.random.default_rng(11)
    for _ in range(STEPS):
        lengths = random.integers(1, 6, SAMPLES)
        splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        ids = {"user": random.integers(0, ROWS, SAMPLES, dtype=np.int32),
               "title": random.integers(0, ROWS, (SAMPLES, 3), dtype=np.int32),
               "text": emberd.Ragged(random.integers(0, ROWS, splits[-1], dtype=np.int32), splits,
                                     random.uniform(0.5, 2, splits[-1]).astype(np.float32))}
        yield ids, {name: random.standard_normal((SAMPLES, DIM)).astype(np.float32) for name in ids}


class SameTablesTest(ClusterTest):
    def digest(self, model):
        digest = hashlib.sha256()
        for table in model.tables.values():
            for slot in ("", *table.slots):
                digest.update(model.table(table.name, slot=slot).tobytes())
        return digest.hexdigest()

    def check(self, model):
        self.assertEqual(self.digest(model), DIGEST)

    def test_by_the_client(self):
        model = self.client.declare(config("client"))
        with model.train("run") as stream:
            for ids, gradients in steps():
                stream.lookup(ids)
                stream.update(gradients)
        self.check(model)

    @unittest.skipUnless(has("torch"), "SKIP: PyTorch is not installed")
    def test_by_torch(self):
        import emberd.torch
        import torch
        described = config("torch")
        ebc = emberd.torch.EmbeddingBagCollection(described.tables, client=self.client, model="torch",
                                                  features=described.features, seed=5)
        self.addCleanup(ebc.finish)
        sparse = ebc.optimizer()
        for ids, gradients in steps():
            found = ebc(ids)
            sum((found[name] * torch.from_numpy(gradients[name])).sum() for name in found).backward()
            sparse.step()
        self.check(ebc.model)

    @unittest.skipUnless(has("jax"), "SKIP: JAX is not installed")
    def test_by_jax_outside_and_inside_of_the_jitted_function(self):
        import emberd.jax
        import jax
        emb = emberd.jax.Embedding(self.client.declare(config("jax")))
        self.addCleanup(emb.finish)
        both = list(steps())
        for (number, ids), (_, gradients) in zip(emb.prefetch([ids for ids, _ in both]), both):
            emb.receive(number)
            emb.update(number, {name: jax.device_put(value) for name, value in gradients.items()})
        self.check(emb.model)

        inside = emberd.jax.Embedding(self.client.declare(config("in_jit")))
        self.addCleanup(inside.finish)
        step_of = jax.jit(jax.grad(lambda token, ids, gradients: sum(
            (found * gradients[name]).sum() for name, found in inside.in_jit(token, ids).items())))
        for ids, gradients in both:
            step_of(inside.token(), ids, gradients)
        inside.finish()
        self.check(inside.model)

    @unittest.skipUnless(has("emberd.keras"), "SKIP: Keras is not installed")
    def test_by_keras(self):
        import emberd.keras
        import keras
        described = config("keras")
        tables = {one.name: emberd.keras.TableConfig(one.name, ROWS, DIM, one.initializer, one.optimizer, one.combiner)
                  for one in described.tables}
        shapes = {"user": (SAMPLES,), "title": (SAMPLES, 3), "text": (SAMPLES, None)}
        model = self.client.declare(emberd.ModelConfig("keras", described.tables, described.features, seed=5))
        layer = emberd.keras.DistributedEmbedding(
            {one.name: emberd.keras.FeatureConfig(one.name, tables[one.table], shapes[one.name], (SAMPLES, DIM))
             for one in described.features}, client=self.client, model=model, group="train")
        self.addCleanup(layer.finish)

        class Net(keras.Model):
            def __init__(self):
                super().__init__()
                self.layer = layer

            def call(self, inputs, training=False):
                found = self.layer(inputs["ids"], training=training)
                return keras.ops.sum(sum(found[name] * inputs["gradients"][name] for name in found), axis=1)

        class Sum(keras.losses.Loss):
            def call(self, label, found):
                return found

        net = Net()
        net.compile(optimizer="sgd", loss=Sum(reduction="sum"))
        for ids, gradients in steps():
            text = [ids["text"].values[begin:end] for begin, end in zip(ids["text"].row_splits, ids["text"].row_splits[1:])]
            weights = [ids["text"].weights[begin:end] for begin, end in zip(ids["text"].row_splits, ids["text"].row_splits[1:])]
            net.train_on_batch({"ids": layer.preprocess({**ids, "text": text}, {"user": None, "title": None, "text": weights}),
                                "gradients": gradients}, np.zeros(SAMPLES, np.float32))
        layer.finish()
        self.check(model)


if __name__ == "__main__":
    main()
