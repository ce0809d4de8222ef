"""Installs the wheel into an empty environment, and trains there.

What this would catch: a library that is missing from the wheel or comes from this machine, a program that cannot be run,
and a wheel that grows beyond what it may be.

usage: test_wheel.py FOLDER_OF_THE_WHEEL
"""

import glob
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
import zipfile

WHEELS = sys.argv.pop(1)
HERE = os.path.dirname(os.path.abspath(__file__))
README = os.path.join(HERE, "..", "README.md")
MOST_BYTES = 30 << 20


def run(*argv, **options):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("EMBERD_", "PYTHON"))}
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600, env=environment,
                          **options)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(argv)} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def pythons():
    """The versions that the wheel is for, as far as this machine has them: in PATH or in pyenv."""
    for minor in range(10, 14):
        name = f"python3.{minor}"
        for path in [shutil.which(name), *glob.glob(os.path.expanduser(f"~/.pyenv/versions/3.{minor}.*/bin/{name}"))]:
            if path and subprocess.run([path, "-c", "import venv, ctypes"], capture_output=True).returncode == 0:
                yield f"3.{minor}", path
                break


def example():
    with open(README, encoding="utf-8") as file:
        return re.search(r"^```python\n(.*?)^```", file.read(), re.MULTILINE | re.DOTALL)[1]


class WheelTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = folder.name
        cls.wheel = max(glob.glob(os.path.join(WHEELS, "emberd-*.whl")), key=os.path.getmtime)
        environment = os.path.join(folder.name, "environment")
        run(sys.executable, "-m", "venv", "--system-site-packages", environment)  # which has NumPy
        cls.python = os.path.join(environment, "bin", "python")
        cls.bin = os.path.join(environment, "bin")
        cls.install = [cls.python, "-m", "pip", "install", "--no-compile", "--disable-pip-version-check"]  # what is imported is compiled then
        run(*cls.install, "--no-index", "--no-deps", cls.wheel)
        cls.package = run(cls.python, "-c", "import emberd; print(emberd.__path__[0])", cwd="/").strip()

    def test_its_name_and_size(self):
        self.assertRegex(os.path.basename(self.wheel), r"^emberd-[\d.]+-py3-none-manylinux_2_\d\d_x86_64\.whl$")
        self.assertLess(os.path.getsize(self.wheel), MOST_BYTES)
        with zipfile.ZipFile(self.wheel) as archive:
            names = archive.namelist()
        self.assertIn("emberd/py.typed", names)
        self.assertTrue([name for name in names if name.endswith("licenses/LICENSE")])

    def test_its_tag_is_of_the_glibc_that_it_needs(self):
        """pip installs it on systems with a glibc that is not older than the tag says."""
        with unittest.mock.patch("os.confstr", return_value="glibc 2.41"):
            self.assertEqual(runpy.run_path(os.path.join(HERE, "..", "make_wheel.py"))["TAG"], "py3-none-manylinux_2_41_x86_64")
        tag = int(re.search(r"manylinux_2_(\d+)", self.wheel)[1])
        for kind in ("_bin", "_lib"):
            for name in os.listdir(os.path.join(self.package, kind)):
                needed = run("objdump", "-T", os.path.join(self.package, kind, name))
                self.assertLessEqual(max(map(int, re.findall(r"GLIBC_2\.(\d+)", needed)), default=0), tag, name)

    def test_the_example_of_the_readme_learns(self):
        self.assertTrue(self.package.startswith(self.folder), self.package)
        # The second time beside another gRPC and protobuf in the same process.
        for before in ("", "import grpc; grpc.insecure_channel('127.0.0.1:1').close()\n"):
            said = run(self.python, "-c", before + example(), cwd="/")
            self.assertLess(float(re.search(r"loss=(\S+)", said)[1]), 0.1)

    def test_examples_and_documents_are_in_it(self):
        said = run(self.python, "-m", "emberd", cwd="/")
        paths = {name: re.search(rf"^  {name} +(/\S+)$", said, re.MULTILINE)[1] for name in ("examples", "tutorials", "README", "COMING_FROM", "issues", "proto")}
        for name, path in paths.items():
            self.assertTrue(path.startswith(self.package) and os.path.exists(path), f"{name}: {path}")
        with open(paths["README"], encoding="utf-8") as file:
            links = re.findall(r"\]\(([^)#]+)\)", file.read())
        self.assertIn("tutorials/clicks.py", links)
        self.assertEqual([link for link in links if not os.path.exists(os.path.join(os.path.dirname(paths["README"]), link))], [])
        self.assertIn("model.proto", os.listdir(os.path.join(paths["proto"], "emberd", "v1")))
        self.assertRegex(run(self.python, os.path.join(paths["examples"], "serving.py"), "--requests", "50", cwd="/"), "version-1: right=")

    def test_the_same_wheel_on_every_python(self):
        tried = []
        for version, python in pythons():
            environment = os.path.join(self.folder, version)
            run(python, "-m", "venv", "--without-pip", environment)  # a pip of its own takes longer than what is installed
            inside, packages = (os.path.join(environment, *path) for path in (("bin", "python"), ("lib", f"python{version}", "site-packages")))
            done = subprocess.run([*self.install, "--quiet", "--timeout", "20", "--retries", "1", "--python-version", version,
                                   "--only-binary", ":all:", "--target", packages, self.wheel],
                                  stdin=subprocess.DEVNULL, capture_output=True, text=True)
            if done.returncode != 0:
                self.skipTest(f"SKIP: NumPy cannot be installed on Python {version}: {done.stderr.strip().splitlines()[-1]}")
            said = run(inside, "-c", "import sys; print(sys.version)\n" + example(), cwd="/")
            self.assertTrue(said.startswith(version + "."), said)
            self.assertLess(float(re.search(r"loss=(\S+)", said)[1]), 0.1)
            shutil.rmtree(environment)
            tried.append(version)
        self.assertTrue(tried)
        print("the wheel learns on Python", ", ".join(tried))

    def test_programs_are_commands(self):
        for name in ("emberd", "emberctl"):
            self.assertIn(name, run(os.path.join(self.bin, name), "--help"))

    def test_libraries_come_from_the_wheel_or_from_every_system(self):
        everywhere = re.compile(r"^(linux-vdso|ld-linux-x86-64|libc|libm|libdl|librt|libpthread|libresolv|libgcc_s|"
                                r"libstdc\+\+)\.so")
        checked = 0
        for kind in ("_bin", "_lib"):
            for name in os.listdir(os.path.join(self.package, kind)):
                for line in run("ldd", os.path.join(self.package, kind, name)).splitlines():
                    library = os.path.basename(line.split()[0])
                    if "statically linked" not in line and not everywhere.match(library):
                        self.assertIn(self.package, line, name)
                        self.assertRegex(library, r"-[0-9a-f]{8}\.so", "it could meet another of its name")
                        checked += 1
        self.assertGreater(checked, 10)


if __name__ == "__main__":
    unittest.main()
