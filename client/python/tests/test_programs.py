"""Compiled programs from Python: batches that wait on the coordinator, and several programs in one call.

What this would catch: a chain that does not give the bits of its calls one by one; an array that is read after its memory went; a handle that
stays, or goes while somebody has it; a program that goes with another client's; and an error that does not say what is wrong.
"""

import asyncio
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request

from cluster import ClusterTest, counting_model, emberd, main

import emberd._native
import emberd.aio
import numpy as np

ADAGRAD = emberd.Adagrad(learning_rate=0.5)


def batch(seed):
    random = np.random.default_rng(seed)
    return {"t": random.integers(0, 64, 12), "u": emberd.Ragged(random.integers(0, 64, 20), np.arange(0, 21, 5).tolist(), random.random(20, np.float32))}


def gradients(found):
    return {name: 0.5 * one + np.arange(one.size, dtype=np.float32).reshape(one.shape) / 64 for name, one in found.items()}


class ProgramsTest(ClusterTest):
    @classmethod
    def setUpClass(cls):
        cls.cluster = emberd.local(shards=2, http="127.0.0.1:0")
        cls.addClassCleanup(cls.cluster.close)
        cls.client = cls.cluster.connect()
        cls.addClassCleanup(cls.client.close)

    def declare(self, name=""):
        return self.client.declare(counting_model(name or self.id().split(".")[-1], ("t", "u"), optimizer=ADAGRAD, initializer=emberd.Normal(0, 1), dim=8))

    def compile(self, model, kind, **fields):
        return model.compile(kind, samples=12, dynamic=True, **fields)

    def tables(self, model):
        return b"".join(model.table(table, slot=slot).tobytes() for table in ("t", "u") for slot in ("", "accumulator"))

    def handles(self):
        """How many the coordinator has."""
        text = urllib.request.urlopen(f"http://{self.cluster.http}/metrics", timeout=30).read().decode()
        return float(re.search(r"^emberd_program_handles(?:\{.*\})? (\S+)$", text, re.MULTILINE)[1])

    def wait_for(self, condition):
        end = time.monotonic() + 120
        while not condition():
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)

    def test_a_chain_gives_the_bits_of_its_calls_and_of_plain_ones(self):
        plain, called, chained = (self.declare(name) for name in ("plain", "called", "chained"))
        lookup, update = self.compile(called, "lookup"), self.compile(called, "update")
        found = lookup(batch(0))
        chain_lookup, chain_update = self.compile(chained, "lookup"), self.compile(chained, "update")
        chain_found = chain_lookup(batch(0))
        looked_up = plain.lookup(batch(0), train=True)
        for step in range(1, 6):
            expected = looked_up.apply(gradients(looked_up))
            looked_up = plain.lookup(batch(step), train=True)
            applied = update(found, gradients(found))
            found = lookup(batch(step))
            chain = emberd.Chain()
            chain.add(chain_update, chain_found, gradients(chain_found))
            chain.add(chain_lookup, chain_lookup.prepare(batch(step)) if step % 2 else batch(step))
            chain_applied, chain_found = chain.run()
            self.assertEqual((applied, chain_applied), (expected, expected))
            for name in ("t", "u"):
                for one in (found, chain_found):
                    self.assertEqual(one[name].tobytes(), looked_up[name].tobytes())
                    self.assertEqual(one[name].shape, looked_up[name].shape)
        self.assertEqual(found.statistics["num_minibatches"], looked_up.statistics["num_minibatches"])
        self.assertEqual(found.statistics["stacks"][0]["ids"], looked_up.statistics["stacks"][0]["ids"])
        self.assertEqual(len({self.tables(model) for model in (plain, called, chained)}), 1)

    def test_an_update_and_a_lookup_of_its_own_batch_in_one_call(self):
        model = self.declare()
        lookup, update = self.compile(model, "lookup"), self.compile(model, "update")
        before = model.lookup(batch(1))
        chain = emberd.Chain()
        first = chain.add(lookup, batch(1))
        chain.add(update, first, {"t": np.ones((12, 8), np.float32)}, step=7, hyper={"learning_rate": 0.25})
        chain.add(lookup, batch(1))
        found, applied, after = chain.run()
        self.assertEqual((applied.step, applied.rows_skipped, applied.replayed), (7, 0, False))
        self.assertEqual(found["u"].tobytes(), before["u"].tobytes())
        self.assertNotEqual(after["t"].tobytes(), before["t"].tobytes())
        self.assertEqual(after["t"].tobytes(), model.lookup(batch(1))["t"].tobytes())
        for wrong, said in ((chain.run, "the chain has run"), (emberd.Chain().run, "the chain is empty"), (lambda: chain.add(lookup, first["x"]), "'x' is not a result; there are t, u"),
                            (lambda: emberd.Chain().add(lookup, first), "argument 0: it is of another chain")):
            with self.assertRaisesRegex((ValueError, KeyError), said):
                wrong()

    def test_a_chain_that_fails_is_checked_before_and_repeated_once(self):
        model = self.declare()
        lookup, update = self.compile(model, "lookup"), self.compile(model, "update")
        found, before = lookup(batch(1)), self.tables(model)
        chain = emberd.Chain()
        chain.add(update, found, gradients(found))
        chain.add(lookup, {"t": np.array([64]), "u": np.array([1])})
        with self.assertRaisesRegex(emberd.OutOfRange, "op 4: .*64"):
            chain.run()
        self.assertEqual(self.tables(model), before)
        again = emberd.Chain()
        again.add(update, found, gradients(found))
        self.assertFalse(again.run()[0].replayed)
        after = self.tables(model)
        self.assertNotEqual(after, before)
        repeated = emberd.Chain()
        repeated.add(update, lookup(batch(1)), gradients(found))
        repeated._key = again._key
        self.assertTrue(repeated.run()[0].replayed)
        self.assertEqual(self.tables(model), after)

    def test_arrays_outlive_what_gave_them(self):
        model = self.declare()
        with self.cluster.connect() as client:
            lookup = self.compile(client.model(model.name), "lookup", inference=True)
            found = lookup({"t": np.arange(12), "u": np.arange(12)})
            arrays, expected = dict(found), {name: one.copy() for name, one in found.items()}
            part = arrays.pop("t")[3:5]
            found.close()
        del found, lookup, client
        gc.collect()
        filled = [np.full(96, number, np.float32) for number in range(2000)]  # where freed memory would be given out again
        self.assertEqual(part.tobytes(), expected["t"][3:5].tobytes())
        self.assertEqual(arrays["u"].tobytes(), expected["u"].tobytes())
        self.assertEqual(part.tobytes(), model.read_rows("t", [3, 4]).tobytes())
        del filled

    def test_handles_go_with_the_last_reference(self):
        model = self.declare()
        self.wait_for(lambda: self.handles() == 0)  # of tests before
        lookup = self.compile(model, "lookup")
        prepared, found = lookup.prepare(batch(1)), lookup(batch(2))
        arrays = dict(found)
        self.assertEqual(self.handles(), 3)
        alias = prepared
        del prepared
        with alias:
            self.assertEqual(lookup(alias)["t"].tobytes(), model.lookup(batch(1))["t"].tobytes())  # whose result nobody has
        self.wait_for(lambda: self.handles() == 2)
        with self.assertRaisesRegex(ValueError, "has been closed"):
            lookup(alias)
        found = None
        self.wait_for(lambda: self.handles() == 1)
        self.assertEqual(arrays["t"].tobytes(), model.lookup(batch(2))["t"].tobytes())
        with self.cluster.connect() as client:
            kept = self.compile(client.model(model.name), "lookup").prepare(batch(1))
            self.wait_for(lambda: self.handles() == 2)
        self.assertEqual(self.handles(), 1)  # the client gave back all that it had
        kept.close()
        chain = emberd.Chain()
        chain.add(lookup, batch(1))
        chain.add(lookup, batch(2))
        results = chain.run()
        self.assertEqual((len(results), self.handles()), (2, 3))
        results.pop()
        self.wait_for(lambda: self.handles() == 2)
        del results, chain
        self.wait_for(lambda: self.handles() == 1)
        gc.disable()
        self.addCleanup(gc.enable)
        not_run = emberd.Chain()
        not_run.add(self.compile(model, "update"), not_run.add(lookup, lookup.prepare(batch(1))), {})
        self.assertEqual(self.handles(), 3)
        del not_run, lookup
        self.wait_for(lambda: self.handles() == 0)

    def test_programs_are_shared_and_released_by_each_client_for_itself(self):
        model = self.declare()
        lookup = self.compile(model, "lookup")
        with self.cluster.connect() as client:
            others = [self.compile(client.model(model.name), "lookup") for _ in range(3)]
            self.assertEqual({one.fingerprint for one in others}, {lookup.fingerprint})
            self.assertEqual({(one.cached, lookup.cached) for one in others}, {(True, False)})
            for one in others:
                one.close()
                one.close()
        self.assertEqual(len(lookup(batch(1))), 2)
        self.assertEqual((lookup.kind, lookup.features), ("LOOKUP", ("t", "u")))
        self.assertGreater(lookup.bytes_per_sparsecore, 0)
        self.assertEqual(lookup.stacks[0]["stack"], model.tables["t"].stack)

    def test_forms_of_ids_are_those_of_a_lookup(self):
        model = self.client.declare(emberd.ModelConfig(
            "forms", [emberd.TableConfig("t", 64, 8, initializer=emberd.Normal(0, 1), optimizer=ADAGRAD)],
            [emberd.FeatureConfig("t", "t", output_shape=(4, 3))]))
        lookup, update = self.compile(model, "lookup"), self.compile(model, "update")
        half = lookup_in_halves = self.compile(model, "lookup", activation_dtype="BFLOAT16", inference=True)
        ids = np.arange(12)
        sparse = emberd.Sparse(np.stack([ids, ids], 1), ids[::-1], 12, np.float32(2))
        for given in (ids, ids.astype(np.int32).reshape(4, 3), emberd.Dense(ids.reshape(4, 3, 1), np.full((4, 3, 1), 0.5, np.float32)), sparse,
                      ids.astype(">i8"), ids.tolist(), emberd.Ragged([1, 2], [0, 1] + [2] * 11), emberd.Sequences(np.array([[1, 0, 3], [0, 2, 0]]), 0)):
            expected, found = model.lookup({"t": given}, train=True), lookup({"t": given})
            self.assertEqual((found["t"].shape, found["t"].tobytes()), (expected["t"].shape, expected["t"].tobytes()))
            self.assertEqual(lookup(lookup.prepare({"t": given}))["t"].shape, expected["t"].shape)
            self.assertLess(np.abs(lookup_in_halves({"t": given})["t"] - expected["t"]).max(), 0.02)
            expected.release()
            self.assertGreaterEqual(update(found, {"t": np.zeros_like(found["t"])}).rows_updated, 1)
        with self.assertRaisesRegex(ValueError, r'gradient of feature "t": the shape \[3, 4, 8\]'):
            update(lookup({"t": ids}), {"t": np.zeros((3, 4, 8), np.float32)})
        self.assertEqual(half.features, ("t",))

    def test_sums_and_donated_arguments(self):
        spec = {"kind": "ELEMENTWISE", "inputs": [{"feature": "a"}, {"feature": "b"}],
                "outputs": [{"operation": "ADD", "scale": 2, "b": {"argument": 1}}], "aliases": [{}]}
        total = self.client.compile(spec)
        a, b = {"x": np.ones((2, 3), np.float32), "n": np.array([1, 2])}, {"x": np.full((2, 3), 0.25), "n": np.array([3, 2**40])}
        kept = total.prepare(a)
        self.assertEqual(kept.read()["n"].tolist(), [1, 2])
        found = total(kept, b)
        self.assertEqual([one.tolist() for one in found.tensors], [[[2.5] * 3] * 2, [8, 2**41 + 4]])
        self.assertEqual(found["n"].dtype, np.int64)
        self.assertEqual(kept.read()["x"].tolist(), found["x"].tolist())
        update = self.compile(self.declare(), "update")
        with self.assertRaisesRegex(emberd.FailedPrecondition, "it is of an inference or of a sum"):
            update(found, {})

    def test_a_sum_of_what_a_lookup_has_given_here_takes_its_values(self):
        found = self.compile(self.declare(), "lookup")(batch(1))
        total = self.client.compile({"kind": "ELEMENTWISE", "inputs": [{"feature": "a"}], "outputs": [{"operation": "COPY", "scale": 2}]})
        with self.assertRaisesRegex(emberd.InvalidArgument, r"argument\[0\] is the batch of a LOOKUP alone, without tensors"):
            total(found)
        self.assertEqual(total(dict(found))["t"].tobytes(), (2 * found["t"]).tobytes())

    def test_an_update_donates_the_result_of_its_lookup(self):
        model = self.declare()
        lookup, update = self.compile(model, "lookup"), self.compile(model, "update", aliases=[{}])
        ids = {"t": emberd.Sequences(np.array([[1, 0, 3], [0, 2, 0]]), 0), "u": np.arange(4)}
        prepared = lookup.prepare(ids)
        found = lookup(prepared)
        before, new = {name: one.copy() for name, one in found.items()}, dict(found)
        self.assertEqual(found.read(), {})
        for step in range(3):
            chain = emberd.Chain()
            chain.add(update, found, gradients(new))
            applied = chain.run()[0] if step else update(found, gradients(new))
            self.assertFalse(applied.replayed)
            new, plain = found.read(), model.lookup(ids)
            for name in ("t", "u"):
                self.assertEqual((new[name].shape, new[name].tobytes()), (plain[name].shape, plain[name].tobytes()))
                self.assertNotEqual(new[name].tobytes(), before[name].tobytes())
                self.assertEqual(found[name].tobytes(), before[name].tobytes())
        prepared.close()
        self.wait_for(lambda: self.handles() == 3)
        with self.assertRaisesRegex(emberd.FailedPrecondition, "its batch, which would be looked up again, is gone"):
            update(found, {})

    def test_a_bundle_keeps_what_it_was_made_of_and_gives_it_to_programs(self):
        model = self.declare()
        lookup, update = self.compile(model, "lookup"), self.compile(model, "update", aliases=[{}])
        total = self.client.compile({"kind": "ELEMENTWISE", "inputs": [{"feature": "a"}], "outputs": [{"operation": "COPY", "scale": 2}]})
        self.wait_for(lambda: self.handles() == 3)  # others' have gone
        prepared = lookup.prepare(batch(1))
        found = lookup(prepared)
        expected = {name: one.tobytes() for name, one in found.items()}
        inner = self.client.bundle(gradients(found), ({"n": np.array([2**40])}, {"x": [0.5]}))
        bundle = self.client.bundle(prepared, found, (inner, inner[1][1], {"y": [1]}))
        for one in (prepared, found, inner):
            one.close()
        self.wait_for(lambda: self.handles() == 4)
        read = bundle.read()
        self.assertEqual((read[0], read[1]), ({}, {}))  # a batch, and a result that is here
        self.assertEqual({name: one.tobytes() for name, one in lookup(bundle[0]).items()}, expected)
        self.assertEqual((read[2][0][1][0]["n"].tolist(), read[2][1]["x"].tolist(), read[2][2]["y"].tolist()), ([2**40], [0.5], [1]))
        self.assertEqual(total(bundle[2][0][1][0])["n"].tolist(), [2**41])
        update(bundle[1], bundle[2][0][0])
        chain = emberd.Chain()
        chain.add(update, bundle[1], bundle[2][0][0])
        chain.add(total, bundle[1])
        self.assertEqual(chain.run()[1]["t"].tobytes(), (2 * model.lookup(batch(1))["t"]).tobytes())
        self.assertEqual(bundle.read()[1]["t"].tobytes(), model.lookup(batch(1))["t"].tobytes())
        with self.cluster.connect() as client:
            for call, kind, said in ((lambda: self.client.bundle(), ValueError, "elements: give at least one"), (lambda: self.client.bundle(3), TypeError, "element 0: a int"),
                                     (lambda: self.client.bundle(({}, [lookup])), TypeError, r"element 0\[1\]\[0\]: a Program"), (lambda: client.bundle(bundle), ValueError, "another client"),
                                     (lambda: lookup(bundle), TypeError, "argument 0: a Bundle"), (lambda: total(bundle[2]), ValueError, r"argument\[0\] is not a tuple of tensors"),
                                     (lambda: lookup(bundle[3]), ValueError, r"output_index 4 of op 0 is not in 0 .. 3"), (lambda: bundle[-1], ValueError, "place: -1")):
                with self.assertRaisesRegex(kind, said):
                    call()
        bundle.close()
        self.wait_for(lambda: self.handles() == 3)

    def test_a_batch_in_a_bundle_gives_activations_of_the_shape_of_its_ids(self):
        model = self.declare()
        ids = {"t": emberd.Sequences(np.array([[1, 0, 3], [0, 2, 0]]), 0), "u": np.arange(4)}
        lookup = self.compile(model, "lookup")
        prepared = lookup.prepare(ids)
        bundle = self.client.bundle({"x": [1]}, (prepared, prepared))
        outer = self.client.bundle(bundle, bundle[1])
        shapes = {name: one.shape for name, one in lookup(prepared).items()}
        self.assertEqual(shapes["t"][:2], (2, 3))
        chain = emberd.Chain()
        chain.add(lookup, bundle[1][1])
        for found in (lookup(bundle[1][0]), lookup(outer[0][1][1]), lookup(outer[1][0]), *chain.run()):
            self.assertEqual({name: one.shape for name, one in found.items()}, shapes)
        found = lookup(prepared)
        kept = self.client.bundle(found, ({"x": [1]}, found))
        self.compile(model, "update", aliases=[{}])(kept[0], {"t": np.ones(shapes["t"], np.float32)})
        read, nested = kept.read(), self.client.bundle(kept, kept[1], kept[0][0]).read()
        expected = {name: (one.shape, one.tobytes()) for name, one in model.lookup(ids).items()}
        for again in (read[0], read[1][1], nested[0][0], nested[0][1][1], nested[1][1]):
            self.assertEqual({name: (one.shape, one.tobytes()) for name, one in again.items()}, expected)
        self.assertEqual({name: one.shape for name, one in nested[2].items()}, {"t": shapes["t"]})

    def test_gradients_have_the_shape_of_their_activations_wherever_both_are(self):
        """The rows would be as many, and each would go to another id."""
        model = self.client.declare(emberd.ModelConfig(
            "gradients", [emberd.TableConfig("t", 64, 8, optimizer=emberd.SGD(learning_rate=1.0), initializer=emberd.Zeros())],
            [emberd.FeatureConfig("s", "t"), emberd.FeatureConfig("t", "t", output_shape=(2, 3))]))
        lookup, update = self.compile(model, "lookup"), self.compile(model, "update")
        ids = {"s": emberd.Sequences(np.array([[1, 2, 3], [4, 5, 6]])), "t": np.arange(12).reshape(4, 3)}
        gradient = np.arange(1, 49, dtype=np.float32).reshape(2, 3, 8)
        batch = lookup.prepare(ids)

        def in_chain(given, gradients):
            chain = emberd.Chain()
            chain.add(update, chain.add(lookup, given), gradients)
            chain.run()

        for name, shape, said in (("s", (3, 2, 8), r"the shape \[3, 2, (8|embedding_dim)\] .* \[2, 3, embedding_dim\]"), ("s", (6, 8), r"the shape \[6, "),
                                  ("t", (3, 4, 8), r"\b3, ?4, "), ("t", (2, 6, 8), r"\b2, ?6, ")):
            wrong = {name: np.zeros(shape, np.float32)}
            kept = self.client.bundle((lookup(batch), update.prepare(wrong)))[0]
            ways = [lambda: update(lookup(batch), wrong), lambda: update(kept[0], wrong), lambda: in_chain(batch, wrong), lambda: in_chain(ids, wrong),
                    lambda: in_chain(batch, update.prepare(wrong)), lambda: in_chain(ids, kept[1]),
                    lambda: update(lookup(batch), update.prepare(wrong)), lambda: update(kept[0], kept[1])]
            for way in ways:
                with self.subTest(name=name, shape=shape, way=ways.index(way)), self.assertRaisesRegex(ValueError, rf"gradient of feature .{name}.*{said}"):
                    way()
        self.assertFalse(model.table("t").any())
        prepared = update.prepare({"s": gradient})
        self.assertEqual(prepared.read()["s"].tolist(), gradient.tolist())
        for given in ({"s": gradient}, prepared):
            in_chain(batch, given)
            update(self.client.bundle(lookup(batch))[0], given)
        self.assertEqual(model.table("t")[1:7].tolist(), (-4 * gradient.reshape(6, 8)).tolist())
        in_chain(ids, update.prepare({"t": np.ones((4, 3, 8), np.float32)}))
        self.assertEqual(model.table("t")[:12].tolist(), [[-1] * 8, *(-4 * gradient.reshape(6, 8) - 1).tolist(), *[[-1] * 8] * 5])

    def test_csr_of_a_batch(self):
        model = self.declare()
        lookup = self.compile(model, "lookup")
        read = lookup.prepare({"t": np.array([1, 5, 1]), "u": np.array([2])}).read(csr=True)
        stack = model.tables["t"].stack
        self.assertEqual(read["splits"].shape, ())
        ids = read[f"{stack}/sorted_token_ids"]
        self.assertEqual((ids.dtype, np.count_nonzero(ids < 2**31 - 1)), (np.int32, 4))
        with self.assertRaisesRegex(ValueError, "no batch that was prepared"):
            self.compile(model, "update").prepare({"t": np.zeros((3, 8))}).read(csr=True)

    def test_what_is_wrong_is_said(self):
        model, other = self.declare(), self.declare("other")
        lookup, update = self.compile(model, "lookup"), self.compile(model, "update")
        found, of_other = lookup(batch(1)), self.compile(other, "lookup")(batch(1))
        with self.cluster.connect() as client:
            foreign = self.compile(client.model(model.name), "lookup").prepare(batch(1))
            for call, kind, said in (
                    (lambda: model.compile("sum"), ValueError, "kind: 'sum' is not allowed; it must be one of 'lookup', 'update'"),
                    (lambda: model.compile(features="t"), TypeError, "features: a str is not allowed"),
                    (lambda: model.compile(features=["v"]), ValueError, "'v', which model 'test_what_is_wrong_is_said' does not have"),
                    (lambda: model.compile(sampels=3), ValueError, "sampels"),
                    (lambda: model.compile(limits=[{"stack": "s"}]), ValueError, "limits name the stack 's'"),
                    (lambda: model.compile(samples=0), ValueError, r"samples: 0 is not allowed; it must be in \[1"),
                    (lambda: self.client.compile([]), TypeError, "spec: a list is not allowed"),
                    (lambda: lookup({"t": np.arange(13), "u": np.arange(2)}), ValueError, r"argument\[0\] \(t\). Expected \[<=12 samples\]; got DENSE \[13 samples"),
                    (lambda: lookup({"t": np.arange(2)}), ValueError, "'u' is missing"),
                    (lambda: lookup({"t": [0.5], "u": [1]}), TypeError, 'feature "t"'),
                    (lambda: lookup(7), TypeError, "argument 0: a int is not allowed"),
                    (lambda: lookup(foreign), ValueError, "argument 0: it is of another client"),
                    (lambda: lookup(), ValueError, "Number of inputs .* 0 vs. 1"),
                    (lambda: lookup(found), ValueError, r"argument\[0\] of a LOOKUP is not a batch"),
                    (lambda: update(of_other, {}), ValueError, r"argument\[0\] of an UPDATE"),
                    (lambda: update(found, {"v": np.zeros((1, 8))}), ValueError, "'v' is not an input of the program"),
                    (lambda: update(found, {}, hyper={"speed": 1}), ValueError, "speed")):
                with self.subTest(said), self.assertRaisesRegex(kind, said):
                    call()
        self.assertEqual(update(found, {}).rows_updated, model.lookup(batch(1), train=True).apply({}).rows_updated)

    def test_operators_see_programs(self):
        model = self.declare()
        lookup = self.compile(model, "lookup")
        for seed in range(3):
            lookup(batch(seed))
        calls = self.client.call_statistics("exec.*")
        self.assertTrue(set(calls) <= {"execute", "execute_chained"})
        self.assertGreaterEqual(calls["execute"].count, 3)
        self.assertLessEqual(calls["execute"].min, calls["execute"].percentiles[50])
        with self.assertRaisesRegex(ValueError, "regex"):
            self.client.call_statistics("(")
        with self.assertRaisesRegex(emberd.FailedPrecondition, "evict"):
            self.client.change_memory("pin", model.name)

        def emberctl(*arguments):
            return subprocess.run([emberd._native.program_path("emberctl"), "-a", self.cluster.addresses[0], *arguments], capture_output=True, text=True, timeout=600)

        shown = emberctl("program", model.name, "--samples", "12")
        self.assertRegex(shown.stdout, rf"^program [0-9a-f]{{64}}: .* on each SparseCore\n.*\n{model.tables['t'].stack} +24 ")
        self.assertEqual(json.loads(emberctl("--json", "program", model.name, "--samples", "12").stdout)["cached"], True)
        self.assertIn("nothing", emberctl("program", "nothing").stderr)


class EvictionTest(unittest.TestCase):
    def test_models_are_pinned_and_released(self):
        local = sys.modules["emberd.local"]
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "cluster.textproto")
            with open(path, "w", encoding="utf-8") as file:
                file.write(f"coordinators {{ address: '127.0.0.1:0' }} shards {{ address: '127.0.0.1:0' }} sparsecores_per_shard: 2 eviction {{ spill_folder: '{folder}/spill' }}")
            with local.LocalCluster(local._Server(["--config", path, "--http", ""], 60)) as cluster, cluster.connect() as client:
                for name in ("a", "b"):
                    client.declare(counting_model(name, dim=8))
                pinned = client.change_memory("pin", "a")
                self.assertEqual([(one.shard, one.changed, one.returned, one.evicted) for one in pinned], [(0, True, False, ())])
                self.assertGreater(pinned[0].pinned_bytes, 0)
                released = client.change_memory("release")[0]
                self.assertEqual((released.evicted, released.pinned_bytes), (("b",), pinned[0].pinned_bytes))
                self.assertEqual(released.free_bytes, pinned[0].free_bytes + released.evicted_bytes)
                self.assertEqual(client.change_memory("unpin", "a")[0].pinned_bytes, 0)
                self.assertEqual(client.change_memory("compact")[0].moved_tables, 0)
                with self.assertRaisesRegex(ValueError, "operation: 'drop' is not allowed"):
                    client.change_memory("drop")


class AsyncioTest(ClusterTest):
    def test_programs_are_awaited(self):
        """The bits of blocking calls, many at a time, and the same errors."""
        config = counting_model(self.id().split(".")[-1], ("t", "u"), optimizer=ADAGRAD, initializer=emberd.Normal(0, 1), dim=8)
        plain = self.client.declare(config)
        expected = {name: one.copy() for name, one in plain.lookup(batch(0)).items()}

        async def run():
            async with await emberd.aio.connect(self.cluster.address) as client:
                model = await client.model(plain.name)
                lookup, update = await asyncio.gather(*(model.compile(kind, samples=12, dynamic=True) for kind in ("lookup", "update")))
                prepared = await client.prepare(lookup, batch(0))
                self.assertEqual(await client.read(prepared), {})
                self.assertIn("splits", await client.read(prepared, csr=True))
                found = await asyncio.gather(*(client.execute(lookup, prepared if i % 2 else batch(0)) for i in range(40)))
                for one in found:
                    self.assertEqual({name: array.tobytes() for name, array in one.items()}, {name: array.tobytes() for name, array in expected.items()})
                looked_up = plain.lookup(batch(0), train=True)
                applied = looked_up.apply(gradients(looked_up))
                chain = emberd.Chain()
                chain.add(update, found[0], {name: 0 * one for name, one in expected.items()})
                chain.add(lookup, prepared)
                chained, again = await client.run(chain)
                self.assertEqual(chained.rows_updated, applied.rows_updated)
                self.assertFalse(np.array_equal(again["t"], expected["t"]))
                total = await client.compile({"kind": "ELEMENTWISE", "inputs": [{"feature": "a"}],
                                              "outputs": [{"operation": "COPY", "a": {"argument": 0}, "scale": 2}]})
                self.assertEqual((await client.execute(total, {"x": [1.5]}))["x"].tolist(), [3])
                for call, message in ((client.run(5), "chain: a int"), (client.execute("p"), "program: a str"),
                                      (client.prepare(chain, {}), "program: a Chain"), (client.read({}), "batch: a dict")):
                    with self.assertRaisesRegex(TypeError, message):
                        await call
            with self.assertRaisesRegex(ValueError, "has been closed"):
                await client.run(emberd.Chain())

        asyncio.run(run())


if __name__ == "__main__":
    main()
