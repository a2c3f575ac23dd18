"""Batch norm whose statistics are those of all ranks' batches together."""

from __future__ import annotations

from typing import Any

import torch
from horovod.torch.mpi_ops import ProcessSet, Sum, allreduce, global_process_set
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from hvdkit.errors import HvdkitError
from hvdkit.torch.transport import pick_wire_device

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(_BatchNorm):
    """Batch norm over all ranks in training, in place of any ``torch.nn.BatchNorm*d``.

    Output, gradients and running statistics are those of one process on the ranks' batches
    concatenated, on CPU and GPU. Ranks may have batches of different sizes, empty ones too.
    16-bit inputs are computed in float32. One small all-reduce in the forward pass and one in
    the backward pass; none in evaluation with running statistics.

    Collective in training: every rank must run it, forward and backward.

    Args:
        num_features: Channels, the second dimension of the input.
        eps: Added to the variance.
        momentum: Weight of the new batch in the running statistics; None for a plain average.
        affine: Learn a weight and a bias per channel.
        track_running_stats: Keep running statistics for evaluation.
        device: Of parameters and buffers.
        dtype: Of parameters and buffers.
        process_set: The ranks whose batches count together.

    Source: Ioffe and Szegedy, Batch Normalization (2015); the variances of the ranks combine
    as in Chan, Golub and LeVeque, Updating Formulae for Computing Sample Variances (1979).
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        self.process_set = process_set
        self.operation_name = "hvdkit.sync_batch_norm"

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """Replace every batch norm in a module, and return the module or its replacement.

        Parameters and buffers stay the same objects, so an optimizer made before keeps them.

        Raises:
            HvdkitError: If a lazy batch norm has not seen an input yet.
        """
        return cls._convert(module, process_set, "hvdkit.sync_batch_norm", {})

    @classmethod
    def _convert(
        cls,
        module: torch.nn.Module,
        process_set: ProcessSet,
        name: str,
        replaced: dict[torch.nn.Module, SyncBatchNorm],
    ) -> torch.nn.Module:
        if isinstance(module, _BatchNorm):
            if module not in replaced:  # a module may be used in several places
                new = cls._replace(module, process_set, name)
                replaced |= {module: new, new: new}
            return replaced[module]
        for child_name, child in module._modules.items():
            if child is not None:
                converted = cls._convert(child, process_set, f"{name}.{child_name}", replaced)
                module._modules[child_name] = converted
        return module

    @classmethod
    def _replace(cls, old: _BatchNorm, process_set: ProcessSet, name: str) -> SyncBatchNorm:
        if getattr(old, "has_uninitialized_params", bool)():
            raise HvdkitError(f"{name} is lazy and has seen no input; run one forward pass first")
        new = cls(
            old.num_features,
            old.eps,
            old.momentum,
            affine=False,
            track_running_stats=False,
            process_set=process_set,
        )
        new.affine, new.track_running_stats = old.affine, old.track_running_stats
        new.weight, new.bias = old.weight, old.bias
        for buffer_name, buffer in old.named_buffers(recurse=False):
            setattr(new, buffer_name, buffer)
        new.training = old.training
        new.operation_name = name
        return new

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize ``input`` (N, C, ...) per channel."""
        self._check_input_dim(input)
        uses_batch = self.training or self.running_mean is None
        if not uses_batch or self.process_set.size() == 1:
            return super().forward(input)
        output, mean, var, count = _normalize(
            input, self.weight, self.bias, self.eps, self.operation_name, self.process_set
        )
        if self.training and self.track_running_stats:
            self._update_running_stats(mean, var * (count / (count - 1)))
        return output

    @torch.no_grad()
    def _update_running_stats(self, mean: torch.Tensor, unbiased_var: torch.Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1 / self.num_batches_tracked.item()
        factor = 0.0 if factor is None else factor
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased_var.to(self.running_var.dtype), factor)


class _SyncNormalize(torch.autograd.Function):
    """Normalize by the mean and variance over all ranks; differentiable once."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        name: str,
        process_set: ProcessSet,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        x = _widen(input)
        dims = _other_dims(x)
        rows = x.numel() // x.size(1) if x.size(1) else 0
        if rows:
            var, mean = torch.var_mean(x, dims, correction=0)
        else:
            var, mean = x.new_zeros(2, x.size(1)).unbind()
        # Sums over ranks in float64: subtracting the squared mean then costs no accuracy.
        mean, var = mean.double(), var.double()
        sums = torch.cat([mean.new_tensor([rows]), rows * mean, rows * (var + mean * mean)])
        sums = _sum_over_ranks(sums, f"{name}.forward", process_set)
        count = sums[0]
        if count < 2:
            raise HvdkitError(
                f"batch norm in training needs more than one value per channel over all ranks, "
                f"got {int(count)} for an input of {tuple(input.shape)} here"
            )
        mean, square = (sums[1:] / count).chunk(2)
        var = (square - mean * mean).clamp_(min=0)
        inverse_std = (var + eps).rsqrt().to(x.dtype)
        shape = _channel_shape(x)
        normalized = (x - mean.to(x.dtype).view(shape)) * inverse_std.view(shape)
        output = normalized if weight is None else normalized * weight.to(x.dtype).view(shape)
        if bias is not None:
            output = output + bias.to(x.dtype).view(shape)
        ctx.save_for_backward(input, weight, mean, inverse_std, count)
        ctx.name, ctx.process_set = name, process_set
        ctx.mark_non_differentiable(mean, var, count)
        return output.to(input.dtype), mean, var, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor, *unused: Any) -> tuple[Any, ...]:
        input, weight, mean, inverse_std, count = ctx.saved_tensors
        x, grad = _widen(input), _widen(grad_output)
        shape, dims = _channel_shape(x), _other_dims(x)
        normalized = (x - mean.to(x.dtype).view(shape)) * inverse_std.view(shape)
        sum_grad = grad.sum(dims)
        sum_grad_normalized = (grad * normalized).sum(dims)
        grad_input = None
        if ctx.needs_input_grad[0]:
            both = torch.cat([sum_grad, sum_grad_normalized]).double()
            both = _sum_over_ranks(both, f"{ctx.name}.backward", ctx.process_set)
            mean_grad, mean_grad_normalized = (both / count).to(x.dtype).chunk(2)
            centred = grad - mean_grad.view(shape) - normalized * mean_grad_normalized.view(shape)
            scale = inverse_std if weight is None else inverse_std * weight.to(x.dtype)
            grad_input = (centred * scale.view(shape)).to(input.dtype)
        # Weight and bias get this rank's part: the optimizer averages it as it does the others.
        grad_weight = sum_grad_normalized if ctx.needs_input_grad[1] else None
        grad_bias = sum_grad if ctx.needs_input_grad[2] else None
        return grad_input, grad_weight, grad_bias, None, None, None


@torch._disable_dynamo  # the compiler cannot look into Horovod; this one loads it only if used
def _normalize(*args: Any) -> tuple[torch.Tensor, ...]:
    return _SyncNormalize.apply(*args)


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _other_dims(tensor: torch.Tensor) -> list[int]:
    return [dim for dim in range(tensor.dim()) if dim != 1]


def _channel_shape(tensor: torch.Tensor) -> list[int]:
    return [1, -1] + [1] * (tensor.dim() - 2)


def _sum_over_ranks(sums: torch.Tensor, name: str, process_set: ProcessSet) -> torch.Tensor:
    wire = pick_wire_device(sums.device)
    return allreduce(sums.to(wire), op=Sum, name=name, process_set=process_set).to(sums.device)
