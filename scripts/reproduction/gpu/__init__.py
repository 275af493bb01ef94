"""Cells of the papers on one GPU, where they can be run at full length: `python -m scripts.reproduction.gpu --help`.

All workers of a synchronous job are in one process, and take each iteration side by side. What a worker and the server
do is the method's own file (`Method.worker`, `Method.rule`), here on PyTorch's tensors (`tensors`). Batches, rates and
networks are those of ``odsgd train`` and of ``scripts/train_torch.py`` (`replica`, `images`), virtual times those of
`odsgd.virtual`. tests/test_gpu.py compares it with a store.

An iteration is recorded as a CUDA graph, and played from then on (`run`): every second one is the same work on the same
memory, until OD-SGD's warm-up is over, and from then on. Several runs share the GPU, each with streams of its own.
"""
