"""Rollback, and what HealthMonitor does when one rank's loss or gradient is not finite."""

import gc
import json
import os
import time
import warnings
import weakref
from pathlib import Path

import pytest
import torch

import hvdkit.torch as hvd
from hvdkit.errors import HvdkitError, NonFiniteError, RankDisagreementError
from hvdkit.torch.rollback import roll_back
from tests.distributed.training import (
    assert_equal_models,
    assert_equal_replicas,
    build_model,
    compute_loss,
    make_batches,
    take_part,
    take_steps,
)
from tests.distributed.worker import run_checks

NAN, INF = float("nan"), float("inf")
# Made and removed by the test: a check that fails ends its process at once.
SCRATCH = Path(os.environ["HVDKIT_TEST_SCRATCH"])


def _make(name, lr=0.1, optimizer=torch.optim.Adam, momentum=None, **options):
    model = build_model()
    own = {} if momentum is None else {"momentum": momentum}
    wrapped = hvd.DistributedOptimizer(
        optimizer(model.parameters(), lr=lr, **own), model.named_parameters(), **options
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
        lambda optimizer: schedulers.CyclicLR(optimizer, 0.05, 0.4, 3),
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
                f"rate{number}.{factor}", optimizer=torch.optim.SGD, momentum=0.9
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


def _culprit():
    """Return the rank that has the trouble: the last one."""
    return hvd.size() - 1


def _monitor(model, optimizer, name, **options):
    """Return a monitor with window off, and a function that reads what it told."""
    path = SCRATCH / f"{name}.jsonl"
    options = {"window": None, **options}
    monitor = hvd.HealthMonitor(model, optimizer, events=hvd.EventLog(path), **options)

    def read():
        hvd.barrier()
        return [json.loads(line) for line in path.read_text().splitlines()]

    return monitor, read


def _spoil(param, value=NAN):
    """Make one number of the next gradient of ``param`` bad, on the culprit."""

    def hook(grad):
        handle.remove()
        if hvd.rank() != _culprit():
            return grad
        grad = grad.clone()
        grad.view(-1)[1] = value
        return grad

    handle = param.register_hook(hook)


def _pass(model, optimizer, monitor, batch, bad=False, step=True):
    """One pass, whose loss is not finite on the culprit if it is bad."""
    loss = compute_loss(model, take_part(batch))
    if bad and hvd.rank() == _culprit():
        loss = loss * INF
    monitor.watch(loss).backward()
    if step:
        optimizer.step()
        optimizer.zero_grad()


def check_a_healthy_run_is_the_same_to_the_last_bit():
    for options in ({}, {"clip_grad_norm": 0.1}, {"bucket_size_mb": 1e-5}):
        models = []
        for watched in (False, True):
            model, optimizer, _ = _make(
                "healthy", optimizer=torch.optim.SGD, momentum=0.9, **options
            )
            monitor = hvd.HealthMonitor(model, optimizer, window=2) if watched else None
            for batch in make_batches(5):
                loss = compute_loss(model, take_part(batch))
                (monitor.watch(loss) if monitor else loss).backward()
                optimizer.step()
                optimizer.zero_grad()
            models.append(_copy(model, optimizer))
        if hvd.size() == 2:
            assert _equal(*models)
        for ours, theirs in zip(*models, strict=True):  # three may be added in another order
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


def check_a_loss_on_one_rank_skips_the_update_on_all():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        model, optimizer, _ = _make("loss", optimizer=torch.optim.SGD, momentum=0.9)
        model.to(dtype)
        monitor, read = _monitor(model, optimizer, f"loss-{dtype}")
        batches = make_batches(3)
        _pass(model, optimizer, monitor, batches[0])
        before = _copy(model, optimizer)
        _pass(model, optimizer, monitor, batches[1], bad=True)
        assert _equal(_copy(model, optimizer), before), dtype
        _pass(model, optimizer, monitor, batches[2])
        assert not _equal(_copy(model, optimizer), before)
        assert_equal_replicas(model)
        [event] = read()
        assert (event["kind"], event["step"], event["rank"]) == ("nonfinite", 1, _culprit())
        assert f"the loss of rank {_culprit()} is inf" in event["message"]
        assert "every rank skips the update" in event["message"]


def check_a_gradient_on_one_rank_skips_the_update_on_all():
    kinds = [
        {},
        {"bucket_size_mb": 1e-5},  # each gradient travels alone
        {"compression": hvd.Compression.fp16},
        {"compression": hvd.Compression.bf16},
        {"op": hvd.Sum},
        {"clip_grad_norm": 1.0},
        {"backward_passes_per_step": 2, "average_aggregated_gradients": True},
    ]
    for number, options in enumerate(kinds):
        passes = options.get("backward_passes_per_step", 1)
        for value in (NAN, INF, -INF):
            model, optimizer, _ = _make("gradient", **options)
            monitor, read = _monitor(model, optimizer, f"gradient-{number}{value}")
            batches = make_batches(2 * passes)
            for batch in batches[:passes]:
                _pass(model, optimizer, monitor, batch, step=batch is batches[passes - 1])
            before = _copy(model, optimizer)
            _spoil(model[2].weight, value)
            for batch in batches[passes:]:
                _pass(model, optimizer, monitor, batch, step=batch is batches[-1])
            assert _equal(_copy(model, optimizer), before), options
            for batch in batches[:passes]:
                _pass(model, optimizer, monitor, batch, step=batch is batches[passes - 1])
            assert not _equal(_copy(model, optimizer), before)
            assert_equal_replicas(model)
            [event] = read()
            assert event["rank"] == _culprit(), (options, event)
            assert "the gradient of '2.weight' is not finite" in event["message"], event


def check_a_skipped_batch_is_as_one_that_never_was():
    batches = make_batches(4)
    model, optimizer, _ = _make(
        "never", optimizer=torch.optim.SGD, momentum=0.9, clip_grad_norm=0.5
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    monitor, _ = _monitor(model, optimizer, "never")
    reference = build_model()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for number, batch in enumerate(batches):
        _pass(model, optimizer, monitor, batch, bad=number == 2)
        scheduler.step()
        if number == 2:
            plain.param_groups[0]["lr"] = 0.05
            continue
        compute_loss(reference, batch).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        plain.step()
        plain.zero_grad()
        if number == 1:
            plain.param_groups[0]["lr"] = 0.05
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    assert_equal_models(model, reference)


def check_sparse_gradients_are_looked_at():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(20, 4, sparse=True), torch.nn.Linear(4, 3))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    monitor, read = _monitor(model, optimizer, "sparse")

    def train(bad=False):
        rows = model(torch.arange(8).view(2, 4) + hvd.rank())
        loss = rows.square().mean()
        if bad and hvd.rank() == _culprit():
            # reaches the embedding alone
            model[0].weight.register_hook(lambda grad: grad * NAN)
        monitor.watch(loss).backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    before = _copy(model, optimizer)
    train(bad=True)
    assert _equal(_copy(model, optimizer), before)
    [event] = read()
    assert "the gradient of '0.weight' is not finite on rank" in event["message"]
    assert event["rank"] == _culprit()


def check_large_finite_gradients_are_applied():
    """Their sum overflows, which makes the quick look suspicious."""
    model, optimizer, _ = _make("large", optimizer=torch.optim.SGD, lr=1e-30)
    _, read = _monitor(model, optimizer, "large")
    before = _copy(model, optimizer)
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e38)
    optimizer.step()
    assert not _equal(_copy(model, optimizer), before)
    assert read() == []


def check_raise_raises_the_same_error_everywhere():
    model, optimizer, _ = _make("raise")
    monitor, read = _monitor(model, optimizer, "raise", nonfinite="raise")
    batches = make_batches(2)
    _pass(model, optimizer, monitor, batches[0])
    before = _copy(model, optimizer)
    with pytest.raises(NonFiniteError, match=rf"step 1: the loss of rank {_culprit()} is inf"):
        _pass(model, optimizer, monitor, batches[1], bad=True)
    assert _equal(_copy(model, optimizer), before)
    optimizer.zero_grad()
    _spoil(model[0].weight)
    with pytest.raises(NonFiniteError, match=rf"'0.weight' is not finite on rank {_culprit()}"):
        _pass(model, optimizer, monitor, batches[1])
    optimizer.zero_grad()
    _pass(model, optimizer, monitor, batches[1])  # one may go on
    assert_equal_replicas(model)
    assert [event["severity"] for event in read()] == ["error", "error"]


def check_skips_in_a_row_are_limited():
    model, optimizer, _ = _make("limit")
    monitor, _ = _monitor(model, optimizer, "limit", max_skips=2)
    batch = make_batches(1)[0]
    for bad in (True, True, False, True, True):
        _pass(model, optimizer, monitor, batch, bad=bad)
    with pytest.raises(NonFiniteError, match="after 2 skipped updates in a row"):
        _pass(model, optimizer, monitor, batch, bad=True)


def check_rollback_goes_back_with_a_lower_rate_each_time():
    model, optimizer, store = _make("back", lr=0.4)
    options = {"nonfinite": "rollback", "store": store, "max_rollbacks": 3}
    monitor, read = _monitor(model, optimizer, "back", **options)
    batches = make_batches(3)
    _pass(model, optimizer, monitor, batches[0])
    saved = _copy(model, optimizer)
    store.save(1, model, optimizer, epoch=7)
    rates = []
    for _ in range(2):
        _pass(model, optimizer, monitor, batches[1])
        assert monitor.restored is None
        _pass(model, optimizer, monitor, batches[2], bad=True)
        assert monitor.restored == {"epoch": 7, "step": 1}
        assert _equal(_copy(model, optimizer), saved)
        rates.append(optimizer.param_groups[0]["lr"])
    store.save(2, model, optimizer)
    hvd.barrier()
    _pass(model, optimizer, monitor, batches[2], bad=True)
    rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.2, 0.1, 0.05]
    with pytest.raises(NonFiniteError, match=r"after 3 rollbacks"):
        _pass(model, optimizer, monitor, batches[2], bad=True)
    events = read()
    assert [event["kind"] for event in events] == ["nonfinite", "rollback"] * 3 + ["nonfinite"]
    assert events[1]["details"] == {"restored_step": 1, "learning_rates": [0.2]}
    assert_equal_replicas(model)


def check_closures():
    for options in ({}, {"optimizer": torch.optim.SGD}):
        model, optimizer, _ = _make("closure", **options)
        monitor, read = _monitor(model, optimizer, f"closure{len(options)}")
        batches = make_batches(2)

        def step(batch, bad=False, model=model, optimizer=optimizer, monitor=monitor):
            def closure():
                optimizer.zero_grad()
                loss = compute_loss(model, take_part(batch))
                if bad and hvd.rank() == _culprit():
                    loss = loss * NAN
                monitor.watch(loss).backward()
                return loss

            return optimizer.step(closure)

        step(batches[0])
        before = _copy(model, optimizer)
        assert torch.isnan(step(batches[1], bad=True))
        assert _equal(_copy(model, optimizer), before)
        assert torch.isfinite(step(batches[1]))
        assert not _equal(_copy(model, optimizer), before)
        assert_equal_replicas(model)
        assert [event["rank"] for event in read()] == [_culprit()]
    model = build_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(HvdkitError, match="does not go with LBFGS"):
        hvd.HealthMonitor(model, optimizer)
    hvd.HealthMonitor(model, optimizer, nonfinite="raise")


def check_an_optimizer_that_is_dropped_is_gone_at_once():
    model, optimizer, store = _make("dropped")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    monitor = hvd.HealthMonitor(
        model, optimizer, nonfinite="rollback", store=store, scheduler=scheduler
    )
    _pass(model, optimizer, monitor, make_batches(1)[0])
    reference = weakref.ref(optimizer)
    gc.disable()
    del optimizer, scheduler
    assert reference() is None
    gc.enable()


def check_two_optimizers_have_their_own_monitors():
    models = [_make("two"), _make("two")]
    monitors = [
        _monitor(model, optimizer, f"two{number}", window=2)
        for number, (model, optimizer, _) in enumerate(models)
    ]
    before = [_copy(model, optimizer) for model, optimizer, _ in models]
    for number, batch in enumerate(make_batches(4)):
        for which, (model, optimizer, _) in enumerate(models):
            if which == 0 or number % 2:
                _pass(model, optimizer, monitors[which][0], batch, bad=which == 1)
    assert not _equal(_copy(*models[0][:2]), before[0])
    assert _equal(_copy(*models[1][:2]), before[1])
    found = [[event for event in read() if event["kind"] == "nonfinite"] for _, read in monitors]
    assert [len(events) for events in found] == [0, 2]


def check_clipping_by_hand():
    model, optimizer, _ = _make("hand")
    monitor, read = _monitor(model, optimizer, "hand")
    before = _copy(model, optimizer)
    for value in (NAN, INF):
        _spoil(model[4].bias, value)
        _pass(model, optimizer, monitor, make_batches(1)[0], step=False)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert _equal(_copy(model, optimizer), before)
    assert [event["rank"] for event in read()] == [_culprit()] * 2


def check_loss_scaling_skips_by_itself():
    for fused in (False, True):
        model = build_model()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, fused=fused))
        monitor, read = _monitor(model, optimizer, f"scaler{fused}", nonfinite="raise", window=3)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        before = _copy(model, optimizer)
        for bad in (True, False, False, False):
            loss = compute_loss(model, take_part(make_batches(1)[0]))
            if bad and hvd.rank() == _culprit():
                loss = loss * INF
            scaler.scale(monitor.watch(loss)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if bad:
                assert _equal(_copy(model, optimizer), before)
                assert scaler.get_scale() == 512.0
        assert not _equal(_copy(model, optimizer), before)
        assert monitor.steps == 4
        [event] = [event for event in read() if event["kind"] == "nonfinite"]
        assert "GradScaler skips" in event["message"]
        assert (event["severity"], event["step"]) == ("info", 0)
        assert_equal_replicas(model)


def check_a_process_set_decides_for_itself():
    process_set = hvd.add_process_set([0])
    model = build_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), process_set=process_set
    )
    monitor = hvd.HealthMonitor(model, optimizer, window=2)
    before = _copy(model, optimizer)
    for number in range(4):
        _pass(model, optimizer, monitor, make_batches(1)[0], bad=number < 2)
        assert _equal(_copy(model, optimizer), before) == (number < 2 and hvd.rank() == _culprit())
    hvd.remove_process_set(process_set)


def check_a_straggler_a_spike_and_figures_are_found_in_windows():
    model, optimizer, _ = _make("window", lr=1e-3)
    board = _Board()
    events = hvd.EventLog(SCRATCH / "window.jsonl", tensorboard=board)
    # a busy machine slows ranks down too, by less
    monitor = hvd.HealthMonitor(model, optimizer, window=30, straggler_factor=6.0, events=events)
    batch = make_batches(1)[0]
    for number in range(90):
        loss = compute_loss(model, take_part(batch)) * (1000 if number == 40 else 1)
        monitor.watch(loss).backward()
        if hvd.rank() == 1 and number >= 60:
            time.sleep(0.05)
        optimizer.step()
        optimizer.zero_grad()
    hvd.barrier()
    told = [json.loads(line) for line in (SCRATCH / "window.jsonl").read_text().splitlines()]
    assert [event["step"] for event in told if event["kind"] == "loss_spike"] == [40]
    assert [e["rank"] for e in told if e["kind"] == "straggler" and e["step"] == 89] == [1]
    if hvd.rank() == 0:
        assert {(name, step) for name, _, step in board.scalars} == {
            (f"hvdkit/{name}/{rank}", step)
            for name in monitor_figures()
            for rank in range(hvd.size())
            for step in (29, 59, 89)
        }
        last = {name: value for name, value, step in board.scalars if step == 89}
        assert last["hvdkit/step_time_seconds/0"] > 0.05
        assert last["hvdkit/wait_share/0"] > 0.5 > last["hvdkit/wait_share/1"]
        assert 2**25 < last["hvdkit/memory_bytes/1"] < 2**34


def monitor_figures():
    return ("step_time_seconds", "wait_share", "memory_bytes", "device_memory_bytes", "loss")


class _Board:
    """Stands for TensorBoard, of which only the writer's two methods are called."""

    def __init__(self):
        self.scalars = []

    def add_scalar(self, *args):
        self.scalars.append(args)

    def add_text(self, *args):
        pass

    def flush(self):
        pass


def check_without_windows_nothing_piles_up():
    model, optimizer, _ = _make("piles")
    monitor = hvd.HealthMonitor(model, optimizer, window=None)
    for batch in make_batches(30):
        _pass(model, optimizer, monitor, batch, bad=False)
    held = [len(value) for value in vars(monitor).values() if isinstance(value, list)]
    assert monitor.steps == 30
    assert sum(held) < 20, held


def check_arguments():
    model, optimizer, _ = _make("arguments")
    with pytest.raises(HvdkitError, match="needs an optimizer made by DistributedOptimizer"):
        hvd.HealthMonitor(model, torch.optim.SGD(model.parameters(), 0.1))
    for wrong, text in [
        ({"nonfinite": "ignore"}, "nonfinite must be one of skip, raise, rollback"),
        ({"nonfinite": "rollback"}, "needs store"),
        ({"window": 0}, "window must be at least 1"),
        ({"learning_rate_factor": 2.0}, "learning_rate_factor must be"),
    ]:
        with pytest.raises(HvdkitError, match=text):
            hvd.HealthMonitor(model, optimizer, **(wrong if hvd.rank() == 1 else {}))
    with pytest.raises(RankDisagreementError, match="'window': rank"):
        hvd.HealthMonitor(model, optimizer, window=10 + (hvd.rank() == 1))


if __name__ == "__main__":
    run_checks(globals())
