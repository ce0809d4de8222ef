"""The peer of kernels_bench and step_bench: EmbeddingBag(sparse=True) and Adagrad.

usage: torch_steps.py ROWS WIDTH TABLES THREADS (NAME BAG IDS_FILE)...

TABLES and THREADS are numbers with commas: ROWS rows are cut into so many tables of one size, and each number of tables is
tried with each number of threads. IDS_FILE holds int64 ids, BAG of them per sample, table after table. Prints for each NAME
the medians of seconds of wall time of the forward pass alone and of a whole step (forward, backward with a given gradient,
optimizer), and the threads and tables, of the fastest step of all. Exits with status 3 where PyTorch is not installed.
"""

import statistics
import sys
import time

try:
    import numpy
    import torch
except ImportError:
    sys.exit(3)

REPEATS = 5


def median_seconds(work):
    work()
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


class Batch:
    """Ids of a step, and the gradient of its activations."""

    def __init__(self, name, bag, path, width):
        self.name = name
        self.ids = torch.from_numpy(numpy.fromfile(path, dtype=numpy.int64))
        self.begins = torch.arange(0, len(self.ids), int(bag))
        self.gradient = torch.full((len(self.begins), width), 1e-3)

    def of_tables(self, rows, tables):
        """(ids, begins, gradient) of each of so many tables: rows count from each table's first."""
        return [(ids - table * (rows // tables), self.begins[:len(gradient)], gradient) for table, (ids, gradient)
                in enumerate(zip(self.ids.chunk(tables), self.gradient.chunk(tables)))]


class Bags:
    """A table of PyTorch for each part of the rows."""

    def __init__(self, rows, width, tables):
        self.rows = rows
        self.layers = [torch.nn.EmbeddingBag(rows // tables, width, mode="sum", sparse=True,
                                             _weight=torch.full((rows // tables, width), 0.01)) for _ in range(tables)]
        self.optimizer = torch.optim.Adagrad([layer.weight for layer in self.layers], lr=0.01, initial_accumulator_value=0.1)

    def works(self, batch):
        """(forward, step) as functions."""
        parts = batch.of_tables(self.rows, len(self.layers))

        def forward():
            with torch.no_grad():
                for layer, (ids, begins, _) in zip(self.layers, parts):
                    layer(ids, begins)

        def step():
            self.optimizer.zero_grad(set_to_none=True)
            found = [layer(ids, begins) for layer, (ids, begins, _) in zip(self.layers, parts)]
            torch.autograd.backward(found, [gradient for _, _, gradient in parts])
            self.optimizer.step()

        return forward, step


def measure(kind):
    """Prints what this file promises, of `kind(rows, width, tables)` with `works` as those of Bags."""
    rows, width = int(sys.argv[1]), int(sys.argv[2])
    tables, threads = ([int(number) for number in word.split(",")] for word in sys.argv[3:5])
    batches = [Batch(*words, width) for words in zip(*[iter(sys.argv[5:])] * 3)]
    found = {batch.name: [] for batch in batches}
    for table_count in tables:
        bags = kind(rows, width, table_count)
        for thread_count in threads:
            torch.set_num_threads(thread_count)
            for batch in batches:
                forward, step = map(median_seconds, bags.works(batch))
                found[batch.name].append((step, forward, thread_count, table_count))
        del bags  # before the next ones
    for name, ways in found.items():
        step, forward, thread_count, table_count = min(ways)
        print(name, forward, step, thread_count, table_count, flush=True)


if __name__ == "__main__":
    measure(Bags)
