"""The rows of the semantics table: what happens outside the plain loop."""

import contextlib
import gc

import pytest
import torch

import hvdkit.torch as hvd
from hvdkit.errors import HvdkitError, RankDisagreementError
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


def _wrap(model, lr=0.1, **options):
    settings = {key: options.pop(key) for key in ("momentum", "weight_decay") if key in options}
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr, **settings), model.named_parameters(), **options
    )


def _sgd(model, lr=0.1, **settings):
    return torch.optim.SGD(model.parameters(), lr=lr, **settings)


def _parts(batches):
    return [take_part(batch) for batch in batches]


# -- reduction -------------------------------------------------------------------------------


def check_sum_and_predivision_and_groups_and_small_buckets():
    batches = make_batches(3)
    for options, factor in [
        ({"op": hvd.Sum}, hvd.size()),
        ({"gradient_predivide_factor": 2.0}, 1),
        ({"groups": 2}, 1),
        ({"num_groups": 3}, 1),
        ({"bucket_size_mb": 1e-5}, 1),
        ({"groups": lambda m: [[m[0].weight, m[4].bias], [m[2].weight]]}, 1),
    ]:
        model, reference = build_model(), build_model()
        if callable(options.get("groups")):
            options["groups"] = options["groups"](model)
        with (
            pytest.warns(DeprecationWarning, match="groups")
            if "num_groups" in options
            else contextlib.nullcontext()
        ):
            optimizer = _wrap(model, **options)
        take_steps(model, optimizer, _parts(batches))
        take_steps(reference, _sgd(reference), batches, factor=factor)
        assert_equal_models(model, reference)


def check_dtypes_each_reduce_in_a_bucket_of_their_own():
    for dtype, atol in [(torch.float64, 1e-12), (torch.bfloat16, 0.02), (torch.float16, 2e-3)]:
        model, reference = build_model().to(dtype), build_model().to(dtype)
        take_steps(model, _wrap(model), _parts(make_batches(3)))
        take_steps(reference, _sgd(reference), make_batches(3))
        assert_equal_models(model, reference, atol=atol, rtol=0)
        assert all(p.grad.dtype == dtype for p in model.parameters())

    class Mixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first = torch.nn.Linear(5, 8)
            self.narrow = torch.nn.Linear(8, 8).bfloat16()
            self.wide = torch.nn.Linear(8, 3).double()
            self.phase = torch.nn.Parameter(torch.randn(3, dtype=torch.complex64))

        def forward(self, x):
            x = self.narrow(self.first(x).bfloat16())
            return self.wide(x.double()) * self.phase.abs()

    model, reference = Mixed(), Mixed()
    take_steps(model, _wrap(model), _parts(make_batches(3)))
    take_steps(reference, _sgd(reference), make_batches(3))
    torch.testing.assert_close(model.phase, reference.phase, atol=2e-2, rtol=0)
    torch.testing.assert_close(model.wide.weight, reference.wide.weight, atol=2e-2, rtol=0)
    assert_equal_replicas(torch.nn.ModuleList([model.first, model.narrow, model.wide]))


def check_sixteen_bit_sums_near_the_limit_do_not_overflow():
    for dtype in [torch.float16, torch.bfloat16]:
        limit = torch.finfo(dtype).max * 0.75
        param = torch.nn.Parameter(torch.zeros(4, dtype=dtype))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0))
        (param * limit).sum().backward()
        assert torch.equal(param.grad, torch.full((4,), limit, dtype=dtype)), param.grad
    for compression in [hvd.Compression.fp16, hvd.Compression.bf16]:
        for op, times in [(hvd.Average, 1), (hvd.Sum, hvd.size())]:
            param = torch.nn.Parameter(torch.zeros(4))
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([param], lr=1.0), compression=compression, op=op
            )
            (param * 49152.0).sum().backward()
            assert torch.equal(param.grad, torch.full((4,), 49152.0 * times)), (op, param.grad)
    assert optimizer.op == hvd.Sum


def check_compression_sends_rounded_gradients():
    torch.manual_seed(hvd.rank())
    local = torch.randn(1000)
    for compression, dtype in [
        (hvd.Compression.fp16, torch.float16),
        (hvd.Compression.bf16, torch.bfloat16),
    ]:
        param = torch.nn.Parameter(torch.zeros(1000))
        hvd_optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([param], lr=1.0), compression=compression
        )
        (param * local).sum().backward()
        exact = hvd.allreduce(local, op=hvd.Average, name="tests.exact")
        error = (param.grad - exact).abs().max()
        assert 0 < error <= 4 * torch.finfo(dtype).eps, error
        assert torch.equal(param.grad, hvd.broadcast(param.grad, 0, name="tests.rounded"))
        del hvd_optimizer

    class Halved(hvd.Compression.none):
        """A compressor that a user writes."""

        @staticmethod
        def compress(tensor):
            return tensor / 2, None

    param = torch.nn.Parameter(torch.zeros(4))
    kept = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), compression=Halved)
    param.sum().backward()
    assert torch.equal(param.grad, torch.full((4,), 0.5))
    del kept


# -- accumulation ----------------------------------------------------------------------------


def check_accumulation_sums_or_averages():
    batches = make_batches(6)
    for average in [False, True]:
        model, reference = build_model(), build_model()
        optimizer = _wrap(model, backward_passes_per_step=3, average_aggregated_gradients=average)
        take_steps(model, optimizer, _parts(batches), passes=3)
        take_steps(reference, _sgd(reference), batches, passes=3, factor=1 / 3 if average else 1)
        assert_equal_models(model, reference)


def check_an_incomplete_window_is_reduced_by_step():
    for options, factor in [
        ({}, 1),
        ({"average_aggregated_gradients": True}, 1 / 2),
        ({"op": hvd.Sum}, hvd.size()),
    ]:
        model, reference = build_model(), build_model()
        optimizer = _wrap(model, backward_passes_per_step=3, **options)
        take_steps(model, optimizer, _parts(make_batches(4)), passes=2)
        take_steps(reference, _sgd(reference), make_batches(4), passes=2, factor=factor)
        assert_equal_models(model, reference)


def check_passes_beyond_the_window_are_reduced_too():
    for options, factor in [
        ({}, 1),
        ({"average_aggregated_gradients": True}, 1 / 3),
        ({"op": hvd.Sum}, hvd.size()),
        ({"op": hvd.Sum, "compression": hvd.Compression.fp16}, hvd.size()),
    ]:
        for per_step in [1, 2]:
            model, reference = build_model(), build_model()
            optimizer = _wrap(model, backward_passes_per_step=per_step, **options)
            take_steps(model, optimizer, _parts(make_batches(6)), passes=3)
            take_steps(reference, _sgd(reference), make_batches(6), passes=3, factor=factor)
            loose = 1e-3 if "compression" in options else 2e-6
            assert_equal_models(model, reference, atol=loose)


def check_gradients_that_are_never_zeroed():
    for op in [hvd.Average, hvd.Sum]:
        model, reference = build_model(), build_model()
        optimizer, plain = _wrap(model, lr=0.01, op=op), _sgd(reference, lr=0.01)
        for batch in make_batches(3):
            compute_loss(model, take_part(batch)).backward()
            optimizer.step()
            (compute_loss(reference, batch) * (hvd.size() if op == hvd.Sum else 1)).backward()
            plain.step()
        optimizer.step()  # the same gradient once more
        plain.step()
        assert_equal_models(model, reference)


def check_no_sync_accumulates_locally():
    for k in [1, 2]:
        model, reference = build_model(), build_model()
        optimizer, plain = _wrap(model, backward_passes_per_step=k), _sgd(reference)
        batches = make_batches(4)
        local = _parts(batches)
        optimizer.zero_grad()
        with optimizer.no_sync():
            for part in local[:3]:
                compute_loss(model, part).backward()
            differs = hvd.allgather(model[0].weight.grad[None], name="tests.no_sync")
            assert not torch.equal(differs[0], differs[1])
        compute_loss(model, local[3]).backward()
        optimizer.step()
        take_steps(reference, plain, batches, passes=4)
        assert_equal_models(model, reference)
        with optimizer.no_sync():
            optimizer.zero_grad()
            compute_loss(model, local[0]).backward()
        optimizer.step()  # nothing was reduced yet
        take_steps(reference, plain, batches[:1])
        assert_equal_models(model, reference)


def check_several_losses_share_parameters():
    model, reference = build_model(), build_model()
    optimizer, plain = _wrap(model), _sgd(reference)
    first, second = make_batches(2)
    for trained, by, part in [(model, optimizer, take_part), (reference, plain, lambda b: b)]:
        by.zero_grad()
        compute_loss(trained, part(first)).backward()
        compute_loss(trained[:5], part(second)).backward()
        by.step()
    assert_equal_models(model, reference)


# -- parameters that come and go --------------------------------------------------------------


class _Branches(torch.nn.Module):
    """Rank-dependent control flow; ``never`` is not used at all."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = torch.nn.Linear(5, 8)
        self.left = torch.nn.Linear(8, 3)
        self.right = torch.nn.Linear(8, 3)
        self.never = torch.nn.Linear(8, 3)

    def forward(self, x, side):
        return getattr(self, side)(self.stem(x))


def check_unused_on_some_rank_counts_as_zero_unused_everywhere_is_left_alone():
    model, reference = _Branches(), _Branches()
    optimizer, plain = _wrap(model, weight_decay=0.1), _sgd(reference, weight_decay=0.1)
    sides = ["left", "right"]
    for step, batch in enumerate(make_batches(4)):
        optimizer.zero_grad()
        x, y = take_part(batch)
        side = sides[(hvd.rank() + step) % 2] if step else "left"
        torch.nn.functional.cross_entropy(model(x, side), y).backward()
        optimizer.step()
        plain.zero_grad()
        rows = len(batch[0]) // 2
        for rank in range(2):
            side = sides[(rank + step) % 2] if step else "left"
            part = slice(rank * rows, (rank + 1) * rows)
            loss = torch.nn.functional.cross_entropy(
                reference(batch[0][part], side), batch[1][part]
            )
            (loss / 2).backward()
        plain.step()
    assert model.never.weight.grad is None
    assert torch.equal(model.never.weight, _Branches().never.weight)
    assert_equal_models(model, reference)


def check_a_rank_without_any_backward_pass_takes_part():
    model, reference = build_model(), build_model()
    optimizer, plain = _wrap(model), _sgd(reference)
    for step, batch in enumerate(make_batches(4)):
        optimizer.zero_grad()
        if step % 2 != hvd.rank():  # in the first step rank 1 alone has gradients
            compute_loss(model, take_part(batch)).backward()
        optimizer.step()
        plain.zero_grad()
        rows = len(batch[0]) // 2
        part = slice((1 - step % 2) * rows, (2 - step % 2) * rows)
        (compute_loss(reference, (batch[0][part], batch[1][part])) / 2).backward()
        plain.step()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    optimizer.step()  # no rank has a gradient
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert_equal_models(model, reference)


def check_empty_local_batches():
    model = build_model()
    optimizer = _wrap(model)
    x, y = take_part(make_batches(1)[0])
    rows = len(x) if hvd.rank() == 0 else 0
    torch.nn.functional.cross_entropy(model(x[:rows]), y[:rows], reduction="sum").backward()
    optimizer.step()
    reference = build_model()
    plain = _sgd(reference)
    whole = make_batches(1)[0]
    half = (whole[0][: len(x)], whole[1][: len(x)])
    (torch.nn.functional.cross_entropy(reference(half[0]), half[1], reduction="sum") / 2).backward()
    plain.step()
    assert_equal_models(model, reference)


def check_frozen_later_is_not_touched_even_by_weight_decay():
    for set_to_none in [True, False]:
        model = build_model()
        optimizer = _wrap(model, weight_decay=0.1, momentum=0.9)
        parts = _parts(make_batches(4))
        take_steps(model, optimizer, parts[:2])
        model[2].weight.requires_grad_(False)
        frozen = model[2].weight.detach().clone()
        for part in parts[2:]:
            optimizer.zero_grad(set_to_none=set_to_none)
            compute_loss(model, part).backward()
            optimizer.step()
        assert torch.equal(model[2].weight, frozen)
        assert_equal_replicas(model)
        model[2].weight.requires_grad_(True)
        take_steps(model, optimizer, parts[:2])
        assert not torch.equal(model[2].weight, frozen)
        assert_equal_replicas(model)


def check_added_and_unfrozen_parameters_are_reduced():
    batches = make_batches(6)
    model, reference = build_model(), build_model()
    trained = []
    for net, part in [(model, _parts(batches)), (reference, batches)]:
        net[0].requires_grad_(False)
        head = torch.optim.SGD([*net[2].parameters()], lr=0.1, momentum=0.5)
        if net is model:
            head = hvd.DistributedOptimizer(head)
        take_steps(net, head, part[:2])
        head.add_param_group({"params": list(net[4].parameters()), "lr": 0.2})
        take_steps(net, head, part[2:4])
        net[0].requires_grad_(True)
        head.param_groups[0]["params"] += list(net[0].parameters())  # behind the wrapper's back
        take_steps(net, head, part[4:])
        trained.append(head)
    assert_equal_models(model, reference)


def check_tied_weights_and_reused_layers():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed = torch.nn.Embedding(7, 8)
            self.mix = torch.nn.Linear(8, 8)
            self.head = torch.nn.Linear(8, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            x = self.embed(tokens)
            return self.head(self.mix(torch.tanh(self.mix(x))))

    tokens = torch.arange(8 * 6).reshape(8, 6) % 7
    model, reference = Tied(), Tied()
    optimizer, plain = _wrap(model), _sgd(reference)
    for net, by, rows in [
        (model, optimizer, slice(hvd.rank() * 4, hvd.rank() * 4 + 4)),
        (reference, plain, slice(8)),
    ]:
        for _ in range(3):
            by.zero_grad()
            out = net(tokens[rows])
            torch.nn.functional.cross_entropy(
                out.flatten(0, 1), (tokens[rows] * 3 % 7).flatten()
            ).backward()
            by.step()
    assert_equal_models(model, reference)


# -- gradients by other means -----------------------------------------------------------------


def check_every_way_to_clear_gradients():
    ways = [
        lambda m, o: o.zero_grad(),
        lambda m, o: o.zero_grad(set_to_none=False),
        lambda m, o: o.zero_grad(set_to_none=True),
        lambda m, o: m.zero_grad(),
        lambda m, o: m.zero_grad(set_to_none=False),
        lambda m, o: [setattr(p, "grad", None) for p in m.parameters()],
        lambda m, o: [p.grad.zero_() for p in m.parameters() if p.grad is not None],
        lambda m, o: [setattr(p, "grad", torch.zeros_like(p)) for p in m.parameters()],
    ]
    for options in [{}, {"op": hvd.Sum}, {"average_aggregated_gradients": True}]:
        model, reference = build_model(), build_model()
        optimizer, plain = _wrap(model, lr=0.02, **options), _sgd(reference, lr=0.02)
        for clear, batch in zip(ways * 2, make_batches(2 * len(ways)), strict=True):
            clear(model, optimizer)
            compute_loss(model, take_part(batch)).backward()
            optimizer.step()
            take_steps(reference, plain, [batch], factor=hvd.size() if "op" in options else 1)
        assert_equal_models(model, reference)


def check_clearing_between_backward_passes_and_before_the_step():
    model, reference = build_model(), build_model()
    optimizer, plain = _wrap(model, backward_passes_per_step=2), _sgd(reference)
    batches = make_batches(3)
    compute_loss(model, take_part(batches[0])).backward()
    optimizer.zero_grad()  # a pass that is thrown away
    for batch in batches[1:]:
        compute_loss(model, take_part(batch)).backward()
    optimizer.step()
    take_steps(reference, plain, batches[1:], passes=2)
    assert_equal_models(model, reference)
    compute_loss(model, take_part(batches[0])).backward()
    model.zero_grad()
    optimizer.step()  # nothing is left to apply
    assert_equal_models(model, reference)


def check_clipping_built_in_and_by_hand():
    batches = make_batches(3)
    for way in ["built in", "after backward", "synchronize"]:
        model, reference = build_model(), build_model()
        optimizer = _wrap(model, clip_grad_norm=0.1 if way == "built in" else None)

        def clip(net):
            return torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)

        for batch in batches:
            optimizer.zero_grad()
            compute_loss(model, take_part(batch)).backward()
            if way == "after backward":
                clip(model)
            if way == "synchronize":
                optimizer.synchronize()
                clip(model)
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        plain = _sgd(reference)
        take_steps(reference, plain, batches, between=lambda reference=reference: clip(reference))
        assert_equal_models(model, reference)


def check_closure_is_reduced_clipped_and_its_loss_averaged():
    model, reference = build_model(), build_model()
    optimizer, plain = _wrap(model, clip_grad_norm=0.2), _sgd(reference)
    for batch in make_batches(3):

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = compute_loss(model, take_part(batch))
            loss.backward()
            return loss

        expected = compute_loss(reference, batch)
        loss = optimizer.step(closure)
        torch.testing.assert_close(loss, expected.detach(), atol=1e-5, rtol=1e-5)
        plain.zero_grad()
        expected.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.2)
        plain.step()
    assert_equal_models(model, reference)
    assert optimizer.step(lambda: 1.0 + hvd.rank()) == 1.5
    assert optimizer.step(lambda: None) is None


def check_two_optimizers_on_two_models_and_on_one():
    batches = make_batches(4)
    nets = [build_model(0), build_model(1)]
    refs = [build_model(0), build_model(1)]
    wrapped = [_wrap(net) for net in nets]
    for batch in batches:
        for by in wrapped:
            by.zero_grad()
        sum(compute_loss(net, take_part(batch)) for net in nets).backward()
        for by in wrapped:
            by.step()
    for ref in refs:
        take_steps(ref, _sgd(ref), batches)
    for net, ref in zip(nets, refs, strict=True):
        assert_equal_models(net, ref)
    # Two optimizers share out one model.
    net, ref = build_model(), build_model()
    first = hvd.DistributedOptimizer(torch.optim.SGD(net[:3].parameters(), lr=0.1))
    second = hvd.DistributedOptimizer(torch.optim.SGD(net[3:].parameters(), lr=0.2))
    plain = [
        torch.optim.SGD(ref[:3].parameters(), lr=0.1),
        torch.optim.SGD(ref[3:].parameters(), lr=0.2),
    ]
    for batch in batches:
        for by in [first, second, *plain]:
            by.zero_grad()
        compute_loss(net, take_part(batch)).backward()
        compute_loss(ref, batch).backward()
        for by in [second, first, *plain]:
            by.step()
    assert_equal_models(net, ref)


def check_wrapping_again_takes_over():
    batches = make_batches(6)
    model, reference = build_model(), build_model()
    kept = _wrap(model)
    take_steps(model, kept, _parts(batches[:2]))
    for first in [2, 4]:
        optimizer = _wrap(model)
        gc.collect()
        take_steps(model, optimizer, _parts(batches[first : first + 2]))
    take_steps(reference, _sgd(reference), batches)
    assert_equal_models(model, reference)
    assert kept is not optimizer


def check_ranks_that_did_other_things_before_do_not_mismatch():
    alone = hvd.add_process_set([0])
    if hvd.rank() == 0:  # Horovod numbers its unnamed operations on each rank by itself
        for _ in range(5):
            hvd.allreduce(torch.ones(1), process_set=alone)
    hvd.barrier()
    model, reference = build_model(), build_model()
    take_steps(model, _wrap(model), _parts(make_batches(2)))
    take_steps(reference, _sgd(reference), make_batches(2))
    assert_equal_models(model, reference)
    hvd.remove_process_set(alone)


# -- sparse ----------------------------------------------------------------------------------


def check_sparse_gradients_gathered_or_densified():
    tokens = torch.arange(16).reshape(4, 4) % 5  # two rows each rank; many repeat
    for make, options in [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {}),
        (lambda p: torch.optim.SGD(p, lr=0.1), {"sparse_as_dense": True}),
        (lambda p: torch.optim.SparseAdam(list(p), lr=0.1), {}),
        (lambda p: torch.optim.SparseAdam(list(p), lr=0.1), {"sparse_as_dense": True}),
        (lambda p: torch.optim.SGD(p, lr=0.1), {"op": hvd.Sum}),
        (lambda p: torch.optim.SGD(p, lr=0.1), {"backward_passes_per_step": 2}),
        (lambda p: torch.optim.Adagrad(p, lr=0.1), {"clip_grad_norm": 0.05}),
    ]:
        nets = []
        for rows in [slice(hvd.rank() * 2, hvd.rank() * 2 + 2), slice(4)]:
            torch.manual_seed(0)
            net = torch.nn.Embedding(9, 3, sparse=True)
            optimizer = make(net.parameters())
            distributed = rows != slice(4)
            if distributed:
                optimizer = hvd.DistributedOptimizer(optimizer, **options)
            passes = options.get("backward_passes_per_step", 1)
            for step in range(3):
                optimizer.zero_grad()
                for index in range(passes):
                    loss = (net(tokens[rows]) * (step + index + 1)).pow(2).mean()
                    (loss * (2 if "op" in options and not distributed else 1)).backward()
                if "clip_grad_norm" in options and not distributed:
                    grad = net.weight.grad.coalesce()
                    scale = min(1.0, 0.05 / (float(grad.values().norm()) + 1e-6))
                    net.weight.grad = grad * scale
                optimizer.step()
            assert net.weight.grad.is_sparse or not distributed or "sparse_as_dense" in options
            nets.append(net)
        assert_equal_models(*nets, atol=1e-5)


# -- mixed precision, compiling, checkpointing -------------------------------------------------


def check_grad_scaler_in_complete_and_incomplete_windows():
    for passes, fused in [(1, False), (2, False), (1, True)]:
        model, reference = build_model(), build_model()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3, fused=fused),
            backward_passes_per_step=passes,
            clip_grad_norm=0.5,
        )
        plain = torch.optim.Adam(reference.parameters(), lr=0.01, eps=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step, batch in enumerate(make_batches(6)):
            optimizer.zero_grad()  # with two passes a step, every window is incomplete
            loss = compute_loss(model, take_part(batch))
            if step == 2 and hvd.rank() == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if step != 2:
                plain.zero_grad()
                compute_loss(reference, batch).backward()
                torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
                plain.step()
        assert scaler.get_scale() == 512.0
        assert_equal_models(model, reference, atol=1e-4)


def check_autocast_and_compiled_models():
    model, reference = build_model(), build_model()
    take_steps(torch.compile(model, backend="aot_eager"), _wrap(model), _parts(make_batches(3)))
    take_steps(reference, _sgd(reference), make_batches(3))
    assert_equal_models(model, reference)
    model = build_model()
    optimizer = _wrap(model)
    for part in _parts(make_batches(3)):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = compute_loss(model, part)
        loss.backward()
        optimizer.step()
    assert_equal_replicas(model)


def check_activation_checkpointing():
    from torch.utils.checkpoint import checkpoint

    for reentrant in [False, True]:
        for options, factor in [
            ({}, 1),
            ({"backward_passes_per_step": 2, "average_aggregated_gradients": True}, 0.5),
        ]:
            model, reference = build_model(), build_model()
            optimizer, plain = _wrap(model, bucket_size_mb=0.05, **options), _sgd(reference)
            passes = options.get("backward_passes_per_step", 1)
            for net, by, part, scale in [
                (model, optimizer, take_part, 1),
                (reference, plain, lambda b: b, factor),
            ]:
                batches = make_batches(4)
                for first in range(0, 4, passes):
                    by.zero_grad()
                    for batch in batches[first : first + passes]:
                        x, y = part(batch)
                        x = x.clone().requires_grad_()
                        x = checkpoint(net[:2], x, use_reentrant=reentrant)
                        x = checkpoint(net[2:4], x, use_reentrant=reentrant)
                        (torch.nn.functional.cross_entropy(net[4](x), y) * scale).backward()
                    by.step()
            assert_equal_models(model, reference)


def check_gradients_that_are_assigned():
    for op, factor in [(hvd.Average, 1), (hvd.Sum, hvd.size())]:
        model, reference = build_model(), build_model()
        optimizer, plain = _wrap(model, op=op), _sgd(reference)
        for batch in make_batches(3):
            for net, by, part, scale in [
                (model, optimizer, take_part(batch), 1),
                (reference, plain, batch, factor),
            ]:
                parameters = list(net.parameters())
                loss = compute_loss(net, part) * scale
                for param, grad in zip(
                    parameters, torch.autograd.grad(loss, parameters), strict=True
                ):
                    param.grad = grad.t().contiguous().t() if grad.dim() == 2 else grad
                by.step()
        assert_equal_models(model, reference)


def check_channels_last_weights():
    def build():
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64, 2)
        )
        return net.to(memory_format=torch.channels_last)

    model, reference = build(), build()
    images = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(3))
    for net, by, rows in [
        (model, _wrap(model), slice(hvd.rank() * 2, hvd.rank() * 2 + 2)),
        (reference, _sgd(reference), slice(4)),
    ]:
        for _ in range(3):
            by.zero_grad()
            net(images[rows]).pow(2).mean().backward()
            by.step()
    assert model[0].weight.grad.stride() == model[0].weight.stride()
    assert_equal_models(model, reference)


def check_a_backward_pass_that_breaks_off_on_all_ranks():
    model, reference = build_model(), build_model()
    optimizer, plain = _wrap(model, bucket_size_mb=1e-5), _sgd(reference)
    batches = make_batches(4)
    take_steps(model, optimizer, _parts(batches[:2]))

    def fail(grad):
        raise ArithmeticError("in the middle of the backward pass")

    handle = model[0].weight.register_hook(fail)
    optimizer.zero_grad()
    with pytest.raises(ArithmeticError):
        compute_loss(model, take_part(batches[2])).backward()
    handle.remove()
    take_steps(model, optimizer, _parts(batches[2:]))
    take_steps(reference, plain, batches)
    assert_equal_models(model, reference)


# -- process sets and other processes ----------------------------------------------------------


def check_process_sets():
    one = hvd.add_process_set([1])
    model, reference = build_model(), build_model()
    optimizer = _wrap(model, process_set=one)
    batches = make_batches(2)
    take_steps(model, optimizer, _parts(batches))
    take_steps(reference, _sgd(reference), _parts(batches))  # each rank on its own
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert optimizer.process_set is one
    hvd.remove_process_set(one)


def check_participation_masks_gradients_and_changes_the_mean():
    model, reference = build_model(), build_model()
    optimizer, plain = _wrap(model), _sgd(reference)
    batch = make_batches(1)[0]
    take_steps(model, optimizer, [take_part(batch)])
    take_steps(reference, plain, [batch])
    optimizer.set_participation(hvd.rank() == 0, 1)
    take_steps(model, optimizer, [take_part(batch)])
    optimizer.set_participation(True, None)
    rows = len(batch[0]) // 2
    take_steps(reference, plain, [(batch[0][:rows], batch[1][:rows])])
    assert_equal_models(model, reference)


def check_join_lets_a_rank_end_early():
    model = build_model()
    optimizer = _wrap(model)
    batches = make_batches(2)
    take_steps(model, optimizer, [take_part(batches[0])])
    if hvd.rank() == 0:
        take_steps(model, optimizer, [take_part(batches[1])])
    last = hvd.join()
    assert last == 0, last
    reference = build_model()
    plain = _sgd(reference)
    take_steps(reference, plain, [batches[0]])
    rows = len(batches[1][0]) // 2
    half = (batches[1][0][:rows], batches[1][1][:rows])
    take_steps(reference, plain, [half], factor=1 / 2)  # the rank that left counts as zero
    if hvd.rank() == 0:
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


# -- clear errors on every rank -----------------------------------------------------------------


def check_bad_arguments_raise_on_every_rank():
    model = build_model()
    named = list(model.named_parameters())
    for options, error, match in [
        ({"named_parameters": [p for _, p in named]}, TypeError, "pairs"),
        ({"named_parameters": [("x", p) for _, p in named]}, ValueError, "unique"),
        ({"named_parameters": named[1:]}, ValueError, "named_parameters"),
        ({"backward_passes_per_step": 0}, ValueError, "at least 1"),
        ({"op": hvd.Max}, ValueError, "Average"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, ValueError, "Average"),
        ({"bucket_size_mb": 0}, ValueError, "bucket_size_mb"),
        ({"clip_grad_norm": -1.0}, ValueError, "positive"),
        ({"groups": 0}, ValueError, "groups"),
        ({"compression": "fp16"}, TypeError, "Compression"),
        ({"op": hvd.Adasum}, HvdkitError, "MPI"),
    ]:
        if options.get("op") == hvd.Adasum and hvd.mpi_enabled():
            continue
        with pytest.raises(error, match=match):
            hvd.DistributedOptimizer(_sgd(model), **options)
        if hvd.rank() == 1:
            options = {}
        with pytest.raises((error, RankDisagreementError), match=match):  # one rank alone
            hvd.DistributedOptimizer(_sgd(model), **options)
    optimizer = _wrap(model)
    with pytest.raises(HvdkitError, match="wrapped already"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(TypeError, match="optimizer"):
        hvd.DistributedOptimizer(model)


def check_disagreeing_ranks_are_named_on_every_rank():
    rank = hvd.rank()
    wide = torch.nn.Linear(5, 3 + rank)
    with pytest.raises(RankDisagreementError, match="weight") as caught:
        _wrap(wide)
    assert all(side in str(caught.value) for side in ["rank 0", "rank 1"])
    model = build_model()
    kinds = [torch.optim.SGD, torch.optim.Adam]
    with pytest.raises(RankDisagreementError, match="Adam"):
        hvd.DistributedOptimizer(kinds[rank](model.parameters(), lr=0.1))
    with pytest.raises(RankDisagreementError, match="backward_passes_per_step"):
        _wrap(build_model(), backward_passes_per_step=1 + rank)
    with pytest.raises(RankDisagreementError, match="float64"):
        _wrap(build_model().to([torch.float32, torch.float64][rank]))
    shorter = build_model()
    with pytest.raises(RankDisagreementError, match="number of parameters"):
        hvd.DistributedOptimizer(torch.optim.SGD(list(shorter.parameters())[rank:], lr=0.1))
    turned = build_model()
    with pytest.raises(RankDisagreementError):
        hvd.DistributedOptimizer(
            torch.optim.SGD(list(turned.parameters())[:: 1 - 2 * rank], lr=0.1),
            turned.named_parameters(),
        )
    images = torch.nn.Conv2d(3, 4, 3)
    if rank == 1:
        images = images.to(memory_format=torch.channels_last)
    optimizer = _wrap(images)
    with pytest.raises(RankDisagreementError, match="strides"):
        images(torch.ones(1, 3, 5, 5)).sum().backward()
    optimizer.zero_grad()


def check_gradients_that_carry_a_graph_are_refused():
    model = build_model()
    optimizer = _wrap(model)
    with pytest.raises(HvdkitError, match="create_graph"):
        compute_loss(model, take_part(make_batches(1)[0])).backward(create_graph=True)
    optimizer.zero_grad()


if __name__ == "__main__":
    run_checks(globals())
