"""emberd.jax on a real cluster, against NumPy.

What this would catch: activations that change under a computation that JAX has not begun yet, gradients of another step
than the one named, and updates that jitting makes otherwise than NumPy.
"""

import array
import sys
import tempfile
import threading
import unittest
import unittest.mock

from cluster import ClusterTest, counting_model, emberd, main

try:
    import jax
except ImportError:
    print("SKIP: JAX is not installed")
    sys.exit(77)

import jax.numpy as jnp
import numpy as np

import emberd.jax  # noqa: E402

jax.config.update("jax_platforms", "cpu")
ROWS, DIM, BATCH, RATE = 64, 4, 8, 0.5


@jax.jit
def loss_of(activations, dense, label):
    return jnp.mean(((activations["t"] * dense).sum(1) - label) ** 2)


step_of = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1)))


def batches(count, seed=5):
    random = np.random.default_rng(seed)
    return [{"ids": {"t": random.integers(0, ROWS, BATCH)}, "label": random.standard_normal(BATCH).astype(np.float32)}
            for _ in range(count)]


class JaxTest(ClusterTest):
    def setUp(self):
        """Notes what comes from the stream."""
        self.received = []
        receive = emberd.TrainStream.receive_lookup

        def noted(stream, timeout=None):
            self.received.append(receive(stream, timeout))
            return self.received[-1]

        emberd.TrainStream.receive_lookup = noted
        self.addCleanup(setattr, emberd.TrainStream, "receive_lookup", receive)

    def make(self, name=None, **options):
        config = counting_model(name or self.id().split(".")[-1], dim=DIM, rows=ROWS, initializer=emberd.Constant(0.25),
                                optimizer=emberd.SGD(learning_rate=RATE))
        emb = emberd.jax.Embedding(self.client.declare(config), group="run", **options)
        self.addCleanup(emb.finish)
        return emb

    def test_steps_are_those_of_numpy(self):
        emb = self.make()
        table = np.full((ROWS, DIM), 0.25, np.float32)
        dense = np.linspace(0.5, 1, DIM, dtype=np.float32)
        for step, batch in emb.prefetch(batches(10)):
            ids, label = batch["ids"]["t"], batch["label"]
            activations = emb.receive(step)
            self.assertIsInstance(activations["t"], jax.Array)
            loss, (gradients, of_dense) = step_of(activations, dense, label)
            emb.update(step, gradients)
            error = (table[ids] * dense).sum(1) - label
            self.assertAlmostEqual(float(loss), float(np.mean(error ** 2)), places=5)
            np.testing.assert_allclose(of_dense, (2 / BATCH * error) @ table[ids], atol=1e-5)
            np.subtract.at(table, ids, RATE * 2 / BATCH * error[:, None] * dense)
        np.testing.assert_allclose(emb.model.table("t"), table, atol=1e-6)
        self.assertEqual(emb.next_step, 10)

    def train(self, emb, depth):
        """In prefetched steps; gives what was seen, and the table."""
        seen = []
        for step, batch in emb.prefetch(batches(12), depth=depth):
            activations = emb.receive(step)
            seen.append(activations["t"])
            emb.update(step, {"t": activations["t"] * 0.5 + 1})
        emb.finish()
        return [np.asarray(one).tolist() for one in seen], emb.model.table("t").tolist()

    def test_prefetching_changes_nothing_and_activations_stay(self):
        expected = self.train(self.make("depth1"), 1)
        for depth in (2, 4):
            self.assertEqual(self.train(self.make(f"depth{depth}"), depth), expected)
        self.assertEqual(self.train(self.make("pipelined3", pipelined=True), 3),
                         self.train(self.make("pipelined2", pipelined=True), 2))

    def test_a_loop_over_prefetched_pairs_is_left(self):
        emb, seen = self.make(), []
        pairs = [(one["ids"], one["label"]) for one in batches(8)]
        for _ in range(2):
            for step, (ids, _) in emb.prefetch(pairs, depth=4):
                emb.update(step, {"t": jnp.ones_like(emb.receive(step)["t"])})
                seen.append(ids["t"])
                if len(seen) % 3 == 0:
                    break
        for _ in emb.prefetch(pairs):
            break
        self.assertEqual(emb.next_step, 6)
        expected = np.full(ROWS, 0.25, np.float32)
        np.subtract.at(expected, np.concatenate(seen), RATE)
        np.testing.assert_array_equal(emb.model.table("t")[:, 0], expected)

    def test_batches_that_the_loop_leaves_out(self):
        """Of a loader that fills one buffer; some of them have wrong ids."""
        def loader(buffer):
            for one in range(9):
                to_fill = buffer[0] if isinstance(buffer, list) else buffer
                to_fill[0] = ROWS if one in (3, 8) else one
                yield {"t": buffer}

        def in_two_calls(emb, step):
            emb.update(step, {"t": jnp.ones_like(emb.receive(step)["t"])})

        def in_jit(emb, step):
            jax.grad(lambda token: emb.in_jit(token, {"t": np.array([0])}, step)["t"].sum())(emb.token())

        for train in (in_two_calls, in_jit):
            for depth, pipelined, buffer in ((1, False, np.zeros(1, np.int64)), (2, False, memoryview(np.zeros(1, np.int64))), (4, False, [[0]]),
                                             (3, True, np.zeros(1, np.int64)), (4, False, array.array("q", [0]))):
                emb = self.make(f"left_out_{train.__name__}_{depth}_{pipelined}_{type(buffer).__name__}", pipelined=pipelined)
                for step, _ in emb.prefetch(loader(buffer), depth):
                    if step not in (0, 3, 4, 8):
                        train(emb, step)
                self.assertEqual(emb.next_step, 8)
                emb.finish()
                expected = np.where(np.isin(range(8), (0, 3, 4)), 0.25, 0.25 - RATE).astype(np.float32)
                np.testing.assert_array_equal(emb.model.read_rows("t", range(8))[:, 0], expected)
        emb = self.make("left_out_interrupted")
        given = emb.prefetch([{"t": [1]}] * 2)
        next(given)
        with unittest.mock.patch.object(emberd.TrainStream, "receive_update", side_effect=KeyboardInterrupt), self.assertRaises(KeyboardInterrupt):
            emb.receive(next(given)[0])
        for step, _ in emb.prefetch([{"t": [2]}] * 2):
            in_two_calls(emb, step)
        self.assertEqual((emb.next_step, emb.model.read_rows("t", [1, 2])[:, 0].tolist()), (3, [0.25, 0.25 - 2 * RATE]))
        first, second = emb.send({"t": [1]}), emb.send({"t": [2]})  # by who says the order
        with self.assertRaisesRegex(RuntimeError, f"step {second} is not the next to be received; that is step {first}, which is received and updated first"):
            emb.receive(second)

    def test_a_loop_is_left_in_the_middle_of_a_step(self):
        def receive_alone(emb, step):
            emb.receive(step)

        def interrupted(emb, step):
            emb.receive(step)
            with unittest.mock.patch.object(emberd.TrainStream, "receive_update", side_effect=KeyboardInterrupt), self.assertRaises(KeyboardInterrupt):
                emb.update(step, {"t": np.ones((BATCH, DIM))})

        left = (("before", lambda emb, step: None, 0), ("received", receive_alone, 1), ("interrupted", interrupted, 1))
        for name, leave, made in left:
            for depth in (1, 3):
                emb, kept = self.make(f"{name}{depth}"), []
                for _ in range(2):
                    kept.append(emb.prefetch(batches(4), depth))  # what is left is not collected before the next begins
                    leave(emb, next(kept[-1])[0])
                given = emb.prefetch(batches(4), depth)
                kept.append(next(given)[0])
                kept[0].close()  # its steps are not those of the new loop
                self.assertEqual(kept[-1], 2 * made)
                for step in [kept[-1], *(step for step, _ in given)]:
                    emb.update(step, {"t": jnp.zeros_like(emb.receive(step)["t"])})
                leave(emb, next(emb.prefetch(batches(4), depth))[0])
                jax.grad(lambda token, emb=emb: emb.in_jit(token, {"t": np.array([1])})["t"].sum())(emb.token())
                self.assertEqual(emb.next_step, 3 * made + 5)
                rows = [one["ids"]["t"] for one in batches(1)] * 3 if name == "interrupted" else []
                expected = np.full(ROWS, 0.25, np.float32)
                np.subtract.at(expected, np.concatenate([*rows, [1]]), RATE)
                np.testing.assert_array_equal(emb.model.table("t")[:, 0], expected)

    def test_what_is_no_mapping_says_what_to_write(self):
        emb = self.make()
        for call in (emb.send, emb.lookup, lambda ids: emb.in_jit(emb.token(), ids), lambda ids: emb.update(0, ids)):
            with self.assertRaisesRegex(TypeError, 'must be a mapping: {"name of a feature": array'):
                call(jnp.array([1, 2]))
        with self.assertRaisesRegex(TypeError, "first part of the pair is a list.*ids=lambda pair"):
            next(emb.prefetch([([1, 2], 0)]))

    def test_activations_are_not_copied(self):
        emb = self.make()
        found = emb.receive(emb.send({"t": range(BATCH)}))["t"]
        self.assertEqual(found.unsafe_buffer_pointer() % 64, 0)
        self.assertEqual([one["t"].ctypes.data for one in self.received], [found.unsafe_buffer_pointer()])

    def test_ids_of_jax_and_evaluation(self):
        emb = self.make()
        ids = {"t": jnp.array([1, 2])}
        step = emb.send(ids)
        emb.update(step, {"t": jnp.ones_like(emb.receive(step)["t"])})
        self.assertEqual(np.asarray(emb.lookup(ids)["t"]).tolist(), [[-0.25] * DIM] * 2)
        self.assertEqual(emb.next_step, 1)

    def test_gradients_of_numpy_may_be_used_again_once_they_are_given(self):
        emb, sent, send = self.make(pipelined=True), [], emberd.TrainStream.send_update

        def noted(stream, gradients, **options):
            sent.append(gradients["t"])
            send(stream, gradients, **options)

        gradients = np.empty((1, DIM), np.float32)
        with unittest.mock.patch.object(emberd.TrainStream, "send_update", noted):
            for step, _ in emb.prefetch([{"t": [1]}] * 4):
                emb.receive(step)
                gradients[:] = 1
                emb.update(step, {"t": gradients})
                gradients[:] = 1000  # while those of the last step are still to be sent, or to be sent again
            emb.finish()
        self.assertEqual([one.tolist() for one in sent], [[[1] * DIM]] * 4)
        self.assertEqual(emb.model.read_rows("t", [1])[0, 0], 0.25 - 4 * RATE)

    def test_gradients_and_weights_in_bfloat16(self):
        emb = self.make()
        for step, batch in emb.prefetch(batches(1)):
            before, ids = emb.model.table("t"), batch["ids"]["t"]
            emb.update(step, {"t": jnp.full(emb.receive(step)["t"].shape, 0.5, jnp.bfloat16)})
            np.subtract.at(before, ids, np.float32(RATE * 0.5))
        np.testing.assert_allclose(emb.model.table("t"), before, atol=1e-6)
        one = emberd.Dense(np.array([[3]]), jnp.full((1, 1), 0.5, jnp.bfloat16))
        np.testing.assert_allclose(emb.model.lookup({"t": one})["t"][0], before[3] * 0.5, atol=1e-6)
        self.assertEqual(emb.model.lookup({"t": jnp.array([])})["t"].shape, (0, DIM))

    def test_a_learning_rate_of_the_step(self):
        emb = self.make()
        step = emb.send({"t": [1]})
        emb.receive(step)
        emb.update(step, {"t": np.ones((1, DIM))}, {"learning_rate": 0.25})
        self.assertEqual(emb.model.read_rows("t", [1]).tolist(), [[0.0] * DIM])

    def test_a_step_that_is_not_in_progress_is_refused(self):
        emb = self.make()
        step = emb.send({"t": [1]})
        with self.assertRaisesRegex(ValueError, rf"step 7 is not in progress; steps in progress: \[{step}\]"):
            emb.receive(7)

    def test_an_update_that_is_forgotten_or_refused_can_be_made(self):
        for pipelined in (False, True):
            emb = self.make(f"forgotten_{pipelined}", pipelined=pipelined)
            for _ in range(2 + pipelined):
                last = emb.send({"t": [1]})
            for step in range(last):
                emb.receive(step)
            with self.assertRaisesRegex(emberd.FailedPrecondition, f"step {last} .*step 0 has no update"):
                emb.receive(last)
            ones = {"t": jnp.ones((1, DIM))}
            if not pipelined:
                with self.assertRaisesRegex(ValueError, "nan"):
                    emb.update(0, {"t": ones["t"] * jnp.nan})
                with self.assertRaisesRegex(ValueError, "learning_rate"):
                    emb.update(0, ones, {"learning_rate": -1.0})
            for step in range(last):
                emb.update(step, ones)
            emb.receive(last)
            emb.update(last, ones)
            emb.finish()
            self.assertEqual(emb.model.read_rows("t", [1])[0, 0], 0.25 - (last + 1) * RATE)

    def test_batches_before_one_that_cannot_be_sent_have_their_turn(self):
        for pipelined in (False, True):
            emb = self.make(f"unsent_{pipelined}", pipelined=pipelined)
            for wrong, kind in (({"u": [1]}, emberd.InvalidArgument), ({"t": [0.5]}, TypeError)):
                steps = []
                with self.assertRaises(kind):
                    for step, _ in emb.prefetch([{"t": [1]}, {"t": [2]}, {"t": [3]}, wrong, {"t": [4]}], depth=4):
                        emb.update(step, {"t": jnp.ones_like(emb.receive(step)["t"])})
                        steps.append(step)
                self.assertEqual(len(steps), 3)
            emb.finish()
            self.assertEqual(emb.model.read_rows("t", range(1, 5))[:, 0].tolist(), [0.25 - 2 * RATE] * 3 + [0.25])

    def test_a_batch_that_was_sent_ahead_and_is_refused_says_why(self):
        emb = self.make()
        given = emb.prefetch([{"t": [1]}, {"t": [ROWS]}, {"t": [2]}], depth=3)
        step, _ = next(given)
        emb.update(step, {"t": jnp.ones_like(emb.receive(step)["t"])})
        with self.assertRaisesRegex(emberd.OutOfRange, str(ROWS)):
            emb.receive(next(given)[0])
        with self.assertRaisesRegex(ValueError, "step 2 is not in progress"):
            emb.receive(next(given)[0])
        step = emb.send({"t": [1]})
        self.assertEqual((step, emb.receive(step)["t"][0, 0]), (1, 0.25 - RATE))

    def test_a_checkpoint_is_gone_back_to(self):
        with tempfile.TemporaryDirectory() as folder, emberd.local(data=folder) as cluster, cluster.connect() as client:
            emb = emberd.jax.Embedding(client.declare(counting_model("best")), group="run")

            def train(steps):
                for _ in range(steps):
                    step = emb.send({"t": [1]})
                    emb.update(step, {"t": jnp.ones_like(emb.receive(step)["t"])})
                return emb.model.read_rows("t", [1])[0, 0]

            emb.request_checkpoint("best")
            self.assertEqual(train(1), -1)
            emb.wait_checkpoint("best")
            self.assertEqual(emb.checkpoints, {"best": ""})
            self.assertEqual(train(3), -4)
            emb.finish()
            for _ in range(2):
                client.restore("best", "best")
                emb.restart(1)
                self.assertEqual((emb.next_step, train(1)), (1, -2))
                with self.assertRaisesRegex(emberd.RowsLost, "at step 3.*are at step 2"):
                    emb.restart(3)
                self.assertEqual((emb.next_step, train(1)), (2, -3))
                emb.send({"t": [2]})  # is forgotten
            emb.restart(3)
            self.assertEqual(train(1), -4)
            emb.finish()

    def test_a_rank_or_a_size_alone_is_completed_by_jaxs(self):
        with unittest.mock.patch.multiple("jax", process_index=lambda: 1, process_count=lambda: 3):
            for given, whole in (((None, None), (1, 3)), ((None, 3), (1, 3)), ((2, None), (2, 3)), ((0, 2), (0, 2)), ((None, 1), (0, 1))):
                steps = self.make(rank=given[0], size=given[1])._behind()
                self.assertEqual((steps.rank, steps.size), whole, given)

    def test_two_ranks_make_one_batch(self):
        emb = self.make()
        emb.finish()
        other = self.cluster.connect()
        self.addCleanup(other.close)

        def rank(model, number):
            mine = emberd.jax.Embedding(model, "both", number, 2)
            for step, batch in mine.prefetch(batches(4, seed=number)):
                mine.update(step, {"t": jnp.ones_like(mine.receive(step)["t"])})
            mine.finish()

        thread = threading.Thread(target=rank, args=(other.model(emb.model.name), 1))
        thread.start()
        rank(emb.model, 0)
        thread.join()
        expected = np.full(ROWS, 0.25)
        for seed in (0, 1):
            for batch in batches(4, seed=seed):
                np.subtract.at(expected, batch["ids"]["t"], RATE)
        np.testing.assert_array_equal(emb.model.table("t")[:, 0], expected)


if __name__ == "__main__":
    main()
