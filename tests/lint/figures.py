#!/usr/bin/env python3
"""Prints figures of the tree and of the last build beside their goals; keeps those of ratchet.txt from growing.

usage: figures.py [BUILD_FOLDER]       one line each: figure, value, goal of now, later goal
       figures.py --ratchet BUILD_FOLDER   what ratchet.txt says if it is set anew: lines rounded up by at most 0.5 %

Product C++ is .h and .cc without tests. A source sees grpcpp if what it includes, itself or through others, has a header
of gRPC or a generated service. A room is foo.h with foo.cc; floors are the rooms of the longest chain of includes, where
rooms that include each other, a circle, count as one.
"""

import re
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from tree import Tree, is_grpc, is_product  # noqa: E402

RATCHET = "tests/lint/ratchet.txt"
# figure: (goal, goal of later); at most, but for "median".
GOALS = {
    "product files": (None, 430), "product lines": (71000, 67000), "median lines of a file": (None, 115),
    "sources that see grpcpp": (60, 45), "% of lines in one module": (20, 20),
    "floors in server/coordinator": (None, 8), "floors in server/step": (None, 8), "circles in either": (None, 0),
    "objects": (190, 170), "programs": (40, 35), "seconds of compiler": (500, 500), "... of the optimizers": (60, 60),
}
OPTIMIZERS = re.compile(r"/update_kernel\.cc\.o$")


def product_cxx(tree):
    return [path for path in tree.files if path.endswith((".h", ".cc")) and is_product(path)]


def grpc_sources(tree):
    return sum(any(map(is_grpc, tree.closure(path))) for path in product_cxx(tree) if path.endswith(".cc"))


def folder_of(path):
    """What a ratchet of lines is for: a top-level folder, a folder of server/, or all tests."""
    folders = Path(path).parts[:-1]
    if not is_product(path):
        return "tests"
    return "/".join(folders[:2] if folders[:1] == ("server",) else folders[:1])


def lines_by_folder(tree):
    lines = {}
    for path in tree.files:
        if "/" in path and not path.startswith(".ci/"):
            lines[folder_of(path)] = lines.get(folder_of(path), 0) + tree.lines(path)
    return lines


def tree_ratchets(tree):
    files = product_cxx(tree)
    return {"files": len(files), "grpcpp": grpc_sources(tree)} | {
        f"lines.{folder}": lines for folder, lines in sorted(lines_by_folder(tree).items())}


def objects_and_programs(folder):
    """Of a whole build, by its build.ninja."""
    text = (Path(folder) / "build.ninja").read_text(encoding="utf-8")
    return (set(re.findall(r"^build (\S+\.o): ", text, re.MULTILINE)),
            re.findall(r"^build (\S+)(?: \| \S+)*: CXX_EXECUTABLE_LINKER__", text, re.MULTILINE))


def build_ratchets(folder):
    objects, programs = objects_and_programs(folder)
    return {"objects": len(objects), "programs": len(programs)}


def compare(root, figures, whole):
    """(faults, hints) of `figures` against ratchet.txt; `whole`: all of its lines but objects and programs must have one."""
    faults, hints, seen = [], [], set()
    path = Path(root) / RATCHET
    for number, line in enumerate(path.read_text().splitlines() if path.is_file() else [], 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        name, ratchet = words[0], int(words[1])
        seen.add(name)
        value = figures.get(name)
        if value is None:
            if whole and name not in ("objects", "programs"):
                faults.append(f"{RATCHET}:{number}: there is no {name}: remove the line")
        elif value > ratchet:
            faults.append(f"{RATCHET}:{number}: {name} is {value}, {value - ratchet} above its ratchet of {ratchet}: raise it in "
                          f"{RATCHET} and say why in the commit, or make room")
        elif ratchet - value > max(ratchet // 50, 5):
            hints.append(f"{RATCHET}:{number}: {name} is {value}, far below its ratchet of {ratchet}: lower it")
    faults += [f"{RATCHET}:1: {name} has no ratchet; it is {figures[name]}" for name in figures if name not in seen]
    return faults, hints


def floors(tree, *folders):
    """(floors, circles) of the rooms of some folders together."""
    files = [path for path in product_cxx(tree) if path.startswith(tuple(folder + "/" for folder in folders))]
    rooms = {}
    for path in files:
        room = re.sub(r"\.\w+$", "", path)
        rooms.setdefault(room, set()).update(
            re.sub(r"\.\w+$", "", include) for include in tree.includes(path) if include in tree.texts)
    rooms = {room: {other for other in included if other in rooms} - {room} for room, included in rooms.items()}
    reached = {}
    for room in rooms:
        seen, waiting = set(), [room]
        while waiting:
            new = rooms[waiting.pop()] - seen
            seen |= new
            waiting += new
        reached[room] = seen
    circle = {room: frozenset({room} | {other for other in reached[room] if room in reached[other]}) for room in rooms}
    height = {}

    def height_of(one):
        if one not in height:
            below = {circle[other] for room in one for other in rooms[room]} - {one}
            height[one] = 1 + max(map(height_of, below), default=0)
        return height[one]

    circles = set(circle.values())
    return max(map(height_of, circles), default=0), sum(len(one) > 1 for one in circles)


def compile_seconds(folder, objects):
    """Of each object, how long it took when it was last compiled: real time, so with a compiler cache or on a machine that
    is busy, it is not the CPU's."""
    seconds = {}
    log = Path(folder) / ".ninja_log"
    for line in log.read_text(encoding="utf-8").splitlines() if log.is_file() else []:
        fields = line.split("\t")
        if len(fields) == 5 and fields[3] in objects:
            seconds[fields[3]] = (int(fields[1]) - int(fields[0])) / 1000
    return seconds


def show(name, value, text=""):
    goals = GOALS.get(name, (None, None))
    missed = [goal for goal in goals if goal is not None and (value < goal if "median" in name else value > goal)]
    columns = ["" if goal is None else f"{goal}{' !' if goal in missed else '  '}" for goal in goals]
    print(f"{name:32}{value:>9.0f} {columns[0]:>9}{columns[1]:>9}  {text}".rstrip())


def print_figures(tree, folder):
    print(f"{'figure':32}{'value':>9} {'goal  ':>9}{'later  ':>9}   (! where the goal is not met)")
    files = product_cxx(tree)
    lines = {path: tree.lines(path) for path in files}
    show("product files", len(files))
    show("product lines", sum(lines.values()))
    show("median lines of a file", statistics.median(lines.values()))
    sources = sum(path.endswith(".cc") for path in files)
    show("sources that see grpcpp", grpc_sources(tree), f"of {sources}")
    modules = {}
    for path in files:
        module = tree.module_of(path)
        modules[module] = modules.get(module, 0) + lines[path]
    largest = max(modules, key=modules.get)
    show("% of lines in one module", 100 * modules[largest] / sum(modules.values()), largest)
    all_circles = 0
    for part in ("server/coordinator", "server/step"):
        high, circles = floors(tree, part)
        all_circles += circles
        show(f"floors in {part}", high)
    show("floors in both", floors(tree, "server/coordinator", "server/step")[0])
    show("circles in either", all_circles)
    if not (Path(folder) / "build.ninja").is_file():
        print(f"objects and programs: {folder}/ is not configured; ./run build does it")
        return
    objects, programs = objects_and_programs(folder)
    show("objects", len(objects))
    show("programs", len(programs))
    seconds = compile_seconds(folder, objects)
    show("seconds of compiler", sum(seconds.values()), f"{len(seconds)} objects as last compiled, by {folder}/.ninja_log")
    show("... of the optimizers", sum(took for name, took in seconds.items() if OPTIMIZERS.search(name)))
    for name in sorted(seconds, key=seconds.get, reverse=True)[:10]:
        show("  slowest", seconds[name], re.sub(r"CMakeFiles/|\.dir(?=/)", "", name))


def print_ratchets(figures):
    for name, value in figures.items():
        print(name, value + value // 200 if name.startswith("lines.") else value)


def main():
    from lint import module_of  # lint.py's table knows what a module is
    root = Path(__file__).resolve().parents[2]
    tree = Tree(root)
    tree.module_of = module_of
    folder = sys.argv[-1] if len(sys.argv) > 1 else "build"
    if "--ratchet" in sys.argv:
        print_ratchets(tree_ratchets(tree) | build_ratchets(folder))
    else:
        print_figures(tree, folder)


if __name__ == "__main__":
    main()
