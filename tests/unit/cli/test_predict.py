"""``hvdkit predict``: options, tables, files, and one line for what is wrong."""

import json

import pytest
from click.testing import CliRunner

from hvdkit.cli import main
from hvdkit.results.files import read_result, write_result
from tests.unit.profile.simulation import Cluster, allreduce, train

MODEL = ["--step-time-s", "0.5", "--batch-size", "64", "--parameters", "1e8"]
NETWORK = ["--latency-us", "14", "--bandwidth-gbit-s", "24"]
HOST = ["--workers-per-host", "4", "--intra-latency-us", "5", "--intra-bandwidth-gbytes-s", "12"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Paths of a result of each driver."""
    folder = tmp_path_factory.mktemp("results")
    cluster = Cluster()
    write_result(folder / "train.json", train(cluster, (1, 2)))
    write_result(folder / "allreduce.json", allreduce(cluster, (2,)))
    return folder / "train.json", folder / "allreduce.json"


def run(*arguments, code=0):
    result = CliRunner().invoke(main, ["predict", *map(str, arguments)], env={"COLUMNS": "180"})
    assert result.exit_code == code, result.output
    return result.output


def test_without_any_result(tmp_path):
    path = tmp_path / "p.json"
    output = run(*MODEL, *NETWORK, *HOST, "--price-per-worker-hour", "2", "--output", path)
    assert "a batch of 64 for each worker" in output
    assert "4096" in output
    assert "cost/million" in output
    assert "may be wrong by 10%" in output
    assert "Assumed: No worker is ever slower than another (--straggler)." in output
    assert "One host only" not in output
    result = read_result(path)
    model = result["summary"]["model"]
    # Of the options, in bytes and seconds.
    assert model["gradient_bytes"] == 4e8
    assert model["between"] == pytest.approx({"latency_s": 14e-6, "bandwidth_bytes_per_s": 3e9})
    assert model["within"] == pytest.approx({"latency_s": 5e-6, "bandwidth_bytes_per_s": 12e9})
    assert [row["workers"] for row in result["summary"]["points"]] == [1 << n for n in range(13)]
    assert result["settings"]["price_per_worker_hour"] == 2


def test_more_options_reach_the_model(tmp_path):
    path = tmp_path / "p.json"
    options = ["--dtype-bytes", "2", "--bucket-size-mb", "16", "--algorithm", "hierarchical"]
    options += ["--overlap", "0.5", "--straggler", "0.02", "--slots-per-host", "2", "--strong"]
    options += ["--fixed-time-s", "0.1", "--workers", "8,1", "--uncertainty", "0"]
    output = run(*MODEL, *NETWORK, *HOST, *options, "--output", path)
    assert "strong scaling: a batch of 64 for all workers" in output
    summary = read_result(path)["summary"]
    expected = {
        "gradient_bytes": 2e8,
        "bucket_bytes": 16 << 20,
        "algorithm": "hierarchical",
        "overlap": 0.5,
        "straggler": 0.02,
        "slots_per_host": 2,
        "workers_per_host": 4,
        "scaling": "strong",
        "fixed_s": 0.1,
        "per_sample_s": 0.4 / 64,
        "batch": 64,
    }
    assert {name: summary["model"][name] for name in expected} == pytest.approx(expected)
    assert [row["workers"] for row in summary["points"]] == [1, 8]


def test_from_results(files):
    output = run(*files)
    assert "measured step" in output
    assert "computation: measured, 1, 2 worker(s)" in output
    assert "overlap: measured, 2 workers" in output
    assert "Extrapolated: 4 worker(s)" in output
    assert "One host only: nothing says what the network between hosts costs" in output
    assert "may be wrong" not in output


def test_steps_alone_say_what_is_missing(files):
    output = run(files[0])
    assert "One worker only: nothing says what an all-reduce costs" in output
    assert "hvdkit bench allreduce" in output
    assert "One host only" not in output


def test_results_and_a_network(files):
    output = run(*files, *NETWORK, "--workers", "1,2,64")
    assert "transfers between hosts: given" in output
    assert "One host only" not in output
    assert "Extrapolated: 64 worker(s)" in output


def test_a_gradient_type_for_a_measured_model(files, tmp_path):
    path = tmp_path / "p.json"
    run(*files, "--dtype-bytes", "2", "--output", path)
    assert read_result(path)["summary"]["model"]["gradient_bytes"] == 2 * Cluster().parameters


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--batch-size"),
        (MODEL[:4], "--parameters"),
        (MODEL[2:], "--step-time-s"),
        ([*MODEL, "--workers", "2"], "--bandwidth-gbit-s"),
        ([*MODEL, "--latency-us", "5"], "no bandwidth"),
        ([*MODEL, "--workers-per-host", "2", "--workers", "2"], "--intra-bandwidth-gbytes-s"),
        ([*MODEL, *NETWORK, "--strong", "--workers", "128"], "batch of 64 cannot be divided"),
        ([*MODEL[:4], "--dtype-bytes", "2"], "--dtype-bytes says nothing without --parameters"),
        ([*MODEL, "--fixed-time-s", "2"], "fixed part"),
    ],
)
def test_what_is_missing_is_one_line(arguments, words):
    output = run(*arguments, code=1)
    assert output.startswith("Error: ")
    assert words in output
    assert output.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--step-time-s", "nan"],
        ["--step-time-s", "-1"],
        ["--bandwidth-gbit-s", "0"],
        ["--bandwidth-gbit-s", "inf"],
        ["--overlap", "1.5"],
        ["--uncertainty", "1"],
        ["--workers", "1,two"],
        ["--workers", "0"],
        ["--workers", ""],
        ["--workers-per-host", "0"],
        ["--batch-size", "0"],
        ["--price-per-worker-hour", "-1"],
    ],
)
def test_absurd_options_are_usage_errors(arguments):
    assert f"'{arguments[0]}'" in run(*MODEL, *NETWORK, *arguments, code=2).replace(
        "'--step-time-s' / '--compute-time-s'", "'--step-time-s'"
    )


def test_a_result_of_one_model_is_not_mixed_with_another(files, tmp_path):
    other = tmp_path / "other.json"
    write_result(other, train(Cluster(), (1, 2), model="other"))
    output = run(*files, other, code=1)
    assert "several values of model (layers, other)" in output
    assert "--model" in output
    assert "Predicted" in run(*files, other, "--model", "other")


def test_bad_files_are_one_line(files, tmp_path):
    assert "cannot read" in run(tmp_path / "none.json", code=1)
    damaged = tmp_path / "nan.json"
    result = json.loads(files[0].read_text())
    result["series"][0]["samples"][0][0][0] = float("nan")
    damaged.write_text(json.dumps(result))
    assert "holds NaN" in run(damaged, files[1], code=1)
    result["series"][0]["samples"][0][0][0] = -1.0
    damaged.write_text(json.dumps(result))
    assert "not above 0" in run(damaged, files[1], code=1)
    # Training alone does not say what transfers cost.
    assert "bench allreduce" in run(files[0], "--workers", "2", code=1)


def test_no_file_is_overwritten_without_force(tmp_path):
    path = tmp_path / "p.json"
    path.write_text("mine")
    arguments = [*MODEL, *NETWORK, "--output", path]
    assert "--force" in run(*arguments, code=1)
    assert path.read_text() == "mine"
    run(*arguments, "--force")
    assert read_result(path)["driver"] == "predict"
