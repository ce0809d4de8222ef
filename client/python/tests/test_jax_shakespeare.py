"""The Shakespeare example: a step is what NumPy computes, and its loss ends below what guessing by frequency loses.

What this would catch: a gradient of another layout than the activations (samples of a sequence in another order), a sum where a
mean is meant, and a layer that learns nothing through its table.
"""

import os
import re
import subprocess
import sys
import unittest

from cluster import ClusterTest, main

try:
    import jax
    import optax
    from flax import nnx
except ImportError as error:
    print(f"SKIP: {error.name} is not installed")
    sys.exit(77)

import numpy as np

import emberd.jax

EXAMPLES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "examples")
sys.path.insert(0, EXAMPLES)
import shakespeare  # noqa: E402

jax.config.update("jax_platforms", "cpu")


class ShakespeareTest(ClusterTest):
    def test_one_step_is_that_of_numpy(self):
        embedding = emberd.jax.Embedding(self.client.declare(shakespeare.config("one")))
        self.addCleanup(embedding.finish)
        network = shakespeare.Network(embedding, nnx.Rngs(0))
        optimizer = nnx.Optimizer(network, optax.sgd(shakespeare.RATE), wrt=nnx.Param)
        numbers, _ = shakespeare.load(shakespeare.TEXT)
        batch = next(shakespeare.batches(numbers, 1))

        weights = {name: np.asarray(getattr(getattr(network, layer), part)[...], np.float64) for name, layer, part in (
            ("w1", "hidden", "kernel"), ("b1", "hidden", "bias"), ("w2", "output", "kernel"), ("b2", "output", "bias"))}
        table = embedding.model.table("words").astype(np.float64)
        loss = float(shakespeare.train_step(network, optimizer, batch, None))
        embedding.finish()

        ids, label, size = batch["ids"]["words"], batch["next"], shakespeare.BATCH
        x = table[ids].reshape(size, -1)
        hidden = x @ weights["w1"] + weights["b1"]
        logits = hidden @ weights["w2"] + weights["b2"]
        share = np.exp(logits - logits.max(1, keepdims=True))
        share /= share.sum(1, keepdims=True)
        self.assertLess(abs(loss + np.log(share[np.arange(size), label]).mean()), 1e-6 * 8)  # of about 7.5, in float32
        share[np.arange(size), label] -= 1
        of_logits = share / size
        of_hidden = of_logits @ weights["w2"].T
        of_x = (of_hidden @ weights["w1"].T).reshape(-1, shakespeare.WIDTH)
        rate = shakespeare.RATE
        np.subtract.at(table, ids, rate * of_x)
        np.testing.assert_allclose(embedding.model.table("words"), table, atol=1e-6)
        for value, before, gradient in ((network.output.kernel, "w2", hidden.T @ of_logits),
                                        (network.output.bias, "b2", of_logits.sum(0)),
                                        (network.hidden.kernel, "w1", x.T @ of_hidden),
                                        (network.hidden.bias, "b1", of_hidden.sum(0))):
            np.testing.assert_allclose(value[...], weights[before] - rate * gradient, atol=1e-6)

    def test_its_loss_ends_below_the_entropy_of_the_words(self):
        for options in (["--steps", "200"], ["--steps", "120", "--dense", "adam", "--address", self.cluster.address]):
            done = subprocess.run([sys.executable, "-B", os.path.join(EXAMPLES, "shakespeare.py"), *options],
                                  capture_output=True, text=True, timeout=600,
                                  env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
            self.assertEqual(done.returncode, 0, done.stderr)
            loss, first, entropy = map(float, re.search(r"loss=(\S+) first=(\S+) entropy=(\S+)", done.stdout).groups())
            self.assertLess(loss, entropy - 1)
            self.assertLess(entropy, first)
            self.assertAlmostEqual(entropy, 6.0342, places=3)  # of 956 words


if __name__ == "__main__":
    main()
