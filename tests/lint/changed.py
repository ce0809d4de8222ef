#!/usr/bin/env python3
"""Prints the objects of the `lint` preset whose sources have changed, themselves or what they include; says how many.

usage: changed.py BUILD_FOLDER [--all] [--shipped]

Changed: other files than .proto, since HEAD left the main branch; on the main branch, since the newest commit that is more
than three hours older than HEAD. What is not committed counts too. --all, a tree without history, or other rules: every
source. --shipped: no tests.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from tree import Tree, is_product  # noqa: E402

PRESETS = "CMakePresets.json"
RULES = {".clang-tidy", "tests/lint/tidy.sh", PRESETS}
RECENT = 3 * 60 * 60  # seconds


def git(root, *arguments):
    """What it says; None where it fails."""
    try:
        done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def base_commit(root):
    """The commit to compare with; None if there is none."""
    if git(root, "rev-parse", "--is-shallow-repository") != "false" or git(root, "rev-parse", "--show-prefix") != "":
        return None
    head = git(root, "rev-parse", "HEAD")
    for main in ("origin/HEAD", "origin/main", "main"):
        base = git(root, "merge-base", "HEAD", main)
        if base and base != head:
            return base
        if base:
            before = int(git(root, "show", "-s", "--format=%ct", "HEAD")) - RECENT
            return git(root, "rev-list", "-1", f"--min-age={before}", "HEAD") or None
    return None


def lint_preset(text):
    """Of a CMakePresets.json: the preset that clang reads with, and those that it inherits."""
    presets = {preset["name"]: preset for preset in json.loads(text)["configurePresets"]} if text else {}
    names = ["lint"]
    for name in names:
        inherited = presets.get(name, {}).get("inherits", [])
        names += [inherited] if isinstance(inherited, str) else inherited
    return [presets.get(name) for name in names]


def changed_files(root, base):
    names = git(root, "diff", "--name-only", "--no-renames", "-z", base) or ""
    new = git(root, "ls-files", "--others", "--exclude-standard", "-z") or ""
    changed = {name for name in (names + "\0" + new).split("\0") if name}
    presets = root / PRESETS
    if presets.exists() and lint_preset(git(root, "show", f"{base}:{PRESETS}")) == lint_preset(presets.read_text()):
        changed.discard(PRESETS)
    return changed


def sources_of_objects(root, build):
    """object: its sources, by their paths from the root; without generated ones."""
    objects = {}
    for entry in json.loads((Path(build) / "compile_commands.json").read_text(encoding="utf-8")):
        path = Path(entry["file"])
        files = [str(path)]
        if "/Unity/" in entry["file"]:
            files = re.findall(r'^#include "([^"]+)"', path.read_text(encoding="utf-8"), re.MULTILINE)
        places = [Path(file) for file in files]
        inside = {str(place.relative_to(root)) for place in places
                  if place.is_relative_to(root) and not place.is_relative_to(Path(build).resolve())}
        if inside:
            objects[re.search(r" -o (\S+\.o)", entry["command"])[1]] = inside
    return objects


def select(tree, objects, base, changed, shipped):
    """(objects to read, what to say)"""
    if shipped:
        objects = {name: sources for name, sources in objects.items() if any(map(is_product, sources))}
    every = set().union(*objects.values())
    if changed is None:
        return sorted(objects), f"reading all {len(every)} sources"
    if changed & RULES:
        return sorted(objects), f"reading all {len(every)} sources: {', '.join(sorted(changed & RULES))} changed since {base}"
    # Messages that change are the compiler's matter: it builds every source that has them.
    changed = {name for name in changed if not name.endswith(".proto")}
    chosen = {source for source in every if tree.closure(source) & changed}
    return (sorted(name for name, sources in objects.items() if sources & chosen),
            f"reading {len(chosen)} of {len(every)} sources, changed since {base}")


def main():
    build, options = sys.argv[1], sys.argv[2:]
    root = Path(__file__).resolve().parents[2]
    base = None if "--all" in options else base_commit(root)
    changed = changed_files(root, base) if base else None
    objects, text = select(Tree(root), sources_of_objects(root, build), (base or "")[:10], changed, "--shipped" in options)
    print(f"==> {text}", file=sys.stderr)
    print("\n".join(objects))


if __name__ == "__main__":
    main()
