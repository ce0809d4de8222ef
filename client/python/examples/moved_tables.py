"""A torch.nn.Embedding that Adam has trained moves to a cluster in the middle of its run, and goes on there as it would have here.

usage: moved_tables.py

A cluster is started for the run, with a folder for its checkpoints. "apart" is how far the rows are from those of torch after as many more steps; "left" what a
checkpoint does not bring to a table that has grown; "frozen" whether a layer of given rows still has them after the steps of what comes behind it.
"""

import tempfile

import torch

import emberd
import emberd.torch

ROWS, DIM, STEPS = 500, 16, 50
ADAM = emberd.Adam(learning_rate=0.05, bias_correction=True)  # torch's formula


def train(layer, optimizer, target, steps):
    """All rows learn those of `target`: each batch has all, for torch.optim.Adam moves the others, too, and emberd's does not."""
    for _ in range(steps):
        optimizer.zero_grad()
        (layer(torch.arange(ROWS)) - target).square().sum().backward()
        optimizer.step()


def main():
    torch.manual_seed(1)
    target, plain = torch.randn(ROWS, DIM), torch.nn.Embedding(ROWS, DIM)
    adam = torch.optim.Adam(plain.parameters(), lr=0.05)
    train(plain, adam, target, STEPS)

    with tempfile.TemporaryDirectory() as folder, emberd.local(shards=2, data=folder) as cluster, cluster.connect() as client:
        # Rows and both means of Adam move; its corrections count steps, and so the group begins with the next one.
        state = adam.state[plain.weight]
        table = emberd.TableConfig("words", ROWS, DIM, optimizer=ADAM)
        moved = emberd.torch.Embedding(ROWS, DIM, client=client, model="words", table=table, first_step=int(state["step"]))
        moved.collection.model.load_table("words", plain.weight, {"momentum": state["exp_avg"], "velocity": state["exp_avg_sq"]})
        train(moved, moved.optimizer(), target, STEPS)
        train(plain, adam, target, STEPS)
        apart = float((moved.weight - plain.weight).abs().max())
        step = moved.collection.next_step
        moved.collection.model.save_checkpoint("moved")
        moved.finish()

        # Another model takes one table out of the checkpoint. It has more rows, and what the checkpoint does not have is said.
        tables = [emberd.TableConfig("words", ROWS + 100, DIM), emberd.TableConfig("users", 100, DIM)]
        larger = client.declare(emberd.ModelConfig("larger", tables, [emberd.FeatureConfig(one.name, one.name) for one in tables], optimizer=ADAM))
        left = larger.restore_tables("moved", ["words"], of="words")
        for one in left:
            print(f"not taken: {one}")
        assert (torch.from_numpy(larger.table("words")[:ROWS]) == moved.weight).all()

        # Rows that are only looked up: a layer of given rows is frozen, as torch.nn.Embedding.from_pretrained makes it, while what comes behind it learns.
        words = emberd.torch.Embedding.from_pretrained(plain.weight.detach(), client=client, model="frozen-words")
        dense = torch.nn.Linear(DIM, DIM)
        train(torch.nn.Sequential(words, dense), torch.optim.Adam(dense.parameters()), target, STEPS)
        frozen = torch.equal(words.weight.detach(), plain.weight.detach())
        words.finish()
    print(f"moved: step={step} apart={apart:.1e} left={len(left)} frozen={frozen}")


if __name__ == "__main__":
    main()
