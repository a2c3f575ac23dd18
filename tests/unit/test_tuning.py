"""Settings of Horovod: preferred ones, and that the user's stay."""

import pytest

from hvdkit.tuning import FUSION_THRESHOLD_BYTES, prefer_settings


def test_buckets_are_not_fused_again():
    environ = {}
    prefer_settings(environ)
    assert environ == {"HOROVOD_FUSION_THRESHOLD": str(FUSION_THRESHOLD_BYTES)}


@pytest.mark.parametrize("chosen", [{"HOROVOD_FUSION_THRESHOLD": "0"}, {"HOROVOD_AUTOTUNE": "1"}])
def test_what_the_user_has_set_stays(chosen):
    environ = dict(chosen)
    prefer_settings(environ)
    assert environ == chosen
