#!/usr/bin/env python3
"""Runs ninja and says how far it is and how long the rest takes here, in one line. What failed is shown whole.

usage: progress.py FOLDER [ARGUMENTS of ninja...]

The rest is estimated from the objects that are done: one that was compiled here before takes as long again, any other as
long as the average. On a terminal the line is rewritten in place; elsewhere it comes every half minute.
"""

import os
import re
import select
import subprocess
import sys
import tempfile
import time

MARK = "\x1f"  # begins the lines in which ninja says what it did; all others are what compilers and ninja itself say
STEP = re.compile(MARK + r"(\d+)/(\d+) (.*)")
OBJECT = re.compile(r"Building \S+ object (\S+)")
QUIET = re.compile(r"ninja: (Entering directory|no work to do)")
NEW_OBJECT_SECONDS = 10  # as good as any: only the ratio to others counts
EVERY_SECONDS = 30


def duration(seconds):
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def logged_seconds(folder):
    """How long each output took when it was last made: https://ninja-build.org/manual.html#ref_log"""
    seconds = {}
    try:
        with open(os.path.join(folder, ".ninja_log"), encoding="utf-8") as log:
            for fields in (line.split("\t") for line in log):
                if len(fields) == 5:
                    seconds[fields[3]] = (int(fields[1]) - int(fields[0])) / 1000
    except OSError:
        pass  # the first build
    return seconds


def plan_of(folder, arguments, environment):
    """What ninja would do. Under its own name, build.ninja would first want to be made anew, to look for new sources, and a
    dry run would end there."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        plan = os.path.join(place, "plan.ninja")
        os.symlink(os.path.abspath(os.path.join(folder, "build.ninja")), plan)
        return subprocess.run(["ninja", "-C", folder, "-f", os.path.abspath(plan), "-n", *arguments], env=environment,
                              capture_output=True, text=True, check=False)


class Progress:
    def __init__(self, steps, seconds, terminal):
        """`steps` are ninja's descriptions of what it will do."""
        objects = [found[1] for found in map(OBJECT.match, steps) if found]
        self.waiting = {name: max(seconds.get(name, NEW_OBJECT_SECONDS), 0.1) for name in objects}
        self.all = sum(self.waiting.values())
        self.began = self.said = time.monotonic()
        self.terminal = terminal
        self.line = ""

    def step(self, finished, of, description):
        found = OBJECT.match(description)
        if found:
            self.waiting.pop(found[1], None)
        self.line = f"{finished} of {of}"

    def text(self):
        taken = time.monotonic() - self.began
        left = sum(self.waiting.values())
        text = f"{self.line}, {duration(taken)}"
        if taken >= 10 and left < self.all:
            text += f"; about {duration(taken * left / (self.all - left))} left"
        return text

    def show(self):
        now = time.monotonic()
        if self.line and self.terminal:
            sys.stdout.write(f"\r\x1b[K    {self.text()}")
        elif self.line and now - self.said >= EVERY_SECONDS:
            self.said = now
            print(f"    {self.text()}")
        sys.stdout.flush()

    def clear(self):
        if self.terminal:
            sys.stdout.write("\r\x1b[K")


def main():
    folder, arguments = sys.argv[1], sys.argv[2:]
    command = ["ninja", "-C", folder, *arguments]
    environment = os.environ | {"NINJA_STATUS": MARK + "%f/%t "}
    plan = plan_of(folder, arguments, environment)
    steps = [found[3] for found in map(STEP.match, plan.stdout.splitlines()) if found]
    progress = Progress(steps, logged_seconds(folder), sys.stdout.isatty())
    if steps:
        print(f"    {len(progress.waiting)} objects to compile, {len(steps) - len(progress.waiting)} other steps", flush=True)
    ninja = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    rest = b""
    try:
        while True:
            if select.select([ninja.stdout], [], [], 1)[0]:
                data = os.read(ninja.stdout.fileno(), 1 << 16)
                if not data:
                    break
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    text = line.decode(errors="replace")
                    found = STEP.match(text)
                    if found:
                        progress.step(*found.groups())
                    elif not QUIET.match(text):
                        progress.clear()
                        print(text)
            progress.show()
    except KeyboardInterrupt:  # ninja got it too
        pass
    status = ninja.wait()
    progress.clear()
    if status == 0:
        print(f"    done in {duration(time.monotonic() - progress.began)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
