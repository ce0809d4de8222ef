"""Checkpoints from Python on a real cluster: saved, listed, restored, asked for with a step.

What this would catch: a checkpoint that holds other steps than it says, progress that nobody hears of, an end that does not
reach the trainer, and a damaged checkpoint that is used.
"""

import contextlib
import datetime
import glob
import itertools
import os
import tempfile
import time
import types
import unittest

from cluster import counting_model, emberd, has_torch, interrupted_sending, main

import emberd.steps
import emberd.trainer
import numpy as np

ONE = np.ones((1, 4), np.float32)


class CheckpointTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = folder.name
        cls.cluster = emberd.local(shards=2, data=folder.name, durability="memory")
        cls.addClassCleanup(cls.cluster.close)
        cls.client = cls.cluster.connect()
        cls.addClassCleanup(cls.client.close)

    def declare(self, **options):
        return self.client.declare(counting_model(self.id().split(".")[-1], **options))

    def train(self, model, steps):
        """Row 3 loses one with each step."""
        with model.train("run") as stream:
            for _ in range(steps):
                stream.lookup({"t": [3]})
                stream.update({"t": ONE})

    def test_goes_back_to_what_it_saved(self):
        model = self.declare()
        self.train(model, 3)
        phases = []
        saved = model.save_checkpoint("a", progress=lambda now: phases.append(now.phase))
        self.assertEqual((saved.model, saved.name, saved.parent, saved.automatic), (model.name, "a", "", False))
        self.assertEqual(dict(saved.groups), {"run": 3})
        self.assertGreater(saved.bytes, 0)
        self.assertLess(abs(datetime.datetime.now(datetime.timezone.utc) - saved.saved_at), datetime.timedelta(minutes=5))
        self.assertTrue(set(phases) <= {"pausing", "saving"}, phases)
        self.train(model, 2)
        self.assertEqual(model.table("t")[3, 0], -5)

        restored = self.client.restore(model.name, progress=lambda now: self.assertGreaterEqual(now.elapsed, 0))
        self.assertEqual(restored.table("t")[3].tolist(), [-3] * 4)
        with restored.train("run") as stream:
            self.assertEqual(stream.next_step, 3)

    def test_a_name_is_given_once(self):
        model = self.declare()
        model.save_checkpoint("a")
        with self.assertRaises(emberd.AlreadyExists):
            model.save_checkpoint("a")
        for name in ("../a", "newest"):
            with self.assertRaisesRegex(emberd.InvalidArgument, name):
                model.save_checkpoint(name)

    def test_lists_and_deletes(self):
        model = self.declare()
        model.save_checkpoint("a")
        self.train(model, 1)
        model.save_checkpoint("b", incremental=True)
        found = self.client.checkpoints(model.name)
        self.assertEqual([(one.name, one.parent) for one in found], [("b", "a"), ("a", "")])
        self.assertEqual(found.damaged, [])
        self.assertLessEqual({("b", model.name)}, {(one.name, one.model) for one in self.client.checkpoints()})
        with self.assertRaises(emberd.FailedPrecondition):
            self.client.delete_checkpoint(model.name, "a")
        self.assertGreater(self.client.delete_checkpoint(model.name, "b"), 0)
        self.client.delete_checkpoint(model.name, "a")
        self.assertEqual(self.client.checkpoints(model.name), [])
        with self.assertRaises(emberd.NotFound):
            self.client.restore(model.name, "a")

    def until_it_ends(self):
        """Numbers of steps, during which a checkpoint ends."""
        end = time.monotonic() + 240
        for step in itertools.count():
            self.assertLess(time.monotonic(), end, "nobody heard of its end")
            yield step

    def ask(self, model, name):
        """What a stream hears that asks for a checkpoint with step 1: its end comes with a later step."""
        with model.train("run") as stream:
            for step in self.until_it_ends():
                stream.lookup({"t": [3]})
                applied = stream.update({"t": ONE}, checkpoint=name if step == 1 else None)
                if applied.checkpoint:
                    self.assertEqual((applied.checkpoint, applied.checkpoint_step), (name, 1))
                    return applied.checkpoint_error

    def test_a_step_asks_for_one(self):
        model = self.declare()
        self.assertEqual(self.ask(model, "two"), "")
        restored = self.client.restore(model.name, "two")
        self.assertEqual(restored.table("t")[3, 0], -2)

    def test_a_step_hears_why_there_is_none(self):
        model = self.declare()
        model.save_checkpoint("a")
        self.assertIn('"a"', self.ask(model, "a"))

    def test_steps_ask_for_one_and_collect_its_end(self):
        model = self.declare()
        steps = emberd.steps.Steps(model, "run")
        for number in self.until_it_ends():
            step = steps.send({"t": [3]})
            steps.receive(step)
            steps.update(step, {"t": ONE}, checkpoint="three" if number == 2 else None)
            if steps.checkpoints:
                break
        self.assertEqual(steps.checkpoints, {"three": ""})
        steps.finish()
        self.assertEqual(self.client.restore(model.name, "three").table("t")[3, 0], -3)

    def trainer(self, cluster=None, more="", **options):
        name = self.id().split(".")[-1] + more
        model = (cluster or self).client.declare(counting_model(name + "".join(map(str, options.values()))))
        made = emberd.trainer.Trainer(model, "run", **options)
        self.addCleanup(made.finish)
        return made

    def make_steps(self, trainer, count=1, **options):
        for _ in range(count):
            step, _ = trainer.begin({"t": [3]})
            trainer.update(step, {"t": ONE}, **options)

    def test_the_next_step_asks_for_one_that_is_waited_for(self):
        for options in ({}, {"pipelined": True}, {"consistency": "async"}):
            with self.subTest(**options):
                for more in ("waits", "finishes"):
                    trainer = self.trainer(more=more, **options)
                    self.make_steps(trainer)
                    trainer.request_checkpoint("two")
                    self.make_steps(trainer)
                    if more == "waits" and options.get("pipelined"):
                        with self.assertRaisesRegex(emberd.FailedPrecondition, "next step"):
                            trainer.wait_checkpoint("two")
                    self.make_steps(trainer)
                    trainer.wait_checkpoint("two") if more == "waits" else trainer.finish()
                    self.assertEqual(trainer.checkpoints, {"two": ""})
                    self.make_steps(trainer)
                    trainer.finish()
                    self.assertEqual(self.client.restore(trainer.model.name, "two").table("t")[3, 0], -2)
        with self.assertRaisesRegex(emberd.NotFound, "'one'"):
            trainer.wait_checkpoint("one")

    def test_a_step_that_is_refused_or_skipped_leaves_it_to_the_next(self):
        trainer = self.trainer()
        trainer.request_checkpoint("two")
        step, _ = trainer.begin({"t": [3]})
        with self.assertRaisesRegex(ValueError, "nan"):
            trainer.update(step, {"t": ONE * np.nan})
        self.assertEqual(list(trainer.checkpoints), ["two"])
        self.make_steps(trainer, 2)  # the refused step was skipped
        trainer.finish()
        self.assertEqual(trainer.checkpoints, {"two": ""})
        self.assertEqual({one.name: one.groups["run"] for one in self.client.checkpoints(trainer.model.name)}, {"two": 2})

    def test_a_step_that_is_refused_later_leaves_it_to_the_next_after_that(self):
        trainer = self.trainer(pipelined=True)
        self.make_steps(trainer)
        trainer.request_checkpoint("three")
        step, _ = trainer.begin({"t": [3]})
        trainer.update(step, {"t": ONE * np.nan})
        with self.assertRaisesRegex(ValueError, "nan"):
            self.make_steps(trainer)
        self.assertEqual(trainer.checkpoints, {"three": "the update of step 1 was refused"})
        self.make_steps(trainer, 2)
        trainer.finish()
        self.assertEqual(trainer.checkpoints, {"three": ""})
        self.assertEqual({one.name: one.groups["run"] for one in self.client.checkpoints(trainer.model.name) if one.name == "three"}, {"three": 3})

    def test_an_update_that_was_sent_and_refused_later_says_that_there_is_none(self):
        trainer = self.trainer(pipelined=True)
        step, _ = trainer.begin({"t": [3]})
        trainer.update(step, {"t": ONE * np.nan}, checkpoint="one")
        with self.assertRaisesRegex(ValueError, "nan"):
            trainer.finish()
        self.assertEqual(trainer.checkpoints, {"one": "the update of step 0 was refused"})

    def test_a_step_asks_for_one_where_ctrl_c_comes_while_its_update_is_sent(self):
        """It was saved, but no step was known to have asked for it."""
        trainer = self.trainer()
        number, _ = trainer.begin({"t": [3]})

        def saved(send):
            send()
            end = time.monotonic() + 120
            while not self.client.checkpoints(trainer.model.name) and time.monotonic() < end:
                time.sleep(0.01)

        with interrupted_sending("update_strided", saved):
            trainer.update(number, {"t": ONE}, checkpoint="one")
        trainer.wait_checkpoint("one")
        self.assertEqual((trainer.checkpoints, trainer.next_step), ({"one": ""}, 1))
        trainer.finish()

    def test_one_of_this_name_is_not_taken_for_it(self):
        trainer = self.trainer()
        trainer.model.save_checkpoint("a")
        trainer.request_checkpoint("a")
        with self.assertWarnsRegex(RuntimeWarning, "'a' of model .* was not saved"):
            self.make_steps(trainer)
        with self.assertRaisesRegex(emberd.FailedPrecondition, "was not saved: .*already"):
            trainer.wait_checkpoint("a")
        self.assertIn('already has a checkpoint "a"', trainer.checkpoints["a"])
        self.client.delete_checkpoint(trainer.model.name, "a")
        self.make_steps(trainer, checkpoint="a")
        trainer.finish()
        self.assertEqual((trainer.checkpoints, trainer.next_step), ({"a": ""}, 2))

    def test_a_name_that_is_used_again_waits_for_its_own_end(self):
        trainer = self.trainer()
        name = trainer.model.name
        for step in range(3):  # as the best so far is kept
            trainer.request_checkpoint("best")
            self.make_steps(trainer)  # hears of the end of the one before, too
            trainer.wait_checkpoint("best")
            self.assertEqual([(one.name, one.groups["run"]) for one in self.client.checkpoints(name)], [("best", step + 1)])
            self.client.delete_checkpoint(name, "best")
        self.make_steps(trainer, checkpoint="best")
        trainer.finish()
        self.assertEqual([(one.name, one.groups["run"]) for one in self.client.checkpoints(name)], [("best", 4)])
        self.assertEqual(trainer.checkpoints, {"best": ""})
        self.make_steps(trainer, checkpoint="kept")
        trainer.wait_checkpoint("kept")
        with self.assertWarnsRegex(RuntimeWarning, "'kept' of model .* was not saved"):
            self.make_steps(trainer, checkpoint="kept")
            with self.assertRaisesRegex(emberd.FailedPrecondition, "'kept' was not saved: "):
                trainer.wait_checkpoint("kept")

    def test_names_that_no_checkpoint_has_are_refused(self):
        trainer = self.trainer()
        step, _ = trainer.begin({"t": [3]})
        for name in ("newest", "../a", "-a", "a" * 129):
            with self.assertRaisesRegex(emberd.InvalidArgument, "name: .* is not allowed; it must be 1 to 128 letters"):
                trainer.request_checkpoint(name)
            with self.assertRaisesRegex(emberd.InvalidArgument, "checkpoint: .* is not allowed; it must be 1 to 128 letters"):
                trainer.update(step, {"t": ONE}, checkpoint=name)
        trainer.update(step, {"t": ONE}, checkpoint="a" * 128)
        self.assertEqual(trainer.next_step, 1)

    def test_steps_that_are_lost_are_a_loss_of_data(self):
        model = self.declare()
        model.save_checkpoint("before")
        steps = emberd.steps.Steps(model, "run")
        for _ in range(2):
            step = steps.send({"t": [3]})
            steps.receive(step)
            steps.update(step, {"t": ONE})
        self.client.restore(model.name, "before")
        with self.assertRaisesRegex(emberd.DataLoss, "is at step 2, .* are at step 0") as raised:
            steps.receive(steps.send({"t": [3]}))
        self.assertIs(type(raised.exception), emberd.RowsLost)
        self.assertEqual(raised.exception.name, "DATA_LOSS")

    @unittest.skipUnless(has_torch(), "SKIP: PyTorch is not installed (deploy/packages.txt)")
    def test_a_step_of_pytorch_asks_for_one(self):
        import torch
        import emberd.torch
        tables = [emberd.TableConfig("t", 64, 4, combiner="sum", initializer=emberd.Zeros(), optimizer=emberd.SGD())]
        module = emberd.torch.EmbeddingBagCollection(tables, client=self.client, model="torch_checkpoints", group="run")
        optimizer = module.optimizer(lr=1.0)
        for step in self.until_it_ends():
            module({"t": torch.tensor([3])})["t"].sum().backward()
            optimizer.step(checkpoint="two" if step == 1 else None)
            optimizer.zero_grad()
            if module.checkpoints:
                break
        self.assertEqual(module.checkpoints, {"two": ""})
        module.finish()
        self.assertEqual(self.client.restore("torch_checkpoints", "two").table("t")[3, 0], -2)

    @contextlib.contextmanager
    def other_cluster(self, model):
        """A client of a cluster of another shape that finds the checkpoints of this one."""
        with tempfile.TemporaryDirectory() as folder:
            os.mkdir(os.path.join(folder, "checkpoints"))
            os.symlink(os.path.join(self.folder, "checkpoints", model.name),
                       os.path.join(folder, "checkpoints", model.name))
            with emberd.local(shards=1, sparsecores=4, data=folder, durability="memory") as cluster:
                with cluster.connect() as client:
                    yield client

    def test_declares_from_one(self):
        model = self.declare()
        self.train(model, 4)
        model.save_checkpoint("four")
        with self.other_cluster(model) as client:
            again = client.declare(counting_model(model.name), restore_from="newest")
            self.assertEqual(again.table("t")[3, 0], -4)
            with self.assertRaises(emberd.NotFound):
                client.declare(counting_model("never_saved"), restore_from="newest")

    def test_restores_with_another_optimizer(self):
        model = self.declare()
        self.train(model, 1)
        model.save_checkpoint("a")
        other = counting_model(model.name, optimizer=emberd.Adagrad(learning_rate=1.0))
        with self.assertRaises(emberd.AlreadyExists):
            self.client.restore(model.name, "a", config=other)
        with self.other_cluster(model) as client:
            restored = client.restore(model.name, "a", config=other)
            self.assertEqual(restored.table("t")[3, 0], -1)
            self.assertEqual(restored.tables["t"].slots, ("accumulator",))

    def test_a_rule_of_ones_own_comes_back_whole(self):
        """Its text, its slots and what it computes of them: from the log, and from a checkpoint."""
        rule = emberd.Custom(learning_rate=0.1, expression="n = n + 1; m = k * m - tanh(g + w) / (step + 1); w = w + lr * m / n",
                             slots={"n": 0.5, "m": -2}, hyper_parameters={"k": np.float32(0.9)})
        config = counting_model("own_rule", optimizer=rule)

        def state(model):
            return [model.read_rows("t", [2, 3], slot=slot).tolist() for slot in ("", "n", "m")]

        with tempfile.TemporaryDirectory() as folder:
            with emberd.local(shards=2, data=folder, durability="log") as cluster, cluster.connect() as client:
                model = client.declare(config)
                self.train(model, 3)
                model.save_checkpoint("three")
                self.train(model, 2)
                want = state(model)
            self.assertEqual(want[1], [[0.5] * 4, [5.5] * 4])
            with emberd.local(shards=2, data=folder, durability="log") as cluster, cluster.connect() as client:
                self.assertEqual(state(client.declare(config)), want)
                model = client.restore("own_rule", "three")
                self.assertNotEqual(state(model), want)
                self.train(model, 2)
                self.assertEqual(state(model), want)

    def test_serves_one_and_then_another(self):
        model = self.declare()
        self.train(model, 1)
        model.save_checkpoint("one")
        self.train(model, 1)
        model.save_checkpoint("two")
        live = self.client.serve(model.name, "one", serve_as="live", storage_dtype="BFLOAT16")
        self.assertEqual(live.lookup({"t": [3]})["t"].tolist(), [[-1] * 4])
        with self.assertRaises(emberd.FailedPrecondition):
            live.lookup({"t": [3]}, train=True)
        self.train(model, 1)
        self.assertEqual(live.lookup({"t": [3]})["t"].tolist(), [[-1] * 4])
        self.client.serve(model.name, serve_as="live")
        self.assertEqual(live.lookup({"t": [3]})["t"].tolist(), [[-2] * 4])  # the same model, without a pause
        with self.assertRaises(emberd.AlreadyExists):
            self.client.serve(model.name, "one")
        with self.assertRaisesRegex(emberd.InvalidArgument, "storage_dtype"):
            self.client.serve(model.name, "one", serve_as="live", storage_dtype="INT8")

    def test_a_damaged_one_changes_nothing(self):
        model = self.declare()
        self.train(model, 1)
        model.save_checkpoint("a")
        path = sorted(glob.glob(os.path.join(self.folder, "checkpoints", model.name, "a", "*.safetensors")))[0]
        with open(path, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            byte = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([byte[0] ^ 1]))
        self.train(model, 1)
        with self.assertRaisesRegex(emberd.DataLoss, os.path.basename(path)):
            self.client.restore(model.name, "a")
        self.assertEqual(model.table("t")[3, 0], -2)

    def test_without_storage_there_are_none(self):
        with emberd.local(new=True) as cluster, cluster.connect() as client:
            model = client.declare(counting_model("m"))
            with self.assertRaises(emberd.FailedPrecondition):
                model.save_checkpoint("a")
            trainer = self.trainer(types.SimpleNamespace(client=client))
            trainer.request_checkpoint("a")
            self.make_steps(trainer)
            trainer.finish()
            self.assertRegex(trainer.checkpoints["a"], "no storage.*--data")
            with self.assertRaisesRegex(emberd.FailedPrecondition, r"no storage.*; in Python, emberd.local\(data=DIR\)"):
                trainer.model.save_checkpoint("a")


if __name__ == "__main__":
    main()
