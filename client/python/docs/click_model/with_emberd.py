"""The click model with emberd, in PyTorch. test_compared.py runs it."""

import torch
from data import BATCH, ITEMS, USERS, clicks

import emberd
import emberd.torch

client = emberd.local(shards=2).connect()
tables = [emberd.TableConfig("user", USERS, 16), emberd.TableConfig("item", ITEMS, 16)]
ebc = emberd.torch.EmbeddingBagCollection(tables, client=client, model="clicks", optimizer=emberd.Adagrad(learning_rate=0.1))
net = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
dense, sparse = torch.optim.Adam(net.parameters(), lr=0.01), ebc.optimizer()
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*map(torch.from_numpy, clicks())), BATCH)
for epoch in range(2):
    for users, items, clicked in loader:
        found = ebc({"user": users, "item": items})
        logits = net(torch.cat([found["user"], found["item"]], 1)).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, clicked)
        loss.backward()
        for one in (dense, sparse):
            one.step()
            one.zero_grad()
print(f"loss {float(loss):.3f}")
