"""Checks of SyncBatchNorm: as if one process had the ranks' batches concatenated."""

import copy

import pytest
import torch
from torch import nn

import hvdkit.torch as hvd
from hvdkit.errors import HvdkitError
from hvdkit.torch.sync_batch_norm import SyncBatchNorm
from tests.distributed.worker import run_checks

TOLERANCE = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-9},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
}


def batches(shape, rows, dtype=torch.float64, seed=0):
    """Every rank's batch, made alike on every rank; not centred, so that cancellation shows."""
    torch.manual_seed(seed)
    parts = [torch.randn(n, *shape) * (r + 1) + 5 * r for r, n in enumerate(rows)]
    return [part.to(dtype) for part in parts]


def compare(norm, rows, shape, dtype=torch.float64, steps=2):
    """Run steps on this rank's batch, and the plain module on all of them; compare everything."""
    plain = copy.deepcopy(norm)
    synced = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(norm))
    assert isinstance(synced, SyncBatchNorm)
    start = sum(rows[: hvd.rank()])
    mine = slice(start, start + rows[hvd.rank()])
    for step in range(steps):
        parts = batches(shape, rows, dtype, seed=step)
        weights = batches(shape, rows, dtype, seed=100 + step)
        x = parts[hvd.rank()].clone().requires_grad_()
        everything = torch.cat(parts).requires_grad_()
        out, expected = synced(x), plain(everything)
        assert out.dtype == expected.dtype
        near(out, expected[mine], dtype)
        synced.zero_grad()
        plain.zero_grad()
        # One loss over all ranks' outputs: each rank has its part of the sum.
        (out * weights[hvd.rank()]).sum().backward()
        (expected * torch.cat(weights)).sum().backward()
        near(x.grad, everything.grad[mine], dtype)
        for name, parameter in plain.named_parameters():
            gradient = synced.get_parameter(name).grad
            assert gradient.dtype == parameter.dtype
            total = hvd.allreduce(gradient.double(), op=hvd.Sum, name=f"gradient.{name}")
            near(total, parameter.grad.double(), dtype, scale=sum(rows))
    for name, buffer in plain.named_buffers():
        near(synced.get_buffer(name).double(), buffer.double(), dtype)
    synced.eval()
    plain.eval()
    # Without running statistics evaluation takes those of the batches, and so is collective.
    near(synced(parts[hvd.rank()]), plain(torch.cat(parts))[mine], dtype)


def near(actual, expected, dtype, scale=1):
    tolerance = dict(TOLERANCE[dtype])
    tolerance["atol"] *= scale
    torch.testing.assert_close(actual, expected, **tolerance)


def check_one_two_and_three_dimensions():
    for norm, shape in (
        (nn.BatchNorm1d(3), (3,)),
        (nn.BatchNorm1d(3), (3, 5)),
        (nn.BatchNorm2d(3), (3, 4, 5)),
        (nn.BatchNorm3d(2), (2, 3, 4, 2)),
    ):
        compare(norm.double(), [4, 4], shape)


def check_batches_of_different_sizes():
    for rows in ([2, 7], [1, 1], [5, 1]):
        compare(nn.BatchNorm2d(3).double(), rows, (3, 2, 2))


def check_a_rank_with_an_empty_batch():
    for rows in ([0, 6], [6, 0]):
        compare(nn.BatchNorm1d(3).double(), rows, (3,))


def check_every_option():
    for norm in (
        nn.BatchNorm1d(3, eps=0.1, momentum=0.4),
        nn.BatchNorm1d(3, momentum=None),
        nn.BatchNorm1d(3, affine=False),
        nn.BatchNorm1d(3, track_running_stats=False),
        nn.BatchNorm1d(3, affine=False, track_running_stats=False),
    ):
        if norm.affine:
            nn.init.normal_(norm.weight.data, generator=torch.Generator().manual_seed(0))
            nn.init.normal_(norm.bias.data, generator=torch.Generator().manual_seed(1))
        compare(norm.double(), [3, 5], (3,), steps=3)


def check_dtypes():
    compare(nn.BatchNorm2d(3), [3, 5], (3, 4, 4), torch.float32)
    compare(nn.BatchNorm2d(3), [3, 5], (3, 4, 4), torch.bfloat16)
    compare(nn.BatchNorm2d(3).bfloat16(), [3, 5], (3, 4, 4), torch.bfloat16)


def check_half_is_computed_in_float32():
    """60000 + 60000 would overflow in float16; the mean is exact here."""
    synced = SyncBatchNorm(1)
    x = torch.full((4, 1), 60000.0 if hvd.rank() else 59904.0, dtype=torch.float16)
    out = synced(x)
    assert out.dtype == torch.float16
    near(out, torch.full((4, 1), 1.0 if hvd.rank() else -1.0).half(), torch.float16)


def check_a_large_mean_costs_no_accuracy():
    """Standard deviation 1 around a mean of 10000 in float32."""
    torch.manual_seed(hvd.rank())
    mine = torch.randn(64, 2) + 10000
    everything = hvd.allgather(mine, name="everything").double()
    expected = (everything - everything.mean(0)) / everything.std(0, correction=0)
    out = SyncBatchNorm(2, eps=0)(mine)
    torch.testing.assert_close(
        hvd.allgather(out, name="out"), expected.float(), rtol=1e-3, atol=2e-3
    )


def check_channels_last_stays():
    x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert SyncBatchNorm(3)(x).is_contiguous(memory_format=torch.channels_last)


def check_conversion_keeps_parameters_and_their_places():
    shared = nn.BatchNorm1d(4)
    model = nn.Sequential(
        nn.Linear(4, 4), shared, nn.ReLU(), nn.Sequential(shared, nn.BatchNorm1d(4)), shared
    )
    model[3].eval()
    before = dict(model.named_parameters())
    state = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    converted = SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert model[1] is model[4] is model[3][0]
    assert [type(m).__name__ for m in (model[1], model[3][1])] == ["SyncBatchNorm"] * 2
    assert not model[3][1].training
    model.load_state_dict(state)
    assert model.state_dict().keys() == state.keys()
    model.train()
    model(torch.randn(3, 4)).square().sum().backward()
    weight = model[1].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model[1].weight, weight)
    again = SyncBatchNorm.convert_sync_batchnorm(model)
    assert again.state_dict().keys() == state.keys()


def check_a_frozen_input_and_a_compiled_model():
    norm = nn.BatchNorm1d(3).double()
    synced = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(norm))
    compiled = torch.compile(synced, backend="eager")
    parts = batches((3,), [4, 2])
    expected = norm(torch.cat(parts))
    start = sum(len(part) for part in parts[: hvd.rank()])
    out = compiled(parts[hvd.rank()])
    near(out, expected[start : start + len(out)], torch.float64)
    out.sum().backward()


def check_bad_input_is_refused():
    with pytest.raises(HvdkitError, match="more than one value per channel over all ranks, got 1"):
        SyncBatchNorm(3)(torch.randn(1 - hvd.rank(), 3))
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        SyncBatchNorm(3)(torch.randn(3))
    lazy = nn.Sequential(nn.LazyBatchNorm1d())
    with pytest.raises(HvdkitError, match="lazy and has seen no input"):
        SyncBatchNorm.convert_sync_batchnorm(lazy)


if __name__ == "__main__":
    run_checks(globals())
