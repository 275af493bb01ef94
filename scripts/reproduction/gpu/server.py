"""What holds the global weights of workers in one process, and the arrays of the methods' files."""
from __future__ import annotations

from typing import Any

import torch

from kvstore.messages.buckets import Bucket
from kvstore.messages.header import SYNC_MODULUS, Header
from kvstore.messages.seam import GlobalWeights, Pending


class Flat(torch.Tensor):
    """All weights of a model, with the calls that the methods' files make of arrays."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def copy(self) -> Flat:
        return self.clone().as_subclass(Flat)


class Server(GlobalWeights):
    """A server beside its workers. Its answers lie in two places in turn, and are there when all have pushed."""

    def __init__(self, rule: Any, w: Flat, grads: Any) -> None:
        self.rule, self.w, self.answers, self._grads, self._pushed = rule, w, [w.copy(), w.copy()], grads, 0
        self.turn = 0

    def exchange(self, bucket: Bucket, grad: Any, lr: Any) -> Pending:
        self._pushed += 1
        workers = len(self._grads)
        if self._pushed == workers:
            self._pushed = 0
            header = Header(workers * (self.rule.version % SYNC_MODULUS), lr, workers * (workers - 1) // 2)
            self.rule.receive(header, self._grads.sum(0), self.w)
            self.answers[self.turn].copy_(self.w)
        return Pending(self.answers[self.turn])
