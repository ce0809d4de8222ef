"""The lines of code of a click model that docs/compared.md counts, and that it learns.

What this would catch: a count that is no longer that of the files, and a model that is short because it does not train.
"""

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import tokenize
import unittest

import cluster

DOCS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "docs")
FOLDER = os.path.join(DOCS, "click_model")
COIN = 0.693
SPACES = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines_of(name):
    """That have code: not those that are empty, comments or docstrings."""
    path = os.path.join(FOLDER, f"with_{name}.py")
    with open(path, "rb") as file:
        lines = {line for token in tokenize.tokenize(file.readline) if token.type not in SPACES | {tokenize.ENCODING}
                 for line in range(token.start[0], token.end[0] + 1)}
    with open(path, encoding="utf-8") as file:
        first = ast.parse(file.read()).body[0]
    return len(lines - set(range(first.lineno, first.end_lineno + 1)))


class ClickModelTest(unittest.TestCase):
    def run_model(self, name, changed=("", "")):
        """The loss at the end."""
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(FOLDER, f"with_{name}.py"), encoding="utf-8") as file:
                source = file.read()
            self.assertIn(changed[0], source)
            script = os.path.join(folder, "model.py")
            with open(script, "w", encoding="utf-8") as file:
                file.write(source.replace(*changed))
            done = subprocess.run([sys.executable, "-B", script], capture_output=True, text=True, timeout=600,
                                  env={**os.environ, "PYTHONPATH": os.pathsep.join([FOLDER, *sys.path]), "EMBERD_ADDRESS": "", "JAX_PLATFORMS": "cpu"})
            self.assertEqual(done.returncode, 0, done.stderr)
        return float(re.search(r"loss (\S+)", done.stdout)[1])

    def test_the_table_has_the_lines_of_the_files(self):
        with open(os.path.join(DOCS, "compared.md"), encoding="utf-8") as file:
            row = next(line for line in file if line.startswith("| lines of code of"))
        counts = [int(re.match(r" *(\d+)", cell)[1]) for cell in row.split("|")[2:6]]
        self.assertEqual(counts, [lines_of(name) for name in ("torchrec", "keras_rs", "tfra", "emberd")])

    @unittest.skipUnless(importlib.util.find_spec("torch"), "SKIP: PyTorch is not installed")
    def test_it_learns_in_pytorch(self):
        self.assertLess(self.run_model("emberd"), 0.8 * COIN)

    @unittest.skipUnless(importlib.util.find_spec("keras_rs"), "SKIP: keras-rs is not installed")
    def test_it_learns_in_keras(self):
        for changed in (("import keras_rs", "from emberd import keras as keras_rs"), ("", "")):
            self.assertLess(self.run_model("keras_rs", changed), 0.8 * COIN)


if __name__ == "__main__":
    cluster.main()
