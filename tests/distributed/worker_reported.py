"""Faults that people reported of stock Horovod, each as a small input (two workers, CPU)."""

import copy

import pytest
import torch

import hvdkit.torch as hvd
from tests.distributed.training import assert_equal_replicas
from tests.distributed.worker import run_checks


def _two_layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))


def _rows(step=0):
    """Other data on each rank and in each step; all of it on request."""
    generator = torch.Generator().manual_seed(100 + step)
    data = torch.randn(hvd.size(), 6, 4, generator=generator)
    return data[hvd.rank()], data.flatten(0, 1)


def _loss(model, x):
    return model(x).pow(2).mean()


def check_c2_step_with_a_closure():
    model, reference = _two_layers(), _two_layers()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        mine, everyones = _rows(step)

        def closure(mine=mine):
            optimizer.zero_grad()
            loss = _loss(model, mine)
            loss.backward()
            return loss

        optimizer.step(closure)
        plain.zero_grad()
        _loss(reference, everyones).backward()
        plain.step()
    assert_equal_replicas(model)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def check_c3_broadcasting_fresh_state_changes_nothing():
    model = _two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    before = copy.deepcopy(model.state_dict())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state_dict()["state"]


def check_c4_unfrozen_after_wrapping():
    model = _two_layers()
    model[0].weight.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model[0].weight.requires_grad_(True)
    start = model[0].weight.detach().clone()
    for step in range(2):
        optimizer.zero_grad()
        _loss(model, _rows(step)[0]).backward()
        optimizer.step()
        assert_equal_replicas(model)
    assert not torch.equal(model[0].weight, start)


def check_c5_a_layer_that_is_never_used():
    used = torch.nn.Linear(4, 1)
    unused = torch.nn.Parameter(torch.ones(3))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([*used.parameters(), unused], lr=0.1, weight_decay=0.1)
    )
    for step in range(2):
        optimizer.zero_grad()
        _loss(used, _rows(step)[0]).backward()
        optimizer.step()
    assert torch.equal(unused.detach(), torch.ones(3))
    optimizer.zero_grad()
    loss = _loss(used, _rows(2)[0])
    if hvd.rank() == 1:
        loss = loss + 4 * unused.sum()
    loss.backward()
    assert torch.equal(unused.grad, torch.full((3,), 2.0))  # the mean of 4 and nothing


def check_c6_grad_scaler_and_a_gradient_that_is_not_finite():
    model = _two_layers()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(4):
        optimizer.zero_grad()
        loss = _loss(model, _rows(step)[0])
        if step == 1 and hvd.rank() == 0:
            loss = loss * float("inf")
        before = [param.detach().clone() for param in model.parameters()]
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert all(same) if step == 1 else not any(same), step
        assert scaler.get_scale() == (256.0 if step < 1 else 128.0)
        assert_equal_replicas(model)


def check_c7_clipping_between_backward_and_step():
    for step in range(5):
        model = _two_layers()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        (_loss(model, _rows(step)[0]) * 10).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        optimizer.step()
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
        assert float((after - before).norm()) == pytest.approx(0.1, abs=1e-5)
        assert_equal_replicas(model)


def check_c8_a_sparse_embedding_on_one_rank_only():
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(6, 2, sparse=True)
    rest = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([*embedding.parameters(), *rest.parameters()], lr=0.1)
    )
    tokens = torch.tensor([1, 1, 4])
    for _ in range(2):
        optimizer.zero_grad()
        inputs = embedding(tokens) if hvd.rank() == 0 else torch.ones(3, 2)
        rest(inputs).sum().backward()
        expected = torch.zeros(6, 2).index_add(0, tokens, rest.weight.detach().expand(3, 2)) / 2
        torch.testing.assert_close(embedding.weight.grad.to_dense(), expected)
        optimizer.step()
        assert_equal_replicas(embedding)


def check_c11_zero_grad_takes_set_to_none():
    model = _two_layers()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step, set_to_none in enumerate([True, False, True]):
        optimizer.zero_grad(set_to_none=set_to_none)
        assert all((p.grad is None) == (set_to_none or step == 0) for p in model.parameters())
        _loss(model, _rows(step)[0]).backward()
        optimizer.step()
        assert_equal_replicas(model)


def check_c12_accumulation_averaged_or_summed():
    for average, factor in [(True, 1.0), (False, 2.0)]:
        model, reference = _two_layers(), _two_layers()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            backward_passes_per_step=2,
            average_aggregated_gradients=average,
        )
        for half in _rows()[0].split(3):
            _loss(model, half).backward()
        (_loss(reference, _rows()[1]) * factor).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        optimizer.step()


def check_c14_five_batches_an_epoch_and_steps_of_two():
    for average in [False, True]:
        model, reference = _two_layers(), _two_layers()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05),
            backward_passes_per_step=2,
            average_aggregated_gradients=average,
        )
        plain = torch.optim.SGD(reference.parameters(), lr=0.05)
        passes = []
        for epoch in range(2):
            for batch in range(5):
                step = epoch * 5 + batch
                _loss(model, _rows(step)[0]).backward()
                passes.append(step)
                if batch % 2 == 1:  # the fifth pass of the first epoch is left over
                    optimizer.step()
                    optimizer.zero_grad()
                    for made in passes:
                        factor = 1 / len(passes) if average else 1.0
                        (_loss(reference, _rows(made)[1]) * factor).backward()
                    plain.step()
                    plain.zero_grad()
                    passes = []
        optimizer.step()  # the pass that the second epoch left over
        _loss(reference, _rows(9)[1]).backward()
        plain.step()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
        assert_equal_replicas(model)


if __name__ == "__main__":
    run_checks(globals())
