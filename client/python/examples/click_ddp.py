"""A click model on two trainers: the net under DDP, the tables in emberd, both as one trainer with both batches.

usage: click_ddp.py [--address HOST:PORT] [--ranks N] [--steps N]

Without an address a cluster is started for the run. The loss at the end is the same for one rank and for several, but for
the order in which DDP adds gradients of the net up.
"""

import argparse
import tempfile

import torch

import emberd
import emberd.torch

BATCH, ROWS, DIM = 256, 500, 16
TABLES = [emberd.TableConfig(name, ROWS, DIM, combiner="mean", initializer=emberd.Normal(0.0, 0.1))
          for name in ("user", "shop", "words")]


def batch_of(step, rank, size):
    """This rank's part of a batch: who saw which shop, with some words, and clicked or not."""
    random = torch.Generator().manual_seed(step)
    user, shop = (torch.randint(ROWS, (BATCH,), generator=random) for _ in range(2))
    words = torch.randint(ROWS, (BATCH, 3), generator=random)
    clicked = (user % 2 + shop % 2 + (words % 2).sum(1) > 2).float()
    mine = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    return {"user": user[mine], "shop": shop[mine], "words": words[mine]}, clicked[mine]


def train(rank, size, address, steps, rendezvous):
    torch.manual_seed(1)
    torch.set_num_threads(1)
    net = torch.nn.Sequential(torch.nn.Linear(3 * DIM, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    if size > 1:
        torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
        net = torch.nn.parallel.DistributedDataParallel(net)
    with emberd.connect(address) as client:
        # rank and size are those of torch.distributed; mean: the gradients of the ranks as DDP scales them.
        ebc = emberd.torch.EmbeddingBagCollection(TABLES, client=client, model="clicks", seed=1, reduction="mean",
                                                  optimizer=emberd.Adagrad(learning_rate=0.1, initial_accumulator=1e-6))
        dense, sparse = torch.optim.SGD(net.parameters(), lr=0.5), ebc.optimizer()
        begin = ebc.next_step
        batches = [{"ids": ids, "clicked": clicked} for ids, clicked in
                   (batch_of(step, rank, size) for step in range(begin, begin + steps))]
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
            print(f"clicks: ranks={size} steps={ebc.next_step} loss={loss:.4f}", flush=True)
    if size > 1:
        torch.distributed.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--address")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    cluster = None if options.address else emberd.local(shards=2)
    address = options.address or cluster.address
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, (options.ranks, address, options.steps, f"{folder}/rendezvous"),
                                    nprocs=options.ranks)
    if cluster is not None:
        cluster.close()


if __name__ == "__main__":
    main()
