"""A script for torchrec, written after its documentation. test_torchrec.py runs it with other imports."""

import torch
from torchrec import (EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor,
                      KeyedTensor, PoolingType)
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

BATCH, STEPS = 16, 10
OPTIMIZERS = {"SGD": (torch.optim.SGD, {"lr": 0.1}), "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
              "Adagrad of 0.1": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
              "Adam": (torch.optim.Adam, {"lr": 0.01}), "RowWiseAdagrad": (RowWiseAdagrad, {"lr": 0.1})}


class Model(torch.nn.Module):
    """Two towers, who looks at what; and what was looked at, one after the other."""

    def __init__(self):
        super().__init__()
        self.ebc = EmbeddingBagCollection(device=torch.device("cpu"), tables=[
            EmbeddingBagConfig(name="t_user", embedding_dim=8, num_embeddings=40, feature_names=["user"],
                               pooling=PoolingType.SUM),
            EmbeddingBagConfig(name="t_item", embedding_dim=4, num_embeddings=60, feature_names=["item", "history"],
                               pooling=PoolingType.MEAN),
            EmbeddingBagConfig(name="t_more", embedding_dim=4, num_embeddings=60, feature_names=["item"])])
        self.ec = EmbeddingCollection(device=torch.device("cpu"), need_indices=True, tables=[
            EmbeddingConfig(name="t_row", embedding_dim=2, num_embeddings=60, feature_names=["history", "item"]),
            EmbeddingConfig(name="t_last", embedding_dim=2, num_embeddings=60, feature_names=["history"])])
        self.over = torch.nn.Linear(32, 1)

    def forward(self, features):
        pooled = self.ebc(features)
        groups = KeyedTensor.regroup([pooled], [["user", "history"], ["item@t_item", "item@t_more"]])
        rows = self.ec(features)
        groups += [rows[name].to_padded_dense(2).flatten(1) for name in ("history@t_row", "item", "history@t_last")]
        return self.over(torch.cat(groups, dim=1)), pooled, rows


def batch_of(generator):
    """Ids of a KeyedJaggedTensor, some samples without any."""
    features = {}
    for name, rows, most in (("history", 60, 4), ("user", 40, 2), ("item", 60, 2)):
        lengths = torch.randint(0, most, (BATCH,), generator=generator)
        features[name] = JaggedTensor(torch.randint(0, rows, (int(lengths.sum()),), generator=generator), lengths=lengths)
    return KeyedJaggedTensor.from_jt_dict(features), torch.rand(BATCH, 1, generator=generator)


def main(name):
    """What the model shows first, the losses, and the tables at the end."""
    generator = torch.Generator().manual_seed(11)
    model = Model()
    optimizer_class, options = OPTIMIZERS[name]
    for tables in (model.ebc, model.ec):
        apply_optimizer_in_backward(optimizer_class, tables.parameters(), options)
    model.ebc.load_state_dict({f"embedding_bags.{table}.weight": torch.randn(rows, dim, generator=generator)
                               for table, rows, dim in (("t_user", 40, 8), ("t_item", 60, 4), ("t_more", 60, 4))})
    model.ec.load_state_dict({f"embeddings.{table}.weight": torch.randn(60, 2, generator=generator) for table in ("t_row", "t_last")})
    torch.nn.init.constant_(model.over.weight, 0.25)
    torch.nn.init.zeros_(model.over.bias)
    dense = torch.optim.SGD(model.over.parameters(), lr=0.1)
    first, losses = None, []
    for _ in range(STEPS):
        features, labels = batch_of(generator)
        score, pooled, rows = model(features)
        if first is None:
            first = {key: pooled[key].detach().clone() for key in pooled.keys()}
            first["all"] = pooled.values().detach().clone()
            for name, one in rows.items():
                first |= {f"rows of {name}": one.values().detach().clone(), f"ids of {name}": one.weights().clone(), f"lengths of {name}": one.lengths().clone()}
        loss = torch.nn.functional.mse_loss(score, labels)
        dense.zero_grad()
        loss.backward()
        dense.step()
        losses.append(float(loss))
    model.eval()
    with torch.no_grad():
        last = model(batch_of(generator)[0])[0]
    return first, losses, {**model.ebc.state_dict(), **model.ec.state_dict()}, last
