"""Mistakes that trainers on emberd.torch make, and what is left of the step then.

What this would catch: a gradient that is dropped without a word, a module that a refused update leaves unusable, a checkpoint
that nobody can wait for.
"""

import tempfile

from cluster import emberd, main
from test_torch import Case, Jagged, tables, torch


class MistakesTest(Case):
    def test_no_gradient_is_dropped_in_silence(self):
        for jagged in (False, True):
            ebc = self.make("a", "b", model=f"kept_{jagged}")
            sparse = ebc.optimizer()
            ids = Jagged() if jagged else {"a": torch.tensor([1]), "b": torch.tensor([1])}
            first = ebc(ids)["a"]
            second = ebc(ids)["a"]  # a tower that is called twice
            with self.assertRaisesRegex(RuntimeError, "ended or skipped.*accumulate=True"):
                (first + second).sum().backward(retain_graph=True)
            second.grad = None
            sparse.zero_grad()
            second = ebc(ids)["a"]
            second.sum().backward(retain_graph=True)
            with self.assertRaisesRegex(RuntimeError, "no optimizer.*zero_grad.*accumulate=True"):
                ebc(ids)
            sparse.step()
            with self.assertRaisesRegex(RuntimeError, "ended or skipped"):
                second.sum().backward()
            ebc(ids)["a"].sum().backward()
            with self.assertWarnsRegex(UserWarning, "drops gradients"):
                ebc.finish()
            self.assertEqual(ebc.model.read_rows("a", [1])[0, 0], -1)

    def test_lightning_accumulates_two_batches(self):
        for accumulate in (False, True):
            ebc = self.make(model=f"lightning_{accumulate}", accumulate=accumulate)
            sparse = ebc.optimizer()

            def epoch(ebc=ebc, sparse=sparse):
                for batch in range(4):  # accumulate_grad_batches=2
                    ebc({"t": torch.tensor([batch, 9])})["t"].sum().backward()
                    if batch % 2:
                        sparse.step()
                        sparse.zero_grad()

            if accumulate:
                epoch()
            else:
                with self.assertRaisesRegex(RuntimeError, "step 0 has gradients that no optimizer.*accumulate=True"):
                    epoch()
                sparse.zero_grad()
            self.assertEqual(ebc.next_step, 2 if accumulate else 0)
            self.assertEqual(ebc.model.read_rows("t", [0, 3, 9])[:, 0].tolist(), [-1, -1, -4] if accumulate else [0, 0, 0])

    def test_a_step_that_was_refused_is_repeated_or_skipped(self):
        for accumulate, pipelined in ((False, False), (True, False), (False, True)):
            ebc = self.make(model=f"refused_{accumulate}_{pipelined}", accumulate=accumulate, pipelined=pipelined)
            sparse = ebc.optimizer(lr=1.0)
            ids = {"t": torch.tensor([1])}
            refused = 0
            for k in range(9):
                try:
                    found = ebc(ids)["t"]
                except ValueError:  # pipelined: of the step before
                    refused += 1
                    found = ebc(ids)["t"]
                (found.sum() * (float("nan") if k == 2 else 1.0)).backward()
                sparse.param_groups[0]["lr"] = -1.0 if k == 4 else 1.0
                try:
                    sparse.step()
                except ValueError:
                    refused += 1
                    sparse.param_groups[0]["lr"] = 1.0
                    if k != 2:
                        sparse.step()
            with torch.no_grad():
                ebc(ids)
            ebc.finish()
            self.assertEqual((refused, ebc.next_step), (2, 9), (accumulate, pipelined))
            self.assertEqual(ebc.model.read_rows("t", [1])[0, 0], -7 if pipelined else -8)

    def test_a_checkpoint_of_a_step_is_waited_for_and_gone_back_to(self):
        with tempfile.TemporaryDirectory() as folder, emberd.local(data=folder) as cluster, cluster.connect() as client:
            ebc = emberd.torch.EmbeddingBagCollection(tables("t"), client=client, model="best")
            sparse = ebc.optimizer()
            for step in range(4):
                ebc({"t": torch.tensor([1])})["t"].sum().backward()
                sparse.step(checkpoint={0: "best", 3: "last"}.get(step))
                if step == 0:
                    state = ebc.state_dict()
                    ebc.wait_checkpoint("best")
            ebc.finish()
            self.assertEqual(dict(ebc.checkpoints), {"best": "", "last": ""})
            ebc.wait_checkpoint("last")
            with self.assertRaisesRegex(LookupError, "other"):
                ebc.wait_checkpoint("other")
            client.restore("best", "best")
            ebc.load_state_dict(state)
            self.assertEqual(ebc.next_step, 1)
            self.assertEqual(ebc({"t": torch.tensor([1])})["t"].tolist(), [[-1] * 4])
            ebc.finish()


if __name__ == "__main__":
    main()
