"""Hugging Face's Trainer with a store:

    trainer.add_callback(odsgd.huggingface.HuggingFaceCallback(trainer, "odsgd", warmup=100))

What `max_grad_norm` clips is the mean gradient of all workers, which costs an exchange that is waited for: 0 is better.
Evaluation and saving see the global weights, which the model has after the training, unless the Trainer then loads the
best ones. Checkpoints have no state of the optimizer.
"""
import contextlib
import math
from typing import Any

import odsgd.torch as od
from kvstore.errors import ConfigError
from odsgd.tools import imported

transformers: Any = imported("transformers", "odsgd.huggingface")


class HuggingFaceCallback(transformers.TrainerCallback):
    """`words` and `options` are those of `odsgd.torch.create`."""

    def __init__(self, trainer: Any, *words: Any, **options: Any) -> None:
        self._trainer, self._words, self._options = trainer, words, options
        self._unsent = contextlib.ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step:
            raise ConfigError("the Trainer's checkpoints have no state of the optimizer, so train cannot go on from "
                              "one; leave resume_from_checkpoint out, and load the model's weights")
        self.store, trainer = od.create(*self._words, **self._options), self._trainer
        wrapped = od.Optimizer(trainer.optimizer.optimizer, trainer.model_wrapped, self.store)
        trainer.optimizer.optimizer = wrapped
        args.save_only_model = True  # one worker alone saves
        if not self.store.takes_weights:
            trainer.accelerator.clip_grad_norm_ = self._clip
            if args.max_grad_norm:
                self._unsent.enter_context(wrapped.no_sync())

    def _clip(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """In the place of Accelerate's, which the Trainer calls for the norm alone, too."""
        import torch
        parameters = list(parameters)
        if max_norm == math.inf:
            return torch.nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None], norm_type)
        self._trainer.optimizer.optimizer.synchronize_grads()
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.store.show_own()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_evaluate or control.should_save:
            self.on_epoch_end(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.store.show_global()
