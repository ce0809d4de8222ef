"""Each table learns at its own rate and forgets at its own, a scheduler of torch changes the rates, and one table is frozen after half of the run.

usage: own_rates.py [--steps N]

A cluster is started for the run. Users like one of five kinds of items. "right" are held-out pairs; "frozen" says whether all rows of the users are, bit for bit,
those of the moment in which they were frozen.
"""

import argparse

import torch

import emberd
import emberd.torch

USERS, ITEMS, KINDS, DIM, BATCH = 100, 60, 5, 16, 256
TABLES = [emberd.TableConfig(name, rows, DIM, initializer=emberd.Normal(0.0, 0.5)) for name, rows in (("user", USERS), ("item", ITEMS))]


def pairs(random, count):
    """Users and items, and whether the one likes the kind of the other."""
    user, item = torch.randint(USERS, (count,), generator=random), torch.randint(ITEMS, (count,), generator=random)
    near = torch.rand(count, generator=random) < 0.5  # half of the items are of the kind that is liked
    item = torch.where(near, item - item % KINDS + user % KINDS, item)
    return {"user": user, "item": item}, (item % KINDS == user % KINDS).float()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    torch.manual_seed(1)
    random = torch.Generator().manual_seed(1)
    with emberd.local(shards=2) as cluster, cluster.connect() as client:
        # Rates by table are given where the module is made. They are high, for the loss is a mean: gradients of rows are small beside Adagrad's first sums of 0.1.
        ebc = emberd.torch.EmbeddingBagCollection(TABLES, client=client, model="own-rates", optimizer="adagrad",
                                                  lr={"user": 5.0, "item": 3.0}, weight_decay={"item": 1e-4})
        net = torch.nn.Sequential(torch.nn.Linear(DIM, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        dense, sparse = torch.optim.Adam(net.parameters(), lr=0.01), ebc.optimizer()
        # Any scheduler of torch: here one with a function for each table, in their order.
        scheduler = torch.optim.lr_scheduler.LambdaLR(sparse, [lambda step: 1.0, lambda step: 0.995 ** step])
        for step in range(steps):
            if step == steps // 2:
                ebc.requires_grad_(False, tables=["user"])
                frozen = ebc.model.table("user")
            ids, liked = pairs(random, BATCH)
            found = ebc(ids)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(net(found["user"] * found["item"])[:, 0], liked)
            loss.backward()
            for optimizer in (dense, sparse):
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
        ebc.eval()
        ids, liked = pairs(random, 2000)
        with torch.no_grad():
            found = ebc(ids)
            right = ((net(found["user"] * found["item"])[:, 0] > 0) == (liked > 0)).float().mean()
        ebc.finish()
        same = ebc.model.table("user").tobytes() == frozen.tobytes()
        rates = " ".join(f"{group['table']}={group['lr']:.4f}" for group in sparse.param_groups)
    print(f"own rates: {rates} right={right:.3f} frozen={same}")


if __name__ == "__main__":
    main()
