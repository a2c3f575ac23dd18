"""Train a small convolutional net on handwritten digits with a loop of your own.

    python examples/tensorflow/digits_tape.py
    horovodrun -np 2 python examples/tensorflow/digits_tape.py

The data are the 1797 scans of 8 x 8 pixels that come with scikit-learn. Everything that makes
this data-parallel is a line that names ``hvd``; without those it is ordinary TensorFlow.
"""

import time

import click
import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

import hvdkit.tensorflow as hvd

COUNT = click.IntRange(min=1)
compute_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def load_splits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return training images (float32, 8 x 8 x 1, 0 to 1) and labels, then the held-out ones."""
    digits = load_digits()
    images = digits.images.astype("float32")[..., None] / 16
    held_out = np.arange(len(images)) % 5 == 0
    return images[~held_out], digits.target[~held_out], images[held_out], digits.target[held_out]


def make_model() -> keras.Model:
    """Two convolutions and a linear layer, 29 thousand parameters."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Dropout(0.2),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


@tf.function(reduce_retracing=True)
def take_step(
    model: keras.Model, optimizer: keras.Optimizer, images: tf.Tensor, labels: tf.Tensor
) -> tf.Tensor:
    """Update the weights with the gradient that is averaged over all workers."""
    with tf.GradientTape() as tape:
        loss = compute_loss(labels, model(images, training=True))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return loss


def evaluate(model: keras.Model, images: np.ndarray, labels: np.ndarray) -> float:
    """Return the share of images that the model gets right; the workers share the work."""
    mine = slice(hvd.rank(), None, hvd.size())
    right = np.argmax(model(images[mine], training=False), axis=1) == labels[mine]
    return hvd.average_metrics({"accuracy": right.mean()}, count=len(right))["accuracy"]


@click.command()
@click.option("--epochs", type=COUNT, default=10, show_default=True)
@click.option(
    "--batch-size", type=COUNT, default=32, show_default=True, help="Samples a worker and step."
)
@click.option("--lr", default=0.02, show_default=True, help="For one worker; scaled by workers.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.option("--seed", default=0, show_default=True)
def main(epochs: int, batch_size: int, lr: float, device: str, seed: int) -> None:
    """Classify handwritten digits with data-parallel training."""
    hvd.init()
    hvd.set_threads()
    where = hvd.pick_device(device)
    keras.utils.set_random_seed(seed + hvd.rank())  # each worker its own dropout
    images, labels, held_out_images, held_out_labels = load_splits()

    model = make_model()
    # The tape averages, so the optimizer is an ordinary one.
    optimizer = keras.optimizers.SGD(hvd.scale_learning_rate(lr), momentum=0.9, weight_decay=1e-4)
    optimizer.build(model.trainable_variables)
    # The workers drew other weights: from here on all have those of rank 0.
    hvd.broadcast_initial_state(model, optimizer, root_rank=0)

    share = hvd.shard((images, labels), shuffle=True, seed=seed)  # another order each epoch
    batches = share.batch(batch_size)
    if hvd.rank() == 0:
        print(f"{hvd.size()} worker(s) on {where}, {len(images)} training samples")

    for epoch in range(epochs):
        start_s = time.perf_counter()
        losses = [take_step(model, optimizer, *batch) for batch in batches]
        metrics = {"loss": np.mean(losses), "elapsed_s": time.perf_counter() - start_s}
        metrics = hvd.average_metrics(metrics)
        accuracy = evaluate(model, held_out_images, held_out_labels)
        if hvd.rank() == 0:
            print(
                f"epoch {epoch + 1:2}  loss {metrics['loss']:.4f}  "
                f"held-out accuracy {accuracy:.4f}  "
                f"{len(images) / metrics['elapsed_s']:.0f} samples/s",
                flush=True,
            )

    hvd.check_replicas(model)  # raises on every rank, naming the variable, if one differs
    if hvd.rank() == 0:
        print(f"replicas identical: {hvd.size()} worker(s) hold the same weights")


if __name__ == "__main__":
    main()
