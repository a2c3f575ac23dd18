"""State on all ranks, names and signatures, and errors that every rank raises."""

import importlib
import inspect
import types

import horovod.tensorflow as stock
import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdkit.tensorflow as hvd
from hvdkit.errors import HvdkitError, RankDisagreementError, ReplicaMismatchError
from tests.distributed.worker import run_checks


def build_model(seed=0):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization()]
    )


def check_every_public_name_is_there():
    assert hvd.__all__ == sorted(hvd.__all__)
    assert [name for name in hvd.__all__ if not hasattr(hvd, name)] == []
    modules = {"elastic"}
    for name, value in vars(stock).items():
        if name.startswith("_") or (isinstance(value, types.ModuleType) and name not in modules):
            continue
        assert name in hvd.__all__, f"horovod.tensorflow.{name} is missing"


def check_modules_by_horovods_names():
    for name in ("elastic", "keras", "keras.callbacks", "keras.elastic"):
        module = importlib.import_module(f"hvdkit.tensorflow.{name}")
        theirs = importlib.import_module(f"horovod.tensorflow.{name}")
        assert [n for n in getattr(theirs, "__all__", ()) if not hasattr(module, n)] == []


def check_signatures_accept_what_horovods_accept():
    for name, theirs in vars(stock).items():
        ours = getattr(hvd, name, None)
        if not inspect.isfunction(theirs) or ours is theirs or name.startswith("_"):
            continue
        mine = inspect.signature(ours).parameters
        for position, (argument, parameter) in enumerate(
            inspect.signature(theirs).parameters.items()
        ):
            assert list(mine)[position] == argument, f"{name}: {argument}"
            if parameter.default is not parameter.empty:
                assert mine[argument].default is not parameter.empty, f"{name}: {argument}"


def check_elastic_states_go_back_and_synchronize():
    model = build_model(seed=hvd.rank())
    optimizer = keras.optimizers.Adam(0.1 * (hvd.rank() + 1))
    state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=hvd.rank())
    state.sync()
    assert state.batch == 0
    assert float(optimizer.learning_rate) == pytest.approx(0.1)
    hvd.check_replicas(model, buffers=True)
    saved = [v.numpy().copy() for v in [*model.variables, *optimizer.variables]]
    optimizer.apply([tf.ones(v.shape) for v in model.trainable_variables])
    state.restore()
    for variable, value in zip([*model.variables, *optimizer.variables], saved, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)

    v = tf.Variable([1.0 + hvd.rank()])
    state = hvd.elastic.TensorFlowState([v], step=1 + hvd.rank())
    np.testing.assert_array_equal(v, [1.0 + hvd.rank()])  # who joins makes its state alone
    state.sync()
    np.testing.assert_array_equal(v, [1.0])
    v.assign([5.0])
    state.restore()
    np.testing.assert_array_equal(v, [1.0])
    assert state.step == 1
    assert set(stock.elastic.__all__) <= set(hvd.elastic.__all__)


def _gather(dataset):
    mine = np.array(list(dataset.as_numpy_iterator()), "int64")
    return hvd.allgather(mine, name="elements").numpy().tolist()


def check_elastic_shards_deal_what_is_left():
    numbers = np.arange(11)
    pipeline = tf.data.Dataset.range(11)
    tf.random.set_seed(hvd.rank())  # of no consequence for the order
    for data in (numbers, pipeline):
        shard = hvd.elastic.ElasticShard(data, seed=4)
        state = hvd.elastic.TensorFlowState([], shard=shard)
        state.sync()
        # Those of hvd.shard, which deals a whole epoch.
        whole = list(hvd.shard(data, seed=4).as_numpy_iterator())
        assert list(shard.rest().as_numpy_iterator()) == whole
        first = _gather(shard.rest().take(3))
        shard.advance(3)
        state.save()
        assert len(shard.rest()) == len(shard) == -(-(11 - 3 * hvd.size()) // hvd.size())
        seen = first + _gather(shard.rest())
        assert set(seen) == set(range(11))
        assert len(seen) - 11 == -11 % hvd.size()  # so that all have as many
        shard.advance(len(shard))
        assert (shard.epoch, len(shard)) == (1, -(-11 // hvd.size()))
        second = list(hvd.shard(data, seed=4).as_numpy_iterator())
        assert list(shard.rest().as_numpy_iterator()) != second
        state.restore()
        assert (shard.epoch, shard.position) == (0, 3 * hvd.size())


def check_variables_of_all_dtypes_are_broadcast():
    dtypes = [
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "int8",
        "uint8",
        "int16",
        "int32",
        "int64",
    ]
    dtypes += ["bool", "complex64"]
    values = [tf.cast([[0, 1], [hvd.rank(), 1]], dtype) for dtype in dtypes]
    variables = [tf.Variable(value) for value in values]
    variables += [tf.Variable(float("nan")), tf.Variable(tf.zeros((0, 3)))]
    variables += [keras.Variable(np.full((2,), hvd.rank() + 1), dtype="bfloat16")]
    hvd.broadcast_variables(variables, root_rank=1)
    for value, variable in zip(values, variables, strict=False):
        assert variable.dtype == value.dtype
        np.testing.assert_array_equal(variable.numpy(), tf.cast([[0, 1], [1, 1]], value.dtype))
    assert np.isnan(variables[len(dtypes)].numpy())
    np.testing.assert_array_equal(tf.cast(variables[-1].value, tf.float32), [2.0, 2.0])


def check_variables_that_cannot_be_broadcast_are_refused_on_every_rank():
    with pytest.raises(HvdkitError, match="holds text"):
        hvd.broadcast_variables([tf.Variable("text")], root_rank=0)
    with pytest.raises(RankDisagreementError, match=r"float32\[2\].*float32\[3\]"):
        hvd.broadcast_variables([tf.Variable(tf.zeros(2 + hvd.rank()), name="v")], root_rank=0)
    with pytest.raises(RankDisagreementError, match="nothing"):
        hvd.broadcast_variables([tf.Variable(0.0)] * (1 + hvd.rank()), root_rank=0)
    with pytest.raises(HvdkitError, match="root_rank"):
        hvd.broadcast_variables([tf.Variable(0.0)], root_rank=hvd.size())


def check_initial_state_of_model_and_optimizer():
    model = build_model(seed=hvd.rank())
    optimizer = keras.optimizers.Adam(0.1 * (1 + hvd.rank()))
    if hvd.rank() == 0:
        optimizer.build(model.trainable_variables)
        optimizer.variables[-1].assign(optimizer.variables[-1] + 3.0)
        before = [v.numpy().copy() for v in model.variables]
    hvd.broadcast_initial_state(model, optimizer)
    hvd.check_replicas(model, buffers=True)
    assert float(optimizer.learning_rate) == pytest.approx(0.1)
    assert float(tf.reduce_sum(optimizer.variables[-1])) == 3.0 * np.prod(
        optimizer.variables[-1].shape
    )
    if hvd.rank() == 0:
        assert all(
            np.array_equal(a, b.numpy()) for a, b in zip(before, model.variables, strict=True)
        )


def check_check_replicas_finds_one_flipped_bit():
    model = build_model()
    hvd.check_replicas(model, buffers=True)
    kernel = model.layers[0].kernel
    bits = kernel.numpy().copy().view(np.uint32)
    if hvd.rank() == 1:
        bits[2, 1] ^= 1
    kernel.assign(bits.view(np.float32))
    with pytest.raises(ReplicaMismatchError, match=r"kernel.*rank 0 has.*rank 1 has"):
        hvd.check_replicas(model)
    hvd.broadcast_initial_state(model)
    hvd.check_replicas(model)


def check_metrics_are_averaged():
    mean = sum(range(hvd.size())) / hvd.size()
    assert hvd.average_metrics({"loss": tf.constant(float(hvd.rank())), "n": 3}) == {
        "loss": mean,
        "n": 3.0,
    }
    weighted = hvd.average_metrics({"loss": float(hvd.rank())}, count=1 + 2 * hvd.rank())
    assert weighted["loss"] == pytest.approx(
        sum(r * (1 + 2 * r) for r in range(hvd.size())) / sum(1 + 2 * r for r in range(hvd.size()))
    )
    with pytest.raises(RankDisagreementError, match="loss"):
        hvd.average_metrics({"loss" if hvd.rank() else "accuracy": 1.0})


def check_bad_arguments_of_a_tape():
    for options, match in [
        ({"op": hvd.Min}, "Average or hvd.Sum"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "op=Average"),
        ({"gradient_predivide_factor": 0.0}, "positive"),
        ({"groups": 0}, "at least 1"),
        ({"groups": [tf.Variable(1.0)]}, "lists of variables"),
        ({"bucket_size_mb": 0}, "positive"),
    ]:
        with pytest.raises(ValueError, match=match):
            hvd.DistributedGradientTape(tf.GradientTape(), **options)
    with pytest.raises(TypeError, match="compression"):
        hvd.DistributedGradientTape(tf.GradientTape(), compression="fp16")
    with pytest.raises(TypeError, match=r"tf\.GradientTape, got int"):
        hvd.DistributedGradientTape(3)
    with pytest.raises(HvdkitError, match="wrapped already"):
        hvd.DistributedGradientTape(hvd.DistributedGradientTape(tf.GradientTape()))
    with pytest.raises(ValueError, match="Keras layers"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[3])


def check_ranks_that_reduce_something_else_raise_and_go_on():
    """Whatever differs, inside and outside of tf.function, both ranks name it."""
    odd = hvd.rank() == 1

    def reduce(shapes, dtype=tf.float32, **options):
        sources = [tf.zeros(shape, dtype) for shape in shapes]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            loss = tf.add_n([tf.cast(tf.reduce_sum(s), tf.float32) for s in sources])
        return hvd.DistributedGradientTape(tape, **options).gradient(loss, sources)

    def fails(match, *args, **kwargs):
        for run in (reduce, tf.function(reduce)):
            with pytest.raises(RankDisagreementError, match=match):
                run(*args, **kwargs)

    fails(r"gradient 1.*\[3\].*\[4\]", [(2,), (3 + odd,)])
    fails(r"gradient 2.*nothing", [(2,)] * (2 + odd))
    fails(
        r"gradient 0.*(float32|float16).*(float32|float16)", [(2,)], [tf.float32, tf.float16][odd]
    )
    fails(r"op.*", [(2,)], op=hvd.Sum if odd else hvd.Average)
    fails(r"bucket_size_mb", [(2,)], bucket_size_mb=1 + odd)
    fails(r"sparse_as_dense", [(2,)], sparse_as_dense=odd)
    fails(r"compression", [(2,)], compression=hvd.Compression.fp16 if odd else hvd.Compression.none)
    for run in (reduce, tf.function(reduce)):
        np.testing.assert_allclose(run([(2,), (5,)])[1], np.ones(5))


def check_complex_gradients_are_refused():
    source = tf.constant([1.0 + 1.0j])
    with tf.GradientTape() as tape:
        tape.watch(source)
        loss = tf.reduce_sum(source * tf.math.conj(source))
    # Keras 3.5 refuses them by itself.
    with pytest.raises((TypeError, ValueError), match="complex128"):
        hvd.DistributedGradientTape(tape).gradient(loss, [source])


if __name__ == "__main__":
    run_checks(globals())
