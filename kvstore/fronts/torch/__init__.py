"""The front end for PyTorch: a store and an optimizer for a script, and the way between tensors and flat arrays.

The only place that knows PyTorch. `odsgd.torch` has the names that a script uses.
"""
import numpy as np

MISSING = "PyTorch 2.1 or newer is not installed; pip install 'torch>=2.1'"

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(MISSING, name="torch") from None

if not hasattr(torch.Tensor, "register_post_accumulate_grad_hook"):
    raise ImportError(f"{MISSING}; here is {torch.__version__}")
try:
    torch.from_numpy(np.zeros(1))
except RuntimeError:
    raise ImportError(f"PyTorch {torch.__version__} was not made for NumPy {np.__version__}; install PyTorch 2.3 or "
                      "newer, or take pip install 'numpy>=1.22,<2'") from None
