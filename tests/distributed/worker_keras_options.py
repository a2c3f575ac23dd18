"""Options of DistributedOptimizer in Keras, and every optimizer class, by plain ``apply``."""

import inspect

import horovod.keras as stock_keras
import horovod.tensorflow.keras as stock
import keras
import numpy as np
import pytest
from keras import ops

import hvdkit.keras as hvd
from hvdkit.errors import HvdkitError, RankDisagreementError
from hvdkit.keras import reduction
from tests.distributed.keras_training import build_model, compile_model
from tests.distributed.worker import run_checks

TENSORFLOW = keras.backend.backend() == "tensorflow"
SHAPES = [(4, 6), (6,), (6, 3), (3,)]


def _variables(dtype="float32"):
    rng = np.random.default_rng(7)
    return [
        keras.Variable(rng.standard_normal(shape), dtype=dtype, name=f"v{i}")
        for i, shape in enumerate(SHAPES)
    ]


def _gradients(step, rank=None, scale=1.0):
    """One rank's gradients, or the mean over ranks."""
    if rank is None:
        everyone = [_gradients(step, r, scale) for r in range(hvd.size())]
        return [sum(parts) / hvd.size() for parts in zip(*everyone, strict=True)]
    rng = np.random.default_rng(100 * step + rank)
    return [(scale * rng.standard_normal(shape)).astype("float32") for shape in SHAPES]


def _apply(optimizer, variables, arrays):
    optimizer.apply(
        [ops.convert_to_tensor(a, v.dtype) for a, v in zip(arrays, variables, strict=True)],
        variables,
    )


def _read(variables):
    return [ops.convert_to_numpy(ops.cast(v, "float32")).astype("float64") for v in variables]


class _Replica:
    """What check_replicas looks at."""

    def __init__(self, variables):
        self.trainable_variables = self.variables = variables


def _train(
    make, reference=None, steps=3, factor=1.0, rtol=1e-5, atol=1e-6, dtype="float32", **options
):
    """Compare wrapped, on each rank's gradients, with plain on the mean times ``factor``."""
    ours, theirs = _variables(dtype), _variables(dtype)
    wrapped, plain = hvd.DistributedOptimizer(make(), **options), (reference or make)()
    for step in range(steps):
        _apply(wrapped, ours, _gradients(step, hvd.rank()))
        _apply(plain, theirs, [factor * g for g in _gradients(step)])
    for mine, other in zip(_read(ours), _read(theirs), strict=True):
        np.testing.assert_allclose(mine, other, rtol=rtol, atol=atol)
    hvd.check_replicas(_Replica(ours))
    for now, before in zip(_read(ours), _read(_variables(dtype)), strict=True):
        assert not np.array_equal(now, before)
    return wrapped


def _sgd(**options):
    return keras.optimizers.SGD(0.1, momentum=0.9, **options)


def _list_optimizers():
    special = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer"}
    return {
        name: value
        for name, value in vars(keras.optimizers).items()
        if inspect.isclass(value)
        and issubclass(value, keras.optimizers.Optimizer)
        and name not in special
    }


def _is_whole(cls):
    """Whether plain Keras can use it: Muon of Keras 3.12 fails on TensorFlow's variables."""
    try:
        _apply(cls(), _variables(), _gradients(0))
    except AttributeError:
        return False
    return True


def check_every_optimizer_that_keras_exports():
    classes = _list_optimizers()
    assert {"SGD", "Adam", "AdamW", "Lion", "RMSprop", "Ftrl"} <= set(classes)
    for name, cls in classes.items():
        print(f"rank {hvd.rank()}: {name}")
        if not _is_whole(cls):
            assert name == "Muon", f"plain {name} does not work either"
            continue
        # Muon takes square roots of small numbers in turn: rounding shows sooner.
        _train(lambda cls=cls: cls(learning_rate=0.01), rtol=1e-3, atol=1e-5)


def check_several_optimizers_in_one():
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        return

    def choose():
        made = {"v0": keras.optimizers.SGD(0.1), "": keras.optimizers.Adam(0.01)}
        return lambda variable: made["v0" if "v0" in variable.path else ""]

    def make():
        return keras.optimizers.MultiOptimizer(choose())

    wrapped = _train(make)
    assert len(wrapped.optimizers) == 2
    _train(lambda: keras.optimizers.LossScaleOptimizer(make()))
    mapped = keras.optimizers.OptimizerMap(default_optimizer=keras.optimizers.SGD(0.1))
    _train(lambda: keras.optimizers.MultiOptimizer(mapped), lambda: keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match="several optimizers"):
        hvd.DistributedOptimizer(make(), clip_grad_norm=1.0)
    with pytest.raises(HvdkitError, match="wrapped already"):
        hvd.DistributedOptimizer(wrapped)


def check_keras_own_clipping_decay_and_averages():
    for options in (
        {"clipnorm": 0.2},
        {"clipvalue": 0.1},
        {"global_clipnorm": 0.2},
        {"weight_decay": 0.1},
        {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
        {"use_ema": True},
        {"loss_scale_factor": 4.0},
        {"gradient_accumulation_steps": 2, "global_clipnorm": 0.2},
    ):
        print(f"rank {hvd.rank()}: {options}")
        _train(lambda options=options: _sgd(**options), steps=4)


def check_clip_grad_norm():
    ours, theirs = _variables(), _variables()
    wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), clip_grad_norm=0.5)
    for step, scale in enumerate((1.0, 1e-3)):  # the second one is below the limit
        _apply(wrapped, ours, _gradients(step, hvd.rank(), scale))
        mean = _gradients(step, None, scale)
        norm = np.sqrt(sum(float((g.astype("float64") ** 2).sum()) for g in mean))
        factor = min(1.0, 0.5 / norm)
        for variable, g in zip(theirs, mean, strict=True):
            variable.assign(variable - factor * g)
        for mine, other in zip(_read(ours), _read(theirs), strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-6)
    hvd.check_replicas(_Replica(ours))
    accumulating = {"clip_grad_norm": 0.5, "backward_passes_per_step": 2}
    wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **accumulating)
    start = _read(ours)
    for step in range(2):
        _apply(wrapped, ours, _gradients(step, hvd.rank()))
    step = [a - b for a, b in zip(_read(ours), start, strict=True)]
    assert np.sqrt(sum((s**2).sum() for s in step)) == pytest.approx(0.5, rel=1e-3)


class _Count:
    """Counts reductions while it lets them through."""

    def __enter__(self):
        self.calls, self._inner = 0, reduction.allreduce_tensors
        reduction.allreduce_tensors = self
        return self

    def __call__(self, *args, **options):
        self.calls += 1
        return self._inner(*args, **options)

    def __exit__(self, *_):
        reduction.allreduce_tensors = self._inner


def check_accumulation_sums_or_averages_and_reduces_once():
    def accumulating():
        return _sgd(gradient_accumulation_steps=3)

    for reference, factor, options in (
        (accumulating, 3.0, {"backward_passes_per_step": 3}),
        (
            accumulating,
            1.0,
            {"backward_passes_per_step": 3, "average_aggregated_gradients": True},
        ),
        (None, 1.0, {}),
    ):
        make = _sgd if options else accumulating
        with _Count() as count:
            _train(make, reference, steps=6, factor=factor, **options)
        assert count.calls == 2, count.calls
    built = _sgd()
    built.build(_variables())
    with pytest.raises(HvdkitError, match="not built yet"):
        hvd.DistributedOptimizer(built, backward_passes_per_step=3)
    with pytest.raises(HvdkitError, match="accumulates over 2"):
        hvd.DistributedOptimizer(_sgd(gradient_accumulation_steps=2), backward_passes_per_step=3)


def check_schedules_count_updates():
    boundaries = keras.optimizers.schedules.PiecewiseConstantDecay([1], [0.5, 0.25])
    variables = _variables()
    wrapped = hvd.DistributedOptimizer(
        keras.optimizers.SGD(boundaries),
        backward_passes_per_step=3,
        average_aggregated_gradients=True,
    )
    expected = _read(variables)
    for update, rate in enumerate((0.5, 0.5, 0.25)):
        for one in range(3):
            _apply(wrapped, variables, _gradients(3 * update + one, hvd.rank()))
            expected = [
                e - rate / 3 * g
                for e, g in zip(expected, _gradients(3 * update + one, None), strict=True)
            ]
    for mine, other in zip(_read(variables), expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


def check_sum_predivide_groups_buckets_and_compression():
    _train(_sgd, factor=hvd.size(), op=hvd.Sum)
    _train(_sgd, gradient_predivide_factor=3.0)
    for groups in (1, 2, 9):
        _train(_sgd, groups=groups)
    for size in (1e-5, 1e-4):
        _train(_sgd, bucket_size_mb=size)
    _train(_sgd, compression=hvd.Compression.fp16, rtol=2e-2, atol=2e-3)
    with pytest.warns(DeprecationWarning, match="groups"):
        _train(_sgd, num_groups=2)


def check_16_and_64_bits():
    _train(_sgd, dtype="bfloat16", rtol=2e-2, atol=2e-2)
    _train(_sgd, dtype="float64", rtol=1e-6)
    _train(keras.optimizers.SGD, dtype="float16", rtol=1e-2, atol=2e-3)
    # Near float16's limit the mean is finite though the sum is not.
    [variable] = [keras.Variable(np.zeros(3), dtype="float16")]
    wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(1e-3))
    wrapped.apply([ops.full((3,), 6e4, dtype="float16")], [variable])
    np.testing.assert_allclose(_read([variable])[0], -60.0, rtol=1e-2)


def check_local_variables():
    for scale in (True, False):
        ours = _variables()
        wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), scale_local_gradients=scale)
        wrapped.register_local_var(ours[2])
        start = _read(ours)
        _apply(wrapped, ours, _gradients(0, hvd.rank()))
        mine, mean = _gradients(0, hvd.rank()), _gradients(0)
        for index, (before, after) in enumerate(zip(start, _read(ours), strict=True)):
            gradient = mine[index] / (hvd.size() if scale else 1) if index == 2 else mean[index]
            np.testing.assert_allclose(after, before - 0.1 * gradient, rtol=1e-4, atol=1e-6)
    model = build_model()
    wrapped = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1), local_layers=model.layers[1]
    )
    compile_model(model, wrapped)
    rng = np.random.default_rng(hvd.rank())
    rows = rng.standard_normal((8, 4)).astype("float32"), rng.integers(0, 3, 8)
    model.fit(*rows, verbose=0)
    hvd.check_replicas(model)
    differing = hvd.allgather(model.layers[1].kernel[None])
    assert not np.array_equal(differing[0], differing[1])
    with pytest.raises(ValueError, match="local_layers"):
        hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=[3])


def check_process_sets():
    mine = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    ours, theirs = _variables(), _variables()
    for only in mine:  # the second of them excludes rank 0, and the first one rank 1
        wrapped, plain = hvd.DistributedOptimizer(_sgd(), process_set=only), _sgd()
        for step in range(2):
            _apply(wrapped, ours, _gradients(step, hvd.rank()))
            _apply(plain, theirs, _gradients(step, hvd.rank()))
    for one, other in zip(_read(ours), _read(theirs), strict=True):
        np.testing.assert_array_equal(one, other)
    for process_set in mine:
        hvd.remove_process_set(process_set)


def check_bad_arguments_raise_on_every_rank():
    for options, error, text in (
        ({"op": hvd.Average, "gradient_predivide_factor": 0.0}, ValueError, "predivide"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, ValueError, "Average only"),
        ({"op": "mean"}, ValueError, "op must be"),
        ({"bucket_size_mb": 0}, ValueError, "bucket_size_mb"),
        ({"groups": 0}, ValueError, "groups"),
        ({"backward_passes_per_step": 0}, ValueError, "backward_passes_per_step"),
        ({"clip_grad_norm": -1.0}, ValueError, "clip_grad_norm"),
        ({"compression": "fp16"}, TypeError, "compression"),
    ):
        with pytest.raises(error, match=text):
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **options)
    with pytest.raises(TypeError, match="Optimizer"):
        hvd.DistributedOptimizer("sgd")
    with pytest.raises(HvdkitError, match="wrapped already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(_sgd()))


def check_disagreement_raises_on_every_rank():
    first = hvd.rank() == 0
    cases = [
        (lambda: keras.optimizers.SGD(0.1) if first else keras.optimizers.Adam(0.1), {}, "class"),
        (_sgd, {"op": hvd.Sum if first else hvd.Average}, "op"),
        (_sgd, {"backward_passes_per_step": 1 + hvd.rank()}, "backward_passes_per_step"),
        (_sgd, {"clip_grad_norm": 1.0 if first else None}, "clip_grad_norm"),
        (_sgd, {"groups": 1 + hvd.rank()}, "groups"),
    ]
    for make, options, text in cases:
        with pytest.raises(RankDisagreementError, match=text):
            hvd.DistributedOptimizer(make(), **options)
    with pytest.raises((ValueError, RankDisagreementError), match="bucket_size_mb"):
        hvd.DistributedOptimizer(_sgd(), bucket_size_mb=0 if first else 8)
    _train(_sgd)


def check_values_travel_as_in_horovod():
    rank, ranks = hvd.rank(), hvd.size()
    assert hvd.allreduce(float(rank)) == pytest.approx((ranks - 1) / 2)
    assert hvd.allreduce([1.0, rank], op=hvd.Sum).tolist() == [ranks, sum(range(ranks))]
    assert hvd.allreduce(np.float32(rank), average=False) == sum(range(ranks))
    assert hvd.allreduce(ops.ones(2), prescale_factor=2.0, name="twos").tolist() == [2.0, 2.0]
    gathered = hvd.allgather(np.full((1 + rank, 2), rank, "float32"))
    assert gathered[:, 0].tolist() == [r for r in range(ranks) for _ in range(1 + r)]
    assert hvd.broadcast(np.array([rank, 5]), 1).tolist() == [1, 5]
    share = hvd.reducescatter(np.arange(2.0 * ranks), op=hvd.Sum)
    assert share.tolist() == [ranks * (2.0 * rank + i) for i in range(2)]
    assert hvd.broadcast_object({"rank": rank}, root_rank=1) == {"rank": 1}
    with pytest.raises(HvdkitError, match="broadcast_initial_state"):
        hvd.broadcast_global_variables(0)


def check_elastic_state_syncs_and_restores():
    model = compile_model(build_model(seed=hvd.rank()), keras.optimizers.Adam(0.01))
    state = hvd.elastic.KerasState(model, batch=hvd.rank(), epoch=0)
    state.sync()
    hvd.check_replicas(model)
    assert state.batch == 0
    before = _read(model.variables)
    rows = np.ones((8, 4), "float32"), np.zeros(8)
    callbacks = [hvd.elastic.UpdateEpochStateCallback(state)]
    model.fit(*rows, verbose=0, epochs=2, callbacks=callbacks)
    assert state.epoch == 2
    assert int(model.optimizer.iterations) == 2
    state.restore()
    assert state.epoch == 0
    assert int(model.optimizer.iterations) == 0
    for now, then in zip(_read(model.variables), before, strict=True):
        np.testing.assert_array_equal(now, then)


def _make_elastic(optimizer, **options):
    model = compile_model(build_model(seed=0), optimizer)
    shard = hvd.elastic.ElasticShard(np.arange(12), seed=2)
    return hvd.elastic.KerasState(model, shard=shard, **options)


def check_elastic_shard_goes_on_where_training_stands():
    state = _make_elastic(keras.optimizers.SGD(0.1))
    state.sync()
    order = keras.ops.convert_to_numpy(hvd.allgather(state.shard.rest()[:2], name="first")).tolist()
    state.shard.advance(2)
    state.commit()
    assert state.shard.position == 2 * hvd.size()
    rest = hvd.allgather(state.shard.rest(), name="rest")
    assert sorted(order + keras.ops.convert_to_numpy(rest).tolist()) == list(range(12))
    state.shard.advance(len(state.shard))
    assert (state.shard.epoch, state.shard.position) == (1, 0)
    state.restore()
    assert (state.shard.epoch, state.shard.position) == (0, 2 * hvd.size())
    rows = np.ones((len(state.shard), 4), "float32"), np.zeros(len(state.shard))
    callbacks = [hvd.elastic.UpdateShardCallback(state.shard, 3)]
    state.model.fit(*rows, 3, verbose=0, shuffle=False, callbacks=callbacks)
    assert (state.shard.epoch, state.shard.position) == (1, 0)  # the last batch was shorter


def check_elastic_state_follows_the_workers():
    # As if four times as many had been there.
    state = _make_elastic(keras.optimizers.SGD(0.1), learning_rate_rule="linear")
    state.sync()
    state._size = {**state._size, "batches": 4 * hvd.size()}
    state.on_reset()
    np.testing.assert_allclose(float(state.optimizer.learning_rate), 0.1 / 4, rtol=1e-6)
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1), backward_passes_per_step=2, average_aggregated_gradients=True
    )
    state = _make_elastic(optimizer, learning_rate_rule="linear", keep_global_batch=True)
    state.sync()
    rows = np.ones((6, 4), "float32"), np.zeros(6)
    state.model.fit(*rows, 1, verbose=0)
    assert int(optimizer.iterations) == 3
    state._size = {**state._size, "kept": 8 * hvd.size()}
    state.on_reset()
    assert optimizer.gradient_accumulation_steps == 8
    assert int(optimizer.iterations) == 3
    before = _read(state.model.trainable_variables)
    state.model.fit(*(row[:1].repeat(7, 0) for row in rows), 1, verbose=0)
    for now, then in zip(_read(state.model.trainable_variables), before, strict=True):
        np.testing.assert_array_equal(now, then)
    state.model.fit(*(row[:1] for row in rows), 1, verbose=0)
    assert int(optimizer.iterations) == 4
    assert any(
        (now != then).any()
        for now, then in zip(_read(state.model.trainable_variables), before, strict=True)
    )


def check_elastic_state_refuses_what_it_cannot_follow():
    with pytest.raises(HvdkitError, match="unknown scaling rule 'cubic'"):
        _make_elastic(keras.optimizers.SGD(0.1), learning_rate_rule="cubic")
    with pytest.raises(HvdkitError, match="average_aggregated_gradients=True"):
        _make_elastic(keras.optimizers.SGD(0.1), keep_global_batch=True)
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    with pytest.raises(HvdkitError, match="is a ExponentialDecay"):
        _make_elastic(keras.optimizers.SGD(decay), learning_rate_rule="sqrt")


# What one of Horovod's two Keras modules has at another position than the other.
DIFFERS = {"DistributedOptimizer", "BestModelCheckpoint"}


def check_every_public_name_of_horovod_is_there():
    assert hvd.__all__ == sorted(hvd.__all__)
    assert [name for name in hvd.__all__ if not hasattr(hvd, name)] == []
    for module, ours in (
        (stock, hvd),
        (stock.callbacks, hvd.callbacks),
        (stock_keras, hvd),
        (stock_keras.callbacks, hvd.callbacks),
    ):
        for name, theirs in vars(module).items():
            if name.startswith("_") or name in ("K", "is_version_greater_equal_than"):
                continue
            if inspect.ismodule(theirs) and name not in ("callbacks", "elastic"):
                continue
            assert name in ours.__all__, f"{module.__name__}.{name} is missing"
            if not inspect.isfunction(theirs) and not inspect.isclass(theirs):
                continue
            if theirs.__module__.partition(".")[0] != "horovod" or theirs is stock.ProcessSet:
                continue
            if name in ("Compression", "init", "start_timeline"):
                continue
            mine = list(inspect.signature(getattr(ours, name)).parameters)
            expected = list(inspect.signature(theirs).parameters)
            if module in (stock_keras, stock_keras.callbacks) and name in DIFFERS:
                assert set(expected) <= set(mine), name
            else:
                assert mine[: len(expected)] == expected, name
    for module in (stock, stock_keras):
        assert set(module.elastic.__all__) <= set(hvd.elastic.__all__)


if __name__ == "__main__":
    run_checks(globals())
