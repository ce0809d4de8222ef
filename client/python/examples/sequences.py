"""What comes next: a transformer over the last 50 items of each user, whose table is in emberd.

usage: sequences.py [--address HOST:PORT] [--epochs N]

Without an address a cluster is started for the run. Users go through items in a way that depends on the last two; a fifth of their
moves is random, so that no model hits more than 81 of 100. "hits" are those of held-out users whose next item has the highest score.
"""

import argparse

import torch

import emberd
import emberd.torch

ITEMS, DIM, LAST, BATCH = 100, 32, 50, 64  # id 0 is padding
TABLES = [emberd.TableConfig("items", ITEMS + 1, DIM, initializer=emberd.Normal(0.0, 0.1))]


def histories(users, seed):
    """Sequences of different lengths, filled up with 0 in front: [users, LAST + 1]; the last item is the one to predict."""
    random = torch.Generator().manual_seed(seed)
    items = torch.randint(1, ITEMS + 1, (users, LAST + 1), generator=random)
    for place in range(2, LAST + 1):
        follows = (items[:, place - 1] + 3 * (items[:, place - 2] % 2)) % ITEMS + 1
        random_move = torch.rand(users, generator=random) < 0.2
        items[:, place] = torch.where(random_move, items[:, place], follows)
    lengths = torch.randint(5, LAST + 2, (users, 1), generator=random)
    return items * (torch.arange(LAST, -1, -1) < lengths)


class NextItem(torch.nn.Module):
    """The dense part: scores of all items after each position."""

    def __init__(self):
        super().__init__()
        self.position = torch.nn.Parameter(torch.randn(LAST, DIM) * 0.1)
        layer = torch.nn.TransformerEncoderLayer(DIM, 2, 4 * DIM, dropout=0.0, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.scores = torch.nn.Linear(DIM, ITEMS + 1)
        self.register_buffer("later", torch.triu(torch.ones(LAST, LAST, dtype=torch.bool), 1))  # an item does not see those after it

    def forward(self, rows, mask):
        # A position may attend to itself even where padding stands, so that softmax has something to weigh.
        hidden = self.later | (~mask[:, None, :] & ~torch.eye(LAST, dtype=torch.bool))
        return self.scores(self.encoder(rows + self.position, mask=hidden.repeat_interleave(2, 0)))


def train(client, epochs):
    torch.manual_seed(1)
    net = NextItem()
    items = emberd.torch.EmbeddingCollection(TABLES, client=client, model="next-item", padding_idx=0,
                                             optimizer=emberd.Adam(learning_rate=0.01, bias_correction=True))
    dense, sparse = torch.optim.Adam(net.parameters(), lr=0.005), items.optimizer()
    users = histories(1536, seed=1)
    for epoch in range(epochs):
        order = torch.randperm(len(users), generator=torch.Generator().manual_seed(epoch))
        batches = [({"items": users[some, :-1]}, users[some, 1:]) for some in order.split(BATCH)]
        for ids, after in emberd.torch.Prefetcher(batches, items):  # the ids of the next batch are sent ahead
            scores = net(items(ids)["items"], items.mask(ids)["items"])
            loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), after.flatten(), ignore_index=0)
            for optimizer in (dense, sparse):
                optimizer.zero_grad()
            loss.backward()
            for optimizer in (dense, sparse):
                optimizer.step()
    items.finish()

    items.eval()
    net.eval()
    held_out = histories(512, seed=2)
    with torch.no_grad():
        ids = {"items": held_out[:, :-1]}
        best = net(items(ids)["items"], items.mask(ids)["items"])[:, -1].argmax(1)
    hits = (best == held_out[:, -1]).float().mean()
    print(f"sequences: steps={items.next_step} loss={loss:.4f} hits={hits:.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--address")
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()
    if options.address:
        with emberd.connect(options.address) as client:
            train(client, options.epochs)
    else:
        with emberd.local(shards=2) as cluster, cluster.connect() as client:
            train(client, options.epochs)


if __name__ == "__main__":
    main()
