"""What od.Optimizer takes for a model: its tensors by name, and the wrappers and tensors that it does not take."""
import zlib
from typing import Any, Dict, Iterable, Iterator, List, Mapping

import numpy as np
import torch

from kvstore.errors import ConfigError
from kvstore.fronts.torch.lanes import held


def refuse_wrapped(model: torch.nn.Module) -> None:
    """ConfigError where PyTorch would exchange gradients, too."""
    for kind in ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"):
        if any(those_in(model, kind)):
            raise ConfigError(f"the model is in {kind}, which exchanges gradients itself, and the store does so; leave "
                              "the wrapper out: give the optimizer, od.Optimizer and the training the model as it is "
                              "(docs/how-to/pytorch.md); a Trainer of Hugging Face's with torch_compile=True makes one "
                              "that cannot be left out")


def refuse_join(*_: Any, **__: Any) -> None:
    raise ConfigError("join of DistributedDataParallel, which exchanges nothing here: for data of unequal length leave "
                      'it out, and make the store by od.create(..., uneven="join")')


def those_in(model: torch.nn.Module, kind: str) -> Iterator[Any]:
    """The modules of a class of PyTorch's, by name, since to import all of them takes time."""
    return (module for module in model.modules() for one in type(module).__mro__
            if one.__name__ == kind and one.__module__.startswith("torch."))


def with_hooks(modules: Iterable[torch.nn.Module]) -> List[torch.nn.Module]:
    """Those that may have hooks: not TorchScript's."""
    return [module for module in modules if not isinstance(module, torch.jit.RecursiveScriptModule)]


def tensors(model: torch.nn.Module) -> Dict[str, torch.Tensor]:
    """Parameters and buffers by name."""
    found: Dict[str, torch.Tensor] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
            raise ConfigError(f"{name} has no shape yet; run one forward pass before odsgd.torch.Optimizer is made")
        if tensor.is_meta:
            raise ConfigError(f"{name} is on the device `meta`, where it has no values; put the model on a real one by "
                              "model.to_empty(device=...) and set its weights before odsgd.torch.Optimizer is made")
        if tensor.layout is not torch.strided:
            raise ConfigError(f"{name} is {tensor.layout}, and a store has whole arrays alone; make it dense, or keep "
                              "it outside of the model's parameters and buffers (`self.adjacency = ...`)")
        found[plain(name)] = tensor
    return found


def frozen(tensors: Mapping[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    """Those of them that are parameters and do not learn."""
    return {name: one for name, one in tensors.items()
            if isinstance(one, torch.nn.Parameter) and not one.requires_grad}


def checksums(tensors: Mapping[str, torch.Tensor]) -> Dict[str, str]:
    return {name: f"{zlib.crc32(as_bytes(one).tobytes()):08x}" for name, one in tensors.items() if held(one).numel()}


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    whole = held(tensor).detach().cpu().resolve_conj().contiguous()
    flat = whole.as_strided((whole.numel(),), (1,))  # PyTorch calls one element contiguous whatever its stride
    return np.asarray(flat.view(torch.uint8).numpy())


def plain(name: str) -> str:
    """Without what ``torch.compile`` puts in front."""
    return name.replace("_orig_mod.", "")


def refuse_shared_memory(parameters: Mapping[str, torch.Tensor]) -> None:
    """ConfigError for two parameters at one address, of which each would have weights of its own."""
    names: Dict[int, str] = {}
    for name, tensor in parameters.items():
        other = names.setdefault(held(tensor).data_ptr(), name)
        if other != name:
            raise ConfigError(f"{other} and {name} share their memory and are two parameters, which a store would "
                              "train apart; let one module have the other's (`decoder.weight = encoder.weight`), "
                              "before the optimizer is made")


def refuse_expanded(tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if any(size > 1 and not stride for size, stride in zip(held(tensor).shape, held(tensor).stride())):
            raise ConfigError(f"several elements of {name} are one place in memory (`expand`), so that worker 0's "
                              "values cannot be written to it; make it with `.expand(...).clone()`")
