"""Settings of Horovod: preferred ones, and that the user's stay; threads a worker."""

import os
import warnings

import pytest

from hvdkit.tuning import (
    FUSION_THRESHOLD_BYTES,
    prefer_settings,
    say_too_few_gpus,
    share_cores,
    warn_of_too_many_threads,
)


def test_buckets_are_not_fused_again(tmp_path):
    environ = {"HOME": str(tmp_path)}
    prefer_settings(environ)
    assert environ["HOROVOD_FUSION_THRESHOLD"] == str(FUSION_THRESHOLD_BYTES)


def test_a_rank_is_not_waited_for_without_end():
    environ = {"HOROVOD_AUTOTUNE": "1"}
    prefer_settings(environ)
    assert environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] == "60"


@pytest.mark.parametrize("chosen", [{"HOROVOD_FUSION_THRESHOLD": "0"}, {"HOROVOD_AUTOTUNE": "1"}])
def test_what_the_user_has_set_stays(chosen, tmp_path):
    given = {**chosen, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0", "HOME": str(tmp_path)}
    environ = dict(given)
    prefer_settings(environ)
    assert environ == given


def test_cores_are_shared_out_and_none_goes_without():
    cores = len(os.sched_getaffinity(0))
    assert share_cores(1) == cores
    assert share_cores(cores) == 1
    assert share_cores(cores + 1) == 1


def test_more_threads_than_cores_are_named():
    cores = len(os.sched_getaffinity(0))
    with pytest.warns(RuntimeWarning, match=f"2 workers with {cores} threads each share {cores} "):
        warn_of_too_many_threads(cores, workers=2)
    with pytest.warns(RuntimeWarning, match="start fewer workers$"):
        warn_of_too_many_threads(1, workers=cores + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_too_many_threads(1, workers=cores)


def test_too_few_gpus_say_what_to_do():
    assert say_too_few_gpus(2, 0, "torch").startswith("torch sees no GPU on this host: ")
    assert "start at most 1 workers" in say_too_few_gpus(2, 1, "torch")
