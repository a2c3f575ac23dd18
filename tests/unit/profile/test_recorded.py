"""The fit to runs of 1 and 2 workers against the measured run of 4, as recorded on one machine.

``recorded/train.json`` and ``recorded/allreduce.json`` are results as the drivers wrote them, with
the commands in their ``settings``, on two cores: four workers took turns on them.
"""

import copy
from pathlib import Path
from statistics import median

import pytest

from hvdkit.profile.fitting import fit
from hvdkit.profile.given import Given
from hvdkit.profile.measured import collect
from hvdkit.profile.scaling import predict_step
from hvdkit.results.files import read_result

FOLDER = Path(__file__).with_name("recorded")


def keep(result, counts):
    """Return the result without the series of other numbers of workers."""
    result = copy.deepcopy(result)
    result["series"] = [one for one in result["series"] if one["labels"]["workers"] in counts]
    return result


@pytest.mark.parametrize("model", ["mlp", "cnn", "many-small"])
def test_runs_of_one_and_two_workers_tell_what_four_took(model):
    train, messages = (read_result(FOLDER / name) for name in ("train.json", "allreduce.json"))
    few = collect({"t": keep(train, {1, 2}), "a": keep(messages, {2})}, model=model)
    four = collect({"t": keep(train, {4})}, model=model)
    assert {workers for workers, _ in few.together} == {1, 2}
    ((workers, samples),) = four.together
    assert workers == 4
    rounds = four.together[4, samples]
    measured_s = median(median(map(max, zip(*ranks, strict=True))) for ranks in rounds)
    scaling, _ = fit(few, Given(workers_per_host=4))
    for count in (1, 2):
        own = few.together[count, samples]
        own_s = median(median(map(max, zip(*ranks, strict=True))) for ranks in own)
        assert predict_step(scaling, count).step_s == pytest.approx(own_s, rel=0.05)
    assert predict_step(scaling, 4).step_s == pytest.approx(measured_s, rel=0.25)
