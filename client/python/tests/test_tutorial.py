"""The tutorials run, learn what they say, and leave their plots; docs/tutorial.md and docs/tutorials/*.md are what they say."""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import unittest

import cluster

DOCS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "docs")
FRAMEWORK = os.environ.get("KERAS_BACKEND", "torch")  # whose tutorials run in this environment
OUTPUT = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
if not importlib.util.find_spec(FRAMEWORK):
    print(f"SKIP: {FRAMEWORK} is not installed")
    sys.exit(77)


class TutorialTest(unittest.TestCase):
    def said(self, framework, name):
        """What it prints, here and in the repository, each in turn."""
        if framework != FRAMEWORK:
            self.skipTest(f"SKIP: it runs with {framework}")
        source = os.path.join(DOCS, f"{name}.py")
        with open(os.path.splitext(source)[0] + ".md", encoding="utf-8") as file:
            shown = file.read()
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, "-B", os.path.join(DOCS, "render.py"), folder, source], capture_output=True, text=True, timeout=600, cwd=folder,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MPLCONFIGDIR": folder, "EMBERD_ADDRESS": ""})
            self.assertEqual(done.returncode, 0, done.stderr)
            plots, drawn = re.findall(r"^!\[\w+\]\((\w+\.png)\)$", shown, re.MULTILINE), importlib.util.find_spec("matplotlib")
            self.assertTrue(plots)
            for where in (folder, os.path.dirname(source)) if drawn else (os.path.dirname(source),):
                for plot in plots:
                    with open(os.path.join(where, plot), "rb") as file:
                        self.assertEqual(file.read(8), b"\x89PNG\r\n\x1a\n")
            with open(os.path.join(folder, os.path.basename(name) + ".md"), encoding="utf-8") as file:
                rendered = file.read()
        self.assertEqual(OUTPUT.sub("", rendered), OUTPUT.sub("", shown), "docs/render.py renews it")
        return ["".join(OUTPUT.findall(one)) for one in (rendered, shown)]

    def check(self, framework, name, pattern, is_right):
        """is_right: of the numbers that the pattern finds, all of them."""
        for said in self.said(framework, name):
            found = [float(number) for groups in re.findall(pattern, said) for number in ((groups,) if isinstance(groups, str) else groups)]
            self.assertTrue(found and is_right(*found), said)

    def test_words(self):
        for said in self.said("jax", "tutorial"):
            entropy = float(re.search(r"entropy (\S+)", said)[1])
            first, last = map(float, re.search(r"loss (\S+) at first, (\S+) at the end", said).groups())
            self.assertLess(last, entropy)
            self.assertGreater(first, entropy)
            self.assertRegex(said, r"hot rows: and \d+, the \d+|hot rows: the \d+, and \d+")
            # 50 million rows of 128 floats, twice.
            self.assertAlmostEqual(float(re.search(r"chips: +1 hold +(\S+) GiB", said)[1]), 47.68, places=1)
            self.assertIn("the next is 240", said)

    def test_clicks(self):
        self.check("torch", "tutorials/clicks", r"held-out loss (\S+)", lambda small, middle, large: large < middle < small and large < 0.55)

    def test_sequences(self):
        self.check("torch", "tutorials/sequences", r"; (\S+) of the next items are hit", lambda hits: 0.75 < hits <= 1)

    def test_serving(self):
        self.check("torch", "tutorials/serving", r"(\S+) of the answers are right at first, (\S+) at the end", lambda first, last: first < last and last > 0.9)

    def test_watching(self):
        for said in self.said("torch", "tutorials/watching"):
            self.assertRegex(said, r"one of the lines: shop: examples / s: [\d,.]+; ids / s: ")
            self.assertRegex(said, "TensorBoard .*examples_per_second, ids_per_second, .*hottest_share")
            self.assertRegex(said, r"statistics: \d+ ids in \d+ batches, \d+ of them unique in their batch; 0 lost\nhot rows: row 0 of items has [1-4]\d%")
            self.assertRegex(said, r"limits: [1-9]\d* unique ids .*allowed: 0\nmemory: shard 0 holds [1-9]\d* bytes")
            self.assertGreater(int(re.search(r"reset: (\d+) rows", said)[1]), 1000)
            self.assertTrue(said.endswith("begins at step 0\ndropped: True; models: []\n"), said)

    def test_from_torchrec(self):
        for said in self.said("torch", "tutorials/from_torchrec"):
            first, last, apart = map(float, re.search(r"loss (\S+) at first, (\S+) at the end.* at most (\S+) away", said).groups())
            self.assertLess(last, 0.8 * first)
            self.assertLess(apart, 1e-3)
            self.assertIn("groups: [256, 16] and [256, 32]; the tags of both are equal: True", said)
            first, last = map(float, re.search(r"history: \d+ rows of 256 samples; loss (\S+) at first, (\S+) at the end", said).groups())
            self.assertLess(last, 0.6 * first)

    def test_jax_loop(self):
        self.check("jax", "tutorials/jax_loop", r"loss (\S+) at first, (\S+) at the end\n.*differ by (\S+) at most",
                   lambda first, last, apart: last < 0.7 * first and apart < 1e-5)

    def test_from_keras(self):
        self.check("jax", "tutorials/from_keras", r"loss (\S+) at first[^;]*after: loss (\S+) at the end; the losses differ by (\S+) at most",
                   lambda first, last, apart: last < first and apart < 1e-4)

    def test_from_tensorflow(self):
        for said in self.said("tensorflow", "tutorials/from_tensorflow"):
            self.assertRegex(said, "refused: OutOfRange: .*400")
            first, last, apart = map(float, re.search(r"loss (\S+) at first[^;]*after: loss (\S+) at the end; the losses differ by (\S+) at most", said).groups())
            self.assertLess(last, first)
            self.assertLess(apart, 1e-4)


if __name__ == "__main__":
    cluster.main()
