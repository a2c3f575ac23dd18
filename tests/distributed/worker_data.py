"""Checks of shard, ShardedSampler and gather."""

from collections import namedtuple

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import hvdkit.torch as hvd
from hvdkit.errors import HvdkitError, RankDisagreementError
from hvdkit.torch.collectives import allgather_object
from hvdkit.torch.gather import gather
from hvdkit.torch.sampler import ShardedSampler, shard
from tests.distributed.worker import run_checks


def everyones(value):
    """Return every rank's value, in rank order."""
    return allgather_object(value, name="everyones")


def flatten(batches):
    return [sample for batch in batches for sample in batch]


def interleave(shares):
    """The samples in the order of the epoch: first of rank 0, first of rank 1, ..."""
    return [sample for step in zip(*shares, strict=True) for sample in step]


def check_every_sample_once_and_the_same_number_on_all_ranks():
    for length in (2, 7, 8, 13):
        for drop_last in (False, True):
            sampler = shard(range(length), seed=3, drop_last=drop_last)
            mine = list(sampler)
            assert len(sampler) == len(mine)
            shares = everyones(mine)
            whole = length // hvd.size() if drop_last else -(-length // hvd.size())
            assert [len(share) for share in shares] == [whole] * hvd.size()
            order = interleave(shares)
            assert len(set(order[:length])) == min(length, len(order))
            assert order[length:] == order[: max(0, len(order) - length)]


def check_steps_are_those_of_one_process_with_a_larger_batch():
    """Batch b of all ranks together: rows b * B * N to (b + 1) * B * N of the one order."""
    data = TensorDataset(torch.arange(23))
    sampler = shard(data, shuffle=False)
    batches = [batch.tolist() for (batch,) in DataLoader(data, batch_size=4, sampler=sampler)]
    for step, together in enumerate(zip(*everyones(batches), strict=True)):
        start = step * 4 * hvd.size()
        expected = [i % 23 for i in range(start, min(start + 4 * hvd.size(), 24))]
        assert sorted(flatten(together)) == sorted(expected)


def check_epochs_reshuffle_and_come_back():
    sampler = shard(range(40), seed=1)
    orders = []
    for epoch in (0, 1, 2, 1, 0):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
        assert list(sampler) == orders[-1]
    assert orders[0] == orders[4]
    assert orders[1] == orders[3]
    assert orders[0] != orders[1] != orders[2]
    assert list(shard(range(40), seed=2)) != orders[0]
    assert list(shard(range(40), shuffle=False)) == list(range(hvd.rank(), 40, hvd.size()))


def check_training_goes_on_in_the_middle_of_an_epoch():
    """With prefetching worker processes, stopped after every possible number of steps."""
    data = TensorDataset(torch.arange(21))
    for steps in range(5):
        sampler = shard(data, seed=4)
        sampler.set_epoch(2)
        loader = DataLoader(data, batch_size=3, sampler=sampler, num_workers=2 * (steps == 2))
        whole = [batch.tolist() for (batch,) in loader]
        used = []
        for step, (batch,) in enumerate(loader):
            if step == steps:
                break
            used.append(batch.tolist())
            sampler.advance(len(batch))
        state = sampler.state_dict()
        assert everyones(state) == [state] * hvd.size()

        resumed = shard(data, seed=0)
        resumed.load_state_dict(state)
        assert resumed.epoch == (2 if steps < 4 else 3)
        resumed.set_epoch(resumed.epoch)
        rest = [batch.tolist() for (batch,) in DataLoader(data, batch_size=3, sampler=resumed)]
        if steps < 4:
            assert used + rest == whole
            assert len(resumed) == sum(len(batch) for batch in whole[steps:])
        else:
            assert len(flatten(rest)) == len(flatten(whole))
        resumed.set_epoch(7)
        assert len(list(resumed)) == len(flatten(whole))


def check_another_world_size_takes_over():
    """A single process goes on where two ranks stopped, and two where one stopped."""
    alone = [hvd.add_process_set([rank]) for rank in range(hvd.size())][hvd.rank()]
    order = list(ShardedSampler(range(15), seed=9, process_set=alone))
    together = ShardedSampler(range(15), seed=9)
    mine = list(together)[:3]
    together.advance(3)
    single = ShardedSampler(range(15), seed=9, process_set=alone)
    single.load_state_dict(together.state_dict())
    assert interleave(everyones(mine)) + list(single) == order

    single = ShardedSampler(range(15), seed=9, process_set=alone)
    single.advance(5)
    together.load_state_dict(single.state_dict())
    assert order[:5] + interleave(everyones(list(together))) == order


def check_a_used_up_epoch_starts_over():
    sampler = shard(range(6), shuffle=False)
    first = list(sampler)
    sampler.advance(3)
    assert len(sampler) == 3
    assert list(sampler) == first


def check_bad_datasets_are_refused_on_every_rank():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    class NoLength(Dataset):
        def __getitem__(self, index):
            return index

    with pytest.raises(HvdkitError, match="1 samples, fewer than the 2 workers"):
        shard(range(1))
    with pytest.raises(HvdkitError, match=r"Stream is an IterableDataset.*uneven_inputs"):
        shard(Stream())
    with pytest.raises(HvdkitError, match="NoLength has no length"):
        shard(NoLength())
    state = shard(range(8)).state_dict()
    with pytest.raises(HvdkitError, match="8 samples, this one has 9"):
        shard(range(9)).load_state_dict(state)


def check_gather_over_an_epoch_is_the_dataset():
    """Exactly one row a sample, in order, whatever the batch size; nested and of many dtypes."""
    Result = namedtuple("Result", "logits extras")
    for length in (5, 8, 13):
        for batch_size in (1, 3, 4, 50):
            data = TensorDataset(torch.arange(length))
            sampler = shard(data, shuffle=False)
            loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
            for _ in range(2):
                gathered = []
                for (index,) in loader:
                    logits = torch.stack([index, -index], dim=1).to(torch.bfloat16)
                    extras = {"odd": index % 2 == 1, "parts": [index, (index * 1j,)]}
                    gathered.append(gather(Result(logits, extras), sampler))
                logits = torch.cat([result.logits for result in gathered])
                assert logits.dtype == torch.bfloat16
                assert logits.tolist() == [[i, -i] for i in range(length)]
                odd = torch.cat([result.extras["odd"] for result in gathered])
                assert odd.dtype == torch.bool
                assert odd.tolist() == [i % 2 == 1 for i in range(length)]
                waves = torch.cat([result.extras["parts"][1][0] for result in gathered])
                assert waves.tolist() == [i * 1j for i in range(length)]


def check_gather_follows_a_resumed_and_a_broken_off_epoch():
    data = TensorDataset(torch.arange(11))
    sampler = shard(data, shuffle=False)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    for (index,) in loader:
        assert gather(index, sampler).tolist() == [0, 1, 2, 3]
        break
    rows = torch.cat([gather(index, sampler) for (index,) in loader])
    assert rows.tolist() == list(range(11))
    sampler.advance(2)
    rows = torch.cat([gather(index, sampler) for (index,) in loader])
    assert rows.tolist() == list(range(2 * hvd.size(), 11))


def check_gather_of_different_numbers_of_rows():
    """Rank r gives r rows of (r + 1); rank 0 gives none."""
    rank = hvd.rank()
    tensor = torch.full((rank, 3), rank + 1.0, requires_grad=True)
    result = gather({"a": tensor, "b": tensor.bool()[:, 0]})
    expected = [[r + 1.0] * 3 for r in range(hvd.size()) for _ in range(r)]
    assert result["a"].tolist() == expected
    assert not result["a"].requires_grad
    assert result["b"].tolist() == [True] * len(expected)
    assert gather([]) == []


def check_gather_refuses_on_every_rank():
    odd = hvd.rank() == 1
    two = torch.ones(2)
    with pytest.raises(HvdkitError, match=r"rank 1: \['loss'\] has no dimension.*average_metrics"):
        gather({"loss": torch.tensor(1.0) if odd else two})
    with pytest.raises(HvdkitError, match=r"rank 0: \[0\] is no dense tensor but a float"):
        gather([two if odd else 3.0])
    with pytest.raises(RankDisagreementError, match=r"\['a'\].*\['b'\]"):
        gather({"b" if odd else "a": two})
    with pytest.raises(RankDisagreementError, match=r"float32 \(\*, 3\).*float32 \(\*, 4\)"):
        gather(torch.ones(2, 3 + odd))
    with pytest.raises(RankDisagreementError, match=r"bfloat16.*float32"):
        gather(two if odd else two.bfloat16())
    with pytest.raises(RankDisagreementError, match="has 2 tensors, rank 1 has 1"):
        gather([two] * (2 - odd))
    with pytest.raises(RankDisagreementError, match=r"same number of rows.*\[2, 3\]"):
        gather(torch.ones(2 + odd), shard(range(20)))
    assert gather(two).tolist() == [1.0] * 2 * hvd.size()


if __name__ == "__main__":
    run_checks(globals())
