"""Distributed equals single, for models, optimizers and options that hypothesis makes up.

Every rank draws the same examples, since they are derived from the code alone.
"""

import os

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import hvdkit.torch as hvd
from tests.distributed.training import (
    CLASSES,
    FEATURES,
    assert_equal_models,
    compute_loss,
    make_batches,
)
from tests.distributed.worker import run_checks

EXAMPLES = int(os.environ.get("HVDKIT_EXAMPLES", "60"))

OPTIMIZERS = {
    "SGD": lambda p, **kw: torch.optim.SGD(p, lr=0.05, momentum=0.9, **kw),
    "Adam": lambda p, **kw: torch.optim.Adam(p, lr=0.01, eps=1e-2, **kw),
    "AdamW": lambda p, **kw: torch.optim.AdamW(p, lr=0.01, eps=1e-2, **kw),
    "Adagrad": lambda p, **kw: torch.optim.Adagrad(p, lr=0.01, eps=1e-2, **kw),
}


@st.composite
def cases(draw):
    return {
        "widths": draw(st.lists(st.integers(1, 40), min_size=1, max_size=4)),
        "norm": draw(st.booleans()),
        "dtype": draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16])),
        "optimizer": draw(st.sampled_from(sorted(OPTIMIZERS))),
        "weight_decay": draw(st.sampled_from([0.0, 0.1])),
        "passes": draw(st.integers(1, 4)),
        "declared": draw(st.integers(1, 4)),
        "rows": draw(st.integers(1, 5)),
        "average": draw(st.booleans()),
        "clip": draw(st.sampled_from([None, 0.1])),
        "bucket_size_mb": draw(st.sampled_from([1e-4, 1e-3, 8.0])),
        "frozen": draw(st.booleans()),
        "set_to_none": draw(st.booleans()),
        "seed": draw(st.integers(0, 1000)),
    }


def _build(case):
    torch.manual_seed(case["seed"])
    layers, width = [], FEATURES
    for wider in case["widths"]:
        layers.append(torch.nn.Linear(width, wider))
        if case["norm"]:
            layers.append(torch.nn.LayerNorm(wider))
        layers.append(torch.nn.Tanh())
        width = wider
    model = torch.nn.Sequential(*layers, torch.nn.Linear(width, CLASSES)).to(case["dtype"])
    if case["frozen"]:
        model[0].bias.requires_grad_(False)
    return model


def check_distributed_equals_single():
    count = 0

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],  # shrinking would put ranks out of step
    )
    @given(cases())
    def compare(case):
        nonlocal count
        count += 1
        model, reference = _build(case), _build(case)
        make = OPTIMIZERS[case["optimizer"]]
        optimizer = hvd.DistributedOptimizer(
            make(model.parameters(), weight_decay=case["weight_decay"]),
            model.named_parameters(),
            backward_passes_per_step=case["declared"],
            average_aggregated_gradients=case["average"],
            clip_grad_norm=case["clip"],
            bucket_size_mb=case["bucket_size_mb"],
        )
        plain = make(reference.parameters(), weight_decay=case["weight_decay"])
        batches = make_batches(3 * case["passes"], seed=case["seed"], rows=case["rows"])
        scale = 1 / case["passes"] if case["average"] else 1.0
        for first in range(0, len(batches), case["passes"]):
            for by in (optimizer, plain):
                by.zero_grad(set_to_none=case["set_to_none"])
            for x, y in batches[first : first + case["passes"]]:
                mine = slice(hvd.rank() * case["rows"], (hvd.rank() + 1) * case["rows"])
                compute_loss(model, (x[mine], y[mine])).backward()
                (compute_loss(reference, (x, y)) * scale).backward()
            if case["clip"]:
                torch.nn.utils.clip_grad_norm_(reference.parameters(), case["clip"])
            optimizer.step()
            plain.step()
        loose = case["dtype"] == torch.bfloat16
        assert_equal_models(
            model, reference, atol=0.1 if loose else 2e-5, rtol=0.1 if loose else 1e-4
        )

    compare()
    assert count >= EXAMPLES, count


if __name__ == "__main__":
    run_checks(globals())
