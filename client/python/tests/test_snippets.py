"""The snippets of client/python/README.md that are no whole programs run as they stand there, with what they leave out given.

What this would catch: a snippet with a name or an argument that the package does not have, and one that nothing runs.
"""

import ast
import asyncio
import concurrent.futures
import contextlib
import dataclasses
import importlib.util
import io
import os
import re
import sys
import types
import unittest

import numpy as np

from cluster import ClusterTest, emberd, main

import emberd.aio  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
TABLES = [emberd.TableConfig("user", 1000, 16), emberd.TableConfig("item", 100, 16)]
FEATURES = [emberd.FeatureConfig(table.name, table.name) for table in TABLES]
IDS = np.arange(64, dtype=np.int32)
ELSEWHERE = {"emberd for Python", "Programs", "Checkpoints", "Ray"}  # test_readme.py runs these, and test_ray.py an example for Ray


def needs(module):
    return unittest.skipUnless(importlib.util.find_spec(module), f"SKIP: {module} is not installed")


def snippets():
    """By heading, in their order."""
    with open(os.path.join(HERE, "..", "README.md"), encoding="utf-8") as file:
        parts = re.findall(r"^#+ ([^\n]+)$|^```python\n(.*?)^```$", file.read(), re.MULTILINE | re.DOTALL)
    found, heading = {}, ""
    for name, code in parts:
        heading = name or heading
        if code:
            found.setdefault(heading, []).append(code)
    return found


class SnippetCase(ClusterTest):
    def setUp(self):
        for model in self.client.models():
            self.client.drop_model(model.name)

    def model(self, name="clicks", features=2):
        return self.client.declare(emberd.ModelConfig(name, TABLES[:features], FEATURES[:features], emberd.SGD(learning_rate=1.0)))

    def run_snippet(self, heading, place=0, **names):
        """Gives its names. What it awaits is awaited."""
        code = snippets()[heading][place].replace("host:7400", self.cluster.address)
        names = self.names = {"emberd": emberd, "client": self.client, **names}
        result = eval(compile(code, f"README.md: {heading}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
        if asyncio.iscoroutine(result):
            asyncio.run(result)
        return names


class SnippetsTest(SnippetCase):
    def test_each_snippet_is_run(self):
        with open(__file__, encoding="utf-8") as file:
            run = re.findall(r'run_snippet\("([^"]+)"(?:, (\d))?', file.read())
        found = {(heading, place) for heading, codes in snippets().items() if heading not in ELSEWHERE for place in range(len(codes))}
        self.assertGreater(len(found), 10)
        self.assertEqual(found, {(heading, int(place or 0)) for heading, place in run})

    def test_training_on_a_stream(self):
        model = self.model(features=1)
        before = model.table("user")
        with concurrent.futures.ThreadPoolExecutor() as ranks:
            list(ranks.map(lambda rank: self.run_snippet("Training on a stream", model=model, rank=rank, steps=3, users=IDS, gradient=np.ones((64, 16), np.float32)), range(2)))
        np.testing.assert_allclose(before - model.table("user"), np.where(np.arange(1000) < 64, 6, 0)[:, None].repeat(16, 1), atol=1e-5)

    def test_looking_on(self):
        with contextlib.redirect_stderr(io.StringIO()) as said:
            self.run_snippet("Looking on", model=self.model(), loader=range(3))
        self.assertIn("clicks: examples / s", said.getvalue())

    def test_asyncio(self):
        self.model("clicks-live", features=1)
        self.assertEqual(self.run_snippet("asyncio", users=IDS)["found"]["user"].shape, (64, 16))


@needs("torch")
class TorchSnippetsTest(SnippetCase):
    def setUp(self):
        super().setUp()
        import emberd.torch
        import torch
        self.torch = torch

        class Net(torch.nn.Module):
            """With the tables, or beside them."""

            def __init__(self, ebc=None):
                super().__init__()
                self.ebc, self.linear = ebc, torch.nn.Linear(18, 1)

            def forward(self, dense, found):
                return self.linear(torch.cat([dense, found["user"]], 1))[:, 0]

        self.Net, self.ids = Net, {name: torch.from_numpy(IDS) for name in ("user", "item")}

    def test_pytorch(self):
        torch = self.torch
        batch = types.SimpleNamespace(ids=self.ids, dense=torch.ones(64, 2), label=torch.ones(64))
        names = self.run_snippet("PyTorch", torch=torch, net=self.Net(), tables=TABLES, loader=[batch] * 3, bce=torch.nn.functional.binary_cross_entropy_with_logits)
        self.assertEqual(names["ebc"].next_step, 3)
        names["ebc"].finish()

    def test_tables_that_change(self):
        torch = self.torch
        old = emberd.torch.EmbeddingBagCollection(TABLES, client=self.client, model="clicks", group="run-7")
        sparse = old.optimizer(lr=0.1)
        old(self.ids)["user"].sum().backward()
        sparse.step()
        saved = self.Net(old).state_dict()
        old.finish()
        trained = self.client.model("clicks")
        tables = {"users_with_more_rows": dataclasses.replace(TABLES[0], vocabulary_size=2000), "items": TABLES[1], "shops": emberd.TableConfig("shop", 10, 16)}
        names = self.run_snippet("Tables that change", dataclasses=dataclasses, config=emberd.ModelConfig("clicks", TABLES, FEATURES), **tables,
                                 features=[*FEATURES, emberd.FeatureConfig("shop", "shop")], state=saved,
                                 net=types.SimpleNamespace(load_state_dict=lambda state: self.Net(self.names["ebc"]).load_state_dict(state)))
        self.assertEqual(names["ebc"].next_step, 1)
        np.testing.assert_array_equal(names["changed"].model.table("user")[:1000], trained.table("user"))
        names["ebc"].finish()

    def test_sequences(self):
        torch = self.torch
        encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, batch_first=True), 1)
        names = self.run_snippet("Sequences", tables=[emberd.TableConfig("history", 100, 16)], history=torch.tensor([[1, 2, 0], [3, 0, 0]]), encoder=encoder)
        self.assertEqual(tuple(names["hidden"].shape), (2, 3, 16))
        names["items"].finish()

    def test_coming_from_torchrec(self):
        self.run_snippet("Coming from torchrec")


@needs("jax")
class JaxSnippetsTest(SnippetCase):
    def test_jax(self):
        import jax
        import emberd.jax

        @jax.jit
        def train_step(state, activations, batch):
            return jax.value_and_grad(lambda found: (found["user"].sum(1) * state).sum() + 0 * found["item"].sum())(activations)

        names = self.run_snippet("JAX", model=self.model(), batches=[{"ids": {"user": IDS, "item": IDS}}] * 3, state=1.0, train_step=train_step)
        self.assertEqual(names["step"], 2)
        names["emb"].finish()

    def test_jax_in_jit(self):
        import emberd.jax.nnx
        import jax
        from flax import nnx
        model, ids = self.model(), {"user": IDS, "item": IDS}
        emb, before = emberd.jax.Embedding(model, group="run-7"), model.table("user")
        names = self.run_snippet("JAX", 1, jax=jax, nnx=nnx, emb=emb, loss=lambda dense, found: dense * found["user"].sum())
        names["train_step"](2.0, emb.token(), {"ids": ids})
        jax.effects_barrier()
        self.assertEqual(names["Net"](emb, nnx.Rngs(0))(ids).shape, (64, 1))
        np.testing.assert_allclose((before - model.table("user"))[:64], 2, atol=1e-5)
        emb.finish()

    def test_scripts_for_jax_tpu_embedding(self):
        self.run_snippet("Scripts for jax-tpu-embedding")


@needs("tensorflow")
class TensorFlowSnippetsTest(SnippetCase):
    def test_tensorflow(self):
        import tensorflow as tf
        names = self.run_snippet("TensorFlow", tf=tf, ids=tf.constant(IDS), gradients={"user": tf.ones([64, 16])})
        self.assertEqual(tuple(names["activations"]["user"].shape), (64, 16))


@needs("keras")
class KerasSnippetsTest(SnippetCase):
    def test_keras(self):
        import keras

        class Net(keras.Model):
            def __init__(self, embedding):
                super().__init__()
                self.embedding, self.dense = embedding, keras.layers.Dense(1)

            def call(self, inputs):
                return self.dense(self.embedding(inputs)["user"])

        def fit(_):
            net = Net(self.names["embedding"])
            net.compile(optimizer="sgd", loss="mse")
            net.fit({"user": IDS}, np.ones((64, 1), np.float32), batch_size=64, verbose=0)

        names = self.run_snippet("Keras", keras=keras, model=types.SimpleNamespace(fit=fit))
        self.assertEqual(np.asarray(names["tables"]["users"]).shape, (1000, 16))
        self.assertTrue((names["embedding"].tables.table("users", slot="accumulator")[:64] > 0.1).any())


if __name__ == "__main__":
    main()
