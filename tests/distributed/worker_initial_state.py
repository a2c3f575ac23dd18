"""Checks of broadcast_initial_state, broadcast_parameters and broadcast_optimizer_state."""

import io
from collections import OrderedDict

import pytest
import torch
from torch import nn

import hvdkit.torch as hvd
from hvdkit.errors import HvdkitError, RankDisagreementError
from hvdkit.torch import transport
from hvdkit.torch.collectives import allgather_object
from hvdkit.torch.initial_state import (
    broadcast_initial_state,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from tests.distributed.worker import run_checks

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, 0.1),
    "adam_capturable_lr": lambda p: torch.optim.Adam(p, torch.tensor(0.1), foreach=False),
    "amsgrad": lambda p: torch.optim.AdamW(p, 0.1, amsgrad=True),
    "adamax": lambda p: torch.optim.Adamax(p, 0.1),
    "nadam": lambda p: torch.optim.NAdam(p, 0.1),
    "radam": lambda p: torch.optim.RAdam(p, 0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, 0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.1),
    "asgd": lambda p: torch.optim.ASGD(p, 0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, 0.1),
    "fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, 0.1, history_size=3, line_search_fn="strong_wolfe"),
}


class Everything(nn.Module):
    """Tied weights, buffers of many dtypes, non-persistent, expanded, empty and strided ones."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.first.weight
        self.short = nn.Parameter(torch.randn(5).bfloat16())
        self.frozen = nn.Parameter(torch.randn(2, 0, 3), requires_grad=False)
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.rand(7) > 0.5)
        self.register_buffer("wave", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("tiny", torch.randn(9).to(torch.float8_e4m3fn))
        self.register_buffer("local", torch.randn(3, dtype=torch.float64), persistent=False)
        self.register_buffer("wide", torch.randn(3, 1).expand(3, 4))
        self.register_buffer("turned", torch.randn(4, 2).t())
        self.register_buffer("odd", torch.tensor([float("nan"), -0.0, 1e-45]))


def bits(model):
    tensors = [*model.parameters(), *model.buffers()]
    return [transport.view_bytes(tensor).tolist() for tensor in tensors]


def train(model, optimizer, steps):
    for _ in range(steps):
        x = torch.randn(4, 3)

        def closure(x=x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def dump(optimizer):
    """State and options as plain data: equal dumps are equal to the last bit and by type."""

    def plain(value):
        if isinstance(value, torch.Tensor):
            return str(value.dtype), tuple(value.shape), transport.view_bytes(value).tolist()
        if isinstance(value, dict):
            return type(value), {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value), [plain(item) for item in value]
        return value

    places = {p: i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    state = {places.get(key, key): plain(value) for key, value in optimizer.state.items()}
    groups = [{k: plain(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return state, groups


def check_every_kind_of_tensor_arrives_bit_for_bit():
    for chunk_bytes in (transport.CHUNK_BYTES, 64, 7):
        transport.CHUNK_BYTES = chunk_bytes
        for root_rank in range(hvd.size()):
            torch.manual_seed(hvd.rank() + 17)
            model = Everything()
            mine = bits(model)
            expected = allgather_object(mine, name="expected")[root_rank]
            strides = [tensor.stride() for tensor in model.buffers()]
            broadcast_initial_state(model, root_rank=root_rank)
            assert bits(model) == expected
            assert (mine == expected) == (hvd.rank() == root_rank)
            assert model.tied.weight is model.first.weight
            assert [tensor.stride() for tensor in model.buffers()] == strides
    transport.CHUNK_BYTES = 128 * 2**20


def check_all_tensors_travel_in_one_broadcast():
    sent = []
    original = transport.broadcast_
    transport.broadcast_ = lambda tensor, *args, **kwargs: (
        sent.append(tensor.numel()) or original(tensor, *args, **kwargs)
    )
    try:
        model = Everything()
        optimizer = OPTIMIZERS["adam"](model.first.parameters())
        train(model.first, optimizer, 1)
        broadcast_initial_state(model, optimizer)
    finally:
        transport.broadcast_ = original
    once = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    once[id(model.wide)] = model.wide[:, :1]
    state = [t for entry in optimizer.state.values() for t in entry.values()]
    assert sent == [sum(t.numel() * t.element_size() for t in [*once.values(), *state])]


def check_a_fresh_optimizer_stays_fresh():
    """Case C3: momentum and weight decay must not move anything."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    before = bits(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for _ in range(2):
        broadcast_parameters(model.state_dict(), root_rank=0)
        broadcast_optimizer_state(optimizer, root_rank=0)
        broadcast_initial_state(model, optimizer)
    assert bits(model) == before
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    broadcast_initial_state(model, wrapped)
    broadcast_optimizer_state(wrapped, root_rank=0)
    assert bits(model) == before
    assert not wrapped.state


def check_state_and_options_of_every_optimizer():
    """Each rank trains by itself, a different number of steps or none, then takes the root's."""
    for name, make in OPTIMIZERS.items():
        for steps in ((2, 3), (2, 0), (0, 2), (0, 0)):
            torch.manual_seed(hvd.rank())
            model = nn.Linear(3, 3)
            optimizer = make(model.parameters())
            fresh = dump(optimizer)[0]
            train(model, optimizer, steps[hvd.rank()])
            for group in optimizer.param_groups:
                if not isinstance(group["lr"], torch.Tensor):
                    group["lr"] = 0.1 + hvd.rank()
            dumps = allgather_object(dump(optimizer), name="dumps")
            broadcast_initial_state(model, optimizer, root_rank=1)
            assert dump(optimizer) == dumps[1], (name, steps)
            assert (dump(optimizer)[0] == fresh) == (steps[1] == 0), (name, steps)
            # It must go on from there exactly as the root does.
            torch.manual_seed(5)
            train(model, optimizer, 2)
            after = allgather_object((bits(model), dump(optimizer)), name="after")
            assert after[0] == after[1], (name, steps)


def check_muon():
    torch.manual_seed(hvd.rank())
    model = nn.Linear(3, 3, bias=False)
    optimizer = torch.optim.Muon(model.parameters(), 0.1)
    train(model, optimizer, 1 - hvd.rank())
    dumps = allgather_object(dump(optimizer), name="dumps")
    broadcast_initial_state(model, optimizer)
    assert dump(optimizer) == dumps[0]
    assert optimizer.state


class Odd(torch.optim.Optimizer):
    """State under string keys, nested containers, float32 state of 16-bit parameters."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "table": torch.zeros(2), "note": None})

    def step(self, closure=None):
        self.state["step"] = self.state.get("step", 0) + 1
        self.state["history"] = [("loss", torch.rand(3)), {"deep": (torch.rand(2), None)}]
        for group in self.param_groups:
            for p in group["params"]:
                master = self.state[p].setdefault("master", p.detach().float())
                master -= group["lr"] * p.grad.float()
                self.state[p]["kind"] = OrderedDict(seen=True, mask=p.detach() > 0)
                p.data.copy_(master)


def check_state_that_a_user_invented():
    torch.manual_seed(hvd.rank())
    model = nn.Linear(3, 3).bfloat16()
    optimizer = Odd(model.parameters())
    optimizer.param_groups[0]["table"].fill_(hvd.rank())
    optimizer.param_groups[0]["note"] = {"rank": hvd.rank()}
    model(torch.randn(2, 3).bfloat16()).sum().backward()
    for _ in range(2 - hvd.rank()):
        optimizer.step()
    dumps = allgather_object(dump(optimizer), name="dumps")
    broadcast_optimizer_state(optimizer, root_rank=0)
    assert dump(optimizer) == dumps[0]
    assert optimizer.state["step"] == 2
    assert optimizer.state[model.weight]["master"].dtype == torch.float32
    assert optimizer.param_groups[0]["note"] == {"rank": 0}


def check_tensors_are_written_in_place():
    """A scheduler or a captured graph may hold the very tensor."""
    torch.manual_seed(hvd.rank())
    model = nn.Linear(3, 3)
    rate = torch.tensor(0.1 + hvd.rank())
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, foreach=False)
    train(model, optimizer, 1)
    moment = optimizer.state[model.weight]["exp_avg"]
    pointers = [p.data_ptr() for p in model.parameters()]
    broadcast_initial_state(model, optimizer)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.1)
    assert optimizer.state[model.weight]["exp_avg"] is moment
    assert [p.data_ptr() for p in model.parameters()] == pointers


def check_memory_format_of_new_state():
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if hvd.rank() == 0:
        model(torch.randn(2, 3, 5, 5)).sum().backward()
        optimizer.step()
    broadcast_initial_state(model, optimizer)
    momentum = optimizer.state[model.weight]["momentum_buffer"]
    assert momentum.stride() == model.weight.stride()


def check_groups_and_wrapped_optimizers():
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    groups = [
        {"params": model[0].parameters(), "lr": 0.1 * (1 + hvd.rank()), "weight_decay": 0.2},
        {"params": [model[1].weight], "lr": 0.3 + hvd.rank()},
    ]
    optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=[(n, p) for n, p in model.named_parameters() if n != "1.bias"]
    )
    broadcast_initial_state(model, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.3]
    torch.manual_seed(hvd.rank())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    after = allgather_object((bits(model), dump(optimizer)), name="after")
    assert after[0] == after[1]


def check_parameters_in_every_form():
    for pack in (
        lambda m: m.state_dict(),
        lambda m: m.named_parameters(),
        lambda m: list(m.named_parameters()),
        lambda m: m.parameters(),
        lambda m: list(m.parameters()),
        lambda m: dict(reversed(m.state_dict().items())) if hvd.rank() else m.state_dict(),
    ):
        torch.manual_seed(hvd.rank())
        model = nn.Linear(3, 2).bfloat16()
        expected = allgather_object(bits(model), name="expected")[1]
        broadcast_parameters(pack(model), root_rank=1)
        assert bits(model) == expected


def check_what_is_no_tensor_is_refused_everywhere():
    with pytest.raises(HvdkitError, match=r"pass model\.state_dict"):
        broadcast_parameters(nn.Linear(2, 2), root_rank=0)
    with pytest.raises(HvdkitError, match="pass model"):
        broadcast_parameters(3, root_rank=0)
    params = {"a": torch.ones(2), "b": torch.ones(2) if hvd.rank() == 0 else 3}
    with pytest.raises(HvdkitError, match="'b' is a int, not a tensor"):
        broadcast_parameters(params, root_rank=0)


def check_disagreements_are_one_error_on_every_rank():
    def raises(match, model, optimizer=None, root_rank=0):
        with pytest.raises(RankDisagreementError, match=match) as caught:
            broadcast_initial_state(model, optimizer, root_rank)
        assert len(set(allgather_object(str(caught.value), name="messages"))) == 1

    odd = hvd.rank() == 1
    raises(r"'weight': rank 0 has .*\(2, 3\).*; rank 1 has .*\(2, 4\)", nn.Linear(3 + odd, 2))
    raises("rank 1 has nothing", nn.Linear(3, 2, bias=not odd))
    raises("float32.*bfloat16", nn.Linear(3, 2).to(torch.bfloat16 if odd else torch.float32))
    raises(
        "rank 0 has '0.weight'.*rank 1 has '1.weight'",
        nn.Sequential(*([nn.ReLU()] if odd else []), nn.Linear(2, 2)),
    )
    model = nn.Linear(3, 2)
    kind = torch.optim.SGD if odd else torch.optim.Adam
    raises("'optimizer': rank 0 has Adam; rank 1 has SGD", model, kind(model.parameters(), 0.1))
    one, two = (
        [{"params": [model.weight, model.bias]}],
        [{"params": [p]} for p in model.parameters()],
    )
    raises(
        "'param group 0': rank 0 has 2.*rank 1 has 1",
        model,
        torch.optim.SGD(two if odd else one, 0.1),
    )
    order = [model.bias, model.weight] if odd else [model.weight, model.bias]
    raises("optimizer's weight", model, torch.optim.SGD(order, 0.1))
    raises("'root_rank': rank 0 has 0; rank 1 has 1", model, root_rank=hvd.rank())


def check_tensors_without_data_are_refused_everywhere():
    for only_rank in (None, 0, 1):
        mine = only_rank is None or hvd.rank() == only_rank
        lazy = nn.LazyLinear(3) if mine else nn.Linear(3, 3)
        with pytest.raises(HvdkitError, match="no shape yet; run one forward pass"):
            broadcast_initial_state(lazy)
        with pytest.raises(HvdkitError, match="meta device"):
            broadcast_initial_state(nn.Linear(3, 3, device="meta" if mine else "cpu"))
    with pytest.raises(HvdkitError, match="root_rank 7 is not one of ranks"):
        broadcast_initial_state(nn.Linear(3, 3), root_rank=7)


def check_state_that_cannot_be_pickled_is_refused_everywhere():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.state["log"] = io.TextIOWrapper(io.BytesIO())
    with pytest.raises(HvdkitError, match="cannot be pickled"):
        broadcast_initial_state(model, optimizer)


def check_ranks_may_have_run_different_numbers_of_operations_before():
    alone = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    for _ in range(3 if hvd.rank() == 0 else 1):
        broadcast_initial_state(
            nn.Linear(2, 2), root_rank=hvd.rank(), process_set=alone[hvd.rank()]
        )
    torch.manual_seed(hvd.rank())
    model = nn.Linear(2, 2)
    expected = allgather_object(bits(model), name="expected")[0]
    broadcast_initial_state(model)
    assert bits(model) == expected
    with pytest.raises(HvdkitError, match="not in the process set"):
        broadcast_initial_state(model, process_set=alone[1 - hvd.rank()])


if __name__ == "__main__":
    run_checks(globals())
