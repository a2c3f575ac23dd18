"""A copy of a state in the host's memory, which training no longer changes."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch

__all__ = ["copy_to_host", "replace_scalars"]


def copy_to_host(value: Any, copied: dict[int, torch.UntypedStorage] | None = None) -> Any:
    """Copy a state, its tensors to the CPU.

    Tensors that share memory share it in the copy as well, each at its place, so that what is
    saved is the same.

    Args:
        value: Tensors, and dicts, lists and tuples of them; others are copied by ``deepcopy``.
        copied: The copies of memory that was met before.
    """
    copied = {} if copied is None else copied
    if isinstance(value, torch.Tensor):
        return _copy_tensor(value, copied)
    if isinstance(value, dict):
        result = copy.copy(value)  # an OrderedDict keeps its attributes, which modules need
        for key, item in value.items():
            result[key] = copy_to_host(item, copied)
        return result
    if type(value) in (list, tuple):
        return type(value)(copy_to_host(item, copied) for item in value)
    return copy.deepcopy(value)


def replace_scalars(value: Any) -> Any:
    """Return a state with Python's numbers in place of NumPy's, which ``weights_only`` refuses.

    A learning rate that was computed with NumPy is one. Tensors stay the same objects.

    Args:
        value: What is in dicts, lists and tuples is replaced; other objects stay as they are.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    if isinstance(value, dict):
        result = copy.copy(value)
        for key, item in value.items():
            result[key] = replace_scalars(item)
        return result
    if type(value) in (list, tuple):
        return type(value)(replace_scalars(item) for item in value)
    return value


def _copy_tensor(
    tensor: torch.Tensor, copied: dict[int, torch.UntypedStorage]
) -> torch.Tensor | torch.nn.Parameter:
    plain = (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )
    if not plain:
        return copy.deepcopy(tensor.detach().cpu())
    memory = tensor.untyped_storage()
    key = memory._cdata  # as torch.save tells memory apart
    if key not in copied:
        copied[key] = memory.clone() if memory.device.type == "cpu" else memory.cpu()
    result = torch.empty(0, dtype=tensor.dtype)
    result.set_(copied[key], tensor.storage_offset(), tensor.size(), tensor.stride())
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(result, tensor.requires_grad)
    return result.requires_grad_(tensor.requires_grad)
