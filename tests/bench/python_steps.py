"""What python_bench measures: see there.

usage: python_steps.py CLIENT FILTER

CLIENT is the program emberd_bench; of the measurements those are made whose rows FILTER may name. Prints rows of name, value, unit, width and limit. Times are medians; what is compared
is measured in turns, and the best turn of each counts, so that other work on the machine does least harm. Of the
overhead, which is less than what a step of the same client differs from one second to another, the median of the turns'
ratios counts.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "client", "python"))

import numpy as np  # noqa: E402

import emberd  # noqa: E402

try:
    import torch
except ImportError:
    torch = None

FEATURES, WIDTH, ROWS, BATCH = 26, 64, 200_000, 4096
TURNS, OVERHEAD_TURNS = 3, 11
NAMES = [f"f{f}" for f in range(FEATURES)]


def row(name, value, unit, limit=0.0, width=WIDTH):
    print(f"python/{name}", value, unit, width, limit, flush=True)


def median_seconds(step, steps, warm_up=2):
    """Of `step(k)`."""
    seconds = []
    for k in range(steps):
        begin = time.perf_counter()
        step(k)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[warm_up:])


class Cluster:
    """One of this machine, and groups of its own."""

    def __init__(self, batch, width, rows):
        self.batch, self.width, self.rows = batch, width, rows
        self.cluster = emberd.local(shards=2)
        self.client = self.cluster.connect()
        self.groups = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.close()
        self.cluster.close()

    def group(self):
        self.groups += 1
        return f"python-{self.groups}"


class Case(Cluster):
    """With the model of step_trainer.h, and the client in C++ beside this one."""

    def __init__(self, program, batch, bag):
        super().__init__(batch, WIDTH, ROWS)
        self.bag = bag
        with tempfile.NamedTemporaryFile() as file:
            self.cpp = subprocess.Popen([program, "python", "--client", self.cluster.address, str(batch), str(bag), file.name],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert self.cpp.stdout.readline() == "ready\n"
            ids = np.fromfile(file.name, np.int32).reshape(FEATURES, batch, bag)
        self.ids = dict(zip(NAMES, ids))
        self.model = self.client.model("step")

    def __exit__(self, *failure):
        self.cpp.stdin.close()
        self.cpp.wait()
        self.cpp.stdout.close()
        super().__exit__(*failure)

    def cpp_seconds(self, steps):
        self.cpp.stdin.write(f"{steps}\n")
        self.cpp.stdin.flush()
        return float(self.cpp.stdout.readline())

    def python_seconds(self, steps):
        with self.model.train(self.group()) as stream:
            gradient = stream.empty_gradients({NAMES[0]: np.empty((self.batch, WIDTH))})[NAMES[0]]
            gradient[:] = 1e-3
            gradients = {name: gradient for name in NAMES}

            def step(_):
                stream.lookup(self.ids)
                stream.update(gradients)
            return median_seconds(step, steps)


def overhead(program):
    for batch, steps in ((BATCH, 22), (64, 1500)):
        with Case(program, batch, 1) as case:
            turns = [(case.cpp_seconds(steps), case.python_seconds(steps)) for _ in range(OVERHEAD_TURNS)]
        cpp, python = (statistics.median(one) for one in zip(*turns))
        ratio = statistics.median(one / base for base, one in turns)
        row(f"overhead/batch{batch}/examples", batch / python, "examples/s", batch / cpp)
        row(f"overhead/batch{batch}/percent", 100 * (ratio - 1), "%", 3 if batch == BATCH else 10)


class Trainer:
    """A dense net on the activations of all features, and what a step of it takes."""

    def __init__(self, case):
        torch.manual_seed(1)
        self.case = case
        self.net = torch.nn.Sequential(torch.nn.Linear(FEATURES * case.width, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.labels = (torch.rand(case.batch, 1) < 0.3).float()
        self.ids = {name: torch.from_numpy(ids) for name, ids in case.ids.items()}

    def learn(self, found):
        """Forward and backward on [samples, width] of each feature."""
        score = self.net(torch.cat(found, dim=1))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(score, self.labels)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()

    def dense_seconds(self, steps):
        leaves = [torch.rand(self.case.batch, self.case.width, requires_grad=True) for _ in NAMES]

        def step(_):
            self.learn(leaves)
            for leaf in leaves:
                leaf.grad = None
        return median_seconds(step, steps)

    def plain_seconds(self, steps):
        """torch.nn: a table for each feature, sparse gradients, Adagrad."""
        if not hasattr(self, "bags"):
            self.bags = torch.nn.ModuleList([torch.nn.EmbeddingBag(self.case.rows, self.case.width, mode="sum", sparse=True) for _ in NAMES])
            self.sparse = torch.optim.Adagrad(self.bags.parameters(), lr=0.01, initial_accumulator_value=0.1)
        ids = [one.to(torch.int64) for one in self.ids.values()]

        def step(_):
            self.sparse.zero_grad()
            self.learn([bag(one) for bag, one in zip(self.bags, ids)])
            self.sparse.step()
        return median_seconds(step, steps)

    def collection(self, **options):
        described = [emberd.TableConfig(f"t{f}", self.case.rows, self.case.width, combiner="sum", initializer=emberd.Uniform(-0.1, 0.1))
                     for f in range(FEATURES)]
        features = [emberd.FeatureConfig(name, f"t{f}", batch_size=self.case.batch) for f, name in enumerate(NAMES)]
        return emberd.torch.EmbeddingBagCollection(described, client=self.case.client, model="step", features=features,
                                                   group=self.case.group(), optimizer=emberd.Adagrad(learning_rate=0.01),
                                                   **options)

    def emberd_seconds(self, steps, learn=None, ahead=True, warm_up=2, **options):
        """With the ids of the next batch sent ahead. `learn` instead of the net."""
        ebc = self.collection(**options)
        assert ebc.next_step == 0  # who asks is not warned of tables that are trained
        sparse = ebc.optimizer()
        batches = ({"ids": dict(self.ids)} for _ in range(steps))
        each = iter(emberd.torch.Prefetcher(batches, ebc) if ahead else batches)

        def step(_):
            found = list(ebc(next(each)["ids"]).values())
            (learn or self.learn)(found)
            sparse.step()
            sparse.zero_grad()
        seconds = median_seconds(step, steps, warm_up)
        ebc.finish()
        return seconds


def training(case, bag):
    trainer, steps = Trainer(case), 12 if bag == 1 else 8
    turns = [(trainer.plain_seconds(steps), trainer.emberd_seconds(steps), trainer.dense_seconds(steps)) for _ in range(TURNS)]
    plain, ours, dense = (min(one) for one in zip(*turns))
    row(f"train/bag{bag}/pytorch/examples", case.batch / plain, "examples/s")
    row(f"train/bag{bag}/emberd/examples", case.batch / ours, "examples/s")
    row(f"train/bag{bag}/dense_part", dense / ours, "share")
    row(f"train/bag{bag}/gain", plain / ours, "times")
    row(f"train/bag{bag}/embedding/gain", (plain - dense) / (ours - dense), "times", 1.5 if bag == 1 else 5)


def end_to_end():
    """Training with tables of people's sizes: the medians of all turns."""
    random = np.random.default_rng(1)
    for width, limit in ((16, 3.5), (64, 2.5)):
        with Cluster(2048, width, 85_000) as case:
            # Skewed as in step_trainer.h.
            case.ids = {name: (case.rows ** random.random((case.batch, 1))).astype(np.int32) - 1 for name in NAMES}
            trainer = Trainer(case)
            turns = [(trainer.plain_seconds(40), trainer.emberd_seconds(110, warm_up=70)) for _ in range(5)]
        plain, ours = (statistics.median(one) for one in zip(*turns))
        row(f"end_to_end/width{width}/pytorch/examples", case.batch / plain, "examples/s", width=width)
        row(f"end_to_end/width{width}/emberd/examples", case.batch / ours, "examples/s", width=width)
        row(f"end_to_end/width{width}/gain", plain / ours, "times", limit, width)


def pipelined(case):
    """A trainer on a device of its own, which computes as long as the cluster takes for a step."""
    trainer, steps = Trainer(case), 14
    gradient = torch.full((case.batch, WIDTH), 1e-3)

    def on_device(seconds):
        def learn(found):
            if seconds:
                time.sleep(seconds)
            for leaf in found:
                leaf.grad = gradient
        return learn

    turns = []
    for _ in range(TURNS):
        server = trainer.emberd_seconds(steps, on_device(0))
        turns.append((server, trainer.emberd_seconds(steps, on_device(server)),
                      trainer.emberd_seconds(steps, on_device(server), pipelined=True)))
    gains = [plain / piped for _, plain, piped in turns]
    row("pipelined/server", 1000 * min(one[0] for one in turns), "ms")
    row("pipelined/gain", max(gains), "times", 1.6)


def busy(case):
    """A trainer that takes all cores: what comes of ids that are sent ahead, once it is known which way is faster, and of pipelining."""
    trainer, steps = Trainer(case), 110
    turns = [(trainer.emberd_seconds(steps - 60, ahead=False), trainer.emberd_seconds(steps, warm_up=70),
              trainer.emberd_seconds(steps, warm_up=70, pipelined=True)) for _ in range(TURNS)]
    plain, ahead, piped = (statistics.median(one) for one in zip(*turns))
    row("busy/plain/examples", case.batch / plain, "examples/s")
    row("busy/prefetched/gain", plain / ahead, "times", 1)
    row("busy/pipelined/gain", plain / piped, "times", 1)


def main():
    program, text = sys.argv[1:]

    def wants(name):
        return text in f"python/{name}/" or f"python/{name}/" in text

    if wants("overhead"):
        overhead(program)
    if torch is None:
        print("PyTorch is not installed: its part is left out", file=sys.stderr)
        return
    if wants("end_to_end"):
        end_to_end()
    for bag in (1, 20):
        measurements = {f"train/bag{bag}": lambda case: training(case, bag)}
        if bag == 1:
            measurements.update(pipelined=pipelined, busy=busy)
        wanted = [measure for name, measure in measurements.items() if wants(name)]
        if wanted:
            with Case(program, BATCH, bag) as case:
                for measure in wanted:
                    measure(case)


if __name__ == "__main__":
    if torch is not None:
        import emberd.torch
    main()
