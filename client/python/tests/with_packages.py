"""Runs a test in an environment with packages that Debian does not have; makes it where it is not there yet.

usage: with_packages.py [--with-system] ENVIRONMENT PACKAGE... -- TEST ARGUMENTS...
       with_packages.py --only-make [--with-system] ENVIRONMENT PACKAGE...

--with-system: what this Python has is there, too. --only-make: runs no test, and succeeds also where there are no packages.

Where the packages cannot be had the test is skipped, with the reason (status 77). Several tests may share an environment.
"""

import fcntl
import os
import shutil
import subprocess
import sys

SKIPPED = 77


def install(environment, packages, options=()):
    """What went wrong, or None. A half-made environment is not left."""
    made = environment + ".new"
    shutil.rmtree(made, ignore_errors=True)
    pip = [os.path.join(made, "bin", "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
           "--timeout", "20", "--retries", "1", *packages]
    for argv in ([sys.executable, "-m", "venv", *options, made], pip):
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600,
                                  env={**os.environ, "TMPDIR": made} if os.path.exists(made) else None)  # what pip leaves goes with it
        except subprocess.TimeoutExpired:
            return f"{' '.join(argv)} takes longer than 600 s"
        if done.returncode != 0:
            return (done.stdout + done.stderr).strip().splitlines()[-1]
    with open(os.path.join(made, "packages"), "w", encoding="utf-8") as file:
        file.write(" ".join(packages))
    shutil.rmtree(environment, ignore_errors=True)
    os.rename(made, environment)
    return None


def is_there(environment, packages):
    try:
        with open(os.path.join(environment, "packages"), encoding="utf-8") as file:
            return file.read() == " ".join(packages)
    except FileNotFoundError:
        return False


def make(environment, packages, options):
    """What went wrong, or None. Several may want it at once: one makes it, and the others wait."""
    with open(environment + ".lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        failure = None if is_there(environment, packages) else install(environment, packages, options)
        if failure:
            print(f"SKIP: {' '.join(packages)} cannot be installed: {failure}")
            shutil.rmtree(environment + ".new", ignore_errors=True)
        return failure


def main():
    words = sys.argv[1:]
    only_make = words[0] == "--only-make"
    words = words[only_make:]
    options = ["--system-site-packages"] * (words[0] == "--with-system")
    words = words[len(options):]
    end = len(words) if only_make else words.index("--")
    environment, packages, test = words[0], words[1:end], words[end + 1:]
    failure = make(environment, packages, options)
    if only_make:
        return
    if failure:
        sys.exit(SKIPPED)
    python = os.path.join(environment, "bin", "python")
    os.execv(python, [python, "-B", *test])


if __name__ == "__main__":
    main()
