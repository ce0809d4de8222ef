"""What torchrec does with tables in one process, by torch.nn.EmbeddingBag: what emberd.compat.torchrec is compared with where
torchrec itself is not installed."""

import torch
from emberd.compat.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor  # noqa: F401
from emberd.compat.torchrec import EmbeddingBagConfig, EmbeddingConfig, PoolingType  # noqa: F401


class RowWiseAdagrad(torch.optim.Optimizer):
    def __init__(self, params, lr, eps=1e-10):
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad.to_dense()
                state = self.state[parameter]
                state["sum"] = state.get("sum", torch.zeros(len(parameter), 1)) + gradient.pow(2).mean(1, keepdim=True)
                parameter -= group["lr"] * gradient / (state["sum"].sqrt() + group["eps"])


class RowAdam(torch.optim.Optimizer):
    """torch.optim.Adam for the rows that have a gradient."""

    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                rows, gradient = parameter.grad.indices()[0], parameter.grad.values()
                state = self.state[parameter]
                if not state:
                    state.update(step=0, m=torch.zeros_like(parameter), v=torch.zeros_like(parameter))
                state["step"] += 1
                corrected = []
                for name, beta, change in zip("mv", group["betas"], (gradient, gradient.pow(2))):
                    state[name][rows] = beta * state[name][rows] + (1 - beta) * change
                    corrected.append(state[name][rows] / (1 - beta ** state["step"]))
                parameter[rows] -= group["lr"] * corrected[0] / (corrected[1].sqrt() + group["eps"])


class EmbeddingBagCollection(torch.nn.Module):
    def __init__(self, tables, device=None):
        super().__init__()
        self.tables = tables
        self.embedding_bags = torch.nn.ModuleDict({
            one.name: torch.nn.EmbeddingBag(one.num_embeddings, one.embedding_dim, mode=one.pooling.value.lower(), sparse=True)
            for one in tables})

    def forward(self, features):
        keys, lengths = features.keys(), features.lengths().reshape(len(features.keys()), -1)
        ends = lengths.sum(1).cumsum(0).tolist()
        names = [name for table in self.tables for name in table.feature_names]
        found = {}
        for table in self.tables:
            for name in table.feature_names:
                place = keys.index(name)
                values = features.values()[ends[place] - int(lengths[place].sum()):ends[place]]
                offsets = lengths[place].cumsum(0) - lengths[place]
                found[name if names.count(name) == 1 else f"{name}@{table.name}"] = self.embedding_bags[table.name](values, offsets)
        return KeyedTensor(list(found), [one.shape[1] for one in found.values()], torch.cat(list(found.values()), 1))


class EmbeddingCollection(torch.nn.Module):
    def __init__(self, tables, device=None, need_indices=False):
        super().__init__()
        self.tables, self.need_indices = tables, need_indices
        self.embeddings = torch.nn.ModuleDict({one.name: torch.nn.Embedding(one.num_embeddings, one.embedding_dim, sparse=True) for one in tables})

    def forward(self, features):
        found = {}
        names = [name for table in self.tables for name in table.feature_names]
        for table in self.tables:
            for name in table.feature_names:
                ids = features[name]
                found[name if names.count(name) == 1 else f"{name}@{table.name}"] = JaggedTensor(
                    self.embeddings[table.name](ids.values()), ids.values() if self.need_indices else None, lengths=ids.lengths())
        return found


def apply_optimizer_in_backward(optimizer_class, params, optimizer_kwargs):
    kind = RowAdam if optimizer_class is torch.optim.Adam else optimizer_class
    for parameter in params:
        parameter.register_hook(_Step(parameter, kind([parameter], **optimizer_kwargs)))


class _Step:
    """Makes the optimizer's step when the gradient has come."""

    def __init__(self, parameter, optimizer):
        self.parameter, self.optimizer = parameter, optimizer

    def __call__(self, gradient):
        self.parameter.grad = gradient.detach().coalesce()
        self.optimizer.step()
        self.parameter.grad = None
        return torch.zeros_like(gradient)
