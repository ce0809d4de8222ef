"""What goes wrong in a loop of Keras: a batch that fails, Ctrl-C, losses that are scaled, weights of another step; and learning rates of tables
that share one; and datasets whose features are ragged tensors or named tuples. KERAS_BACKEND says on which backend.

What this would catch: a model that is gone after an error, an error or an interrupt that comes to somebody else, later or
never, gradients that are not those of the loss, and the rate of one table for another.
"""

import collections
import contextlib
import functools
import json
import os
import signal
import sys
import tempfile
import threading
import unittest
import unittest.mock
import warnings

from cluster import emberd, main

from test_keras import Case  # skips where there is no Keras

import keras
import numpy as np


class FaultsTest(Case):
    def test_losses_that_are_scaled_are_refused(self):
        ids, label = np.ones((8, 2), np.int32), np.zeros((8, 4), np.float32)

        class Around(keras.Model):
            """Its step is that of another model."""

            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def call(self, inputs, training=False):
                return self.inner(inputs, training=training)

        self.addCleanup(keras.config.set_dtype_policy, "float32")
        for policy, optimizer, said in (
                ("mixed_float16", {}, "dtype: mixed_float16 is not allowed.*mixed_bfloat16"),
                ("float32", {"loss_scale_factor": 100.0}, "loss_scale_factor=100.0 in the optimizer of model"),
                ("float32", None, "a LossScaleOptimizer in the optimizer"), ("mixed_bfloat16", {}, None)):
            for kind in (lambda net: net, Around):
                keras.config.set_dtype_policy(policy)
                layer = self.make(model=f"scaled_{len(self.client.models())}")
                net = kind(self.net(layer))
                sgd = keras.optimizers.SGD(0.1, **(optimizer or {}))
                net.compile(optimizer=sgd if optimizer is not None else keras.optimizers.LossScaleOptimizer(sgd),
                            loss=self.net(layer).loss)
                with self.subTest(policy=policy, said=said, kind=kind):
                    with self.assertRaisesRegex(Exception, said) if said else contextlib.nullcontext():
                        net.fit(ids, label, batch_size=8, verbose=0)
                    if not said:
                        self.assertEqual(layer.tables.table("t")[1, 0], -0.5 * 16)
        keras.config.set_dtype_policy("mixed_float16")
        for trainable in (True, False):  # what is not trained is scaled by nobody
            layer = self.make(model=f"only_looked_up_{trainable}", table=self.table(initializer="ones"), trainable=trainable)
            net = self.net(layer)
            self.assertEqual(net.predict(ids, verbose=0)[0, 0], 2)
            net.evaluate(ids, label, verbose=0)
            net.compile(optimizer="sgd", loss=net.loss)
            if not trainable:
                net.fit(ids, label, batch_size=8, verbose=0)
        layer = self.make(model="not_scaled", dtype="float32")
        net = self.net(layer)
        net.compile(optimizer=keras.optimizers.SGD(0.1), loss=net.loss, auto_scale_loss=False)
        net.fit(ids, label, batch_size=8, verbose=0)
        self.assertEqual(layer.tables.table("t")[1, 0], -0.5 * 16)

    def test_a_layer_that_is_called_twice_for_a_part_of_a_step_says_so(self):
        layer = self.make(table=self.table(optimizer=keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)))

        class Twice(keras.Model):
            def __init__(self):
                super().__init__()
                self.layer = layer

            def call(self, inputs, training=False):
                return self.layer(inputs, training=training) + 3 * self.layer(1 + inputs, training=training)

        net = Twice()
        net.compile(optimizer=keras.optimizers.SGD(0.1), loss=self.net(layer).loss)
        with self.assertRaisesRegex(Exception, "has one lookup, of all features, and one gradient"):
            net.train_on_batch(np.ones((8, 2), np.int32), np.zeros((8, 4), np.float32))
            layer.next_step
        for _ in range(2):  # a step without them
            self.net(layer).train_on_batch(np.full((8, 2), 3, np.int32), np.zeros((8, 4), np.float32))
        layer.finish()
        self.assertEqual(layer.tables.read_rows("t", [1, 2, 3])[:, 0].tolist(), [0, 0, -0.5 * 16])

    def test_a_gradient_is_not_that_of_a_later_call(self):
        """Its rows were those of the later call, whose own gradient was never asked for."""
        layer = self.make(table=self.table(optimizer=keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)))
        one, two, three = (layer.preprocess(np.full((8, 2), k, np.int32)) for k in (1, 2, 3))
        for first in (True, False):  # whether it says that it trains; in JAX it then begins anyhow
            what = "call" if first or keras.backend.backend() == "jax" else "step"
            said = f"a {what} has begun since.*has one lookup, of all features, and one gradient"
            with self.assertRaisesRegex(Exception, said):
                self.gradient_of(layer, one, two, training=first)
        for _ in range(2):
            self.gradient_of(layer, three, training=True)
        self.assertEqual((layer.next_step, layer.tables.read_rows("t", [1, 2, 3])[:, 0].tolist()), (1, [0, 0, -0.5 * 16]))

    def gradient_of(self, layer, inputs, later=None, **options):
        """Differentiates the sum of what comes out, as a loop of one's own does. later: of a call behind it that trains, of which nothing is differentiated."""
        layer.build()
        if keras.backend.backend() == "torch":
            loss = keras.ops.sum(layer(inputs, **options))
            if later is not None:
                layer(later, training=True)
            loss.backward()
        elif keras.backend.backend() == "tensorflow":
            import tensorflow

            with tensorflow.GradientTape() as tape:
                loss = keras.ops.sum(layer(inputs, **options))
            if later is not None:
                layer(later, training=True)
            tape.gradient(loss, layer.trainable_variables)
        else:
            import jax

            def loss_of(token):
                loss = keras.ops.sum(layer.stateless_call([token], [], inputs, **options)[0])
                return loss, None if later is None else layer.stateless_call([token], [], later, training=True)[0]

            jax.jit(jax.grad(loss_of, has_aux=True))(layer.token.value)

    def test_a_loop_of_ones_own_trains_without_saying_so(self):
        """As Keras's own layers, whose weights have a gradient whatever `training` is."""
        layer = self.make()
        ids = layer.preprocess(np.ones((8, 2), np.int32))
        for step, options in enumerate(({}, {"training": False}, {"training": True})):
            layer(ids)  # is no step
            self.assertEqual(layer.next_step, step)
            self.gradient_of(layer, ids, **options)
            self.assertEqual(layer.next_step, step + 1)
            self.assertEqual(layer.tables.read_rows("t", [1, 2])[:, 0].tolist(), [-0.5 * 16 * (step + 1), 0])
        for prepared, _ in layer.prefetch([np.ones((8, 2), np.int32)] * 2):
            self.gradient_of(layer, prepared)
        self.assertEqual((layer.next_step, layer.tables.read_rows("t", [1])[0, 0]), (5, -0.5 * 16 * 5))

        class Plain(keras.Model):
            """Keras does not tell its layers that it trains."""

            def __init__(self):
                super().__init__()
                self.layer = layer

            def call(self, inputs):
                return self.layer(inputs)

        net = Plain()
        net.compile(optimizer=keras.optimizers.SGD(0.1), loss=self.net(layer).loss)
        net.fit(np.ones((8, 2), np.int32), np.zeros((8, 4), np.float32), batch_size=8, verbose=0)
        net.predict(np.ones((8, 2), np.int32), verbose=0)
        self.assertEqual((layer.next_step, layer.tables.read_rows("t", [1])[0, 0]), (6, -0.5 * 16 * 6))

    def test_a_second_gradient_is_refused_without_saying_so_too(self):
        """It was another step of the tables, beside that of the first."""
        layer, ids = self.make(), np.ones((8, 2), np.int32)

        class Twice(keras.Model):
            def __init__(self):
                super().__init__()
                self.layer = layer

            def call(self, inputs):
                return self.layer(inputs) + 3 * self.layer(1 + inputs)

        net = Twice()
        net.compile(optimizer=keras.optimizers.SGD(0.1), loss=self.net(layer).loss)
        with self.assertRaisesRegex(Exception, "A step has one lookup, of all features"):
            net.train_on_batch(ids, np.zeros((8, 4), np.float32))
            layer.next_step
        if keras.backend.backend() == "tensorflow":  # as of a program with two optimizers
            import tensorflow

            with tensorflow.GradientTape(persistent=True) as tape:
                loss = keras.ops.sum(layer(ids))
            step = layer.next_step
            tape.gradient(loss, layer.trainable_variables)
            with self.assertRaisesRegex(Exception, "A step has one lookup, of all features"):
                tape.gradient(loss, layer.trainable_variables)
            self.assertEqual(layer.next_step, step + 1)
        step, before = layer.next_step, layer.tables.read_rows("t", [3])[0, 0]
        self.gradient_of(layer, 2 + ids)
        self.assertEqual((layer.next_step, layer.tables.read_rows("t", [3])[0, 0]), (step + 1, before - 0.5 * 16))

    @unittest.skipIf(keras.backend.backend() == "jax", "JAX refuses it: see test_jax_in_jit.py")
    def test_a_forward_pass_that_is_made_again_is_the_same_step(self):
        """It was another one, so that schedules and Adam counted twice as many."""
        with keras.RematScope(mode="full"):
            layer = self.make(table=self.table(optimizer=keras.optimizers.Adam(0.5)))
        ids = layer.preprocess(np.ones((8, 2), np.int32))
        for training in (True, False):
            for _ in range(3):
                self.gradient_of(layer, ids, training=training)
        for sent, _ in layer.prefetch([(np.ones((8, 2), np.int32), None)] * 3):
            self.gradient_of(layer, sent, training=True)
        self.assertEqual(layer.next_step, 9)
        np.testing.assert_allclose(layer.tables.read_rows("t", [1, 2])[:, 0], [-0.5 * 9, 0], rtol=1e-5)  # equal gradients: Adam goes by the rate
        layer = self.make(model="parts", table=self.table(optimizer=keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)))

        class Around(keras.layers.Layer):
            """Whose gradient takes what comes out."""

            def build(self, shape=None):
                layer.build()
                self.layer, self.built = layer, True

            def call(self, inputs, training=False):
                return keras.ops.exp(layer(inputs, training=training))

        with keras.RematScope(mode="full"):
            around = Around()
        for row in range(4):  # two make a step
            self.gradient_of(around, np.full((8, 2), row, np.int32), training=row < 2)
        self.assertEqual((layer.next_step, layer.tables.read_rows("t", range(4))[:, 0].tolist()), (2, [-0.25 * 16] * 4))
        plain = self.make(model="again")
        for other in (1, 2, 2):  # the first is never updated; the others have the same ids, but the update of the first is between them
            ids = layer.preprocess(np.full((8, 2), other, np.int32))
            plain(ids, training=True)
            if other == 2:
                self.gradient_of(plain, ids, training=True)
        self.assertEqual((plain.next_step, plain.tables.read_rows("t", [1, 2])[:, 0].tolist()), (3, [0, -0.5 * 16 * 2]))

    @unittest.skipUnless(keras.backend.backend() == "tensorflow", "only tf.function has branches and loops of its own")
    def test_branches_and_loops_of_a_function_train_without_saying_so(self):
        """Ids out of the function were no tensors of the branch, so that its gradient could not be made."""
        import tensorflow as tf

        layer, ids = self.make(), tf.ones((8, 2), tf.int32)
        layer.build()

        @tf.function
        def train(branch, times):
            with tf.GradientTape() as tape:
                loss = tf.cond(branch, lambda: keras.ops.sum(layer(ids)), lambda: tf.constant(0.0))
                _, loss = tf.while_loop(lambda count, _: count < times, lambda count, so_far: (count + 1, so_far + keras.ops.sum(layer(1 + ids))), [0, loss])
            tape.gradient(loss, layer.token.value)

        for step, (branch, times) in enumerate([(True, 0), (False, 0), (False, 1), (True, 0)]):
            with self.subTest(step=step):
                train(tf.constant(branch), tf.constant(times))
                self.assertEqual((layer.next_step, layer.tables.read_rows("t", [1, 2])[:, 0].tolist()), (
                    (1, [-0.5 * 16, 0]), (1, [-0.5 * 16, 0]), (2, [-0.5 * 16, -0.5 * 16]), (3, [-0.5 * 32, -0.5 * 16]))[step])

    def test_what_training_refuses_a_gradient_without_it_refuses_too(self):
        ids, weights = np.ones((8, 2), np.int32), keras.Variable(np.ones((8, 2), np.float32))
        layer = self.make(dtype="mixed_float16", model="scaled")
        layer(ids)
        with self.assertRaisesRegex(ValueError, "dtype: mixed_float16 is not allowed"):
            self.gradient_of(layer, ids)
        self.assertEqual(layer.next_step, 0)
        if keras.backend.backend() == "torch":
            layer = self.make(model="weighted")
            layer.build()
            loss = keras.ops.sum(layer(ids, weights=weights.value))
            with self.assertRaisesRegex(ValueError, "'t': weights: the loss is differentiated"):
                loss.backward()
            loss = keras.ops.sum(layer(ids))
            loss.backward(retain_graph=True)
            with self.assertRaisesRegex(ValueError, "is not in progress"):
                loss.backward()
            self.assertEqual(layer.next_step, 1)

    def test_weights_of_another_step_are_loaded_with_a_warning(self):
        layer = self.make(table=self.table(initializer="ones"))
        ids, label = np.ones((8, 2), np.int32), np.zeros((8, 4), np.float32)
        net = self.net(layer)
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            path = os.path.join(folder, "of.weights.h5")
            net.fit(ids, label, batch_size=8, epochs=2, verbose=0)
            net.save_weights(path)
            net.load_weights(path)
            again, same = (self.net(self.make(table=self.table(initializer="ones"))) for _ in range(2))
            for one in (again, same):
                one.layer.build()
                one.build((8, 2))
                one.load_weights(path)
                one.save_weights(path)
                self.assertFalse(one.layer._behind().joined)
            same.fit(ids, label, batch_size=8, verbose=0)
            same.layer.finish()
            with self.assertWarnsRegex(UserWarning, "weights of step 2 were loaded, and the tables of model 'test_.*' are at step 3"):
                again.fit(ids, label, batch_size=8, verbose=0)
            again.fit(ids, label, batch_size=8, verbose=0)
            with self.assertWarnsRegex(UserWarning, "weights of step 2 were loaded, and the tables of model .* are at step 5") as warned:
                again.load_weights(path)
            self.assertEqual(warned.filename, __file__)
            again.layer.finish()
            for loop in (lambda: reads.predict(ids, verbose=0), lambda: reads.evaluate(ids, label, verbose=0), lambda: reads.predict_on_batch(ids),
                         lambda: reads(ids)):
                reads = self.net(self.make(table=self.table(initializer="ones")))
                reads.layer.build()
                reads.build((8, 2))
                reads.load_weights(path)
                with self.assertWarnsRegex(UserWarning, "weights of step 2 were loaded, and the tables of model .* been trained for 5 steps or more") as warned:
                    loop()
                if keras.backend.backend() != "tensorflow":  # which calls from a thread of its own
                    self.assertRegex(os.path.basename(warned.filename), "^test_keras")  # or where Case.net calls the layer
                loop()
                reads.save_weights(path)  # of the step that they are of
            reads.fit(ids, label, batch_size=8, verbose=0)
            kept = {}
            layer.save_own_variables(kept)
            del kept["next_step"]
            layer.load_own_variables(kept)  # as those that were saved before there was one

    def test_a_model_stays_where_a_batch_fails(self):
        layer = self.make()
        net, ids, label = self.net(layer), np.full((8, 2), 31, np.int32), np.zeros((8, 4), np.float32)
        kind = IndexError if keras.backend.backend() == "jax" else Exception  # TensorFlow has an error of its own
        for count, loop in enumerate((
                lambda ids: net.fit(ids, label, batch_size=8, epochs=3, verbose=0), lambda ids: net.evaluate(ids, label, verbose=0),
                lambda ids: net.predict(ids, verbose=0),
                lambda ids: net.fit(ids - 1, label, batch_size=8, validation_data=(ids, label), verbose=0),
                lambda ids: net.train_on_batch(ids, label), lambda ids: net.test_on_batch(ids, label), net.predict_on_batch)):
            with self.subTest(count):
                with self.assertRaisesRegex(kind, "is 32"):
                    loop(ids + 1)
                loop(ids)
                self.assertEqual(net.predict(ids, verbose=0).shape, (8, 4))
        self.assertEqual(layer.next_step, 3 + 2 + 1)
        with self.assertRaisesRegex(IndexError, r"feature 't': id 32 is not allowed; table 't' has the rows \[0, 32\)"):
            layer.preprocess(ids + 1)

    @unittest.skipUnless(keras.backend.backend() == "jax", "the others lose nothing where a callback raises")
    def test_a_model_stays_where_jax_is_interrupted(self):
        layer = self.make(patience=0.1)
        net, ids, label = self.net(layer), np.ones((8, 2), np.int32), np.zeros((8, 4), np.float32)

        def during(owner, name, happens, loop, raises):
            method = getattr(owner, name)

            def first(*arguments, **options):
                happens()
                return method(*arguments, **options)

            with unittest.mock.patch.object(owner, name, first), self.assertRaises(raises):
                loop()
            self.assertEqual(net.predict(ids, verbose=0).shape, (8, 4))

        def press(times):
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

        def gone():
            raise emberd.Unavailable("nobody is there")

        def fit():
            net.fit(ids, label, batch_size=8, epochs=100, verbose=0)

        fit()
        once, twice = functools.partial(press, 1), functools.partial(press, 2)
        during(emberd.TrainStream, "receive_lookup", once, fit, KeyboardInterrupt)
        during(emberd.TrainStream, "send_update", once, lambda: net.train_on_batch(ids, label), KeyboardInterrupt)
        during(emberd.Model, "lookup", once, lambda: net.predict(ids, verbose=0), KeyboardInterrupt)
        during(emberd.Model, "lookup", once, lambda: net.evaluate(ids, label, verbose=0), KeyboardInterrupt)
        row = layer.tables.read_rows("t", [1])[0, 0]
        self.assertEqual((layer.next_step, row), (102, -102 * 8))  # steps that were begun have been made
        during(emberd.TrainStream, "receive_lookup", twice, fit, KeyboardInterrupt)
        during(emberd.TrainStream, "receive_lookup", gone, fit, ConnectionError)
        during(emberd.TrainStream, "send_update", gone, fit, ConnectionError)
        before, step = layer.tables.read_rows("t", [1])[0, 0], layer.next_step
        fit()
        row = layer.tables.read_rows("t", [1])[0, 0]
        self.assertEqual((layer.next_step, row), (step + 101, before - 100 * 8))  # that without its update was skipped

    @unittest.skipUnless(keras.backend.backend() == "jax", "the others lose nothing where a callback raises")
    def test_ctrl_c_is_never_lost_and_never_comes_later(self):
        layer = self.make()
        net, ids, label = self.net(layer), np.ones((8, 2), np.int32), np.zeros((8, 4), np.float32)
        trainer = sys.modules["keras.src.backend.jax.trainer"]
        steps = [lambda: net.train_on_batch(ids, label), lambda: net.test_on_batch(ids, label), lambda: net.predict_on_batch(ids)]
        loops = [lambda: net.fit(ids, label, batch_size=8, epochs=2, verbose=0), lambda: net.predict(ids, verbose=0),
                 lambda: net.evaluate(ids, label, verbose=0), *steps,
                 lambda: net.fit(ids, label, batch_size=8, validation_data=(ids, label), verbose=0)]
        handler = signal.getsignal(signal.SIGINT)
        for loop in loops:
            loop()
            self.assertIs(signal.getsignal(signal.SIGINT), handler)
        cases = [(type(net), "jax_state_sync", loop) for loop in loops]
        cases += [(type(layer.token), "assign", loop) for loop in loops[:-1]]  # within it
        cases += [(trainer, "pythonify_logs", loop) for loop in (loops[2], *steps[:2])]  # behind it
        cases += [(type(net), "get_metrics_result", loops[0]), (np, "concatenate", loops[1]), (np, "array", steps[2]), (type(net), "_purge_model_variables", loops[0])]
        for owner, name, loop in cases:
            method, pressed = getattr(owner, name), []

            def first(*arguments, **options):
                around, frame = [], sys._getframe()
                while frame is not None:
                    around.append((frame.f_globals.get("__name__"), frame.f_code.co_name))
                    frame = frame.f_back
                if not pressed and any(one[0] == trainer.__name__ for one in around) and (name != "assign" or any("sync" in one[1] for one in around)):
                    pressed.append(name)
                    signal.raise_signal(signal.SIGINT)
                return method(*arguments, **options)

            with self.subTest(name=name, loop=loops.index(loop)):
                with unittest.mock.patch.object(owner, name, first), self.assertRaises(KeyboardInterrupt):
                    loop()
                self.assertTrue(pressed)
                self.assertIs(signal.getsignal(signal.SIGINT), handler)
                for one in loops:
                    one()
        with unittest.mock.patch.object(net, "train_function", side_effect=MemoryError), self.assertRaises(MemoryError):
            net.train_on_batch(ids, label)
        for one in loops:
            one()
        self.assertIs(signal.getsignal(signal.SIGINT), handler)

    @unittest.skipUnless(keras.backend.backend() == "jax", "the others raise where they are called")
    def test_a_loop_is_not_told_of_failures_outside_of_it(self):
        layer, ids, label = self.make(), np.ones((8, 2), np.int32), np.zeros((8, 4), np.float32)
        net, other = self.net(layer), keras.Sequential([keras.layers.Dense(1)])
        net.fit(ids, label, batch_size=8, verbose=0)
        other.compile(optimizer="sgd", loss="mse")
        began, done, ended = threading.Event(), threading.Event(), []

        class Waiting(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                began.set()
                done.wait(600)

        def fit():
            other.fit(np.ones((8, 2), np.float32), np.ones((8, 1), np.float32), batch_size=8, verbose=0, callbacks=[Waiting()])
            ended.append(other)

        thread = threading.Thread(target=fit)
        thread.start()
        self.assertTrue(began.wait(600))
        try:
            with self.assertRaisesRegex(Exception, "is 32"):
                np.asarray(layer(keras.ops.convert_to_tensor(ids + 31)))
            with self.assertRaisesRegex(IndexError, "is 32"):
                net.predict(ids + 31, verbose=0)
        finally:
            done.set()
            thread.join()
        self.assertEqual(ended, [other])
        # As where JAX calls back on a thread of its own, which begins with what JAX calls.
        loops, told = type(layer._held.trainer._in_jit.loops), []
        hand_over = loops.hand_over

        def from_another(*given):
            thread = threading.Thread(target=lambda: told.append(hand_over(*given)))
            thread.start()
            thread.join()
            return told[-1]

        with unittest.mock.patch.object(loops, "hand_over", from_another), \
                unittest.mock.patch.object(sys.modules[loops.__module__], "_is_of_jax", lambda frame: True):
            for loop in (lambda: net.fit(ids + 31, label, batch_size=8, verbose=0), lambda: net.predict(ids + 31, verbose=0),
                         lambda: net.evaluate(ids + 31, label, verbose=0), lambda: net.train_on_batch(ids + 31, label)):
                with self.assertRaisesRegex(IndexError, "is 32"):
                    loop()
            self.assertEqual(told, [True] * 4)
            net.fit(ids, label, batch_size=8, verbose=0)
            self.assertFalse(loops(object()).hand_over(ValueError()))


    @unittest.skipIf(keras.backend.backend() != "tensorflow", "SKIP: of TensorFlow")
    def test_a_model_is_not_compiled_where_there_is_a_gpu(self):
        import tensorflow

        ids, label = np.ones((8, 2), np.int32), np.zeros((8, 4), np.float32)
        layer = self.make()
        net = self.net(layer)
        with unittest.mock.patch.object(tensorflow.config, "list_physical_devices", lambda kind=None: [unittest.mock.Mock(device_type="GPU")]):
            self.assertFalse(net.jit_compile)
        net.compile(optimizer=keras.optimizers.SGD(0.1), loss=net.loss, jit_compile=True)  # warns that it is not
        net.train_on_batch(ids, label)
        self.assertEqual(layer.tables.read_rows("t", [1])[0, 0], -0.5 * 16)


    @unittest.skipUnless(keras.backend.backend() == "torch", "SKIP: a trace is PyTorch's")
    def test_a_trace_is_refused(self):
        """Would catch: a traced model that gives the rows of the batch of its trace for whatever ids, in silence."""
        import torch

        net, ids = self.net(self.make(table=self.table(initializer="ones"))), torch.ones(8, 2, dtype=torch.int32)
        with torch.no_grad():
            self.assertEqual(float(net(ids).sum()), 8 * 4 * 2)
            with self.assertRaisesRegex(RuntimeError, "a trace would keep those of this batch: trace the dense part alone"):
                torch.jit.trace(net, ids)


    @unittest.skipUnless(keras.backend.backend() == "tensorflow", "SKIP: a SavedModel is TensorFlow's")
    def test_an_export_is_refused(self):
        """Would catch: a SavedModel that is written, and that no other process can run, traced before or while it is exported."""
        import tensorflow as tf

        net, ids = self.net(self.make(table=self.table(initializer="ones"))), np.ones((8, 2), np.int32)
        self.assertEqual(net.predict(ids, verbose=0).sum(), 8 * 4 * 2)
        module, traced = tf.Module(), [tf.TensorSpec((8, 2), tf.int32)]
        module.branch = tf.function(lambda given: tf.cond(given[0, 0] > 0, lambda: net(given), lambda: tf.zeros((8, 4))), traced)
        self.assertEqual(module.branch(ids).numpy().sum(), 8 * 4 * 2)
        with tempfile.TemporaryDirectory() as folder:
            for save in (lambda: net.export(folder, verbose=False, input_signature=traced), lambda: tf.saved_model.save(module, folder)):
                with self.assertRaisesRegex(ValueError, "no other process could run what is exported here: export the dense part alone"):
                    save()
                self.assertNotIn("saved_model.pb", os.listdir(folder))
            net.save(os.path.join(folder, "net.keras"))


class RatesTest(Case):
    """A stack has one rate."""

    def tables(self, optimizers, dims={}, **options):
        """A layer of tables of ones, which are updated with gradients of one. dims: of those that have not 4 columns."""
        tables = {name: self.table(name, dims.get(name, 4), initializer="ones", optimizer=optimizer) for name, optimizer in optimizers.items()}
        return self.make({name: emberd.keras.FeatureConfig(name, table, (8,), (8, table.embedding_dim)) for name, table in tables.items()}, **options)

    def moves(self, layer):
        """By how much a step moves each table."""

        class Sum(keras.Model):
            def __init__(self):
                super().__init__()
                self.layer = layer

            def call(self, inputs, training=False):
                return sum(keras.ops.sum(one, 1, keepdims=True) for one in self.layer(inputs, training=training).values())

        net = Sum()
        net.compile(optimizer=keras.optimizers.SGD(0.1), loss=lambda _, found: 8 * keras.ops.sum(found, 1))  # of which Keras takes the mean
        before = {name: layer.tables.read_rows(name, [1])[0, 0] for name in layer.tables.tables}
        net.train_on_batch({name: np.arange(8, dtype=np.int32) for name in before}, np.zeros(8, np.float32))
        layer.finish()
        return {name: round(float(before[name] - layer.tables.read_rows(name, [1])[0, 0]), 5) for name in before}

    def stacks(self, layer):
        return sorted(one["name"] for one in layer.tables.description["stacks"])

    def test_tables_of_a_stack_have_one_rate(self):
        def on(tables):
            emberd.keras.on_tables(keras.callbacks.ReduceLROnPlateau("loss"), layer, tables).set_model(None)

        layer = self.tables({name: keras.optimizers.SGD(0.5) for name in "ab"})
        self.assertEqual(self.stacks(layer), ["a_b"])
        for call in (lambda: layer.set_learning_rates({"a": 0.25}), lambda: layer.set_learning_rates({"a": 0.25, "b": 0}),
                     lambda: on(["b"])):
            with self.assertRaisesRegex(ValueError, "the tables 'a' and 'b' are not allowed, for they are in one stack.*table_stacking=None"):
                call()
        self.assertEqual(layer.learning_rates, {"a": 0.5, "b": 0.5})
        on(None)
        on(["b", "a"])
        layer.set_learning_rates({"a": 0.25, "b": 0.25})
        self.assertEqual(self.moves(layer), {"a": 0.25, "b": 0.25})
        layer = self.tables({name: keras.optimizers.SGD(0.5) for name in "ab"}, model="unstacked", table_stacking=None)
        layer.set_learning_rates({"a": 0.25})
        self.assertEqual(self.moves(layer), {"a": 0.25, "b": 0.5})

    def test_tables_with_different_schedules_are_not_stacked(self):
        def of(rate):
            return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(rate, 100, 0.5))

        layer = self.tables({"a": of(0.5), "b": of(0.25), "c": keras.optimizers.SGD(0.01)})  # the cluster's default rate
        self.assertEqual(self.moves(layer), {"a": 0.5, "b": 0.25, "c": 0.01})
        layer = self.tables({"a": of(0.5), "b": of(0.25)}, {"b": 3}, model="equally_wide_with_padding")
        self.assertEqual(self.moves(layer), {"a": 0.5, "b": 0.25})
        layer = self.tables({"a": of(0.5), "b": of(0.5)}, model="alike")
        self.assertEqual(self.stacks(layer), ["a_b"])
        self.assertEqual(self.moves(layer), {"a": 0.5, "b": 0.5})
        again = type(layer).from_config(layer.get_config())
        self.addCleanup(again.finish)
        self.assertEqual(self.stacks(again), ["a_b"])
        with self.assertRaisesRegex(ValueError, "table 'b': optimizer: a learning rate other than that of table 'a' is not allowed, for they are in one stack"):
            self.tables({"a": of(0.5), "b": of(0.25)}, model="by_hand", table_stacking=["a", "b"]).tables

    def test_saved_rates_are_those_of_their_tables(self):
        """Would catch: rates that change places where a layer lists its features in another order, and a rate that goes to another table in silence."""
        rates = {"a": 0.5, "b": 0.25}
        layer = self.tables({name: keras.optimizers.SGD(rate) for name, rate in rates.items()})
        layer.build()
        layer.set_learning_rates({"a": 0.125})
        saved = {}
        layer.save_own_variables(saved)
        turned = self.tables({name: keras.optimizers.SGD(rates[name]) for name in "ba"}, model="turned")
        turned.build()
        turned.load_own_variables(saved)
        self.assertEqual(turned.learning_rates, {"b": 0.25, "a": 0.125})
        self.assertEqual(self.moves(turned), {"b": 0.25, "a": 0.125})
        other = self.tables({name: keras.optimizers.SGD(0.5) for name in "ac"}, model="other", table_stacking=None)
        other.build()
        with self.assertRaisesRegex(ValueError, "the learning rates of a, b were saved; it has those of a, c"):
            other.load_own_variables(saved)
        self.assertEqual(other.learning_rates, {"a": 0.5, "c": 0.5})
        saved = {name: value for name, value in saved.items() if not name.startswith("learning_rates")}
        layer.load_own_variables({**saved, "learning_rates": np.array([1.0, 2.0])})  # as they were saved before
        self.assertEqual(layer.learning_rates, {"a": 1, "b": 2})

    def test_rates_of_a_model_that_is_there(self):
        layer = self.tables({"a": keras.optimizers.SGD(0.5), "b": keras.optimizers.SGD(0.5), "c": keras.optimizers.SGD(0.25)})
        model = layer.tables
        with self.assertRaisesRegex(ValueError, "table 'b': optimizer: a learning rate other than that of table 'a' is not allowed"):
            self.tables({"a": keras.optimizers.SGD(0.5), "b": keras.optimizers.SGD(0.0), "c": keras.optimizers.SGD(0.25)}, model=model).tables
        frozen = self.tables({"a": keras.optimizers.SGD(0.125), "b": keras.optimizers.SGD(0.125), "c": keras.optimizers.SGD(0.0)}, model=model, group="other")
        self.assertEqual(self.moves(frozen), {"a": 0.125, "b": 0.125, "c": 0})


Pair = collections.namedtuple("Pair", "left right")


class DatasetsTest(Case):
    def test_features_in_a_named_tuple(self):
        """Which Python makes of its parts one by one, and not of a list."""
        table = self.table()
        layer = self.make(Pair(*(emberd.keras.FeatureConfig(name, table, (8, 2), (8, 4)) for name in Pair._fields)))
        self.assertEqual(layer.compute_output_shape(None), Pair((8, 4), (8, 4)))

        class Net(keras.Model):
            def __init__(self):
                super().__init__()
                self.layer = layer

            def call(self, inputs, training=False):
                found = self.layer(inputs, training=training)
                return found.left + 2 * found.right

        net = Net()
        net.compile(optimizer=keras.optimizers.SGD(0.1), loss=lambda label, found: keras.ops.sum(found))
        net.fit(Pair(np.full((8, 2), 1), np.full((8, 2), 2)), np.zeros((8, 4), np.float32), batch_size=8, verbose=0)
        self.assertEqual(layer.tables.table("t")[:4, 0].tolist(), [0, -8, -16, 0])
        again = type(layer).from_config(layer.get_config())
        saved = json.loads(json.dumps(keras.saving.serialize_keras_object(layer)))  # of a named tuple, JSON makes a list
        for loaded in (again, keras.saving.deserialize_keras_object(saved)):
            found = loaded(Pair(np.ones((1, 1), np.int32), np.full((1, 1), 2)))
            self.assertEqual((np.asarray(found.right).tolist(), type(found).__name__, found._fields), ([[-16] * 4], "Pair", Pair._fields))

    def test_a_layer_with_a_declared_model_is_loaded_with_it(self):
        """Its tables differ from those that the layer would declare."""
        table = emberd.TableConfig("t", 32, 4, combiner="sum", initializer=emberd.RowId(), optimizer=emberd.SGD(0.5))
        model = self.client.declare(emberd.ModelConfig("is_there", [table], [emberd.FeatureConfig("t", "t")]))
        layer = self.make(table=self.table(optimizer=keras.optimizers.SGD(0.25)), model=model)
        saved = json.loads(json.dumps(keras.saving.serialize_keras_object(layer)))
        again = type(layer).from_config({**layer.get_config(), "client": self.client})
        for place, loaded in enumerate((again, type(layer).from_config(again.get_config()), keras.saving.deserialize_keras_object(saved))):
            self.addCleanup(loaded.finish)
            self.net(loaded).train_on_batch(np.full((8, 2), 20), np.zeros((8, 4), np.float32))
            self.assertEqual((loaded.tables.name, model.read_rows("t", [20])[0, 0]), ("is_there", 20 - (place + 1) * 16 * 0.25))
            loaded.finish()

    def test_ids_of_emberd_say_what_to_write(self):
        for ids in (emberd.Ragged.from_lists([[1, 2], [3]]), emberd.Sequences([[1, 2]])):
            with self.assertRaisesRegex(TypeError, f"feature 't': a {type(ids).__name__} is not allowed; give a list of ids for each sample, or a tf.RaggedTensor"):
                self.make().preprocess(ids)

    def test_masked_weights_are_refused(self):
        layer, ids = self.make(), np.ones((2, 2), np.int32)
        weights = np.ma.array(np.ones((2, 2), np.float32), mask=[[0, 1], [0, 0]])
        for given, masked in ((ids, weights), (list(ids), list(weights)), (list(ids), weights)):
            with self.assertRaisesRegex(TypeError, "feature 't': weights: a masked array is not allowed"):
                layer.preprocess(given, masked)

    def test_the_largest_of_no_ids_is_zero(self):
        for shape in ((), (2,)):
            with self.subTest(shape):
                features = emberd.keras.FeatureConfig("t", self.table(combiner="max", initializer="ones"), (4, *shape, None), (4, *shape, 4))
                layer = self.make(features, model=f"largest_of_none_{len(shape)}")
                ids, label = np.zeros((4, *shape, 0), np.int32), np.zeros((4, *shape, 4), np.float32)
                self.assertEqual(keras.ops.convert_to_numpy(layer(layer.preprocess(ids))).tolist(), label.tolist())
                self.assertEqual(self.net(layer).train_on_batch(ids, label), 0)
                self.assertEqual((layer.next_step, layer.tables.table("t").min()), (1, 1))

    @unittest.skipUnless(keras.backend.backend() == "tensorflow", "SKIP: only TensorFlow has ragged tensors")
    def test_ragged_tensors_of_a_dataset(self):
        import tensorflow as tf

        ids = tf.ragged.constant([[1, 2], [], [3, 1, 1], [4], [], []], dtype=tf.int64)
        for combiner, rows in (("sum", [0, -1.5, -0.5, -0.5, -0.5]), ("max", [0, -0.5, 0, -0.5, -0.5])):
            layer = self.make(model=f"ragged_{combiner}", table=self.table(combiner=combiner))
            net = self.net(layer)
            data = tf.data.Dataset.from_tensor_slices((ids, np.zeros((6, 4), np.float32))).batch(2)
            net.fit(data, verbose=0)
            self.assertEqual(layer.tables.table("t")[:5, 0].tolist(), rows)
            self.assertEqual(net.predict(data, verbose=0)[:, 0].tolist(), [-2, 0, -3.5, -0.5, 0, 0] if combiner == "sum" else [0, 0, -0.5, -0.5, 0, 0])

        layer = self.make(table=self.table(initializer="ones"))
        look_up = tf.function(lambda ids, weights=None: layer(ids, weights))
        ids, weights = tf.ragged.constant([[1, 2], [3]]), tf.ragged.constant([[1.0, 2.0], [0.5]])
        self.assertEqual(look_up(ids, weights)[:, 0].numpy().tolist(), [3, 0.5])
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "feature .*t.*: weights: there must be one for each id"):
            look_up(ids, tf.ragged.constant([[1.0], [2.0, 0.5]]))
        with self.assertRaisesRegex(TypeError, "feature 't': float32 is not allowed; ids are int32"):
            look_up(weights)
        with self.assertRaisesRegex(ValueError, "feature 't': weights: a .* is not allowed for a RaggedTensor"):
            look_up(ids, tf.ones((2, 2)))


if __name__ == "__main__":
    main()
