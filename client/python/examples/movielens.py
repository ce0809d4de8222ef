"""Who likes which film: MovieLens-100K with embedding tables in emberd and a small network in PyTorch.

usage: movielens.py FOLDER [--address HOST:PORT] [--plain]

FOLDER holds *.inter, *.item and *.user, tab-separated with a header (ml-100k.inter and so on). Without an address a
cluster is started for the run. --plain trains the same model with torch.nn.EmbeddingBag instead, from the same initial
rows, to compare.
"""

import argparse
import glob
import os

import numpy as np
import torch

import emberd
import emberd.torch

BATCH, EPOCHS, RATE = 512, 6, 0.05
SMALL = emberd.Normal(0.0, 0.01)
TABLES = [emberd.TableConfig(name, rows, dim, combiner=combiner, initializer=SMALL) for name, rows, dim, combiner in (
    ("user", 943, 16, "sum"), ("item", 1682, 16, "sum"), ("age", 128, 8, "sum"), ("gender", 2, 8, "sum"),
    ("occupation", 64, 8, "sum"), ("genres", 32, 8, "mean"))]


def read(folder, kind):
    """The rows of a file without its header."""
    with open(glob.glob(os.path.join(folder, "*." + kind))[0], encoding="utf-8") as file:
        return [line.rstrip("\n").split("\t") for line in file][1:]


class Vocabulary(dict):
    """Numbers tokens in the order in which they first appear."""

    def __missing__(self, token):
        self[token] = len(self)
        return self[token]


def load(folder):
    """Every rating as ids by feature and a label: 1 if the film was liked. Every fifth is held out."""
    users, items, jobs, genders, genres = (Vocabulary() for _ in range(5))
    of_user = {row[0]: (min(int(row[1]), 127), genders[row[2]], jobs[row[3]]) for row in read(folder, "user")}
    of_item = {row[0]: [genres[one] for one in row[3].split()] for row in read(folder, "item")}
    ratings = sorted(read(folder, "inter"), key=lambda row: (row[3], row[0], row[1]))
    examples = [(users[user], items[item], *of_user[user], of_item[item], float(float(rating) >= 4))
                for user, item, rating, _ in ratings]
    return [one for i, one in enumerate(examples) if i % 5], examples[::5]


class Batch:
    def __init__(self, examples):
        user, item, age, gender, job, genres, label = zip(*examples)
        self.ids = {name: torch.tensor(values) for name, values in (
            ("user", user), ("item", item), ("age", age), ("gender", gender), ("occupation", job))}
        self.ids["genres"] = emberd.Ragged.from_lists(genres)
        self.label = torch.tensor(label)


class Loader:
    """Batches of a shuffled epoch."""

    def __init__(self, examples, seed):
        order = np.random.default_rng(seed).permutation(len(examples))
        self.batches = [Batch([examples[i] for i in order[begin:begin + BATCH]]) for begin in range(0, len(order), BATCH)]

    def __iter__(self):
        return iter(self.batches)


class Plain(torch.nn.Module):
    """The same tables in this process."""

    def __init__(self, model):
        super().__init__()
        self.bags = torch.nn.ModuleDict({
            table.name: torch.nn.EmbeddingBag.from_pretrained(torch.from_numpy(model.table(table.name).copy()),
                                                              freeze=False, mode=table.combiner) for table in TABLES})

    def forward(self, ids):
        return {name: self.bags[name](torch.as_tensor(one.values), torch.as_tensor(one.row_splits[:-1]))
                if isinstance(one, emberd.Ragged) else self.bags[name](one[:, None]) for name, one in ids.items()}


def auc(label, score):
    """The chance that a liked film scores above another."""
    order = np.argsort(score, kind="stable")
    ranks = np.empty(len(score))
    ranks[order] = np.arange(1, len(score) + 1)
    liked = label > 0.5
    n = liked.sum()
    return (ranks[liked].sum() - n * (n + 1) / 2) / max(1, n * (len(label) - n))


def train(client, folder, plain):
    train_set, test_set = load(folder)
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(sum(table.embedding_dim for table in TABLES), 32), torch.nn.ReLU(),
                              torch.nn.Linear(32, 1))
    tables = emberd.torch.EmbeddingBagCollection(TABLES, client=client, model="movielens-torch", seed=1,
                                                 optimizer=emberd.Adagrad(learning_rate=RATE, initial_accumulator=0.1))
    module = Plain(tables.model) if plain else tables
    dense = torch.optim.Adagrad(net.parameters(), lr=RATE)
    sparse = (torch.optim.Adagrad(module.parameters(), lr=RATE, initial_accumulator_value=0.1, eps=0.0) if plain
              else tables.optimizer())

    def predict(batch):
        return net(torch.cat(list(module(batch.ids).values()), dim=1))[:, 0]

    for epoch in range(EPOCHS):
        loader = Loader(train_set, epoch)
        for batch in loader if plain else emberd.torch.Prefetcher(loader, tables):
            loss = torch.nn.functional.binary_cross_entropy_with_logits(predict(batch), batch.label)
            loss.backward()
            for optimizer in (dense, sparse):
                optimizer.step()
                optimizer.zero_grad()
    tables.finish()
    module.eval()
    with torch.no_grad():
        score = np.concatenate([predict(Batch(test_set[i:i + BATCH])) for i in range(0, len(test_set), BATCH)])
    return float(loss), auc(np.array([one[-1] for one in test_set]), score)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--address")
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    if options.address:
        with emberd.connect(options.address) as client:
            loss, found = train(client, options.folder, options.plain)
    else:
        with emberd.local(shards=2) as cluster, cluster.connect() as client:
            loss, found = train(client, options.folder, options.plain)
    print(f"movielens: loss={loss:.6f} auc={found:.4f}")


if __name__ == "__main__":
    main()
