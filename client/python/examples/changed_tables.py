"""A trained click model goes on with a table more, and with more rows in another, in PyTorch.

usage: changed_tables.py [--address HOST:PORT]

Without an address a cluster is started for the run. Run it again on the same cluster: the changed model is found, and goes on from where it was. The last
line has losses: of the old model at first, of the changed one in its first steps and in its last ones, and of a new one in its first steps.
"""

import argparse

import torch

import emberd
import emberd.torch

DIM, BATCH, STEPS = 16, 256, 60
ITEMS, MORE_ITEMS, SHOPS = 500, 800, 40
ADAM = emberd.Adam(learning_rate=0.05, bias_correction=True)


def tables(items, shops):
    found = [emberd.TableConfig("items", items, DIM, initializer=emberd.Normal(0.0, 0.05))]
    return found + [emberd.TableConfig("shops", SHOPS, DIM, initializer=emberd.Normal(0.0, 0.05))] * shops


def batch(step, items):
    """Some items are clicked more than others."""
    random = torch.Generator().manual_seed(step)
    ids = torch.randint(0, items, (BATCH,), generator=random)
    odds = torch.where(ids % 7 < 3, 0.9, 0.1)
    return {"items": ids, "shops": ids % SHOPS}, (torch.rand(BATCH, generator=random) < odds).float()


def train(ebc, net, steps, items):
    dense, sparse, losses = torch.optim.Adam(net.parameters(), lr=0.01), ebc.optimizer(), []
    for step in steps:
        ids, clicked = batch(step, items)
        rows = ebc({name: ids[name] for name in ebc.model.features})
        loss = torch.nn.functional.binary_cross_entropy_with_logits(net(sum(rows.values())).squeeze(1), clicked)
        for one in (dense, sparse):
            one.zero_grad()
        loss.backward()
        for one in (dense, sparse):
            one.step()
        losses.append(float(loss))
    ebc.finish()
    return [sum(some) / len(some) for some in (losses[:5], losses[-5:])]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="of a coordinator; default: a cluster is started")
    address = parser.parse_args().address
    with (emberd.connect(address) if address else emberd.local().connect()) as client:
        torch.manual_seed(1)
        net = torch.nn.Linear(DIM, 1)
        old = emberd.torch.EmbeddingBagCollection(tables(ITEMS, False), client=client, model="clicks", group="run", optimizer=ADAM)
        first, _ = train(old, net, range(STEPS), ITEMS)

        wanted = emberd.ModelConfig("clicks-2", tables(MORE_ITEMS, True), [emberd.FeatureConfig(name, name) for name in ("items", "shops")], optimizer=ADAM)
        changed = client.change_model("clicks", wanted, groups=["run"])  # rows, slots and the number of steps
        print(changed)
        new = emberd.torch.EmbeddingBagCollection(wanted.tables, model=changed.model, group="run")
        goes_on, last = train(new, net, range(new.next_step, new.next_step + STEPS), ITEMS)

        torch.manual_seed(1)
        fresh = emberd.torch.EmbeddingBagCollection(wanted.tables, client=client, model="clicks-anew", group="run", optimizer=ADAM)
        anew, _ = train(fresh, torch.nn.Linear(DIM, 1), range(STEPS), ITEMS)
        print(f"losses: {first:.3f} {goes_on:.3f} {last:.3f} {anew:.3f}")


if __name__ == "__main__":
    main()
