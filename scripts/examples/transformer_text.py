"""A small transformer that learns to continue sums, with PyTorch: AdamW, a warm-up, clipped gradients, bfloat16.

    odsgd launch -n 2 -s 1 scripts/examples/transformer_text.py
    odsgd launch -n 2 -s 1 scripts/examples/transformer_text.py --store odsgd --lr-local 0.05

The text is made on the spot, by each worker its own: lines like `37+45=82`. What is counted is how many results are
right, digit by digit.
"""
import argparse
import contextlib
import math
import time

import torch
from torch import nn
from torch.nn import functional

import odsgd.torch as od

ALPHABET = "0123456789+=\n"
LENGTH = 10  # of a line: 12+34=046 and its end


class Transformer(nn.Module):
    """Blocks of attention to what was before, and of a perceptron, on the sum of token and place."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(len(ALPHABET), width), nn.Embedding(LENGTH, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True,
                                           norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, len(ALPHABET))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.out(self.norm(self.blocks(x, mask=mask, is_causal=True)))


def lines(number: int, random: torch.Generator) -> torch.Tensor:
    """So many sums of two numbers below 100, as tokens."""
    pairs = torch.randint(100, (number, 2), generator=random).tolist()
    return torch.tensor([[ALPHABET.index(sign) for sign in f"{a:02d}+{b:02d}={a + b:03d}\n"] for a, b in pairs])


def loss_of(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    """Of the results alone: what stands before them cannot be known."""
    return functional.cross_entropy(model(text[:, :-1])[:, 5:].flatten(0, 1), text[:, 6:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="ssgd", help="the method (default: ssgd)")
    parser.add_argument("--lr-local", type=float, help="of the local steps of odsgd, which are SGD's")
    parser.add_argument("--iterations", type=int, default=2500)
    parser.add_argument("--batch-size", type=int, default=128, help="of all workers together")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--clip", type=float, default=0.0, help="largest norm of the mean gradient; 0: any")
    flags = parser.parse_args()

    store = od.create(flags.store, **({} if flags.lr_local is None else {"lr_local": flags.lr_local}))
    model = Transformer(flags.width, flags.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    optimizer = od.Optimizer(optimizer, model, store)
    warmup = 50
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(
        (t + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * min(1.0, t / flags.iterations))))

    random = torch.Generator().manual_seed(store.rank)
    began = time.perf_counter()
    for t in range(1, flags.iterations + 1):
        text = lines(flags.batch_size // store.num_workers, random)
        optimizer.zero_grad()
        with optimizer.no_sync() if flags.clip else contextlib.nullcontext():
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, text)
            loss.backward()
        if flags.clip:
            optimizer.synchronize_grads()
            nn.utils.clip_grad_norm_(model.parameters(), flags.clip)
        optimizer.step()
        scheduler.step()
        if store.leads and (t % 100 == 0 or t == flags.iterations):
            print(f"iteration {t}: loss {loss.item():.4f}, {1000 * (time.perf_counter() - began) / t:.1f} ms each",
                  flush=True)

    with store.global_weights(), torch.inference_mode():
        model.eval()
        text = lines(1000, torch.Generator().manual_seed(10 ** 6))
        right = (model(text[:, :-1])[:, 5:].argmax(-1) == text[:, 6:]).float().mean()
    if store.leads:
        print(f"{right:.1%} of the digits of unseen sums are right", flush=True)


if __name__ == "__main__":
    main()
