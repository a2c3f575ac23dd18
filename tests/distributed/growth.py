"""What many training steps could leave behind: objects, plans, functions, memory."""

from __future__ import annotations

import gc

import psutil

from hvdkit.keras import layout, reduction

STEPS = 2000
STEPS_PER_EPOCH = 100  # the last of them with a smaller batch
WARM_UP_EPOCHS = 3

# A leak of one object a step would be 1,700 of them; caches of Python and TensorFlow fill slowly.
MOST_OBJECTS = 400
MOST_BYTES = 32 << 20


class Growth:
    """Compares the process now with what it was when this was made."""

    def __init__(self) -> None:
        self._plans = _count_plans()
        self._objects = _count_objects()
        self._memory = psutil.Process().memory_info().rss

    def demand_none(self) -> None:
        """Fail if something has grown with the number of steps."""
        assert _count_plans() == self._plans
        grown = _count_objects() - self._objects
        assert grown < MOST_OBJECTS, f"{grown} objects more"
        grown = psutil.Process().memory_info().rss - self._memory
        assert grown < MOST_BYTES, f"{grown / 2**20:.1f} MiB more"


def _count_plans() -> tuple[int, int]:
    agreed = sum(len(layouts) for layouts in layout._agreed.values())
    return reduction._plan.cache_info().currsize, agreed


def _count_objects() -> int:
    gc.collect()
    return len(gc.get_objects())
