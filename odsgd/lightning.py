"""Lightning with a store:  Trainer(strategy="ddp", callbacks=[odsgd.lightning.LightningCallback("odsgd", warmup=100)])

What `gradient_clip_val` clips is the mean gradient of all workers, which costs an exchange that is waited for.
Validation, and checkpoints after it or an epoch, see the global weights, and so does the model after the training.
Checkpoints in between (`every_n_train_steps`, `train_time_interval`) have worker 0's own.
"""
import contextlib
from typing import Any

import odsgd.torch as od
from kvstore.errors import ConfigError
from odsgd.tools import imported

lightning: Any = imported("lightning", "odsgd.lightning")

AVERAGING = getattr(lightning.pytorch.callbacks, "WeightAveraging", ())  # there is none in older versions


class LightningCallback(lightning.Callback):
    """`words` and `options` are those of `odsgd.torch.create`. For modules of one optimizer."""

    def __init__(self, *words: Any, **options: Any) -> None:
        self._words, self._options = words, options
        self._unsent = contextlib.ExitStack()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.ckpt_path:
            raise ConfigError("Lightning's checkpoints have the state of worker 0 alone, so fit cannot go on from one; "
                              "leave ckpt_path out, and load the model's weights")
        if len(trainer.optimizers) != 1:
            raise ConfigError(f"the module has {len(trainer.optimizers)} optimizers, and a store takes one; let "
                              "configure_optimizers return one, with a parameter group for each set of parameters")
        wrapped = hasattr(trainer.strategy.model, "require_backward_grad_sync")  # in DistributedDataParallel
        if wrapped and not pl_module.automatic_optimization:
            raise ConfigError("with automatic_optimization=False Lightning lets DistributedDataParallel exchange "
                              "gradients in any case; let it be True, or leave strategy=\"ddp\" out (`odsgd launch`)")
        self.store = od.create(*self._words, **self._options)
        trainer.strategy.optimizers = [od.Optimizer(trainer.optimizers[0], trainer.strategy.model, self.store)]
        if any(isinstance(one, AVERAGING) for one in trainer.callbacks):  # which read the weights after each step
            trainer.optimizers[0].register_step_post_hook(lambda optimizer, *_: optimizer.synchronize())
        self._clips = bool(trainer.gradient_clip_val) and not self.store.takes_weights
        alone = not wrapped and trainer.accumulate_grad_batches > 1  # then Lightning calls no `no_sync`
        if self._clips or (alone and not self.store.takes_weights):
            self._unsent.enter_context(trainer.optimizers[0].no_sync())

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._clips:
            optimizer.synchronize_grads()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.store.show_own()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.store.show_global()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn == "fit":  # else it is of the weights that the script has put in place
            self.on_train_epoch_end(trainer, pl_module)
