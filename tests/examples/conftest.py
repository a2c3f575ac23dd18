"""Examples need Horovod and the examples extra; without, they skip, or fail where demanded."""

import importlib.util
import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def examples_extra_present() -> None:
    """Skip, or fail where ``HVDKIT_REQUIRE`` names ``examples``, without the examples extra."""
    missing = [name for name in ("sklearn", "PIL") if importlib.util.find_spec(name) is None]
    if not missing:
        return
    reason = f"no {' and '.join(missing)} (run: pip install 'hvdkit[examples]')"
    if "examples" in os.environ.get("HVDKIT_REQUIRE", "").split(","):
        pytest.fail(f"HVDKIT_REQUIRE demands the examples, but there is {reason}")
    pytest.skip(reason)
