"""The papers' models of how long an iteration takes, one function per equation, in the papers' symbols.

Times are in seconds, sizes in bytes. The models know a computing time and a communication time and nothing of how a
network is made: docs/results/timing-models.md confronts them with the virtual cluster, measured jobs and the
papers' own numbers. `odsgd.virtual.times.simulate` has no such limits.

    Eq. 1 to 3, Fig. 6, Eq. 7   Xu et al., "OD-SGD", arXiv:2005.06728
    Eq. 1                       Youkawa et al., "Delayed weight update for faster convergence in data-parallel deep
                                learning"
    Eq. 2 to 7                  Li et al., "Pipe-SGD: a decentralized pipelined SGD framework", NeurIPS 2018

What the papers leave out stands in the end: a limit for every schedule, and closed forms for methods that exchange
every T iterations and for asynchronous ones.
"""
from typing import NamedTuple, Sequence

# --- OD-SGD ---------------------------------------------------------------------------------------------------------


def IMP_Rate(T_org: float, T_new: float) -> float:
    """OD-SGD Eq. 1: the part of SSGD's iteration `T_org` that OD-SGD's `T_new` saves.

    >>> IMP_Rate(T_org=10.0, T_new=8.0)
    0.2
    """
    return (T_org - T_new) / T_org


def T_org(T_cop: float, T_com_ssgd: float) -> float:
    """OD-SGD Eq. 2, left: an iteration of SSGD. `T_com_ssgd`: its communication time, T'_com in the paper.

    >>> T_org(T_cop=2.0, T_com_ssgd=3.0)
    5.0
    """
    return T_cop + T_com_ssgd


def T_new(T_cop: float, T_com: float) -> float:
    """OD-SGD Eq. 2, right: an iteration of OD-SGD; where communication is the longer one, the mean of two iterations.

    That mean is the solution of c_{t+1} = max(c_t, c_{t-1} + T_com) + T_cop: gradient t is there at c_t, and its
    exchange begins at once, whether the one before is over or not. So it is the time of a network that only delays.
    Where exchanges follow one another, on a link that they fill or because each reads the version that the one before
    brought, an iteration takes `limit(T_cop, T_com)`.

    >>> T_new(T_cop=2.0, T_com=1.0), T_new(T_cop=2.0, T_com=4.0)
    (2.0, 3.0)
    """
    return T_cop if T_com <= T_cop else (T_com + T_cop) / 2


def IMP_Rate_of_times(T_cop: float, T_com: float, T_com_ssgd: float) -> float:
    """OD-SGD Eq. 3: Eq. 1 with the times of Eq. 2. (T'_cop in its second line is read as T_cop.)

    >>> IMP_Rate_of_times(T_cop=2.0, T_com=1.0, T_com_ssgd=3.0), IMP_Rate_of_times(T_cop=2.0, T_com=4.0, T_com_ssgd=4.0)
    (0.6, 0.5)
    """
    if T_com <= T_cop:
        return 1 - T_cop / (T_cop + T_com_ssgd)
    return 1 - (T_com + T_cop) / (2 * (T_cop + T_com_ssgd))


def case(T_cop: float, T_com: float) -> str:
    """OD-SGD Fig. 6: its three cases, by what the time of an iteration is made of.

    >>> case(2.0, 1.0), case(2.0, 2.0), case(2.0, 3.0)
    ('computation', 'both', 'communication')
    """
    return "both" if T_com == T_cop else "computation" if T_com < T_cop else "communication"


def GR_Rate(Speed: float, Speed_ssgd: float) -> float:
    """OD-SGD Eq. 7: how much faster than SSGD, in per cent, by samples per second.

    >>> round(GR_Rate(149.517, 95.785), 1)
    56.1
    """
    return (Speed - Speed_ssgd) / Speed_ssgd * 100


# --- delayed update -------------------------------------------------------------------------------------------------


def R_WS(T_W: float, T_S: float) -> float:
    """Delayed update Eq. 1: how many times faster than the conventional method. `T_W`: a worker's gradient; `T_S`: the
    server's update and the way there and back.

    >>> R_WS(T_W=3.0, T_S=1.0), R_WS(T_W=2.0, T_S=2.0)
    (1.3333333333333333, 2.0)
    """
    return (T_W + T_S) / max(T_W, T_S)


# --- Pipe-SGD -------------------------------------------------------------------------------------------------------


def l_total_sync(T: int, l_up: float, l_comp: float, l_comm: float) -> float:
    """Pipe-SGD Eq. 2: `T` iterations of synchronous SGD: update, computing, communication.

    >>> l_total_sync(T=10, l_up=1.0, l_comp=4.0, l_comm=5.0)
    100.0
    """
    return T * (l_up + l_comp + l_comm)


def l_total_pipe_unlimited(T: int, K: int, l_up: float, l_comp: float, l_comm: float) -> float:
    """Pipe-SGD Eq. 3: `T` iterations with unlimited resources, an update by the gradient of `K` iterations ago.

    >>> l_total_pipe_unlimited(T=10, K=2, l_up=1.0, l_comp=4.0, l_comm=5.0)
    50.0
    """
    return T / K * (l_up + l_comp + l_comm)


def l_total_pipe(T: int, l_up: float, l_comp: float, l_comm: float) -> float:
    """Pipe-SGD Eq. 4: the same with one computing device and one link, for any K of at least 2.

    >>> l_total_pipe(T=10, l_up=1.0, l_comp=4.0, l_comm=6.0)
    60.0
    """
    return T * max(l_up + l_comp, l_comm)


def l_ring(p: int, alpha: float, n: float, beta: float, gamma: float, S: float, L: int = 1) -> float:
    """The communication in Pipe-SGD Eq. 5 and 6: a ring allreduce among `p` workers, in `L` segments.

    alpha : latency; n : bytes of the model; beta, gamma : seconds to send, to add a byte; S : of a synchronisation

    >>> l_ring(p=4, alpha=0.5, n=8.0, beta=0.25, gamma=0.125, S=1.0)
    7.75
    """
    part = (p - 1) / p
    return 2 * (p - 1) * L * alpha + 2 * part * n * beta + part * n * gamma + L * S


def l_total_pipe_s(T: int, l_up: float, l_for: float, l_back: float, p: int, alpha: float, n: float, beta: float,
                   gamma: float, S: float) -> float:
    """Pipe-SGD Eq. 5: `T` iterations, gradients sent when the backward pass is over. Symbols: `l_ring`.

    >>> l_total_pipe_s(T=2, l_up=1.0, l_for=2.0, l_back=4.0, p=4, alpha=0.5, n=8.0, beta=0.25, gamma=0.125, S=1.0)
    15.5
    """
    return T * max(l_up + l_for + l_back, l_ring(p, alpha, n, beta, gamma, S))


def l_total_pipe_p(T: int, l_up: float, l_for: float, l_b: float, p: int, alpha: float, n: float, beta: float,
                   gamma: float, S: float, L: int) -> float:
    """Pipe-SGD Eq. 6: the same with `L` segments, each sent when it is computed; `l_b`: the first one's backward pass.

    As printed, the computing device counts with one segment's backward pass alone, although it computes all of them.

    >>> l_total_pipe_p(T=2, l_up=1.0, l_for=2.0, l_b=1.0, p=4, alpha=0.5, n=8.0, beta=0.25, gamma=0.125, S=1.0, L=4)
    39.5
    """
    return T * max(l_up + l_for + l_b, l_ring(p, alpha, n, beta, gamma, S, L))


def SE(l_up: float, l_comp: float, l_comm: float) -> float:
    """Pipe-SGD Eq. 7: the scaling efficiency, actual over ideal speed-up.

    >>> SE(l_up=1.0, l_comp=4.0, l_comm=10.0), SE(l_up=1.0, l_comp=4.0, l_comm=3.0)
    (0.5, 1.0)
    """
    return (l_up + l_comp) / max(l_up + l_comp, l_comm)


# --- what the papers leave out --------------------------------------------------------------------------------------


def limit(T_cop: float, T_wire: float) -> float:
    """max(T_cop, T_wire): no schedule is faster that computes, and fills its busiest link for `T_wire`, per iteration.

    >>> limit(T_cop=2.0, T_wire=3.0)
    3.0
    """
    return max(T_cop, T_wire)


def T_interval(T: int, T_cop: float, T_com: float) -> float:
    """Workers that exchange every `T` iterations and wait for it (SASGD): an iteration on average.

    >>> T_interval(T=4, T_cop=2.0, T_com=3.0)
    2.75
    """
    return T_cop + T_com / T


def T_async(M: int, T_cop: float, T_com: float, T_busy: float) -> float:
    """`M` workers that wait for their own exchange alone (ASGD): an iteration of each. `T_com`: an exchange that meets
    nobody; `T_busy`: how long it keeps the busiest thing that all share, a server's link or thread.

    >>> T_async(M=2, T_cop=2.0, T_com=3.0, T_busy=1.0), T_async(M=8, T_cop=2.0, T_com=3.0, T_busy=1.0)
    (5.0, 8.0)
    """
    return max(T_cop + T_com, M * T_busy)


def T_elastic(M: int, T: int, T_cop: float, T_com: float, T_busy: float) -> float:
    """The same where an exchange every `T` iterations runs beside the next one's gradient (EASGD).

    >>> T_elastic(M=2, T=4, T_cop=2.0, T_com=6.0, T_busy=1.0), T_elastic(M=20, T=4, T_cop=2.0, T_com=6.0, T_busy=1.0)
    (3.0, 5.0)
    """
    return max((T - 1) * T_cop + max(T_cop, T_com), M * T_busy) / T


# --- the smallest model of Table 5 ----------------------------------------------------------------------------------


class Split(NamedTuple):
    """An iteration of SSGD, cut in two: what the network takes, and the rest: passes and processors, one after the
    other."""

    T_net: float
    T_rest: float


def two_networks(T_org: Sequence[float], rho: float) -> Sequence[Split]:
    """Cut the iterations of SSGD on a slow and on a fast network, all else being the same.

    T_org[i] = T_net[i] + T_rest with T_net[1] = rho T_net[0]. So the two iterations and rho give all three.

    >>> two_networks([10.0, 4.0], rho=0.25)
    [Split(T_net=8.0, T_rest=2.0), Split(T_net=2.0, T_rest=2.0)]
    """
    slow, fast = T_org
    T_net = (slow - fast) / (1 - rho)
    return [Split(share * T_net, slow - T_net) for share in (1.0, rho)]


def rho_of(T_org: Sequence[float], T_new_fast: float) -> float:
    """`rho` from one more number: OD-SGD's iteration on the fast network, where it takes T_rest.

    >>> rho_of([10.0, 4.0], T_new_fast=2.0)
    0.25
    """
    slow, fast = T_org
    return (fast - T_new_fast) / (slow - T_new_fast)


def T_new_of(split: Split) -> float:
    """OD-SGD's iteration: the network runs beside all the rest, which is not divided further.

    >>> T_new_of(Split(T_net=8.0, T_rest=2.0))
    8.0
    """
    return max(split)
