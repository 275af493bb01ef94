"""The papers' algorithms in plain NumPy, written from the papers alone: whole jobs, no buckets, no engine, no MXNet.

Xu et al., "OD-SGD", arXiv:2005.06728, Algorithms 1 and 2, Eq. 4-6. Everything is in single precision, as on the wire.

`gradient(m, t, w)` is worker m's mean gradient at weights w in iteration t; a trajectory is `path[t][m]` = w_t^m, the
weights worker m computes on in iteration t, for t = 0 … T, beside `path_global[t]` = W_t.
"""
import copy
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Tuple

import numpy as np

F = np.float32
Gradient = Callable[[int, int, np.ndarray], np.ndarray]
Path = Tuple[List[List[np.ndarray]], List[np.ndarray]]


@dataclass
class Sgd:
    """w <- w + v,  v <- momentum v - lr (g + wd w): stochastic gradient descent as MXNet writes it."""

    lr: Any  # number, or function of the iteration
    momentum: float = 0.0
    wd: Any = 0.0
    v: Any = 0.0
    lr_mult: Any = 1.0

    def rate(self, t: int) -> Any:
        return np.asarray(F(self.lr(t) if callable(self.lr) else self.lr) * self.lr_mult, F)

    def __call__(self, w: np.ndarray, g: np.ndarray, t: int, w_read: np.ndarray) -> np.ndarray:
        self.v = F(self.momentum) * self.v - self.rate(t) * (g + np.asarray(self.wd, F) * w)
        return (w + self.v).astype(F)


@dataclass
class Adam:
    """Kingma and Ba, 2015, Algorithm 1, in the order of the last lines of its section 2, and with weight decay in g."""

    lr: float
    wd: Any = 0.0
    t: int = 0
    m: Any = 0.0
    v: Any = 0.0

    def __call__(self, w: np.ndarray, g: np.ndarray, t: int, w_read: np.ndarray) -> np.ndarray:
        g = g + np.asarray(self.wd, F) * w
        self.t += 1
        self.m = F(0.9) * self.m + F(1 - 0.9) * g
        self.v = F(0.999) * self.v + F(1 - 0.999) * g * g
        alpha = F(self.lr * np.sqrt(1 - 0.999 ** self.t) / (1 - 0.9 ** self.t))
        return (w - alpha * self.m / (np.sqrt(self.v) + F(1e-8))).astype(F)


class Replaced:
    """`changes`: number of an update -> the optimizer that does it and those after it, each with a state of its own."""

    def __init__(self, changes: Dict[int, Any]) -> None:
        self.changes, self.n = changes, 0
        self.now: Any = None

    def __call__(self, w: np.ndarray, g: np.ndarray, t: int, w_read: np.ndarray) -> np.ndarray:
        self.now = self.changes.get(self.n, self.now)
        self.n += 1
        return np.asarray(self.now(w, g, t, w_read))


class PutBack:
    """`update` whose state is kept before one update, by its number, and back before another."""

    def __init__(self, update: Any, kept: int, back: int) -> None:
        self.update, self.kept, self.back, self.n = update, kept, back, 0

    def __call__(self, w: np.ndarray, g: np.ndarray, t: int, w_read: np.ndarray) -> np.ndarray:
        if self.n == self.kept:
            self.state = copy.deepcopy(self.update)
        if self.n == self.back:
            self.update = self.state
        self.n += 1
        return np.asarray(self.update(w, g, t, w_read))


@dataclass
class DcAsgdC(Sgd):
    """Eq. 4."""

    lamda: float = 0.04

    def __call__(self, w: np.ndarray, g: np.ndarray, t: int, w_read: np.ndarray) -> np.ndarray:
        return super().__call__(w, g + F(self.lamda) * g * g * (w - w_read), t, w_read)


@dataclass
class DcAsgdA(Sgd):
    """Eq. 5 and 6."""

    lamda: float = 2.0
    m: float = 0.95
    epsilon: float = 1e-7
    mean_square: Any = 0.0

    def __call__(self, w: np.ndarray, g: np.ndarray, t: int, w_read: np.ndarray) -> np.ndarray:
        self.mean_square = F(self.m) * self.mean_square + F(1 - self.m) * g * g
        strength = F(self.lamda) / np.sqrt(self.mean_square + F(self.epsilon))
        return super().__call__(w, g + strength * g * g * (w - w_read), t, w_read)


@dataclass
class Server:
    """Algorithm 1."""

    w: np.ndarray
    update: Callable[..., np.ndarray]
    num_workers: int
    t: int = 0
    received: List[np.ndarray] = field(default_factory=list)
    push: Any = None
    """Worker m and its gradient -> what arrives of it, where messages have a codec."""
    answer: Any = None
    """W -> the weights as workers have them."""
    adds: bool = False
    """G_t is the sum, as MXNet's servers have it."""

    def receive_gradient(self, g: np.ndarray) -> None:
        if self.push:
            g = self.push(len(self.received), g)
        self.received.append(g)                                                     # l.3, 4
        if len(self.received) == self.num_workers:                                  # l.5
            total = self.received[0].copy()
            for one in self.received[1:]:
                total = total + one
            g = total if self.adds else (total / F(self.num_workers)).astype(F)
            self.w = self.update(self.w, g, self.t, self.w)                         # l.6
            self.sent = self.answer(self.w) if self.answer else self.w              # l.10
            self.t += 1                                                             # l.7
            self.received = []                                                      # l.8


def synchronous(gradient: Gradient, w_0: np.ndarray, num_workers: int, iterations: int, update: Any,
                **codes: Any) -> Path:
    """SSGD: Fig. 7."""
    server = Server(w_0, update, num_workers, **codes)
    path, path_global = [[w_0] * num_workers], [w_0]
    for t in range(iterations):
        for m in range(num_workers):
            server.receive_gradient(gradient(m, t, path[t][m]))
        path.append([server.sent] * num_workers)
        path_global.append(server.sent)
    return path, path_global


def one_step_delay(gradient: Gradient, w_0: np.ndarray, num_workers: int, iterations: int, update: Any, warmup: int,
                   local_updates: List[Any], **codes: Any) -> Path:
    """OD-SGD: Algorithm 2. `local_updates[m]` is worker m's L, or None for L = W_t."""
    server = Server(w_0, update, num_workers, **codes)
    w_device = [w_0] * num_workers           # what is broadcast to worker m's devices
    pulled = [w_0] * num_workers             # comm_buf_: what the previous iteration pulled
    path, path_global = [list(w_device)], [w_0]
    for t in range(iterations):
        g = [gradient(m, t, w_device[m]) for m in range(num_workers)]               # l.19
        for m in range(num_workers):
            server.receive_gradient(g[m])                                           # l.20
        for m in range(num_workers):
            if t < warmup:                                                          # l.3-16
                w_device[m] = server.sent
            elif local_updates[m] is None:
                w_device[m] = pulled[m]
            else:
                w_bak = pulled[m]                                                   # CopyFromTo, Fig. 8
                w_device[m] = local_updates[m](w_bak, g[m], t, w_device[m])         # l.22
            pulled[m] = server.sent                                                 # l.24
        path.append(list(w_device))
        path_global.append(server.sent)
    return path, path_global


# -- codecs ------------------------------------------------------------------------------------------------------
#
# What is left of floats that travel in fewer bits: Li et al. 2018, section 3.2, and MXNet's gradient compression.

def truncated(x: np.ndarray) -> np.ndarray:
    return (x.view(np.uint32) & 0xffff0000).astype(np.uint32).view(F)


def quantized(x: np.ndarray) -> np.ndarray:
    largest = np.abs(x).max()
    return (np.round(x * F(F(127) / largest)) * F(largest / F(127))).astype(F)


def in_two_bits(x: np.ndarray, threshold: float) -> np.ndarray:
    return np.array([threshold if one >= threshold else -threshold if one <= -threshold else 0 for one in x], F)


def in_one_bit(x: np.ndarray, threshold: float) -> np.ndarray:
    return np.array([1 if one > threshold else -1 for one in x], F)


def largest(x: np.ndarray, k: int, few: bool, chunk: int = 4096) -> np.ndarray:
    """SparseLoCo's TopK of each chunk; `few`: and Q, four values for those."""
    sent = np.zeros_like(x)
    for start in range(0, x.size, chunk):
        at = start + np.argsort(-np.abs(x[start:start + chunk]))[:k]
        at = at[x[at] != 0]
        size = np.abs(x[at])
        above = size > size.sum() / max(1, size.size)
        for which in (above, ~above):
            if which.any():
                sent[at[which]] = np.sign(x[at[which]]) * (size[which].mean() if few else size[which])
    return sent


LEFT: Dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "none": lambda x: x, "float16": lambda x: x.astype(np.float16).astype(F), "truncate": truncated,
    "quantize": quantized}


class Residuals:
    """Each worker's: what was left out of its gradients is part of the next one."""

    def __init__(self, left: Callable[[np.ndarray], np.ndarray], beta: float = 1.0) -> None:
        self.left, self.beta, self.r = left, beta, {}  # type: ignore[var-annotated]

    def __call__(self, m: int, g: np.ndarray) -> np.ndarray:
        whole = (F(self.beta) * self.r.get(m, 0) + g).astype(F)
        sent = self.left(whole)
        self.r[m] = whole - sent
        return sent


class Changes:
    """s <- s + what is left of W - s: weights as their readers have them."""

    def __init__(self, left: Callable[[np.ndarray], np.ndarray], s: np.ndarray) -> None:
        self.left, self.s = left, s

    def __call__(self, w: np.ndarray) -> np.ndarray:
        self.s = self.s + self.left(w - self.s)
        return self.s


@dataclass
class CodedTurns:
    """An asynchronous method whose messages have codecs."""

    method: Any
    push: Any
    answers: List[Any]

    @property
    def W(self) -> np.ndarray:
        return np.asarray(self.method.W)

    def turn(self, m: int, t: int, w: np.ndarray, g: np.ndarray) -> np.ndarray:
        return np.asarray(self.answers[m](self.method.turn(m, t, w, self.push(m, g))))


# -- collective ----------------------------------------------------------------------------------------------------

def acco(gradient: Gradient, w_0: np.ndarray, num_workers: int, iterations: int, update: Any) -> Path:
    """Nabli et al. 2024, with equal batches: `path[t]` is theta~ where t is even, and theta where it is odd."""
    theta, path, path_global = w_0, [w_0], [w_0]
    g: List[np.ndarray] = []
    for t in range(iterations):
        g.append(mean([gradient(m, t, path[t]) for m in range(num_workers)]))
        if t % 2:
            path.append(copy.deepcopy(update)(theta, g[t - 1], t, theta))
        else:
            theta = update(theta, mean(g[t - 2:t]), t, theta) if t else theta
            path.append(theta)
        path_global.append(theta)
    return [[one] * num_workers for one in path], path_global


def sasgd(gradient: Gradient, w_0: np.ndarray, num_workers: int, iterations: int, T: int, gamma: Any, gamma_p: Any,
          wd: Any = 0.0) -> Path:
    """Cong et al. 2017, Algorithm 1. Rates are functions of the iteration and may be arrays.

    `path_global[t]` is what a run ends with that ends after t iterations, within an interval or not.
    """
    p = num_workers
    x, x_prime, g_s = [w_0] * p, w_0, [np.zeros_like(w_0)] * p
    path, path_global = [list(x)], [w_0]
    for t in range(iterations):
        g = [gradient(m, t, x[m]) + np.asarray(wd, F) * x[m] for m in range(p)]
        for m in range(p):
            x[m], g_s[m] = (x[m] - gamma(t) * g[m]).astype(F), (g_s[m] + g[m]).astype(F)
        end = (x_prime - gamma_p(t) * sum(g_s[1:], g_s[0])).astype(F)    # x' - gamma_p allreduce(g_s)
        if (t + 1) % T == 0:
            x_prime, x, g_s = end, [end] * p, [np.zeros_like(w_0)] * p
        path.append(list(x))
        path_global.append(end)
    return path, path_global


def pipe_sgd(gradient: Gradient, w_0: np.ndarray, num_workers: int, iterations: int, update: Any, K: int,
             warmup: int = 0) -> Path:
    """Li et al. 2018, Algorithm 1, in its own counting: w[t] is computed before the gradient of iteration t = 1, 2 …

    For the first `warmup` iterations K is 1; a sum is applied once. w_0 is w[0], and, no sum being there, w[1].
    """
    w, applied = {0: w_0}, 0
    g_sum: Dict[int, np.ndarray] = {}
    for t in range(1, iterations + 2):
        due = t - (1 if t - 1 <= warmup else K)
        w[t] = w[t - 1]
        if due > applied:                                                    # l.3, 5
            mean = (g_sum[due] / F(num_workers)).astype(F)
            w[t] = update(w[t - 1], mean, due - 1, w[t - 1])
            applied = due
        parts = [gradient(m, t - 1, w[t]) for m in range(num_workers)]       # l.8
        g_sum[t] = sum(parts[1:], parts[0])
    ws = [w[t] for t in range(1, iterations + 2)]
    return [[one] * num_workers for one in ws], ws


# -- weights that travel ---------------------------------------------------------------------------------------------

@dataclass
class Nesterov:
    """OuterOpt: torch.optim.SGD(nesterov=True)."""

    eta: float
    mu: float
    v: Any = 0.0

    def __call__(self, theta: np.ndarray, delta: np.ndarray) -> np.ndarray:
        self.v = F(self.mu) * self.v + delta
        return (theta - F(self.eta) * (delta + F(self.mu) * self.v)).astype(F)


def mean(parts: List[np.ndarray]) -> np.ndarray:
    return (sum(parts[1:], parts[0]) / F(len(parts))).astype(F)


def diloco(gradient: Gradient, w_0: np.ndarray, num_workers: int, iterations: int, inner: List[Any], H: int,
           eta: float, mu: float, push: Any = lambda m, delta: delta) -> Path:
    """Douillard et al. 2023, Algorithm 1. `inner[m]` is worker m's InnerOpt; `path_global`: theta after t steps.
    `push`: what becomes of what worker m sends.
    """
    outer, theta, x = Nesterov(eta, mu), w_0, [w_0] * num_workers
    path, path_global = [list(x)], [w_0]
    for t in range(iterations):
        x = [inner[m](x[m], gradient(m, t, x[m]), t, x[m]) for m in range(num_workers)]         # l.4-8
        if (t + 1) % H == 0:
            theta = outer(theta, mean([push(m, theta - x[m]) for m in range(num_workers)]))    # l.10, 12
            x = [theta] * num_workers                                                             # l.3
        path.append(list(x))
        path_global.append(theta)
    return path, path_global


def streaming(gradient: Gradient, w_0: np.ndarray, num_workers: int, iterations: int, inner: List[Any], H: int,
              eta: float, mu: float, fragments: List[slice], tau: int, alpha: float) -> Path:
    """Douillard et al. 2025, Algorithm 2: fragment p is sent at steps t with (t + floor(p H / P)) mod H = 0;
    tau steps later what came of it is merged. `path_global`: Theta with all that was sent.
    """
    P, M = len(fragments), num_workers
    outers, Theta, x = [Nesterov(eta, mu) for _ in fragments], w_0.copy(), [w_0.copy() for _ in range(M)]
    path, path_global, sent = [[one.copy() for one in x]], [w_0], set()
    for t in range(1, iterations + 1):
        x = [inner[m](x[m], gradient(m, t - 1, x[m]), t - 1, x[m]).copy() for m in range(M)]
        for p, part in enumerate(fragments):
            if (t + p * H // P) % H == 0:
                Theta = Theta.copy()
                Theta[part] = outers[p](Theta[part], mean([Theta[part] - one[part] for one in x]))
                sent.add(p)
            if (t - tau + p * H // P) % H == 0 and p in sent:
                for one in x:
                    one[part] = F(alpha) * one[part] + F(1 - alpha) * Theta[part]
        path.append([one.copy() for one in x])
        path_global.append(Theta)
    return path, path_global


def eager(gradient: Gradient, w_0: np.ndarray, num_workers: int, iterations: int, inner: List[Any], H: int,
          eta: float, mu: float, local_scale: Any = None) -> Path:
    """Kale et al. 2025, as the paper has it: every worker has weights and an OuterOpt of its own.

        Delta~_m(t) = Delta(t - H) + local_scale (Delta_m(t) - Delta_m(t - H))

    `path_global[t]` is no part of the paper: OuterOpt of the means of all that has been sent.
    """
    M = num_workers
    scale = F(1 / M if local_scale is None else local_scale)
    outers, apart = [Nesterov(eta, mu) for _ in range(M)], Nesterov(eta, mu)
    theta, x, W = [w_0] * M, [w_0] * M, w_0
    late = [np.zeros_like(w_0)] * M
    path, path_global = [list(x)], [w_0]
    for t in range(iterations):
        x = [inner[m](x[m], gradient(m, t, x[m]), t, x[m]) for m in range(M)]
        if (t + 1) % H == 0:
            own = [theta[m] - x[m] for m in range(M)]
            theta = [outers[m](theta[m], (mean(late) + scale * (own[m] - late[m])).astype(F)) for m in range(M)]
            W, late, x = apart(W, mean(own)), own, list(theta)
        path.append(list(x))
        path_global.append(W)
    return path, path_global


OPTIMIZERS: Dict[str, Any] = {"sgd": Sgd, "dcasgd_c": DcAsgdC, "dcasgd_a": DcAsgdA}


# -- asynchronous ------------------------------------------------------------------------------------------------
#
# `order` says whose turn it is; worker m's turn is one iteration of its own. A rule's `turn(m, t, w, g)` returns what
# worker m computes on next.


def in_order(gradient: Gradient, w_0: np.ndarray, num_workers: int, order: List[int], method: Any) -> Path:
    """Per worker the weights after each of its turns; and the global weights after all."""
    w, t = [w_0] * num_workers, [0] * num_workers
    path = [[w_0] for _ in range(num_workers)]
    for m in order:
        w[m] = method.turn(m, t[m], w[m], gradient(m, t[m], w[m]))
        t[m] += 1
        path[m].append(w[m])
    return path, [method.W]


@dataclass
class Asgd:
    """W <- U(W, g^m); the worker goes on with W."""

    W: np.ndarray
    update: Any

    def turn(self, m: int, t: int, w: np.ndarray, g: np.ndarray) -> np.ndarray:
        self.W = self.update(self.W, g, t, self.W)
        return self.W


@dataclass
class DcAsgd(Asgd):
    """W <- W - lr (g + lambda(·) g⊙g⊙(W - bak_m)), bak_m <- W: Eq. 4, or 5 and 6 with `adaptive` = (m, epsilon)."""

    num_workers: int = 1
    lamda: float = 0.04
    adaptive: Any = None

    def __post_init__(self) -> None:
        self.bak = [self.W] * self.num_workers
        self.mean_square = np.zeros_like(self.W)

    def turn(self, m: int, t: int, w: np.ndarray, g: np.ndarray) -> np.ndarray:
        strength = F(self.lamda)
        if self.adaptive:
            decay, epsilon = self.adaptive
            self.mean_square = F(decay) * self.mean_square + F(1 - decay) * g * g
            strength = F(self.lamda) / np.sqrt(self.mean_square + F(epsilon))
        self.W = self.update(self.W, (g + strength * g * g * (self.W - self.bak[m])).astype(F), t, self.W)
        self.bak[m] = self.W
        return self.W


@dataclass
class AsyncDiloco(Asgd):
    """Liu et al. 2024, Algorithm 3. `update` is not used; `inner[m]` is worker m's InnerOpt, `N` and `c` as there, `v`
    the workers' speeds."""

    inner: List[Any]
    H: int
    epsilon: float
    beta: float
    N: int
    c: float = 0.0
    v: Any = (1.0, 1.0, 1.0)

    def __post_init__(self) -> None:
        self.began = [self.W] * len(self.inner)
        self.Delta, self.m, self.t = np.zeros_like(self.W), np.zeros_like(self.W), 0

    def turn(self, m: int, t: int, w: np.ndarray, g: np.ndarray) -> np.ndarray:
        x = self.inner[m](w, g, t, w)
        if (t + 1) % np.floor(self.v[m] / np.max(self.v) * self.H):
            return np.asarray(x)
        self.receive((self.began[m] - x).astype(F))
        self.began[m] = self.W
        return self.W

    def receive(self, g: np.ndarray) -> None:
        epsilon, beta, N, c = F(self.epsilon), F(self.beta), F(self.N), F(self.c)
        self.Delta = self.Delta + g
        if (self.t + 1) % self.N == 0:
            self.m, self.Delta = beta * self.m + self.Delta / N, np.zeros_like(self.Delta)
            step = (1 - c * N + c) * beta * self.m + g / N
        else:
            step = c * beta * self.m + g / N
        self.W = (self.W - epsilon * step).astype(F)
        self.t += 1


def rda(weights: np.ndarray, deltas: List[np.ndarray]) -> np.ndarray:
    """The mean of the lengths in the mean direction."""
    length = sum(weights * [np.linalg.norm(delta) for delta in deltas]) / sum(weights)
    direction = sum(weight * delta / np.linalg.norm(delta) for weight, delta in zip(weights, deltas)) / sum(weights)
    return np.asarray(length * direction / np.linalg.norm(direction))


@dataclass
class DecoupledDiloco(Asgd):
    """Douillard et al. 2026, with a quorum of 1. Worker m sends fragment p where (t + floor(p H / P)) mod H = 0; the
    first of a round that has taken `grace` more steps closes it, or the last of all that can be in it.
    `tensors`: for RDA; None: the weighted mean. `examples(m, t)`: of worker m's batch in iteration t.
    """

    inner: List[Any]
    H: int
    eta: float
    mu: float
    fragments: List[slice]
    tau: int
    alpha: float
    grace: int
    tensors: Any = None
    examples: Callable[[int, int], float] = lambda m, t: 1.0

    def __post_init__(self) -> None:
        M = len(self.inner)
        self.outer = [Nesterov(self.eta, self.mu) for _ in self.fragments]
        self.had = [self.W.copy() for _ in range(M)]          # Theta as worker m got it last
        self.brought = [self.W.copy() for _ in range(M)]      # and what is on its way
        self.sent = [[0] * len(self.fragments) for _ in range(M)]
        self.seen = [[0.0] * len(self.fragments) for _ in range(M)]  # examples since then
        self.open: List[Dict[int, Any]] = [{} for _ in self.fragments]

    def turn(self, m: int, t: int, w: np.ndarray, g: np.ndarray) -> np.ndarray:
        x, now, P = self.inner[m](w, g, t, w).copy(), t + 1, len(self.fragments)
        for p, part in enumerate(self.fragments):
            since = (now + p * self.H // P) % self.H
            self.seen[m][p] += self.examples(m, t)
            if since == 0:
                c_step, self.sent[m][p] = now - self.sent[m][p], now
                c_tok, self.seen[m][p] = self.seen[m][p], 0.0
                self.open[p][m] = c_tok * (c_tok / c_step), (self.had[m] - x)[part]
                if len(self.open[p]) == len(self.inner):
                    self.close(p, part)
            if not self.sent[m][p]:
                continue
            if since == self.grace:
                if m in self.open[p]:
                    self.close(p, part)
                self.brought[m][part] = self.W[part]
            if since == self.tau:
                self.had[m][part] = self.brought[m][part]
                x[part] = F(self.alpha) * x[part] + F(1 - self.alpha) * self.had[m][part]
        return x

    def close(self, p: int, part: slice) -> None:
        members, self.open[p] = sorted(self.open[p].items()), {}
        weights = np.array([weight for _, (weight, _) in members])
        deltas = [delta for _, (_, delta) in members]
        Delta = sum(weight * delta for weight, delta in zip(weights, deltas)) / sum(weights)
        for one in [tensor for tensor in self.tensors or () if part.start <= tensor.start < part.stop]:
            one = slice(one.start - part.start, one.stop - part.start)
            Delta[one] = rda(weights, [delta[one] for delta in deltas])
        self.W = self.W.copy()
        self.W[part] = self.outer[p](self.W[part], Delta.astype(F))


@dataclass
class NSoftsync(Asgd):
    """After c = floor(lambda / n) gradients:

        W <- U(W, 1/c sum (alpha_l / alpha_0) g_l),    alpha_l = alpha_0 / tau_l
    """

    num_workers: int = 1
    n: int = 1
    modulate: bool = True

    def __post_init__(self) -> None:
        self.timestamp, self.read = 0, [0] * self.num_workers
        self.collected: List[np.ndarray] = []

    def turn(self, m: int, t: int, w: np.ndarray, g: np.ndarray) -> np.ndarray:
        tau = self.timestamp - self.read[m]
        self.collected.append(g / F(tau) if self.modulate and tau > 0 else g)
        if len(self.collected) == self.num_workers // self.n:
            mean = (sum(self.collected) / F(len(self.collected))).astype(F)
            self.W = self.update(self.W, mean, t, self.W)
            self.timestamp += 1
            self.collected = []
        self.read[m] = self.timestamp
        return self.W


@dataclass
class DownpourSgd(Asgd):
    """Local steps and accrued gradients; Dean et al. 2012, Algorithm 7.1.

    A gradient is that of the loss with its penalty, g + wd w; neither update adds any.
    """

    num_workers: int = 1
    n_push: int = 1
    n_fetch: int = 1
    step: Any = None
    """Worker's local step, an `Sgd` without momentum."""
    wd: Any = 0.0

    def __post_init__(self) -> None:
        self.accrued = [np.zeros_like(self.W)] * self.num_workers

    def turn(self, m: int, t: int, w: np.ndarray, g: np.ndarray) -> np.ndarray:
        g = g + np.asarray(self.wd, F) * w
        self.accrued[m] = self.accrued[m] + g
        w = self.step(w, g, t, w)
        if (t + 1) % self.n_push == 0:
            self.W = self.update(self.W, self.accrued[m], t, self.W)
            self.accrued[m] = np.zeros_like(self.W)
        return self.W if (t + 1) % self.n_fetch == 0 else w


@dataclass
class ElasticAveraging:
    """EASGD and EAMSGD, asynchronous; Zhang et al. 2015, Algorithms 1 and 2: worker i repeats

        x <- x^i
        if tau divides t^i:  x^i <- x^i - alpha (x - X),  X <- X + alpha (x - X)
        x^i <- x^i - eta g(x)               EAMSGD: v^i <- delta v^i - eta g(x + delta v^i),  x^i <- x^i + v^i
        t^i <- t^i + 1

    A turn is one pass from behind the gradient to the next gradient: every worker is there once before its first turn.
    """

    W: np.ndarray
    num_workers: int
    tau: int
    alpha: float
    step: Sgd
    """Learning rate, weight decay and their multipliers."""
    delta: float = 0.0

    def __post_init__(self) -> None:
        self.x_i = [self.W] * self.num_workers
        self.v_i = [np.zeros_like(self.W)] * self.num_workers
        for i in range(self.num_workers):
            self.up_to_the_gradient(i, 0)

    def turn(self, i: int, t: int, w: np.ndarray, g: np.ndarray) -> np.ndarray:
        g = g + np.asarray(self.step.wd, F) * w
        self.v_i[i] = (F(self.delta) * self.v_i[i] - self.step.rate(t) * g).astype(F)
        self.x_i[i] = self.x_i[i] + self.v_i[i]
        return self.up_to_the_gradient(i, t + 1)

    def up_to_the_gradient(self, i: int, t: int) -> np.ndarray:
        """Where it is taken."""
        x = self.x_i[i]
        if t % self.tau == 0:
            force = (F(self.alpha) * (x - self.W)).astype(F)
            self.x_i[i] = x - force
            self.W = self.W + force
        return x + F(self.delta) * self.v_i[i]
