"""The nodes of a Slurm step, from the list that Slurm writes."""

import pytest

from hvdkit.errors import EnvironmentMismatchError
from hvdkit.launch.nodes import expand, list_candidates


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("login", ["login"]),
        ("hva,hvb", ["hva", "hvb"]),
        ("n[1-3,7]", ["n1", "n2", "n3", "n7"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("a[1,3]-ib,b,c[2]", ["a1-ib", "a3-ib", "b", "c2"]),
        ("r[0-1]n[0-1]", ["r0n0", "r0n1", "r1n0", "r1n1"]),
    ],
)
def test_lists_are_expanded_in_order(nodes, names):
    assert list(expand(nodes)) == names


@pytest.mark.parametrize("nodes", ["", "n[1-", "n]", "n[a]", "a,,b", "a,", "n[1-2-3]", "a b"])
def test_what_is_no_list_is_an_error(nodes):
    with pytest.raises(EnvironmentMismatchError, match="no list of nodes"):
        expand(nodes)


def test_rank_0_is_on_the_first_node_unless_a_file_gave_the_order():
    step = {"SLURM_STEP_NODELIST": "n[1-3]", "SLURM_JOB_NODELIST": "n[0-9]"}
    assert list_candidates(step) == ("n1",)
    assert list_candidates(step | {"SLURM_DISTRIBUTION": "cyclic"}) == ("n1",)
    assert list_candidates(step | {"SLURM_DISTRIBUTION": "arbitrary"}) == ("n1", "n2", "n3")
    with pytest.raises(EnvironmentMismatchError, match="SLURM_STEP_NODELIST is not set"):
        list_candidates({})
