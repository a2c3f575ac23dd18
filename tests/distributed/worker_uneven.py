"""Checks of uneven_inputs: equal numbers of steps on ranks with different numbers of batches."""

import pytest
import torch
from torch import nn

import hvdkit.torch as hvd
from hvdkit.errors import HvdkitError
from hvdkit.torch.collectives import allgather_object
from hvdkit.torch.gather import gather
from hvdkit.torch.metrics import average_metrics
from hvdkit.torch.replicas import check_replicas
from hvdkit.torch.uneven import uneven_inputs
from tests.distributed.worker import run_checks

COUNTS = ((3, 5), (5, 3), (0, 4), (4, 0), (2, 2), (1, 6), (0, 0))


def make_batches(counts, rank):
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(4, 3, generator=generator) for _ in range(counts[rank])]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def wrap(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)


def loss_of(model, batch):
    return model(batch.double()).square().mean()


def check_every_rank_runs_the_same_number_of_iterations():
    for counts in COUNTS:
        mine = make_batches(counts, hvd.rank())
        seen, real, totals = [], [], []
        with uneven_inputs(mine) as batches:
            for batch in batches:
                seen.append(batch)
                real.append(batches.active)
                total = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="anything")
                totals.append((total.item(), batches.active_ranks))
        assert len(seen) == max(counts)
        assert real == [i < counts[hvd.rank()] for i in range(max(counts))]
        expected = [sum(c > i for c in counts) for i in range(max(counts))]
        assert totals == [(hvd.size(), active) for active in expected]
        own = [seen[i] for i in range(counts[hvd.rank()])]
        assert all(a is b for a, b in zip(own, mine, strict=True))
        if mine:
            assert all(batch is mine[-1] for batch in seen[len(mine) :])
        elif seen:
            lender = next(rank for rank in range(hvd.size()) if counts[rank])
            lent = make_batches(counts, lender)[0]
            assert all(torch.equal(batch, lent) for batch in seen)


def check_ranks_that_run_out_in_the_middle_of_an_accumulation_window():
    for counts in COUNTS:
        for op, averaged in [(hvd.Average, True), (hvd.Average, False), (hvd.Sum, False)]:
            model = make_model()
            optimizer = wrap(
                model, op=op, backward_passes_per_step=2, average_aggregated_gradients=averaged
            )
            passes = 0
            with uneven_inputs(make_batches(counts, hvd.rank()), optimizer) as batches:
                for passes, batch in enumerate(batches, 1):
                    if passes % 2:
                        optimizer.zero_grad()
                    loss_of(model, batch).backward()
                    if passes % 2 == 0:
                        optimizer.step()
            if passes % 2:  # the last window is half a one
                optimizer.step()
            check_replicas(model)

            reference = make_model()
            plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
            everything = [make_batches(counts, rank) for rank in range(hvd.size())]
            for first in range(0, max(counts), 2):
                plain.zero_grad()
                window = range(first, min(first + 2, max(counts)))
                for i in window:
                    losses = [loss_of(reference, b[i]) for b in everything if i < len(b)]
                    ranks = len(losses) if op == hvd.Average else 1
                    (sum(losses) / ranks / (len(window) if averaged else 1)).backward()
                plain.step()
            for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs)


def check_training_is_the_mean_over_the_ranks_still_active():
    """The reference: one process that averages the gradients of the batches there are."""
    for counts in COUNTS:
        model = make_model()
        optimizer = wrap(model)
        with uneven_inputs(make_batches(counts, hvd.rank()), optimizer) as batches:
            for batch in batches:
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
        check_replicas(model)

        reference = make_model()
        plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
        everything = [make_batches(counts, rank) for rank in range(hvd.size())]
        for i in range(max(counts)):
            plain.zero_grad()
            losses = [loss_of(reference, b[i]) for b in everything if i < len(b)]
            (sum(losses) / len(losses)).backward()
            plain.step()
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(model.get_parameter(name), parameter, rtol=1e-9, atol=1e-12)


def check_the_optimizer_is_whole_again_afterwards():
    for leave in ("end", "break", "raise"):
        model = make_model()
        optimizer = wrap(model)
        with pytest.MonkeyPatch.context() as patch:
            calls = []
            original = optimizer.set_participation
            patch.setattr(
                optimizer,
                "set_participation",
                lambda *args, original=original, calls=calls: (calls.append(args), original(*args)),
            )
            try:
                with uneven_inputs(make_batches((1, 3), hvd.rank()), optimizer) as batches:
                    for i, batch in enumerate(batches):
                        optimizer.zero_grad()
                        loss_of(model, batch).backward()
                        optimizer.step()
                        if leave == "break" and i == 1:
                            break
                        if leave == "raise" and i == 1:
                            raise KeyError("on all ranks")
            except KeyError:
                assert leave == "raise"
        assert calls[-1] == (True, None)
        assert (hvd.rank() == 1, 1) in calls
        # A step afterwards averages over all ranks again.
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.param_groups[0]["momentum"] = 0.0
        optimizer.zero_grad()
        batch = torch.full((1, 3), hvd.rank() + 1.0)
        gradients = [torch.zeros_like(p) for p in model.parameters()]
        for rank in range(hvd.size()):
            other = make_model()
            other.load_state_dict(model.state_dict())
            loss_of(other, torch.full((1, 3), rank + 1.0)).backward()
            for total, parameter in zip(gradients, other.parameters(), strict=True):
                total += parameter.grad / hvd.size()
        loss_of(model, batch).backward()
        optimizer.step()
        for old, new, gradient in zip(before, model.parameters(), gradients, strict=True):
            torch.testing.assert_close(new.detach(), old - 0.1 * gradient)


def check_metrics_weigh_a_repeated_batch_by_zero():
    counts = (1, 4)
    total, rows = 0.0, 0
    with uneven_inputs(make_batches(counts, hvd.rank())) as batches:
        for batch in batches:
            count = len(batch) * batches.active
            total += batch.sum().item() * batches.active
            rows += count
            values = gather(torch.full((count,), hvd.rank()))
            assert len(values) == 4 * batches.active_ranks
    mean = average_metrics({"sum": total / max(rows, 1)}, count=rows)["sum"]
    everything = torch.cat([b for rank in range(hvd.size()) for b in make_batches(counts, rank)])
    assert mean == pytest.approx(everything.sum().item() / len(everything), rel=1e-5)


def check_several_optimizers_and_accumulation():
    counts = (2, 4)
    models = [make_model(), make_model()]
    optimizers = [wrap(m, backward_passes_per_step=2) for m in models]
    with uneven_inputs(make_batches(counts, hvd.rank()), optimizers) as batches:
        for i, batch in enumerate(batches):
            for model, optimizer in zip(models, optimizers, strict=True):
                loss_of(model, batch).backward()
                if i % 2:
                    optimizer.step()
                    optimizer.zero_grad()
    for model in models:
        check_replicas(model)
    state = [str(m.state_dict()) for m in models]
    assert state[0] == state[1] != str(make_model().state_dict())


def check_a_loader_that_fails_on_one_rank_ends_the_loop_on_all():
    def failing():
        yield torch.ones(1)
        if hvd.rank() == 1:
            raise OSError("disk gone")
        yield torch.ones(1)

    error, match = (OSError, "disk gone") if hvd.rank() == 1 else (HvdkitError, "rank 1 failed")
    steps = []
    with pytest.raises(error, match=match), uneven_inputs(failing()) as batches:
        steps.extend(batches)
    assert len(steps) == 1
    assert allgather_object(len(steps), name="steps") == [1] * hvd.size()


def check_a_plain_optimizer_is_refused():
    optimizer = torch.optim.SGD(make_model().parameters(), 0.1)
    with (
        pytest.raises(HvdkitError, match=r"wrapped by hvdkit\.torch.*got a SGD"),
        uneven_inputs([], optimizer),
    ):
        pass


if __name__ == "__main__":
    run_checks(globals())
