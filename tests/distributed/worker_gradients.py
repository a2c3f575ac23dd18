"""Gradients that share memory, are changed by hooks, or come from passes within passes."""

import contextlib

import torch
from torch.utils.checkpoint import checkpoint

import hvdkit.torch as hvd
from tests.distributed.training import (
    FEATURES,
    ROWS,
    assert_equal_models,
    build_model,
    compute_loss,
    make_batches,
    take_part,
    take_steps,
)
from tests.distributed.worker import run_checks


def _sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def _compare(build, train, *, factor=1, **options):
    """Run ``train(model, optimizer, rows, scale)`` on this rank's rows and on all rows."""
    model, reference = build(), build()
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters(), **options)
    train(model, optimizer, take_part, 1)
    train(reference, _sgd(reference), lambda batch: batch, factor)
    assert_equal_models(model, reference)


class _Sums(torch.nn.Module):
    """Its parameters' gradients are views of one tensor, which a layer below needs too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.below = torch.nn.Linear(FEATURES, 4)
        self.table = torch.nn.Parameter(torch.randn(ROWS, 4))
        self.flat = torch.nn.Parameter(torch.randn(ROWS * 4))

    def forward(self, x):
        rows = x.view(-1, ROWS, FEATURES)  # with one sequence each, nothing is summed up
        summed = self.below(rows) + self.table[None] + self.flat.view(1, ROWS, 4)
        return (summed.sin() ** 2).mean()


def check_gradients_that_share_memory():
    def train(model, optimizer, part, scale):
        for batch in make_batches(4):
            optimizer.zero_grad()
            (model(part(batch)[0]) * scale).backward()
            optimizer.step()

    _compare(_Sums, train)
    _compare(_Sums, train, op=hvd.Sum, factor=hvd.size())


def check_tensors_assigned_as_gradients_stay_the_callers():
    for op, factor in [(hvd.Average, 1 / hvd.size()), (hvd.Sum, 1)]:
        model, reference = build_model(), build_model()
        optimizer = hvd.DistributedOptimizer(_sgd(model), op=op)
        plain = _sgd(reference)
        mine = [torch.empty_like(param) for param in model.parameters()]
        total = hvd.size() * (hvd.size() + 1) / 2
        for step in range(3):
            optimizer.zero_grad()
            for param, grad in zip(model.parameters(), mine, strict=True):
                param.grad = grad.fill_(0.01 * (step + 1) * (hvd.rank() + 1))
            optimizer.step()
            assert all((grad == grad.flatten()[0]).all() for grad in mine)
            assert abs(mine[0].flatten()[0] - 0.01 * (step + 1) * (hvd.rank() + 1)) < 1e-6
            for param in reference.parameters():
                param.grad = torch.full_like(param, 0.01 * (step + 1) * total * factor)
            plain.step()
        assert_equal_models(model, reference)


def check_one_tensor_assigned_to_two_parameters():
    total = hvd.size() * (hvd.size() + 1) / 2
    for op, reduced in [(hvd.Average, total / hvd.size()), (hvd.Sum, total)]:
        model = torch.nn.ParameterList([torch.zeros(50, 50), torch.zeros(50, 50)])
        optimizer = hvd.DistributedOptimizer(_sgd(model, lr=1.0), op=op)
        grad = torch.full((50, 50), hvd.rank() + 1.0)
        for param in model:
            param.grad = grad
        optimizer.step()
        for param in model:
            assert (param == -reduced).all()


def check_a_lone_gradient_is_reduced_where_autograd_put_it():
    model = build_model()
    optimizer = hvd.DistributedOptimizer(_sgd(model), bucket_size_mb=1e-5)
    part = take_part(make_batches(1)[0])
    made = {}
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: made.update({p: p.grad.data_ptr()}))
    for _ in range(3):
        optimizer.zero_grad()
        compute_loss(model, part).backward()
    assert made == {param: param.grad.data_ptr() for param in model.parameters()}


def check_hooks_that_change_or_drop_gradients():
    """They see the local gradient, whether registered before the wrapping or after it."""

    def halve(param):
        param.grad.mul_(0.5)

    def replace(param):
        param.grad = param.grad * 3

    def drop(param):
        param.grad = None if param.dim() == 1 else param.grad

    for hook in (halve, replace, drop):
        for early in (False, True):
            model, reference = build_model(), build_model()
            if early:
                for param in model.parameters():
                    param.register_post_accumulate_grad_hook(hook)
            optimizer = hvd.DistributedOptimizer(_sgd(model))
            for param in [*reference.parameters(), *(() if early else model.parameters())]:
                param.register_post_accumulate_grad_hook(hook)
            batches = make_batches(4)
            take_steps(model, optimizer, [take_part(batch) for batch in batches])
            take_steps(reference, _sgd(reference), batches)
            assert_equal_models(model, reference)


def check_autograd_grad_between_backward_and_step():
    def train(model, optimizer, part, scale):
        for batch in make_batches(3):
            optimizer.zero_grad()
            for _ in range(2):
                (compute_loss(model, part(batch)) * scale).backward()
                # Runs the parameters' hooks and adds to no gradient.
                torch.autograd.grad(compute_loss(model, part(batch)), list(model.parameters()))
            optimizer.step()

    _compare(build_model, train)
    _compare(build_model, train, op=hvd.Sum, factor=hvd.size())
    averaged = {"average_aggregated_gradients": True, "backward_passes_per_step": 2}
    _compare(build_model, train, factor=0.5, **averaged)


def check_passes_within_passes():
    """Layers used once outside of a reentrant checkpoint and once or twice inside."""
    options = [
        ({}, 1),
        ({"op": hvd.Sum}, hvd.size()),
        ({"average_aggregated_gradients": True, "backward_passes_per_step": 2}, 0.5),
    ]

    def apply_often(net, x):
        x = checkpoint(net[:2], x, use_reentrant=True)
        middle = torch.nn.Sequential(net[2], net[3])
        narrow = torch.nn.functional.pad
        x = narrow(net[3](net[2](x)), (0, 10))
        x = narrow(checkpoint(middle, x, use_reentrant=True), (0, 10))
        return net[4](checkpoint(middle, x, use_reentrant=True))

    def apply_whole(net, x):
        return checkpoint(net, x, use_reentrant=True)

    def apply_nested(net, x):
        return checkpoint(lambda y: apply_whole(net, y * 2), x, use_reentrant=True)

    for apply in (apply_often, apply_whole, apply_nested):
        for settings, factor in options:

            def train(model, optimizer, part, scale, apply=apply, settings=settings):
                for batch in make_batches(3):
                    optimizer.zero_grad()
                    for _ in range(settings.get("backward_passes_per_step", 1)):
                        x, y = part(batch)
                        outputs = apply(model, x.clone().requires_grad_())
                        loss = torch.nn.functional.cross_entropy(outputs, y)
                        (loss * scale).backward()
                    # Final when backward() returns: the norm is that of all ranks together.
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                    optimizer.step()

            _compare(build_model, train, factor=factor, **settings)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("in the middle of the backward pass")


def check_a_pass_that_breaks_off_is_tried_again():
    def clear_by_hand(model, optimizer):
        for param in model.parameters():
            param.grad = None

    for clear in (
        lambda model, optimizer: optimizer.zero_grad(),
        lambda model, optimizer: model.zero_grad(),
        clear_by_hand,
    ):
        for depth in (2, 4):

            def train(model, optimizer, part, scale, clear=clear, depth=depth):
                for step, batch in enumerate(make_batches(4)):
                    optimizer.zero_grad()
                    if scale == 1 and step % 2 == 0:
                        x = _Fails.apply(model[:depth](part(batch)[0]))
                        with contextlib.suppress(ArithmeticError):
                            model[depth:](x).sum().backward()
                        clear(model, optimizer)
                    compute_loss(model, part(batch)).backward()
                    optimizer.step()

            _compare(build_model, train, factor=1)


def check_models_that_are_converted_while_they_train():
    def convert_and_back(model):
        model.double().float()

    for convert in (torch.nn.Module.double, torch.nn.Module.bfloat16, convert_and_back):
        for set_to_none in (False, True):
            model, reference = build_model(), build_model()
            optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters())
            for net, by, part in [
                (model, optimizer, take_part),
                (reference, _sgd(reference), lambda batch: batch),
            ]:
                for step, batch in enumerate(make_batches(4)):
                    by.zero_grad(set_to_none=set_to_none)
                    if step == 2:
                        convert(net)
                    compute_loss(net, part(batch)).backward()
                    by.step()
            loose = convert is torch.nn.Module.bfloat16
            assert_equal_models(model, reference, **({"atol": 2e-2, "rtol": 2e-2} if loose else {}))


def check_steps_that_grad_scaler_skips_end_their_window():
    model, reference = build_model(), build_model()
    optimizer = hvd.DistributedOptimizer(
        _sgd(model), backward_passes_per_step=2, average_aggregated_gradients=True
    )
    plain = _sgd(reference)
    for net, by, part, factor in [
        (model, optimizer, take_part, 1),
        (reference, plain, lambda batch: batch, 0.5),
    ]:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        batches = make_batches(6)
        for first in range(0, len(batches), 2):
            net.zero_grad()
            for batch in batches[first : first + 2]:
                loss = compute_loss(net, part(batch)) * factor
                scaler.scale(loss * (float("inf") if first == 2 else 1)).backward()
            scaler.step(by)
            scaler.update()
    assert_equal_models(model, reference)


if __name__ == "__main__":
    run_checks(globals())
