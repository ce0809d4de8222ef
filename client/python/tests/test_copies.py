"""What holds a handle of the library: copied, pickled, closed while it is used. test_every_entry_point.py does it with all objects.

What this would catch: a handle that is copied by value and freed twice, which ends the process; a copy that trains instead of
its original.
"""

import copy
import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import unittest
import unittest.mock
import warnings

from cluster import ClusterTest, counting_model, emberd, has_torch, main

import numpy as np

import emberd.trainer  # noqa: E402

COPIES = (copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one)))


class CopiesTest(ClusterTest):
    def things(self):
        """One of each kind that has to do with the library."""
        model = self.declare()
        stream = model.train("things")
        self.addCleanup(stream.close)
        found = model.lookup({"t": [1, 2]}, train=True)
        gradients = stream.empty_gradients(found)
        return {"client": self.client, "model": model, "stream": stream, "lookup": found, "array": found["t"],
                "base": found["t"].base, "gradients": gradients, "handle": found._handle, "owned": found._handle.get(),
                "steps": emberd.steps.Steps(model, "g"), "trainer": emberd.trainer.Trainer(model, "g"),
                "cluster": self.cluster, "config": counting_model("c"), "ids": emberd.Ragged([1], [0, 1]),
                "error": emberd.NotFound("x"), "checkpoint": emberd.Checkpoints([], [])}

    def test_a_copy_is_one_of_its_own_or_refused(self):
        things = self.things()
        for name, thing in things.items():
            for copied in COPIES:
                with self.subTest(name):
                    try:
                        second = copied(thing)
                    except TypeError as error:
                        self.assertRegex(str(error), "cannot (be copied|pickle)")
                        continue
                    self.assertIsNot(second, thing)
                    if isinstance(second, (emberd.Client, emberd.Model)):
                        (second if name == "client" else second.client).status()
                    del second
        np.testing.assert_array_equal(things["array"], copy.deepcopy(things["array"]))
        things["lookup"].release()
        things["stream"].lookup({"t": [1]})
        things["stream"].update({"t": np.ones((1, 4))})
        self.assertEqual(things["model"].read_rows("t", [1])[0, 0], -1)

    def test_another_thread_may_connect_while_a_copy_looks_for_its_client(self):
        """Would catch: "Set changed size during iteration"."""
        class Changing(list):  # as a set to which another thread adds
            tries = 0

            def __iter__(self):
                self.tries += 1
                if self.tries == 1:
                    raise RuntimeError("Set changed size during iteration")
                return super().__iter__()
        with unittest.mock.patch("emberd.client._clients", Changing([self.client])):
            self.assertIs(emberd.client.open_client(self.client.addresses), self.client)

    def test_closing_while_another_thread_waits_is_safe(self):
        model = self.declare()
        for _ in range(20):
            with self.cluster.connect() as client:
                stream = client.model(model.name).train("waits")
                stream.lookup({"t": [1]})
                seen = []

                def wait():
                    try:
                        stream.receive_lookup()
                    except Exception as error:
                        seen.append(error)

                stream.send_update({})
                stream.send_lookup({"t": [1]})
                threads = [threading.Thread(target=wait) for _ in range(2)]
                for one in threads:
                    one.start()
                stream.close()
                for one in threads:
                    one.join(600)
                    self.assertFalse(one.is_alive())
        self.client.status()

    def test_a_child_forked_inside_of_local_ends_by_itself(self):
        forks = ("import emberd, os, sys\n"
                 "with emberd.local(shards=1) as cluster, cluster.connect() as client:\n"
                 "    client.status()\n"
                 "    child = os.fork()\n"
                 "    if child == 0: sys.exit(7)\n"
                 "    code = os.waitpid(child, 0)[1]\n"
                 "    client.status()\n"
                 "    sys.exit(os.waitstatus_to_exitcode(code))\n")
        path = os.path.dirname(os.path.dirname(emberd.__file__))
        done = subprocess.run([sys.executable, "-c", forks], timeout=600, env={**os.environ, "PYTHONPATH": path})
        self.assertEqual(done.returncode, 7)

    def test_garbage_that_a_forked_child_finds_at_once_is_not_freed_there(self):
        """Before the package hears of the fork: it would free a connection whose threads are not there, and wait for them for ever."""
        forks = ("import gc, os, sys\n"
                 "os.register_at_fork(after_in_child=gc.collect)\n"
                 "import emberd\n"
                 "gc.disable()\n"
                 "with emberd.local(shards=1) as cluster:\n"
                 "    kept = [cluster.connect()]\n"
                 "    kept[0].status()\n"
                 "    kept[0].cycle = kept\n"
                 "    del kept\n"
                 "    child = os.fork()\n"
                 "    if child == 0: os._exit(7)\n"
                 "    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n")
        path = os.path.dirname(os.path.dirname(emberd.__file__))
        process = subprocess.Popen([sys.executable, "-c", forks], start_new_session=True, env={**os.environ, "PYTHONPATH": path})
        try:
            self.assertEqual(process.wait(600), 7)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the child, too
            raise


def saved(one):
    import torch
    file = io.BytesIO()
    torch.save(one, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@unittest.skipUnless(has_torch(), "SKIP: PyTorch is not installed")
class TorchCopiesTest(ClusterTest):
    def make(self, **options):
        import torch

        import emberd.torch
        name = self.id().split(".")[-1]
        ebc = emberd.torch.EmbeddingBagCollection(counting_model(name).tables, client=self.client, model=name, **options)
        self.addCleanup(ebc.finish)
        return torch, ebc

    def test_a_module_is_copied_after_a_step(self):
        for accumulate in (False, True):
            torch, ebc = self.make(accumulate=accumulate)
            net = torch.nn.Sequential(ebc)
            sparse = ebc.optimizer(lr=0.5)
            ids = {"t": torch.tensor([1])}
            for made in (0, 1, 2):
                before = ebc(ids)["t"][0, 0].item()
                ebc(ids)["t"].sum().backward() if accumulate else None
                for copied in (*COPIES[1:], saved):
                    second = copied(net)
                    self.assertEqual(second.eval()(ids)["t"][0, 0].item(), before)
                    again = copied(sparse)
                    self.assertEqual((again.param_groups[0]["lr"], again.collection is ebc), (0.5, False))
                sparse.step() if accumulate else ebc(ids)["t"].sum().backward() or sparse.step()
                sparse.zero_grad()
            ebc.finish()
            trained = copy.deepcopy(net)[0]
            self.assertEqual(trained.next_step, ebc.next_step)
            trained.finish()

    def test_a_copy_stays_at_its_step(self):
        """What it holds of the dense part is of that step: it is no state of the tables of later ones, and does not train them."""
        torch, ebc = self.make()
        sparse, ids = ebc.optimizer(lr=0.5), {"t": torch.tensor([1])}
        kept = []
        for step in range(4):
            ebc(ids)["t"].sum().backward()
            if step == 2:
                kept = [copied(ebc) for copied in (*COPIES[1:], saved)]
            sparse.step()
        for best in kept:
            self.assertEqual(best.state_dict()["_extra_state"]["next_step"], 2)
            self.assertEqual(copy.deepcopy(best).state_dict()["_extra_state"]["next_step"], 2)
            self.assertEqual(ebc.next_step, 4)
            with self.assertWarnsRegex(UserWarning, "dense part is at step 2, .* trained for 4 steps or more.*no rows of its own: keep those of a step by save_checkpoint") as said:
                best.eval()(ids)  # as the best of the nets that were kept: its dense part is, and the rows are not
            self.assertEqual(os.path.basename(said.filename), "test_copies.py")
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                best(ids)  # it is said once
            best.train()
            with self.assertRaisesRegex(RuntimeError, "dense part is at step 2.*are at step 4"):
                ebc.load_state_dict(best.state_dict())
            ebc.finish()
            with self.assertRaisesRegex(emberd.RowsLost, "dense part is at step 2.*are at step 4"):
                best(ids)
        self.assertEqual(ebc.next_step, 4)

    def test_a_module_that_was_pickled_before_it_had_a_lock_looks_up(self):
        torch, ebc = self.make()

        def without(one, *names):
            made = type(one).__new__(type(one))
            made.__setstate__({name: value for name, value in one.__getstate__().items() if name not in names})
            return made

        old = without(ebc, "_lock", "_has_warned")
        old._steps = without(ebc._steps, "_unread")
        self.addCleanup(old.finish)
        with torch.no_grad():
            self.assertEqual(old({"t": torch.tensor([1])})["t"].tolist(), [[0] * 4])
        old({"t": torch.tensor([1])})["t"].sum().backward()
        old.optimizer().step()
        self.assertEqual(old.state_dict()["_extra_state"]["next_step"], 1)

    def test_an_average_of_a_module_looks_up(self):
        torch, ebc = self.make()
        net = torch.nn.Sequential(ebc)
        net.register_parameter("bias", torch.nn.Parameter(torch.zeros(1)))  # newer versions of torch average no net without any
        sparse = ebc.optimizer()
        ids = {"t": torch.tensor([1])}
        ebc(ids)["t"].sum().backward()
        sparse.step()
        average = torch.optim.swa_utils.AveragedModel(net)
        for _ in range(2):
            ebc(ids)["t"].sum().backward()
            sparse.step()
            average.update_parameters(net)
        self.assertEqual(average.eval()(ids)["t"][0, 0].item(), -3)
        self.assertEqual(average.state_dict()["module.0._extra_state"]["next_step"], 1)
        average.module[0].set_extra_state(ebc.get_extra_state())
        state = average.state_dict()
        ebc.finish()
        again = torch.nn.Sequential(copy.deepcopy(ebc))
        again.register_parameter("bias", torch.nn.Parameter(torch.zeros(1)))
        again = torch.optim.swa_utils.AveragedModel(again)
        again.load_state_dict(state)
        self.assertEqual(again.train()(ids)["t"][0, 0].item(), -3)
        again.module[0].finish()
        self.assertEqual(ebc.next_step, 3)


if __name__ == "__main__":
    main()
