"""Documents that tests follow word by word."""

import os
import re
import shutil
import socket
import subprocess
import sys

SKIPPED = 77  # as the CMake files say
INSIDE = "EMBERD_DOCUMENTS_TEST_INSIDE"  # set in the namespace


def section(text, title):
    """From its heading to the next of the same rank."""
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)[1]


def blocks(text):
    """What stands between ```sh and ```."""
    return re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(text):
    """Each command of the sh blocks: a line, or several that belong together."""
    for block in blocks(text):
        pending = ""
        for line in block.splitlines():
            pending += line + "\n"
            whole = subprocess.run(["bash", "-n", "-c", pending], capture_output=True).returncode == 0
            if whole and not line.endswith("\\"):
                if re.sub(r"#.*", "", pending).strip():
                    yield pending.strip()
                pending = ""
        if pending:
            raise AssertionError(f"not a whole command: {pending}")


def fresh_clone(root, folder, binaries):
    """What git tracks, as it stands in `root`, and nothing else but the binaries in build/bin."""
    names = subprocess.run(["git", "-C", root, "ls-files", "-z"], check=True, stdout=subprocess.PIPE).stdout
    for name in filter(None, names.decode().split("\0")):
        source, target = os.path.join(root, name), os.path.join(folder, name)
        if not os.path.isfile(source):
            continue  # deleted, but not yet for git
        os.makedirs(os.path.dirname(target), exist_ok=True)
        shutil.copy2(source, target)
    os.makedirs(os.path.join(folder, "build"), exist_ok=True)
    os.symlink(binaries, os.path.join(folder, "build", "bin"))


def own_network():
    """Starts this test again where no other process has ports; returns if the system does not allow that."""
    for unshare in (["unshare", "--net"], ["unshare", "--map-root-user", "--net"]):
        script = [*unshare, "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
        if subprocess.run([*script, "true"], stdin=subprocess.DEVNULL, capture_output=True).returncode == 0:
            os.environ[INSIDE] = "1"
            os.execvp(script[0], [*script, sys.executable, "-B", *sys.argv])


def taken_ports(ports):
    taken = []
    for port in ports:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                taken.append(port)
    return taken


def run_alone(ports):
    """Goes on in a network of its own, where the default ports are free; else here if they are free, or skips the test."""
    if INSIDE in os.environ:
        return
    try:
        own_network()
    except FileNotFoundError:
        pass
    if taken_ports(ports):
        print(f"SKIP: no network namespace may be made, and ports {taken_ports(ports)} are in use")
        sys.exit(SKIPPED)
