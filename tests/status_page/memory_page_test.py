"""The status page of a cluster that evicts models, and of one that does not.

What this would catch: a model that is shown elsewhere than it is; a pin that is not shown, or longer than it lasts; figures of memory
where there are none.

usage: memory_page_test.py EMBERD PICTURES_FOLDER [unittest options]

Exit status 77: there is no Chromium, so nothing was tested.
"""

import os
import subprocess
import sys
import tempfile
import unittest

import browser
import cluster
from page_checks import CUT_OFF, FAINT_TEXT, HIDDEN_WITHOUT_A_SIGN, NAMELESS

EMBERD, PICTURES = sys.argv[1:3]
del sys.argv[1:3]

# The words of each fact of each shard; and the rows of its table of models.
FACTS = "[...document.querySelectorAll('.shard .facts div')].map((fact) => [...fact.children].map((word) => word.textContent))"
ROWS = ("[...document.querySelectorAll('.shard')].map((shard) => [...shard.querySelectorAll("
        "'.more .scroller:nth-of-type(2) tbody tr')].map((row) => [...row.children].map((cell) => cell.textContent)))")


class MemoryPageTest(unittest.TestCase):
    def start(self, **options):
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.cluster = cluster.Cluster(EMBERD, folder.name, shards=2, **options)
        self.addCleanup(self.cluster.stop)

    def open(self):
        page = self.browser.open(self.cluster.url)
        self.addCleanup(page.close)
        page.wait("document.querySelectorAll('.shard .metered').length > 0")
        page.eval("document.querySelectorAll('.opener').forEach((opener) => opener.click())")
        return page

    @classmethod
    def setUpClass(cls):
        os.makedirs(PICTURES, exist_ok=True)
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        cls.addClassCleanup(folder.cleanup)
        cls.browser = browser.Browser(folder.name)
        cls.addClassCleanup(cls.browser.close)

    def emberctl(self, *arguments):
        subprocess.run([os.path.join(os.path.dirname(EMBERD), "emberctl"), *arguments, "-a", self.cluster.coordinator.grpc],
                       check=True, timeout=120, stdout=subprocess.DEVNULL)

    def declare(self, name):
        path = os.path.join(self.folder, name)
        with open(path, "w") as file:
            file.write(f'name: "{name}" tables {{ name: "t" vocabulary_size: 8192 embedding_dim: 8 '
                       'optimizer { adagrad {} } } features { name: "f" table: "t" batch_size: 4 }')
        self.emberctl("declare", path)

    def values(self, page, label):
        return [value for found, value in page.eval(FACTS) if found == label]

    def test_nothing_is_shown_where_models_stay(self):
        self.start()
        self.declare("first")
        page = self.open()
        page.wait(f"{FACTS}.some(([label, value]) => label === 'Models' && value === '1')")
        self.assertEqual(self.values(page, "Pinned"), [])
        self.assertNotIn("Resident", page.eval("[...document.querySelectorAll('.shard .metered:not([hidden])')].map("
                                               "(meter) => meter.textContent).join()"))
        self.assertEqual(page.eval("document.querySelectorAll('.shard .more .scroller:not([hidden])').length"), 2)
        self.assertEqual(page.complaints, [])

    def test_a_batch_is_not_its_model(self):
        """Would catch: a pinned or spilled model that is shown as its batches are, which come first, and larger by them."""
        self.start()
        page = self.open()
        doctored = page.eval("fetch('/status.json').then((answer) => answer.json())")
        table = {"model": "m", "bytes": "64", "uses": 0}
        for shard in doctored["stats"]["shards"]:
            shard["memory"] = {
                "bytes": "1024", "free_bytes": "896", "host_bytes": "0", "spilled_bytes": "64", "pinned_bytes": "64",
                "evictions": "1",
                "tables": [{**table, "stack": "", "place": "SPARSECORE", "address": "0", "pinned": False},
                           {**table, "stack": "t", "place": "SPARSECORE", "address": "64", "pinned": True},
                           {**table, "model": "n", "stack": "", "place": "SPARSECORE", "address": "128", "pinned": False},
                           {**table, "model": "n", "stack": "t", "place": "SPILLED", "address": "-1", "pinned": False}]}
        page = self.browser.open(self.cluster.url, doctored={"/status.json": doctored})
        self.addCleanup(page.close)
        page.wait(f"{FACTS}.some(([label]) => label === 'Pinned')")
        self.assertEqual(self.values(page, "Pinned"), 2 * ["1 model, 64 B"])
        self.assertEqual(page.eval(ROWS),
                         2 * [[["m", "resident", "64 B", "0", "yes"], ["n", "spilled to disk", "64 B", "0", "no"]]])

    def test_places_and_pins_of_models(self):
        # A model takes 64 KiB of each of 8 SparseCores, weights and slots: two fit, and half of one beside them.
        one = 8192 * 8 * 4 * 2 // 8
        with tempfile.TemporaryDirectory() as spill:
            self.start(sparsecore_bytes=2 * one + one // 2,
                       eviction=f'spill_folder: "{spill}" host_bytes_per_sparsecore: {one}')
            for name in ("first", "second", "third", "fourth"):
                self.declare(name)
                if name == "first":
                    self.emberctl("memory", "pin", name)
            page = self.open()
            page.wait(f"{ROWS}.length === 2 && {ROWS}.every((models) => models.length === 4)")
            for models in page.eval(ROWS):
                self.assertEqual({name: (where, pinned) for name, where, _, _, pinned in models},
                                 {"first": ("resident", "yes"), "fourth": ("resident", "no"),
                                  "third": ("in memory of the host", "no"), "second": ("spilled to disk", "no")})
            self.assertEqual(self.values(page, "On host"), 2 * ["64.0 KiB"])
            self.assertEqual(self.values(page, "Pinned"), 2 * ["1 model, 64.0 KiB"])
            self.assertEqual(self.values(page, "Evictions"), 2 * ["2"])
            self.assertEqual(len(self.values(page, "Spilled")), 2)
            self.assertNotIn("0 B", self.values(page, "Spilled"))
            self.assertIn("128 KiB of 160 KiB on each SparseCore", page.text(".shard"))
            # More tables than memory are no fault here.
            self.assertEqual(page.eval("document.querySelectorAll('.shard .meter.full').length"), 0)
            self.assertEqual(page.eval(FAINT_TEXT), [])
            self.assertEqual(page.eval(NAMELESS), [])
            for width in (360, 1360):
                page.resize(width, 900)
                page.wait(f"document.documentElement.clientWidth === {width}")
                self.assertEqual(page.eval(CUT_OFF), [], width)
                page.wait(f"{HIDDEN_WITHOUT_A_SIGN}.length === 0")  # the page marks its tables in a later frame
                page.screenshot(os.path.join(PICTURES, f"memory_{width}.png"))
            self.emberctl("memory", "release")
            page.wait(f"{ROWS}.every((models) => models.every(([name, where]) => (where === 'resident') === (name === 'first')))")
            self.emberctl("memory", "unpin", "first")
            page.wait(f"{FACTS}.filter(([label, value]) => label === 'Pinned' && value === 'none').length === 2")
            self.assertEqual(page.complaints, [])
            self.cluster.stop()


if __name__ == "__main__":
    if browser.find() is None:
        print("skipped: the status page is tested in Chromium, which is not here (Debian package: chromium)")
        sys.exit(77)
    unittest.main(verbosity=2)
