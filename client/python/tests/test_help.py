"""What help() and `python -m emberd` show: every public class, function and method says what it is, and every field of a description
its range and default.

What this would catch: a function that comes without a word, a default that changes in model.proto alone, and paths that are wrong
when somebody asks what is installed.
"""

import dataclasses
import inspect
import os
import pydoc
import re
import subprocess
import sys
import tempfile
import unittest

from cluster import emberd, main
from every_kind import public_classes

from emberd import config

# In comments of model.proto.
RANGE = re.compile(r"default (?:true|false|-?[\d.]+(?:e-?\d+)?)|[<>]=? [-\d.]+|[\[(]0, 1[\])]|[01] to \d+(?:\^\d+)?(?: - 1)?")
ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..")


def described(path, given):
    """The comments of model.proto, by the path in its descriptor."""
    from google.protobuf import descriptor_pb2
    target = os.path.join(path, "set")
    subprocess.run(["protoc", f"-I{ROOT}/proto", f"--descriptor_set_out={target}", "--include_source_info", given], check=True)
    with open(target, "rb") as file:
        found = descriptor_pb2.FileDescriptorSet.FromString(file.read()).file[0]
    return found, {tuple(one.path): f"{one.leading_comments} {one.trailing_comments}" for one in found.source_code_info.location}


def entries(doc):
    """What a docstring says of each field."""
    found = {}
    doc = inspect.cleandoc(doc)  # as Python 3.13 keeps it
    for names, text in re.findall(r"^(\w+(?:, \w+)*): (.*?)(?=^\w+(?:, \w+)*: |\Z)", doc, re.MULTILINE | re.DOTALL):
        found.update(dict.fromkeys(names.split(", "), text.lower()))
    return found


class HelpTest(unittest.TestCase):
    def test_everything_public_says_what_it_is(self):
        silent = []
        for name, kind in public_classes().items():
            if name.startswith("emberd.compat."):  # as those say that they stand for
                continue
            if not (kind.__doc__ or "").strip() or (kind.__doc__ or "").startswith(kind.__name__ + "("):
                silent.append(name)
            for method, one in vars(kind).items():
                one = getattr(one, "__func__", getattr(one, "fget", one))
                if inspect.isfunction(one) and not method.startswith("_") and not one.__doc__:
                    silent.append(f"{name}.{method}")
        for name in emberd.__all__:
            if inspect.isfunction(getattr(emberd, name)) and not getattr(emberd, name).__doc__:
                silent.append(name)
        self.assertEqual(silent, [])

    def test_every_field_of_a_description_has_range_and_default(self):
        with tempfile.TemporaryDirectory() as folder:
            proto, comments = described(folder, "emberd/v1/model.proto")
        messages = {one.name: (place, one) for place, one in enumerate(proto.message_type)}
        kinds = {message: getattr(config, message) for message in messages if hasattr(config, message)}
        for base, message in ((config.Optimizer, "OptimizerConfig"), (config.Initializer, "InitializerConfig")):
            types = {field.name: field.type_name.split(".")[-1] for field in messages[message][1].field}
            kinds.update((types[kind.kind], kind) for kind in config._kinds(base) if kind is not config.TruncatedNormal)
        kinds["OptimizerConfig"] = config.Optimizer
        wrong = []
        for message, kind in kinds.items():
            said = entries(kind.__doc__)
            place, described_by = messages[message]
            for number, field in enumerate(described_by.field):
                if field.name not in {one.name for one in dataclasses.fields(kind)}:
                    continue
                comment = comments.get((4, place, 2, number), "").lower()
                wanted = RANGE.findall(comment)
                missing = [one for one in wanted if one.rstrip(".") not in said.get(field.name, "")]
                if field.name not in said or missing:
                    wrong.append(f"{kind.__name__}.{field.name}: {missing or 'no word'}")
        self.assertGreater(len(kinds), 20)
        self.assertEqual(wrong, [])

    def test_help_of_the_package(self):
        text = pydoc.render_doc(emberd, renderer=pydoc.plaintext)
        wanted = ("import emberd.torch", "emberd.nested", "python -m emberd", "new: starts one", "vocabulary_size: rows, 1 to 2^40", "class TrainStream")
        self.assertEqual([one for one in wanted if one not in text], [])

    def run_module(self, **environment):
        done = subprocess.run([sys.executable, "-B", "-m", "emberd"], capture_output=True, text=True, timeout=600,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment})
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout

    def test_the_module_says_what_is_installed(self):
        said = self.run_module()
        for one in (f"emberd {emberd.__version__}", os.environ["EMBERD_LIBRARY"], os.path.join(os.environ["EMBERD_PROGRAMS"], "emberd"),
                    "import emberd", "help(emberd)", "emberctl --help"):
            self.assertIn(one, said)
        paths = {name: re.search(rf"^  {name} +(/\S+)$", said, re.MULTILINE)[1] for name in ("examples", "tutorials", "README", "COMING_FROM", "issues", "proto")}
        self.assertEqual([name for name, path in paths.items() if not os.path.exists(path)], [])
        said = self.run_module(EMBERD_LIBRARY="/nowhere/library.so", EMBERD_PROGRAMS="/nowhere")
        self.assertRegex(said, "library +/nowhere/library.so, which is not there; install the wheel, or set EMBERD_LIBRARY")
        self.assertRegex(said, "emberctl +/nowhere/emberctl is not there; install the wheel of emberd, or set EMBERD_PROGRAMS")


if __name__ == "__main__":
    main()
