"""Lookups inside of jitted functions and the layer of Flax NNX, on a real cluster, against NumPy.

What this would catch: a step that is made where only the loss is evaluated, one that is received or sent twice, gradients
that JAX uses for something else before they have been sent, a callback that waits for JAX on JAX's thread and never ends,
and a layer whose token an optimizer moves.
"""

import dataclasses
import os
import re
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

from cluster import ClusterTest, counting_model, emberd, main

try:
    import flax
    import jax
    import optax
except ImportError as error:
    print(f"SKIP: {error.name} is not installed")
    sys.exit(77)

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import io_callback

import emberd.jax  # noqa: E402
import emberd.jax.nnx  # noqa: E402

jax.config.update("jax_platforms", "cpu")
ROWS, DIM, BATCH, RATE = 64, 4, 8, 0.5


def batches(count, seed=5):
    random = np.random.default_rng(seed)
    return [{"ids": {"t": random.integers(0, ROWS, BATCH, dtype=np.int32)},
             "label": random.standard_normal(BATCH).astype(np.float32)} for _ in range(count)]


class Case(ClusterTest):
    def setUp(self):
        """Counts what goes over the stream."""
        self.count = {"receive_lookup": 0, "send_update": 0, "send_lookup": 0}
        for name in self.count:
            method = getattr(emberd.TrainStream, name)

            def counted(stream, *arguments, name=name, method=method, **options):
                self.count[name] += 1
                return method(stream, *arguments, **options)

            setattr(emberd.TrainStream, name, counted)
            self.addCleanup(setattr, emberd.TrainStream, name, method)

    def counts(self):
        return [self.count[name] for name in ("send_lookup", "receive_lookup", "send_update")]

    def make(self, name=None, model=None, dim=DIM, rows=ROWS, **options):
        config = model or counting_model(name or self.id().split(".")[-1], dim=dim, rows=rows,
                                         initializer=emberd.Constant(0.25), optimizer=emberd.SGD(learning_rate=RATE))
        emb = emberd.jax.Embedding(self.client.declare(config), group="run", **options)
        self.addCleanup(emb.finish)
        return emb


class InJitTest(Case):
    def steps_of(self, emb):
        def loss_of(dense, token, batch, step):
            activations = emb.in_jit(token, batch["ids"], step)["t"]
            return jnp.mean(((activations * dense).sum(1) - batch["label"]) ** 2)

        return jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1))), jax.jit(loss_of)

    def test_steps_are_those_of_numpy(self):
        emb = self.make()
        step_of, loss_of = self.steps_of(emb)
        dense, token = np.linspace(0.5, 1, DIM, dtype=np.float32), emb.token()
        table = np.full((ROWS, DIM), 0.25, np.float32)
        for batch in batches(10):
            ids, label = batch["ids"]["t"], batch["label"]
            before = loss_of(dense, token, batch, None)
            loss, (of_dense, of_token) = step_of(dense, token, batch, None)
            error = (table[ids] * dense).sum(1) - label
            self.assertAlmostEqual(float(loss), float(np.mean(error ** 2)), places=5)
            self.assertAlmostEqual(float(before), float(loss), places=5)
            self.assertEqual(float(of_token), 0)
            np.testing.assert_allclose(of_dense, (2 / BATCH * error) @ table[ids], atol=1e-5)
            np.subtract.at(table, ids, RATE * 2 / BATCH * error[:, None] * dense)
        self.assertEqual(emb.next_step, 10)
        np.testing.assert_allclose(emb.model.table("t"), table, atol=1e-6)

    def test_one_receive_and_one_send_a_step_and_none_without_a_gradient(self):
        emb = self.make()
        step_of, loss_of = self.steps_of(emb)
        dense = np.ones(DIM, np.float32)
        for batch in batches(3):
            loss_of(dense, emb.token(), batch, None)
        jax.effects_barrier()
        self.assertEqual(self.counts(), [0, 0, 0])
        for batch in batches(3):
            step_of(dense, emb.token(), batch, None)
        jax.effects_barrier()
        self.assertEqual(self.counts(), [3, 3, 3])

    def test_the_next_step_of_jax_asks_for_a_checkpoint(self):
        with tempfile.TemporaryDirectory() as folder, emberd.local(data=folder) as cluster, cluster.connect() as client:
            emb = emberd.jax.Embedding(client.declare(counting_model("asks", rows=ROWS)))
            step_of, _ = self.steps_of(emb)
            dense = np.ones(DIM, np.float32)
            for number, batch in enumerate(batches(6)):
                if number == 2:  # the steps before may be under way
                    emb.request_checkpoint("three")
                step_of(dense, emb.token(), batch, None)
            emb.finish()  # waits for it
            self.assertEqual(emb.checkpoints, {"three": ""})
            self.assertEqual({one.name: dict(one.groups) for one in client.checkpoints() if not one.automatic}, {"three": {"train": 3}})

    def test_ids_that_were_sent_ahead(self):
        tables = []
        for depth in (0, 1, 2, 4):
            emb = self.make(f"ahead{depth}", pipelined=depth == 4)
            step_of, _ = self.steps_of(emb)
            dense = np.linspace(0.5, 1, DIM, dtype=np.float32)
            for step, batch in emb.prefetch(batches(12), depth) if depth else ((None, one) for one in batches(12)):
                step_of(dense, emb.token(), batch, step)
            emb.finish()
            tables.append(emb.model.table("t").tobytes())
        self.assertEqual(tables[0], tables[1])
        self.assertEqual(tables[0], tables[2])
        self.assertNotEqual(tables[0], tables[3])  # pipelined: an older table is seen

    def test_ragged_ids_that_are_filled_up(self):
        emb = self.make()
        ids = emberd.Ragged(np.array([1, 2, 2, 63, 63], np.int32), np.array([0, 2, 3], np.int32), np.full(5, 2, np.float32))
        loss_of = lambda token, ids: emb.in_jit(token, {"t": ids})["t"].sum()  # noqa: E731
        self.assertEqual(float(jax.jit(loss_of)(emb.token(), ids)), 0.25 * 2 * 3 * DIM)
        jax.jit(jax.grad(loss_of))(emb.token(), ids)
        emb.finish()
        self.assertEqual(emb.model.read_rows("t", [1, 2, 63])[:, 0].tolist(), [0.25 - 2 * RATE, 0.25 - 4 * RATE, 0.25])

    def test_weights_that_the_loss_is_differentiated_with_respect_to_are_refused(self):
        emb = self.make()
        ids, weights = np.array([[1, 2], [3, 3]], np.int32), jnp.full((2, 2), 2.0)

        def loss_of(token, weights, shown):
            return emb.in_jit(token, {"t": emberd.Dense(ids, shown(weights))})["t"].sum() * weights.sum()

        def same(weights):
            return weights

        for of in ((0, 1), 1):
            for gradient in (jax.grad(loss_of, of), jax.jit(jax.grad(loss_of, of), static_argnums=2)):
                with self.assertRaisesRegex(ValueError, r"feature 't': weights: .* jax.lax.stop_gradient\(weights\)"):
                    gradient(emb.token(), weights, same)
        self.assertEqual(emb.next_step, 0)
        found = 0.25 * 2 * 4 * DIM  # of all rows, with their weights
        np.testing.assert_array_equal(jax.grad(loss_of, (0, 1))(emb.token(), weights, jax.lax.stop_gradient)[1], np.full((2, 2), found))
        jax.grad(loss_of)(emb.token(), weights, same)  # a constant here
        self.assertEqual(emb.next_step, 2)
        self.assertEqual(emb.model.read_rows("t", [1, 3])[:, 0].tolist(), [0.25 - 2 * RATE * 2 * 8, 0.25 - 2 * RATE * 4 * 8])

    def test_sequences_and_a_part_of_the_features(self):
        tables = []
        for way in ("outside", "in jit", "ahead"):
            emb = self.make(model=counting_model(way.replace(" ", "_"), ("t", "other"), initializer=emberd.RowId()), partial=True)

            def loss_of(found, scale):
                self.assertEqual((list(found), found["t"].shape), (["t"], (2, 3, DIM)))
                return (found["t"] * scale).sum()

            for length in (3, 3):
                ids = {"t": emberd.Sequences(np.array([[1, 2, 0], [3, 0, 0]], np.int32), padding_idx=0)}
                scale = jnp.arange(6.0).reshape(2, length, 1)
                step = None if way == "in jit" else emb.send(ids)
                if way == "outside":
                    emb.update(step, jax.grad(loss_of)(emb.receive(step), scale))
                else:
                    jax.jit(jax.grad(lambda token, ids, step: loss_of(emb.in_jit(token, ids, step), scale)))(emb.token(), ids, step)  # noqa: B023
            self.assertEqual(emb.lookup(ids)["t"].shape, (2, 3, DIM))
            emb.finish()
            tables.append([emb.model.table(name).tobytes() for name in ("t", "other")])
            with self.assertRaisesRegex(ValueError, "'x' are not allowed"):
                emb.in_jit(emb.token(), {"t": [1], "x": [1]})
        self.assertEqual(tables[0], tables[1])
        self.assertEqual(tables[0], tables[2])
        self.assertEqual(emb.model.table("t")[:5, 0].tolist(), [0, 1, 0, -3, 4])

    def test_the_largest_of_a_bag(self):
        """As with a table in JAX: ids twice in a sample and in several, samples without ids, and of equal rows the first, which alone gets the gradient."""
        random = np.random.default_rng(6)
        rows = random.normal(size=(ROWS, DIM)).astype(np.float32)
        rows[5:9] = rows[4]
        emb = self.make()
        emb.model.load_table("t", rows)
        plain = jnp.asarray(rows)
        bags = [[7, 4, 5], [3], [], [9, 9, 2, 9], [6, 5, 3], [2]]
        given = emberd.Sequences.from_lists(bags, padding_idx=-1)
        for step, ids in enumerate((given, emberd.Sequences(given.ids[:, :1], -1), given)):
            ids = emberd.Sequences(ids.ids.astype(np.int32), -1)
            scale = random.normal(size=(6, DIM)).astype(np.float32)

            def plain_loss(table):
                found = [table[jnp.array(bag)] if bag else jnp.zeros((1, DIM)) for bag in (row[row >= 0].tolist() for row in ids.ids)]  # noqa: B023
                return sum((jnp.take_along_axis(one, jnp.argmax(one, 0, keepdims=True), 0)[0] * weight).sum() for one, weight in zip(found, scale))  # noqa: B023

            def loss_of(token, ids):
                found = emb.in_jit(token, {"t": ids})["t"]
                self.assertEqual(emberd.jax.largest(found, ids).shape, (6, DIM))
                return (emberd.jax.largest(found, ids) * scale).sum()  # noqa: B023

            expected, gradient = jax.value_and_grad(plain_loss)(plain)
            if step == 2:  # outside of the jitted function
                number = emb.send({"t": ids})
                loss, gradients = jax.value_and_grad(jax.jit(lambda found, ids: (emberd.jax.largest(found["t"], ids) * scale).sum()))(emb.receive(number), ids)  # noqa: B023
                emb.update(number, gradients)
            else:
                loss, _ = jax.jit(jax.value_and_grad(loss_of))(emb.token(), ids)
            self.assertAlmostEqual(float(loss), float(expected), places=5)
            plain = plain - RATE * gradient
            emb._in_jit.wait()
            np.testing.assert_allclose(emb.model.table("t"), plain, atol=1e-5)
        self.assertEqual(emberd.jax.largest(jnp.zeros((2, 0, DIM))).tolist(), [[0] * DIM] * 2)
        self.assertEqual(emberd.jax.largest(jnp.array([[[1.0, 5.0], [3.0, 2.0]]])).tolist(), [[3, 5]])
        for found, said in ((jnp.zeros(3), r"rows: the shape \[3\] is not allowed"), (jnp.zeros((6, 2, DIM)), r"ids: the shape \[6, 4\] is not allowed")):
            with self.assertRaisesRegex(ValueError, said):
                emberd.jax.largest(found, given)

    def test_ids_that_do_not_fit_in_the_32_bits_of_jax_are_refused(self):
        emb = self.make()
        loss_of = lambda token, ids, step=None: emb.in_jit(token, {"t": ids}, step)["t"].sum()  # noqa: E731
        large = np.array([1, 2**32 + 5])
        for ids in (large, emberd.Dense(large), emberd.Ragged(large, np.array([0, 2])), [1, 2**32 + 5], large - 2**33):
            with self.assertRaisesRegex(emberd.OutOfRange, r"'t': -?\d+ does not fit in int32.*jax_enable_x64.*ahead"):
                jax.jit(lambda token, ids=ids: loss_of(token, ids))(emb.token())
        self.assertEqual(float(loss_of(emb.token(), np.array([5]))), 0.25 * DIM)
        with unittest.mock.patch.dict(emb.model.tables, t=dataclasses.replace(emb.model.tables["t"], vocabulary_size=2**33)):
            with self.assertRaisesRegex(ValueError, "'t': int32 is not allowed for a table of 8589934592 rows.*jax_enable_x64"):
                jax.jit(loss_of)(emb.token(), np.array([5]))
            jax.jit(jax.grad(loss_of))(emb.token(), np.array([2**32 + 5]), emb.send({"t": np.array([5])}))
        self.assertEqual(emb.next_step, 1)
        self.assertEqual(emb.model.read_rows("t", [5])[0, 0], 0.25 - RATE)

    def test_ids_that_are_no_integers_are_refused(self):
        emb = self.make()
        for ids, said in ((np.array([1.5]), "float64"), ([1.5], "float64"), (jnp.array([1.0, 2.0]), "float32"),
                          (jnp.array([True]), "bool"), (np.array(["a"]), "<U1.*Texts are hashed first")):
            with self.subTest(said), self.assertRaisesRegex(TypeError, f"feature 't': {said}"):
                emb.in_jit(emb.token(), {"t": ids})

    def test_large_arrays_do_not_wait_for_jax(self):
        emb = self.make(dim=256)
        ids = {"t": np.arange(8192, dtype=np.int32) % ROWS}
        step_of = jax.jit(jax.grad(lambda token, dense, ids: (emb.in_jit(token, ids)["t"] @ dense).sum(), argnums=(0, 1)))
        dense = jnp.ones((256, 64))
        for _ in range(5):
            _, dense = step_of(emb.token(), dense, ids)
            dense = dense * 0 + 1
        self.assertEqual(emb.next_step, 5)
        self.assertEqual(float(emb.model.table("t")[0, 0]), 0.25 - 5 * RATE * 64 * 8192 / ROWS)

    def test_a_schedule_of_the_learning_rate(self):
        emb = self.make()
        schedule = optax.piecewise_constant_schedule(1.0, {1: 0.5, 2: 0.5})
        hyper = lambda step: {"t": {"learning_rate": schedule(step)}}  # noqa: E731
        grad = jax.jit(jax.grad(lambda token, ids: emb.in_jit(token, ids, hyper=hyper)["t"].sum()))
        for _ in range(3):
            grad(emb.token(), {"t": np.array([1])})
        emb.finish()
        self.assertEqual(emb.model.read_rows("t", [1])[0, 0], 0.25 - 1 - 0.5 - 0.25)

    def test_tables_have_rates_of_their_own(self):
        """Would catch: the rate of one table for another, a table without one that has not its own, and a rate of 0 that moves rows or holds others."""
        tables = [emberd.TableConfig(name, ROWS, DIM, combiner="sum", initializer=emberd.RowId(), optimizer=optimizer) for name, optimizer in (
            ("a", emberd.SGD()), ("b", emberd.SGD()), ("c", emberd.SGD(learning_rate=2)), ("still", emberd.SGD()))]
        emb = self.make(model=emberd.ModelConfig("rates", tables, [emberd.FeatureConfig(one.name, one.name) for one in tables],
                                                 plan=emberd.PlanConfig(auto_stack=False)))
        schedules = {"a": optax.piecewise_constant_schedule(1.0, {1: 0.5}), "b": optax.constant_schedule(0.25), "still": lambda step: 0.0}
        hyper = lambda step: {name: {"learning_rate": schedule(step)} for name, schedule in schedules.items()}  # noqa: E731
        loss = lambda token, ids: sum(one.sum() for one in emb.in_jit(token, ids, hyper=hyper).values())  # noqa: E731
        step_of, ids = jax.jit(jax.value_and_grad(loss)), {one.name: np.array([9]) for one in tables}
        found = [float(step_of(emb.token(), ids)[0]) for _ in range(2)]
        emb.finish()
        self.assertEqual(found, [4 * 9 * DIM, (4 * 9 - 1 - 0.25 - 2) * DIM])
        self.assertEqual([emb.model.read_rows(one.name, [9])[0, 0] for one in tables], [9 - 1 - 0.5, 9 - 0.25 * 2, 9 - 2 * 2, 9])

    def test_a_step_without_its_backward_pass_is_skipped(self):
        for ahead in (False, True):
            emb = self.make(f"skipped_{ahead}")
            ids = [{"t": np.arange(3)}, {"t": np.arange(1)}]
            steps = [emb.send(one) for one in ids] if ahead else [None, None]
            jax.vjp(lambda token: emb.in_jit(token, ids[0], steps[0])["t"].sum(), emb.token())
            _, backward = jax.vjp(lambda token: emb.in_jit(token, ids[1], steps[1])["t"].sum(), emb.token())
            backward(jnp.ones(()))
            self.assertEqual(emb.next_step, 2)
            self.assertEqual(emb.model.read_rows("t", [0, 1])[:, 0].tolist(), [0.25 - RATE, 0.25])

    def test_a_loss_that_calls_it_twice_says_so(self):
        emb = self.make()

        def twice(token):
            return sum(emb.in_jit(token, {"t": np.array([row])})["t"].sum() for row in (1, 2))

        with self.assertRaises(jax.errors.JaxRuntimeError):
            jax.block_until_ready(jax.jit(jax.grad(twice))(emb.token()))
            jax.effects_barrier()
        self.assertRegex(str(emb.failure), "step 0 is not in progress.*A step has one lookup, of all features")

    def test_lookups_that_are_mapped_or_computed_again_are_refused(self):
        """Before a step is made: jax.vmap would map callbacks, and jax.checkpoint make them a second time. Around the dense part it is allowed."""
        emb = self.make()
        ids = np.arange(8).reshape(4, 2)

        def loss(token, ids):
            return emb.in_jit(token, {"t": ids})["t"].sum()

        for mapped in (jax.vmap(loss, (None, 0)), jax.jit(jax.vmap(jax.grad(loss), (None, 0))), jax.vmap(jax.jit(jax.grad(loss)), (None, 0))):
            with self.assertRaisesRegex(ValueError, "not allowed under jax.vmap; look the ids of all samples up in one call"):
                mapped(emb.token(), ids)
        with self.assertRaisesRegex(NotImplementedError, "Effects not supported in partial-eval of `checkpoint`"):
            jax.jit(jax.grad(jax.checkpoint(loss)))(emb.token(), ids)
        self.assertEqual((emb.next_step, self.counts()), (0, [0, 0, 0]))

        dense = jax.checkpoint(lambda found: jax.vmap(lambda row: (row ** 2).sum())(found).sum())
        jax.jit(jax.grad(lambda token: dense(emb.in_jit(token, {"t": ids})["t"])))(emb.token())
        self.assertEqual(emb.next_step, 1)
        self.assertEqual(emb.model.read_rows("t", [0])[0, 0], 0.25 - RATE * 2 * 0.5 * 1)

    def test_ids_of_a_jitted_function_name_what_looks_them_up(self):
        """Would catch: an AttributeError out of JAX's own class of errors."""
        with self.assertRaisesRegex(TypeError, '"t".*in_jit'):
            jax.jit(lambda ids: self.make().model.lookup({"t": ids})["t"])(np.ones((2, 1), np.int32))
        deleted = jax.numpy.ones((2, 1), np.int32)
        deleted.delete()
        with self.assertRaisesRegex(RuntimeError, '"t".*deleted'):
            self.make().model.lookup({"t": deleted})

    def test_a_failure_says_what_it_was_and_training_goes_on(self):
        emb = self.make()
        grad = jax.jit(jax.grad(lambda token, ids: emb.in_jit(token, ids)["t"].sum()))
        with self.assertRaises(jax.errors.JaxRuntimeError):
            jax.block_until_ready(grad(emb.token(), {"t": np.array([ROWS])}))
            jax.effects_barrier()
        self.assertIsInstance(emb.failure, emberd.OutOfRange)
        self.assertIn(str(ROWS), str(emb.failure))
        grad(emb.token(), {"t": np.array([1])})
        self.assertEqual(emb.next_step, 1)
        with self.assertRaisesRegex(ValueError, "of feature 't' are missing"):
            emb.in_jit(emb.token(), {"u": np.array([1])})

    def test_failures_keep_their_type_where_one_asks(self):
        emb = self.make()
        grad = jax.jit(jax.grad(lambda token, ids, scale: (emb.in_jit(token, ids)["t"] * scale).sum()))
        for ids, scale, kind, said in (([ROWS], 1.0, IndexError, str(ROWS)), ([-1], 1.0, IndexError, "-1"), ([1], np.nan, ValueError, "nan")):
            with self.assertRaisesRegex(kind, said) as raised, emb.typed_errors():
                for _ in range(2):  # it may be the next one, or the end of the block, that hears of it
                    grad(emb.token(), {"t": np.array(ids)}, scale)
            self.assertIsInstance(raised.exception, emberd.Error)
            self.assertIsInstance(raised.exception.__cause__, jax.errors.JaxRuntimeError)
        with self.assertRaisesRegex(ZeroDivisionError, "mine"), emb.typed_errors():
            raise ZeroDivisionError("mine")
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, "mine"), emb.typed_errors():  # not of ours, behind one that was caught
            with self.assertRaises(jax.errors.JaxRuntimeError):
                jax.block_until_ready(jax.jit(lambda ids: emb.in_jit(emb.token(), {"t": ids}))(jnp.array([ROWS])))
            jax.block_until_ready(jax.jit(lambda: io_callback(unittest.mock.Mock(side_effect=OSError("mine")), jax.ShapeDtypeStruct((), jnp.float32)))())
        self.assertEqual(emb.model.read_rows("t", [1])[0, 0], 0.25)
        with emb.typed_errors():
            grad(emb.token(), {"t": np.array([1])}, 1.0)
        emb.finish()
        self.assertEqual(emb.model.read_rows("t", [1])[0, 0], 0.25 - RATE)


class Net(nnx.Module):
    def __init__(self, emb, rngs):
        self.embed = emberd.jax.nnx.Embed(emb)
        self.dense = nnx.Linear(DIM, 1, rngs=rngs)

    def __call__(self, ids):
        return self.dense(self.embed(ids)["t"])[:, 0]


def loss_of(net, batch):
    return jnp.mean((net(batch["ids"]) - batch["label"]) ** 2)


@nnx.jit
def train_step(net, optimizer, batch):
    loss, gradients = nnx.value_and_grad(loss_of)(net, batch)
    optimizer.update(net, gradients)
    return loss


class NnxTest(Case):
    def test_the_layer_trains_as_one_that_holds_its_table(self):
        emb = self.make()
        net = Net(emb, nnx.Rngs(0))
        optimizer = nnx.Optimizer(net, optax.adamw(0.1, weight_decay=0.1), wrt=nnx.Param)

        plain = {"table": jnp.full((ROWS, DIM), 0.25), "kernel": net.dense.kernel[...], "bias": net.dense.bias[...]}
        dense = optax.adamw(0.1, weight_decay=0.1)
        state = dense.init({"kernel": plain["kernel"], "bias": plain["bias"]})

        def plain_loss(plain, batch):
            found = plain["table"][batch["ids"]["t"]] @ plain["kernel"] + plain["bias"]
            return jnp.mean((found[:, 0] - batch["label"]) ** 2)

        for batch in batches(8):
            loss = train_step(net, optimizer, batch)
            expected, gradients = jax.value_and_grad(plain_loss)(plain, batch)
            self.assertAlmostEqual(float(loss), float(expected), places=5)
            updates, state = dense.update({name: gradients[name] for name in ("kernel", "bias")}, state,
                                          {name: plain[name] for name in ("kernel", "bias")})
            plain = {"table": plain["table"] - RATE * gradients["table"],
                     **optax.apply_updates({name: plain[name] for name in ("kernel", "bias")}, updates)}
        self.assertEqual(emb.next_step, 8)
        np.testing.assert_allclose(emb.model.table("t"), plain["table"], atol=1e-5)
        np.testing.assert_allclose(net.dense.kernel[...], plain["kernel"], atol=1e-5)
        self.assertEqual(float(net.embed.token[...]), 0)

    def run_example(self, name):
        said = subprocess.run([sys.executable, "-B", os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "examples", name), "--address", self.cluster.address],
                              capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"})
        self.assertEqual(said.returncode, 0, said.stderr)
        self.assertGreater(float(re.search(r"right=(\S+)", said.stdout)[1]), 0.9)  # half of the items are liked
        return said.stdout

    def test_the_example_with_tags(self):
        self.run_example("tags_flax.py")

    def test_the_example_with_sequences(self):
        """Would catch: padding that is looked up, and an error of JAX in place of an IndexError."""
        self.assertRegex(self.run_example("sequences_jax.py"), r"(?m)^refused: feature 'next': id at position 0 is \d+; allowed: \[0, 200\)$")

    def test_a_layer_that_takes_the_largest(self):
        random = np.random.default_rng(7)
        rows = random.normal(size=(2, ROWS, DIM)).astype(np.float32)
        emb = self.make(model=counting_model("nnx_largest", ("t", "u"), rows=ROWS, optimizer=emberd.SGD(learning_rate=RATE)))
        for name, one in zip("tu", rows):
            emb.model.load_table(name, one)
        layer, plain = emberd.jax.nnx.Embed(emb, max_of=["t"]), jnp.asarray(rows)
        for kind in ("array", "sequences"):
            ids = random.integers(0, ROWS, (BATCH, 3), dtype=np.int32)
            if kind == "sequences":
                ids[:, 2] = 0  # none

            def plain_loss(tables):
                found = tables[0][ids] if kind == "array" else jnp.where(ids[..., None] == 0, -jnp.inf, tables[0][ids])  # noqa: B023
                return (found.max(1) ** 2).sum() + tables[1][ids].sum()  # noqa: B023

            if kind == "sequences":
                ids[:, 0] += ids[:, 0] == 0
            loss, _ = nnx.value_and_grad(lambda layer: (lambda found: (found["t"] ** 2).sum() + found["u"].sum())(
                layer({"t": ids if kind == "array" else emberd.Sequences(ids, mask_zero=True), "u": ids})))(layer)  # noqa: B023
            expected, gradient = jax.value_and_grad(plain_loss)(plain)
            self.assertAlmostEqual(float(loss), float(expected), delta=1e-4)
            plain = plain - RATE * gradient
            emb._in_jit.wait()
            for name, one in zip("tu", plain):
                np.testing.assert_allclose(emb.model.table(name), one, atol=1e-5)
        for error, said, given in ((LookupError, "max_of: there is no feature 'x'; there are t, u", ["x"]), (TypeError, "max_of", "t")):
            with self.assertRaisesRegex(error, said):
                emberd.jax.nnx.Embed(emb, max_of=given)
        with self.assertRaisesRegex(ValueError, "feature 't': ids of a maximum are an array"):
            layer({"t": ids[:, 0], "u": ids})

    def test_evaluation_is_no_step_and_states_hold_no_rows(self):
        emb = self.make()
        net = Net(emb, nnx.Rngs(0))
        found = nnx.jit(lambda net, ids: net(ids))(net, batches(1)[0]["ids"])
        self.assertEqual(found.shape, (BATCH,))
        jax.effects_barrier()
        self.assertEqual(self.counts(), [0, 0, 0])
        sizes = [leaf.size for leaf in jax.tree.leaves(nnx.state(net))]
        self.assertEqual(sorted(sizes), [1, 1, DIM])


if __name__ == "__main__":
    assert flax.__version__
    main()
