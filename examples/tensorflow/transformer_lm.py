"""Train a small transformer to write Python's documentation, byte by byte.

    python examples/tensorflow/transformer_lm.py
    horovodrun -np 2 python examples/tensorflow/transformer_lm.py --checkpoints /tmp/lm

Shows what longer runs need: gradient accumulation, clipping, bfloat16, a learning rate that
warms up, and checkpoints. Stop the second command and start it again: it goes on where it was.
"""

import math
import time
from pathlib import Path
from pydoc_data.topics import topics

import click
import keras
import numpy as np
import tensorflow as tf
from transformer_model import Transformer

import hvdkit.tensorflow.keras as hvd
from hvdkit.tensorflow import shard

COUNT = click.IntRange(min=1)


def load_splits(context: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut the text into rows of ``context`` + 1 bytes; every tenth row is held out."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    tokens = np.frombuffer(text, np.uint8).astype(np.int32)
    rows = np.lib.stride_tricks.sliding_window_view(tokens, context + 1)[::context]
    held_out = np.arange(len(rows)) % 10 == 0
    return rows[~held_out], rows[held_out]


def compute_loss(model: keras.Model, rows: tf.Tensor) -> tf.Tensor:
    """Return the mean cross-entropy of the next byte, in nats."""
    scores = tf.cast(model(rows[:, :-1]), tf.float32)
    losses = keras.losses.sparse_categorical_crossentropy(rows[:, 1:], scores, from_logits=True)
    return tf.reduce_mean(losses)


@tf.function(reduce_retracing=True)
def make_pass(model: keras.Model, optimizer: keras.Optimizer, rows: tf.Tensor) -> None:
    """Add to the gradient; the optimizer reduces it and takes a step when enough passes are in."""
    with tf.GradientTape() as tape:
        loss = compute_loss(model, rows)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)


def evaluate(model: keras.Model, dataset: tf.data.Dataset) -> float:
    """Return the mean loss over the held-out rows, which the workers share, in bits a byte."""
    compute = tf.function(compute_loss, reduce_retracing=True)
    losses = [compute(model, rows).numpy() for rows in dataset]
    nats = hvd.average_metrics({"loss": sum(losses) / len(losses)})["loss"]
    return nats / math.log(2)


@click.command()
@click.option("--epochs", type=COUNT, default=3, show_default=True)
@click.option(
    "--batch-size", type=COUNT, default=16, show_default=True, help="Rows a worker and pass."
)
@click.option("--accumulate", type=COUNT, default=2, show_default=True, help="Passes a step.")
@click.option("--lr", default=1e-3, show_default=True, help="For one worker, one pass a step.")
@click.option("--warmup-steps", type=click.IntRange(min=0), default=50, show_default=True)
@click.option("--clip", default=1.0, show_default=True, help="Largest norm of the gradient.")
@click.option("--context", type=COUNT, default=128, show_default=True, help="Bytes a row.")
@click.option(
    "--width", type=click.IntRange(min=32), default=128, show_default=True, help="A multiple of 32."
)
@click.option("--layers", type=COUNT, default=4, show_default=True)
@click.option("--bfloat16/--float32", default=True, show_default=True)
@click.option("--checkpoints", type=click.Path(path_type=Path), help="Save here, resume from here.")
@click.option(
    "--save-every", type=COUNT, default=100, show_default=True, help="Steps between checkpoints."
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.option("--limit", type=COUNT, help="Use this many training rows only.")
def main(
    epochs, batch_size, accumulate, lr, warmup_steps, clip, context, width, layers, bfloat16,
    checkpoints, save_every, device, limit,
) -> None:  # fmt: skip
    """Train a byte-level transformer on the texts behind Python's help()."""
    hvd.init()
    hvd.set_threads()
    hvd.pick_device(device)
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_bfloat16" if bfloat16 else "float32")
    training, held_out = load_splits(context)
    training = training[:limit]

    model = Transformer(context, width, layers)
    model(training[:1, :-1])  # makes the variables
    # Adam normalizes the gradient, so its rate grows with the root of the batch.
    rate = hvd.scale_learning_rate(lr, "sqrt", accumulate)
    # From what one worker would use up to the full rate.
    warmup = keras.optimizers.schedules.PolynomialDecay(
        rate / hvd.size(), max(1, warmup_steps), rate
    )
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.AdamW(warmup, weight_decay=0.01),
        backward_passes_per_step=accumulate,
        average_aggregated_gradients=True,
        clip_grad_norm=clip,  # after the reduction, so by the same norm on every worker
        sparse_as_dense=True,  # the embedding is the output layer too: its gradient has all rows
    )
    optimizer.build(model.trainable_variables)

    share = shard(training, shuffle=True)
    passes = share.batch(batch_size)
    check = tf.data.Dataset.from_tensor_slices(held_out)
    check = check.shard(hvd.size(), hvd.rank()).batch(batch_size)

    made = 0  # passes, of every worker
    store = hvd.CheckpointStore(checkpoints) if checkpoints else None
    if store is None:
        hvd.broadcast_initial_state(model, optimizer)
    elif saved := hvd.restore_or_broadcast(store, model, optimizer):
        made = saved["made"]
        if hvd.rank() == 0:
            done = "; nothing is left to do" if made >= epochs * len(passes) else ""
            print(f"resumed at step {saved['step']} in {checkpoints}{done}", flush=True)

    for epoch in range(made // len(passes), epochs):
        share.set_epoch(epoch)
        start_s, seen = time.perf_counter(), 0
        for rows in passes.skip(made % len(passes)):
            make_pass(model, optimizer, rows)
            made += 1
            seen += hvd.size() * len(rows) * context
            step = made // accumulate  # a window may reach into the next epoch
            if store and (made % (save_every * accumulate) == 0 or made % len(passes) == 0):
                store.save(step, model, optimizer, made=made)
        elapsed_s = time.perf_counter() - start_s
        bits = evaluate(model, check)
        if hvd.rank() == 0:
            print(
                f"epoch {epoch + 1}  step {step}  held out: {bits:.3f} bits a byte  "
                f"{seen / elapsed_s:.0f} bytes/s",
                flush=True,
            )
    hvd.check_replicas(model)


if __name__ == "__main__":
    main()
