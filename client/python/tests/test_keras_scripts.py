"""What scripts for keras-rs find by the one changed import. KERAS_BACKEND says on which backend.

What this would catch: a layer of keras-rs that the import hides, and an error that does not say what to do.
"""

import sys
import unittest
import unittest.mock

from cluster import emberd, main

from test_keras import Case, keras_rs  # skips where there is no Keras


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


if __name__ == "__main__":
    main()
