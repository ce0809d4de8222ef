#!/usr/bin/env python3
"""Runs `emberctl explain --case` on recorded cases and compares what it prints with what was recorded.

usage: explain_cases.py EMBERCTL FOLDER

Integers and texts must be equal and floats within 1 ulp of float32; a null in `expected` stands for any value, and fields
that `expected` does not have are not looked at. Where the recorded system aborted, emberctl must print an error and end
with status 1. Would catch: a shell user seeing other numbers than the library's own golden tests.
"""

import json
import struct
import subprocess
import sys
from pathlib import Path

PAD = 2147483647
# Not of preprocessing.
SKIPPED = {"optimizer"}
# What a callback of the recording program made up, and texts that describe the format.
IGNORED_OF_STACKING = {"max_ids_per_partition", "max_unique_ids_per_partition", "table_values", "stacked_axes"}


def ordinal(value):
    """Neighbouring float32 numbers have neighbouring ordinals."""
    bits = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF)


def difference(expected, got, ignored, path=""):
    """The first place where they differ, or None."""
    if expected is None:
        return None
    if isinstance(expected, dict) and isinstance(got, dict):
        for key, value in expected.items():
            if key in ignored:
                continue
            if key not in got:
                return f"{path}.{key} is missing"
            found = difference(value, got[key], ignored, f"{path}.{key}")
            if found:
                return found
        return None
    if isinstance(expected, list) and isinstance(got, list):
        if len(expected) != len(got):
            return f"{path} has {len(got)} elements instead of {len(expected)}"
        for i, (a, b) in enumerate(zip(expected, got)):
            found = difference(a, b, ignored, f"{path}[{i}]")
            if found:
                return found
        return None
    if isinstance(expected, float) and isinstance(got, (int, float)) or \
       isinstance(got, float) and isinstance(expected, (int, float)):
        if abs(ordinal(expected) - ordinal(got)) <= 1:
            return None
    elif expected == got and isinstance(expected, bool) == isinstance(got, bool):
        return None
    return f"{path} is {got!r} instead of {expected!r}"


def with_zero_gains(expected):
    """`expected` by emberd's rule: a sample whose weights sum to zero has gains of 0."""
    expected = json.loads(json.dumps(expected))
    changed = False
    for host in expected.get("hosts", []):
        for stack in host["stacks"].values():
            for device in stack["devices"]:
                for i, gain in enumerate(device["gains"]):
                    if isinstance(gain, str) and device["embedding_ids"][i] != PAD:
                        device["gains"][i] = 0.0
                        changed = True
    return expected, changed


def explain(emberctl, arguments):
    done = subprocess.run([emberctl, "explain", "--json", "--case"] + arguments, capture_output=True, text=True,
                          check=False)
    try:
        return done.returncode, json.loads(done.stdout)
    except json.JSONDecodeError:
        return done.returncode, {"output": done.stdout, "errors": done.stderr}


def fault_of(emberctl, path, expected, ignored, flags):
    status, got = explain(emberctl, [str(path)] + flags)
    if "fatal" in expected:
        error = got.get("error", {})
        if status == 1 and error.get("code") and error.get("message"):
            return None
        return f"status {status} and {json.dumps(got)[:200]} instead of status 1 and an error"
    if status != 0:
        return f"status {status}: {json.dumps(got)[:200]}"
    return difference(expected, got, ignored)


def main():
    emberctl, folder = sys.argv[1:]
    faults = ran = with_zeros = 0
    for path in sorted(Path(folder).glob("*.json")):
        case = json.loads(path.read_text())
        if case["kind"] in SKIPPED:
            continue
        ignored = IGNORED_OF_STACKING if case["kind"] == "stacking" else set()
        zeroed, changed = with_zero_gains(case["expected"])
        runs = [(case["expected"], [])]
        if changed:
            runs.append((zeroed, ["--zero-gains"]))
            with_zeros += 1
        for expected, flags in runs:
            fault = fault_of(emberctl, path, expected, ignored, flags)
            if fault:
                print(f"{path.name} ({case['name']}){' with ' if flags else ''}{' '.join(flags)}: {fault}")
                faults += 1
        ran += 1
    print(f"{ran} cases, {with_zeros} of them with --zero-gains too, {faults} faults")
    return 1 if faults or ran == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
