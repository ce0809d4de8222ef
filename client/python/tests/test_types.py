"""The package is typed: mypy's strict mode for all of it, pyright's for its own modules, and pyright's standard mode for those
that stand on PyTorch, JAX, Flax and Keras, as far as these are there.

What this would catch: a function without types, and one whose types do not fit what it is given.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

AWAITED = """
from typing import Any, Coroutine, Dict

import emberd
import emberd.aio

async def f(client: emberd.aio.Client, model: emberd.aio.Model) -> None:
    one: emberd.aio.Model = await client.restore("m", name="n", progress=print)
    found: emberd.Lookup = await one.lookup({"user": [1]}, train=True)
    stream: emberd.aio.TrainStream = await model.train("g", rank=0, size=1)
    dropped: Coroutine[Any, Any, bool] = client.drop_model("m")
    limits: Dict[str, emberd.Limits] = await model.limits()
    await client.drop_model()  # type: ignore[call-arg]
    await client.drop_model(5)  # type: ignore[arg-type]
    await model.lookup({}, trian=True)  # type: ignore[call-arg]
    rows: int = await model.table("t")  # type: ignore[assignment]
"""
PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
MYPY = [sys.executable, "-m", "mypy"] if importlib.util.find_spec("mypy") else [shutil.which("mypy")]
# Ray is in another environment, and is left to mypy.
FRAMEWORKS = {
    "torch": ["_jagged.py", "torch", "compat/jagged.py", "compat/torchrec.py"],
    "jax": ["jax", "keras", "compat/jax_tpu_embedding"],
}


def python_with(module):
    """This interpreter, or the one that its environment was made of; None: neither has it."""
    for python in (sys.executable, getattr(sys, "_base_executable", None)):
        if python and subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode == 0:
            return python
    return None


class TypesTest(unittest.TestCase):
    @unittest.skipUnless(MYPY[0], "SKIP: mypy is not installed (deploy/packages.txt)")
    def test_mypy_strict_and_what_is_awaited_has_the_types_of_the_blocking_client(self):
        with tempfile.TemporaryDirectory() as folder:
            awaited = os.path.join(folder, "awaited.py")
            with open(awaited, "w", encoding="utf-8") as file:
                file.write(AWAITED)
            done = subprocess.run([*MYPY, "--config-file", os.path.join(PACKAGE, "mypy.ini"), "--cache-dir", folder,
                                   os.path.join(PACKAGE, "emberd"), awaited], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


@unittest.skipUnless(importlib.util.find_spec("basedpyright"), "SKIP: basedpyright is not installed")
class PyrightTest(unittest.TestCase):
    def check(self, config, python=sys.executable):
        newer = ["--pythonversion", "3.12"] if sys.version_info >= (3, 12) else []  # NumPy has types there that 3.10 cannot read
        done = subprocess.run([sys.executable, "-m", "basedpyright", "-p", config, "--pythonpath", python, *newer],
                              stdin=subprocess.DEVNULL, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertRegex(done.stdout, "0 errors, 0 warnings")

    def test_the_package_itself_is_strict(self):
        self.check(os.path.join(PACKAGE, "tests", "pyright_strict.json"))

    def test_the_parts_for_frameworks(self):
        for module, files in FRAMEWORKS.items():
            python = python_with(module)
            with self.subTest(module), tempfile.TemporaryDirectory() as folder:
                if python is None:
                    self.skipTest(f"{module} is not installed")
                config = os.path.join(folder, "pyrightconfig.json")
                with open(config, "w", encoding="utf-8") as file:
                    json.dump({"extends": os.path.join(PACKAGE, "pyrightconfig.json"),
                               "include": [os.path.join(PACKAGE, "emberd", one) for one in files]}, file)
                self.check(config, python)


if __name__ == "__main__":
    if len(sys.argv) > 2 and os.path.isdir(sys.argv[1]):
        del sys.argv[1:3]  # programs and library, which every test of the package is given
    unittest.main()
