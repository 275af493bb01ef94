"""A measured job's passes as a virtual cluster has them: those of the emulated accelerator, and what they take of its
host.
"""
from __future__ import annotations

import math

import numpy as np

from odsgd.lab.bench import models
from odsgd.training.step.emulated import steps
from odsgd.virtual.description import LayerTimes, Quantity

STEP_S = 70e-6
"""Processor time of a step of the emulated accelerator (`odsgd.training.step.emulated`)."""
HAND_IN_S = 10e-6
"""A parameter that the training loop hands to the store: dsync with one worker, which sends nothing, takes 1.2 ms with
97 tensors of 0.27 M numbers and 5.3 ms with 10 of 4.2 M (the page `host`)."""


def passes(model: str, seconds: float, forward: float = 0.0) -> LayerTimes:
    """The times of its steps; a step needs the weights of all its layers, and has their gradients when it ends.

    The benchmarks' accelerator has no forward pass. Without computing, an iteration begins when Python has handed in
    all parameters.
    """
    sizes = np.array([math.prod(shape) for shape in models.shapes(model)], float)
    durations, numbers = seconds * sizes / sizes.sum(), list(range(len(sizes)))
    there, back = np.zeros((2, len(sizes)))
    if seconds:
        for step, step_s in steps(numbers, forward * durations):
            there[step[-1]] = step_s
        for step, step_s in steps(numbers[::-1], (1 - forward) * durations):
            back[step[0]] = step_s
    taken = STEP_S * (np.count_nonzero(there) + np.count_nonzero(back)) + HAND_IN_S * len(sizes)
    if not seconds:
        back[:] = HAND_IN_S
    return LayerTimes(layers={f"tensor{number}": (Quantity(first), Quantity(last)) for number, (first, last)
                              in enumerate(zip(there, back))}, processor=Quantity(taken))
