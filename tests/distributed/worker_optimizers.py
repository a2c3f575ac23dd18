"""Every optimizer of torch.optim: two ranks end where one process on the whole batch ends."""

import copy
import pickle
import warnings

import torch

import hvdkit.torch as hvd
from tests.distributed.training import (
    assert_equal_models,
    assert_equal_replicas,
    build_model,
    compute_loss,
    make_batches,
    take_part,
    take_steps,
)
from tests.distributed.worker import run_checks

# Constructor arguments where the defaults do not fit a small model.
SETTINGS = {
    "SGD": [
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
        {"lr": 0.1, "fused": True},
        {"lr": 0.1, "foreach": True},
    ],
    "Adam": [{"eps": 1e-3, "amsgrad": True}, {"eps": 1e-3, "fused": True}],
    "AdamW": [{"eps": 1e-3, "foreach": True}, {"eps": 1e-3, "fused": True}],
    "Adagrad": [{"lr": 0.01, "eps": 1e-3}],
    "Rprop": [{"lr": 1e-3}],
    "Muon": [{"lr": 0.01}],
    "SparseAdam": [],  # takes sparse gradients only: see worker_semantics
    "LBFGS": [],  # below: it needs a closure
}
# These decide by the sign of a gradient or divide by its size: rounding is amplified.
LOOSE = {"Rprop": 5e-3, "Adadelta": 1e-4, "Muon": 2e-3, "Adafactor": 1e-4, "RMSprop": 5e-3}


def _parameters(name: str, model: torch.nn.Module) -> list:
    return [p for p in model.parameters() if name != "Muon" or p.ndim == 2]


def check_every_optimizer_of_torch():
    names = [
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
    ]
    assert len(names) >= 14, names
    batches = make_batches(5)
    for name in names:
        for settings in SETTINGS.get(
            name, [{"eps": 1e-3} if name in {"Adamax", "NAdam", "RAdam", "RMSprop"} else {}]
        ):
            model, reference = build_model(), build_model()
            kind = getattr(torch.optim, name)
            optimizer = hvd.DistributedOptimizer(kind(_parameters(name, model), **settings))
            take_steps(model, optimizer, [take_part(batch) for batch in batches])
            take_steps(reference, kind(_parameters(name, reference), **settings), batches)
            try:
                assert_equal_models(model, reference, atol=LOOSE.get(name, 2e-5))
            except AssertionError as error:
                raise AssertionError(f"{name} {settings}: {error}") from error
            moved = any(
                not torch.equal(a, b)
                for a, b in zip(model.parameters(), build_model().parameters(), strict=True)
            )
            assert moved, name


def check_lbfgs_with_line_search_calls_its_closure_often():
    for line_search in [None, "strong_wolfe"]:
        # In float64, so that rounding does not decide where a line search ends.
        model, reference = build_model().double(), build_model().double()
        arguments = {"lr": 0.1, "max_iter": 5, "line_search_fn": line_search}
        optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters(), **arguments))
        plain = torch.optim.LBFGS(reference.parameters(), **arguments)
        calls = [0, 0]
        whole = make_batches(1)[0]

        def evaluate(which, trained, by, batch, calls=calls):
            def closure():
                calls[which] += 1
                by.zero_grad()
                outputs = trained(batch[0].double())
                loss = torch.nn.functional.cross_entropy(outputs, batch[1])
                loss.backward()
                return loss

            return closure

        for _ in range(2):
            loss = optimizer.step(evaluate(0, model, optimizer, take_part(whole)))
            expected = plain.step(evaluate(1, reference, plain, whole))
        assert calls[0] == calls[1] > 4, calls
        torch.testing.assert_close(loss, expected, atol=1e-9, rtol=1e-9)
        assert_equal_models(model, reference, atol=1e-8)


def check_an_optimizer_that_users_write():
    class Signed(torch.optim.Optimizer):
        """Needs constructor arguments, has its own state keys, and extends step()."""

        def __init__(self, params, rate, *, scale):
            super().__init__(params, {"rate": rate})
            self.scale = scale
            self.state["steps taken"] = 0

        def step(self, closure=None):
            loss = None if closure is None else closure()
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.data.add_(param.grad, alpha=-group["rate"] * self.scale)
            self.state["steps taken"] += 1
            return loss

    class Nested(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    for make in [
        lambda m: Signed(m.parameters(), 0.1, scale=2.0),
        lambda m: Nested(m.parameters(), lr=0.1),
    ]:
        model, reference = build_model(), build_model()
        optimizer, plain = hvd.DistributedOptimizer(make(model)), make(reference)
        assert isinstance(optimizer, type(plain))
        assert type(optimizer).__name__ == type(plain).__name__
        batches = make_batches(3)
        take_steps(model, optimizer, [take_part(batch) for batch in batches])
        take_steps(reference, plain, batches)
        assert_equal_models(model, reference)
        assert optimizer.state.get("steps taken") == plain.state.get("steps taken")


def check_schedulers_made_before_and_after_wrapping():
    for before in [True, False]:
        model, reference = build_model(), build_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.5)
        plain = torch.optim.SGD(reference.parameters(), lr=0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the scheduler warns when it misses the steps
            if before:
                scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
                optimizer = hvd.DistributedOptimizer(inner)
            else:
                optimizer = hvd.DistributedOptimizer(inner)
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            expected = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
            for batch in make_batches(3):
                take_steps(model, optimizer, [take_part(batch)])
                scheduler.step()
                take_steps(reference, plain, [batch])
                expected.step()
        assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"] == 0.0625
        assert_equal_models(model, reference)


def check_step_hooks_run_once_and_see_reduced_gradients():
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []

    def look(opt, args, kwargs):
        seen.append(model[0].weight.grad.clone())

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    optimizer = hvd.DistributedOptimizer(optimizer)
    take_steps(model, optimizer, [take_part(make_batches(1)[0])])
    optimizer.load_state_dict(optimizer.state_dict())
    take_steps(model, optimizer, [take_part(make_batches(1)[0])])
    assert len(seen) == 4, len(seen)
    for grad in seen:
        assert torch.equal(grad, hvd.broadcast(grad, root_rank=0, name="tests.hook"))


def check_state_dict_goes_between_wrapped_and_plain():
    batches = make_batches(6)
    parts = [take_part(batch) for batch in batches]
    model, reference = build_model(), build_model()
    make = lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-3)  # noqa: E731
    plain = make(reference)
    take_steps(reference, plain, batches)
    first = hvd.DistributedOptimizer(make(model))
    take_steps(model, first, parts[:2])
    middle = make(model)
    middle.load_state_dict(first.state_dict())  # wrapped to plain
    del first
    last = hvd.DistributedOptimizer(make(model))
    last.load_state_dict(middle.state_dict())  # plain to wrapped
    take_steps(model, last, parts[2:4])
    again = hvd.DistributedOptimizer(make(model))
    again.load_state_dict(last.state_dict())  # wrapped to wrapped, the old one still alive
    take_steps(model, again, parts[4:])
    assert_equal_models(model, reference, atol=2e-5)
    assert again.state_dict().keys() == plain.state_dict().keys()


def check_copies_and_pickles_are_the_plain_optimizer():
    model = build_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.02))
    take_steps(model, optimizer, [take_part(make_batches(1)[0])])
    for twin in [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]:
        assert type(twin) is torch.optim.Adam
        assert twin.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
        for ours, theirs in zip(
            optimizer.state_dict()["state"].values(),
            twin.state_dict()["state"].values(),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    twin_model = copy.deepcopy(model)
    if hvd.rank() == 0:  # a copied model is not reduced: nobody else runs this
        compute_loss(twin_model, make_batches(1)[0]).backward()
    take_steps(model, optimizer, [take_part(make_batches(1)[0])])
    assert_equal_replicas(model)


if __name__ == "__main__":
    run_checks(globals())
