"""Ranks that disagree end with an error that says so; they neither hang nor drift apart."""

from pathlib import Path

import pytest

from tests.distributed.launch import launch

WORKER = Path(__file__).with_name("worker_disagreement.py")


def end(mode: str) -> str:
    run = launch(WORKER, args=[mode], timeout_s=90)
    assert run.exit_code not in (0, None), run.explain("the job should have ended by itself")
    for rank in range(2):
        assert f"rank {rank} was told" in run.output, run.explain("every rank should be told")
    return run.output


@pytest.mark.parametrize(
    ("mode", "name"), [("bucket", "1.weight"), ("direct", "2.weight"), ("sparse", "0.weight")]
)
def test_a_parameter_frozen_on_one_rank_is_named(mode, name):
    assert f"RankDisagreementError: '{name}' is frozen on this rank" in end(mode)


def test_groups_of_other_parameters_are_refused():
    output = end("groups")
    for rank in range(2):
        assert f"rank {rank} was told: RankDisagreementError" in output
    assert "'groups': rank 0 has [['1.weight'], ['2.weight']]" in output
