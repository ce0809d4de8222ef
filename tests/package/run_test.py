#!/usr/bin/env python3
"""What ./run is made of: the packages that deploy/install_packages.sh would install, on a system whose dpkg and apt are ours,
what cmake/progress.py says of a build, and what .ci/run does not let be skipped.
"""

import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GROUPS = """# a list
[build]
g++
ninja-build
[test] # more
g++
one | other
only-in-13 |
[lint]
gone | goner
"""
# name: what it does instead; $LOG is what was asked of apt-get.
PROGRAMS = {
    "dpkg-query": 'printf "installed %s\\n" $INSTALLED',
    "apt-cache": 'case " $KNOWN " in *" $2 "*) echo "Package: $2";; *) exit 100;; esac',
    "apt-get": 'echo "$@" >>"$LOG"; exit ${APT_STATUS:-0}',
    "sudo": 'exec "$@"',
    "tee": "cat >/dev/null",
    "chmod": "true",
}


class InstallTest(unittest.TestCase):
    @staticmethod
    def prepare(place, **programs):
        """A folder with a script to run whose system lies there, too, with these programs."""
        (place / "bin").mkdir()
        for name, text in (PROGRAMS | programs).items():
            (place / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
            (place / "bin" / name).chmod(0o755)
        (place / "packages.txt").write_text(GROUPS)
        script = place / "install_packages.sh"
        script.write_text((ROOT / "deploy/install_packages.sh").read_text().replace(
            "/usr/sbin/policy-rc.d", str(place / "policy-rc.d")).replace("/var/lib/dpkg", str(place)))
        return script

    @staticmethod
    def environment(place, **more):
        return os.environ | {"PATH": f"{place / 'bin'}:{os.environ['PATH']}", "LOG": str(place / "log")} | more

    def install(self, *groups, installed="", known="", status=0):
        """(status, what it said, packages it asked apt-get for)"""
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            done = subprocess.run(
                ["bash", self.prepare(place), *groups], capture_output=True, text=True, check=False,
                env=self.environment(place, INSTALLED=installed, KNOWN=known, APT_STATUS=str(status)))
            asked = (place / "log").read_text().splitlines() if (place / "log").exists() else []
            self.assertFalse((place / "policy-rc.d").exists(), "services stay refused")
        packages = [line.split("Timeout=300 ")[1].split() for line in asked if "Timeout=300 " in line]
        return done.returncode, done.stderr, packages[0] if packages else []

    def test_each_group_installs_its_own_once(self):
        self.assertEqual(self.install("build", known="g++ ninja-build one")[2], ["g++", "ninja-build"])
        self.assertEqual(self.install("build", "test", known="g++ ninja-build one")[2], ["g++", "ninja-build", "one"])

    def test_what_is_there_is_left_alone(self):
        status, said, packages = self.install("build", installed="g++ ninja-build")
        self.assertEqual((status, said, packages), (0, "", []))

    def test_of_a_choice_the_first_that_is_known(self):
        self.assertEqual(self.install("test", installed="g++", known="other only-in-13")[2], ["other", "only-in-13"])
        self.assertEqual(self.install("test", installed="g++ other")[2], [])  # one of them is enough

    def test_what_no_release_has_is_asked_for_by_its_first_name(self):
        self.assertEqual(self.install("lint")[2], ["gone"])  # apt-get says that it does not exist

    def test_two_runs_at_once_take_turns(self):
        """Would catch: `apt-get update` that fails as another one is at work, and services that the first to end lets start."""
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            busy = 'mkdir "$LOG.busy" || echo both >>"$LOG"; sleep 0.2; rmdir "$LOG.busy"; echo "$1" >>"$LOG"'
            script = self.prepare(place, **{"apt-get": busy})
            environment = self.environment(place, INSTALLED="", KNOWN="g++ ninja-build")
            runs = [subprocess.Popen(["bash", script, "build"], stderr=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
            said = "".join(run.communicate()[1] for run in runs)
            self.assertEqual([run.returncode for run in runs], [0, 0], said)
            self.assertEqual((place / "log").read_text().split(), ["update", "install"] * 2)

    def test_a_failure_is_shown(self):
        status, said, _ = self.install("build", known="g++", status=100)
        self.assertEqual(status, 100)
        self.assertRegex(said, "installing 2 packages for build: g\\+\\+ ninja-build\n.*failed \\(status 100\\)")


class ProgressTest(unittest.TestCase):
    """A project that looks for new sources in every build, as this one does."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.place = Path(self.folder.name)
        (self.place / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.25)\nproject(small C)\nfile(GLOB sources CONFIGURE_DEPENDS *.c)\n"
            "add_library(small STATIC ${sources})\n")
        for name in ("a", "b"):
            self.write(name)
        subprocess.run(["cmake", "-G", "Ninja", "-S", self.place, "-B", self.place / "build"], check=True, capture_output=True)

    def write(self, name, text="int {name};\n"):
        (self.place / f"{name}.c").write_text(text.format(name=name))

    def build(self):
        done = subprocess.run([sys.executable, "-B", ROOT / "cmake/progress.py", self.place / "build"], capture_output=True,
                              text=True, check=False)
        return done.returncode, done.stdout

    def test_the_plan_is_that_of_the_whole_build(self):
        status, said = self.build()
        self.assertEqual(status, 0, said)
        self.assertRegex(said, r"^    2 objects to compile, 1 other steps\n    done in \d+ s\n$")

    def test_a_new_source_is_built(self):
        self.build()
        self.write("c")
        status, said = self.build()
        self.assertEqual(status, 0, said)
        self.assertTrue(list(self.place.glob("build/**/c.c.o")), said)

    def test_what_failed_is_shown_whole(self):
        self.write("b", "this is not C\n")
        status, said = self.build()
        self.assertEqual(status, 1)
        self.assertIn("b.c:1:1: error: unknown type name", said)
        self.assertNotIn("done in", said)


class CiTest(unittest.TestCase):
    """What Debian's packages suffice for counts as failed in CI where it is skipped."""

    def test_each_test_that_may_skip_itself_must_run(self):
        must = set(re.search(r"EMBERD_MUST_RUN='\^emberd_python_\((.*)\)_test\$'", (ROOT / ".ci/run").read_text())[1].split("|"))
        python = ROOT / "client/python"
        names = re.search(r"foreach\(name (.*)\)", (python / "CMakeLists.txt").read_text())[1].split()
        self.assertEqual(must - set(names), set(), "there are no such tests")
        skip = {name for name in names if "sys.exit(77)" in (python / f"tests/test_{name}.py").read_text()}
        self.assertIn("torch", skip)
        self.assertEqual(skip - must, set())


if __name__ == "__main__":
    unittest.main()
