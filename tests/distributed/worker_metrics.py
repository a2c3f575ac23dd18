"""Checks of average_metrics, check_replicas, average_buffers and the learning-rate functions."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import hvdkit.torch as hvd
from hvdkit.errors import HvdkitError, RankDisagreementError, ReplicaMismatchError
from hvdkit.torch.buffers import average_buffers
from hvdkit.torch.collectives import allgather_object
from hvdkit.torch.metrics import average_metrics
from hvdkit.torch.replicas import check_replicas
from hvdkit.torch.schedule import scale_learning_rate, warmup
from tests.distributed.worker import run_checks


def same_message_everywhere(caught):
    return len(set(allgather_object(str(caught.value), name="messages"))) == 1


def check_the_plain_mean_over_ranks():
    rank, size = hvd.rank(), hvd.size()
    metrics = {"loss": rank + 1.0, "steps": 3, "accuracy": torch.tensor([[rank / 8]])}
    if rank:
        metrics = dict(reversed(metrics.items()))
    metrics["top5"] = np.float32(rank)
    result = average_metrics(metrics)
    assert result == {
        "loss": (size + 1) / 2,
        "steps": 3.0,
        "accuracy": (size - 1) / 16,
        "top5": (size - 1) / 2,
    }
    assert list(result) == list(metrics)
    assert all(type(value) is float for value in result.values())
    assert average_metrics({}) == {}


def check_the_mean_weighted_by_count():
    rank, size = hvd.rank(), hvd.size()
    result = average_metrics({"loss": rank + 1.0}, count=10 * rank + 1)
    weights = [10 * r + 1 for r in range(size)]
    assert result["loss"] == pytest.approx(
        sum((r + 1) * w for r, w in enumerate(weights)) / sum(weights)
    )


def check_a_rank_without_samples_has_no_say():
    """Its NaN does not poison; a NaN that was measured does; no sample at all is NaN."""
    first = hvd.rank() == 0
    result = average_metrics({"loss": math.nan if first else 3.0}, count=0 if first else 5)
    assert result == {"loss": 3.0}
    assert math.isnan(average_metrics({"loss": math.nan if first else 3.0}, count=5)["loss"])
    assert math.isnan(average_metrics({"loss": 1.0}, count=0)["loss"])


def check_ranks_get_the_same_bits():
    values = average_metrics({"x": 0.1 * (1 + hvd.rank())}, count=0.3 + hvd.rank())
    assert len(set(allgather_object(values["x"].hex(), name="bits"))) == 1


def check_metrics_that_do_not_fit_are_refused_on_every_rank():
    odd = hvd.rank() == 1
    with pytest.raises(
        RankDisagreementError, match=r"rank 0 gave \['a'\].*rank 1 gave \['b'\]"
    ) as caught:
        average_metrics({"b" if odd else "a": 1.0})
    assert same_message_everywhere(caught)
    with pytest.raises(RankDisagreementError, match="rank 0 gave no count and rank 1 gave a count"):
        average_metrics({"a": 1.0}, count=3 if odd else None)
    for bad, match in ((torch.ones(2), "'a' is no number"), ("high", "'a' is no number")):
        with pytest.raises(HvdkitError, match=f"rank 1: metric {match}") as caught:
            average_metrics({"a": bad if odd else 1.0})
        assert same_message_everywhere(caught)
    for count in (-1, math.nan, math.inf):
        with pytest.raises(HvdkitError, match="rank 1: count must be"):
            average_metrics({"a": 1.0}, count=count if odd else 1)


class Assorted(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(3, 2).bfloat16()
        self.tied = nn.Linear(3, 2).bfloat16()
        self.tied.weight = self.linear.weight
        self.empty = nn.Parameter(torch.randn(0, 4))
        self.turned = nn.Parameter(torch.randn(3, 4).t())
        self.norm = nn.BatchNorm1d(2)


def check_equal_replicas_pass():
    model = Assorted()
    assert check_replicas(model) is None
    assert check_replicas(model, buffers=True) is None


def check_the_first_difference_is_named_with_its_ranks():
    for name in ("linear.weight", "tied.bias", "turned", "norm.weight"):
        model = Assorted()
        parameter = model.get_parameter(name)
        if hvd.rank() == 1:
            parameter.data.view(-1)[0:1].mul_(1 + 2**-7) if parameter.is_contiguous() else (
                parameter.data.t()[0, 0].add_(1e-6)
            )
            model.norm.bias.data.add_(1)
        with pytest.raises(
            ReplicaMismatchError, match=f"first at '{name}': rank 0 has .*; rank 1 has "
        ) as caught:
            check_replicas(model)
        assert same_message_everywhere(caught)


def check_buffers_are_compared_on_request():
    model = Assorted()
    model.norm.running_mean += hvd.rank()
    check_replicas(model)
    with pytest.raises(ReplicaMismatchError, match=r"norm\.running_mean"):
        check_replicas(model, buffers=True)


def check_a_sign_of_zero_is_a_difference_and_nan_is_none():
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(math.nan)
        model.bias.fill_(0.0)
        check_replicas(model)
        model.bias.fill_(-0.0 if hvd.rank() else 0.0)
    with pytest.raises(ReplicaMismatchError, match="'bias'"):
        check_replicas(model)


def check_other_models_are_named_not_waited_for():
    with pytest.raises(ReplicaMismatchError, match=r"'weight': .*\(2, 3\).*\(2, 4\)"):
        check_replicas(nn.Linear(3 + hvd.rank(), 2))
    torch.manual_seed(0)
    with pytest.raises(ReplicaMismatchError, match="rank 1 has nothing"):
        check_replicas(nn.Linear(3, 2, bias=hvd.rank() == 0))
    with pytest.raises(HvdkitError, match="no data to compare; run one forward pass"):
        check_replicas(nn.Linear(2, 2) if hvd.rank() else nn.LazyLinear(2))


def check_buffers_become_their_mean():
    rank, size = hvd.rank(), hvd.size()
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(2).half())
    model.register_buffer("narrow", torch.tensor([300.0 * (rank + 1)]).bfloat16())
    model.register_buffer("wave", torch.tensor([1j * rank, 2.0]))
    model.register_buffer("wide", torch.tensor([[float(rank)]]).expand(1, 3))
    model.register_buffer("constant", torch.full((5,), 0.1), persistent=False)
    model.register_buffer("table", torch.arange(3) + 10 * rank)
    model.register_buffer("flag", torch.tensor(rank == 0))
    model.register_buffer("empty", torch.empty(0))
    model[0].running_mean += rank
    model[0].running_var.mul_(2.0**rank)
    model[0].num_batches_tracked += 5 * rank
    model[1].running_mean.fill_(60000)
    average_buffers(model)
    assert model[0].running_mean.tolist() == [(size - 1) / 2] * 3
    assert model[0].running_var.tolist() == [(2.0**size - 1) / size] * 3
    assert model[0].num_batches_tracked.item() == 5 * (size - 1)
    assert model[1].running_mean.tolist() == torch.full((2,), 60000.0).half().tolist()
    mean = torch.tensor(300.0 * (size + 1) / 2).bfloat16()
    assert model.narrow.tolist() == [mean.item()]
    assert model.wave.tolist() == [1j * (size - 1) / 2, 2.0]
    assert model.wide.tolist() == [[(size - 1) / 2] * 3]
    assert model.constant.tolist() == torch.full((5,), 0.1).tolist()
    assert model.table.tolist() == [10 * rank + i for i in range(3)]
    assert model.flag.item() == (rank == 0)
    average_buffers(nn.Linear(2, 2))


def check_buffers_that_differ_in_kind_are_refused_on_every_rank():
    with pytest.raises(RankDisagreementError, match=r"'running_mean': .*\(3,\).*\(4,\)") as caught:
        average_buffers(nn.BatchNorm1d(3 + hvd.rank()))
    assert same_message_everywhere(caught)


def check_the_rate_follows_the_effective_batch():
    size = hvd.size()
    assert scale_learning_rate(0.1) == pytest.approx(0.1 * size)
    assert scale_learning_rate(0.1, "sqrt", 8) == pytest.approx(0.1 * math.sqrt(8 * size))
    assert scale_learning_rate(0.1, backward_passes_per_step=3) == pytest.approx(0.3 * size)
    assert scale_learning_rate(0.1, "none", 5) == 0.1
    with pytest.raises(HvdkitError, match="unknown scaling rule"):
        scale_learning_rate(0.1, "cubic")


def check_warm_up_rises_from_one_workers_rate():
    size = hvd.size()
    for steps in (4, 1, 0):
        parameter = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([parameter], lr=0.1 * size)
        schedule = warmup(optimizer, steps)
        rates = []
        for _ in range(6):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        start = 1 / size
        factors = [min(1, start + (1 - start) * s / steps) if steps else 1 for s in range(6)]
        assert rates == pytest.approx([0.1 * size * factor for factor in factors])
    with pytest.raises(HvdkitError, match="at least 0 steps"):
        warmup(optimizer, -1)


if __name__ == "__main__":
    run_checks(globals())
