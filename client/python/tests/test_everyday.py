"""What people hand over day by day in place of what the documents show: it works, or the error says what to write.

What this would catch: an id that is cut, a text or a list that is read as something else, an initializer that is taken and ignored,
and a loop over prefetched batches that cannot be left.
"""

import array
import math
import tempfile
import unittest
import unittest.mock
import warnings

from cluster import ClusterTest, counting_model, emberd, has_torch, main

import emberd.trainer  # noqa: E402
from emberd.compat import _in_turn  # noqa: E402
import numpy as np


class ContainersTest(ClusterTest):
    def test_what_is_no_mapping_says_what_to_write(self):
        model = self.declare()
        with model.train("run") as stream:
            found = model.lookup({"t": [1]}, train=True)
            for given in ([1, 2], (1, 2), np.array([1, 2]), 5, "t", None):
                for call in (lambda: model.lookup(given), lambda: stream.send_lookup(given), lambda: found.apply(given), lambda: stream.send_update(given)):
                    with self.assertRaisesRegex(TypeError, r'must be a mapping: \{"name of a feature": array'):
                        call()
                if given is not None:
                    with self.assertRaisesRegex(TypeError, r'hyper: .* must be a mapping: \{"learning_rate": 0.1\}'):
                        found.apply({}, hyper=given)

    def test_ids_of_any_integers(self):
        model = self.declare(initializer=emberd.RowId())
        for dtype in (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64):
            ids = np.array([63, 1, 63], dtype)
            self.assertEqual(model.lookup({"t": ids})["t"][:, 0].tolist(), [63, 1, 63], dtype)
            self.assertEqual(model.lookup({"t": emberd.Ragged(ids, np.array([0, 1, 3], dtype))})["t"][:, 0].tolist(), [63, 64], dtype)
            self.assertEqual(model.read_rows("t", ids)[:, 0].tolist(), [63, 1, 63], dtype)
        for beyond in (2**63, 2**64 - 1):
            with self.assertRaisesRegex(emberd.OutOfRange, f"{beyond} is not allowed; ids are below 2\\^63"):
                model.lookup({"t": np.array([1, beyond], np.uint64)})
            with self.assertRaisesRegex(emberd.OutOfRange, f"{beyond} is not allowed"):  # in the other byte order
                model.lookup({"t": emberd.Sequences(np.array([[1, beyond]], ">u8"), padding_idx=-1)})

    def test_texts_come_with_the_recipe_that_makes_them_ids(self):
        model = self.declare()
        texts = ["ann", "bob"]
        for given in (texts, np.array(texts), np.array(texts, object), np.array(texts, "S"), emberd.Ragged(texts, [0, 2])):
            with self.assertRaisesRegex(TypeError, "t.*are hashed first: .*crc32") as raised:
                model.lookup({"t": given})
        recipe = str(raised.exception).split("first: ")[1]
        import zlib
        ids = eval(recipe, {"zlib": zlib, "texts": texts, "vocabulary_size": model.tables["t"].vocabulary_size})
        self.assertEqual(model.lookup({"t": ids})["t"].shape, (2, 4))

    def test_optimizers_and_initializers_by_name(self):
        made = self.client.declare(counting_model("named", optimizer="Adagrad", initializer="row_id"))
        self.assertEqual((made.tables["t"].optimizer, made.read_rows("t", [3])[0, 0]), ("adagrad", 3))
        self.assertFalse(self.client.declare(counting_model("named", optimizer=emberd.Adagrad(), initializer=emberd.RowId())).created)
        for name, kind in {"sgd": emberd.SGD, "adam": emberd.Adam, "adamw": emberd.AdamW, "rowwise_adagrad": emberd.RowwiseAdagrad, "none": emberd.NoOptimizer}.items():
            self.assertEqual(counting_model("m", optimizer=name).to_json(), counting_model("m", optimizer=kind()).to_json())
        for options, said in (({"optimizer": "adamax"}, "TableConfig.optimizer: 'adamax' is not allowed; it must be one of 'sgd', 'adagrad'"),
                              ({"initializer": "constant"}, "TableConfig.initializer: 'constant' is not allowed; it must be one of 'zeros'")):
            with self.assertRaisesRegex(emberd.InvalidArgument, said):
                self.client.declare(counting_model("m", **options))

    def test_lists_of_different_lengths_say_what_to_write(self):
        model = self.declare()
        for given in ([[1, 2], [3]], ([1], [])):
            with self.assertRaisesRegex(ValueError, "t.*: lists of different lengths are not allowed; give emberd.Ragged.from_lists, or for sequences"):
                model.lookup({"t": given})

    def test_what_is_no_array_of_ids_is_named(self):
        model = self.declare()
        for given, said in ((None, "None"), ([1, None], r"\[1\]: None"), ({"a": 1}, "a dict"), ([[1], {2}], r"\[0\]: a list"), ([np.int64(1), None], r"\[1\]: None"),
                            ([1, 2**70], rf"\[1\]: {2**70}"), ([-2**63 - 1], r"\[0\]: -9223372036854775809"), ([1, 2, math.nan], r"\[2\]: nan"), ([1, 2.0], r"\[1\]: 2.0"),
                            ([1, True], r"\[1\]: a bool"), ([[1, 2], [3, "a"]], r"\[1, 1\]: a str"), (emberd.Ragged(None, [0]), "None")):
            with self.assertRaisesRegex(TypeError, f't".*: {said} is not allowed; ids are int32 or int64'):
                model.lookup({"t": np.array(given, object) if isinstance(given, list) else given})

    def test_ints_in_an_array_of_objects(self):
        """As a column of pandas has them."""
        model = self.declare(initializer=emberd.RowId())
        for given in ([1, np.int64(7)], [[np.int32(3), np.uint8(2)]], []):
            np.testing.assert_array_equal(model.lookup({"t": np.array(given, object)})["t"], model.lookup({"t": np.array(given, np.int64)})["t"])
        self.assertEqual(emberd.arrays.as_ints(np.array([2**63 - 1, -2**63], object), "ids").tolist(), [2**63 - 1, -2**63])
        with self.assertRaisesRegex(TypeError, r"a list is not allowed.*give emberd.Ragged.from_lists"):
            model.lookup({"t": np.array([[1], [2, 3]], object)})

    def test_an_optimizer_of_another_library_says_what_to_write(self):
        class Adagrad:
            pass

        for given in (Adagrad, Adagrad(), 5):
            with self.assertRaisesRegex(TypeError, r"TableConfig.optimizer: .* is not allowed; it must be one of emberd, as emberd.Adagrad\(learning_rate=0.1\), or its name"):
                self.client.declare(counting_model("m", optimizer=given))

    def test_another_model_of_a_name_says_what_to_do(self):
        self.client.declare(counting_model("taken"))
        with self.assertRaisesRegex(emberd.AlreadyExists, r"tables\[0\].vocabulary_size: 64 .*`change_model` fills .* or drop that: `drop_model`"):
            self.client.declare(counting_model("taken", rows=65))
        with self.assertRaisesRegex(emberd.AlreadyExists, r"learning_rate: 1 in the declared model, 0.5 in the requested one \(table 't'\). Declare learning_rate=1, and give the "
                                                          r'rate of each step with it: hyper=\{"learning_rate": 0.5\} of an update, or optimizer\(lr=0.5\)'):
            self.client.declare(counting_model("taken", optimizer=emberd.SGD(learning_rate=0.5)))
        adagrad = counting_model("taken", optimizer=emberd.Adagrad(learning_rate=1.0))
        for config in (adagrad, adagrad.to_json(), counting_model("taken", ("t", "u"), optimizer=emberd.Adagrad(learning_rate=1.0))):
            with self.assertRaisesRegex(emberd.AlreadyExists, r"optimizer.*\(table 't'\). To keep the rows, save a checkpoint, drop the model, and call client.restore\(name, config=config\)"):
                self.client.declare(config)

    def test_a_model_that_has_only_checkpoints_says_how_to_restore_it(self):
        with tempfile.TemporaryDirectory() as folder, emberd.local(data=folder) as cluster, cluster.connect() as client:
            client.declare(counting_model("m", rows=8)).save_checkpoint("one")
            client.drop_model("m")
            with self.assertRaisesRegex(emberd.NotFound, r"'m' is not declared.* There is a checkpoint of it, 'one': client.restore\('m'\) declares it with the rows of that$"):
                client.model("m")
            client.restore("m").save_checkpoint("two")
            client.drop_model("m")
            with self.assertRaisesRegex(emberd.NotFound, r"There are 2 checkpoints of it, the newest 'two'"):
                client.model("m")
            with self.assertRaisesRegex(emberd.NotFound, r"source: model 'm' .*client.restore\('m'\).* Nor is there the changed model, 'm2'"):
                client.change_model("m", counting_model("m2"))
            with self.assertRaises(emberd.NotFound) as raised:
                client.model("none")
            self.assertNotIn("checkpoint", str(raised.exception))
        with self.assertRaisesRegex(emberd.NotFound, "'none' is not declared"):  # there is nowhere to keep one
            self.client.model("none")

    def test_a_cluster_in_place_of_a_client_says_what_to_write(self):
        with self.assertRaisesRegex(TypeError, r"addresses: a LocalCluster is not allowed; .* call cluster.connect\(\)"):
            emberd.connect(self.cluster)
        uses = [lambda given: _in_turn.Place("m").use(given, "m", "g")]
        if has_torch():
            from emberd import torch
            from emberd.compat import torchrec

            uses += [torchrec.use, lambda given: torch.EmbeddingBagCollection(counting_model("m").tables, client=given, model="m"),
                     lambda given: torch.Embedding(4, 4, client=given, model="m")]
        for use in uses:
            with self.assertRaisesRegex(TypeError, r"client: a LocalCluster is not allowed; it must be an emberd.Client, as cluster.connect\(\)"):
                use(self.cluster)

    def test_types_of_storage_in_either_case(self):
        with tempfile.TemporaryDirectory() as folder, emberd.local(data=folder) as cluster, cluster.connect() as client:
            for given in ("bfloat16", "BFLOAT16", "BFloat16"):
                model = client.declare(counting_model("m", rows=8, storage_dtype=given))
                client.serve("m", model.save_checkpoint(given).name, serve_as="live", storage_dtype=given)
                model.compile(samples=1, activation_dtype=given)
            for call, said in ((lambda: client.declare(counting_model("n", storage_dtype="fp16")), "storage_dtype: .*FP16.*FLOAT32, BFLOAT16"),
                               (lambda: client.serve("m", serve_as="live", storage_dtype="fp16"), "storage_dtype: .*FP16.*FLOAT32, BFLOAT16 or FLOAT16"),
                               (lambda: model.compile(samples=1, activation_dtype="fp16"), "activation_dtype: 'FP16' is not allowed; it must be one of 'FLOAT32', 'BFLOAT16'")):
                with self.assertRaisesRegex(ValueError, said):
                    call()


class AheadTest(ClusterTest):
    def test_a_loop_over_steps_that_were_sent_ahead_is_left(self):
        trainer = emberd.trainer.Trainer(self.declare(), "run")
        self.addCleanup(trainer.finish)
        one = {"t": np.ones((1, 4), np.float32)}

        def given():
            loop = object()
            return emberd.trainer.ahead([{"t": [1]}] * 9, trainer.send, emberd._pace.Pace(3), lambda steps: trainer.forget(steps, loop),
                                        lambda: trainer.begin_loop(loop))

        for step, _ in given():
            trainer.receive(step)
            trainer.update(step, one)
            if step == 1:
                break
        for step, _ in given():  # left before it is received
            break
        self.assertEqual(step, 2)
        trainer.receive(step)
        trainer.update(step, one)
        step, _ = trainer.begin({"t": [2]})
        trainer.update(step, one)
        self.assertEqual((step, trainer.model.read_rows("t", [1, 2])[:, 0].tolist()), (3, [-3, -1]))


class PaceTest(unittest.TestCase):
    """Would catch: ids that go on being sent ahead where that makes steps slower, or that are not where it makes them faster."""

    def loop(self, paces, steps, seconds):
        """How many were sent before each batch was given, of steps that take seconds(step, sent)."""
        now, sent, found = [0.0], [], []
        with unittest.mock.patch.object(emberd._pace.time, "perf_counter", lambda: now[0]):
            for step, _ in emberd.trainer.ahead(range(steps), lambda batch: sent.append(batch) or batch, paces.of(3), lambda _: None):
                found.append(min(3, len(sent) - step))
                now[0] += seconds(step, found[-1])
        self.assertEqual(sent, list(range(steps)))
        return found[:-2]  # behind the last ones there is nothing to send

    def test_the_faster_way_is_gone_on_with(self):
        for alone, best in ((1.0, 1), (1.4, 3), (1.19, 3)):  # the last: hardly faster
            paces = emberd._pace.Paces()
            found = self.loop(paces, 1000, lambda step, sent: (alone if sent == 1 else 1.2) + (50 if step in (25, 55) else 0))
            self.assertEqual(found[:20], [3] * 20)
            self.assertEqual({found[25], found[45]}, {3})
            self.assertEqual({found[35], found[55]}, {1})
            self.assertEqual(set(found[70:]), {best})
            self.assertEqual(self.loop(paces, 10, lambda step, sent: 1.0), [best] * 8)  # the next epoch goes on so

    def test_a_pipelined_trainer_always_has_the_lookup_that_its_update_waits_for(self):
        found = self.loop(emberd._pace.Paces(pipelined=True), 1000, lambda step, sent: sent)
        self.assertEqual((set(found), set(found[70:])), ({2, 3}, {2}))

    def test_it_is_found_out_again(self):
        found = self.loop(emberd._pace.Paces(), 1500, lambda step, sent: 1.0 if (sent == 1) == (step < 800) else 1.2)
        self.assertEqual(set(found[70:800]), {1})
        self.assertEqual(set(found[1150:]), {3})

    def test_time_between_two_loops_does_not_count(self):
        paces, clock = emberd._pace.Paces(), [0.0]
        for _ in range(20):  # epochs that end within a turn
            clock[0] += 1000
            self.loop(paces, 17, lambda step, sent: 1.0 if sent > 1 else 1.2)
        self.assertEqual(self.loop(paces, 10, lambda step, sent: 1.0), [3] * 8)
        with self.assertRaisesRegex(emberd.InvalidArgument, "depth: 5 is not allowed"):
            paces.of(5)


@unittest.skipUnless(has_torch(), "SKIP: PyTorch is not installed")
class TorchTest(ClusterTest):
    def make(self, **options):
        import torch

        import emberd.torch
        name = options.pop("model", self.id().split(".")[-1])
        ebc = emberd.torch.EmbeddingBagCollection(counting_model("m").tables, client=self.client, model=name, **options)
        self.addCleanup(ebc.finish)
        return torch, ebc, ebc.optimizer()

    def batches(self, count=6):
        import torch
        return [({"t": torch.tensor([one, 1])}, torch.zeros(2)) for one in range(2, 2 + count)]

    def step(self, ebc, ids):
        ebc(ids)["t"].sum().backward()
        ebc._optimizers[0].step()
        ebc._optimizers[0].zero_grad()

    def test_pairs_of_ids_and_labels_with_and_without_copies(self):
        torch, ebc, _ = self.make()
        for copied in (lambda ids: ids, dict, lambda ids: {"t": ids["t"].clone()}, lambda ids: {"t": ids["t"].numpy().tolist()}):
            for ids, label in emberd.torch.Prefetcher(self.batches(), ebc):
                self.step(ebc, copied(ids))
        self.assertEqual((ebc.next_step, ebc.model.read_rows("t", [1])[0, 0]), (24, -24))
        for ids, label in emberd.torch.Prefetcher(self.batches(), ebc):
            with self.assertRaisesRegex(RuntimeError, "not the ids that were prefetched next"):
                ebc({"t": torch.tensor([1, 1])})
            break
        with self.assertRaisesRegex(TypeError, r'first part of the pair is a Tensor.*ids=lambda pair: \{"name of the feature": pair\[0\]\}'):
            next(iter(emberd.torch.Prefetcher([(torch.tensor([1]), torch.zeros(1))], ebc)))

    def test_batches_that_the_loop_leaves_out(self):
        """Its `continue` has the others' activations and updates as if the loader had not given that batch."""
        import torch
        for depth, pipelined in ((1, False), (2, False), (4, False), (2, True)):
            with self.subTest(depth=depth, pipelined=pipelined):
                _, ebc, _ = self.make(model=f"left_out_{depth}_{pipelined}", pipelined=pipelined)
                for place, ids in enumerate(emberd.torch.Prefetcher([{"t": torch.tensor([one])} for one in range(9)], ebc, depth=depth)):
                    if place not in (0, 3, 4, 8):
                        self.step(ebc, ids)
                ebc.finish()
                self.assertEqual((ebc.next_step, ebc.model.read_rows("t", range(9))[:, 0].tolist()), (5, [0, -1, -1, 0, 0, -1, -1, -1, 0]))
        ebc.prefetch({"t": torch.tensor([1])})  # by who says the order
        ebc.prefetch({"t": torch.tensor([2])})
        with self.assertRaisesRegex(RuntimeError, "not the ids that were prefetched next"):
            ebc({"t": torch.tensor([2])})

    def test_a_loader_that_fills_one_buffer(self):
        """Each batch that is used trains its own rows, whichever are refused or left out, and whatever is sent again."""
        import torch

        bad, frozen, left_out = 2, 4, 6

        def loader(buffer, same):
            batch = {"t": buffer}
            for one in range(9):
                buffer[:] = 99 if one == bad else one
                yield batch if same else {"t": buffer}

        for depth, same, made_anew, pipelined in ((1, False, False, False), (2, False, False, False), (4, False, False, False), (3, True, False, False), (3, False, True, False),
                                                  (2, True, True, True)):
            with self.subTest(depth=depth, same=same, made_anew=made_anew, pipelined=pipelined):
                _, ebc, _ = self.make(model=f"buffer_{depth}_{same}_{made_anew}", pipelined=pipelined)
                ids = (lambda batch: {"t": batch["t"]}) if made_anew else (lambda batch: batch)
                for place, batch in enumerate(emberd.torch.Prefetcher(loader(torch.zeros(1, dtype=torch.int64), same), ebc, depth=depth, ids=ids if made_anew else None)):
                    if place == left_out:
                        continue
                    ebc.requires_grad_(place != frozen)
                    if place == bad:
                        with self.assertRaises(IndexError):
                            ebc(ids(batch))
                    elif place == frozen:
                        self.assertEqual(ebc(ids(batch))["t"].tolist(), [[0] * 4])
                    else:
                        self.step(ebc, ids(batch))
                ebc.finish()
                self.assertEqual(ebc.model.read_rows("t", range(9))[:, 0].tolist(), [0 if one in (bad, frozen, left_out) else -1 for one in range(9)])

    def test_a_loader_that_fills_a_buffer_of_another_kind(self):
        def loader(buffer):
            for one in range(6):
                (buffer[0] if isinstance(buffer, list) else buffer)[0] = one
                yield {"t": buffer}

        for buffer in (memoryview(np.zeros(1, np.int64)), [[0]]):
            with self.subTest(type(buffer).__name__):
                _, ebc, _ = self.make(model=f"filled_{type(buffer).__name__}")
                for place, ids in enumerate(emberd.torch.Prefetcher(loader(buffer), ebc, depth=3)):
                    if place != 1:
                        self.step(ebc, ids)
                ebc.finish()
                self.assertEqual(ebc.model.read_rows("t", range(6))[:, 0].tolist(), [-1, 0, -1, -1, -1, -1])

    def test_ids_in_memory_of_their_own(self):
        """Of every kind; what is refused later is refused by its own message."""
        import torch
        rows = [1, 2]
        for given, fill in ((np.array(rows), np.ndarray.fill), (torch.tensor(rows), torch.Tensor.fill_), ((rows,), lambda given, one: rows.insert(0, one)),
                            (array.array("q", rows), lambda given, one: given.insert(0, one)), ([[1, 2], rows], lambda given, one: given[1].insert(0, one))):
            with self.subTest(type(given).__name__):
                own, before = emberd.arrays.copied(given), str(np.array(given).tolist())
                fill(given, 9)
                self.assertEqual(str(np.array(own).tolist()), before)
                self.assertIs(type(own) is torch.Tensor, type(given) is torch.Tensor)
                rows[:] = [1, 2]
        ragged = [rows, [3]]
        own = emberd.arrays.copied(ragged)
        rows[0] = 9
        for refused in (own, emberd.arrays.copied(np.ma.masked_equal([1, 2], 2)), emberd.arrays.copied(torch.tensor([1.0], requires_grad=True)), emberd.arrays.copied({})):
            with self.assertRaisesRegex((TypeError, ValueError, RuntimeError), "feature 't': "):
                emberd.arrays.as_ints(refused, "feature 't'")
        self.assertEqual(np.concatenate(own).tolist(), [1, 2, 3])

    def test_ctrl_c_while_later_batches_are_sent(self):
        """The step before them had been received, and each call after it failed."""
        torch, ebc, _ = self.make()
        send, sent = emberd.TrainStream.send_lookup, []

        def interrupted(*arguments, **options):
            sent.append(arguments)
            if len(sent) == 2:
                raise KeyboardInterrupt
            return send(*arguments, **options)

        def train(left_out=None):
            for place, ids in enumerate(emberd.torch.Prefetcher([{"t": torch.tensor([one])} for one in (1, 2, 3)], ebc, depth=3)):
                if place == 0 and left_out is not None:
                    left_out.start()
                else:
                    self.step(ebc, ids)

        patch = unittest.mock.patch.object(emberd.TrainStream, "send_lookup", interrupted)
        with self.assertRaises(KeyboardInterrupt):
            train(left_out=patch)
        patch.stop()
        train()
        self.assertEqual((len(sent), ebc.next_step, ebc.model.read_rows("t", range(4))[:, 0].tolist()), (2, 4, [0, -1, -1, -1]))

    def test_ctrl_c_while_calls_are_joined(self):
        """The step went on without the features behind it."""
        import torch

        import emberd.torch
        ebc = emberd.torch.EmbeddingBagCollection(counting_model("m", tables="tu").tables, client=self.client, model="joined", accumulate=True)
        self.addCleanup(ebc.finish)
        sparse = ebc.optimizer()
        for place in (1, 2, 3, 4):
            found = ebc({name: torch.tensor([7]) for name in "tu"})
            (found["t"] + found["u"]).sum().backward()
            join, calls = torch.cat, []

            def interrupted(*arguments, **options):
                calls.append(arguments)
                if len(calls) == place:
                    raise KeyboardInterrupt
                return join(*arguments, **options)

            with unittest.mock.patch.object(torch, "cat", interrupted), self.assertRaises(KeyboardInterrupt):
                sparse.step()
            sparse.step()
            self.assertEqual((ebc.next_step, *(ebc.model.read_rows(name, [7])[0, 0] for name in "tu")), (place, -place, -place))

    def test_a_loop_that_evaluates_some_batches(self):
        import torch
        for depth in (1, 2, 3):
            for held_out in ({3}, {3, 4}, {3, 4, 5, 6}):
                with self.subTest(depth=depth, held_out=held_out):
                    _, ebc, _ = self.make(model=f"held_out_{depth}_{len(held_out)}")
                    for place, ids in enumerate(emberd.torch.Prefetcher([{"t": torch.tensor([one])} for one in range(9)], ebc, depth=depth)):
                        ebc.train(place not in held_out)
                        if ebc.training:
                            self.step(ebc, ids)
                        else:
                            self.assertEqual(ebc(ids)["t"].tolist(), [[0] * 4])
                    ebc.finish()
                    self.assertEqual(ebc.model.read_rows("t", range(9))[:, 0].tolist(), [0 if one in held_out else -1 for one in range(9)])

    def test_a_batch_whose_ids_the_loop_replaces(self):
        torch, ebc, _ = self.make()
        for ids in emberd.torch.Prefetcher([{"t": torch.tensor([1])}] * 2, ebc):
            self.step(ebc, ids)
            ids["t"] = torch.tensor([2])
            with torch.no_grad():
                self.assertEqual(ebc(ids)["t"].tolist(), [[0] * 4])
            break
        for ids in emberd.torch.Prefetcher([{"t": torch.tensor([1])}], ebc):
            ids["t"] = torch.tensor([2])
            with self.assertRaisesRegex(RuntimeError, "not the ids that were prefetched next"):
                ebc(ids)

    def test_buffers_of_frozen_tables_and_of_lengths_are_filled_anew(self):
        import torch

        import emberd.torch
        ids, splits = torch.zeros(4, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)

        def loader():
            for one in range(4):
                ids[:], splits[:] = one, torch.tensor([0, one, 4])
                yield {name: emberd.Ragged(ids, splits) for name in "tu"}

        ebc = emberd.torch.EmbeddingCollection(counting_model("m", tables="tu", initializer=emberd.RowId()).tables, client=self.client, model="lengths")
        self.addCleanup(ebc.finish)
        ebc.requires_grad_(False, tables=["u"])
        for place, batch in enumerate(emberd.torch.Prefetcher(loader(), ebc)):
            for name, found in ebc(batch).items():
                self.assertEqual((found.values()[:, 0].tolist(), found.lengths().tolist()), ([place] * 4, [place, 4 - place]), name)

    def test_a_buffer_that_is_filled_anew_is_evaluated_as_it_comes(self):
        torch, ebc, _ = self.make()
        ebc.model.load_table("t", np.repeat(np.arange(64, dtype=np.float32), 4).reshape(64, 4))
        buffer = torch.zeros(1, dtype=torch.int64)

        def loader():
            return ({"t": buffer.fill_(one)} for one in range(5))

        ebc.eval()
        self.assertEqual([ebc(ids)["t"][0, 0].item() for ids in emberd.torch.Prefetcher(loader(), ebc)], [0, 1, 2, 3, 4])
        ebc.train()
        given = iter(emberd.torch.Prefetcher(loader(), ebc))
        for ids in given:
            with torch.no_grad(), self.assertRaisesRegex(RuntimeError, "these ids have changed since the Prefetcher sent them.*copy"):
                ebc(ids)
            break
        given.close()
        with torch.no_grad():
            self.assertEqual(ebc(ids)["t"][0, 0].item(), 1)

    def test_what_a_net_under_autocast_and_an_empty_list_are_to_torch(self):
        torch, ebc, sparse = self.make()
        for weights in (torch.tensor([2.0, 0.5], dtype=torch.bfloat16), torch.tensor([2.0, 0.5], dtype=torch.bfloat16, requires_grad=True)):
            ids = {"t": emberd.Ragged(torch.tensor([1, 1]), torch.tensor([0, 1, 2]), weights)}
            before = ebc.model.read_rows("t", [1])[0, 0]
            found = ebc(ids)["t"]
            np.testing.assert_array_equal(found.detach()[:, 0], before * np.float32([2, 0.5]))
            found.sum().backward()
            sparse.step()
            self.assertEqual(ebc.model.read_rows("t", [1])[0, 0], before - 2.5)
        self.assertEqual((weights.grad.dtype, weights.grad.tolist()), (torch.bfloat16, [-10, -10]))
        for ids in (torch.tensor([]), emberd.Ragged(torch.tensor([]), torch.tensor([0]))):
            self.assertEqual(ebc({"t": ids})["t"].shape, (0, 4))
        for ids, kind in ((torch.tensor([1.0]), "float32"), (torch.tensor([1.0]).bfloat16(), "float32"), (torch.zeros(1, 0).bool(), "bool")):
            with self.assertRaisesRegex(TypeError, f'feature "t": {kind} is not allowed; ids are int32 or int64'):
                ebc({"t": ids})

    def test_true_is_no_id(self):
        """As padding_idx it would be the id 1, whose activations would be zero: who writes it means mask_zero."""
        import torch
        for made in (lambda: emberd.torch.EmbeddingCollection(counting_model("m").tables, client=self.client, model="m", padding_idx=True),
                     lambda: emberd.torch.Embedding(8, 4, True, client=self.client, model="m"),
                     lambda: emberd.Sequences(torch.tensor([[0, 1]]), True).mask):
            with self.assertRaisesRegex(TypeError, "padding_idx.*: a bool is not allowed; it must be an int"):
                made()

    def test_a_net_is_trained_saved_resumed_and_served(self):
        """Its state is that of the trained module, also where the tables are served."""
        import torch

        import emberd.torch

        class Net(torch.nn.Module):
            def __init__(self, model, **options):
                super().__init__()
                self.items = emberd.torch.Embedding(50, 8, 0, model=model, optimizer=emberd.Adam(learning_rate=0.1, bias_correction=True), **options)
                self.scores = torch.nn.Linear(8, 50)

            def forward(self, history):
                return self.scores(self.items(history).mean(1))

        def train(net, steps):
            dense, sparse = torch.optim.Adam(net.parameters(), 0.1), net.items.optimizer()
            for step in steps:
                loss = torch.nn.functional.cross_entropy(net(history), history[:, 0])
                loss.backward()
                dense.step()
                sparse.step(checkpoint=f"step-{step + 1}" if step == steps[-1] else None)
                dense.zero_grad()
            net.items.finish()
            return float(loss)

        history = torch.randint(1, 50, (32, 3), generator=torch.Generator().manual_seed(1))
        with tempfile.TemporaryDirectory() as folder, emberd.local(data=folder, new=True) as cluster, cluster.connect() as client:
            net = Net("next", client=client)
            first, state = train(net, range(5)), net.state_dict()
            resumed = Net(client.restore("next", "step-5"))
            resumed.load_state_dict(state)
            self.assertLess(train(resumed, range(resumed.items.collection.next_step, 10)), first)
            live = Net(client.serve("next", "step-10", serve_as="live")).eval()
            live.load_state_dict(resumed.state_dict())
            with torch.no_grad():
                self.assertTrue(torch.equal(live(history), resumed.eval()(history)))
            client.declare(counting_model("other")).save_checkpoint("one")
            for model in (client.serve("other", "one", serve_as="of_another"), client.declare(counting_model("still", optimizer="none"))):
                bag = emberd.torch.EmbeddingBagCollection(counting_model(model.name, optimizer="none").tables, model=model)
                with self.assertRaisesRegex(ValueError, "the state is of model 'next', but this is model"):
                    bag.load_state_dict({"_extra_state": state["items.collection._extra_state"]})

    def test_a_loop_is_left(self):
        for pipelined in (False, True):
            torch, ebc, _ = self.make(**({"pipelined": True, "group": "pipelined"} if pipelined else {}))
            before, steps = ebc.model.read_rows("t", [1])[0, 0], 0
            for used in (2, 0):
                for place, (ids, label) in enumerate(emberd.torch.Prefetcher(self.batches(), ebc, depth=4)):
                    if place == used:
                        break
                    self.step(ebc, ids)
                    steps += 1
                self.step(ebc, {"t": torch.tensor([1, 0])})  # others than those that were sent
                steps += 1
            ebc.finish()
            self.assertEqual((ebc.next_step, ebc.model.read_rows("t", [1])[0, 0]), (steps, before - steps))

    def test_batches_that_were_sent_ahead_keep_their_order_when_one_of_them_is_refused(self):
        """The refusal of the second arrives when the third is sent. The fourth sent the first again, behind the third."""
        torch, ebc, _ = self.make()
        send, sent, refused = emberd.TrainStream.send_lookup, [], []
        before = ebc.model.read_rows("t", range(8))[:, 0]

        def sends(stream, ids, **options):
            sent.append(ids)
            if len(sent) == 3:
                raise emberd.OutOfRange("t: 1000: as a stream says that has ended")
            return send(stream, ids, **options)

        batches = [{"t": torch.tensor([row])} for row in (1, 1000, 2, 3, 4, 5)]
        with unittest.mock.patch.object(emberd.TrainStream, "send_lookup", sends):
            for place, batch in enumerate(emberd.torch.Prefetcher(batches, ebc, depth=4)):
                try:
                    self.step(ebc, batch)
                except emberd.OutOfRange as error:
                    self.assertIn("1000", str(error))
                    refused.append(place)
        self.assertEqual(refused, [1])
        self.assertEqual((before - ebc.model.read_rows("t", range(8))[:, 0]).tolist(), [0, 1, 1, 1, 1, 1, 0, 0])

    def test_calls_behind_one_that_was_interrupted(self):
        """Its ids had been sent ahead, and so had theirs."""
        torch, ebc, _ = self.make()
        ids = [{"t": torch.tensor([row])} for row in range(4)]
        for one in ids:
            ebc.prefetch(one)
        receive = unittest.mock.patch("emberd.train.TrainStream.receive_lookup", side_effect=KeyboardInterrupt)
        with receive, self.assertRaises(KeyboardInterrupt):
            ebc(ids[0])
        for one in ids[1:]:
            self.step(ebc, one)
        self.assertEqual((ebc.next_step, ebc.model.read_rows("t", range(4))[:, 0].tolist()), (3, [0, -1, -1, -1]))

    def test_a_rate_below_zero_is_refused(self):
        torch, ebc, sparse = self.make()
        with self.assertRaisesRegex(ValueError, "^lr: -1.0 is not allowed; it must be at least 0$"):
            ebc.optimizer(lr=-1)
        sparse.param_groups[0]["lr"] = -0.5
        with self.assertRaisesRegex(ValueError, "learning_rate: -0.5 is not allowed; it must be >= 0"):
            self.step(ebc, {"t": torch.tensor([1])})
        sparse.param_groups[0]["lr"] = 0
        sparse.step()
        self.assertEqual((ebc.next_step, ebc.model.read_rows("t", [1])[0, 0]), (1, 0))

    def test_all_ranks_hear_of_an_overflow(self):
        """Each scales and skips as the others do, though a GradScaler sees the gradients of its rank alone."""
        from emberd.compat.torchrec import KeyedJaggedTensor
        torch, ebc, sparse = self.make()
        for ids in ({"t": torch.tensor([1])}, KeyedJaggedTensor(["t"], torch.tensor([1]), lengths=torch.tensor([1]))):
            for own, of_others, expected in ((1.0, 0.0, 1.0), (torch.inf, 0.0, torch.inf), (1.0, 1.0, torch.inf)):
                (ebc(ids)["t"].sum() * own).backward()
                mocks = {"is_initialized": lambda: True, "get_backend": lambda: "gloo", "all_reduce": lambda one, _, high=of_others: one.clamp_(min=high)}
                with unittest.mock.patch.multiple(torch.distributed, **mocks):
                    sparse.share_overflow()
                self.assertEqual(sparse.param_groups[0]["params"][0].grad.tolist(), [[expected] * 4])
                sparse.zero_grad()
        sparse.share_overflow()  # of one rank, and without gradients
        with unittest.mock.patch.object(ebc._steps, "size", 2), self.assertRaisesRegex(RuntimeError, "torch.distributed is not initialized, by which the 2 ranks"):
            sparse.share_overflow()

    def test_adam_of_torch_goes_on_with_its_slots_and_steps(self):
        import emberd.torch
        import torch
        plain = torch.nn.Embedding(8, 4)
        there, ids = torch.optim.Adam(plain.parameters(), lr=0.1), torch.arange(8)
        table = emberd.TableConfig("t", 8, 4, combiner="sum", optimizer=emberd.Adam(learning_rate=0.1, bias_correction=True))
        ebc = emberd.torch.EmbeddingBagCollection([table], client=self.client, model="adam_of_torch", first_step=3)
        self.addCleanup(ebc.finish)

        def both(steps, one, optimizer):
            for _ in range(steps):
                one(ids).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        both(3, plain, there)
        state = there.state[plain.weight]
        ebc.model.load_table("t", plain.weight, {"momentum": state["exp_avg"], "velocity": state["exp_avg_sq"]})
        both(4, plain, there)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # as of tables that were trained before
            both(4, lambda given: ebc({"t": given})["t"], ebc.optimizer())
        np.testing.assert_allclose(ebc.model.table("t"), plain.weight.detach().numpy(), rtol=0, atol=1e-5)
        self.assertEqual(ebc.next_step, 7)
        ebc.finish()
        again = emberd.torch.EmbeddingBagCollection([table], client=self.client, model="adam_of_torch", first_step=3)
        self.addCleanup(again.finish)
        with self.assertWarnsRegex(UserWarning, "has trained its tables for 7 steps, from which this run goes on"):
            again({"t": ids})

    def test_tables_and_features_of_other_kinds_say_what_to_write(self):
        import emberd.torch
        import torch
        table = emberd.TableConfig("t", 8, 4)
        for given, said in (({"tables": table}, r"tables: a TableConfig is not allowed; it must be a list of emberd.TableConfig"),
                            ({"tables": [table, torch.nn.Embedding(8, 4)]}, r"tables\[1\]: a Embedding is not allowed; it must be an emberd.TableConfig"),
                            ({"tables": [table], "features": ["t"]}, r"features\[0\]: a str is not allowed; it must be an emberd.FeatureConfig")):
            for kind in (emberd.torch.EmbeddingBagCollection, emberd.torch.EmbeddingCollection):
                with self.assertRaisesRegex(TypeError, said):
                    kind(client=self.client, model="none", **given)

    def test_an_optimizer_by_name(self):
        import emberd.torch
        table = emberd.TableConfig("t", 8, 4, optimizer="sgd", initializer="zeros")
        for described, optimizer, kind in (([table], None, "sgd"), ([emberd.TableConfig("t", 8, 4)], "adam", "adam")):
            ebc = emberd.torch.EmbeddingBagCollection(described, client=self.client, model=f"by_name_{kind}", optimizer=optimizer)
            self.addCleanup(ebc.finish)
            self.assertEqual((ebc.model.tables["t"].optimizer, ebc.optimizer().param_groups[0]["lr"]), (kind, 0.01))


if __name__ == "__main__":
    main()
