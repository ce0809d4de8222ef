"""Two towers, users and items: that of items is trained alone at first, then both together; then each is served alone.

usage: two_towers.py [--steps N]

A cluster is started for the run, with a folder for its checkpoints. "recall" is how often the item that a user clicks next is among
the 10 of 300 whose vectors fit best: 30 items are alike to it, so that no model exceeds 0.33.
"""

import argparse
import tempfile

import torch

import emberd
import emberd.torch

USERS, ITEMS, TAGS, KINDS, DIM, BATCH = 500, 300, 40, 10, 16, 256
SMALL = emberd.Normal(0.0, 0.1)
TABLES = [emberd.TableConfig(name, rows, DIM, initializer=SMALL) for name, rows in (("user", USERS), ("item", ITEMS), ("tags", TAGS))]


def item_features(item):
    """An item and its two tags. Its kind follows from them, and nobody tells the model."""
    return {"item": item, "tags": torch.stack([item % KINDS, KINDS + item % (TAGS - KINDS)], 1)}


def clicks(random, count):
    """Who clicked what: most often an item of the kind that the user likes."""
    user = torch.randint(USERS, (count,), generator=random)
    liked = (user * 7) % KINDS
    item = torch.randint(ITEMS // KINDS, (count,), generator=random) * KINDS + liked
    return user, torch.where(torch.rand(count, generator=random) < 0.9, item, torch.randint(ITEMS, (count,), generator=random))


class Tower(torch.nn.Module):
    """Activations to a vector of length 1."""

    def __init__(self, features):
        super().__init__()
        self.features = features
        self.net = torch.nn.Sequential(torch.nn.Linear(len(features) * DIM, 32), torch.nn.ReLU(), torch.nn.Linear(32, DIM))

    def forward(self, found):
        rows = torch.cat([torch.as_tensor(found[name]) for name in self.features], 1)
        return torch.nn.functional.normalize(self.net(rows), dim=1)


def train(client, steps):
    torch.manual_seed(1)
    users, items, kinds = Tower(["user"]), Tower(["item", "tags"]), torch.nn.Linear(DIM, KINDS)
    # partial: a step names the features that it has.
    tables = emberd.torch.EmbeddingBagCollection(TABLES, client=client, model="towers", partial=True,
                                                 optimizer=emberd.Adagrad(learning_rate=0.1))
    parameters = [*users.parameters(), *items.parameters(), *kinds.parameters()]
    optimizers = [torch.optim.Adam(parameters, lr=0.005), tables.optimizer()]
    random = torch.Generator().manual_seed(1)

    def step(loss):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()

    for _ in range(steps // 4):  # what kind is this item? Rows of users stay as they are.
        item = torch.randint(ITEMS, (BATCH,), generator=random)
        step(torch.nn.functional.cross_entropy(kinds(items(tables(item_features(item)))), item % KINDS))
    for _ in range(steps):  # which item of the batch was this user's?
        user, item = clicks(random, BATCH)
        found = tables({"user": user, **item_features(item)})
        step(torch.nn.functional.cross_entropy(users(found) @ items(found).T * 10, torch.arange(BATCH)))
    tables.model.save_checkpoint("trained")
    tables.finish()
    return users.eval(), items.eval()


@torch.no_grad()
def serve(client, users, items):
    """The vectors of all items are made once, without users; a request asks for a user, without items."""
    model = client.serve("towers", "trained", serve_as="towers-live", storage_dtype="BFLOAT16")
    index = items(model.lookup(item_features(torch.arange(ITEMS)), partial=True))
    user, item = clicks(torch.Generator().manual_seed(2), 2000)
    best = (users(model.lookup({"user": user}, partial=True)) @ index.T).topk(10).indices
    return float((best == item[:, None]).any(1).float().mean())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, emberd.local(shards=2, data=folder) as cluster, cluster.connect() as client:
        recall = serve(client, *train(client, options.steps))
    print(f"two towers: recall={recall:.3f}")


if __name__ == "__main__":
    main()
