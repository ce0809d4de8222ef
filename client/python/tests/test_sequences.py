"""Sequences: ids whose rows are not combined, and padding that is neither read nor updated; and parts of a model: features that are
missing in a step.

What this would catch: a gradient that goes to another position than its id, a row that changes for padding or for a feature that the
step does not name, and a sequence that is read as a bag.
"""

import threading
import unittest

from cluster import ClusterTest, counting_model, emberd, has_torch, main

import numpy as np

S = emberd.Sequences
WIDE = {"initializer": emberd.RowId(), "tables": ("items", "users")}


class Items:
    """As torch.utils.data.Subset: a length and items, and no __iter__."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, place):
        return self.items[place]


class SequencesTest(ClusterTest):
    def test_each_id_gets_its_row_at_its_place(self):
        model = self.declare(initializer=emberd.RowId())
        random = np.random.default_rng(1)
        for shape in ((5,), (3, 7), (2, 3, 4), (1, 1), (0, 7), (3, 0)):
            ids = random.integers(0, 64, shape)
            for padding in (None, 0, 3, -1, 64, 2**62):
                padded = ids if padding is None else np.where(random.random(shape) < 0.3, padding, ids)
                kept = np.ones(shape, bool) if padding is None else padded != padding
                for given in (S(padded, padding), S(padded.tolist() if padded.size else padded, padding), S(np.asfortranarray(padded), padding)):
                    found = model.lookup({"t": given})["t"]
                    self.assertEqual(found.shape, (*shape, 4))
                    np.testing.assert_array_equal(found, np.where(kept, padded, 0)[..., None].repeat(4, -1))
                    np.testing.assert_array_equal(given.mask, kept)
        np.testing.assert_array_equal(model.lookup({"t": S([[0, 1]], mask_zero=True)})["t"][..., 0], [[0, 1]])
        np.testing.assert_array_equal(S([[0, 1]], mask_zero=True).mask, [[False, True]])

    def test_a_sequence_beside_a_bag_of_the_same_table(self):
        table = emberd.TableConfig("t", 64, 4, combiner="mean", initializer=emberd.RowId(), optimizer=emberd.SGD(learning_rate=1.0))
        model = self.client.declare(emberd.ModelConfig("beside", [table], [emberd.FeatureConfig(name, "t") for name in ("history", "tags", "grid")[:2]]
                                                       + [emberd.FeatureConfig("grid", "t", output_shape=[2, 3])]))
        found = model.lookup({"history": S([[1, 2, 0]], 0), "tags": [[4, 8]], "grid": S([[5, 6, 7]])}, train=True)
        self.assertEqual([found[name][..., 0].tolist() for name in found], [[[1, 2, 0]], [6], [[5, 6, 7]]])
        found.apply({"history": np.full((1, 3, 4), 0.5), "grid": np.ones((1, 3, 4))})
        self.assertEqual(model.table("t")[:9, 0].tolist(), [0, 0.5, 1.5, 3, 4, 4, 5, 6, 8])

    def test_only_rows_with_an_id_are_updated(self):
        for optimizer in (emberd.SGD(learning_rate=1.0), emberd.Adam(learning_rate=1.0)):  # Adam moves rows without a gradient, too
            name = f"padded_{type(optimizer).__name__}"
            model = self.client.declare(counting_model(name, optimizer=optimizer, initializer=emberd.RowId()))
            before = model.table("t")
            with model.train("run") as stream:
                for length in (3, 1, 0, 5):  # each batch as long as its longest sequence
                    ids = np.zeros((2, length), int)
                    ids[0] = np.arange(1, length + 1)
                    found = stream.lookup({"t": S(ids, 0)})
                    gradients = stream.empty_gradients(found)
                    gradients["t"][...] = 1
                    stream.update(gradients)
            changed = (model.table("t") != before).any(1)
            self.assertEqual(np.flatnonzero(changed).tolist(), [1, 2, 3, 4, 5])

    def test_gradients_reach_the_ids_at_their_places(self):
        model = self.declare()
        random = np.random.default_rng(2)
        expected = np.zeros((64, 4), np.float32)
        with model.train("run", pipelined=True) as stream:
            sent = []
            for step in range(6):  # lookups of other lengths are under way meanwhile
                ids = random.integers(0, 64, (4, 1 + step % 3))
                stream.send_lookup({"t": S(ids, 7)})
                sent.append(ids)
                if step:
                    gradient = random.integers(-3, 4, (*sent[step - 1].shape, 4)).astype(np.float32)
                    stream.receive_lookup()
                    stream.send_update({"t": gradient})
                    kept = sent[step - 1] != 7
                    np.subtract.at(expected, sent[step - 1][kept], gradient[kept])
            stream.receive_lookup()
            stream.send_skip()
        np.testing.assert_array_equal(model.table("t"), expected)

    def test_lists_of_different_lengths_are_filled_up(self):
        lists = [[1, 2, 3], [], [4], [5, 6, 7, 8]]
        for positions, padding, expected in ((None, 0, [[1, 2, 3, 0], [0] * 4, [4, 0, 0, 0], [5, 6, 7, 8]]), (2, -1, [[2, 3], [-1, -1], [4, -1], [7, 8]]),
                                             (1, 9, [[3], [9], [4], [8]])):
            made = S.from_lists(lists, positions, padding)
            self.assertEqual((made.ids.tolist(), made.padding_idx), (expected, padding))
        self.assertEqual(S.from_lists([]).ids.shape, (0, 0))
        self.assertEqual(S.from_lists(iter(lists)).ids.tolist(), S.from_lists(lists).ids.tolist())
        R = emberd.Ragged
        given = R.from_lists((one for one in lists), iter([[0.5] * len(one) for one in lists]))
        self.assertEqual((given.values.tolist(), given.row_splits.tolist(), len(given.weights)), ([1, 2, 3, 4, 5, 6, 7, 8], [0, 3, 3, 4, 8], 8))
        self.assertEqual(R.from_lists(Items([Items([1, 2]), Items([])])).row_splits.tolist(), [0, 2, 2])
        for wrong, said in ((([[1, 2], 3],), r"samples\[1\]: a int is not allowed; it must be a list of ids$"), ((3,), "samples: a int is not allowed; it must be a list of ids for"),
                            ((np.array([1, 2]),), r"samples\[0\]: a int64 is not"), (([np.array(1)],), r"samples\[0\]: a ndarray is not"), ((np.array(1),), "samples: a ndarray is not"),
                            (([[1]], [1.0]), r"weights\[0\]: a float is not allowed; it must be a list of weights$")):
            with self.assertRaisesRegex(TypeError, said):
                R.from_lists(*wrong)
        model = self.declare(initializer=emberd.RowId())
        self.assertEqual(model.lookup({"t": S.from_lists(lists, 2)})["t"][..., 0].tolist(), [[2, 3], [0, 0], [4, 0], [7, 8]])
        for given, kind, said in ((([[1, 0]],), ValueError, "samples: the id 0 is not allowed, for it is padding_idx"), (([[1]], 0), ValueError, "positions: 0"),
                                  (([[1]], None, 2**63), ValueError, "padding_idx"), (([["a"]],), TypeError, "crc32")):
            with self.assertRaisesRegex(kind, said):
                S.from_lists(*given)

    def test_what_is_wrong_is_named(self):
        model = self.declare()
        wrong = [(S(5), ValueError, r'feature "t": the shape \[\] is not allowed; it must be \[samples, positions\]'),
                 (S([[1, 64]]), IndexError, "64"), (S([[1, -1]]), IndexError, "-1"), (S([[1, -1]], 0), IndexError, "-1"),
                 (S([[1.5]]), TypeError, "ids are int32 or int64"), (S(["a"]), TypeError, "crc32"), (S([[1]], "0"), TypeError, "padding_idx: a str"),
                 (S([[1]], 2**63), ValueError, "padding_idx: 9223372036854775808"), (S([[1]], 5, True), ValueError, "padding_idx, mask_zero: 5 and True")]
        for ids, kind, said in wrong:
            with self.assertRaisesRegex(kind, said):
                model.lookup({"t": ids})
        found = model.lookup({"t": S([[1, 2, 3]] * 2)}, train=True)
        for shape in ((2, 4), (3, 2, 4), (6, 4), (2, 3)):
            with self.assertRaisesRegex(ValueError, r"gradient of feature \"t\": the shape .* \[samples, 3, 4\]"):
                found.apply({"t": np.zeros(shape)})
        with self.assertRaisesRegex(ValueError, '"x"|\'x\''):
            model.lookup({"t": [1], "x": S([[1]])})


class PartialTest(ClusterTest):
    def test_a_lookup_names_what_it_has(self):
        model = self.declare(**WIDE)
        with self.assertRaisesRegex(ValueError, "users"):
            model.lookup({"items": [1]})
        found = model.lookup({"items": [1, 2]}, partial=True)
        self.assertEqual((list(found), found["items"][:, 0].tolist(), found.concat.shape), (["items"], [1, 2], (2, 4)))
        self.assertEqual(list(model.lookup({"users": [1], "items": [2]}, partial=True)), ["users", "items"])
        for ids, said in (({}, r"ids: \{\} is not allowed; .* items, users"), ({"item": [1]}, "item"), ({"items": [1], "others": [1]}, "others")):
            with self.assertRaisesRegex(ValueError, said):
                model.lookup(ids, partial=True)

    def test_rows_of_other_features_stay(self):
        model = self.declare(optimizer=emberd.Adam(learning_rate=1.0), **WIDE)
        model.lookup({"items": [1], "users": [1]}, train=True).apply({"users": np.ones((1, 4))})  # Adam would go on with this momentum
        before = model.table("users").tobytes(), model.table("users", slot="momentum").tobytes()
        found = model.lookup({"items": [1]}, train=True, partial=True)
        self.assertEqual(found.apply({"items": np.ones((1, 4))}).rows_updated, 1)
        with model.train("run") as stream:
            for concat in (False, True):
                found = stream.lookup({"items": [1, 2]}, concat=concat, partial=True)
                self.assertEqual(found.concat.shape, (2, 4))
                self.assertEqual(stream.update({"items": np.ones((2, 4))}).rows_updated, 2)
        with self.assertRaisesRegex(ValueError, "users"), model.train("run") as stream:
            stream.lookup({"items": [1]}, partial=True)
            stream.update({"users": np.ones((1, 4))})
        self.assertEqual((model.table("users").tobytes(), model.table("users", slot="momentum").tobytes()), before)

    def test_ranks_name_other_features(self):
        model = self.declare(**WIDE)

        def run(rank, name):
            with model.train("run", rank=rank, size=2) as stream:
                for _ in range(3):
                    found = stream.lookup({name: S([[1, 2]])}, partial=True)
                    stream.update({name: np.ones_like(found[name])})

        threads = [threading.Thread(target=run, args=one) for one in enumerate(("items", "users"))]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        for table in ("items", "users"):
            self.assertEqual(model.table(table)[:4, 0].tolist(), [0, -2, -1, 3])


@unittest.skipUnless(has_torch(), "SKIP: PyTorch is not installed (deploy/packages.txt)")
class TorchTest(ClusterTest):
    def collection(self, kind="EmbeddingCollection", tables=("t",), name="", **options):
        import emberd.torch
        name = name or self.id().split(".")[-1]
        described = counting_model(name, tables, optimizer=emberd.SGD(learning_rate=0.5), initializer=emberd.Normal(0.0, 1.0)).tables
        made = getattr(emberd.torch, kind)(described, client=self.client, model=name, seed=1, **options)
        self.addCleanup(made.finish)
        return made

    def test_it_trains_as_torch_does(self):
        import emberd.torch
        import torch
        for padding in (None, 0, -1, 63):
            table = emberd.TableConfig("t", 64, 4, initializer=emberd.Normal(0.0, 1.0), optimizer=emberd.SGD(learning_rate=0.5))
            layer = emberd.torch.Embedding(64, 4, padding, client=self.client, model=f"as_torch_{padding}", table=table, optimizer="sgd")
            rows = torch.from_numpy(layer.collection.model.table("t").copy())
            if padding is not None:
                rows[padding] = 0
            plain = torch.nn.Embedding(64, 4, padding_idx=padding, _weight=rows)
            both = [(layer, layer.optimizer()), (plain, torch.optim.SGD(plain.parameters(), lr=0.5))]
            random = torch.Generator().manual_seed(1)
            for shape in ((3, 5), (4,), (2, 3, 2), (3, 5)):
                ids, target = torch.randint(64, shape, generator=random), torch.randn(*shape, 4, generator=random)
                ids[0] = 63 if padding == -1 else padding or 0
                found = []
                for one, optimizer in both:
                    optimizer.zero_grad()
                    found.append(one(ids))
                    (found[-1] * target).tanh().sum().backward()
                    optimizer.step()
                torch.testing.assert_close(*found)
            trained = torch.from_numpy(layer.collection.model.table("t").copy())
            if padding is not None:
                trained[padding] = 0
            torch.testing.assert_close(trained, plain.weight.data)
            layer.finish()
        for padding, kind, said in ((64, ValueError, r"padding_idx: 64 is not allowed; it must be in \[-64, 63\]"), (1.5, TypeError, "padding_idx")):
            with self.assertRaisesRegex(kind, said):
                emberd.torch.Embedding(64, 4, padding, client=self.client, model="x")
        with self.assertRaisesRegex(TypeError, "input: a list"):
            layer([1, 2])

    def test_ragged_ids_give_jagged_tensors(self):
        import torch

        from emberd.compat.jagged import JaggedTensor, KeyedJaggedTensor

        class Mine(JaggedTensor):
            """As torchrec's class, where that is installed."""

        class Keyed(KeyedJaggedTensor):
            def __getitem__(self, key):
                one = super().__getitem__(key)
                return Mine(one.values(), lengths=one.lengths())

        made = self.collection(tables=("a", "b"), mask_zero=True)
        rows = {name: torch.from_numpy(made.model.table(name).copy()) for name in ("a", "b")}
        values, lengths = torch.tensor([1, 2, 0, 4, 5]), torch.tensor([1, 2, 0, 2])
        of_keys = [("a", values[:3], lengths[:2]), ("b", values[3:], lengths[2:])]
        tensors = {name: JaggedTensor(one, lengths=some) for name, one, some in of_keys}
        ragged = {name: emberd.Ragged(one, np.concatenate([[0], np.cumsum(some)])) for name, one, some in of_keys}
        made.eval()
        for given, kind in ((Keyed(["a", "b"], values, lengths=lengths), Mine), (KeyedJaggedTensor(["a", "b"], values, lengths=lengths), JaggedTensor),
                            (tensors, JaggedTensor), (ragged, JaggedTensor)):
            found = made(given)
            for name, one, some in of_keys:
                self.assertIs(type(found[name]), kind)
                torch.testing.assert_close(found[name].values(), rows[name][one])  # there is no padding in it: id 0 is row 0
                self.assertEqual(found[name].lengths().tolist(), some.tolist())
        self.assertEqual(found["a"].to_padded_dense(padding_value=7.0)[..., 0].tolist(),
                         [[rows["a"][1, 0], 7], rows["a"][[2, 0], 0].tolist()])
        self.assertEqual(found["b"].to_padded_dense(1)[..., 0].tolist(), [[0], [rows["b"][4, 0]]])
        self.assertEqual(made(ragged["a"] and {"a": ragged["a"], "b": torch.tensor([[5, 0]])})["b"][0, 1].tolist(), [0] * 4)
        for ids, kind, said in (({"a": emberd.Ragged([1, 2], [0, 1])}, ValueError, "end with the number of values"), ({"a": emberd.Ragged([1, 2], [0, 3, 2])}, ValueError, "not decrease"),
                                ({"a": emberd.Ragged([1], [0, 1], [0.5])}, TypeError, "weights are not allowed"), ({"a": emberd.Dense([1])}, TypeError, "a Dense is not allowed"),
                                ({"a": emberd.Sparse([0], [1], 1)}, TypeError, "a Sparse is not allowed"), ([1], TypeError, "a mapping"),
                                (KeyedJaggedTensor(["a", "b"], values, torch.ones(5), lengths=lengths), TypeError, "weights are not allowed")):
            for mode in (True, False):
                with self.assertRaisesRegex(kind, said):
                    made.train(mode)({"b": torch.tensor([1]), **ids} if isinstance(ids, dict) else ids)
        made.eval()

    def test_jagged_tensors_of_single_features(self):
        """Of bags too, with weights that learn. A KeyedJaggedTensor is of several."""
        import emberd.torch
        import torch
        from emberd.compat.torchrec import JaggedTensor, KeyedJaggedTensor
        tables = [emberd.TableConfig(name, 64, 4, combiner="sum", initializer=emberd.RowId(), optimizer=emberd.SGD(learning_rate=1.0)) for name in ("items", "users")]
        bags, sequences = (kind(tables, client=self.client, model=kind.__name__) for kind in (emberd.torch.EmbeddingBagCollection, emberd.torch.EmbeddingCollection))
        sparse, weights = bags.optimizer(), torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        ids = {"items": JaggedTensor(torch.tensor([5, 6, 7]), weights, lengths=torch.tensor([1, 2])), "users": torch.tensor([1, 2])}
        bags.prefetch(ids)
        found = bags(ids)
        self.assertEqual(found["items"][:, 0].tolist(), [5, 33])
        found["items"].sum().backward()
        sparse.step()
        self.assertEqual(weights.grad.tolist(), [20, 24, 28])  # a row has its id in each of its 4 columns
        self.assertEqual(bags.model.table("items")[5:8, 0].tolist(), [4, 4, 4])
        both = KeyedJaggedTensor(["items", "users"], torch.tensor([5, 1]), lengths=torch.tensor([1, 1]))
        for made in (bags, sequences):
            with self.assertRaisesRegex(TypeError, r'feature "items": a KeyedJaggedTensor is not allowed for one feature; give it in place of the mapping, or ids\[key\]'):
                made({"items": both, "users": torch.tensor([1])})
            made.finish()

    def test_ids_move_with_their_batch(self):
        """As Lightning moves a batch, by `to` of what it has."""
        import torch
        tensor, array = torch.tensor([1, 2]), np.arange(3)
        for given in (emberd.Ragged(tensor, array), emberd.Dense(tensor, tensor), emberd.Sparse(tensor, tensor, 3), emberd.Sequences(tensor, 0)):
            moved = given.to(device="cpu", dtype=torch.int32)
            self.assertIs(type(moved), type(given))
            for name, one in vars(given).items():
                there = getattr(moved, name)
                self.assertIs(there, one) if not isinstance(one, torch.Tensor) else self.assertEqual((there.dtype, there.tolist()), (torch.int32, [1, 2]))

    def test_a_sparse_tensor_says_what_to_write(self):
        import emberd.torch
        import torch
        made = emberd.torch.EmbeddingBagCollection([emberd.TableConfig("t", 64, 4, combiner="sum", initializer=emberd.RowId())], client=self.client, model="sparse_tensor")
        given = torch.sparse_coo_tensor([[1, 0, 1], [1, 0, 0]], [7, 5, 6], (3, 2))
        with torch.no_grad(), self.assertRaisesRegex(TypeError, r'feature "t": a sparse tensor is not allowed; give (.*), where ids is its coalesce\(\)') as raised:
            made({"t": given})
        recipe = str(raised.exception).split("give ")[1].split(", where")[0]
        with torch.no_grad():
            self.assertEqual(made({"t": eval(recipe, {"emberd": emberd, "ids": given.coalesce()})})["t"][:, 0].tolist(), [5, 13, 0])

    def test_padded_and_jagged_train_the_same(self):
        import torch

        from emberd.compat.jagged import KeyedJaggedTensor
        tables = []
        for way in ("padded", "jagged", "prefetched", "accumulated"):
            made = self.collection(name=f"same_{way}", padding_idx=-1, accumulate=way == "accumulated")
            sparse = made.optimizer()
            for step in range(3):
                padded = [{"t": torch.tensor([[1 + step, 2], [3, -1]])}, {"t": torch.tensor([[2, 1, 1]])}]
                jagged = KeyedJaggedTensor(["t"], torch.tensor([1 + step, 2, 3, 2, 1, 1]), lengths=torch.tensor([2, 1, 3]))
                whole = {"t": torch.tensor([[1 + step, 2, -1], [3, -1, -1], [2, 1, 1]])}
                if way == "prefetched":
                    made.prefetch({"t": whole["t"].clone()})
                for ids in padded if way == "accumulated" else [jagged] if way == "jagged" else [whole]:
                    found = made(ids)["t"]
                    found = found.values() if way == "jagged" else found
                    (found ** 2).sum().backward()
                sparse.step()
                sparse.zero_grad()
            tables.append(made.model.table("t").tobytes())
        self.assertEqual(len(set(tables)), 1)

    def test_the_mask_is_what_attention_takes(self):
        import torch

        from emberd.compat.jagged import JaggedTensor
        made = self.collection(tables=("a", "b"), padding_idx={"a": 5})
        ids = {"a": torch.tensor([[1, 5], [5, 2]]), "b": torch.tensor([[1, 5], [5, 2]])}
        self.assertEqual({name: one.tolist() for name, one in made.mask(ids).items()}, {"a": [[True, False], [False, True]], "b": [[True, True]] * 2})
        self.assertEqual(made.mask({"a": [[1, 5]]})["a"].tolist(), [[True, False]])
        for given in (emberd.Ragged([1, 5], [0, 2]), JaggedTensor(ids["a"][0], lengths=torch.tensor([2]))):
            with self.assertRaisesRegex(TypeError, f'ids: feature "a": a {type(given).__name__} is not allowed; it must be a tensor of ids, which may hold padding'):
                made.mask({"a": given})
        with self.assertRaisesRegex(ValueError, "feature 'c': the model has no such feature; there are a, b"):
            made.mask({"c": ids["a"]})
        attention = torch.nn.MultiheadAttention(4, 1, batch_first=True)
        found, mask = made(ids)["a"], made.mask(ids)["a"]
        attention(found, found, found, key_padding_mask=~mask)[0].sum().backward()
        made.optimizer().step()
        for options, kind, said in (({"padding_idx": {"c": 0}}, ValueError, "padding_idx: 'c' is not allowed; it must be one of the features, t"),
                                    ({"padding_idx": 3, "mask_zero": True}, ValueError, "padding_idx, mask_zero: 3 and True"), ({"padding_idx": 0.5}, TypeError, "padding_idx")):
            with self.assertRaisesRegex(kind, said):
                self.collection(name="never", **options)

    def test_towers_are_trained_alone_and_together(self):
        import torch

        from emberd.compat.jagged import KeyedJaggedTensor
        tables = []
        for accumulate in (False, True):
            made = self.collection("EmbeddingBagCollection", ("items", "users"), f"towers_{accumulate}", partial=True, accumulate=accumulate)
            sparse = made.optimizer()
            rows = made.model.table("users").tobytes()
            found = made({"items": torch.tensor([1, 2])})
            self.assertEqual(list(found), ["items"])
            found["items"].sum().backward()
            sparse.step()
            self.assertEqual(made.model.table("users").tobytes(), rows)
            sparse.zero_grad()
            one = made(KeyedJaggedTensor(["users"], torch.tensor([3]), lengths=torch.tensor([1])))
            loss = one["users"].sum() if accumulate else (one.values() * 1).sum()
            if accumulate:  # a call for each tower makes one step
                loss = (loss * made({"items": S(torch.tensor([[4, 5]]))})["items"]).sum()
            loss.backward()
            sparse.step()
            sparse.zero_grad()
            with torch.no_grad():
                self.assertEqual(list(made({"users": torch.tensor([3])})), ["users"])
            tables.append(made.model.table("users")[3].tobytes() != rows[48:64])
        self.assertEqual(tables, [True, True])
        strict = self.collection("EmbeddingBagCollection", ("items", "users"), "strict")
        with self.assertRaisesRegex(ValueError, "users"):
            strict({"items": torch.tensor([1])})


if __name__ == "__main__":
    main()
