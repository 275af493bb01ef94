"""The front end for PyTorch: a store and an optimizer for a script, and the way between tensors and flat arrays.

The only place that knows PyTorch. `odsgd.torch` has the names that a script uses.
"""
MISSING = "PyTorch 2.1 or newer is not installed; pip install 'odsgd[cpu,torch]' brings it"

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(MISSING, name="torch") from None

if not hasattr(torch.Tensor, "register_post_accumulate_grad_hook"):
    raise ImportError(f"{MISSING}; here is {torch.__version__}")
