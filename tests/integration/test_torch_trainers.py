"""What else wraps a model or trains it, beside DistributedDataParallel: by a store that averages gradients, the weights
are the same to rounding, with clipping and accumulation.
"""
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import environment

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow]

COMMON = """
import numpy as np, torch, torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
import odsgd.torch as od


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))

    def forward(self, x, labels):
        outputs = self.layers(x).squeeze(1)
        return {"loss": functional.mse_loss(outputs, labels), "logits": outputs}


random = torch.Generator().manual_seed(1)
DATA = [{"x": x, "labels": y} for x, y in zip(torch.randn(64, 5, generator=random), torch.randn(64, generator=random))]
"""

COMPARED = """
alone = torch.nn.utils.parameters_to_vector(Net().parameters())
for clip in (0.0, 0.05):
    before, now = (torch.nn.utils.parameters_to_vector(train(store, clip).parameters()).detach()
                   for store in (None, "dsync"))
    assert (before - alone).abs().max() > 1e-3
    np.testing.assert_allclose(now, before, rtol=1e-4, atol=1e-6)
"""

KINDS = {"torch": """
dist.init_process_group("gloo")

def train(store, clip):
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.BatchNorm1d(5, affine=False), Net().layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if store:
        optimizer = od.Optimizer(optimizer, model, od.create(store))
    mine = torch.utils.data.DataLoader(DATA, 8, sampler=torch.utils.data.DistributedSampler(DATA))
    for _ in range(3):
        for number, batch in enumerate(mine):
            with model.no_sync():
                functional.mse_loss(model(batch["x"]).squeeze(1), batch["labels"]).backward()
            if number % 2:
                functional.mse_loss(model(batch["x"]).squeeze(1), batch["labels"]).backward()
                optimizer.step()
                optimizer.zero_grad()
    if store:
        optimizer.synchronize()
    return model.module
""", "transformers": """
from transformers import Trainer, TrainingArguments
import odsgd.huggingface

def train(store, clip):
    arguments = TrainingArguments("saved", use_cpu=True, num_train_epochs=3, per_device_train_batch_size=8,
                                  gradient_accumulation_steps=2, learning_rate=0.01, max_grad_norm=clip, seed=3,
                                  save_strategy="epoch", eval_strategy="epoch", report_to="none", disable_tqdm=True)
    trainer = Trainer(Net(), arguments, train_dataset=DATA, eval_dataset=DATA)
    if store:
        trainer.add_callback(odsgd.huggingface.HuggingFaceCallback(trainer, store))
    trainer.train()
    return trainer.model
""", "lightning": """
import lightning
import odsgd.lightning
averaging = list

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, number):
        return self.net(**batch)["loss"]

    def validation_step(self, batch, number):
        self.log("loss", self.net(**batch)["loss"], sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

def train(store, clip):
    lightning.seed_everything(3)
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, accumulate_grad_batches=2,
                                gradient_clip_val=clip or None, logger=False, enable_progress_bar=False,
                                callbacks=averaging() + [odsgd.lightning.LightningCallback(store)] * bool(store))
    trainer.fit(Module(), torch.utils.data.DataLoader(DATA, 8, shuffle=True), torch.utils.data.DataLoader(DATA, 8))
    return trainer.model.net
"""}

AVERAGED = """
from lightning.pytorch.callbacks import EMAWeightAveraging
averaging = lambda: [EMAWeightAveraging(decay=0.5)]
"""


AFTER = {"transformers": """
import gc, pytest
from kvstore.errors import ConfigError
from transformers import Trainer, TrainingArguments
import odsgd.huggingface

model = Net()
arguments = TrainingArguments("saved", use_cpu=True, num_train_epochs=2, learning_rate=0.01, save_strategy="epoch",
                              eval_strategy="epoch", report_to="none", disable_tqdm=True, load_best_model_at_end=True,
                              metric_for_best_model="eval_loss", greater_is_better=True)  # so that the first is best
trainer = Trainer(model, arguments, train_dataset=DATA, eval_dataset=DATA)
trainer.add_callback(odsgd.huggingface.HuggingFaceCallback(trainer, "odsgd"))
trainer.train()
first = trainer.evaluate()["eval_loss"]
best = model.state_dict()["layers.0.weight"].clone()
evaluated = [one["eval_loss"] for one in trainer.state.log_history if "eval_loss" in one]
np.testing.assert_allclose(first, evaluated[0], rtol=1e-5)
assert first > 1.01 * evaluated[1]
with pytest.raises(ConfigError, match="a Trainer of Hugging Face's trains once"):
    trainer.train()
del trainer
gc.collect()
assert (model.state_dict()["layers.0.weight"] == best).all()
""", "lightning": KINDS["lightning"] + """
import pytest
from kvstore.errors import ConfigError
from lightning.pytorch.callbacks import ModelCheckpoint

module, data = Module(), torch.utils.data.DataLoader(DATA, 8)
saving = ModelCheckpoint("saved", "{epoch}", save_top_k=-1)
trainer = lightning.Trainer(accelerator="cpu", devices=1, strategy="ddp", max_epochs=2, logger=False,
                            enable_progress_bar=False,
                            callbacks=[odsgd.lightning.LightningCallback("odsgd", lr_local=0.01), saving])
trainer.validate(module, data)
trainer.fit(module, data, data)
trainer.validate(module, data, ckpt_path="saved/epoch=0.ckpt")
first, last = (torch.load(f"saved/epoch={n}.ckpt", weights_only=False)["state_dict"] for n in range(2))
for name, now in module.state_dict().items():
    assert (now == first[name]).all() and not (now == last[name]).all(), name

class Several(Module):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.01) for _ in range(2)], []

    automatic_optimization = False

with pytest.raises(ConfigError, match="the module has 2 optimizers, and a store takes one; let configure_optimizers"):
    trainer.fit(Several(), data)

class Manual(Module):
    automatic_optimization = False

with pytest.raises(ConfigError, match="automatic_optimization=False Lightning lets DistributedDataParallel exchange"):
    trainer.fit(Manual(), data)
"""}


@pytest.mark.parametrize("kind", AFTER)
def test_weights_that_are_loaded_after_the_training_stay(kind: str, tmp_path: Path) -> None:
    pytest.importorskip(kind)
    run(AFTER[kind], "1", tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_distributed_data_parallel(kind: str, tmp_path: Path) -> None:
    pytest.importorskip(kind)
    run(KINDS[kind] + COMPARED, "2", tmp_path)


def test_weights_that_lightning_averages_are_those_of_distributed_data_parallel(tmp_path: Path) -> None:
    """Its callback stands before ours."""
    if not hasattr(pytest.importorskip("lightning").pytorch.callbacks, "EMAWeightAveraging"):
        pytest.skip("this Lightning has no EMAWeightAveraging")
    run(KINDS["lightning"] + AVERAGED + COMPARED, "2", tmp_path)


def run(code: str, processes: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(COMMON + code)
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", processes, "train.py"],
                          cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
