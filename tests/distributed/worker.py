"""What every worker file runs: its ``check_*`` functions in order, with a result file per rank."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

__all__ = ["run_checks"]


def run_checks(namespace: dict[str, Any]) -> NoReturn:
    """Initialize ``namespace["hvd"]``, run the checks of a worker file, and end the process.

    Every rank runs the same checks in the same order. One that raises ends this process at
    once with its traceback and exit code 1, and ``horovodrun`` then ends the other ranks: none
    of them waits for a collective that never comes.

    Args:
        namespace: ``globals()`` of the worker file. It must hold ``hvd``, the module under
            test, and functions named ``check_*``. Names given as command line arguments
            select some of them.
    """
    hvd: ModuleType = namespace["hvd"]
    checks = {
        name: value
        for name, value in namespace.items()
        # Not what the file imports: hvdkit itself has a check_replicas.
        if name.startswith("check_") and value.__module__ == namespace["__name__"]
    }
    selected = [name for name in sys.argv[1:] if name.startswith("check_")] or list(checks)
    result: dict[str, Any] = {"passed": [], "failed": None}
    timeout_s = float(os.environ.get("HVDKIT_TEST_TIMEOUT_S", "180"))
    # Shows where a hung rank stands before the parent ends it.
    faulthandler.dump_traceback_later(timeout_s * 0.7)
    name = "start"
    try:
        hvd.init()
        result |= {"rank": hvd.rank(), "size": hvd.size()}
        expected_size = int(os.environ.get("HVDKIT_TEST_SIZE", "2"))
        assert hvd.size() == expected_size, f"{hvd.size()} ranks, expected {expected_size}"
        for name in selected:
            print(f"rank {hvd.rank()}: {name}", flush=True)
            checks[name]()
            result["passed"].append(name)
            _write(result)  # at once: another rank's failure may end this process
        name = "shutdown"
        hvd.shutdown()
    except BaseException:
        traceback.print_exc()
        print(f"{name} failed", file=sys.stderr, flush=True)
        result["failed"] = name
        _write(result)
        os._exit(1)  # no exit handlers: Horovod's would wait for the other ranks
    _write(result)
    faulthandler.cancel_dump_traceback_later()
    sys.exit(0)


def _write(result: dict[str, Any]) -> None:
    directory = os.environ.get("HVDKIT_TEST_RESULTS")
    if directory is None or "rank" not in result:
        return
    path = Path(directory, f"rank-{result['rank']}.json")
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result), encoding="utf-8")
    part.rename(path)
