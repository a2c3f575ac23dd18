"""Whether ``compare`` tells a change from noise: six real runs of the same commit.

Recorded one after the other on a shared machine of two cores, each by
``hvdkit bench train --model mlp,many-small,cnn -np 2 --repeats 8 --steps 8``.
"""

import copy
import itertools
from pathlib import Path

import pytest

from hvdkit.results.comparison import compare_results
from hvdkit.results.files import read_result

FOLDER = Path(__file__).with_name("recorded")
RUNS = [read_result(path) for path in sorted(FOLDER.glob("same_commit_*.json"))]
PAIRS = list(itertools.permutations(RUNS, 2))
MODELS = ("mlp", "many-small", "cnn")


def slow_down(result, factor, candidate="hvdkit"):
    """Return the result as if every step of a candidate had taken longer."""
    result = copy.deepcopy(result)
    for one in result["series"]:
        if one["labels"]["candidate"] == candidate:
            one["samples"] = [
                [[step * factor for step in rank] for rank in ranks] for ranks in one["samples"]
            ]
    return result


def find_verdicts(before, after):
    return {
        (one.labels["model"], one.labels["candidate"]): one.verdict
        for one in compare_results(before, after)
    }


def test_six_runs_make_thirty_tries():
    assert len(PAIRS) == 30


def test_the_same_commit_is_fine_in_19_of_20_tries():
    worse = [pair for pair in PAIRS if "regression" in find_verdicts(*pair).values()]
    assert len(worse) <= len(PAIRS) // 20


def test_a_planted_tenth_is_found_in_18_of_20_tries():
    verdicts = [find_verdicts(before, slow_down(after, 1.1)) for before, after in PAIRS]
    found = [one for one in verdicts if "regression" in one.values()]
    assert len(found) >= len(PAIRS) * 18 / 20
    # On each model alone nearly as often, though these runs are shorter than the default.
    for model in MODELS:
        assert sum(one[model, "hvdkit"] == "regression" for one in verdicts) >= 25, model


def test_without_a_control_the_pace_of_the_machine_would_be_taken_for_a_change():
    def drop_control(result):
        series = [one for one in result["series"] if one["labels"]["candidate"] != "single"]
        return {**result, "series": series}

    worse = [
        pair for pair in PAIRS if "regression" in find_verdicts(*map(drop_control, pair)).values()
    ]
    assert len(worse) > len(PAIRS) // 20


def test_a_slower_machine_is_told_as_its_pace():
    before = RUNS[0]
    after = slow_down(slow_down(before, 1.3), 1.3, "single")
    assert set(find_verdicts(before, after).values()) == {"fine", "pace"}
    for one in compare_results(before, after):
        expected = 1.3 if one.labels["candidate"] == "single" else 1.0
        assert one.ratio.estimate == pytest.approx(expected)
