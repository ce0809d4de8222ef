"""Runs what the READMEs and the examples tell a user to run, as it stands there, and checks that it learns."""

import os
import re
import subprocess
import sys
import tempfile
import unittest

from cluster import has_torch, main

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "..", "..", "..")


CONFIG = """
import emberd
config = emberd.ModelConfig("clicks", tables=[emberd.TableConfig("users", vocabulary_size=1000, embedding_dim=16)],
                            features=[emberd.FeatureConfig("user", "users")])
"""


class IssuesTest(unittest.TestCase):
    """What this would catch: a test that was renamed or removed, and still stands in docs as what shows something."""

    def rows(self, document, table):
        """The cells of the rows of a table."""
        with open(os.path.join(HERE, "..", "docs", document), encoding="utf-8") as file:
            lines = re.findall(r"(?m)(?:^\|.*\n)+", file.read())[table].splitlines()[2:]
        return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]

    def check_tests(self, said):
        for one in said.split(", "):
            self.check_test(one)

    def check_test(self, said):
        path, case, name = re.fullmatch(r"`(\S+): (\w+)\.(\w+)`", said).groups()
        with self.subTest(f"{case}.{name}"), open(os.path.join(ROOT, path), encoding="utf-8") as file:
            text = file.read()
            if path.endswith(".cc"):
                self.assertRegex(text, rf"(?m)^TEST(_F|_P)?\({case}, {name}\)")
            else:
                of_case = re.search(rf"(?ms)^class {case}\b.*?(?=^\S|\Z)", text)
                self.assertIn(f"    def {name}(self", of_case[0])

    def test_every_test_that_is_named_is_there(self):
        rows = self.rows("issues.md", 0)
        self.assertGreater(len(rows), 25)
        for row in rows:
            self.check_tests(row[-1])

    def test_each_yes_of_the_comparison_has_a_test_and_each_of_others_a_document(self):
        rows, documents = (self.rows("compared.md", table) for table in (0, 1))
        self.assertGreater(len(rows), 15)
        numbers = {number for number, _ in documents}
        for what, *others, here, test in rows:
            self.assertEqual(bool(test), not re.match(r"no\b", here), what)
            if test:
                self.check_tests(test)
            for said in others:
                self.assertTrue(said == "-" or re.search(r" \[(\d)\]$", said)[1] in numbers, (what, said))


    def test_each_row_of_the_followed_systems_says_what_there_is_and_what_shows_it(self):
        rows = [row for table in range(5) for row in self.rows("followed.md", table)]
        self.assertGreater(len(rows), 132)
        self.assertEqual(len({there for there, _, _ in rows}), len(rows))
        for there, here, test in rows:
            said = re.match(r"(same|differs|in part|no)\b(?=$|[,;:] | )", here)
            self.assertIsNotNone(said, there)
            self.assertEqual(bool(test), said[1] != "no", there)
            if test:
                self.check_tests(test)


class ExamplesTest(unittest.TestCase):
    """What this would catch: an example that no test starts, or only one that ctest does not run."""

    def test_each_example_is_started_by_a_test_that_ctest_runs(self):
        with open(os.path.join(HERE, "..", "CMakeLists.txt"), encoding="utf-8") as file:
            registered = re.sub("#.*", "", file.read())
        names = {f"test_{name}.py" for names in re.findall(r"foreach\(name ([^)]*)\)", registered) for name in names.split()}
        started = set()
        for name in names | set(re.findall(r"test_\w+\.py", registered)):
            with open(os.path.join(HERE, name), encoding="utf-8") as file:
                started |= set(re.findall(r'"(\w+\.py)"', file.read()))
        examples = {name for name in os.listdir(os.path.join(HERE, "..", "examples")) if name.endswith(".py")}
        self.assertGreater(len(examples), 10)
        self.assertEqual(examples - started, set(), "give it a test, and add the test's file to client/python/CMakeLists.txt")


class ReadmeTest(unittest.TestCase):
    def run_python(self, *arguments, timeout=600):
        done = subprocess.run([sys.executable, "-B", *arguments], capture_output=True, text=True, timeout=timeout,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def loss_of(self, *path):
        """Of the first example of a README."""
        with open(os.path.join(*path), encoding="utf-8") as file:
            example = re.search(r"^```python\n(import emberd.*?)^```", file.read(), re.MULTILINE | re.DOTALL)[1]
        return float(re.search(r"loss=(\S+)", self.run_python("-c", example))[1])

    def test_the_example_of_checkpoints(self):
        with open(os.path.join(HERE, "..", "README.md"), encoding="utf-8") as file:
            example = re.search(r"## Checkpoints\n\n```python\n(.*?)^```", file.read(), re.MULTILINE | re.DOTALL)[1]
        with tempfile.TemporaryDirectory() as folder:
            said = self.run_python("-c", CONFIG + example.replace("build/data", folder))
        self.assertRegex(said, r"\nbefore \d{4}-")

    def test_the_example_of_programs(self):
        with open(os.path.join(HERE, "..", "README.md"), encoding="utf-8") as file:
            example = re.search(r"## Programs\n.*?```python\n(.*?)^```", file.read(), re.MULTILINE | re.DOTALL)[1]
        self.assertTrue(1e-8 < float(re.search(r"loss (\S+)", self.run_python("-c", example))[1]) < 1e-5)

    def test_the_example_of_the_package(self):
        self.assertLess(self.loss_of(HERE, "..", "README.md"), 0.1)

    @unittest.skipUnless(has_torch(), "SKIP: PyTorch is not installed (deploy/packages.txt)")
    def test_the_example_of_the_repository(self):
        self.assertLess(self.loss_of(ROOT, "README.md"), 0.6)  # a coin has 0.693

    @unittest.skipUnless(has_torch(), "SKIP: PyTorch is not installed (deploy/packages.txt)")
    def test_clicks_are_learned_by_two_ranks_as_by_one(self):
        script = os.path.join(HERE, "..", "examples", "click_ddp.py")
        results = [re.search(r"steps=(\d+) loss=(\S+)", self.run_python(script, "--ranks", str(ranks))).groups()
                   for ranks in (2, 1)]
        self.assertEqual([steps for steps, _ in results], ["200", "200"])
        self.assertLess(float(results[1][1]), 0.5)  # a coin has 0.693
        self.assertAlmostEqual(float(results[0][1]), float(results[1][1]), delta=0.1)  # rank 0 sees its half of the last batch

    def test_requests_are_served_from_two_checkpoints(self):
        said = self.run_python(os.path.join(HERE, "..", "examples", "serving.py"), timeout=600)
        found = re.findall(r"^serving scores/version-(\d): right=(\S+), 1000 requests in (\d+) batches$", said, re.MULTILINE)
        self.assertEqual([version for version, _, _ in found], ["0", "1"])
        self.assertGreater(float(found[1][1]), 0.9)  # a coin has 0.5

    @unittest.skipUnless(has_torch(), "SKIP: PyTorch is not installed (deploy/packages.txt)")
    def test_the_next_item_of_a_sequence_is_learned(self):
        said = self.run_python(os.path.join(HERE, "..", "examples", "sequences.py"), "--epochs", "1", timeout=600)
        self.assertGreater(float(re.search(r"hits=(\S+)", said)[1]), 0.2)  # guessing has 0.01

    @unittest.skipUnless(has_torch(), "SKIP: PyTorch is not installed (deploy/packages.txt)")
    def test_two_towers_are_trained_and_served(self):
        said = self.run_python(os.path.join(HERE, "..", "examples", "two_towers.py"), timeout=600)
        self.assertGreater(float(re.search(r"recall=(\S+)", said)[1]), 0.2)  # guessing has 0.03

    @unittest.skipUnless(has_torch(), "SKIP: PyTorch is not installed (deploy/packages.txt)")
    def test_tables_learn_at_their_own_rates_and_one_is_frozen(self):
        """Would catch: a scheduler that does not reach the tables, rates that the tables of a stack must share, and a frozen row that moves."""
        said = self.run_python(os.path.join(HERE, "..", "examples", "own_rates.py"))
        user, item, right, frozen = re.search(r"user=(\S+) item=(\S+) right=(\S+) frozen=(\w+)", said).groups()
        self.assertEqual((float(user), float(item), frozen), (5.0, round(3 * 0.995 ** 400, 4), "True"))
        self.assertGreater(float(right), 0.9)  # saying that all are liked has 0.6

    @unittest.skipUnless(has_torch(), "SKIP: PyTorch is not installed (deploy/packages.txt)")
    def test_a_trained_table_of_torch_moves_and_goes_on(self):
        """Would catch: slots or a number of steps that do not move, and a part of a checkpoint that is left out without a word."""
        said = self.run_python(os.path.join(HERE, "..", "examples", "moved_tables.py"))
        step, apart, left, frozen = re.search(r"step=(\d+) apart=(\S+) left=(\d) frozen=(\w+)", said).groups()
        self.assertLess(float(apart), 1e-4)  # with slots of zero it is 1.1, and from step 0 0.4
        self.assertEqual((step, left, frozen), ("100", "2", "True"))
        self.assertIn("not taken: table 'words': rows 500 to 599, which the source does not have\n", said)

    @unittest.skipUnless(has_torch(), "SKIP: PyTorch is not installed (deploy/packages.txt)")
    def test_the_strongest_tag_decides_and_a_loop_is_left_and_begun_again(self):
        """Would catch: ids of a loop that was left which make steps, or refuse the next loop; and rows that are summed."""
        said = self.run_python(os.path.join(HERE, "..", "examples", "tags_torch.py"))
        steps, right = re.search(r"steps=(\d+) loss=\S+ right=(\S+)", said).groups()
        self.assertEqual(steps, "220")
        self.assertGreater(float(right), 0.9)  # saying that none is liked has 0.7

    @unittest.skipUnless(has_torch(), "SKIP: PyTorch is not installed (deploy/packages.txt)")
    def test_movielens_is_learned_as_by_plain_torch(self):
        script = os.path.join(HERE, "..", "examples", "movielens.py")
        data = os.path.join(ROOT, "tests", "data", "movielens")
        results = [re.search(r"loss=(\S+) auc=(\S+)", self.run_python(script, data, *options)).groups()
                   for options in ((), ("--plain",))]
        self.assertAlmostEqual(float(results[0][0]), float(results[1][0]), delta=1e-4)
        self.assertAlmostEqual(float(results[0][1]), float(results[1][1]), delta=1e-3)


if __name__ == "__main__":
    main()
