#!/usr/bin/env python3
"""Prints the product's rooms that one call passes: `./run rooms VERB` (declare, lookup, update, stream, save).

usage: rooms.py BUILD VERB

A room is a header with its source; a call passes it if a line of it runs. The call is made in a cluster of one process, with
its client (rooms.cc), several times, each time in a new process. What ran in each of them counts: threads that look after
things now and then are seldom there every time.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUNS = 3
NOT_PRODUCT = re.compile(r"^(tests|proto)/|/testing/|/testing_|_test\.")


def counters(build):
    return sorted(build.rglob("*.gcda"))


def rooms_of(build):
    """The product's rooms of which a line has run, by what the counters in `build` say."""
    rooms = set()
    for counter in counters(build):
        done = subprocess.run(["gcov", "--json-format", "--stdout", str(counter)], cwd=build, capture_output=True, check=True)
        for report in done.stdout.splitlines():
            for file in json.loads(report)["files"]:
                path = Path(build, file["file"]).resolve()
                if not path.is_relative_to(ROOT) or path.is_relative_to(build):
                    continue
                name = str(path.relative_to(ROOT))
                if not NOT_PRODUCT.search(name) and any(line["count"] for line in file["lines"]):
                    rooms.add(re.sub(r"\.\w+$", "", name))
    return rooms


def passed(build, verb):
    for counter in counters(build):
        counter.unlink()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([build / "tests/emberd_rooms", verb, f"{folder}/data"], check=True, stdout=subprocess.DEVNULL)
    return rooms_of(build)


def main():
    build, verb = Path(sys.argv[1]).resolve(), sys.argv[2]
    rooms = set.intersection(*(passed(build, verb) for _ in range(RUNS)))
    for room in sorted(rooms):
        print(room)
    folders = {}
    for room in rooms:
        folder = "/".join(room.split("/")[:2]) if room.startswith(("server/", "client/")) else room.split("/")[0]
        folders[folder] = folders.get(folder, 0) + 1
    print(f"{verb}: {len(rooms)} rooms:", ", ".join(f"{count} {name}" for name, count in sorted(folders.items())))


if __name__ == "__main__":
    main()
