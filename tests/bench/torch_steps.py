"""The peer of kernels_bench and step_bench: EmbeddingBag(sparse=True) and Adagrad on one thread.

usage: torch_steps.py ROWS WIDTH (NAME BAG IDS_FILE)...

IDS_FILE holds int64 ids, BAG of them per sample. Prints for each NAME the median CPU seconds of the
forward pass alone and of a whole step (forward, backward with a given gradient, optimizer).
Exits with status 3 where PyTorch is not installed.
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
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


def read_batches(width):
    """For each batch its name, ids, where each sample begins in them, and the gradient."""
    for name, bag, path in zip(*[iter(sys.argv[3:])] * 3):
        ids = torch.from_numpy(numpy.fromfile(path, dtype=numpy.int64))
        begins = torch.arange(0, len(ids), int(bag))
        yield name, ids, begins, torch.full((len(begins), width), 1e-3)


def main():
    rows, width = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    weight = torch.full((rows, width), 0.01)
    layer = torch.nn.EmbeddingBag(rows, width, mode="sum", sparse=True, _weight=weight)
    optimizer = torch.optim.Adagrad(layer.parameters(), lr=0.01, initial_accumulator_value=0.1)
    for name, ids, begins, gradient in read_batches(width):

        def forward():
            with torch.no_grad():
                layer(ids, begins)

        def step():
            optimizer.zero_grad(set_to_none=True)
            layer(ids, begins).backward(gradient)
            optimizer.step()

        print(name, median_seconds(forward), median_seconds(step), flush=True)


if __name__ == "__main__":
    main()
