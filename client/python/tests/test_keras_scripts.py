"""What scripts for keras-rs find by the one changed import, towers that are called alone, and the example of sequences. KERAS_BACKEND says on which backend.

What this would catch: a layer of keras-rs that the import hides, a feature that is trained in a step that leaves it out, and an error that does not say what to do.
"""

import contextlib
import io
import os
import re
import sys
import unittest
import unittest.mock

from cluster import emberd, main

from test_keras import HERE, Case, keras_rs, module_of  # skips where there is no Keras

import keras
import numpy as np


class NamesTest(Case):
    @unittest.skipUnless(keras_rs, "SKIP: keras-rs is not installed")
    def test_each_name_of_keras_rs_is_its_own_but_for_ours(self):
        """Would catch: a public name of keras-rs that is an AttributeError after the changed import, and one of ours that is keras-rs's."""
        ours = {"DistributedEmbedding", "FeatureConfig", "TableConfig"}
        self.assertLess(ours | {"DotInteraction", "FeatureCross"}, set(vars(keras_rs.layers)))
        for module, here in ((keras_rs.layers, emberd.keras.layers), (keras_rs, emberd.keras)):
            for name, value in vars(module).items():
                if name in ours:
                    self.assertEqual(getattr(here, name).__module__.split(".")[0], "emberd")
                elif not name.startswith("_") and name != "layers":
                    self.assertIs(getattr(here, name), value)
        with self.assertRaisesRegex(AttributeError, "^module 'emberd.keras' has no attribute 'FeatureCros'$"):
            emberd.keras.layers.FeatureCros

    def test_without_keras_rs_an_error_says_what_to_install(self):
        """Would catch: an ImportError, which hasattr does not take, and a name of our own that needs keras-rs."""
        with unittest.mock.patch.dict(sys.modules, keras_rs=None):
            with self.assertRaisesRegex(AttributeError, "has no attribute 'FeatureCross'; .* pip install keras-rs"):
                emberd.keras.layers.FeatureCross
            self.assertFalse(hasattr(emberd.keras, "losses"))
            self.assertEqual(emberd.keras.layers.TableConfig("t", 8, 4).name, "t")
            with self.assertRaisesRegex(AttributeError, "has no attribute '__path_of__'$"):
                emberd.keras.__path_of__


class PartialTest(Case):
    def towers(self, table=None, **options):
        """The items are in a dict of their own, as a sequence with a mask."""
        return self.make({"user": emberd.keras.FeatureConfig("user", table or self.table("users"), (8,), (8, 4)),
                          "of": {"item": emberd.keras.FeatureConfig("item", self.table("items"), (8, 2), (8, 2, 4), mask_zero=True)}}, **options)

    def test_towers_are_trained_alone_and_together(self):
        """Would catch: a row of the other tower that moves, a tower that is not trained, and a result that has what was left out."""
        layer = self.towers(partial=True)

        class Sum(keras.Model):
            def __init__(self):
                super().__init__()
                self.layer = layer

            def call(self, inputs, training=False):
                return sum(keras.ops.sum(one, range(1, len(one.shape))) for one in keras.tree.flatten(self.layer(inputs, training=training)))

        user, item = {"user": np.ones(8, np.int32)}, {"of": {"item": np.full((8, 2), 2, np.int32)}}
        expected = np.zeros(2)
        for ids in (user, item, {**user, **item}):
            for prepared in (ids, layer.preprocess(ids)):
                self.assertEqual(set(layer(prepared)), set(ids))
                self.assertEqual(set(layer.compute_mask(prepared)), set(ids))
                net = Sum()
                net.compile(optimizer="sgd", loss=lambda _, found: found)
                net.train_on_batch(prepared, np.zeros(8, np.float32))
                layer.finish()
                expected -= np.array(["user" in ids, 2 * ("of" in ids)]) * 0.5  # its 8 or 16 lookups, at a rate of 0.5, of a mean over 8
                self.assertEqual([layer.tables.read_rows(name, [row])[0, 0] for name, row in (("users", 1), ("items", 2))], expected.tolist())
        tower = keras.Model(one := {"user": keras.Input((), 8, dtype="int32", name="user")}, layer(one))
        self.assertEqual({name: value.shape for name, value in tower.predict(user, verbose=0).items()}, {"user": (8, 4)})
        self.assertTrue(emberd.keras.DistributedEmbedding.from_config(layer.get_config())._held.options["partial"])

    def test_what_is_missing_says_how_it_may_be(self):
        """Would catch: an error that leaves open what to do, and calls of different features that make one step."""
        ids = {"user": np.ones(8, np.int32)}
        with self.assertRaisesRegex(ValueError, r"inputs: \['user'\] is not allowed; .* a dict of user, of. Give all; or make the layer with partial=True"):
            self.towers().preprocess(ids)
        for wrong in ({}, {"users": ids["user"]}, {**ids, "of": {}}):
            with self.assertRaisesRegex(ValueError, "is not allowed; the structure must be that of feature_configs, a dict of [a-z, ]*$"):
                self.towers(partial=True).preprocess(wrong)
        weights = np.ones(8, np.float32)
        for given, wrong in ((ids, {"of": {"item": np.ones((8, 2), np.float32)}}), ({**ids, "of": {"item": np.ones((8, 2), np.int32)}}, {"user": weights})):
            with self.assertRaisesRegex(ValueError, "weights: those of (item|user) are not allowed; they must be of the features that inputs have"):
                self.towers(partial=True).preprocess(given, wrong)
        optimizer = keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)
        with self.assertRaisesRegex(ValueError, "partial: True is not allowed with gradient_accumulation_steps"):
            self.towers(self.table("users", optimizer=optimizer), partial=True)(ids)


class SequencesTest(Case):
    @unittest.skipUnless(keras_rs, "SKIP: keras-rs is not installed")
    def test_the_example_learns_and_says_what_it_refuses(self):
        """Would catch: padding that counts in the mean, rates of tables that the callback leaves, and an error of a framework in place of an IndexError."""
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            module_of(os.path.join(HERE, "..", "examples", "sequences_keras.py")).main()
        self.assertRegex(said.getvalue(), r"(?m)^refused: feature 'next': id at position 0 is \d+; allowed: \[0, 200\)$")
        right, rate = map(float, re.search(r"right=(\S+) rate=(\S+)", said.getvalue()).groups())
        self.assertGreater(right, 0.9)  # half of the next items fit
        self.assertLess(rate, 0.02)  # what the table was declared with


if __name__ == "__main__":
    main()
