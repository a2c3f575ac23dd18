"""Train a small convolutional net on handwritten digits with ``model.fit``, on many workers.

    python examples/tensorflow/digits_keras.py
    horovodrun -np 2 python examples/tensorflow/digits_keras.py
    KERAS_BACKEND=torch horovodrun -np 2 python examples/tensorflow/digits_keras.py

The data are the 1797 scans of 8 x 8 pixels that come with scikit-learn. Everything that makes
this data-parallel is a line that names ``hvd``; without those it is ordinary Keras.
"""

import json
import time
from pathlib import Path

import click
import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import hvdkit.keras as hvd

COUNT = click.IntRange(min=1)


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


class Report(keras.callbacks.Callback):
    """Prints a line an epoch on rank 0, with how fast all workers together went."""

    def __init__(self, samples: int):
        """``samples``: of all workers, in an epoch."""
        super().__init__()
        self.samples = samples
        self.lines: list[dict[str, float]] = []

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Start the clock."""
        self.start_s, self.elapsed_s = time.perf_counter(), None

    def on_test_begin(self, logs: dict | None = None) -> None:
        """Stop the clock: what follows is validation."""
        self.elapsed_s = time.perf_counter() - self.start_s

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Print what ``MetricAverageCallback`` averaged over the workers."""
        speed = self.samples / hvd.average_metrics({"elapsed_s": self.elapsed_s})["elapsed_s"]
        line = {"loss": logs["loss"], "accuracy": logs["val_accuracy"], "samples_per_s": speed}
        self.lines.append(line)
        if hvd.rank() == 0:
            print(
                f"epoch {epoch + 1:2}  loss {line['loss']:.4f}  "
                f"held-out accuracy {line['accuracy']:.4f}  {speed:.0f} samples/s",
                flush=True,
            )


@click.command()
@click.option("--epochs", type=COUNT, default=10, show_default=True)
@click.option(
    "--batch-size", type=COUNT, default=32, show_default=True, help="Samples a worker and step."
)
@click.option("--lr", default=0.02, show_default=True, help="For one worker; scaled by workers.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.option("--seed", default=0, show_default=True)
@click.option("--summary", type=click.Path(dir_okay=False, path_type=Path), help="JSON to write.")
def main(
    epochs: int, batch_size: int, lr: float, device: str, seed: int, summary: Path | None
) -> None:
    """Classify handwritten digits with data-parallel training."""
    hvd.init()
    hvd.set_threads()
    where = hvd.pick_device(device)
    keras.utils.set_random_seed(seed + hvd.rank())  # each worker its own dropout
    images, labels, held_out_images, held_out_labels = load_splits()
    # Shares are equally long, since every rank must take part in every step.
    own_images, own_labels = hvd.shard((images, labels))
    held_out_share = slice(hvd.rank(), None, hvd.size())  # each image counts once

    model = make_model()
    optimizer = keras.optimizers.SGD(hvd.scale_learning_rate(lr), momentum=0.9, weight_decay=1e-4)
    model.compile(
        hvd.DistributedOptimizer(optimizer),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    if hvd.rank() == 0:
        print(f"{hvd.size()} worker(s) on {where}, {len(images)} training samples")

    report = Report(len(images))
    model.fit(
        own_images,
        own_labels,
        batch_size,
        epochs,
        verbose=0,
        validation_data=(held_out_images[held_out_share], held_out_labels[held_out_share]),
        validation_batch_size=256,
        callbacks=[
            # The workers drew other weights: from here on all have those of rank 0.
            hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank=0),
            hvd.callbacks.MetricAverageCallback(),
            report,
        ],
    )

    hvd.check_replicas(model)  # raises on every rank, naming the variable, if one differs
    if hvd.rank() == 0:
        print(f"replicas identical: {hvd.size()} worker(s) hold the same weights")
        if summary:
            backend = {"tensorflow": "TensorFlow", "torch": "PyTorch"}[keras.backend.backend()]
            run = {"framework": f"Keras on {backend}", "epochs": report.lines}
            summary.write_text(json.dumps(run), "utf-8")


if __name__ == "__main__":
    main()
