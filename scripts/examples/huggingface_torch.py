"""A script of Hugging Face's Trainer by a store: handwritten digits, evaluated after each epoch.

    odsgd launch -n 2 -s 1 scripts/examples/huggingface_torch.py
    torchrun --nproc-per-node 2 scripts/examples/huggingface_torch.py

Two lines are `# new`; without them DistributedDataParallel trains.
"""
from typing import Any, Dict

import torch
from sklearn.datasets import load_digits
from torch.nn import functional
from transformers import Trainer, TrainingArguments

import odsgd.huggingface  # new


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def accuracy(prediction: Any) -> Dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def main() -> None:
    images, labels = load_digits(return_X_y=True)
    data = [{"x": torch.tensor(x, dtype=torch.float32), "labels": int(y)} for x, y in zip(images / 16, labels)]
    arguments = TrainingArguments("saved", use_cpu=True, num_train_epochs=10, per_device_train_batch_size=16,
                                  gradient_accumulation_steps=2, learning_rate=3e-3, max_grad_norm=0.0,
                                  eval_strategy="epoch", save_strategy="epoch", save_total_limit=1, report_to="none")
    trainer = Trainer(Net(), arguments, train_dataset=data[:1500], eval_dataset=data[1500:], compute_metrics=accuracy)
    trainer.add_callback(odsgd.huggingface.HuggingFaceCallback(trainer, "odsgd", optimizer_local="adam"))  # new
    trainer.train()
    found = trainer.evaluate()["eval_accuracy"]
    if trainer.is_world_process_zero():
        print(f"{found:.1%} are right")


if __name__ == "__main__":
    main()
