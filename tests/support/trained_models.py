"""Models written for one process, and ways to lay them out: shared by simulated and real ranks.

The models do not know of ranks. Their sizes do not divide evenly on purpose.
"""

import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise import DTensor, Replicate, Shard

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 11, 12, 3, 5, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, width = x.shape
        h = self.norm1(x)
        heads = [
            layer(h).view(batch, length, HEADS, width // HEADS).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Two blocks, and an embedding that is also the output layer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, tokens, targets):
        logits = self(tokens)
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))

    @staticmethod
    def data():
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
        return tokens[:, :-1].clone(), tokens[:, 1:].clone()


class ResidualBlock(nn.Module):
    """Convolutions with batch norm, a skip connection, pooling and a classifier."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 5, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(5, 5, 3, padding=1, bias=False)
        self.skip = nn.Conv2d(3, 5, 1)
        self.norm1, self.norm2 = nn.BatchNorm2d(5), nn.BatchNorm2d(5)
        self.head = nn.Linear(5, 4)

    def loss(self, images, labels):
        x = F.relu(self.norm1(self.conv1(images)))
        x = F.relu(self.norm2(self.conv2(x)) + self.skip(images))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)

    @staticmethod
    def data():
        return torch.randn(5, 3, 6, 5), torch.randint(4, (5,))


class Lstm(nn.Module):
    """An LSTM cell written by hand, run over a sequence."""

    def __init__(self):
        super().__init__()
        self.input, self.hidden = nn.Linear(4, 4 * 6), nn.Linear(6, 4 * 6, bias=False)
        self.head = nn.Linear(6, 2)

    def loss(self, sequence, targets):
        h = c = sequence.new_zeros(sequence.shape[1], 6)
        for x in sequence.unbind(0):
            i, f, g, o = (self.input(x) + self.hidden(h)).chunk(4, dim=-1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return F.mse_loss(self.head(h), targets)

    @staticmethod
    def data():
        return torch.randn(3, 5, 4), torch.randn(5, 2)


class Encoder(nn.Module):
    """torch's own nn.TransformerEncoder."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=False
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 2)

    def loss(self, x, targets):
        return F.mse_loss(self.head(self.encoder(x)).mean(1), targets)

    @staticmethod
    def data():
        return torch.randn(BATCH, LENGTH, WIDTH), torch.randn(BATCH, 2)


MODELS = {"gpt": Gpt, "residual": ResidualBlock, "lstm": Lstm, "encoder": Encoder}


def fitting(placements, ndim):
    """Return the placements, replicated where the tensor has no such dim."""
    return [
        each if not isinstance(each, Shard) or -ndim <= each.dim < ndim else Replicate()
        for each in placements
    ]


WHOLE = [Replicate(), Replicate()]
# name: placements of parameters, of matrices if others, of the data; on a (2, 2) mesh
PLANS = {
    "data parallel": (WHOLE, WHOLE, [Shard(0), Replicate()]),
    "rows": ([Replicate(), Shard(0)], [Replicate(), Shard(0)], [Shard(0), Replicate()]),
    "columns": ([Replicate(), Shard(0)], [Replicate(), Shard(1)], [Shard(0), Replicate()]),
    "fully sharded": ([Shard(0), Shard(0)], [Shard(0), Shard(0)], [Shard(0), Shard(0)]),
    "two dims": ([Shard(0), Replicate()], [Shard(0), Shard(1)], [Replicate(), Shard(0)]),
    "second dim of data": (WHOLE, [Shard(1), Replicate()], [Shard(0), Shard(1)]),
    "sharded data parallel": ([Shard(0), Replicate()],) * 3,
}


def train(name, dtype, steps=5, mesh=None, plan=None):
    """Return losses, first gradients and final parameters of a training, as plain whole tensors."""
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    data = [each.to(dtype) if each.is_floating_point() else each for each in model.data()]
    if mesh is not None:
        vectors, matrices, inputs = PLANS[plan]
        distribute(model, mesh, vectors, matrices)
        data = [
            sw.distribute_tensor(each, mesh, fitting(inputs, each.dim()), src_data_rank=None)
            for each in data
        ]
    # A large eps: else the first steps are of the gradient's sign, which rounding decides where a
    # gradient is nothing (that of an attention's key bias).
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    losses, gradients = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model.loss(*data)
        loss.backward()
        if not gradients:
            gradients = [whole(p.grad) for p in model.parameters()]
        optimizer.step()
        losses.append(loss.item())
    buffers = [whole(each) for each in model.buffers()]
    return losses, gradients, [whole(p.detach()) for p in model.parameters()] + buffers


def distribute(model, mesh, vectors, matrices):
    """Make every parameter and buffer a DTensor; shared ones stay shared."""
    made = {}
    for module in model.modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is not None:
                if id(parameter) not in made:
                    placements = fitting(
                        vectors if parameter.dim() < 2 else matrices, parameter.dim()
                    )
                    made[id(parameter)] = (
                        parameter,
                        nn.Parameter(
                            sw.distribute_tensor(
                                parameter.detach(), mesh, placements, src_data_rank=None
                            )
                        ),
                    )
                module._parameters[key] = made[id(parameter)][1]
        for key, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[key] = sw.distribute_tensor(buffer, mesh, src_data_rank=None)


def whole(tensor):
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().clone()


def compare(ours, plain, dtype):
    """Compare losses, gradients and parameters: 1e-10 relative in float64, 1e-5 in float32."""
    tolerance = 1e-10 if dtype is torch.float64 else 1e-5
    for mine, theirs in zip(ours[0], plain[0], strict=True):
        assert abs(mine - theirs) <= tolerance * abs(theirs), (mine, theirs)
    for kind in (1, 2):
        # A gradient that cancels out, as that of the keys' bias in attention, is the rounding of
        # others: how much that is depends on the CPU.
        floor = max(1e-3, *(1e-2 * each.double().abs().max().item() for each in plain[kind]))
        for mine, theirs in zip(ours[kind], plain[kind], strict=True):
            assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
            scale = max(theirs.double().abs().max().item(), floor)
            error = (mine.double() - theirs.double()).abs().max().item()
            assert error <= tolerance * scale, (kind, error, scale)
