"""Every public object of the package: copied, pickled and read back here and in other processes, used in a forked child that ends
by sys.exit and by os._exit, used after its end, ended twice, let go of while another thread uses it, and shown.

What this would catch: a handle of the library that is freed twice or used after it was freed, which ends the process; a child or
an interpreter that never ends; a copy that answers something else than its original; a refusal that does not say what to do; and an
object without a repr of its own.

Each kind runs in a child process of its own, forked before the library is loaded, whose end is waited for. A public class without
a way to make it in every_kind.py fails this test. PyTorch, JAX and Keras are swept where they are installed.
"""

import copy
import faulthandler
import gc
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import threading
import unittest
import warnings

from cluster import counting_model, emberd, main
from every_kind import FRAMEWORKS, NO_OBJECTS, PLAIN, SWEEP, World, kinds, public_classes

ENDS = 600  # seconds that something is waited for that is to end
REFUSED = (TypeError, ValueError, emberd.Error)
ENDED = (*REFUSED, RuntimeError)  # with a text that says so; ForkedProcess is one


# ---- What is done with each. It returns what is wrong, or None.


def agrees(kind, thing, before, may=REFUSED):
    """An object answers as `before`, or refuses with a text; or it is an iterator at its end."""
    try:
        after = kind.use(thing)
    except StopIteration:
        return None
    except may as error:
        return None if str(error) else f"{error!r} says nothing"
    return None if after == before else f"it answers {after}, not {before}"


def shows(kind, world):
    """In a debugger or a notebook it says what it is, and not where it lies in memory."""
    thing = kind.make(world)
    return None if repr(thing) and type(thing).__repr__ is not object.__repr__ else f"its repr is {thing!r}"


def copies(how):
    def act(kind, world):
        thing = kind.make(world)
        before = kind.use(thing)
        try:
            second = how(thing)
        except (*REFUSED, RuntimeError) as error:
            said = str(error)
            known = "cannot be copied" in said or "cannot pickle" in said or "graph leaves" in said  # as torch says of its own tensors
            return None if known else f"it does not say what to do: {error!r}"
        problem = agrees(kind, second, before)
        del second
        gc.collect()
        return problem or agrees(kind, thing, before)

    return act


def pickles(kind, world):
    """Writes it, for another process to read."""
    thing = kind.make(world)
    before = kind.use(thing)
    try:
        data = pickle.dumps((before, thing))
    except REFUSED:
        return
    with open(os.path.join(os.environ[SWEEP], f"{world.name}.pickle"), "wb") as file:
        file.write(data)


def forks(leave):
    def act(kind, world):
        thing = kind.make(world)
        before = kind.use(thing)
        child = os.fork()
        if child == 0:
            problem = agrees(kind, thing, before, ENDED)
            if problem:
                print(f"in the child: {problem}", file=sys.stderr, flush=True)
            leave(8 if problem else 7)
        code = wait_end(child, os.kill, ENDS / 2)
        if code != 7:
            return f"the child ends with {code}"
        return agrees(kind, thing, before)

    return act


def ends(kind, world):
    """Twice, and then it is used."""
    thing = kind.make(world)
    before = kind.use(thing)
    for turn in range(2):
        if kind.end:
            try:
                kind.end(thing)
            except REFUSED as error:
                if turn == 0:
                    return f"its end: {error!r}"
    return agrees(kind, thing, before, ENDED)


def outlives(kind, world):
    """Its client is closed, and let go of."""
    thing = kind.make(world)
    before = kind.use(thing)
    world.client.close()
    problem = agrees(kind, thing, before, ENDED)
    vars(world).clear()
    gc.collect()
    return problem or agrees(kind, thing, before, ENDED)


def loses(kind, world):
    """Everybody else lets go of it and ends it while another thread uses it."""
    box, seen, stop, wrong = [kind.make(world)], threading.Semaphore(0), threading.Event(), set()
    before = kind.use(box[0])

    def run(thing):
        while not stop.is_set():
            problem = agrees(kind, thing, before, (Exception,))
            wrong.update([problem] * bool(problem))
            seen.release()

    thread = threading.Thread(target=run, args=(box[0],))
    thread.start()
    seen.acquire()
    for end in (kind.end, lambda _: world.client.close()):
        try:
            if end:
                end(box[0])
        except Exception as error:
            wrong.update([repr(error)] * (not str(error)))
        seen.acquire()
    box.clear()
    vars(world).clear()
    gc.collect()
    stop.set()
    thread.join()
    return "; ".join(sorted(wrong)) or None


def leaves(kind, world):
    """The interpreter ends while a thread uses it."""
    thing, used = kind.make(world), threading.Event()

    def run():
        while True:
            agrees(kind, thing, None, (Exception,))
            used.set()

    threading.Thread(target=run, daemon=True).start()
    used.wait()
    sys.exit(7)


ACTIONS = {
    "repr": shows, "copy.copy": copies(copy.copy), "copy.deepcopy": copies(copy.deepcopy), "pickle": copies(lambda one: pickle.loads(pickle.dumps(one))),
    "pickle for others": pickles, "fork and sys.exit": forks(sys.exit), "fork and os._exit": forks(os._exit), "end twice": ends,
    "outlive its client": outlives, "lose it to a thread": loses, "exit while a thread uses it": leaves,
}


# ---- The process that makes the children. It does not load the library, so that its children can.


def wait_end(child, kill=os.killpg, seconds=ENDS):
    """The exit status of a child; None: it has not ended. Then it says where it is, and is killed with its own children."""
    handle = os.pidfd_open(child)
    try:
        ended = select.select([handle], [], [], seconds)[0]
    finally:
        os.close(handle)
    if not ended:
        for one in (signal.SIGABRT, signal.SIGKILL):
            kill(child, one)
    status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status) if ended else None


def run_child(name, kind, actions, address, said):
    """Does the actions in turn and says so; a sys.exit in it goes through to the end of the interpreter."""
    for action in actions:
        said.write(f"{action}\n")
        world = World(address, name)
        try:
            problem = ACTIONS[action](kind, world)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        said.write(f"{json.dumps(problem)}\n")
        gc.collect()


def try_kind(name, kind, address, folder):
    """What is wrong with it, by action. Where an action ends the process, another one goes on behind it."""
    left = [one for one in ACTIONS if one not in kind.spared and (kind.live or "copy" in one or "pickle" in one)]
    problems = {}
    while left:
        path = os.path.join(folder, "said")
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            with open(path, "w", buffering=1) as said, open(os.path.join(folder, "stderr"), "w") as errors:
                os.dup2(errors.fileno(), 2)
                faulthandler.enable()
                run_child(name, kind, left, address, said)
            os._exit(0)
        code = wait_end(child)
        with open(path) as said, open(os.path.join(folder, "stderr")) as errors:
            lines, noise = said.read().split("\n")[:-1], errors.read()
        done = dict(zip(lines[::2], map(json.loads, lines[1::2])))
        problems.update((action, f"{problem}\n{noise}") for action, problem in done.items() if problem)
        last = lines[-1] if len(lines) % 2 else "the end"
        if code != (7 if last == "exit while a thread uses it" else 0):
            problems[last] = ("it hangs" if code is None else f"the process ends with {code}") + f"\n{noise}"
        elif "Exception ignored" in noise or "Traceback" in noise and "jax.io_callback failed" not in noise:
            problems["stderr"] = noise
        left = left[left.index(last) + 1:] if last in left else []
    return problems


def sweep():
    """Prints what is wrong by kind and action, in JSON."""
    folder = os.environ[SWEEP]
    report = {"missing": sorted(set(public_classes()) - set(kinds()) - set(NO_OBJECTS)), "problems": {}, "kinds": len(kinds())}
    gc.freeze()  # what is imported need not be looked at in each child
    with emberd.local(shards=1, data=os.path.join(folder, "data"), durability="memory") as cluster:
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            with cluster.connect() as client:
                client.declare(counting_model("m")).save_checkpoint("kept")
            os._exit(0)
        assert wait_end(child) == 0
        for name, kind in kinds().items():
            plain = not kind.spared and not name.startswith(FRAMEWORKS)
            if (plain and PLAIN not in os.environ) or (sys.argv[1:] and not any(one in name for one in sys.argv[1:])):
                continue
            problems = try_kind(name, kind, cluster.address, folder)
            report["problems"].update((f"{name}: {action}", problem) for action, problem in problems.items())
        report["read"] = read_pickles(folder)
    print(json.dumps(report))


def read_pickles(folder):
    """In a process that was not forked. What is wrong."""
    done = subprocess.run([sys.executable, "-B", os.path.abspath(__file__), "--read", folder], capture_output=True, text=True, timeout=ENDS)
    return done.stdout + (done.stderr + str(done.returncode) if done.returncode else "")


def read(folder):
    every = kinds()
    for name, kind in every.items():
        path = os.path.join(folder, name.replace(" ", "_") + ".pickle")
        if os.path.exists(path):
            print(name, end=": ", flush=True)
            with open(path, "rb") as file:
                before, thing = pickle.load(file)
            problem = agrees(kind, thing, before)
            print(problem or "agrees", flush=True)


class EveryObjectTest(unittest.TestCase):
    maxDiff = None
    def start(self, **environment):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        return subprocess.Popen([sys.executable, "-B", os.path.abspath(__file__)], stdout=subprocess.PIPE, text=True,
                                env={**os.environ, SWEEP: folder.name, "PYTHONPATH": os.pathsep.join(sys.path), **environment})

    def test_sweep(self):
        # Another run may sweep what is without a framework.
        plain = [] if "EMBERD_FRAMEWORKS_ALONE" in os.environ else [self.start(**{PLAIN: "1"})]
        processes, lines = [self.start(), *plain], []
        for said in [process.communicate()[0] for process in processes]:
            report = json.loads(said)
            self.assertEqual(report["missing"], [], "public classes that kinds() does not make")
            self.assertEqual("".join(f"\n{name}: {problem}" for name, problem in report["problems"].items()), "")
            lines += report["read"].splitlines()
        self.assertEqual({process.returncode for process in processes}, {0})
        self.assertGreater(len(lines), 60 if plain else 15)
        self.assertEqual([line for line in lines if not line.endswith(": agrees")], [])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1:2] == ["--read"]:
        read(sys.argv[2])
    elif SWEEP in os.environ:
        sweep()
    else:
        main()
