"""Mistakes that trainers on emberd.torch make, and what is left of the step then.

What this would catch: a gradient that is dropped without a word, a module that a refused update leaves unusable, a checkpoint
that nobody can wait for.
"""

import concurrent.futures
import gc
import io
import os
import re
import tempfile
import time
import unittest.mock
import warnings
import weakref

import numpy as np

from cluster import SGD, counting_model, emberd, main
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
            ebc.zero_grad()
            with self.assertRaisesRegex(RuntimeError, "no optimizer.*zero_grad.. of the optimizer to drop them, which that of a module does not reach; accumulate=True"):
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

    def test_a_loop_that_says_train_at_its_top(self):
        """The batch that the loop takes from the loader before that comes in evaluation."""
        batches = [{"ids": {"t": torch.tensor([k])}} for k in range(9)]
        for depth in (2, 4):
            ebc = self.make(model=f"at_the_top_{depth}")
            sparse, ahead = ebc.optimizer(), []
            for place, batch in enumerate(emberd.torch.Prefetcher(batches, ebc, depth=depth)):
                ebc.train()
                ebc(batch["ids"])["t"].sum().backward()
                sparse.step()
                ahead.append(len(ebc._ahead))
                if place in (1, 2):
                    ebc.eval()
            self.assertEqual(ebc.model.read_rows("t", range(9))[:, 0].tolist(), [-1] * 9)
            self.assertEqual(ahead[4], depth - 1)  # it goes on sending ahead

    def test_an_optimizer_made_within_a_step_has_its_gradients(self):
        for accumulate in (False, True):
            ebc = self.make(model=f"within_{accumulate}", accumulate=accumulate)
            found = ebc({"t": torch.tensor([1])})["t"]
            sparse = ebc.optimizer()
            (found.sum() * 8).backward()
            torch.nn.utils.clip_grad_norm_(sparse.param_groups[0]["params"], 1.0)
            sparse.step()
            self.assertAlmostEqual(ebc.model.read_rows("t", [1])[0, 0], -0.5, places=5)

    def test_batches_before_an_error_of_the_loader_or_of_ids_have_their_turn(self):
        def loader(last):
            yield from ({"ids": {"t": torch.tensor([k])}} for k in range(5))
            yield from last
            raise KeyError("a batch that cannot be read")

        for depth, last, said in ((1, [], "cannot be read"), (4, [], "cannot be read"), (4, [{"label": 1}], "'ids'")):
            ebc = self.make(model=f"broken_{depth}_{len(last)}")
            sparse = ebc.optimizer()
            with self.assertRaisesRegex(KeyError, said):
                for batch in emberd.torch.Prefetcher(loader(last), ebc, depth=depth, ids=lambda batch: batch["ids"]):
                    ebc(batch["ids"])["t"].sum().backward()
                    sparse.step()
            self.assertEqual((ebc.next_step, ebc.model.read_rows("t", range(6))[:, 0].tolist()), (5, [-1] * 5 + [0]))

    def test_a_rank_or_a_size_alone_is_completed_by_torchs(self):
        with unittest.mock.patch.multiple("torch.distributed", create=True, is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: 1,
                                          get_world_size=lambda: 3):
            for given, whole in (((None, None), (1, 3)), ((None, 3), (1, 3)), ((2, None), (2, 3)), ((0, 2), (0, 2)), ((None, 1), (0, 1))):
                self.assertEqual(emberd.torch._collection._rank_and_size(*given), whole, given)

    def test_calls_that_accumulate_go_on_after_a_refused_step(self):
        ebc = self.make(accumulate=True)
        sparse = ebc.optimizer(lr=1.0)
        for k in range(4):
            (ebc({"t": torch.tensor([k])})["t"].sum() * (float("nan") if k == 1 else 1.0)).backward()
            if k == 1:
                with self.assertRaisesRegex(ValueError, "finite"):
                    sparse.step()
            else:
                sparse.step()
            sparse.zero_grad()
        self.assertEqual((ebc.next_step, ebc.model.read_rows("t", range(4))[:, 0].tolist()), (4, [-1, 0, -1, -1]))

    def test_an_interrupted_step_is_ended_or_gone_on_from(self):
        for accumulate, pipelined, method in ((False, False, "receive_update"), (False, True, "receive_update"), (True, False, "receive_update"),
                                              (True, False, "receive_lookup")):
            for then in ("step", "call", "zero_grad"):
                ebc = self.make(model=f"{method}_{accumulate}_{pipelined}_{then}", accumulate=accumulate, pipelined=pipelined)
                sparse = ebc.optimizer(lr=1.0)
                lost = False
                for k in range(4):
                    try:
                        found = ebc({"t": torch.tensor([1])})["t"]
                    except KeyboardInterrupt:  # pipelined: of the step before
                        found = ebc({"t": torch.tensor([1])})["t"]
                    found.sum().backward()
                    if k != 2:
                        sparse.step()
                        continue
                    with unittest.mock.patch.object(emberd.train.TrainStream, method, side_effect=KeyboardInterrupt):
                        with self.assertRaises(KeyboardInterrupt):
                            sparse.step()
                    if then == "zero_grad":
                        sparse.zero_grad()
                        lost = method == "receive_lookup"
                    elif then == "step" or method == "receive_lookup":
                        sparse.step()
                ebc.finish()
                self.assertEqual(ebc.model.read_rows("t", [1])[0, 0], -3 if lost else -4, (method, accumulate, pipelined, then))

    def test_a_step_that_nobody_answered_in_time_is_ended_later(self):
        ebc = self.make(patience=0.1)
        sparse = ebc.optimizer(lr=1.0)
        for k in range(3):
            ebc({"t": torch.tensor([1])})["t"].sum().backward()
            if k == 1:
                gone = emberd.Unavailable("gone")
                with unittest.mock.patch.multiple(emberd.train.TrainStream, receive_update=unittest.mock.Mock(side_effect=gone)):
                    with unittest.mock.patch.object(emberd.client.Model, "train", side_effect=gone), self.assertRaises(emberd.Unavailable):
                        sparse.step()
            sparse.step()
        self.assertEqual((ebc.next_step, ebc.model.read_rows("t", [1])[0, 0]), (3, -3))

    def test_activations_go_when_their_step_has_ended(self):
        for accumulate in (False, True):
            ebc = self.make(model=f"gone_{accumulate}", accumulate=accumulate)
            sparse = ebc.optimizer()
            gc.disable()
            try:
                found = ebc({"t": torch.tensor([1])})["t"]
                found.sum().backward()
                seen = weakref.ref(found)
                sparse.step()
                sparse.zero_grad()
                del found
                self.assertIsNone(seen(), accumulate)
            finally:
                gc.enable()

    def test_gradients_of_a_pipelined_step_are_its_own(self):
        """They are read after step() has returned."""
        for name, ids in (("dense", {"t": torch.tensor([1])}), ("jagged", Jagged())):
            ebc = self.make(*("t" if name == "dense" else "ab"), model=f"own_{name}", pipelined=True)
            sparse = ebc.optimizer()
            found = ebc(ids)
            leaf = found["t"] if name == "dense" else found.values()
            leaf.sum().backward()
            sparse.step()
            self.assertIsNone(leaf.grad)
            ebc.finish()
            self.assertEqual(ebc.model.read_rows(*(("t", [1]) if name == "dense" else ("a", [1])))[0, 0], -1)

    def test_a_trace_would_keep_the_rows_of_a_batch(self):
        ebc = self.make().eval()
        layer = emberd.torch.Embedding(8, 4, client=self.client, model="traced").eval()
        bag = emberd.torch.EmbeddingBag(8, 4, client=self.client, model="traced_bag").eval()
        for traced in (lambda ids: ebc({"t": ids})["t"], layer, bag):
            with self.assertRaisesRegex(RuntimeError, "rows are on the cluster, and a trace would keep those of this batch"):
                torch.jit.trace(traced, (torch.tensor([[1, 2]]),))
        if not hasattr(torch, "compile"):  # newer versions need packages to export
            with self.assertRaisesRegex(RuntimeError, "rows are on the cluster, and a trace would keep those of this batch"):
                torch.onnx.export(torch.nn.Sequential(layer), (torch.tensor([[1, 2]]),), io.BytesIO())

    def test_a_step_without_a_gradient_is_warned_of_once(self):
        for accumulate in (False, True):
            ebc = self.make("t", "u", model=f"without_{accumulate}", accumulate=accumulate)
            sparse, ids = ebc.optimizer(), {"t": torch.tensor([1]), "u": torch.tensor([1])}
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                for named in (True, False, False):
                    found = ebc(ids)
                    found["t"].sum().backward() if named else torch.autograd.grad(found["t"].sum(), found["t"])
                    sparse.step()
            self.assertEqual([os.path.basename(one.filename) for one in said if "no activation has a gradient" in str(one.message)], [os.path.basename(__file__)])
            self.assertEqual(ebc.next_step, 3)

    def test_states_of_others_are_refused_by_name(self):
        ebc = self.make()
        sparse = ebc.optimizer()
        adam = torch.optim.Adam(torch.nn.Linear(2, 2).parameters())
        for wrong in (adam.state_dict(), {}, {"param_groups": 5}, 5, None):
            with self.assertRaisesRegex(ValueError, "state_dict: it is not allowed, for its groups are not those of tables; .*EmbeddingOptimizer"):
                sparse.load_state_dict(wrong)
        for wrong in ({}, {"model": "x", "group": "train"}, 5, None):
            with self.assertRaisesRegex(ValueError, "state: '(model|next_step)' is missing; it must be what get_extra_state"):
                ebc.load_state_dict({"_extra_state": wrong})

    def test_ids_may_change_before_their_step_has_ended(self):
        for accumulate, prefetched in ((False, False), (False, True), (True, False)):
            ebc = self.make(model=f"changed_{accumulate}_{prefetched}", accumulate=accumulate)
            sparse = ebc.optimizer()
            ids = {"t": torch.tensor([1])}
            if prefetched:
                ebc.prefetch(ids)
            found = ebc(ids)["t"]
            ids["t"].fill_(2)  # a loader's buffer, with the next batch
            found.sum().backward()
            ebc._steps._leave()  # as a connection that is lost
            sparse.step()
            self.assertEqual(ebc.model.read_rows("t", [1, 2])[:, 0].tolist(), [-1, 0], (accumulate, prefetched))

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


    def test_a_model_that_serves_has_a_state_and_no_steps(self):
        with tempfile.TemporaryDirectory() as folder, emberd.local(data=folder) as cluster, cluster.connect() as client:
            ebc = emberd.torch.EmbeddingBagCollection(tables("t"), client=client, model="trained")
            ebc.finish()
            ebc.model.save_checkpoint("one")
            live = emberd.torch.EmbeddingBagCollection(tables("t"), model=client.serve("trained", "one", serve_as="live"))
            began = time.monotonic()
            state = live.state_dict()
            self.assertEqual(state["_extra_state"], {"model": "live", "group": "train", "next_step": 0})
            live.load_state_dict(state)
            with self.assertRaisesRegex(emberd.FailedPrecondition, r"optimizer none.*To look rows up, call eval\(\), or use torch.no_grad\(\)$"):
                live({"t": torch.tensor([1])})
            self.assertEqual(live.eval()({"t": torch.tensor([1])})["t"].tolist(), [[0] * 4])
            self.assertLess(time.monotonic() - began, 30)  # of 60 of patience

    def test_missing_features_are_named(self):
        """A name that is wrong is not one that is missing."""
        from emberd.compat.jagged import KeyedJaggedTensor
        one = torch.tensor([1])
        given = {"b": one}
        said = r"^ids: features are missing: a, c; there are ids of b. Give all; or partial=True in this lookup or, of a module, where it is made"
        for number, options in enumerate(({}, {"pipelined": True}, {"accumulate": True})):
            ebc = self.make("a", "b", "c", model=f"missing_{number}", **options)
            sparse = ebc.optimizer()
            for ids in (given, KeyedJaggedTensor(["b"], one, lengths=one)):
                with self.assertRaisesRegex(ValueError, said):
                    ebc(ids)
                with torch.no_grad(), self.assertRaisesRegex(ValueError, said):
                    ebc(ids)
            for _ in range(2):  # it goes on
                sum(found.sum() for found in ebc({name: one for name in "abc"}).values()).backward()
                sparse.step()
        sequences = emberd.torch.EmbeddingCollection(tables("a", "b", "c"), client=self.client, model=ebc.model.name, group="sequences")
        self.addCleanup(sequences.finish)
        with ebc.model.train("stream") as stream:
            for lookup in (ebc.model.lookup, stream.lookup, sequences):
                with self.assertRaisesRegex(ValueError, said):
                    lookup(given)
            with self.assertRaisesRegex(ValueError, "features are missing: a, b, c; there are ids of none"):
                stream.lookup({})
            self.assertEqual(list(stream.lookup(given, partial=True)), ["b"])
            stream.skip()
        for lookup in (ebc.model.lookup, ebc):
            with self.assertRaisesRegex(ValueError, "ids: feature 'bb': the model has no such feature; did you mean 'b'. There are a, b, c"):
                lookup({"bb": one, "a": one})
        partial = self.make("a", "b", "c", model=ebc.model.name, group="partial", partial=True)
        self.assertEqual(list(partial(given)), ["b"])
        self.assertEqual(list(ebc.model.lookup(given, partial=True)), ["b"])

    def test_optimizers_of_torch_do_not_reach_tables(self):
        ebc = self.make()
        with self.assertRaisesRegex(ValueError, "^optimizer got an empty parameter list$") as refused:
            torch.optim.Adam(ebc.parameters())
        for place in ("README.md", os.path.join("..", "COMING_FROM.md")):  # what torch says stands where people look for it
            with open(os.path.join(os.path.dirname(__file__), "..", place), encoding="utf-8") as file:
                self.assertTrue(re.search(re.escape(str(refused.exception)) + r".*\.optimizer\(", file.read()), place)
        self.assertIn(str(refused.exception), type(ebc).__doc__)
        net = torch.nn.ModuleList([ebc, torch.nn.Linear(4, 1)])
        dense = torch.optim.Adam(net.parameters())  # no mistake, but for the tables nothing comes of it
        net[1](ebc({"t": torch.tensor([1])})["t"]).sum().backward()
        dense.step()
        with self.assertRaisesRegex(RuntimeError, "step 0 has gradients that no optimizer.* has used: this module has no optimizer. Rows are no parameters, so that one "
                                    r"of torch does not reach them: make one by `sparse = module.optimizer\(\)`, and call sparse.step\(\) after each backward, or zero_grad"):
            ebc({"t": torch.tensor([1])})
        sparse = ebc.optimizer()
        sparse.step()
        self.assertEqual(ebc.next_step, 1)


class TrainedBeforeTest(Case):
    """A script that is run again with the same data= finds tables that are trained, while its dense part begins anew."""

    def run_script(self, client, steps=3, before=lambda ebc: None, model="script", **options):
        """What was warned of."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            ebc = emberd.torch.EmbeddingBagCollection(tables("t"), client=client, model=model, **options)
            before(ebc)
            sparse = ebc.optimizer()
            for _ in range(steps):
                ebc({"t": torch.tensor([1])})["t"].sum().backward()
                sparse.step()
            state = ebc.state_dict()
            ebc.finish()
            sum(ebc({"t": torch.tensor([1])}).values()).sum().backward()  # joins again
            sparse.step()
            ebc.finish()
        self.state = state
        return [one for one in said if "trained" in str(one.message)]

    def test_it_is_said_once(self):
        self.assertEqual(self.run_script(self.client), [])
        said = self.run_script(self.client)
        self.assertEqual(len(said), 1)
        self.assertRegex(str(said[0].message), r"emberd: model 'script' was there already, and group 'train' has trained its tables for 4 steps.*client.drop_model\('script'\).*"
                                               r"another data= of emberd.local.*load the state of the dense part of the same step")
        self.assertEqual(os.path.basename(said[0].filename), os.path.basename(__file__))  # where the script calls
        self.assertEqual(len(self.run_script(self.client, before=lambda ebc: ebc.state_dict())), 1)  # as Lightning saves before the first step
        said = self.run_script(self.client, group="another")
        self.assertEqual(len(said), 1)  # the tables are the same
        self.assertRegex(str(said[0].message), "group 'train' has trained its tables for")
        self.assertEqual(self.run_script(self.client, group="third", before=lambda ebc: ebc.next_step), [])
        self.client.drop_model("script")
        self.assertEqual(self.run_script(self.client), [])
        with emberd.connect(self.client.addresses) as client:
            trainer = emberd.trainer.Trainer(client.declare(emberd.ModelConfig("script", tables("t"), [emberd.FeatureConfig("t", "t")])), "train")
            with self.assertWarnsRegex(UserWarning, "trained its tables for 4 steps"):
                trainer.begin({"t": np.array([1])})
            trainer.finish()

    def test_it_is_said_where_the_first_attempt_to_join_fails(self):
        self.run_script(self.client, model="again")
        call, failures = emberd.train.Call, [emberd.Unavailable("not yet")]

        def failing(handle):
            made = call(handle)
            if failures:
                raise failures.pop()
            return made

        with unittest.mock.patch.object(emberd.train, "Call", failing):
            self.assertEqual(len(self.run_script(self.client, model="again")), 1)
        self.assertEqual(failures, [])

    def test_it_is_said_in_another_process_and_cluster(self):
        with tempfile.TemporaryDirectory() as folder:
            for group, expected in (("train", 0), ("train", 1), ("another", 1)):
                with emberd.local(data=folder, new=True) as cluster, cluster.connect() as client:
                    self.assertEqual(len(self.run_script(client, group=group)), expected)
                    client.model("script").save_checkpoint()
            with emberd.local(data=folder, new=True) as cluster, cluster.connect() as client:
                client.drop_model("script")
                self.assertEqual(self.run_script(client, group="third"), [])

    def test_it_is_said_after_a_restart_with_a_log_and_no_checkpoint(self):
        """No coordinator remembers the group then."""
        with tempfile.TemporaryDirectory() as folder:
            for group, expected in (("train", 0), ("train", 1), ("another", 1)):
                with emberd.local(data=folder, new=True, durability="log") as cluster, cluster.connect() as client:
                    said = self.run_script(client, group=group)
                    self.assertEqual((len(said), client.checkpoints()), (expected, []))
            self.assertRegex(str(said[0].message), "model 'script' was there already, and its tables have been trained, from which this run goes on")
            for before in ("reset_model", "drop_model"):
                with emberd.local(data=folder, new=True, durability="log") as cluster, cluster.connect() as client:
                    getattr(client, before)("script")
                with emberd.local(data=folder, new=True, durability="log") as cluster, cluster.connect() as client:
                    self.assertEqual(self.run_script(client, group=before), [])

    def test_rows_that_were_dropped_or_reset_are_forgotten(self):
        def again(client):
            client.drop_model("script")
            client.declare(emberd.ModelConfig("script", tables("t"), [emberd.FeatureConfig("t", "t")]))

        with tempfile.TemporaryDirectory() as folder, emberd.local(data=folder) as cluster, cluster.connect() as client:
            self.run_script(client)
            client.model("script").save_checkpoint("trained")
            for name, act in (("reset", lambda client: client.reset_model("script")), ("again", again)):
                with self.subTest(name), emberd.connect(client.addresses) as other:
                    act(other)
                    self.assertEqual(self.run_script(client, group=f"{name}-1"), [])
                    said = self.run_script(client, group=f"{name}-2")  # rows that have been trained since
                    self.assertEqual(len(said), 1)
                    self.assertRegex(str(said[0].message), f"group '{name}-1' has trained its tables for 4 steps")
                    act(other)
                    self.assertEqual(self.run_script(client, group=f"{name}-3", before=lambda ebc: ebc.model.lookup({"t": [1]})), [])
                    self.assertEqual(self.run_script(client, group=f"{name}-4", before=lambda ebc, act=act: act(other)), [])

    def test_the_steps_of_several_ranks_are_counted_once(self):
        def train(rank):
            with model.train("ranks", rank, 2) as stream:
                for _ in range(3):
                    stream.lookup({"t": [1]})
                    stream.update({"t": np.zeros((1, 4))})

        model = self.client.declare(emberd.ModelConfig("ranks", tables("t"), [emberd.FeatureConfig("t", "t")]))
        with concurrent.futures.ThreadPoolExecutor() as pool:
            list(pool.map(train, range(2)))
        said = self.run_script(self.client, model="ranks")
        self.assertEqual(len(said), 1)
        self.assertRegex(str(said[0].message), "group 'ranks' has trained its tables for 3 steps")

    def test_who_goes_on_deliberately_is_not_warned(self):
        with tempfile.TemporaryDirectory() as folder, emberd.local(data=folder) as cluster, cluster.connect() as client:
            self.run_script(client)
            trained = client.model("script").save_checkpoint("trained")
            self.assertEqual(dict(trained.groups), {"train": 4})
            ways = {"next_step": {"before": lambda ebc: ebc.next_step},
                    "its state": {"before": lambda ebc: ebc.load_state_dict({"_extra_state": {"model": "script", "group": "train", "next_step": self.reached(client)}})},
                    "the model itself": {"model": client.model("script")},
                    "another restored": {"before": lambda ebc: client.restore("script", "trained")}}
            for way, options in ways.items():
                with self.subTest(way):
                    self.assertEqual(self.run_script(client, **options), [])
            with emberd.connect(client.addresses) as other:
                other.restore("script", "trained")
                self.assertEqual(self.run_script(other), [])
            with emberd.connect(client.addresses) as other:
                other.drop_model("script")
                described = emberd.ModelConfig("script", tables("t"), [emberd.FeatureConfig("t", "t")])
                restored = other.declare(described, restore_from="trained")
                self.assertEqual(self.run_script(other, model=restored), [])
                self.assertEqual(self.run_script(other, model=other.declare(described, restore_from="trained")), [])
                changed = other.change_model("script", emberd.ModelConfig("changed", tables("t", "u"), [emberd.FeatureConfig("t", "t"), emberd.FeatureConfig("u", "u")]),
                                             groups=["train"])
                self.assertEqual(changed.groups["train"], emberd.steps.Steps(changed.model, "train").next_step)

    def reached(self, client):
        steps = emberd.steps.Steps(client.model("script"), "train")
        self.addCleanup(steps.finish)
        reached = steps.next_step
        steps.finish()
        return reached


class OwnTablesTest(Case):
    """What each table has of its own: whether it is trained, its rate, and other values of its optimizer."""

    def made(self, tables=("a", "b"), optimizer=emberd.Adam(learning_rate=0.5), kind="EmbeddingBagCollection", name="", **options):
        name = name or self.id().split(".")[-1]
        described = counting_model(name, tables, optimizer=optimizer, initializer=emberd.RowId()).tables
        made = getattr(emberd.torch, kind)(described, client=self.client, model=name, **options)
        self.addCleanup(made.finish)
        return made, made.optimizer()

    def bits(self, made):
        return {name: [made.model.table(name, slot=slot).tobytes() for slot in ("", *table.slots)] for name, table in made.model.tables.items()}

    def step(self, made, sparse, ids=None):
        from emberd.compat.jagged import KeyedJaggedTensor
        ids = ids or {name: torch.tensor([1, 2]) for name in made.model.tables}
        found = made(ids)
        values = [found[name] for name in (found.keys() if isinstance(ids, KeyedJaggedTensor) else found)]
        values = [one.values() if hasattr(one, "lengths") else one for one in values]
        moving = [one for one in values if one.requires_grad]
        if moving:
            sum(one.sum() for one in moving).backward()
            sparse.step()
            sparse.zero_grad()
        return found

    def test_a_frozen_table_stays_bit_for_bit(self):
        from emberd.compat.jagged import KeyedJaggedTensor
        jagged = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3, 1]), lengths=torch.tensor([1, 1, 2, 0]))
        for kind, options in (("EmbeddingBagCollection", {}), ("EmbeddingBagCollection", {"accumulate": True}), ("EmbeddingCollection", {"padding_idx": 1}),
                              ("EmbeddingBagCollection", {"pipelined": True}), ("EmbeddingBagCollection", {"partial": True})):
            made, sparse = self.made(kind=kind, name=f"frozen_{kind}_{'_'.join(options)}", **options)
            self.step(made, sparse)
            self.assertIs(made.requires_grad_(False, tables=["b"]), made)
            made.finish()
            before = self.bits(made)
            for ids in (None, jagged, None):
                found = self.step(made, sparse, ids)
                self.assertEqual(list(found.keys()), ["a", "b"])
            found, gone = made({"a": torch.tensor([2]), "b": torch.tensor([3])}), sparse.param_groups[1]["params"]
            self.assertEqual((found["a"].requires_grad, found["b"].requires_grad, found["b"].flatten()[0].item(), gone[0].numel()), (True, False, 3, 0))
            if not options.get("partial"):
                with self.assertRaisesRegex(ValueError, "a feature is missing: b; there are ids of a. Give all; or partial=True"):
                    made({"a": torch.tensor([2])})
            sparse.zero_grad()
            made.finish()
            after = self.bits(made)
            self.assertEqual(after["b"], before["b"])
            self.assertTrue(all(one != other for one, other in zip(after["a"], before["a"])))
            made.requires_grad_()
            self.step(made, sparse)
            made.finish()
            self.assertNotEqual(self.bits(made)["b"], before["b"])

    def test_where_all_tables_are_frozen_there_is_no_step(self):
        made, sparse = self.made()
        layer = emberd.torch.Embedding(64, 4, client=self.client, model="frozen_layer", table=counting_model("m").tables[0])
        self.assertFalse(layer.requires_grad_(False)(torch.tensor([1])).requires_grad)
        layer.finish()
        ids = [{"a": torch.tensor([one]), "b": torch.tensor([one])} for one in range(6)]
        before, number = self.bits(made), made.next_step
        for place, one in enumerate(emberd.torch.Prefetcher(ids, made, ids=lambda one: one)):
            if place == 2:
                made.requires_grad_(False)  # ids of the next call have been sent ahead
                frozen = made.next_step
            if place == 4:
                made.requires_grad_(True, ["a"])
            self.step(made, sparse, one)
        self.assertEqual(made.next_step - number, 4)
        self.assertEqual(frozen - number, 2)
        made.finish()
        after = self.bits(made)
        self.assertEqual([name for name in after if after[name] == before[name]], [])
        for tables, kind in ((["c"], LookupError), ("a", TypeError), ([5], LookupError)):
            with self.assertRaisesRegex(kind, "tables: "):
                made.requires_grad_(False, tables)

    def test_a_call_of_frozen_tables_skips_the_step_before_it(self):
        """Its step() would end that one, and move frozen rows by momentum."""
        for options in ({}, {"accumulate": True}, {"partial": True}):
            made, sparse = self.made(name=f"skipped_{'_'.join(options)}", **options)
            self.step(made, sparse)  # there is momentum
            ids = {name: torch.tensor([1, 2]) for name in ("a", "b")}
            made(ids)["a"].mul(float("inf")).sum().backward()  # an overflow, so that its step does not come
            sparse.zero_grad()
            before = self.bits(made)
            made.requires_grad_(False, ["a"] if "partial" in options else None)
            for _ in range(2):
                made({"a": torch.tensor([1])} if "partial" in options else ids)
                with self.assertRaisesRegex(RuntimeError, r"no step to end: all tables of the last call are frozen: leave its step\(\) out, or thaw them"):
                    sparse.step()
            made.finish()
            self.assertEqual(self.bits(made), before)
            made.requires_grad_()
            self.step(made, sparse)
            self.assertNotEqual(self.bits(made)["b"], before["b"])
            with self.assertRaisesRegex(RuntimeError, "no step to end: call the module"):
                sparse.step()

    def test_a_call_of_frozen_tables_may_stand_within_a_step(self):
        for backward_first in (False, True):
            made, sparse = self.made(optimizer=SGD, name=f"within_{backward_first}", partial=True)
            made.requires_grad_(False, ["b"])
            for _ in range(2):
                moving = made({"a": torch.tensor([1])})["a"]
                if backward_first:
                    moving.sum().backward()
                still = made({"b": torch.tensor([1])})["b"]
                if not backward_first:
                    (moving * still).sum().backward()
                sparse.step()
            self.assertEqual((made.next_step, [made.model.read_rows(name, [1])[0, 0] for name in ("a", "b")]), (2, [-1, 1]))
            made({"a": torch.tensor([1])})["a"].mul(float("inf")).sum().backward()  # an overflow
            made({"b": torch.tensor([1])})
            with self.assertRaisesRegex(RuntimeError, "all tables of the last call are frozen"):
                sparse.step()

    def test_batches_behind_one_that_is_refused_have_their_turn(self):
        made, sparse = self.made(optimizer=SGD)
        made.requires_grad_(False, ["b"])
        batches = [{name: torch.tensor([one]) for name in ("a", "b")} for one in range(5)]
        del batches[1]["b"]
        refused = []
        for place, batch in enumerate(emberd.torch.Prefetcher(batches, made, depth=3)):
            try:
                self.step(made, sparse, batch)
            except ValueError as error:
                refused.append(place)
                self.assertIn("a feature is missing: b", str(error))
        self.assertEqual(refused, [1])
        self.assertEqual(made.model.read_rows("a", range(5))[:, 0].tolist(), [-1, 1, 1, 2, 3])

    def test_batches_behind_one_that_was_sent_and_is_refused_have_their_turn(self):
        made, sparse = self.made(["a"], optimizer=SGD, pipelined=True)
        batches = [{"a": emberd.Ragged(torch.tensor([one]), torch.tensor([0, 1]), torch.ones(1, requires_grad=one == 1))} for one in range(5)]
        refused = []
        for place, batch in enumerate(emberd.torch.Prefetcher(batches, made, depth=3)):
            try:
                self.step(made, sparse, batch)
            except ValueError as error:
                refused.append(place)
                self.assertIn("weights of 'a': their gradient needs the rows of this step", str(error))
        made.finish()
        self.assertEqual(refused, [1])
        self.assertEqual(made.model.read_rows("a", range(5))[:, 0].tolist(), [-1, 1, 1, 2, 3])

    def test_thawing_is_from_the_next_call_on(self):
        """Also where the step under way, which had no ids of the table, is sent after that, or again."""
        for accumulate in (False, True):
            made, sparse = self.made(name=f"thawed_{accumulate}", optimizer=SGD, accumulate=accumulate)
            made.requires_grad_(False, ["b"])
            made({name: torch.tensor([1]) for name in ("a", "b")})["a"].sum().backward()
            made.requires_grad_()
            if not accumulate:
                made._steps._leave()  # as where a connection is lost
            sparse.step()
            self.assertEqual([made.model.read_rows(name, [1])[0, 0] for name in ("a", "b")], [0, 1])
            self.step(made, sparse)
            self.assertEqual([made.model.read_rows(name, [1])[0, 0] for name in ("a", "b")], [-1, 0])

    def test_a_rate_for_each_table(self):
        made, sparse = self.made(optimizer=SGD, lr_by_table=True)
        sparse.param_groups[1]["lr"] = 0.0
        self.step(made, sparse)
        self.assertEqual([made.model.table(name)[1, 0] for name in ("a", "b")], [0, 1])
        stacked, sparse = self.made(optimizer=SGD, name="stacked")
        sparse.param_groups[1]["lr"] = 0.25
        found = stacked({name: torch.tensor([1]) for name in ("a", "b")})
        (found["a"].sum() + found["b"].sum()).backward()
        with self.assertRaisesRegex(ValueError, r"lr: 0.25 of table 'b' is not allowed beside 1.0 of table 'a'; they are stacked.*lr_by_table=True.*requires_grad_"):
            sparse.step()
        sparse.param_groups[0]["lr"] = 0.25
        sparse.step()  # the step is still there
        self.assertEqual([stacked.model.table(name)[1, 0] for name in ("a", "b")], [0.75, 0.75])
        stacked.requires_grad_(False, ["a"])
        sparse.param_groups[0]["lr"] = 7.0  # of a frozen table it does not matter
        self.step(stacked, sparse)
        self.assertEqual([stacked.model.table(name)[1, 0] for name in ("a", "b")], [0.75, 0.5])
        named = made.optimizer(lr={"b": 0.5})
        self.assertEqual([group["lr"] for group in named.param_groups], [1.0, 0.5])
        with self.assertRaisesRegex(ValueError, "lr: 'c' is not allowed; it must be one of the tables, a, b"):
            made.optimizer(lr={"c": 0.5})
        with self.assertRaisesRegex(ValueError, "lr_by_table: not allowed together with a plan that stacks"):
            self.made(name="never", lr_by_table=True, plan=emberd.PlanConfig(auto_stack=True))

    def test_a_decay_for_each_table(self):
        made, sparse = self.made(optimizer=emberd.SGD(learning_rate=0.5), lr_by_table=True)
        sparse = made.optimizer(weight_decay={"b": 0.25})
        scheduler = torch.optim.lr_scheduler.ExponentialLR(sparse, 0.5)
        plain = [torch.nn.Parameter(torch.arange(64.0)[:, None].repeat(1, 4)) for _ in "ab"]
        there = torch.optim.SGD([{"params": plain[0], "weight_decay": 0.0}, {"params": plain[1], "weight_decay": 0.25}], lr=0.5)
        behind = torch.optim.lr_scheduler.ExponentialLR(there, 0.5)
        rows = torch.arange(64)  # torch decays those that a batch has not, too
        for _ in range(3):
            self.step(made, sparse, {"a": rows, "b": rows})
            there.zero_grad()
            sum(one.sum() for one in plain).backward()
            there.step()
            scheduler.step()
            behind.step()
        for name, one in zip("ab", plain):
            np.testing.assert_allclose(made.model.table(name), one.detach().numpy(), rtol=1e-6, atol=1e-6)
        self.assertEqual([group.get("weight_decay") for group in sparse.state_dict()["param_groups"]], [None, 0.25])
        # By the product with the rate where the table has it so, by its own field where it has one, else by the rate at each step.
        for name, optimizer in (("product", emberd.SGD(0.5, multiply_weight_decay_factor_by_learning_rate=True)),
                                ("adamw", emberd.AdamW(0.5, weight_decay=7.0)), ("adam", emberd.Adam(0.5))):
            layer, _ = self.made(("t",), optimizer, name=name)
            decayed = layer.optimizer(weight_decay=0.25)
            (0 * layer({"t": torch.tensor([8])})["t"]).sum().backward()
            decayed.step()
            self.assertAlmostEqual(float(layer.model.read_rows("t", [8])[0, 0]), 8 * (1 - 0.5 * 0.25), places=5, msg=name)
        stacked, _ = self.made(optimizer=SGD, name="stacked_decay")
        for sparse, said in ((stacked.optimizer(weight_decay={"a": 0.5}), "weight_decay_factor: None of table 'b' is not allowed beside 0.5 of table 'a'; they are stacked"),
                             (stacked.optimizer(weight_decay=0.5), "group of table 'a': 'weight_decay' is not allowed beside 'weight_decay_factor'")):
            if "beside 'weight" in said:
                sparse.param_groups[0]["weight_decay_factor"] = 0.5
            with self.assertRaisesRegex(ValueError, said):
                self.step(stacked, sparse)
            sparse.zero_grad()
        with self.assertRaisesRegex(ValueError, "weight_decay: 'c' is not allowed; it must be one of the tables, a, b"):
            stacked.optimizer(weight_decay={"c": 0.5})

    def test_groups_say_what_they_take(self):
        made, sparse = self.made(optimizer=emberd.SGD(learning_rate=1.0))
        with self.assertRaisesRegex(TypeError, "add_param_group: this optimizer has one group for each table"):
            sparse.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
        self.assertEqual(len(sparse.param_groups), 2)
        for name, value in (("momentum", 0.9), ("betas", (0.9, 0.99)), ("eps", 1e-8)):
            sparse.param_groups[0][name] = value
            with self.assertRaisesRegex(ValueError, f"group of table 'a': '{name}' is not allowed.*SGD.* lr, .*weight_decay_factor"):
                self.step(made, sparse)
            sparse.zero_grad()
            del sparse.param_groups[0][name]
        for group in sparse.param_groups:
            group.update(weight_decay_factor=0.5, note="mine", initial_lr=9.0)
        self.step(made, sparse)
        self.assertEqual(made.model.table("a")[1:3, 0].tolist(), [-0.5, 0])  # half of it, less 1
        sparse.param_groups[0]["weight_decay_factor"] = "x"
        with self.assertRaisesRegex(TypeError, "weight_decay_factor"):
            self.step(made, sparse)

    def test_groups_take_what_a_rule_names(self):
        rule = emberd.Custom(1.0, expression="w = w - lr * scale * eps * g", hyper_parameters={"scale": 1.0, "eps": 1.0})
        made, sparse = self.made(("t",), optimizer=rule)
        bare = emberd.torch.EmbeddingBagCollection([emberd.TableConfig("t", 64, 4)], model=made.model, group="bare")  # which is not told the rule
        self.addCleanup(bare.finish)
        for ebc, optimizer, row, fields in ((made, sparse, 1 - 6, ", scale, eps$"), (bare, bare.optimizer(lr=1.0), 1 - 12, ", and what its rule names$")):
            optimizer.param_groups[0].update(scale=3.0, eps=torch.tensor(2.0), initial_lr=1.0, name="rows")
            self.step(ebc, optimizer)
            self.assertEqual(ebc.model.table("t")[1, 0], row)
            optimizer.param_groups[0]["betas"] = (0.9, 0.99)
            with self.assertRaisesRegex(ValueError, "'betas' is not allowed.*Custom.*lr, weight_decay, clip_gradient_min.*" + fields):
                self.step(ebc, optimizer)
            optimizer.zero_grad()
        optimizer.param_groups[0]["other"], _ = optimizer.param_groups[0].pop("betas")
        with self.assertRaisesRegex(ValueError, '"other".* known hyper-parameters: .*, scale, eps'):
            self.step(bare, optimizer)

    def test_a_model_that_is_given_keeps_its_optimizer(self):
        made, _ = self.made(("a", "b"), optimizer=emberd.SGD(learning_rate=0.5))
        bare = [emberd.TableConfig(name, 64, 4) for name in ("a", "b")]
        ids = {name: torch.tensor([1, 2]) for name in ("a", "b")}
        ebc = emberd.torch.EmbeddingBagCollection(bare, model=made.model, group="bare")
        self.addCleanup(ebc.finish)
        sparse = ebc.optimizer()
        self.assertEqual([group["lr"] for group in sparse.param_groups], [None, None])
        self.step(ebc, sparse, ids)
        self.assertEqual(made.model.table("a")[1, 0], 0.5)
        sparse.param_groups[0]["weight_decay"] = 0.5
        with self.assertRaisesRegex(ValueError, "group of table 'a': 'weight_decay' is not allowed.*TableConfig.optimizer"):
            self.step(ebc, sparse, ids)
        sparse = ebc.optimizer()
        torch.optim.lr_scheduler.ExponentialLR(sparse, 0.5)
        with self.assertRaisesRegex(ValueError, r"group of table 'a': lr: None.*scheduler.*optimizer\(lr="):
            sparse.step()
        sparse = ebc.optimizer(lr=0.25)
        sparse.step()
        self.assertEqual(made.model.table("a")[1, 0], 0.25)
        weights = torch.tensor([[1.0, 3.0]], requires_grad=True)
        ebc({**ids, "a": emberd.Dense(torch.tensor([[1, 2]]), weights)})["a"].sum().backward()
        rows = torch.from_numpy(made.model.read_rows("a", [1, 2])).sum(dim=1)
        self.assertEqual(made.model.tables["a"].combiner, "sum")
        torch.testing.assert_close(weights.grad[0], rows)
        with self.assertRaisesRegex(ValueError, f"tables: 'a': combiner: 'mean' is not allowed; that of model {made.model.name!r} is 'sum'"):
            emberd.torch.EmbeddingBagCollection([emberd.TableConfig("a", 64, 4, combiner="mean"), bare[1]], model=made.model)


if __name__ == "__main__":
    main()
