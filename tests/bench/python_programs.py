"""The rows of programs_bench from Python: prints the milliseconds of update(k) and lookup(k + 1) in two calls, and in one chain, medians of calls
made in turns.

usage: python_programs.py ADDRESS FEATURES BATCH BAG WIDTH REPEATS
"""

import os
import statistics
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "client", "python"))

import numpy as np  # noqa: E402

import emberd  # noqa: E402

UNTIMED = 3


def main(address, features, batch, bag, width, repeats):
    random, names = np.random.default_rng(1), [f"f{feature}" for feature in range(features)]
    with emberd.connect(address) as client:
        model = client.model("step")
        lookup, update = (model.compile(kind, samples=batch) for kind in ("lookup", "update"))
        ids = {name: random.integers(0, model.tables[model.features[name].table].vocabulary_size, (batch, bag), np.int32) for name in names}
        gradients = {name: np.full((batch, width), 1e-3, np.float32) for name in names}
        found, chained, times = lookup(ids), lookup(ids), []
        for _ in range(UNTIMED + repeats):
            begin = time.perf_counter()
            update(found, gradients)
            found = lookup(ids)
            middle = time.perf_counter()
            chain = emberd.Chain()
            chain.add(update, chained, gradients)
            chain.add(lookup, ids)
            _, chained = chain.run()
            times.append((middle - begin, time.perf_counter() - middle))
    print(*(1000 * statistics.median(column) for column in zip(*times[UNTIMED:])))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
