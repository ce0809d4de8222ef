"""The example for Lightning learns in automatic mode, and goes on from its checkpoint with the tables of the same step.

What this would catch: a step of the dense part without one of the tables, a lookup that counts as a step in Lightning's check of the validation,
tables that are at another step than the file of Lightning, and tables that take scaled gradients.
"""

import contextlib
import importlib.util
import io
import os
import re
import sys
import tempfile
import unittest
import unittest.mock

import numpy as np

from cluster import ClusterTest, main

try:
    import lightning
    from lightning.pytorch.plugins import MixedPrecision
except ImportError as error:
    print(f"SKIP: {error.name} is not installed")
    sys.exit(77)

from test_torch import scaler, torch  # noqa: E402

EXAMPLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "examples", "lightning_clicks.py")
spec = importlib.util.spec_from_file_location("lightning_clicks", EXAMPLE)
clicks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(clicks)
if not hasattr(torch, "compile"):  # PyTorch 1 cannot import what this needs on Python 3.11
    lightning.LightningModule._register_sharded_tensor_state_dict_hooks_if_available = lambda self: None


class LightningTest(ClusterTest):
    def run_example(self, *options):
        output = io.StringIO()
        with unittest.mock.patch.object(sys, "argv", [EXAMPLE, *options]), contextlib.redirect_stdout(output):
            clicks.main()
        steps, held_out = re.search(r"steps=(\d+) held_out=(\S+)", output.getvalue()).groups()
        return int(steps), float(held_out)

    def test_a_model_is_trained_saved_and_resumed(self):
        with tempfile.TemporaryDirectory() as folder:
            steps, first = self.run_example("--folder", folder, "--epochs", "2")
            self.assertEqual(steps, 200)
            steps, last = self.run_example("--folder", folder, "--epochs", "4", "--resume")
            self.assertEqual(steps, 400)
        self.assertLess(max(first, last), 0.3)  # a coin has 0.693

    def accumulators(self, scale):
        """Of the users after three steps, whose gradients are scaled."""
        self.client.drop_model("clicks")
        torch.manual_seed(1)
        net = clicks.Clicks(self.client)
        first = net.net[0].weight.detach().clone()
        # On CPUs Lightning makes "bf16-mixed" of precision="16-mixed", which scales nothing: so its scaler, in 32 bits.
        precision = MixedPrecision("16-mixed", "cpu", scaler(init_scale=scale))
        precision.autocast_context_manager = contextlib.nullcontext
        trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
                                    enable_checkpointing=False, plugins=[precision])
        trainer.fit(net, torch.utils.data.DataLoader(list(clicks.batches(3, seed=1)), batch_size=None))
        self.assertEqual(torch.equal(first, net.net[0].weight), scale == np.inf)
        net.tables.finish()
        return net.tables.model.read_rows("user", np.arange(clicks.USERS), slot="accumulator")

    def test_gradients_of_16_mixed_are_unscaled_and_steps_that_overflow_change_nothing(self):
        plain = self.accumulators(1.0)
        self.assertGreater(plain.max(), 2e-6)
        np.testing.assert_allclose(self.accumulators(1024.0), plain, rtol=1e-3)
        np.testing.assert_array_equal(self.accumulators(np.inf), np.full_like(plain, 1e-6))


if __name__ == "__main__":
    main()
