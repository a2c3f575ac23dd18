"""Ranks that disagree are told so alike, and replicas that differ are found and mended; PyTorch."""

import gc
import logging
import math
import os
import weakref

import pytest
import torch
from torch import nn

import hvdkit.torch as hvd
from hvdkit.errors import HvdkitError, RankDisagreementError, ReplicaMismatchError
from hvdkit.torch.collectives import allgather_object
from tests.distributed.worker import run_checks


def same_everywhere(obj):
    return len(set(allgather_object(str(obj), name="tests.same"))) == 1


def odd_ranks():
    """All but the one with the highest rank hold alike; with two ranks, the first is trusted."""
    return (hvd.size() - 1,)


def is_odd():
    return hvd.rank() == hvd.size() - 1


def sides(first, second):
    """The pattern of a message that names the ranks on each side."""
    last = hvd.size() - 1
    alike = "rank 0 has" if last == 1 else f"ranks {', '.join(map(str, range(last)))} have"
    return f"{alike} {first}.*; rank {last} has {second}"


def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def train(model, optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.full((6, 4), 1.0 + hvd.rank())).square().sum().backward()
        optimizer.step()


def fails(match, call, error=RankDisagreementError):
    with pytest.raises(error, match=match) as caught:
        call()
    assert same_everywhere(caught.value), str(caught.value)
    return caught.value


# -- agreement ---------------------------------------------------------------------------------


def check_one_rank_with_something_else_is_named_at_construction():
    def wrap(model, kind=torch.optim.SGD, split=False, **options):
        params = list(model.parameters())
        groups = [{"params": params[:1]}, {"params": params[1:]}] if split else params
        optimizer = kind(groups, lr=0.1)
        return hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)

    odd = is_odd()
    fails(
        sides(r"0\.weight \[5, 4\] float32", r"0\.weight \[6, 4\]"),
        lambda: wrap(nn.Sequential(nn.Linear(4, 5 + odd))),
    )
    fails(
        sides("0.weight.* float32", ".* float64"),
        lambda: wrap(build().double() if odd else build()),
    )
    fails(
        sides("torch.optim.sgd.SGD", "torch.optim.adam.Adam"),
        lambda: wrap(build(), torch.optim.Adam if odd else torch.optim.SGD),
    )
    fails(f"'number of parameter groups': {sides('1', '2')}", lambda: wrap(build(), split=odd))
    version = torch.__version__
    try:
        if odd:
            torch.__version__ = "1.2.3"
        fails(
            f"'version of PyTorch': {sides(version.partition('+')[0], '1.2.3')}",
            lambda: wrap(build(), torch.optim.Adam if odd else torch.optim.SGD),
        )
    finally:
        torch.__version__ = version
    wrap(build())


def check_hyper_parameters_are_compared_at_the_first_reduction():
    def start(**options):
        model = build()
        optimizer = torch.optim.Adam(model.parameters(), **{"lr": 0.1, **options})
        return model, hvd.DistributedOptimizer(optimizer, model.named_parameters())

    odd = is_odd()
    for label, options, first, second in [
        ("lr", {"lr": 0.2 if odd else 0.1}, "0.1", "0.2"),
        ("lr", {"lr": torch.tensor(0.25 if odd else 0.5)}, "0.5", "0.25"),
        ("betas", {"betas": (0.9, 0.9 if odd else 0.99)}, r"\(0.9, 0.99\)", r"\(0.9, 0.9\)"),
        ("amsgrad", {"amsgrad": odd}, "False", "True"),
        ("weight_decay", {"weight_decay": 1 if odd else 0}, "0", "1"),
    ]:
        model, optimizer = start(**options)
        fails(
            f"'{label} of parameter group 0': {sides(first, second)}; broadcast_initial_state",
            lambda: train(model, optimizer),  # noqa: B023
        )
        model, optimizer = start(**options)
        hvd.broadcast_initial_state(model, optimizer)
        train(model, optimizer, 2)
        hvd.check_replicas(model, optimizer=optimizer)


def check_what_changes_no_number_may_differ():
    odd = is_odd()
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1 if odd else 1.0, foreach=odd)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    if odd:
        optimizer.param_groups[0]["initial_lr"] = 7.0
        optimizer.param_groups[0]["note"] = "mine"
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if not odd else None
    for _ in range(3):
        train(model, optimizer)
        if scheduler is not None:
            scheduler.step()
        else:
            optimizer.param_groups[0]["lr"] *= 0.5
    hvd.check_replicas(model)


def check_rates_that_part_later_are_not_the_plans_business():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    train(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.1 + 0.1 * is_odd()
    train(model, optimizer)  # as with Horovod
    error = fails("'0.weight': ", lambda: hvd.check_replicas(model), ReplicaMismatchError)
    assert error.ranks == odd_ranks()
    error = fails(
        f"'lr of parameter group 0': {sides('0.1', '0.2')}; largest difference from rank 0: 0.1",
        lambda: hvd.check_replicas(nn.Module(), optimizer=optimizer),
        ReplicaMismatchError,
    )
    assert error.largest_difference == pytest.approx(0.1)


# -- replicas ----------------------------------------------------------------------------------


def make(dtype, values):
    holder = nn.Module()
    holder.register_buffer("equal", torch.ones(3))
    holder.register_buffer("x", torch.tensor(values, dtype=dtype))
    return holder


def check_the_largest_difference_is_told_for_every_dtype():
    cases = [
        (torch.float32, [1.0, -2.0, 3.0], [1.0, 0.5, 3.25], 2.5),
        (torch.float64, [1e300, 0.0], [-1e300, 0.0], 2e300),
        (torch.bfloat16, [1.0, 2.0], [1.0, 4.0], 2.0),
        (torch.float8_e5m2, [1.0, 2.0], [1.0, 4.0], 2.0),
        (torch.float16, [math.inf, 1.0], [math.inf, 2.0], 1.0),
        (torch.float32, [math.inf, 1.0], [-math.inf, 2.0], math.inf),
        (torch.float32, [math.nan, 1.0], [math.nan, 3.0], 2.0),
        (torch.float32, [math.nan, 1.0], [0.0, 1.0], math.nan),
        (torch.float32, [0.0], [-0.0], 0.0),
        (torch.complex64, [1j, 2.0], [1j, 2.0 + 3j], 3.0),
        (torch.int64, [2**62, 5], [-(2**62), 5], 2.0**63),
        (torch.int64, [2**62, 5], [2**62 + 1, 5], 1.0),
        (torch.uint8, [255], [0], 255.0),
        (torch.bool, [True, False], [True, True], 1.0),
    ]
    for dtype, values, others, expected in cases:
        model = make(dtype, others if is_odd() else values)
        error = fails(
            f"'x': {sides(str(dtype), str(dtype))}.*largest difference from rank 0: ",
            lambda: hvd.check_replicas(model, buffers=True),  # noqa: B023
            ReplicaMismatchError,
        )
        assert (error.name, error.ranks) == ("x", odd_ranks())
        assert str(error.largest_difference) == str(expected), (dtype, values, others)


def check_shapes_that_differ_are_told_without_a_difference():
    model = make(torch.float32, [1.0, 2.0] if is_odd() else [1.0])
    error = fails(
        f"'x': {sides(r'torch.float32 .1,.', r'torch.float32 .2,.')}",
        lambda: hvd.check_replicas(model, buffers=True),
        ReplicaMismatchError,
    )
    assert error.largest_difference is None


def check_the_majority_is_the_reference():
    model = build()
    with torch.no_grad():
        model[2].bias[1] += 1.0 * (hvd.rank() == 0)
    error = fails(r"first at '2\.bias'", lambda: hvd.check_replicas(model), ReplicaMismatchError)
    assert error.largest_difference == pytest.approx(1.0)
    if hvd.size() == 3:
        assert error.ranks == (0,)
        assert "largest difference from rank 1: 1 (on rank 0)" in str(error)


def check_every_small_change_is_found():
    torch.manual_seed(5)
    big = torch.randn(300_001)
    half = torch.randn(200_003).bfloat16()

    def swap(a, b):
        return lambda t: t.index_copy_(0, torch.tensor([a, b]), t[[b, a]].clone())

    def flip(*places):
        return lambda t: t.index_copy_(0, torch.tensor(places), -t[list(places)])

    for number, (base, change) in enumerate(
        [
            (big, swap(0, 1)),
            (big, swap(7, 7 + 65536)),
            (big, swap(3, 300_000)),
            (big, flip(11, 12)),
            (big, flip(11, 11 + 65536, 11 + 2 * 65536, 11 + 3 * 65536)),
            (big, lambda t: t.view(torch.int32)[299_999:].bitwise_xor_(1)),
            (half, swap(0, 1)),
            (half, flip(200_002)),
            (half, flip(0, 2)),
        ]
    ):
        model = nn.Module()
        model.register_buffer("small", torch.ones(3))
        model.register_buffer("x", base.clone())
        hvd.check_replicas(model, buffers=True)
        if is_odd():
            change(model.x)
            assert not torch.equal(model.x, base), number
        fails("first at 'x'", lambda: hvd.check_replicas(model, True), ReplicaMismatchError)  # noqa: B023


def check_optimizer_state_is_compared():
    for kind, key in [
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), "momentum_buffer"),
        (lambda p: torch.optim.Adam(p, 0.1), "exp_avg_sq"),
    ]:
        model = build()
        optimizer = hvd.DistributedOptimizer(kind(model.parameters()), model.named_parameters())
        train(model, optimizer, 2)
        hvd.check_replicas(model, optimizer=optimizer)
        if is_odd():
            optimizer.state[model[2].weight][key][1, 1] += 0.5
            # The order in which state was made is no difference.
            optimizer.state[model[0].weight] = optimizer.state.pop(model[0].weight)
        hvd.check_replicas(model)
        error = fails(
            rf"'{key} of 2\.weight'",
            lambda: hvd.check_replicas(model, optimizer=optimizer),  # noqa: B023
            ReplicaMismatchError,
        )
        assert error.largest_difference == pytest.approx(0.5)
        hvd.broadcast_initial_state(model, optimizer)
        if is_odd():
            del optimizer.state[model[2].bias]
        fails(
            f"'{'step' if key == 'exp_avg_sq' else key}.* of 2.bias'|nothing",
            lambda: hvd.check_replicas(model, optimizer=optimizer),  # noqa: B023
            ReplicaMismatchError,
        )


# -- the periodic check ------------------------------------------------------------------------


class Heard(logging.Handler):
    """What logging was told."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("hvdkit").addHandler(self)
        return self.lines

    def __exit__(self, *_):
        logging.getLogger("hvdkit").removeHandler(self)


def start(wrap=True, kind=None, **options):
    model = build()
    optimizer = (kind or (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)))(model.parameters())
    if wrap:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    return model, optimizer


def spoil(model):
    if is_odd():
        with torch.no_grad():
            model[0].weight[0, 0] += 1.0


def check_a_periodic_check_raises_on_every_rank():
    model, optimizer = start()
    check = hvd.ReplicaCheck(model, optimizer, steps=3)
    train(model, optimizer, 4)
    spoil(model)
    train(model, optimizer)
    with Heard() as lines:
        error = fails(r"0\.weight", lambda: train(model, optimizer), ReplicaMismatchError)
    assert error.ranks == odd_ranks()
    assert [line for line in lines if "replica_mismatch: step 6: replicas differ" in line] == (
        lines if hvd.rank() == 0 else []
    )
    assert bool(lines) == (hvd.rank() == 0)
    assert (check.steps_seen, check.mismatches) == (6, 1)
    check.remove()
    train(model, optimizer, 3)
    assert check.steps_seen == 6


def check_resynchronizing_goes_on_from_the_first_rank():
    for buffers in (False, True):
        model, optimizer = start()
        check = hvd.ReplicaCheck(model, optimizer, steps=2, buffers=buffers, on_mismatch="resync")
        if buffers:
            model[1].eval()
        train(model, optimizer)
        spoil(model)
        if is_odd():
            optimizer.state[model[2].bias]["momentum_buffer"].fill_(9.0)
            model[1].running_mean.fill_(3.0)
        mean = model[1].running_mean.clone()
        before = allgather_object(model[0].weight.tolist(), name="before")
        train(model, optimizer)
        assert check.mismatches == 1
        hvd.check_replicas(model, buffers, optimizer=optimizer)
        if buffers:  # what is compared is given to all, and nothing else
            assert torch.equal(model[1].running_mean, mean) != is_odd()
        elif is_odd():
            assert float(model[1].running_mean.mean().detach()) > 2
        assert before[0] != model[0].weight.tolist()
        train(model, optimizer, 4)
        assert check.mismatches == 1
        hvd.check_replicas(model, buffers, optimizer=optimizer)


def check_rolling_back_restores_the_checkpoint():
    folder = os.path.join(os.environ["HVDKIT_TEST_SCRATCH"], f"rollback{hvd.size()}")
    model, optimizer = start()
    store = hvd.CheckpointStore(folder)
    train(model, optimizer, 2)
    store.save(2, model, optimizer, epoch=1)
    kept = [p.detach().clone() for p in model.parameters()]
    check = hvd.ReplicaCheck(model, optimizer, steps=2, on_mismatch="rollback", store=store)
    spoil(model)
    with Heard() as lines:
        train(model, optimizer, 2)
    assert (check.restored["epoch"], check.restored["step"]) == (1, 2)
    assert all(torch.equal(a, b) for a, b in zip(kept, model.parameters(), strict=True))
    assert any("rollback: step 2" in line for line in lines) == (hvd.rank() == 0)
    train(model, optimizer, 4)
    assert check.mismatches == 1
    with pytest.raises(HvdkitError, match="needs store"):
        hvd.ReplicaCheck(model, optimizer, on_mismatch="rollback")
    with pytest.raises(HvdkitError, match="on_mismatch must be one of"):
        hvd.ReplicaCheck(model, optimizer, on_mismatch="ignore")
    with pytest.raises(HvdkitError, match="at least 1"):
        hvd.ReplicaCheck(model, optimizer, steps=0)


def check_steps_are_counted_whichever_way_they_are_made():
    # Accumulation: one step for several passes.
    model, optimizer = start(backward_passes_per_step=2)
    check = hvd.ReplicaCheck(model, optimizer, steps=2)
    for _ in range(4):
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert check.steps_seen == 4
    # Closures that are called several times.
    model, optimizer = start(kind=lambda p: torch.optim.LBFGS(p, max_iter=3))
    check = hvd.ReplicaCheck(model, optimizer, steps=1)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.full((6, 4), 1.0 + hvd.rank())).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert check.steps_seen == 3
    # GradScaler: what it skips on all is not counted.
    model, optimizer = start()
    check = hvd.ReplicaCheck(model, optimizer, steps=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for bad in (False, True, False):
        optimizer.zero_grad()
        value = math.inf if bad and is_odd() else 1.0
        scaler.scale(model(torch.full((2, 4), value)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        if bad:
            model[1].reset_running_stats()
    assert check.steps_seen == 2
    # A plain optimizer, and none at all.
    model, optimizer = start(wrap=False)
    check = hvd.ReplicaCheck(model, optimizer, steps=1)
    loop = hvd.ReplicaCheck(model, steps=2)
    spoil(model)
    model(torch.ones(2, 4)).sum().backward()
    fails(r"0\.weight", optimizer.step, ReplicaMismatchError)
    loop.step()
    fails(r"0\.weight", loop.step, ReplicaMismatchError)


def check_options_that_differ_are_told_in_the_first_step():
    model, optimizer = start()
    check = hvd.ReplicaCheck(model, optimizer, steps=5 if is_odd() else 4)
    fails(f"ReplicaCheck must.*'steps': {sides('4', '5')}", lambda: train(model, optimizer))
    check.remove()


def check_the_check_holds_no_optimizer():
    model, optimizer = start()
    check = hvd.ReplicaCheck(model, optimizer, steps=1)
    train(model, optimizer)
    alive = weakref.ref(optimizer)
    gc.collect()
    gc.disable()
    try:
        del optimizer
        assert alive() is None
    finally:
        gc.enable()
    check.check()


if __name__ == "__main__":
    run_checks(globals())
