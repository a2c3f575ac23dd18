"""Bands, which numbers of workers, and the result."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.errors import HvdkitError
from hvdkit.profile.fitting import fit
from hvdkit.profile.given import Given
from hvdkit.profile.measured import collect
from hvdkit.profile.prediction import REPLICATES, choose_workers, describe, predict
from hvdkit.results.files import check_result
from tests.unit.profile.simulation import Cluster, allreduce, train

KNOWN = {
    "compute_s": 0.5,
    "batch": 64,
    "gradient_bytes": 400e6,
    "within_latency_s": 5e-6,
    "within_bandwidth": 12e9,
    "between_latency_s": 14e-6,
    "between_bandwidth": 3e9,
    "workers_per_host": 4,
    "overlap": 0.9,
    "straggler": 0.01,
}


@settings(max_examples=25, deadline=None)
@given(
    st.floats(0, 0.9),
    st.integers(0, 99),
    st.fixed_dictionaries(
        {
            "compute_s": st.floats(1e-3, 10),
            "between_bandwidth": st.floats(1e8, 1e11),
            "overlap": st.floats(0, 1),
            "straggler": st.floats(0, 0.2),
            "scaling": st.sampled_from(["weak", "strong"]),
        }
    ),
)
def test_bands_hold_the_estimate(uncertainty, seed, changes):
    prediction = predict(
        None,
        Given(**KNOWN | changes),
        [1, 4, 64],
        uncertainty=uncertainty,
        replicates=20,
        seed=seed,
    )
    for row in describe(prediction, None, {})["summary"]["points"]:
        for name in ("step_time_s", "scaling_efficiency"):
            assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"]
            if uncertainty == 0:
                assert row[f"{name}_low"] == pytest.approx(row[f"{name}_high"])


def test_a_larger_uncertainty_makes_wider_bands():
    def width(uncertainty):
        prediction = predict(None, Given(**KNOWN), [64], uncertainty=uncertainty)
        (row,) = describe(prediction, None, {})["summary"]["points"]
        return row["scaling_efficiency_high"] - row["scaling_efficiency_low"]

    assert 0 == width(0) < width(0.1) < width(0.3)


def test_the_same_seed_gives_the_same_bands():
    runs = [predict(None, Given(**KNOWN), [64], seed=seed).replicates for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]


def test_an_overlap_that_nobody_gave_is_uncertain_too():
    unknown = {name: value for name, value in KNOWN.items() if name != "overlap"}
    # Nothing else that is given matters: transfers, and no stragglers.
    still = {"straggler": 0.0, "between_bandwidth": 20e9, "bucket_bytes": 1e6}
    prediction = predict(None, Given(**unknown | still), [64], uncertainty=0.3)
    assert len(prediction.basis.assumptions) == 1
    assert "--overlap" in prediction.basis.assumptions[0]
    (steps_s,) = prediction.replicates
    assert len(steps_s) == REPLICATES  # a share above 1 is cut off, not left out
    fixed = predict(None, Given(**unknown | still, overlap=1.0), [64], uncertainty=0.0)
    assert max(steps_s) / 1.3 > fixed.points[0].step.step_s


@pytest.mark.parametrize(
    ("changes", "last", "count"),
    [
        ({}, 4096, 13),
        ({"scaling": "strong"}, 64, 7),
        ({"scaling": "strong", "batch": 48}, 48, 7),
        ({"between_bandwidth": None, "between_latency_s": None}, 4, 3),
        ({"between_bandwidth": None, "between_latency_s": None, "workers_per_host": 6}, 6, 4),
    ],
)
def test_powers_of_two_as_far_as_the_model_reaches(changes, last, count):
    model, _ = fit(None, Given(**KNOWN | changes))
    counts = choose_workers(model)
    assert (counts[0], counts[-1], len(counts)) == (1, last, count)


def test_a_model_without_any_link_is_about_one_worker():
    model, _ = fit(None, Given(compute_s=1.0, batch=8, gradient_bytes=1e6, workers_per_host=8))
    assert choose_workers(model) == [1]


def test_the_result_says_what_is_measured_and_what_extrapolated():
    cluster = Cluster()
    measured = collect({"t": train(cluster, (1, 2)), "a": allreduce(cluster, (2,))})
    result = describe(predict(measured, Given(price_per_worker_hour=2.0)), measured, {"a": 1})
    check_result(result, "here")
    json.dumps(result, allow_nan=False)
    assert result["driver"] == "predict"
    assert result["machine"] == dict(measured.machine)
    points = result["summary"]["points"]
    # On one host of four cores; of a network nobody said anything.
    assert [row["workers"] for row in points] == [1, 2, 4]
    assert [row["basis"] for row in points] == ["measured", "measured", "extrapolated"]
    for row, series in zip(points, result["series"], strict=True):
        assert series["metric"] == "predicted_step_s"
        assert series["labels"] == {
            "workers": row["workers"],
            "global_batch": 32 * row["workers"],
            "scaling": "weak",
        }
        (((*steps_s,),),) = series["samples"]
        assert row["step_time_s_low"] in (*steps_s, row["step_time_s"])
        assert row["samples_per_s"] == pytest.approx(32 * row["workers"] / row["step_time_s"])
        # 2 an hour for each worker.
        paid = 2 / 3600 * row["workers"] / row["samples_per_s"] * 1e6
        assert row["cost_per_million_samples"] == pytest.approx(paid)
    compared = result["summary"]["measured"]
    assert [row["workers"] for row in compared] == [1, 2]
    for row in compared:
        assert row["predicted_step_time_s"] == pytest.approx(row["step_time_s"], rel=0.03)
        assert row["step_time_alone_s"] <= row["step_time_s"]
    assert result["summary"]["model"]["price_per_worker_hour"] == 2.0


def test_measured_bands_need_no_given_number():
    cluster = Cluster(noise=0.1)
    measured = collect({"t": train(cluster, (1, 2)), "a": allreduce(cluster, (2,))})
    prediction = predict(measured, Given(), [2], uncertainty=0)
    (steps_s,) = prediction.replicates
    assert max(steps_s) > min(steps_s)


@pytest.mark.parametrize("uncertainty", [-0.1, 1.0, float("nan")])
def test_an_uncertainty_is_a_share(uncertainty):
    with pytest.raises(HvdkitError, match="uncertainty is a share"):
        predict(None, Given(**KNOWN), uncertainty=uncertainty)
