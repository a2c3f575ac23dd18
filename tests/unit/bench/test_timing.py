"""How samples of several ranks become one figure, and how memory is read."""

import subprocess
import sys

from hvdkit.bench.timing import find_slowest, summarize_round


def test_a_step_lasts_as_long_as_its_slowest_rank():
    assert find_slowest([[1.0, 5.0, 3.0], [2.0, 4.0, 3.0]]) == [2.0, 5.0, 3.0]


def test_a_round_is_the_median_of_its_steps():
    # Slowest ranks: 2, 5, 3; the median of each rank alone would be 3 and 2.
    assert summarize_round([[1.0, 5.0, 3.0], [2.0, 1.0, 2.0]]) == 3.0


def test_peak_memory_remembers_what_was_freed():
    # In a process of its own: what other tests allocated earlier must not count.
    code = (
        "from hvdkit.bench.timing import read_peak_rss_bytes as peak;"
        "before = peak(); block = b'x' * 100_000_000; del block; print(before, peak())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert 95_000_000 < after - before < 110_000_000
