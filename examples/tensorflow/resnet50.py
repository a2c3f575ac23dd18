"""Train ResNet-50 on a folder of images, or on synthetic ones to see how fast it goes.

    horovodrun -np 4 python examples/tensorflow/resnet50.py --folder imagenet --batch-size 64
    horovodrun -np 2 python examples/tensorflow/resnet50.py --size 64 --batch-size 8 --images 256

FOLDER holds ``train`` and ``validation``, each with one folder of images a class. The learning
rate follows Goyal et al., Accurate, Large Minibatch SGD (2017).
"""

import time
from functools import partial
from pathlib import Path

import click
import keras
import tensorflow as tf
from images import list_folder, list_synthetic, make_image, read_image

import hvdkit.tensorflow.keras as hvd
from hvdkit.tensorflow import shard

CLASSES = 10  # of the synthetic images
COUNT = click.IntRange(min=1)


def load_splits(folder: Path | None, size: int, images: int) -> tuple:
    """Return training and validation samples, functions that read them, and how many classes."""
    if folder is None:
        training = list_synthetic(images, CLASSES)
        validation = list_synthetic(max(images // 4, hvd.size()), CLASSES)
        read = partial(make_image, size=size)
        return training, validation, read, read, CLASSES
    for part in ("train", "validation"):
        if not (folder / part).is_dir():
            raise click.ClickException(f"there is no folder {part} in {folder}")
    training, classes = list_folder(folder / "train")
    validation, others = list_folder(folder / "validation")
    if classes != others:
        raise click.ClickException(f"train and validation in {folder} have other classes")
    for part, (paths, _) in (("train", training), ("validation", validation)):
        if len(paths) < hvd.size():
            raise click.ClickException(f"found {len(paths)} of {part}/CLASS/IMAGE in {folder}")
    read, count = partial(read_image, size=size), len(classes)
    return training, validation, partial(read, augment=True), partial(read, augment=False), count


class Report(keras.callbacks.Callback):
    """Brings batch norms together before each validation, and prints a line an epoch."""

    def __init__(self, images: int):
        """``images``: of all workers, in an epoch."""
        super().__init__()
        self.images = images

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Start the clock."""
        self.start_s = time.perf_counter()

    def on_test_begin(self, logs: dict | None = None) -> None:
        """Stop the clock; in training each worker's batch norms measured their own share."""
        self.elapsed_s = time.perf_counter() - self.start_s
        hvd.average_buffers(self.model)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Print what ``MetricAverageCallback`` averaged over the workers."""
        elapsed_s = hvd.average_metrics({"elapsed": self.elapsed_s})["elapsed"]
        if hvd.rank() == 0:
            print(
                f"epoch {epoch + 1}  loss {logs['loss']:.4f}  accuracy {logs['val_accuracy']:.4f}  "
                f"{self.images / elapsed_s:.1f} images/s",
                flush=True,
            )


@click.command()
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Holds train/CLASS/IMAGE and validation/CLASS/IMAGE.",
)
@click.option(
    "--images", type=COUNT, default=1024, show_default=True, help="Synthetic ones, if no folder."
)
@click.option("--size", type=COUNT, default=224, show_default=True, help="Pixels of a side.")
@click.option("--epochs", type=COUNT, default=1, show_default=True)
@click.option(
    "--batch-size", type=COUNT, default=32, show_default=True, help="Images a worker and step."
)
@click.option("--lr", default=0.1, show_default=True, help="For 256 images a step; scaled.")
@click.option("--warmup-epochs", type=click.FloatRange(min=0), default=0.25, show_default=True)
@click.option("--bfloat16/--float32", default=False, show_default=True)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
def main(folder, images, size, epochs, batch_size, lr, warmup_epochs, bfloat16, device) -> None:
    """Train ResNet-50 with data-parallel SGD."""
    hvd.init()
    hvd.set_threads()
    hvd.pick_device(device)
    keras.utils.set_random_seed(hvd.rank())  # each worker its own crops and flips
    training, validation, read_training, read, classes = load_splits(folder, size, images)
    if hvd.rank() == 0:
        print(f"{hvd.size()} worker(s), {classes} classes, {len(training[0])} training images")

    # Paths are shared out, and each worker reads its own. For training they are in another order
    # each epoch, and as many on every worker; validation needs no such thing.
    share = shard(training, shuffle=True).map(read_training, tf.data.AUTOTUNE)
    share = share.batch(batch_size).prefetch(2)
    check = tf.data.Dataset.from_tensor_slices(validation).shard(hvd.size(), hvd.rank())
    check = check.map(read, tf.data.AUTOTUNE).batch(batch_size)

    if bfloat16:
        keras.config.set_dtype_policy("mixed_bfloat16")
    model = keras.applications.ResNet50(
        weights=None, input_shape=(size, size, 3), classes=classes, classifier_activation=None
    )
    rate, steps = hvd.scale_learning_rate(lr * batch_size / 256), epochs * len(share)
    warmup_steps = min(round(warmup_epochs * len(share)), steps - 1)
    schedule = keras.optimizers.schedules.CosineDecay(
        rate / hvd.size(), steps - warmup_steps, warmup_target=rate, warmup_steps=warmup_steps
    )
    optimizer = keras.optimizers.SGD(schedule, momentum=0.9, nesterov=True, weight_decay=5e-5)
    # Biases and batch norms, which are vectors, are not decayed.
    optimizer.exclude_from_weight_decay([v for v in model.trainable_variables if len(v.shape) < 2])
    optimizer.build(model.trainable_variables)  # fit would compile the step twice otherwise
    model.compile(
        hvd.DistributedOptimizer(optimizer),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    hvd.broadcast_initial_state(model, root_rank=0)
    model.fit(
        share,
        epochs=epochs,
        shuffle=False,  # the dataset does it
        verbose=0,
        validation_data=check,
        callbacks=[hvd.callbacks.MetricAverageCallback(), Report(len(training[0]))],
    )
    hvd.check_replicas(model)


if __name__ == "__main__":
    main()
