"""A script changes one word: every public name of horovod.torch is in hvdkit.torch."""

import inspect
import types

import horovod.torch as stock
import pytest
import torch

import hvdkit.torch as hvd
from hvdkit.errors import HvdkitError
from tests.distributed.worker import run_checks


def check_every_public_name_is_there():
    assert hvd.__all__ == sorted(hvd.__all__)
    assert [name for name in hvd.__all__ if not hasattr(hvd, name)] == []
    for name, value in vars(stock).items():
        if name.startswith("_") or (isinstance(value, types.ModuleType) and name != "elastic"):
            continue
        assert name in hvd.__all__, f"horovod.torch.{name} is missing"


def check_signatures_accept_what_horovods_accept():
    for name, theirs in vars(stock).items():
        ours = getattr(hvd, name, None)
        if not inspect.isfunction(theirs) or ours is theirs or name.startswith("_"):
            continue
        mine = inspect.signature(ours).parameters
        for position, (argument, parameter) in enumerate(
            inspect.signature(theirs).parameters.items()
        ):
            assert list(mine)[position] == argument, f"{name}: {argument}"
            if parameter.default is not parameter.empty:
                assert mine[argument].default is not parameter.empty, f"{name}: {argument}"


def check_elastic_state_syncs_without_a_step():
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    before = model.weight.detach().clone()
    state = hvd.elastic.TorchState(
        model=model, optimizer=hvd.DistributedOptimizer(optimizer), batch=hvd.rank()
    )
    if hvd.rank() == 0:
        optimizer.param_groups[0]["lr"] = 0.3
    state.sync()
    assert torch.equal(model.weight, before)
    assert not optimizer.state
    assert (optimizer.param_groups[0]["lr"], state.batch) == (0.3, 0)
    state.restore()
    assert set(stock.elastic.__all__) <= set(hvd.elastic.__all__)


def _make_elastic(passes=2, **options):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, backward_passes_per_step=passes, average_aggregated_gradients=True
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    samplers = {"sampler": hvd.shard(range(12)), "stock": hvd.elastic.ElasticSampler(range(12))}
    return hvd.elastic.TorchState(
        model, optimizer, schedule=schedule, step=0, **samplers, **options
    )


def _pass(state):
    state.model(torch.ones(3, 4)).sum().backward()


def check_elastic_state_goes_back_with_all_that_it_holds():
    state = _make_elastic()
    state.step = 5 + hvd.rank()  # values of now count, as the weights of now do
    state.sync()
    assert state.step == 5
    weights = state.model.weight.detach().clone()
    for _ in range(3):  # a step, and half of one
        _pass(state)
        if state.optimizer.unreduced:
            continue
        state.optimizer.step()
        state.schedule.step()
        state.optimizer.zero_grad()
    state.sampler.advance(2)
    state.step += 1
    assert state.optimizer.param_groups[0]["lr"] == 0.05
    state.restore()  # to what was synchronized: nothing was committed since
    assert torch.equal(state.model.weight, weights)
    assert not state.optimizer.state
    assert state.optimizer.param_groups[0]["lr"] == 0.1
    assert state.schedule.last_epoch == 0
    assert state.sampler.state_dict()["position"] == 0
    assert state.step == 5
    assert state.model.weight.grad is None
    for unreduced in (True, False):  # what broke off does not count as a pass
        _pass(state)
        assert state.optimizer.unreduced == unreduced
    hvd.check_replicas(state.model)


def check_elastic_state_follows_the_workers():
    # As if four times as many had been there.
    state = _make_elastic(learning_rate_rule="linear")
    state.sync()
    state._batches = {"optimizer": 4 * hvd.size() * 2}
    state.stock.num_replicas = 99
    state.on_reset()
    assert state.optimizer.param_groups[0]["lr"] == 0.1 / 4
    assert state.schedule.base_lrs == [0.1 / 4]
    assert state.optimizer.backward_passes_per_step == 2
    assert state.stock.num_replicas == hvd.size()
    state = _make_elastic(learning_rate_rule="linear", keep_global_batch=True)
    state.sync()
    state._batches = state._kept_batches = {"optimizer": 4 * hvd.size() * 2}
    state.on_reset()
    assert state.optimizer.param_groups[0]["lr"] == 0.1
    assert state.optimizer.backward_passes_per_step == 8
    state = _make_elastic()
    state.sync()
    state._batches = {"optimizer": 3}
    state.on_reset()
    assert state.optimizer.param_groups[0]["lr"] == 0.1  # as with Horovod, unless asked for


def check_elastic_state_refuses_what_it_cannot_follow():
    with pytest.raises(HvdkitError, match="unknown scaling rule 'cubic'"):
        _make_elastic(learning_rate_rule="cubic")
    plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(HvdkitError, match="average_aggregated_gradients=True"):
        hvd.elastic.TorchState(optimizer=plain, keep_global_batch=True)


def check_submodules_do_not_hide_functions():
    assert callable(hvd.broadcast)
    assert callable(hvd.gather)
    assert callable(hvd.shard)


if __name__ == "__main__":
    run_checks(globals())
