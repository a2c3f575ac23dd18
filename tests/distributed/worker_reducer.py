"""The reducer: when reductions start, in which order, for whom, and after how many passes."""

import pytest
import torch
from horovod.torch import mpi_ops

import hvdkit.torch as hvd
from tests.distributed.training import (
    assert_equal_models,
    build_model,
    compute_loss,
    make_batches,
    take_part,
    take_steps,
)
from tests.distributed.worker import run_checks


def _sgd(model, **settings):
    return torch.optim.SGD(model.parameters(), lr=0.1, **settings)


def check_reductions_start_while_the_backward_pass_goes_on():
    first, *rest = [take_part(batch) for batch in make_batches(3)]
    for options, under_way in [
        # Each gradient alone: those of the two later layers, weight and bias.
        (lambda m: {"bucket_size_mb": 1e-5}, 4),
        # A bucket a layer.
        (lambda m: {"groups": [[*m[i].parameters()] for i in (4, 2, 0)]}, 2),
    ]:
        model = build_model()
        optimizer = hvd.DistributedOptimizer(_sgd(model), **options(model))
        take_steps(model, optimizer, [first])  # learns the order in which gradients come
        seen = []
        # The map holds what Horovod was given and nobody has waited for yet.
        handle = model[0].weight.register_hook(
            lambda grad, seen=seen: seen.append(len(mpi_ops._handle_map))
        )
        take_steps(model, optimizer, rest)
        handle.remove()
        assert all(count >= under_way for count in seen), seen
        assert len(seen) == len(rest)
        assert not mpi_ops._handle_map


class _TwoHeads(torch.nn.Module):
    """The heads are evaluated in an order of each rank's own, so gradients come in another."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.heads = torch.nn.ModuleList([torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)])

    def forward(self, x, order):
        outputs = {index: self.heads[index](x) for index in order}
        return outputs[0] - 2 * outputs[1].tanh()


def check_ranks_that_see_gradients_in_other_orders_agree_on_one():
    for size in (8.0, 1e-5):
        model, reference = _TwoHeads(), _TwoHeads()
        optimizer = hvd.DistributedOptimizer(
            _sgd(model), model.named_parameters(), bucket_size_mb=size
        )
        plain = _sgd(reference)
        for batch in make_batches(3):
            for net, by, (x, y), order in [
                (model, optimizer, take_part(batch), (hvd.rank(), 1 - hvd.rank())),
                (reference, plain, batch, (0, 1)),
            ]:
                by.zero_grad()
                torch.nn.functional.cross_entropy(net(x, order), y).backward()
                by.step()
        assert_equal_models(model, reference)


def check_an_optimizer_that_takes_over_some_parameters():
    for options in [{}, {"bucket_size_mb": 1e-5}]:
        model, reference = build_model(), build_model()
        batches = make_batches(4)
        # A sum, so that it shows if the first one goes on to reduce what the second took over.
        first = hvd.DistributedOptimizer(_sgd(model), op=hvd.Sum, **options)
        plain = torch.optim.SGD(reference.parameters(), lr=0.1 * hvd.size())
        take_steps(model, first, [take_part(batch) for batch in batches[:2]])
        take_steps(reference, plain, batches[:2])
        first.param_groups[0]["params"] = list(model[:4].parameters())
        plain.param_groups[0]["params"] = list(reference[:4].parameters())
        second = torch.optim.SGD(model[4].parameters(), lr=0.3)
        second = hvd.DistributedOptimizer(second, **options)
        other = torch.optim.SGD(reference[4].parameters(), lr=0.3)
        for batch in batches[2:]:
            for net, both, part in [
                (model, (first, second), take_part(batch)),
                (reference, (plain, other), batch),
            ]:
                net.zero_grad()
                compute_loss(net, part).backward()
                for by in both:
                    by.step()
        assert_equal_models(model, reference)


def check_a_further_pass_that_reaches_a_parameter_on_one_rank_only():
    """The first gives 1 and 2, the second 10 on rank 1: the other rank sends its result again."""
    row = torch.tensor([1])
    for sparse in (False, True):
        for size in (8.0, 1e-5):
            for options, expected in [
                ({}, 6.5),
                ({"op": hvd.Sum}, 13.0),
                ({"average_aggregated_gradients": True}, 3.25),
            ]:
                table = torch.nn.Embedding(2, 3, sparse=sparse)
                always = torch.nn.Parameter(torch.zeros(3))
                optimizer = hvd.DistributedOptimizer(
                    torch.optim.SGD([*table.parameters(), always], lr=0.1),
                    bucket_size_mb=size,
                    **options,
                )
                (table(row) * (hvd.rank() + 1)).sum().backward()
                loss = always.sum()
                if hvd.rank() == 1:
                    loss = loss + 10 * table(row).sum()
                loss.backward()
                grad = table.weight.grad.to_dense()
                assert torch.equal(grad[1], torch.full((3,), expected)), (sparse, options, grad)
                assert torch.equal(grad[0], torch.zeros(3))
                optimizer.step()


def check_the_passes_of_a_step_can_be_changed():
    model, reference = build_model(), build_model()
    batches = make_batches(5)
    parts = [take_part(batch) for batch in batches]
    optimizer, plain = hvd.DistributedOptimizer(_sgd(model)), _sgd(reference)
    take_steps(model, optimizer, parts[:1])
    optimizer.set_backward_passes_per_step(2)
    assert optimizer.backward_passes_per_step == 2
    optimizer.zero_grad()
    compute_loss(model, parts[1]).backward()
    local = hvd.allgather(model[0].weight.grad[None], name="tests.local")
    assert not torch.equal(local[0], local[1]), "reduced after the first of two passes"
    compute_loss(model, parts[2]).backward()
    reduced = hvd.allgather(model[0].weight.grad[None], name="tests.reduced")
    assert torch.equal(reduced[0], reduced[1])
    optimizer.step()
    optimizer.set_backward_passes_per_step(1)
    take_steps(model, optimizer, parts[3:])
    take_steps(reference, plain, batches[:1])
    take_steps(reference, plain, batches[1:3], passes=2)
    take_steps(reference, plain, batches[3:])
    assert_equal_models(model, reference)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        optimizer.set_backward_passes_per_step(0)


def check_a_parameter_frozen_between_the_backward_pass_and_the_step():
    for options in [{}, {"process_set": hvd.add_process_set([0])}]:  # and a rank on its own
        model = build_model()
        optimizer = hvd.DistributedOptimizer(_sgd(model, weight_decay=0.1), **options)
        compute_loss(model, take_part(make_batches(1)[0])).backward()
        model[2].weight.requires_grad_(False)
        optimizer.step()
        assert torch.equal(model[2].weight, build_model()[2].weight)
        assert not torch.equal(model[2].bias, build_model()[2].bias)
    hvd.remove_process_set(optimizer.process_set)


def check_skip_synchronize_takes_gradients_as_they_are():
    model, reference = build_model(), build_model()
    optimizer = hvd.DistributedOptimizer(_sgd(model), backward_passes_per_step=2)
    part = take_part(make_batches(1)[0])
    compute_loss(model, part).backward()  # half a window: not reduced
    with optimizer.skip_synchronize():
        optimizer.step()
    take_steps(reference, _sgd(reference), [part])  # this rank's own rows
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


if __name__ == "__main__":
    run_checks(globals())
