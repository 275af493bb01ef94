#!/usr/bin/env python
"""A preset's run on PyTorch: options, data, schedules and files of ``odsgd train``; PyTorch's network and optimizer.

    odsgd launch -n 2 -s 1 scripts/train_torch.py --config configs/digits_odsgd.yaml

It has the presets' networks (scripts/examples/networks.py), evaluates as often as asked for, writes metrics.jsonl
for `odsgd report`, and the weights at the end. Checkpoints, devices, emulation and virtual time are odsgd train's.
"""
import os
import sys
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import torch
from examples.networks import NETWORKS, make

import odsgd.torch as od
from kvstore.errors import ConfigError
from kvstore.fronts.torch.store import connect
from kvstore.job import ending, environment
from kvstore.job.pulse import pulse
from odsgd.config.train import TrainConfig
from odsgd.training.data.data import load
from odsgd.training.metrics import Clock, Sums
from odsgd.training.run_log import RunLog
from odsgd.training.schedule import Schedule

OPTIMIZERS: Dict[str, Any] = {
    "sgd": lambda of, config: torch.optim.SGD(of, config.lr, config.momentum, weight_decay=config.wd),
    "nag": lambda of, config: torch.optim.SGD(of, config.lr, config.momentum, weight_decay=config.wd, nesterov=True),
    "adam": lambda of, config: torch.optim.Adam(of, config.lr, weight_decay=config.wd)}

NOT_HERE = ("weights", "trainable", "num_gpus", "gpus", "num_cpus", "optimizer_params", "resume", "checkpoint_to",
            "emulate_compute", "trace", "cluster", "workers", "lr_scaling", "dtype", "checkpoint_every",
            "keep_checkpoints")


def refuse(config: TrainConfig) -> None:
    """ConfigError for what only odsgd train does."""
    for option in NOT_HERE:
        if getattr(config, option) != getattr(TrainConfig(), option):
            raise ConfigError(f"{option} {getattr(config, option)}: scripts/train_torch.py has one CPU per worker, and "
                              f"no such option; give --{option.replace('_', '-')} its default, or take odsgd train")
    for option, known in (("model", NETWORKS), ("optimizer", OPTIMIZERS)):
        if getattr(config, option) not in known:
            raise ConfigError(f"{option} {getattr(config, option)}: scripts/train_torch.py has {', '.join(known)}; "
                              "take one of them, or odsgd train")
    if config.dataset == "imagenet" and not environment.has_mxnet():
        raise ConfigError("dataset imagenet: its record files are read by MXNet, which is not installed; take another "
                          "dataset, or pip install '.[cpu,torch]'")


class Run:
    def __init__(self, config: TrainConfig) -> None:
        transport = connect(config.kvstore, config.transport, config.options.timeout_s)
        contexts = [None]
        if config.dataset == "imagenet":  # its reader is MXNet's
            from odsgd.training import devices
            contexts = devices.contexts(config)
        self.config, self.data = config, load(config, transport.worker_rank, transport.num_workers, contexts)
        self.each = self.data.batches_per_epoch
        options = config.options.in_iterations(self.each).plain()
        self.store = od.create(config.kvstore, transport, **options)
        torch.manual_seed(config.seed)
        self.model = make(config.model, config.input_shape, config.classes, config.thumbnail)
        made = OPTIMIZERS[config.optimizer](self.model.parameters(), config)
        self.optimizer = od.Optimizer(made, self.model, self.store)
        self.schedule = Schedule(config, self.each, self.store.num_workers)
        self.total = self.schedule.total
        self.run_log, self.clock = RunLog(config, not self.store.leads, 0, self.total), Clock()

    def train(self) -> None:
        self.run_log.start(self.store.num_workers, self.each, sum(one.numel() for one in self.model.parameters()),
                           ["cpu"], None)
        tested: Dict[str, float] = {}
        while self.store.iteration < self.total:
            tested = self.epoch(self.store.iteration // self.each) or tested
        with self.store.global_weights():
            if self.store.leads:
                torch.save(self.model.state_dict(), Path(str(self.config.out)) / "weights.pt")
        self.run_log.end(self.store.iteration, tested)
        self.run_log.close()

    def epoch(self, epoch: int) -> Dict[str, float]:
        """Train and, if it is due, evaluate."""
        sums, began, since, seconds = Sums(), self.run_log.seconds(), self.store.iteration, self.clock.read()
        self.clock.go_on()
        with pulse.doing("training"):
            for xs, ys in self.data.train(epoch):
                sums.add(self.iterate(*tensors(xs, ys)))
                self.run_log.advance()
                if self.store.iteration % self.config.log_interval == 0:
                    self.run_log.interval(self.record(epoch, sums, since, seconds))
                if self.store.iteration == self.total:
                    break
        sums = Sums(*self.store.allreduce([sums.loss, sums.hits, sums.examples]).tolist())
        self.clock.stop()
        tested = self.test() if self.schedule.evaluation_due(epoch, self.store.iteration) else {}
        record = {**self.record(epoch, sums, since, seconds), **tested, "seconds": self.run_log.seconds() - began}
        self.run_log.epoch(record)
        return tested

    def iterate(self, images: Any, labels: Any) -> Sums:
        self.optimizer.param_groups[0]["lr"], self.store.lr_local = self.schedule.rates(self.store.iteration)
        self.optimizer.zero_grad()
        output = self.model(images)
        loss = torch.nn.functional.cross_entropy(output, labels)
        loss.backward()
        self.optimizer.step()
        return counted(loss.detach(), output, labels)

    def record(self, epoch: int, sums: Sums, since: int, seconds: float) -> Dict[str, Any]:
        """Numbers of an epoch as far as it has come."""
        iterations, passed = self.store.iteration - since, self.clock.read() - seconds
        return {"epoch": epoch + 1, "iteration": self.store.iteration, **sums.named("train"),
                "iteration_ms": 1000 * passed / iterations,
                "samples_per_s": iterations * self.config.worker_batch_size * self.store.num_workers / passed,
                "lr": self.optimizer.param_groups[0]["lr"], "lr_local": self.store.lr_local}

    def test(self) -> Dict[str, float]:
        """The global weights on the test set, on the worker that speaks."""
        sums = Sums()
        with self.store.global_weights(), pulse.doing("evaluation"), torch.inference_mode():
            self.model.eval()
            for xs, ys in self.data.test() if self.store.leads else ():
                images, labels = tensors(xs, ys)
                output = self.model(images)
                sums.add(counted(torch.nn.functional.cross_entropy(output, labels), output, labels))
            self.model.train()
        return sums.named("test")


def tensors(xs: List[Any], ys: List[Any]) -> Any:
    x, y = (one if isinstance(one, np.ndarray) else one.asnumpy() for one in (xs[0], ys[0]))  # MXNet's of imagenet
    return torch.from_numpy(x), torch.from_numpy(y).long()


def counted(loss: Any, output: Any, labels: Any) -> Sums:
    return Sums(loss.item() * len(labels), float((output.argmax(1) == labels).sum()), len(labels))


def main(argv: List[str]) -> None:
    try:
        config = TrainConfig.from_flags(argv)
        refuse(config)
        os.umask(int(config.umask, 8))
        Run(config).train()
    except ConfigError as error:
        ending.die(str(error), error.exit_code)


if __name__ == "__main__":
    main(sys.argv[1:])
