"""The peer of step_bench: torchrec's sharded EmbeddingBagCollection, with FBGEMM's kernels and its fused Adagrad, as two trainers.

usage: torchrec_steps.py SHARDING ROWS WIDTH TABLES THREADS (NAME BAG IDS_FILE)...

SHARDING is row_wise or table_wise. All else and the output are as those of torch_steps.py; but the samples of a step are divided
between two processes, which talk by gloo over loopback and have so many threads each, and the medians are those of the first of them.
Exits with status 3 where torchrec is not installed.
"""

import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time

RANKS, REPEATS = 2, 7

try:
    import fbgemm_gpu  # noqa: F401  # torchrec's kernels
    import torch
    import torch.distributed
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ShardingPlan
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
except (ImportError, OSError):
    sys.exit(3)

from torch_steps import Batch  # noqa: E402


def sharded(sharding, rows, width, tables):
    module = EmbeddingBagCollection(device=torch.device("meta"), tables=[
        EmbeddingBagConfig(name=f"t{t}", embedding_dim=width, num_embeddings=rows // tables, feature_names=[f"f{t}"])
        for t in range(tables)])
    apply_optimizer_in_backward(torch.optim.Adagrad, module.parameters(), {"lr": 0.01, "eps": 1e-10})
    ways = {f"t{t}": row_wise() if sharding == "row_wise" else table_wise(rank=t % RANKS) for t in range(tables)}
    sharder = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(module, ways, sharder, local_size=RANKS, world_size=RANKS, device_type="cpu")
    return DistributedModelParallel(module, device=torch.device("cpu"), plan=ShardingPlan({"": plan}), sharders=[sharder])


def works(module, batch, rows, tables, bag, rank):
    """(forward, step) of this rank's part of the samples."""
    parts = batch.of_tables(rows, tables)
    samples = len(parts[0][1]) // RANKS
    own = slice(rank * samples, (rank + 1) * samples)
    ids = torch.cat([ids.view(-1, bag)[own].flatten() for ids, _, _ in parts])
    features = KeyedJaggedTensor([f"f{t}" for t in range(tables)], ids, lengths=torch.full((samples * tables,), bag, dtype=torch.int32))
    gradient = torch.cat([gradient[own] for _, _, gradient in parts], dim=1)

    def forward():
        with torch.no_grad():
            module(features).values()

    def step():
        module(features).values().backward(gradient)

    return forward, step


def median_seconds(work):
    seconds = []
    for _ in range(2 + REPEATS):
        torch.distributed.barrier()
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def run(rank, meeting, sharding, rows, width, tables, threads, *batches):
    results = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # gloo writes there, too
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    rank, rows, width = int(rank), int(rows), int(width)
    torch.distributed.init_process_group("gloo", init_method="file://" + meeting, rank=rank, world_size=RANKS)
    batches = [(Batch(*words, width), int(words[1])) for words in zip(*[iter(batches)] * 3)]
    found = {batch.name: [] for batch, _ in batches}
    for table_count in map(int, tables.split(",")):
        module = sharded(sharding, rows, width, table_count)
        for thread_count in map(int, threads.split(",")):
            torch.set_num_threads(thread_count)
            for batch, bag in batches:
                forward, step = map(median_seconds, works(module, batch, rows, table_count, bag, rank))
                found[batch.name].append((step, forward, thread_count, table_count))
        del module
    for name, ways in found.items():
        step, forward, thread_count, table_count = min(ways)
        if rank == 0:
            print(name, forward, step, thread_count, table_count, file=results, flush=True)
    torch.distributed.destroy_process_group()


def main():
    with tempfile.TemporaryDirectory() as folder:
        ranks = [subprocess.Popen([sys.executable, "-W", "ignore", "-B", __file__, "--rank", str(rank), os.path.join(folder, "meeting"), *sys.argv[1:]],
                                  env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"}) for rank in range(RANKS)]
        sys.exit(max(one.wait() for one in ranks))


if __name__ == "__main__":
    run(*sys.argv[2:]) if sys.argv[1] == "--rank" else main()
