"""The classes of emberd.config have every field of model.proto, and no other, and the server takes all of them.

What this would catch: a field that was added to the API and is not to be had from Python, or is spelled otherwise.
"""

import dataclasses
import json
import os
import subprocess
import tempfile

from cluster import ClusterTest, emberd, main

from emberd import config

import numpy as np

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..")


def model_proto():
    """The descriptors of model.proto, by message."""
    from google.protobuf import descriptor_pb2
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "set")
        subprocess.run(["protoc", f"-I{ROOT}/proto", f"--descriptor_set_out={path}", "emberd/v1/model.proto"], check=True)
        with open(path, "rb") as file:
            found = descriptor_pb2.FileDescriptorSet.FromString(file.read())
    return found.file[0]


def every_subclass(kind):
    for one in kind.__subclasses__():
        yield one
        yield from every_subclass(one)


def names(kind):
    return {field.name for field in dataclasses.fields(kind)}


class ConfigTest(ClusterTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        file = model_proto()
        cls.messages = {message.name: message for message in file.message_type}
        cls.enums = {enum.name: [value.name for value in enum.value[1:]] for enum in file.enum_type}

    def proto_names(self, message):
        return {field.name for field in self.messages[message].field}

    def test_every_field_is_there(self):
        for kind in (config.ModelConfig, config.TableConfig, config.FeatureConfig, config.QuantizationConfig,
                     config.PlanConfig, config.StackGroup, config.TableResource):
            self.assertEqual(names(kind), self.proto_names(kind.__name__), kind)

    def test_every_kind_is_there_with_every_field(self):
        for base, message in ((config.Optimizer, "OptimizerConfig"), (config.Initializer, "InitializerConfig")):
            kinds = {kind.kind: kind for kind in every_subclass(base)}
            common = names(base)
            in_proto = {field.name: field.type_name.split(".")[-1] for field in self.messages[message].field
                        if field.HasField("oneof_index") and not field.proto3_optional}
            self.assertEqual(set(kinds), set(in_proto))
            self.assertEqual(common | set(in_proto), self.proto_names(message))
            for kind, nested in in_proto.items():
                self.assertEqual(names(kinds[kind]) - common, self.proto_names(nested), kind)

    def test_the_server_takes_every_kind(self):
        optimizers = [kind() for kind in every_subclass(config.Optimizer) if kind not in (config.NoOptimizer, config.Custom)]
        optimizers.append(config.Custom(expression="w = w - lr * g"))
        initializers = [config.Zeros(), config.Constant(1.5), config.Uniform(-1, 1), config.Normal(0, 0.1),
                        config.TruncatedNormal(0, 0.1), config.RowId(), lambda offset, shape: np.ones(shape), None]
        self.assertEqual(len({type(one) for one in initializers}) - 1, len(set(every_subclass(config.Initializer))))
        tables = [emberd.TableConfig(f"o{i}", 8, 4, optimizer=one) for i, one in enumerate(optimizers)]
        tables += [emberd.TableConfig(f"i{i}", 8, 4, initializer=one) for i, one in enumerate(initializers)]
        model = self.client.declare(emberd.ModelConfig(
            "kinds", tables, [emberd.FeatureConfig(table.name, table.name, 4) for table in tables], seed=2 ** 63))
        for i, one in enumerate(optimizers):
            self.assertEqual(model.tables[f"o{i}"].optimizer, one.kind)

    def test_a_rule_of_ones_own(self):
        rule = emberd.Custom(expression="a = a + g * g; w = w - lr * g / (sqrt(a) + eps)", learning_rate=0.5, slots={"a": np.float32(0.25)},
                             hyper_parameters={"eps": 0.125})
        model = self.client.declare(emberd.ModelConfig(
            "own", [emberd.TableConfig("t", 8, 4, initializer=emberd.Constant(1), optimizer=rule)], [emberd.FeatureConfig("t", "t")]))
        self.assertEqual((model.tables["t"].optimizer, list(model.tables["t"].slots)), ("custom", ["a"]))
        step = model.lookup({"t": [3]}, train=True)
        step.apply({"t": np.full((1, 4), 2, np.float32)})
        self.assertEqual(model.read_rows("t", [3], slot="a").tolist(), [[4.25] * 4])
        self.assertEqual(model.read_rows("t", [3]).tolist(), [[1 - np.float32(1) / (np.sqrt(np.float32(4.25)) + np.float32(0.125))] * 4])
        model.assign_rows("t", [3], [[-1] * 4], slot="a")  # a slot of one's own may be anything
        for bad, message in ((emberd.Custom(expression="w = w - lr * gg"), r"tables\[0\].optimizer.custom: expression: line 1, column 14: .*did you mean \"g\""),
                             (emberd.Custom(), "a rule of 0 bytes"),
                             (emberd.Custom(expression="w = g", slots=["a"]), "Custom.slots.*a dict of numbers by name"),
                             (emberd.Custom(expression="w = g", slots={"a": float("nan")}), r"Custom.slots\['a'\]: nan is not allowed")):
            with self.assertRaisesRegex((emberd.InvalidArgument, TypeError), message):
                self.client.declare(emberd.ModelConfig("bad", [emberd.TableConfig("t", 8, 4, optimizer=bad)], [emberd.FeatureConfig("t", "t")]))

    def test_models_share_a_table(self):
        table = emberd.TableConfig("t", 8, 4, resource=emberd.TableResource("users", "tests"))
        models = [self.client.declare(emberd.ModelConfig(name, [table], [emberd.FeatureConfig("t", "t")],
                                                         enable_variable_deduplication=True))
                  for name in ("shares_a", "shares_b")]
        models[0].assign_rows("t", [3], [[1, 2, 3, 4]])
        self.assertEqual(models[1].read_rows("t", [3]).tolist(), [[1, 2, 3, 4]])

    def test_two_names_of_one_table_in_one_call(self):
        """Each name has its combiner; both read and train the same rows, once a step."""
        def tables(**names):
            return [emberd.TableConfig(name, 8, 2, combiner, initializer=emberd.RowId(), optimizer=emberd.SGD(learning_rate=1),
                                       resource=emberd.TableResource("two_names")) for name, combiner in names.items()]
        features = [emberd.FeatureConfig("a", "summed"), emberd.FeatureConfig("b", "averaged")]
        for shared in (True, False):
            model = self.client.declare(emberd.ModelConfig(f"two_names_{shared}", tables(summed="sum", averaged="mean"), features,
                                                           enable_variable_deduplication=shared))
            self.assertEqual(set(model.tables), {"summed", "averaged"})
            self.assertEqual([table.name for table in model.tables.values()], list(model.tables))
            self.assertEqual(model.tables["averaged"].stack == model.tables["summed"].stack, shared)
            looked_up = model.lookup({"a": [[2, 4]], "b": [[2, 4]]}, train=True)
            self.assertEqual([looked_up["a"].tolist(), looked_up["b"].tolist()], [[[6, 6]], [[3, 3]]])
            looked_up.apply({"a": [[1, 1]], "b": [[4, 4]]})
            self.assertEqual(model.read_rows("summed", [2, 3]).tolist(), [[-1, -1] if shared else [1, 1], [3, 3]])
            self.assertEqual(model.read_rows("averaged", [2, 3]).tolist(), [[-1, -1] if shared else [0, 0], [3, 3]])
            model.assign_rows("averaged", [3], [[7, 8]])
            self.assertEqual(model.read_rows("summed", [3]).tolist(), [[7, 8]] if shared else [[3, 3]])
            model.lookup({"a": np.full((20000, 1), 5), "b": np.full((20000, 1), 5)})  # of which some are counted
            self.assertEqual([(one.table, one.id) for name in model.tables for one in model.hot_rows(name, 1)], [("summed", 5), ("averaged", 5)])

    def test_tables_without_an_optimizer_are_looked_up(self):
        model = self.client.declare(emberd.ModelConfig("frozen", [emberd.TableConfig("t", 8, 4, initializer=emberd.RowId())],
                                                       [emberd.FeatureConfig("t", "t")], optimizer=emberd.NoOptimizer()))
        self.assertEqual(model.lookup({"t": [3]})["t"].tolist(), [[3] * 4])
        # Beside a table that is trained there is none: a rate of 0 holds its rows.
        tables = [emberd.TableConfig(name, 8, 4, optimizer=one) for name, one in (("trained", emberd.SGD()), ("still", emberd.NoOptimizer()))]
        with self.assertRaisesRegex(emberd.InvalidArgument, r"tables\[1\]\.optimizer: none is not allowed; it must be none for all tables of a model, or for no table"):
            self.client.declare(emberd.ModelConfig("partly_frozen", tables, [emberd.FeatureConfig(one.name, one.name) for one in tables]))

    def test_every_enum_is_taken_in_either_case(self):
        cases = {"combiner": "Combiner", "update_rounding": "UpdateRounding",
                 "on_nonfinite_gradient": "NonfinitePolicy", "result_mode": "ResultMode",
                 "residency": "Residency"}
        tables = [emberd.TableConfig(f"{field}_{value}", 8, 4, storage_dtype="bfloat16",
                                     **{field: value if i % 2 else value.lower()})
                  for field, enum in cases.items() for i, value in enumerate(self.enums[enum])]
        for rules in self.enums["PlanRules"]:
            self.client.declare(emberd.ModelConfig(
                "enums_" + rules, tables, [emberd.FeatureConfig(table.name, table.name) for table in tables],
                plan=emberd.PlanConfig(rules=rules.lower(), bucket_hash="id_modulo", rotation=1, auto_stack=True,
                                       groups=[emberd.StackGroup(["combiner_SUM", "combiner_MEAN"], "both")])))

    def test_what_is_not_given_is_not_sent(self):
        text = emberd.ModelConfig("m", [emberd.TableConfig("t", 8, 4)], [emberd.FeatureConfig("t", "t")]).to_json()
        self.assertEqual(json.loads(text), {"name": "m", "features": [{"name": "t", "table": "t"}],
                                            "tables": [{"name": "t", "vocabulary_size": 8, "embedding_dim": 4}]})

    def test_a_model_from_a_file(self):
        model = self.client.declare(os.path.join(ROOT, "config", "samples", "model_small.textproto"))
        self.assertEqual(model.name, "small")
        for wrong, kind, said in (("models/clicks.pbtxt", FileNotFoundError, "config: there is no such file, and it is no text of a model: 'models/clicks.pbtxt'"),
                                  ({"name": "m"}, TypeError, "config: a dict is not allowed; it must be an emberd.ModelConfig, its text, or the path"), ("", ValueError, "name: \"\""),
                                  ('nam: "m"', ValueError, "there is no field \"nam\"")):
            with self.assertRaisesRegex(kind, said):
                self.client.declare(wrong)


if __name__ == "__main__":
    main()
