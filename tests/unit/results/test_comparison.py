"""Which results may be compared, and what follows from their samples."""

import copy
import random

import pytest
from click.testing import CliRunner

from hvdkit.cli import main
from hvdkit.results.comparison import compare_results, find_mismatches
from hvdkit.results.files import make_result, make_series, write_result


def make(rounds, lower_is_better=True, **labels):
    """A result whose slowest rank takes what ``rounds`` says, three samples a round."""
    other = 0.5 if lower_is_better else 2.0
    samples = [[[one * other] * 3, [one, one, one]] for one in rounds]
    labels = {"model": "mlp", "workers": 2} | labels
    metric = "step_s" if lower_is_better else "samples_per_s"
    series = make_series(metric, "", samples, lower_is_better=lower_is_better, **labels)
    return make_result("train", {}, [series], {})


def noisy(center, seed, rounds=15):
    rng = random.Random(seed)
    return [center * rng.uniform(0.97, 1.03) for _ in range(rounds)]


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.0, "fine"), (1.1, "regression"), (0.8, "faster"), (1.03, "fine")]
)
@pytest.mark.parametrize("lower_is_better", [True, False])
def test_verdicts_whichever_way_the_metric_counts(factor, verdict, lower_is_better):
    before, after = noisy(1.0, 1), noisy(factor, 2)
    if not lower_is_better:
        before, after = [1 / x for x in before], [1 / x for x in after]
    (one,) = compare_results(make(before, lower_is_better), make(after, lower_is_better))
    assert one.verdict == verdict
    assert one.ratio.low <= one.ratio.estimate <= one.ratio.high
    assert one.ratio.estimate == pytest.approx(factor, rel=0.03)


def test_the_same_result_is_fine_and_exactly_one():
    result = make(noisy(1.0, 3))
    (one,) = compare_results(result, copy.deepcopy(result))
    assert (one.verdict, one.ratio.estimate) == ("fine", 1.0)


def test_few_rounds_are_not_enough():
    (one,) = compare_results(make([1.0] * 4), make([2.0] * 4))
    assert one.verdict == "not enough data"


@pytest.mark.parametrize("lower_is_better", [True, False])
def test_what_has_no_ratio_is_left_out(lower_is_better):
    ones, zeros = make([1.0] * 5, lower_is_better), make([0.0] * 5, lower_is_better)
    assert compare_results(ones, zeros) == compare_results(zeros, ones) == []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda r: r.update(driver="allreduce"), "driver: train and allreduce"),
        (lambda r: r["machine"].update(processor="abacus"), "abacus"),
        (lambda r: r["machine"].update(cores=4096), "and 4096"),
        (lambda r: r["machine"].update(accelerators=["H200"]), "accelerators"),
        (lambda r: r["machine"]["versions"].update(torch="1.0"), "version of torch: "),
        (lambda r: r["series"][0]["labels"].update(workers=4), "workers: 2 and 4"),
        (lambda r: r["series"][0]["labels"].update(batch=8), "batch: None and 8"),
    ],
)
def test_what_keeps_results_apart_is_named(change, line):
    before = make([1.0] * 5)
    after = copy.deepcopy(before)
    assert find_mismatches(before, after) == []
    change(after)
    assert any(line in found for found in find_mismatches(before, after))


def test_of_two_drivers_nothing_else_is_said():
    before = make([1.0] * 5)
    after = copy.deepcopy(before)
    after["driver"] = "predict"
    after["series"][0]["metric"] = "predicted_step_s"
    assert find_mismatches(before, after) == ["driver: train and predict"]


def test_other_versions_of_hvdkit_are_what_people_compare():
    before = make([1.0] * 5)
    after = copy.deepcopy(before)
    after["hvdkit"] = after["machine"]["versions"]["hvdkit"] = "9.9"
    assert find_mismatches(before, after) == []


def run(tmp_path, before, after, *options):
    paths = []
    for name, result in (("before", before), ("after", after)):
        paths.append(tmp_path / f"{name}.json")
        write_result(paths[-1], result, force=True)
    return CliRunner().invoke(main, ["compare", *map(str, paths), *options])


def test_exit_codes(tmp_path):
    good, slow = make(noisy(1.0, 1)), make(noisy(1.2, 2))
    assert run(tmp_path, good, make(noisy(1.0, 4))).exit_code == 0
    done = run(tmp_path, good, slow)
    assert done.exit_code == 1
    assert "regression" in done.output
    assert run(tmp_path, good, slow, "--tolerance", "0.5").exit_code == 0
    assert run(tmp_path, make([1.0]), make([1.0])).exit_code == 3
    done = run(tmp_path, good, make(noisy(1.0, 1), workers=4))
    assert done.exit_code == 3
    assert "workers: 2 and 4" in done.output


def test_force_compares_what_was_measured_elsewhere(tmp_path):
    good, elsewhere = make(noisy(1.0, 1)), make(noisy(1.0, 2))
    elsewhere["machine"]["processor"] = "another"
    assert run(tmp_path, good, elsewhere).exit_code == 3
    assert run(tmp_path, good, elsewhere, "--force").exit_code == 0


def test_a_damaged_file_is_no_regression(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("{")
    done = CliRunner().invoke(main, ["compare", str(path), str(path)])
    assert done.exit_code == 3
    assert f"{path} is no JSON" in done.output
