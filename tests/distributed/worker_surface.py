"""A script changes one word: every public name of horovod.torch is in hvdkit.torch."""

import inspect
import types

import horovod.torch as stock
import torch

import hvdkit.torch as hvd
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


def check_submodules_do_not_hide_functions():
    assert callable(hvd.broadcast)
    assert callable(hvd.gather)
    assert callable(hvd.shard)


if __name__ == "__main__":
    run_checks(globals())
