"""As `worker_jax.py`, with PyTorch's DistributedDataParallel: the same models."""

# pyright: reportMissingImports=false
# PyTorch is no dependency of this project: it is only compared with.
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WIDTH, LENGTH, WORDS, HEADS, LAYERS = 128, 128, 256, 4, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.parts = nn.ModuleDict(
            {name: nn.Linear(WIDTH, WIDTH) for name in ("q", "k", "v", "o")}
        )
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norms[0](x)
        q, k, v = (
            self.parts[name](y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for name in ("q", "k", "v")
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.parts["o"](mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens):
        return self.out(self.norm(self.blocks(self.embed(tokens) + self.place)))


def classifier(widths, activation):
    layers = []
    for n, m in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(n, m), activation()]
    return nn.Sequential(*layers[:-1])


def training(model):
    """The model, and its rows: inputs and labels."""
    if model == "lm":
        tokens = torch.randint(0, WORDS, (16, LENGTH))
        return Transformer(), tokens, tokens
    widths = {"mlp": [784, 512, 512, 10], "deep": [784, *[16] * 100, 10]}[model]
    activation = nn.ReLU if model == "mlp" else nn.Tanh
    x, y = torch.randn(256, 784), torch.randint(0, 10, (256,))
    return classifier(widths, activation), x, y


def loss_of(net, x, y):
    logits = net(x)
    if logits.ndim == 3:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), y[:, 1:].flatten())
    return F.cross_entropy(logits, y)


def main(model, address, processes, number):
    processes, number = int(processes), int(number)
    torch.set_num_threads(1 if processes > 1 else 2)
    net, x, y = training(model)
    if processes > 1:
        address = f"tcp://{address}"
        dist.init_process_group("gloo", address, world_size=processes, rank=number)
        net = nn.parallel.DistributedDataParallel(net)
    x, y = x[number::processes], y[number::processes]
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=1e-4)
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            optimizer.zero_grad()
            loss_of(net, x, y).backward()
            optimizer.step()
        print("ms", 1e3 * (time.perf_counter() - start) / int(line), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
