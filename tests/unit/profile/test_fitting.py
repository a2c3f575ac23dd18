"""The fit, on simulated steps that know nothing of the model's formula."""

import random
from dataclasses import replace
from statistics import median

import pytest

from hvdkit.errors import HvdkitError
from hvdkit.profile.communication_fit import fit_link
from hvdkit.profile.compute_fit import estimate_straggler, fit_line
from hvdkit.profile.fitting import fit
from hvdkit.profile.given import Given
from hvdkit.profile.measured import collect
from hvdkit.profile.prediction import predict
from hvdkit.profile.scaling import predict_step
from tests.unit.profile.simulation import Cluster, allreduce, ring_s, step_s, train

CLUSTERS = {
    "plain": Cluster(),
    "all hidden": Cluster(steal=0.0),
    "slow transfers": Cluster(bandwidth=0.6e9),
    "long latency": Cluster(latency_s=3e-4, bandwidth=8e9),
    "large noise": Cluster(noise=0.15),
    "two buckets": Cluster(bucket_bytes=12 << 20),
    "fewer cores than workers": Cluster(cores=2),
}


def simulate(cluster, workers, samples=None, steps=60):
    """Return the median step of many, in seconds."""
    rng = random.Random(99)
    samples = samples or cluster.batch
    return median(step_s(cluster, workers, samples, rng)[0] for _ in range(steps))


@pytest.mark.parametrize("name", CLUSTERS)
def test_runs_of_one_and_two_workers_tell_what_four_take(name):
    cluster = CLUSTERS[name]
    measured = collect({"t": train(cluster, (1, 2)), "a": allreduce(cluster, (2,))})
    model, _ = fit(measured, Given(workers_per_host=4))
    # The model's buckets are equally large; with two, the difference from real ones shows.
    error = 0.06 if name == "two buckets" else 0.04
    for workers in (1, 2, 4):
        truth_s = simulate(cluster, workers)
        assert predict_step(model, workers).step_s == pytest.approx(truth_s, rel=error)


def test_bands_hold_what_many_more_measurements_would_say():
    # Where the model itself is exact: bands know the error of samples, not that of the model.
    cluster = Cluster(noise=0.1)
    truth_s = simulate(cluster, 1, steps=20_000)
    given = Given(gradient_bytes=1.0)
    hits, widths = 0, []
    for seed in range(20):
        measured = collect({"t": train(cluster, (1,), rounds=15, seed=seed)})
        (steps_s,) = predict(measured, given, [1], uncertainty=0).replicates
        ordered = sorted(steps_s)
        low_s, high_s = ordered[len(ordered) // 40], ordered[-1 - len(ordered) // 40]
        hits += low_s <= truth_s <= high_s
        widths.append(high_s / low_s - 1)
    assert hits >= 16  # 19 of 20 are meant; the bootstrap of few rounds is known to fall short
    assert median(widths) < 0.1  # a wide band would hold everything


def test_one_machine_and_a_given_network_tell_what_hosts_take():
    cluster = Cluster(per_host=1, cores=1)
    given = Given(
        workers_per_host=1,
        between_latency_s=cluster.network_latency_s,
        between_bandwidth=cluster.network_bandwidth,
        overlap=1 - cluster.steal,
    )
    model, basis = fit(collect({"t": train(cluster, (1,))}), given)
    assert basis.origins["transfers between hosts"] == "given"
    for workers in (2, 4, 16):
        truth_s = simulate(cluster, workers)
        assert predict_step(model, workers).step_s == pytest.approx(truth_s, rel=0.1)


def test_strong_scaling_from_two_batches():
    cluster = Cluster(cores=8)
    results = {"weak": train(cluster, (1, 2)), "strong": train(cluster, (1, 2), strong=True)}
    results["a"] = allreduce(cluster, (2,))
    given = Given(scaling="strong", batch=cluster.batch)
    model, basis = fit(collect(results), given)
    assert not [one for one in basis.assumptions if "proportional" in one]
    assert model.fixed_s == pytest.approx(0, abs=0.002)  # nothing in the simulation is
    truth_s = simulate(cluster, 4, cluster.batch // 4)
    assert predict_step(model, 4).step_s == pytest.approx(truth_s, rel=0.15)


def test_contention_is_found():
    cluster = Cluster(noise=0.01)
    result = train(cluster, (1, 2, 4))
    for series in result["series"]:
        factor = 1 + 0.1 * (series["labels"]["workers"] - 1)
        series["samples"] = [[[s * factor for s in r] for r in k] for k in series["samples"]]
    model, _ = fit(collect({"t": result, "a": allreduce(cluster, (2,))}), Given())
    assert model.contention == pytest.approx(0.1, abs=0.01)


def test_what_is_longer_than_all_of_the_communication_is_overhead():
    cluster = Cluster(noise=0.01, steal=1.0)
    result = train(cluster, (1, 2))
    for series in result["series"]:
        if series["labels"]["candidate"] == "hvdkit" and series["labels"]["workers"] == 2:
            series["samples"] = [[[s + 0.02 for s in r] for r in k] for k in series["samples"]]
    model, _ = fit(collect({"t": result, "a": allreduce(cluster, (2,))}), Given(workers_per_host=4))
    assert model.overlap == 0
    assert model.overhead_s == pytest.approx(0.02, abs=0.003)


def test_a_link_is_found_from_what_its_messages_take():
    cluster = Cluster()
    rng = random.Random(3)
    sizes = (1e3, 1e5, 1e6, 1e7, 1e8)
    link = fit_link((n, size, ring_s(cluster, n, size, rng)) for n in (2, 4) for size in sizes)
    assert link.latency_s == pytest.approx(cluster.latency_s, rel=0.1)
    assert link.bandwidth_bytes_per_s == pytest.approx(cluster.bandwidth, rel=0.05)


@pytest.mark.parametrize(
    "points", [[], [(2, 1e6, 1e-3)], [(2, 1e3, 1e-3), (2, 1e6, 1e-3), (2, 1e7, 0.5e-3)]]
)
def test_no_link_follows_from_too_little(points):
    assert fit_link(points) is None


def test_a_line_has_no_negative_part():
    assert fit_line({10: 3.0, 20: 5.0}) == pytest.approx((1.0, 0.2))
    assert fit_line({10: 3.0}) == pytest.approx((0.0, 0.3))
    assert fit_line({10: 1.0, 20: 3.0})[0] == 0
    assert fit_line({10: 3.0, 20: 2.0}) == pytest.approx((2.5, 0.0))


def test_the_scatter_of_gumbel_samples_is_found_and_a_hiccup_is_not():
    rng = random.Random(5)
    scale = 0.04
    rounds = [[[rng.gammavariate(50, 0.02) for _ in range(40)] for _ in range(2)] for _ in range(9)]
    spread = estimate_straggler(rounds)
    # The mean of the larger of two is what the scale stands for: scale * ln(2) above the mean.
    pairs = [(rng.gammavariate(50, 0.02), rng.gammavariate(50, 0.02)) for _ in range(20000)]
    above = sum(max(pair) - sum(pair) / 2 for pair in pairs) / len(pairs)
    assert spread * 0.6931 == pytest.approx(above, rel=0.1)
    assert spread > scale
    rounds[4][0][3] = 100.0
    assert estimate_straggler(rounds) == pytest.approx(spread, rel=0.05)


def test_a_given_number_stands_in_place_of_a_measured_one():
    cluster = Cluster()
    measured = collect({"t": train(cluster, (1, 2)), "a": allreduce(cluster, (2,))})
    plain, basis = fit(measured, Given())
    assert set(basis.origins) == {
        "computation",
        "overlap",
        "stragglers",
        "transfers within a host",
    }
    fields = {"overlap": 0.25, "straggler": 0.5, "bucket_bytes": 1e6, "gradient_bytes": 1e6}
    for name, value in fields.items():
        other, _ = fit(measured, Given(**{name: value}))
        assert getattr(other, name) == value != getattr(plain, name)
    other, basis = fit(measured, Given(within_bandwidth=5e9))
    assert other.within == replace(plain.within, bandwidth_bytes_per_s=5e9)
    assert basis.origins["transfers within a host"] == "measured and given"
    other, basis = fit(measured, Given(compute_s=3.2))
    assert other.per_sample_s == pytest.approx(3.2 / cluster.batch)


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        (Given(), "--parameters|--batch-size"),
        (Given(batch=32), "--parameters"),
        (Given(batch=32, gradient_bytes=1e6), "--step-time-s"),
        (Given(gradient_bytes=1e6, compute_s=1.0), "--batch-size"),
        (Given(batch=32, gradient_bytes=1e6, compute_s=1.0, between_latency_s=1e-5), "no bandwid"),
        (Given(batch=32, gradient_bytes=1e6, compute_s=1.0, fixed_s=2.0), "fixed part"),
    ],
)
def test_what_is_missing_is_named(given, missing):
    with pytest.raises(HvdkitError, match=missing):
        fit(None, given)
    cluster = Cluster()
    only = collect({"a": allreduce(cluster, (2,))})
    with pytest.raises(HvdkitError, match=missing):
        fit(only, given)


def test_steps_that_reduce_need_some_that_do_not():
    measured = collect({"t": train(Cluster(), (2,), candidates=["hvdkit"])})
    with pytest.raises(HvdkitError, match="how long a step computes"):
        fit(measured, Given())


def test_results_of_several_hosts_need_the_workers_of_each():
    cluster = Cluster(per_host=1, cores=1)
    results = {"t": train(cluster, (1, 2)), "a": allreduce(cluster, (2, 4), hosts=4)}
    with pytest.raises(HvdkitError, match=r"4 hosts.*--workers-per-host"):
        fit(collect(results), Given())
    model, basis = fit(collect(results), Given(workers_per_host=1))
    assert basis.origins["transfers between hosts"] == "measured"
    assert model.between.bandwidth_bytes_per_s == pytest.approx(1e9, rel=0.05)
    assert model.within is None
    truth_s = simulate(cluster, 8)
    assert predict_step(model, 8).step_s == pytest.approx(truth_s, rel=0.1)


def stretch(result, factor, candidate=None, workers=None):
    """Make steps longer, of one candidate and number of workers or of all."""
    for series in result["series"]:
        labels = series["labels"]
        if candidate in (None, labels["candidate"]) and workers in (None, labels["workers"]):
            share = factor(labels["workers"]) if callable(factor) else factor
            series["samples"] = [[[s * share for s in r] for r in k] for k in series["samples"]]
    return result


def test_results_of_more_workers_than_cores_alone_tell_what_fewer_take():
    cluster = Cluster(cores=2)
    measured = collect({"t": train(cluster, (4,)), "a": allreduce(cluster, (4,))})
    model, _ = fit(measured, Given())
    assert model.within.bandwidth_bytes_per_s == pytest.approx(cluster.bandwidth, rel=0.05)
    for workers in (1, 2, 4):
        truth_s = simulate(cluster, workers)
        assert predict_step(model, workers).step_s == pytest.approx(truth_s, rel=0.05)


def test_steps_in_which_cores_took_turns_count_only_where_there_are_no_others():
    cluster = Cluster(cores=2)
    results = {"t": train(cluster, (1, 2, 4)), "a": allreduce(cluster, (2, 4))}
    model, _ = fit(collect(results), Given())
    stretch(results["t"], 3, candidate="hvdkit", workers=4)
    other, _ = fit(collect(results), Given())
    assert (other.overlap, other.overhead_s) == (model.overlap, model.overhead_s)


def test_batches_measured_with_two_workers_say_what_depends_on_samples():
    cluster = Cluster(noise=0.0)
    slower = 1.2
    results = {"w": train(cluster, (1, 2)), "s": train(cluster, (2,), strong=True)}
    for result in results.values():
        stretch(result, slower, workers=2)
    model, _ = fit(collect({**results, "a": allreduce(cluster, (2,))}), Given())
    # The speed is that of one worker; how it depends on the samples is known from two.
    assert predict_step(model, 1).compute_s == pytest.approx(0.030, rel=0.01)
    assert predict_step(model, 1, 16).compute_s == pytest.approx(0.015, rel=0.03)
    assert model.contention == pytest.approx(slower - 1, abs=0.01)


def test_what_shows_is_counted_from_the_steps_beside_it():
    # Four workers slow each other down and two do not: no straight line fits both.
    cluster = Cluster(noise=0.01)
    results = {"t": train(cluster, (1, 2, 4)), "a": allreduce(cluster, (2, 4))}
    model, _ = fit(collect(results), Given())
    for series in results["t"]["series"]:
        if series["labels"]["workers"] == 4:
            series["samples"] = [[[s + 0.015 for s in r] for r in k] for k in series["samples"]]
    bent, _ = fit(collect(results), Given())
    assert bent.contention > model.contention + 0.1
    assert bent.overlap == pytest.approx(model.overlap, abs=0.02)
    assert model.overhead_s == pytest.approx(bent.overhead_s, abs=1e-4)


def test_steps_that_wait_for_transfers_say_nothing_about_the_overlap():
    cluster = Cluster(cores=8, bandwidth=0.8e9, noise=0.01)
    models = [
        fit(collect({"t": train(cluster, counts), "a": allreduce(cluster, (2,))}), Given())[0]
        for counts in ((1, 2), (1, 2, 8))
    ]
    ideal = predict_step(replace(models[0], overlap=1.0), 8)
    assert ideal.exposed_s > 2 * ideal.bucket_s  # transfers never pause
    assert models[1].overlap == pytest.approx(models[0].overlap, abs=0.05) != 1


def test_messages_of_one_host_say_nothing_about_a_network():
    cluster = Cluster()
    results = {"t": train(cluster, (1, 2)), "a": allreduce(cluster, (2, 4))}
    model, _ = fit(collect(results), Given(workers_per_host=2))
    assert model.between is None


def test_the_pace_is_that_of_the_candidate_alone():
    # "single" may be slower or faster for reasons of its own, with any number of workers.
    cluster = Cluster(noise=0.01)
    results = {"t": train(cluster, (1, 2)), "a": allreduce(cluster, (2,))}
    model, _ = fit(collect(results), Given())
    stretch(results["t"], 1.4, candidate="single")
    other, _ = fit(collect(results), Given())
    for workers in (1, 2, 4):
        step_s = predict_step(model, workers).step_s
        assert predict_step(other, workers).step_s == pytest.approx(step_s, rel=0.01)
    assert predict_step(other, 1).step_s == pytest.approx(0.030, rel=0.01)
