"""A click model under Ray Train: the cluster of emberd lives on the nodes of Ray, beside the trainers.

usage: ray_train.py [--workers N] [--shards N] [--data FOLDER] [--listen HOST]

It connects to the cluster of Ray that RAY_ADDRESS names, or starts one on this machine. --data: a folder that all nodes
reach, for checkpoints: rows of a node that dies come back from them. --listen 127.0.0.1 where all nodes are one machine.
"""

import argparse

import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer

import emberd
import emberd.ray
import emberd.torch

BATCH, ROWS, DIM, STEPS = 64, 200, 8, 60
TABLES = [emberd.TableConfig(name, ROWS, DIM, combiner="mean", initializer=emberd.Normal(0.0, 0.1)) for name in ("user", "shop")]


def batch_of(step, rank):
    """Who saw which shop, and clicked or not."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    user, shop = (torch.randint(ROWS, (BATCH,), generator=random) for _ in range(2))
    return {"ids": {"user": user, "shop": shop}, "clicked": (user % 2 + shop % 2 > 0).float()}


def train(options):
    """On each worker of Ray Train, which has joined them by torch.distributed: they are the ranks of one group."""
    torch.manual_seed(1)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2 * DIM, 1))
    with options["cluster"].connect() as client:
        ebc = emberd.torch.EmbeddingBagCollection(TABLES, client=client, model="clicks", seed=1, reduction="mean",
                                                  optimizer=emberd.Adagrad(learning_rate=0.1, initial_accumulator=1e-6))
        dense, sparse = torch.optim.SGD(net.parameters(), lr=0.5), ebc.optimizer()
        rank = torch.distributed.get_rank()
        batches = (batch_of(step, rank) for step in range(ebc.next_step, STEPS))
        for batch in emberd.torch.Prefetcher(batches, ebc):
            score = net(torch.cat(list(ebc(batch["ids"]).values()), 1))[:, 0]
            loss = torch.nn.functional.binary_cross_entropy_with_logits(score, batch["clicked"])
            for optimizer in (dense, sparse):
                optimizer.zero_grad()
            loss.backward()
            for optimizer in (dense, sparse):
                optimizer.step()
        ebc.finish()
        if rank == 0:
            print(f"clicks: steps={ebc.next_step} loss={loss:.4f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--data")
    parser.add_argument("--listen", default="")
    parser.add_argument("--timeout", type=float, default=60, help="seconds that a process may take to start")
    options = parser.parse_args()
    with emberd.ray.Cluster(shards=options.shards, cpus_per_shard=0.5, cpus_per_coordinator=0.5, data=options.data,
                            listen=options.listen, timeout=options.timeout) as cluster:
        workers = ray.train.ScalingConfig(num_workers=options.workers, resources_per_worker={"CPU": 0.5})
        TorchTrainer(train, train_loop_config={"cluster": cluster}, scaling_config=workers).fit()


if __name__ == "__main__":
    main()
