"""A click model under Lightning, in its automatic mode: the dense part has an optimizer of torch, and the tables of the cluster go along with it.

usage: lightning_clicks.py [--address HOST:PORT] [--epochs N] [--resume] [--folder FOLDER]

Without an address a cluster is started for the run, whose checkpoints are in FOLDER, by default a temporary one. With --resume training goes on
from the checkpoint that an earlier run left there.
"""

import argparse
import os
import tempfile

import lightning as L
import torch

import emberd
import emberd.torch

USERS, DIM, BATCH = 200, 8, 64
TABLES = [emberd.TableConfig(name, USERS, DIM, initializer=emberd.Normal(0.0, 0.1)) for name in ("user", "item")]


def batches(count, seed):
    """Pairs of ids and labels: a user clicks where the numbers of both are odd, or both even."""
    random = torch.Generator().manual_seed(seed)
    for _ in range(count):
        user, item = torch.randint(USERS, (2, BATCH), generator=random)
        yield {"user": user, "item": item}, ((user + item) % 2 == 0).float()


class Clicks(L.LightningModule):
    def __init__(self, client):
        super().__init__()
        self.client = client
        self.tables = emberd.torch.EmbeddingBagCollection(TABLES, client=client, model="clicks",
                                                               optimizer=emberd.Adagrad(learning_rate=0.2, initial_accumulator=1e-6))
        self.sparse = self.tables.optimizer()
        self.net = torch.nn.Sequential(torch.nn.Linear(3 * DIM, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def loss_of(self, batch):
        ids, label = batch
        found = self.tables(ids)
        logits = self.net(torch.cat([found["user"], found["item"], found["user"] * found["item"]], 1))[:, 0]
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, label)

    def training_step(self, batch, _):
        return self.loss_of(batch)

    def validation_step(self, batch, _):
        self.log("held_out", self.loss_of(batch), batch_size=BATCH)

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), lr=0.01)

    def on_before_optimizer_step(self, *_):
        """After the backward pass, whose gradients the tables have, too. With precision="16-mixed" they are scaled, as those of the dense part are."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is None:
            self.sparse.step()
        else:
            self.sparse.share_overflow()
            scaler.step(self.sparse)
        self.sparse.zero_grad()

    def on_save_checkpoint(self, checkpoint):
        """Lightning's file has the dense part and the number of the next step; the tables of the same step are saved on the cluster."""
        self.tables.model.save_checkpoint(f"step-{self.tables.next_step}")

    def on_load_checkpoint(self, checkpoint):
        self.client.restore("clicks", f"step-{checkpoint['state_dict']['tables._extra_state']['next_step']}")


def fit(client, folder, epochs, resume):
    net = Clicks(client)
    trainer = L.Trainer(max_epochs=epochs, default_root_dir=folder, accelerator="cpu", logger=False, enable_progress_bar=False,
                        enable_model_summary=False, enable_checkpointing=False)
    train = list(batches(100, seed=1))
    held_out = torch.utils.data.DataLoader(list(batches(10, seed=2)), batch_size=None)
    trainer.fit(net, emberd.torch.Prefetcher(train, net.tables), held_out,
                ckpt_path=os.path.join(folder, "last.ckpt") if resume else None)
    trainer.save_checkpoint(os.path.join(folder, "last.ckpt"))
    net.tables.finish()
    print(f"lightning: steps={net.tables.next_step} held_out={float(trainer.callback_metrics['held_out']):.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--address")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or temporary
        if options.address:
            with emberd.connect(options.address) as client:
                fit(client, folder, options.epochs, options.resume)
        else:
            with emberd.local(shards=2, data=os.path.join(folder, "tables")) as cluster, cluster.connect() as client:
                fit(client, folder, options.epochs, options.resume)


if __name__ == "__main__":
    main()
