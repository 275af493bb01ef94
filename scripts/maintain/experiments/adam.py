#!/usr/bin/env python3
"""Adam under one step of delay: the loss of a small transformer by virtual time, of docs/results/adam.md.

    scripts/maintain/experiments/adam.py        writes docs/results/adam.jsonl, goes on from what is there; adam.svg

Real gradients of four workers, PyTorch's, in virtual time: the model and the text of
scripts/examples/transformer_text.py. Needs PyTorch (scripts/setup torch).
"""
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any, Dict, List, Tuple

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
OUT = ROOT / "docs" / "results" / "adam.jsonl"
CLUSTER = {"workers": 4, "links": {"goodput": "1gbit", "latency": "1ms"},
           "compute": {"iteration": "20ms", "draws": "lognormal:0.1"}}
STORES: Dict[str, Dict[str, Any]] = {
    "ssgd": {}, "delayed": {"warmup": 20}, "odsgd, sgd": {"warmup": 20},
    "odsgd, adamw": {"warmup": 20, "optimizer_local": "adamw"}, "eager": {"H": 1, "lr_outer": 1.0}, "acco": {}}
"""By what stands in the table: options, beside the name in front of the comma."""
RATES, SEEDS = (1e-3, 3e-3, 1e-2), (0, 1)
ITERATIONS, EVERY, RISE, BATCH = 600, 40, 50, 32
Job = Tuple[str, float, int]


def run(job: Job) -> Dict[str, Any]:
    """One training: now and then the virtual seconds, and the loss of the global weights on unseen sums."""
    import torch

    import odsgd.torch as od
    from odsgd.virtual.description import of
    from odsgd.virtual.transport import VirtualStage
    from scripts.examples.transformer_text import Transformer, lines, loss_of
    torch.set_num_threads(1)
    (label, lr, seed), unseen = job, lines(1000, torch.Generator().manual_seed(10 ** 6))
    name = label.split(",")[0]

    def train(transport: Any) -> List[Tuple[float, float]]:
        torch.manual_seed(seed)
        model, curve = Transformer(48, 2), []
        store = od.create(name, transport, **STORES[label])
        optimizer = od.Optimizer(torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01), model, store)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, (t + 1) / RISE))
        random = torch.Generator().manual_seed(1000 * seed + transport.worker_rank)
        for t in range(1, ITERATIONS + 1):
            optimizer.zero_grad()
            loss_of(model, lines(BATCH, random)).backward()
            optimizer.step()
            schedule.step()
            if t % EVERY == 0:
                with store.global_weights(), torch.no_grad():
                    curve.append((round(transport.seconds(), 4), round(loss_of(model, unseen).item(), 4)))
        store.close()
        return curve

    stage = VirtualStage(of(CLUSTER))
    curve = stage.run(train, stage.ring_worker if name == "acco" else stage.worker)[0]
    return {"store": label, "lr": lr, "seed": seed, "curve": curve}


def draw(found: Dict[Job, Any]) -> None:
    """A panel for each rate; a line is the mean of the seeds."""
    from odsgd import tools
    pyplot = tools.pyplot("the page")
    pyplot.rcParams.update({"svg.hashsalt": "odsgd", "svg.fonttype": "none", "font.size": 8})
    figure, panels = pyplot.subplots(1, len(RATES), figsize=(10, 3.2), sharey=True, layout="constrained")
    for panel, lr in zip(panels, RATES):
        for number, store in enumerate(STORES):
            curves = [found[store, lr, seed] for seed in SEEDS]
            panel.plot([mean(s for s, _ in points) for points in zip(*curves)],
                       [mean(loss for _, loss in points) for points in zip(*curves)], label=store,
                       color="#555555" if store == "ssgd" else f"C{number}", marker="os^vDx"[number], markersize=3,
                       linewidth=1)
        panel.set(title=f"rate {lr:g}", xlabel="virtual seconds", yscale="log")
        panel.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("loss on unseen sums")
    panels[0].legend(fontsize=7)
    figure.savefig(OUT.with_suffix(".svg"), metadata={"Date": None, "Creator": None})


def main() -> None:
    lines = OUT.read_text(encoding="utf-8").splitlines() if OUT.exists() else []
    found = {(one["store"], one["lr"], one["seed"]): one["curve"] for one in map(json.loads, lines)}
    jobs = [(store, lr, seed) for seed in SEEDS for lr in RATES for store in STORES]
    jobs = [job for job in jobs if job not in found]
    with ProcessPoolExecutor(2) as pool, OUT.open("a", encoding="utf-8") as file:
        for job, one in zip(jobs, pool.map(run, jobs)):
            found[job] = one["curve"]
            file.write(json.dumps(one) + "\n")
            file.flush()
    for store in STORES:
        ends = [", ".join(f"{mean(loss for _, loss in found[store, lr, seed][-3:]):.2f}" for seed in SEEDS)
                for lr in RATES]
        print(f"| `{store}` | {' | '.join(ends)} | {1e3 * found[store, RATES[0], 0][-1][0] / ITERATIONS:.1f} |")
    draw(found)


if __name__ == "__main__":
    main()
