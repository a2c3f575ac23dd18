"""Timelines for tests: recorded ones, and one of any size that looks like them."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
RECORDED = Path(__file__).with_name("recorded")


def write_timeline(path, size_bytes, tensors=200, ranks=8):
    """Write a timeline of about ``size_bytes``, laid out as Horovod does; return its steps.

    Each step has an all-reduce of each tensor, uncached: 20 us of negotiation, for which rank
    ``ranks - 1`` is to blame, 5 us of queue, 50 us of transfer, of 65 us for the operation. A step
    takes 2000 us and 100 us for each tensor.
    """
    steps = 0
    with path.open("w", encoding="utf-8") as file:
        file.write(
            '[\n{"name": "process_name", "ph": "M", "pid": 0, "args": '
            '{"start_time_since_epoch_in_micros":1796186153816346}},\n'
        )
        for pid in range(1, tensors + 1):
            name = f"allreduce.model.layers.{pid}.attention.weight"
            file.write(
                f'{{"name": "process_name", "ph": "M", "pid": {pid}, "args": {{"name": "{name}"}}}}'
                f',\n{{"name": "process_sort_index", "ph": "M", "pid": {pid}, "args": '
                f'{{"sort_index": {pid}}}}},\n'
            )
        separator, ts = "", 1000
        while file.tell() < size_bytes:
            for pid in range(1, tensors + 1):
                at = ts + 100 * pid
                events = [f'"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": {at}']
                events += [f'"ph": "X", "name": "{r}", "ts": {at}' for r in range(ranks - 1)]
                events.insert(0, f'"ph": "i", "name": "CYCLE_START", "ts": {at}, "s": "g"')
                events += [
                    f'"ph": "X", "name": "{ranks - 1}", "ts": {at + 20}',
                    f'"ph": "E", "ts": {at + 20}',
                    f'"ph": "B", "name": "ALLREDUCE", "ts": {at + 25}',
                    f'"ph": "B", "name": "GLOO_ALLREDUCE", "ts": {at + 30}',
                    f'"ph": "E", "ts": {at + 80}',
                    f'"ph": "E", "ts": {at + 90}, "args": '
                    '{"dtype": "float32", "shape": "[1024, 1024]"}',
                ]
                last = ranks + 1
                events.insert(last, f'"ph": "i", "name": "CYCLE_START", "ts": {at + 15}, "s": "g"')
                for event in events:
                    where = "" if '"ph": "i"' in event else f', "pid": {pid}'
                    dur = ', "dur": 0' if '"ph": "X"' in event else ""
                    head, middle, tail = event.partition(', "args"')
                    file.write(f"{separator}{{{head}{where}{dur}{middle}{tail}}}")
                    separator = ","
            ts += 2000 + 100 * tensors
            steps += 1
        file.write("]")
    return steps
