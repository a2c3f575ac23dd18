"""Rollback, and what HealthMonitor does when one rank's loss or gradient is not finite."""

import os
import warnings
from pathlib import Path

import pytest
import torch

import hvdkit.torch as hvd
from hvdkit.errors import HvdkitError
from hvdkit.torch.rollback import roll_back
from tests.distributed.training import (
    assert_equal_replicas,
    build_model,
    make_batches,
    take_part,
    take_steps,
)
from tests.distributed.worker import run_checks

NAN, INF = float("nan"), float("inf")
# Made and removed by the test: a check that fails ends its process at once.
SCRATCH = Path(os.environ["HVDKIT_TEST_SCRATCH"])


def _make(name, lr=0.1, optimizer=torch.optim.Adam, **options):
    model = build_model()
    wrapped = hvd.DistributedOptimizer(
        optimizer(model.parameters(), lr=lr), model.named_parameters(), **options
    )
    return model, wrapped, hvd.CheckpointStore(SCRATCH / name, keep=None)


def _train(model, optimizer, steps, seed=1):
    take_steps(model, optimizer, [take_part(batch) for batch in make_batches(steps, seed)])


def _copy(model, optimizer):
    states = [
        value.clone()
        for state in optimizer.state_dict()["state"].values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return [param.detach().clone() for param in model.parameters()] + states


def _equal(ours, theirs):
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def check_rollback_restores_the_newest_good_checkpoint_everywhere():
    model, optimizer, store = _make("newest", lr=0.5)
    _train(model, optimizer, 2)
    good = _copy(model, optimizer)
    store.save(2, model, optimizer, epoch=4)
    _train(model, optimizer, 1)
    store.save(3, model, optimizer)  # is damaged below
    with torch.no_grad():
        model[0].bias[3] = NAN
    store.save(4, model, optimizer)
    if hvd.rank() == 0:
        [third] = [saved for saved in store.checkpoints() if saved.step == 3]
        third.path.write_bytes(third.path.read_bytes()[:-1])
    hvd.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        restored = roll_back(store, model, optimizer, 0.25)
    assert restored == {"epoch": 4, "step": 2}
    assert _equal(_copy(model, optimizer), good)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125]
    texts = [str(one.message) for one in caught if "not going back" in str(one.message)]
    if hvd.rank() == 0:
        assert "step 4: parameter '0.bias' is not finite" in texts[0]
        assert "step 3" in texts[1]
    else:
        assert texts == []
    _train(model, optimizer, 1)
    assert_equal_replicas(model)


def check_rollback_without_a_good_checkpoint_is_an_error_on_every_rank():
    model, optimizer, store = _make("none")
    for _ in range(2):
        with pytest.raises(HvdkitError, match=r"no good checkpoint in .*none to go back to"):
            roll_back(store, model, optimizer)
        with torch.no_grad():
            model[0].weight[0, 0] = INF
        store.save(1, model, optimizer)


def check_a_lowered_rate_survives_schedulers():
    schedulers = torch.optim.lr_scheduler
    makers = [
        lambda optimizer: schedulers.StepLR(optimizer, 2, 0.9),
        lambda optimizer: schedulers.LinearLR(optimizer, 0.5, 1.0, 4),
        lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 20),
        lambda optimizer: schedulers.OneCycleLR(optimizer, 0.4, total_steps=20),
        lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 0.9**step),
        lambda optimizer: schedulers.SequentialLR(
            optimizer,
            [
                schedulers.LinearLR(optimizer, 0.5, 1.0, 3),
                schedulers.LambdaLR(optimizer, lambda step: 0.9**step),
            ],
            [3],
        ),
    ]
    for number, make in enumerate(makers):
        rates = []
        for factor in (1.0, 0.5):
            # momentum, which OneCycleLR cycles as well
            model, optimizer, store = _make(
                f"rate{number}.{factor}",
                optimizer=lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9),
            )
            scheduler = make(optimizer)
            _train(model, optimizer, 1)
            store.save(1, model, optimizer)
            roll_back(store, model, optimizer, factor, scheduler=scheduler)
            seen = []
            for _ in range(6):
                seen.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
                scheduler.step()
            rates.append(seen)
        assert [rate * 0.5 for rate in rates[0]] == pytest.approx(rates[1]), number


if __name__ == "__main__":
    run_checks(globals())
