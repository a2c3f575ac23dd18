"""``hvdkit predict`` as a user runs it."""

from hvdkit.results.files import read_result, write_result
from tests.system.command import run_hvdkit
from tests.unit.profile.simulation import Cluster, allreduce, train


def test_results_become_a_prediction(tmp_path):
    cluster = Cluster()
    write_result(tmp_path / "train.json", train(cluster, (1, 2)))
    write_result(tmp_path / "allreduce.json", allreduce(cluster, (2,)))
    network = ["--latency-us", "20", "--bandwidth-gbit-s", "10"]
    paths = [tmp_path / "train.json", tmp_path / "allreduce.json"]
    done = run_hvdkit("predict", *paths, *network, "--output", tmp_path / "predicted.json")
    assert (done.returncode, done.stderr) == (0, "")
    points = read_result(tmp_path / "predicted.json")["summary"]["points"]
    assert [row["workers"] for row in points] == [1 << power for power in range(13)]
    for row in points:
        assert f"{row['scaling_efficiency']:.1%}" in done.stdout
        assert row["binds"] in done.stdout


def test_what_is_missing_is_one_line_on_stderr():
    done = run_hvdkit("predict", "--step-time-s", "1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
