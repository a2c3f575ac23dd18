"""Checks of DistributedGradientTape: what its gradients are, wherever it runs."""

import functools
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdkit.tensorflow as hvd
from tests.distributed.worker import run_checks

MODES = {
    "eager": lambda function: function,
    "graph": tf.function,
    "reduce_retracing": tf.function(reduce_retracing=True),
}


def mean(values):
    """The mean over ranks of a value for each rank."""
    return sum(values) / len(values)


def ranks():
    return range(hvd.size())


def expect(actual, expected, **tolerance):
    np.testing.assert_allclose(
        tf.cast(tf.convert_to_tensor(actual), tf.float64), expected, **{"rtol": 1e-6} | tolerance
    )


def reduce(gradients, **options):
    """Reduce given gradients, of any dtype: those of sources with these coefficients."""
    sources = [tf.zeros_like(gradient) for gradient in gradients]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        products = [source * g for source, g in zip(sources, gradients, strict=True)]
    return hvd.DistributedGradientTape(tape, **options).gradient(products, sources)


def check_the_mean_of_the_ranks_gradients_in_eager_and_in_graph():
    for wrap in MODES.values():
        first, second = tf.Variable([1.0, 2.0]), tf.Variable([[3.0]])

        @wrap
        def step(x, first=first, second=second):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(first * x[:2]) + second[0, 0] * tf.reduce_sum(x)
            return hvd.DistributedGradientTape(tape).gradient(loss, [first, second])

        for rows in (2, 3, 4):  # retraced, or of unknown length
            x = tf.range(rows, dtype=tf.float32) + hvd.rank()
            gradients = step(x)
            expect(gradients[0], [mean(ranks()), 1 + mean(ranks())])
            expect(gradients[1], [[mean([sum(range(rows)) + rows * r for r in ranks()])]])


def check_input_signature_and_a_variable_that_is_added_later():
    variables = [tf.Variable(1.0)]

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def step(x):
        with tf.GradientTape() as tape:
            loss = variables[0] * tf.reduce_sum(x)
        return hvd.DistributedGradientTape(tape).gradient(loss, variables)

    for rows in (1, 5):
        expect(step(tf.ones(rows) * hvd.rank()), [rows * mean(ranks())])

    @tf.function
    def longer():
        with tf.GradientTape() as tape:
            loss = tf.add_n([v * float(hvd.rank()) for v in variables])
        return hvd.DistributedGradientTape(tape).gradient(loss, variables)

    for count in (1, 2, 3):
        variables[count:] = [tf.Variable(1.0) for _ in range(count - len(variables))]
        function = longer if count == 1 else tf.function(longer.python_function)
        expect(function(), [mean(ranks())] * count)


def check_c15_keras_variables_single_sources_and_nests():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    x = tf.ones((4, 3)) * (hvd.rank() + 1.0)
    everyone = [tf.ones((4, 3)) * (r + 1.0) for r in ranks()]

    def compute(sources, x, distributed):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        tape = hvd.DistributedGradientTape(tape) if distributed else tape
        return tape.gradient(loss, sources)

    def bind(sources):  # not as an argument of a tf.function, which would take tensors
        return lambda: compute(sources, x, True)

    weights = model.trainable_variables
    nests = [
        weights,
        weights[0],
        tuple(weights),
        {"b": weights[1], "a": [weights[0], {"c": weights[2]}]},
    ]
    for sources in nests:
        for wrap in MODES.values():
            gradients = wrap(bind(sources))()
            references = [compute(sources, part, False) for part in everyone]
            tf.nest.assert_same_structure(gradients, references[0])
            flat = [tf.nest.flatten(reference) for reference in references]
            for ours, *theirs in zip(tf.nest.flatten(gradients), *flat, strict=True):
                expect(ours, mean([np.asarray(t, np.float64) for t in theirs]), rtol=1e-5)


def check_a_persistent_tape_reduces_each_time():
    for wrap in MODES.values():
        v = tf.Variable([1.0, 1.0])

        @wrap
        def step(v=v):
            with tf.GradientTape(persistent=True) as tape:
                a = tf.reduce_sum(v * float(hvd.rank()))
                b = tf.reduce_sum(v * 10.0 * float(hvd.rank()))
            tape = hvd.DistributedGradientTape(tape)
            return tape.gradient(a, v), tape.gradient(b, v), tape.gradient(a, [v])[0]

        for gradient, factor in zip(step(), (1, 10, 1), strict=True):
            expect(gradient, [factor * mean(ranks())] * 2)


def check_the_tape_itself_still_serves():
    v = tf.Variable(2.0)
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        with tape.stop_recording():
            _ = v * 5.0
        loss = v * v * (hvd.rank() + 1.0)
    assert isinstance(tape, tf.GradientTape)
    assert [w is v for w in tape.watched_variables()] == [True]
    expect(tape.gradient(loss, v), 4.0 * mean([r + 1 for r in ranks()]))
    x = tf.constant([1.0, 2.0]) * (hvd.rank() + 1.0)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(x)
        y = v * x
    gradients = hvd.DistributedGradientTape(tape).gradient(
        y, [x, v], output_gradients=tf.constant([1.0, 3.0]), unconnected_gradients="zero"
    )
    expect(gradients[0], [2.0, 6.0])
    expect(gradients[1], 0.0)


def check_jacobians():
    v = tf.Variable([1.0, 2.0])

    def step(**options):
        with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
            y = v * v * (hvd.rank() + 1.0)
            rows = tf.stack([v, 2 * v]) * (hvd.rank() + 1.0)
            z = tf.reduce_sum(rows * rows, 1, keepdims=True)
        jacobian = tape.jacobian(y, v, **options)
        local = tape.batch_jacobian(z, rows, **options)
        return jacobian, local, tape.gradient(y, v)  # which is reduced after them, too

    factor = mean([r + 1 for r in ranks()])
    for wrap in MODES.values():
        jacobian, local, gradient = wrap(step)()
        expect(jacobian, np.diag([2.0, 4.0]) * factor)
        expect(local[:, 0], 2 * (hvd.rank() + 1.0) * np.array([[1.0, 2.0], [2.0, 4.0]]))
        expect(gradient, np.array([2.0, 4.0]) * factor)
    one_by_one, _, _ = tf.function(step)(experimental_use_pfor=False)
    expect(one_by_one, np.diag([2.0, 4.0]) * factor)


def check_unconnected_gradients_in_the_place_that_tensorflow_has_for_them():
    used, unused = tf.Variable(3.0), tf.Variable(5.0)
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        y = used * used
    zero = tf.UnconnectedGradients.ZERO
    for found, expected in zip(tape.gradient(y, [used, unused], None, zero), (6, 0), strict=True):
        expect(found, expected)


def check_none_stays_none():
    for wrap in MODES.values():
        used, unused = tf.Variable([1.0]), tf.Variable([1.0])

        @wrap
        def step(used=used, unused=unused):
            with tf.GradientTape() as tape:
                loss = used * float(hvd.rank())
            tape = hvd.DistributedGradientTape(tape)
            return tape.gradient(loss, {"unused": unused, "used": used})

        gradients = step()
        assert gradients["unused"] is None
        expect(gradients["used"], [mean(ranks())])
    with tf.GradientTape() as tape:
        loss = used * 1.0
    assert hvd.DistributedGradientTape(tape).gradient(loss, [unused]) == [None]


def check_sparse_gradients_are_gathered_or_made_dense():
    """Rank r looks rows r and 3 up, r + 1 times each."""
    expected = np.zeros((5, 2))
    for r in ranks():
        expected[r] += r + 1
        expected[3] += r + 1

    def build(**options):
        table, bias = tf.Variable(tf.ones((5, 2))), tf.Variable(1.0)

        def step(rows):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, rows)) + bias
            return hvd.DistributedGradientTape(tape, **options).gradient(loss, [table, bias])

        return step

    for wrap in MODES.values():
        for sparse_as_dense in (False, True):
            for op, divisor in ((hvd.Average, hvd.size()), (hvd.Sum, 1)):
                step = wrap(build(sparse_as_dense=sparse_as_dense, op=op))
                gradient, _ = step(tf.constant([hvd.rank(), 3] * (hvd.rank() + 1)))
                assert isinstance(gradient, tf.IndexedSlices) != sparse_as_dense
                expect(gradient, expected / divisor)


def check_sum_predivide_groups_buckets_and_compression():
    values = [tf.constant([1.0 + i, 0.5]) * (hvd.rank() + 1.0) for i in range(7)]
    for options, factor in [
        ({}, mean([r + 1 for r in ranks()])),
        ({"op": hvd.Sum}, sum(r + 1 for r in ranks())),
        ({"gradient_predivide_factor": 4.0}, mean([r + 1 for r in ranks()])),
        ({"groups": 3}, mean([r + 1 for r in ranks()])),
        ({"groups": 50}, mean([r + 1 for r in ranks()])),
        ({"bucket_size_mb": 1e-5}, mean([r + 1 for r in ranks()])),
        ({"compression": hvd.Compression.fp16}, mean([r + 1 for r in ranks()])),
        ({"compression": hvd.Compression.fp16, "op": hvd.Sum}, sum(r + 1 for r in ranks())),
    ]:
        for i, gradient in enumerate(reduce(values, **options)):
            assert gradient.dtype == tf.float32
            expect(gradient, [(1.0 + i) * factor, 0.5 * factor])
    with pytest.warns(DeprecationWarning, match="groups"):
        reduce(values, num_groups=2)


def check_groups_of_variables():
    a, b, c = (tf.Variable([float(i)]) for i in range(3))
    with tf.GradientTape() as tape:
        loss = (a + b + c) * float(hvd.rank())
    tape = hvd.DistributedGradientTape(tape, groups=[[a, c], [tf.Variable(1.0)]])
    expect(tape.gradient(loss, [a, b, c]), [[mean(ranks())]] * 3)


def check_all_dtypes_together_and_near_their_limits():
    for wrap in MODES.values():
        limits = {"float16": 6e4, "bfloat16": 3e38, "float64": 1e308, "float32": 3e38}
        values = [tf.constant(limit, dtype) for dtype, limit in limits.items()]
        values += [tf.constant([1.5, hvd.rank()], dtype) for dtype in limits]
        results = wrap(functools.partial(reduce, values))()
        assert [result.dtype for result in results] == [value.dtype for value in values]
        for value, result in zip(values[:4], results[:4], strict=True):
            expect(result, float(value), rtol=1e-2)  # the mean of equal values is that value
        for result in results[4:]:
            expect(result, [1.5, mean(ranks())])
    tiny = tf.constant([1e-7, 2e-7 * hvd.rank()], tf.float16)
    expect(reduce([tiny])[0], [1e-7, 2e-7 * mean(ranks())], atol=6e-8)


def check_sparse_gradients_of_16_bits():
    for dtype in (tf.float16, tf.bfloat16):
        table = tf.Variable(tf.ones((5, 2), dtype))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [hvd.rank(), 3]))
        gradient = hvd.DistributedGradientTape(tape).gradient(loss, table)
        assert gradient.values.dtype == dtype
        expect(gradient, [[0.5] * 2, [0.5] * 2, [0, 0], [1, 1], [0, 0]])


def check_local_sources_with_and_without_scaling():
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    shared = tf.Variable([[1.0, 1.0]])
    dense.build((None, 2))

    def build(scale):
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(dense(shared)) * float(hvd.rank() + 1)
            tape = hvd.PartialDistributedGradientTape(
                tape, local_layers=dense, scale_local_gradients=scale
            )
            return tape.gradient(loss, [dense.kernel, shared])

        return step

    for scale, divisor in ((True, hvd.size()), (False, 1)):
        for wrap in MODES.values():
            local, reduced = wrap(build(scale))()
            expect(local, [[(hvd.rank() + 1) / divisor]] * 2)
            expect(reduced, [[mean([r + 1 for r in ranks()])] * 2])

        table = tf.Variable(tf.ones((4, 1)))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [hvd.rank(), 3])) + shared[0, 0] * hvd.rank()
        tape = hvd.DistributedGradientTape(tape, scale_local_gradients=scale)
        tape.register_local_source(table)
        local, reduced = tape.get_local_and_global_gradients(loss, [shared, table])
        [(source, gradient)] = local
        assert source is table
        expected = np.zeros((4, 1))
        expected[[hvd.rank(), 3]] = 1 / divisor
        expect(gradient, expected)
        expect(reduced[0][1], [[mean(ranks()), 0.0]])


def check_a_process_set_reduces_among_its_ranks():
    alone = hvd.add_process_set([1])
    value = tf.constant([1.0, 2.0]) * float(hvd.rank() + 1)
    everyones = {1: hvd.rank() + 1, 2: mean([r + 1 for r in ranks()])}
    for process_set in (alone, hvd.global_process_set):
        [gradient] = reduce([value], process_set=process_set)
        expect(gradient, np.array([1.0, 2.0]) * everyones[len(process_set.ranks)])
    assert hvd.remove_process_set(alone)


def check_a_gradient_that_is_a_constant_on_one_rank():
    """TensorFlow would compute with it while it optimizes that rank's graph, once for all."""
    dense, table = tf.Variable([1.0, 1.0]), tf.Variable(tf.ones((3, 2)))
    scalar = tf.Variable(1.0)

    @tf.function
    def step(factor):
        if hvd.rank() == 0:
            factor = 3.0
        with tf.GradientTape() as tape:
            rows = tf.gather(table, [0, 2])
            loss = factor * (tf.reduce_sum(dense) + tf.reduce_sum(rows) + scalar)
        tape = hvd.DistributedGradientTape(tape)
        first, second, third = tape.gradient(loss, [dense, table, scalar])
        return first, tf.convert_to_tensor(second), third

    for i in range(4):
        expected = mean([3.0, *(float(i) for _ in range(1, hvd.size()))])
        first, second, third = step(tf.constant(float(i)))
        expect(first, [expected] * 2)
        expect(second, [[expected] * 2, [0.0] * 2, [expected] * 2])
        expect(third, expected)


def check_two_tapes_and_two_models_in_one_function():
    """Equal layouts, so only the graph tells them apart; nested functions are called twice."""
    one, two = tf.Variable([1.0, 1.0]), tf.Variable([1.0, 1.0])
    rank = tf.Variable(float(hvd.rank()), trainable=False)  # no constant, which would be folded

    def compute(variable, factor):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * factor * rank)
        return hvd.DistributedGradientTape(tape).gradient(loss, [variable])[0]

    @tf.function
    def inner(factor):
        return compute(one, factor)

    @tf.function
    def both():
        return (
            compute(one, 1.0),
            compute(two, 2.0),
            inner(tf.constant(3.0)),
            inner(tf.constant(4.0)),
        )

    @tf.function
    def loop():
        total = tf.zeros(2)
        for i in tf.range(20):
            total += compute(one, tf.cast(i, tf.float32))
        return total

    for _ in range(5):
        for gradient, factor in zip(both(), (1, 2, 3, 4), strict=True):
            expect(gradient, [factor * mean(ranks())] * 2)
        expect(loop(), [sum(range(20)) * mean(ranks())] * 2)


def check_a_module_is_saved_with_its_training_step():
    class Module(tf.Module):
        def __init__(self):
            super().__init__()
            self.v = tf.Variable([1.0, 1.0])

        @tf.function(input_signature=[tf.TensorSpec((None, 2))])
        def train(self, x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(self.v * x)
            (gradient,) = hvd.DistributedGradientTape(tape).gradient(loss, [self.v])
            self.v.assign_sub(gradient)

    module = Module()
    module.train(tf.fill((1, 2), hvd.rank() + 1.0))
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(module, folder)
        loaded = tf.saved_model.load(folder)
    loaded.train(tf.fill((1, 2), hvd.rank() + 1.0))
    expect(loaded.v, [1 - 2 * (mean(ranks()) + 1)] * 2)


def check_a_rank_that_retraces_alone_stays_in_step():
    v = tf.Variable([1.0])

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v * x)
        return hvd.DistributedGradientTape(tape).gradient(loss, [v])[0]

    for batch in (4, 4, 3 if hvd.rank() == 0 else 4):
        gradient = step(tf.ones(batch))
    expect(gradient, [mean([3 if r == 0 else 4 for r in ranks()])])


def check_many_small_tensors_and_a_large_one():
    for wrap in (MODES["eager"], MODES["graph"]):
        small = [tf.fill([i % 7 + 1], float(i * (hvd.rank() + 1))) for i in range(400)]
        large = tf.fill([3 << 20], hvd.rank() + 0.5)
        results = wrap(functools.partial(reduce, [*small, large]))()
        factor = mean([r + 1 for r in ranks()])
        for i, gradient in enumerate(results[:-1]):
            expect(gradient, [i * factor] * (i % 7 + 1))
        assert results[-1].shape == large.shape
        expect(tf.reduce_min(results[-1]), mean([r + 0.5 for r in ranks()]))
        expect(tf.reduce_max(results[-1]), mean([r + 0.5 for r in ranks()]))


if __name__ == "__main__":
    run_checks(globals())
