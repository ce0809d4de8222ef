"""A test that leaves something in its temporary folder must fail, whatever it says itself."""
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import unittest

OWN_TMP = pathlib.Path(__file__).parent / "own_tmp.sh"


class OwnTmpTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.parent = pathlib.Path(folder.name) / "tmp"

    def run_test(self, script):
        return subprocess.run(["sh", OWN_TMP, self.parent, "sh", "-c", script], capture_output=True, text=True)

    def left(self):
        return list(self.parent.iterdir())

    def test_a_clean_test_ends_as_it_does_by_itself(self):
        for status in 0, 3:
            run = self.run_test(f'touch "$TMPDIR/a" && rm "$TEST_TMPDIR/a"; exit {status}')
            self.assertEqual((run.returncode, run.stderr), (status, ""))
        self.assertEqual(self.left(), [])

    def test_leftovers_are_named_and_fail(self):
        run = self.run_test('mkdir "$TMPDIR/folder"; touch "$TMPDIR/folder/.file"')
        self.assertEqual(run.returncode, 1)
        self.assertIn("folder/.file", run.stderr)
        self.assertEqual(self.left(), [])

    def test_arguments_stay_as_they_are(self):
        command = ["sh", OWN_TMP, self.parent, sys.executable, "-c", "import sys; print(sys.argv[1:])", "a b", "*", ""]
        self.assertEqual(subprocess.check_output(command, text=True), "['a b', '*', '']\n")

    def test_what_a_killed_test_left_goes_with_the_next(self):
        script = 'touch "$TMPDIR/file"; echo ready; exec sleep 60'
        run = subprocess.Popen(["sh", OWN_TMP, self.parent, "sh", "-c", script], stdout=subprocess.PIPE, text=True,
                               start_new_session=True)
        with run:
            self.assertEqual(run.stdout.readline(), "ready\n")
            self.assertEqual(self.run_test("exit 0").returncode, 0)
            self.assertEqual(len(self.left()), 1, "the folder of a test that runs is left alone")
            os.killpg(run.pid, signal.SIGKILL)
        self.assertEqual(self.run_test("exit 0").returncode, 0)
        self.assertEqual(self.left(), [])


if __name__ == "__main__":
    unittest.main()
