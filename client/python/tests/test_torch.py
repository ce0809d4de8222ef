"""emberd.torch on a real cluster, against torch.nn in this process.

What this would catch: a step that is lost, doubled or not dropped, ranks that do not end with the tables of one rank, a
learning rate that does not arrive, and activations that autograd or an optimizer treats otherwise than torch.nn's.
"""

import hashlib
import os
import re
import signal
import sys
import tempfile
import threading
import unittest
import unittest.mock
import warnings

import numpy as np

from cluster import ClusterTest, emberd, main
from test_train import coordinator

try:
    import torch
except ImportError:
    print("SKIP: PyTorch is not installed (deploy/packages.txt: python3-torch)")
    sys.exit(77)

import emberd.torch  # noqa: E402
from emberd._jagged import pass_to_weights  # noqa: E402

warnings.filterwarnings("ignore", category=UserWarning, module="torch")


def tables(*names, dim=4, rows=64, **options):
    options = {"combiner": "sum", "initializer": emberd.Zeros(), "optimizer": emberd.SGD(learning_rate=1.0), **options}
    return [emberd.TableConfig(name, rows, dim, **options) for name in names]


def sha(model):
    digest = hashlib.sha256()
    for table in model.tables:
        digest.update(model.table(table).tobytes())
    return digest.hexdigest()


class Jagged:
    """Two samples of two features with weights."""

    def keys(self):
        return ["a", "b"]

    def values(self):
        return torch.tensor([1, 2, 3, 4])

    def lengths(self):
        return torch.tensor([2, 0, 1, 1])

    def weights_or_none(self):
        return torch.tensor([1.0, 2.0, 3.0, 4.0])


def scaler(**options):
    """A GradScaler on the CPU. Before PyTorch 2.3 there is none: what it does to gradients is then done here, and who makes
    a step is decided there."""
    if hasattr(torch.amp, "GradScaler"):
        return torch.amp.GradScaler("cpu", **options)
    import torch.cuda.amp.grad_scaler as module

    class Scaler(module.GradScaler):
        def scale(self, loss):
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(loss.device)
            return loss * self._scale

        def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        found_inf += float(not torch.isfinite(parameter.grad).all())
                        parameter.grad.mul_(inv_scale)
            return {found_inf.device: found_inf}

        def update(self):
            self._per_optimizer_states.clear()

    with unittest.mock.patch.object(module, "amp_definitely_not_available", return_value=False):
        return Scaler(**options)


class Case(ClusterTest):
    def make(self, *names, described=None, **options):
        name = options.pop("model", self.id().split(".")[-1])
        ebc = emberd.torch.EmbeddingBagCollection(described or tables(*(names or "t")), client=self.client, model=name,
                                                  **options)
        self.addCleanup(ebc.finish)
        return ebc


class ModuleTest(Case):
    def test_a_model_learns_as_with_torch_nn(self):
        torch.manual_seed(5)
        rows, dim, rate = 50, 8, 0.1
        users = tables("user", "item", rows=rows, dim=dim, combiner="mean",
                       optimizer=emberd.Adagrad(learning_rate=rate, initial_accumulator=0.1))
        ebc = self.make(described=users)
        sparse = ebc.optimizer()
        bags = {name: torch.nn.EmbeddingBag(rows, dim, mode="mean", sparse=True) for name in ("user", "item")}
        for name, bag in bags.items():
            ebc.model.assign_rows(name, range(rows), bag.weight.detach())
        plain = torch.optim.Adagrad([bag.weight for bag in bags.values()], lr=rate, initial_accumulator_value=0.1,
                                    eps=0.0)
        nets = [torch.nn.Linear(2 * dim, 1) for _ in range(2)]
        nets[1].load_state_dict(nets[0].state_dict())
        dense = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
        for _ in range(10):
            ids = {name: torch.randint(0, rows, (16, 3)) for name in bags}
            label = torch.rand(16, 1)
            losses = []
            for net, opts, found in ((nets[0], (dense[0], sparse), ebc(ids)),
                                     (nets[1], (dense[1], plain), {name: bags[name](ids[name]) for name in bags})):
                loss = torch.nn.functional.mse_loss(net(torch.cat([found["user"], found["item"]], 1)), label)
                loss.backward()
                for opt in opts:
                    opt.step()
                    opt.zero_grad()
                losses.append(float(loss))
            self.assertAlmostEqual(losses[0], losses[1], places=6)
        for name, bag in bags.items():
            torch.testing.assert_close(torch.from_numpy(ebc.model.table(name)), bag.weight.detach(), atol=1e-5, rtol=1e-5)

    def test_activations_are_leaves_and_tables_no_parameters(self):
        ebc = self.make()
        self.assertEqual(list(ebc.parameters()), [])
        found = ebc({"t": torch.tensor([1, 2])})["t"]
        self.assertTrue(found.is_leaf and found.requires_grad)
        (found * 2).sum().backward()
        (found * 3).sum().backward()
        self.assertEqual(found.grad.tolist(), [[5] * 4] * 2)

    def test_gradients_of_a_feature_that_was_not_used_are_zero(self):
        ebc = self.make("a", "b")
        sparse = ebc.optimizer()
        ebc({"a": torch.tensor([1]), "b": torch.tensor([1])})["a"].sum().backward()
        sparse.step()
        self.assertEqual(ebc.model.read_rows("a", [1]).tolist(), [[-1] * 4])
        self.assertEqual(ebc.model.read_rows("b", [1]).tolist(), [[0] * 4])

    def test_features_that_share_a_table(self):
        ebc = self.make(described=tables("t"), features=[emberd.FeatureConfig("x", "t"), emberd.FeatureConfig("y", "t")])
        sparse = ebc.optimizer()
        found = ebc({"x": torch.tensor([1]), "y": emberd.Ragged(torch.tensor([1, 2]), torch.tensor([0, 2]))})
        (found["x"] + found["y"]).sum().backward()
        sparse.step()
        self.assertEqual(ebc.model.read_rows("t", [1, 2])[:, 0].tolist(), [-2, -1])

    def test_evaluation_is_no_step(self):
        ebc = self.make()
        sparse = ebc.optimizer()
        ids = {"t": torch.tensor([1])}
        ebc(ids)["t"].sum().backward()
        sparse.step()
        with torch.no_grad():
            self.assertFalse(ebc(ids)["t"].requires_grad)
        ebc.eval()
        self.assertEqual(ebc(ids)["t"].tolist(), [[-1] * 4])
        ebc.train()
        self.assertEqual(ebc.next_step, 1)

    def test_evaluation_on_another_thread(self):
        for options in ({}, {"pipelined": True}, {"accumulate": True}):
            ebc = self.make(model=f"threads_{'_'.join(options)}", **options)
            sparse, ids = ebc.optimizer(), {"t": torch.tensor([1])}
            seen, failed, ended = [], [], threading.Event()

            def evaluate(ebc=ebc, ids=ids, seen=seen, failed=failed, ended=ended):
                with torch.no_grad():
                    while not (failed or ended.is_set()):
                        try:
                            seen.append(ebc(ids)["t"][0, 0].item())
                            ebc.state_dict()
                        except Exception as error:
                            failed.append(error)

            thread = threading.Thread(target=evaluate)
            thread.start()
            try:
                for place in range(200):
                    ebc(ids)["t"].sum().backward()
                    sparse.step()
                    while place == 100 and not (seen or failed):
                        ended.wait(0.001)
            finally:
                ended.set()
                thread.join()
            ebc.finish()
            self.assertEqual((failed, ebc.next_step, ebc.model.read_rows("t", [1])[0, 0]), ([], 200, -200))
            self.assertTrue(seen)
            self.assertEqual(seen, sorted(seen, reverse=True))

    @unittest.skipUnless(hasattr(torch, "compile"), "SKIP: torch.compile needs PyTorch 2")
    def test_a_compiled_model_leaves_the_module_out(self):
        ebc = self.make("a", "b")
        sparse = ebc.optimizer()
        net = torch.compile(lambda ids: torch.cat(list(ebc(ids).values()), 1).sum(), backend="eager")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                net({"a": torch.tensor([1]), "b": torch.tensor([2])}).backward()
                sparse.step()
        self.assertEqual([ebc.model.read_rows(name, [row])[0, 0] for name, row in (("a", 1), ("b", 2))], [-2, -2])

    def test_a_model_that_is_there_is_looked_up_as_it_is(self):
        ebc = self.make(described=[emberd.TableConfig("t", 64, 4, optimizer=emberd.SGD(), initializer=emberd.RowId())])
        again = emberd.torch.EmbeddingBagCollection([emberd.TableConfig("t", 64, 4)], model=self.client.model(ebc.model.name)).eval()
        self.assertEqual(again({"t": torch.tensor([5])})["t"].tolist(), [[5] * 4])
        for described, features, said in (([emberd.TableConfig("t", 64, 8)], None, "'t' of 64 x 8 is not allowed; model .* has 64 x 4"),
                                          ([emberd.TableConfig("u", 64, 4)], None, "'u' of 64 x 4 is not allowed; model .* has the tables t"),
                                          ([emberd.TableConfig("t", 64, 4)], [emberd.FeatureConfig("f", "t")], "features: they must be those of model .*: t")):
            with self.assertRaisesRegex(ValueError, said):
                emberd.torch.EmbeddingBagCollection(described, model=ebc.model, features=features)
        with self.assertRaisesRegex(TypeError, "client: it must be given with the name of a model"):
            emberd.torch.EmbeddingBagCollection(described, model="m")

    def test_a_step_without_its_update_is_counted_and_changes_nothing(self):
        for prefetch in (False, True):
            ebc = self.make(model=f"skipped_{prefetch}")
            sparse = ebc.optimizer()
            batches = [{"ids": {"t": torch.tensor([k])}} for k in range(4)]
            for k, batch in enumerate(emberd.torch.Prefetcher(batches, ebc) if prefetch else batches):
                ebc(batch["ids"])["t"].sum().backward()
                sparse.zero_grad() if k == 1 else sparse.step()
            self.assertEqual(ebc.model.read_rows("t", range(5))[:, 0].tolist(), [-1, 0, -1, -1, 0])
            self.assertEqual(ebc.next_step, 4)

    def test_accumulated_calls_are_one_large_batch(self):
        torch.manual_seed(2)
        described = tables("a", "b", initializer=None, combiner="mean", optimizer=emberd.Adagrad(learning_rate=0.2))
        parts = self.make(described=described, model="parts", seed=1, accumulate=True)
        whole = self.make(described=described, model="whole", seed=1)
        optimizers = parts.optimizer(), whole.optimizer()
        for _ in range(3):
            dense = torch.randint(0, 64, (12, 2))
            ragged = [torch.randint(0, 64, (k % 4,)).tolist() for k in range(12)]
            batches = [{"a": dense[i:i + 3], "b": emberd.Ragged.from_lists(ragged[i:i + 3])} for i in range(0, 12, 3)]
            for batch in batches:
                found = parts(batch)
                (found["a"] * found["b"] + found["a"]).sum().backward()
            self.assertEqual(len(optimizers[0].param_groups[0]["params"]), 4)
            found = whole({"a": dense, "b": emberd.Ragged.from_lists(ragged)})
            (found["a"] * found["b"] + found["a"]).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        self.assertEqual(sha(parts.model), sha(whole.model))
        self.assertEqual(parts.next_step, 3)
        found = parts(batches[0])["a"].sum()
        found.backward(retain_graph=True)
        optimizers[0].zero_grad()  # as after an overflow: nothing is left of the call
        with self.assertRaisesRegex(RuntimeError, "no step to end"):
            optimizers[0].step()
        with self.assertRaisesRegex(RuntimeError, "ended or skipped, .*: each call has one step.. after its backward, or zero_grad.. that drops it"):
            found.backward()
        found = parts(batches[0])["a"].sum(), whole(batches[0])["a"].sum()
        for loss, optimizer in zip(found, optimizers):
            optimizer.zero_grad()  # between the call and its backward, as some write it
            self.assertEqual(len(optimizer.param_groups[0]["params"]), 1)
            loss.backward()
            optimizer.step()
        self.assertEqual(sha(parts.model), sha(whole.model))

    def test_a_call_whose_backward_never_comes_is_no_part_of_the_step(self):
        ebc = self.make(described=tables("t", optimizer=emberd.Momentum(learning_rate=1.0)), accumulate=True)
        sparse = ebc.optimizer()
        ebc({"t": torch.tensor([1])})["t"].sum().backward()
        sparse.step()
        trained = ebc.model.table("t")[1].tolist()
        for row in (2, 3):
            ebc({"t": torch.tensor([1])})  # as where a loss is not finite
            if row == 2:
                sparse.zero_grad()
            ebc({"t": torch.tensor([row])})["t"].sum().backward()
            sparse.step()
        self.assertEqual(ebc.model.table("t")[1:4].tolist(), [trained] * 3)  # its momentum would have moved row 1
        ebc({"t": torch.tensor([1])})
        sparse.zero_grad()
        with self.assertRaisesRegex(RuntimeError, "no step to end"):
            sparse.step()

    def test_wrong_ids_leave_a_module_that_goes_on(self):
        ebc = self.make()
        sparse = ebc.optimizer()
        batches = [{"ids": {"t": torch.tensor([k])}} for k in (1, 64, 2)]
        wrong = 0
        for batch in emberd.torch.Prefetcher(batches, ebc):
            try:
                ebc(batch["ids"])["t"].sum().backward()
                sparse.step()
            except IndexError as error:
                self.assertIn("64", str(error))
                wrong += 1
        self.assertEqual((wrong, ebc.next_step), (1, 2))
        self.assertEqual(ebc.model.read_rows("t", [1, 2])[:, 0].tolist(), [-1, -1])
        with self.assertRaisesRegex(RuntimeError, "no step to end"):
            sparse.step()

    def test_a_jagged_tensor_as_torchrec_has_it(self):
        ebc = self.make(described=tables("a", "b", dim=2, initializer=emberd.RowId()))
        found = ebc(Jagged())
        self.assertEqual((found.keys(), found.length_per_key()), (["a", "b"], [2, 2]))
        self.assertEqual(found.values().tolist(), [[5, 5, 9, 9], [0, 0, 16, 16]])
        found.values().sum().backward()
        ebc.optimizer().step()
        self.assertEqual(found.values().grad.tolist(), [[1] * 4] * 2)
        self.assertEqual(ebc.model.read_rows("b", [4])[0, 0], 0)

    def test_columns_are_in_the_order_of_the_features_whatever_that_of_a_batch_is(self):
        """A dense part knows columns by their places: a loader with another order of keys would feed it those of another feature."""
        from emberd.compat.jagged import KeyedJaggedTensor
        for name, options in (("steps", {}), ("parts", {"accumulate": True}), ("frozen", {})):
            ebc = self.make(model=f"order_{name}", described=tables("a", "b", dim=2, initializer=emberd.RowId()), **options)
            if name == "frozen":
                ebc.requires_grad_(False, tables=["a"])
            for keys, ids in ((["a", "b"], [1, 2]), (["b", "a"], [2, 1])):
                for module in (ebc.train(), ebc.eval()):
                    found = module(KeyedJaggedTensor(keys, torch.tensor(ids), lengths=torch.tensor([1, 1])))
                    self.assertEqual((found.keys(), found.values().tolist()), (["a", "b"], [[1, 1, 2, 2]]), (name, keys))

    def test_a_jagged_tensor_with_variable_batch_sizes_is_cut_by_them_or_refused(self):
        jagged = Jagged()
        jagged.stride_per_key = lambda: [2, 2]  # as torchrec has it where batches are of one size
        jagged.inverse_indices_or_none = lambda: None
        bags = self.make(described=tables("a", "b", dim=2, initializer=emberd.RowId()))
        self.assertEqual(bags.eval()(jagged).values().tolist(), [[5, 5, 9, 9], [0, 0, 16, 16]])
        collection = emberd.torch.EmbeddingCollection(list(bags.config.tables), model=bags.model)
        jagged.lengths, jagged.weights_or_none = lambda: torch.tensor([1, 1, 1, 1]), lambda: None
        jagged.stride_per_key = lambda: [1, 3]
        found = collection(jagged)
        self.assertEqual({name: (one.values()[:, 0].tolist(), one.lengths().tolist()) for name, one in found.items()},
                         {"a": ([1], [1]), "b": ([2, 3, 4], [1, 1, 1])})
        for module in (bags.train(), bags.eval()):
            with self.assertRaisesRegex(ValueError, "stride_per_key: {'a': 1, 'b': 3} are not allowed"):
                module(jagged)
        jagged.inverse_indices_or_none = lambda: (["a", "b"], torch.tensor([[0, 0, 0], [0, 1, 2]]))
        for module in (bags, collection):
            with self.assertRaisesRegex(ValueError, "inverse_indices: not allowed"):
                module(jagged)
        jagged.inverse_indices_or_none, jagged.stride_per_key = lambda: None, lambda: [1, 2]
        with self.assertRaisesRegex(ValueError, "4 in all"):
            collection(jagged)

    def test_embedding_bag_has_the_signature_of_torch_nn(self):
        plain = torch.nn.EmbeddingBag(20, 3, mode="mean")
        bag = emberd.torch.EmbeddingBag(20, 3, client=self.client, model="bag")
        self.addCleanup(bag.finish)
        bag.collection.model.assign_rows("weight", range(20), plain.weight.detach())
        bag.eval()
        flat, offsets = torch.tensor([1, 2, 4, 5, 4, 3]), torch.tensor([0, 2, 2])
        for arguments in ((torch.tensor([[1, 2], [4, 5]]),), (flat, offsets)):
            torch.testing.assert_close(bag(*arguments), plain(*arguments).detach(), atol=1e-6, rtol=1e-6)
        with self.assertRaisesRegex(ValueError, "mode: 'min' is not allowed; it must be 'mean', 'sum' or 'max'"):
            emberd.torch.EmbeddingBag(20, 3, client=self.client, model="bag", mode="min")

    def test_the_largest_of_a_bag_is_that_of_torch_nn(self):
        """Of equal rows the first gets the gradient; ids twice in a sample, in several samples, and samples without ids."""
        torch.manual_seed(3)
        plain = torch.nn.EmbeddingBag(20, 3, mode="max")
        with torch.no_grad():
            plain.weight[4:8] = plain.weight[3]
        bag = emberd.torch.EmbeddingBag(20, 3, client=self.client, model="largest", mode="max",
                                        table=emberd.TableConfig("weight", 20, 3, optimizer=emberd.Adagrad(initial_accumulator=0.1)))
        self.addCleanup(bag.finish)
        bag.collection.model.assign_rows("weight", range(20), plain.weight.detach())
        there, here = torch.optim.Adagrad(plain.parameters(), 0.5, initial_accumulator_value=0.1, eps=0), bag.optimizer(0.5)
        flat = torch.tensor([1, 7, 4, 3, 3, 2, 1, 19, 0, 19, 5, 6, 19])
        for arguments in ((torch.tensor([[7, 3, 4, 7], [1, 2, 3, 1]]),), (flat, torch.tensor([0, 4, 4, 5, 13])),
                          (flat[:1], torch.tensor([0, 0])), (flat, torch.tensor([0, 3]))):
            expected, found = plain(*arguments), bag(*arguments)
            self.assertTrue(torch.equal(found, expected), (found, expected))
            scale = torch.randn(expected.shape)
            for module, optimizer, result in ((plain, there, expected), (bag, here, found)):
                optimizer.zero_grad()
                (result * scale).sum().backward()
                optimizer.step()
            with torch.no_grad():
                torch.testing.assert_close(bag.collection.model.read_rows("weight", range(20)), plain.weight.numpy(), atol=1e-6, rtol=0)
                plain.weight.copy_(torch.from_numpy(bag.collection.model.read_rows("weight", range(20))))
        with torch.no_grad():
            self.assertEqual(bag(torch.zeros(2, 0, dtype=torch.int64)).tolist(), [[0] * 3] * 2)
        for arguments, said in (((flat,), r"input: the shape \[13\] is not allowed"),
                                ((flat, torch.tensor([0]), torch.ones(13)), "per_sample_weights: not allowed with mode 'max'")):
            with self.assertRaisesRegex(ValueError, said):
                bag(*arguments)

    def test_weights_get_the_gradient_of_torch_nn(self):
        plain = torch.nn.EmbeddingBag(20, 3, mode="sum")
        bag = emberd.torch.EmbeddingBag(20, 3, client=self.client, model="learned", mode="sum")
        self.addCleanup(bag.finish)
        sparse = bag.optimizer()
        bag.collection.model.assign_rows("weight", range(20), plain.weight.detach())
        given = torch.tensor([1, 2, 4, 5, 4, 3]), torch.tensor([0, 2, 2])
        scale = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
        gradients = []
        for module in (plain, bag):
            weights = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0, 1.5], requires_grad=True)
            (module(*given, per_sample_weights=weights * 2) * scale).sum().backward()
            gradients.append(weights.grad)
        torch.testing.assert_close(gradients[1], gradients[0])
        torch.testing.assert_close(bag.collection._leaves["weight"].grad, scale)
        sparse.zero_grad()

    def test_weights_get_a_gradient_with_each_combiner_and_container(self):
        rows = torch.arange(256.0).reshape(64, 4) / 64
        for combiner in ("sum", "mean", "sqrtn"):
            ebc = self.make(described=tables("a", "b", combiner=combiner), model=f"learned_{combiner}", accumulate=True)
            for name in "ab":
                ebc.model.assign_rows(name, range(64), rows)
            divisor = {"sum": lambda w: 1, "mean": lambda w: w.sum(), "sqrtn": lambda w: w.square().sum().sqrt()}[combiner]
            weights = [torch.arange(1.0, 5.0).requires_grad_() for _ in range(3)]
            first, second = weights[2][:2], weights[2][2:]
            jagged = Jagged()
            jagged.weights_or_none = lambda: weights[0]
            found = [ebc(jagged)["a"][0].sum(),
                     ebc({"a": emberd.Dense(torch.tensor([[1, 2]]), weights[1][:2].reshape(1, 2)),
                          "b": emberd.Dense(torch.tensor([3]), weights[1][2:3])})["a"].sum(),
                     (rows[1] * first[0] + rows[2] * first[1]).sum() / divisor(first) + 0 * second.sum()]
            for one in found:
                one.backward()
            for other in weights[:2]:
                torch.testing.assert_close(other.grad, weights[2].grad, atol=1e-5, rtol=1e-5)
            ebc.optimizer().zero_grad()
        ebc = self.make(model="learned_late", pipelined=True)
        with self.assertRaisesRegex(ValueError, "weights of 't'.*pipelined.*detach"):
            ebc({"t": emberd.Dense(torch.tensor([1]), torch.ones(1, requires_grad=True))})

    def test_small_weights_get_the_gradient_of_large_ones(self):
        rows = np.arange(8, dtype=np.float32).reshape(2, 4)
        ids = emberd.Ragged(np.array([0, 1]), np.array([0, 2, 2]))
        for scale in (1.0, 1e-21, 1e-25):
            weights = (torch.tensor([1.0, 2.0]) * scale).requires_grad_()
            pass_to_weights(torch.zeros(2, 4), weights, ids, (), "sqrtn", rows.__getitem__).sum().backward()
            torch.testing.assert_close(weights.grad * scale, torch.tensor([-4.0, 2.0]) / 5 ** 0.5)


class OptimizerTest(Case):
    def test_a_scheduler_sets_the_rate_of_each_step(self):
        ebc = self.make("a", "b")
        sparse = ebc.optimizer(lr=1.0)
        self.assertEqual([group["table"] for group in sparse.param_groups], ["a", "b"])
        scheduler = torch.optim.lr_scheduler.StepLR(sparse, step_size=1, gamma=0.5)
        for _ in range(3):
            found = ebc({"a": torch.tensor([1]), "b": torch.tensor([1])})
            (found["a"] + found["b"]).sum().backward()
            sparse.step()
            scheduler.step()
        self.assertEqual(ebc.model.read_rows("a", [1])[0, 0], -1.75)

    def test_activations_are_its_parameters_while_a_step_lasts(self):
        ebc = self.make()
        sparse = ebc.optimizer()
        found = ebc({"t": torch.tensor([1])})["t"]
        found.sum().backward()
        self.assertIs(sparse.param_groups[0]["params"][0], found)
        torch.nn.utils.clip_grad_norm_(sparse.param_groups[0]["params"], 1.0)
        sparse.step(lambda: None)
        self.assertAlmostEqual(ebc.model.read_rows("t", [1])[0, 0], -0.5, places=5)
        self.assertEqual(sparse.param_groups[0]["params"][0].numel(), 0)

    def test_columns_of_all_features_are_parameters_too(self):
        ebc = self.make("a", "b")
        sparse = ebc.optimizer()
        for _ in range(2):
            found = ebc(Jagged())
            (found["a"] + 2 * found["b"]).sum().backward()
            parts = {group["table"]: group["params"][0] for group in sparse.param_groups}
            self.assertEqual([part.grad.unique().tolist() for part in parts.values()], [[1], [2]])
            self.assertEqual(found.values().grad.unique().tolist(), [1, 2])
            torch.nn.utils.clip_grad_norm_(parts["b"], 0.0)
            sparse.step()
            sparse.zero_grad()
        self.assertEqual(ebc.model.read_rows("a", [1, 2])[:, 0].tolist(), [-2, -4])
        self.assertFalse(ebc.model.table("b").any())
        found = ebc(Jagged())
        found.values().sum().backward()
        sparse.zero_grad()
        self.assertIsNone(found.values().grad)
        with self.assertRaisesRegex(ValueError, "slice of a larger"):
            sparse.param_groups[0]["params"][0].grad = torch.zeros(2, 4)

    def test_an_overflow_leaves_rows_unchanged(self):
        for kind, ids in (("dict", {"a": torch.tensor([1]), "b": torch.tensor([1])}), ("jagged", Jagged())):
            ebc = self.make("a", "b", model=f"overflow_{kind}")
            net = torch.nn.Linear(4, 1, bias=False)
            torch.nn.init.ones_(net.weight)
            dense, sparse, scale = torch.optim.SGD(net.parameters(), lr=0.0), ebc.optimizer(), scaler(init_scale=8.0)
            for factor, expected in ((1.0, -1), (float("inf"), -1), (1.0, -2)):
                found = ebc(ids)
                scale.scale(net(found["a"] + found["b"]).sum() * factor).backward()
                for optimizer in (dense, sparse):
                    scale.step(optimizer)
                scale.update()
                for optimizer in (dense, sparse):
                    optimizer.zero_grad()
                self.assertEqual(ebc.model.read_rows("a", [1])[0, 0], expected, (kind, factor))
            self.assertEqual(ebc.next_step, 3)

    def test_its_state_is_saved_and_loaded(self):
        ebc = self.make()
        sparse = ebc.optimizer(lr=0.25)
        state = sparse.state_dict()
        other = ebc.optimizer(lr=1.0)
        other.load_state_dict(state)
        self.assertEqual(other.param_groups[0]["lr"], 0.25)
        decayed = ebc.optimizer(lr=1.0, weight_decay=0.5)
        decayed.load_state_dict(state)
        self.assertNotIn("weight_decay", decayed.param_groups[0])
        ebc({"t": torch.tensor([1])})  # a step that is not ended
        other.load_state_dict(sparse.state_dict())
        two = self.make(described=tables("t"), model="two_features",
                        features=[emberd.FeatureConfig("x", "t"), emberd.FeatureConfig("y", "t")])
        kept = two.optimizer(lr=0.5)
        two({"x": torch.tensor([1]), "y": torch.tensor([1])})
        fresh = two.optimizer()
        fresh._show()
        fresh.load_state_dict(kept.state_dict())
        self.assertEqual(fresh.param_groups[0]["lr"], 0.5)


class PrefetcherTest(Case):
    def train(self, name, depth, pipelined):
        torch.manual_seed(1)
        ebc = self.make("a", "b", model=name, pipelined=pipelined)
        sparse = ebc.optimizer()
        batches = [{"ids": {one: torch.randint(0, 64, (8,)) for one in "ab"}, "number": k} for k in range(12)]
        seen, numbers = [], []
        for batch in emberd.torch.Prefetcher(batches, ebc, depth=depth) if depth else batches:
            found = ebc(batch["ids"])
            seen.append([found[one].detach().tolist() for one in "ab"])
            numbers.append(batch["number"])
            (found["a"] * found["b"] + found["a"]).sum().backward()
            sparse.step()
            sparse.zero_grad()
        ebc.finish()
        self.assertEqual(numbers, list(range(12)))
        return seen, sha(ebc.model)

    def changing_pace(self):
        """Ids are sent ahead, and not, by turns, in each loop from its second step on."""
        return unittest.mock.patch.multiple(emberd._pace.Pace, FIRST=2, UNCOUNTED=1, COUNTED=1, AGAIN=1)

    def test_prefetching_changes_nothing(self):
        expected = self.train("none", 0, False)
        for depth in (1, 2, 4):
            self.assertEqual(self.train(f"depth{depth}", depth, False), expected)
            with self.changing_pace():
                self.assertEqual(self.train(f"changing{depth}", depth, False), expected)

    def test_pipelined_training_is_the_same_each_time(self):
        expected = self.train("pipelined0", 2, True)
        self.assertEqual(self.train("pipelined1", 3, True), expected)
        with self.changing_pace():
            self.assertEqual(self.train("pipelined2", 2, True), expected)
        self.assertNotEqual(expected, self.train("plain", 2, False))

    def test_other_ids_than_those_prefetched_are_refused(self):
        ebc = self.make()
        for _ in emberd.torch.Prefetcher([{"ids": {"t": torch.tensor([1])}}] * 2, ebc):
            with self.assertRaisesRegex(RuntimeError, "prefetched"):
                ebc({"t": torch.tensor([2])})
            break

    def test_which_parts_of_a_batch_are_ids_is_asked_for(self):
        ebc, one = self.make(), torch.tensor([1])
        for batch, said in (((one, one, one), 'a tuple of 3 parts is not allowed without `ids`; say which of them are ids: ids=lambda batch: {"name'),
                            ([one], "a list of 1 parts")):
            with self.assertRaisesRegex(TypeError, said):
                next(iter(emberd.torch.Prefetcher([batch], ebc)))
        with self.assertWarnsRegex(UserWarning, "sends no ids ahead: a batch is a Tensor; say which"):
            next(iter(emberd.torch.Prefetcher([one], ebc)))
        sparse = ebc.optimizer()

        def labelled():
            return [{"t": one}, *({"t": one, "label": one} for _ in range(3))]

        def popped(batch):
            batch.pop("label", None)
            return batch

        for ids, of, warned in ((None, popped, 1), (None, lambda batch: {"t": batch["t"]}, 1), (lambda batch: {"t": batch["t"]}, lambda batch: {"t": batch["t"]}, 0)):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                for batch in emberd.torch.Prefetcher(labelled(), ebc, ids=ids):
                    ebc(of(batch))["t"].sum().backward()
                    sparse.step()
            self.assertEqual([re.sub("^emberd: ", "", str(one.message)) for one in said], [
                "this Prefetcher sends no ids ahead: 'label' of a batch is no feature; say which are the ids of 't': ids=lambda batch: "
                "{name: batch[name] for name in ('t',)}"] * warned)
            self.assertEqual([os.path.basename(one.filename) for one in said], ["test_torch.py"] * warned)
        self.assertEqual((ebc.next_step, ebc.model.read_rows("t", [1])[0, 0]), (12, -12))

    def test_a_loop_may_be_left_and_another_begun(self):
        batches = [{"ids": {"t": torch.tensor([k])}} for k in range(6)]
        for depth, pipelined, stop in ((1, False, 2), (2, False, 2), (3, False, 1), (2, True, 2), (4, True, 3)):
            ebc = self.make(model=f"left_{depth}_{pipelined}", pipelined=pipelined)
            sparse = ebc.optimizer()
            kept = []  # errors, as a notebook keeps them, and so the loops
            loader = emberd.torch.Prefetcher(batches, ebc, depth=depth)
            for turn in range(4):
                try:
                    for place, batch in enumerate(emberd.torch.Prefetcher(batches, ebc, depth=depth) if turn < 2 else loader):
                        ebc(batch["ids"])["t"].sum().backward()
                        sparse.step()
                        if place + 1 == stop:
                            if turn < 2:
                                break
                            raise ZeroDivisionError
                except ZeroDivisionError as error:
                    kept.append(error)
            ebc.finish()
            self.assertEqual(ebc.model.read_rows("t", range(6))[:, 0].tolist(), [-4] * stop + [0] * (6 - stop), (depth, pipelined))

    def test_validation_within_a_loop(self):
        batches = [{"ids": {"t": torch.tensor([k])}} for k in range(6)]
        ebc = self.make()
        sparse = ebc.optimizer()
        for place, batch in enumerate(emberd.torch.Prefetcher(batches, ebc)):
            ebc(batch["ids"])["t"].sum().backward()
            sparse.step()
            if place == 2:
                ebc.eval()
                for other in emberd.torch.Prefetcher(batches, ebc):
                    ebc(other["ids"])
                ebc.train()
                with torch.no_grad():
                    for other in emberd.torch.Prefetcher(batches, ebc):
                        ebc(other["ids"])
                self.assertEqual(len(ebc._ahead), 1)  # of the outer loop
        self.assertEqual(ebc.model.read_rows("t", range(6))[:, 0].tolist(), [-1] * 6)


class StateTest(Case):
    def test_a_state_that_does_not_fit_is_refused(self):
        ebc = self.make()
        sparse = ebc.optimizer()
        for _ in range(3):
            ebc({"t": torch.tensor([1])})["t"].sum().backward()
            sparse.step()
        net = torch.nn.Sequential(ebc, torch.nn.Linear(4, 1))
        state = net.state_dict()
        self.assertEqual(state["0._extra_state"], {"model": ebc.model.name, "group": "train", "next_step": 3})
        net.load_state_dict(state)
        for other, said in ((self.make(model="another"), "of model '.*but this is model 'another'"),
                            (self.make(model=ebc.model.name, group="run-8"), "of group 'train', but this is group 'run-8'")):
            with self.assertRaisesRegex(ValueError, said):
                other.load_state_dict({"_extra_state": state["0._extra_state"]})
        ebc({"t": torch.tensor([1])})["t"].sum().backward()
        sparse.step()
        with self.assertRaisesRegex(RuntimeError, "dense part is at step 3.*are at step 4"):
            net.load_state_dict(state)
        self.assertEqual(ebc.state_dict()["_extra_state"]["next_step"], 4)
        ebc({"t": torch.tensor([1])})["t"].sum().backward()
        sparse.step()
        self.assertEqual(ebc.state_dict()["_extra_state"]["next_step"], 5)
        ebc.finish()
        again = self.make(model=ebc.model.name)
        again.load_state_dict({"_extra_state": state["0._extra_state"]})
        with self.assertRaisesRegex(emberd.Error, "dense part is at step 3.*are at step 5"):
            again({"t": torch.tensor([1])})

    def test_a_state_does_not_join(self):
        """A rank alone would wait for the others, or take the place of one."""
        ebc = self.make(size=2, patience=5, step_timeout=5)
        with unittest.mock.patch.object(emberd.Model, "train", side_effect=AssertionError("it joins")):
            self.assertEqual(ebc.state_dict()["_extra_state"]["next_step"], None)
            state = {"_extra_state": {"model": ebc.model.name, "group": "train", "next_step": 3}}
            ebc.load_state_dict(state)
            self.assertEqual(ebc.state_dict(), state)
        alone = self.make(model=ebc.model.name, group="alone")
        unknown = alone.state_dict()
        sparse = alone.optimizer()
        alone({"t": torch.tensor([1])})["t"].sum().backward()
        sparse.step()
        with self.assertWarnsRegex(UserWarning, "saved before its module had joined.* are at step 1"):
            alone.load_state_dict(unknown)

    def test_a_state_of_another_step_is_evaluated_with_a_warning(self):
        ebc = self.make()
        sparse, ids = ebc.optimizer(), {"t": torch.tensor([1])}
        states = []
        ebc.load_state_dict({"_extra_state": {"model": ebc.model.name, "group": "train", "next_step": 4}})
        with self.assertWarnsRegex(UserWarning, "dense part is at step 4, the tables .* are new") as said:
            ebc.eval()(ids)
        self.assertEqual(os.path.basename(said.filename), "test_torch.py")
        ebc.load_state_dict({"_extra_state": {"model": ebc.model.name, "group": "train", "next_step": 0}})
        for _ in range(2):
            ebc.train()(ids)["t"].sum().backward()
            sparse.step()
            states.append(ebc.state_dict())
        for state, warned in zip(states, (True, False)):
            other = self.make(model=ebc.model.name)
            other.load_state_dict(state)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                for _ in range(2):
                    other.eval()(ids)
            self.assertEqual([bool(re.search("dense part is at step 1.*trained for 2 steps or more", str(one.message))) for one in said], [True] * warned)

    def test_training_goes_on_where_it_was(self):
        first = self.make()
        sparse = first.optimizer()
        first({"t": torch.tensor([1])})["t"].sum().backward()
        sparse.step()
        first.finish()
        second = self.make(model=first.model.name)
        self.assertEqual(second.next_step, 1)
        self.assertEqual(second({"t": torch.tensor([1])})["t"].tolist(), [[-1] * 4])


def refuse(sparse, gradient, lr=0.5):
    """An update that is refused, and leaves all as it was."""
    group, kept = sparse.param_groups[0], sparse.param_groups[0]["params"][0].grad
    group["lr"], group["params"][0].grad = lr, gradient
    try:
        sparse.step()
    except ValueError as error:
        group["lr"], group["params"][0].grad = 0.5, kept
        return str(error)
    raise AssertionError("the update was not refused")


def ddp_rank(rank, size, address, name, rendezvous):
    """A rank of a model with DDP; each trains on its part of the same batches. Updates of both ranks and of one are refused;
    they are repeated, or skipped by all."""
    torch.manual_seed(3)
    if size > 1:
        torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    with emberd.connect(address) as client:
        ebc = emberd.torch.EmbeddingBagCollection(tables("t", dim=4), client=client, model=name, reduction="mean")
        sparse = ebc.optimizer(lr=0.5)
        net = torch.nn.Linear(4, 1, bias=False)
        torch.nn.init.constant_(net.weight, 0.5)
        if size > 1:
            net = torch.nn.parallel.DistributedDataParallel(net)
        dense = torch.optim.SGD(net.parameters(), lr=0.125)
        for step in range(6):
            part = slice(rank * 4, (rank + 1) * 4) if size > 1 else slice(0, 8)
            ids = torch.arange(step, step + 8)[part]
            loss = net(ebc({"t": ids})["t"] + 1).mean()
            loss.backward()
            gradient = sparse.param_groups[0]["params"][0].grad
            if step == 1 and rank == 0:
                assert "nan" in refuse(sparse, gradient * float("nan"))
            if step in (2, 4):
                assert "learning_rate" in refuse(sparse, gradient, lr=-1.0)
            for opt in (dense, sparse) if step != 4 else (dense,):
                opt.step()
            for opt in (dense, sparse):
                opt.zero_grad()
        ebc.finish()
        assert ebc.next_step == 6
    if size > 1:
        torch.distributed.destroy_process_group()


class GroupTest(Case):
    @unittest.skipUnless(torch.distributed.is_available(), "SKIP: PyTorch was built without distributed")
    def test_two_ranks_under_ddp_are_one_with_both_batches(self):
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(ddp_rank, (2, self.cluster.address, "ddp", f"{folder}/rendezvous"), nprocs=2)
        ddp_rank(0, 1, self.cluster.address, "single", "")
        self.assertEqual(sha(self.client.model("ddp")), sha(self.client.model("single")))
        self.assertTrue(self.client.model("ddp").table("t").any())


class FailureTest(unittest.TestCase):
    def test_killing_the_coordinator_neither_loses_nor_doubles_a_step(self):
        for pipelined in (False, True):
            with emberd.local(shards=2, processes=True) as cluster, cluster.connect() as client:
                ebc = emberd.torch.EmbeddingBagCollection(tables("t"), client=client, model="m", pipelined=pipelined)
                sparse = ebc.optimizer()
                batches = [{"ids": {"t": torch.tensor([1, k % 64])}} for k in range(60)]
                for k, batch in enumerate(emberd.torch.Prefetcher(batches, ebc)):
                    if k == 5:
                        os.kill(coordinator(cluster), signal.SIGKILL)
                    found = ebc(batch["ids"])["t"]
                    if k == 40:
                        os.kill(coordinator(cluster), signal.SIGKILL)
                    found.sum().backward()
                    sparse.step()
                    sparse.zero_grad()
                ebc.finish()
                self.assertEqual(ebc.next_step, 60)
                rows = ebc.model.table("t")[:, 0]
                self.assertEqual(rows[1], -61)
                self.assertEqual(rows[[0, 59, 60]].tolist(), [-1, -1, 0])
                ebc.finish()


if __name__ == "__main__":
    main()
