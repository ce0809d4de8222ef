"""Runs cases of a test with the wheel that was built, in this Python's environment, which has no emberd: the checkout's package is not
seen.

usage: from_wheel.py WHEELS TEST CASE

WHEELS is the folder of the wheel, TEST the path of a test file, CASE a class of it.
"""

import glob
import os
import subprocess
import sys
import tempfile

wheels, test, case = sys.argv[1:]
wheel = max(glob.glob(os.path.join(wheels, "emberd-*.whl")), key=os.path.getmtime)
environment = {name: value for name, value in os.environ.items() if not name.startswith(("EMBERD_", "PYTHON"))}

with tempfile.TemporaryDirectory() as folder:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check",
                    "--target", folder, wheel], check=True)
    environment["PYTHONPATH"] = folder
    where = subprocess.run([sys.executable, "-c", "import emberd; print(emberd.__path__[0])"], cwd="/", env=environment,
                           check=True, capture_output=True, text=True).stdout
    if not where.startswith(folder):
        sys.exit(f"emberd comes from {where.strip()}, not from the wheel in {folder}")
    sys.exit(subprocess.run([sys.executable, "-B", test, case], cwd="/", env=environment).returncode)
