"""Train on handwritten digits with ``model.fit`` while workers come and go, or die.

    python examples/tensorflow/elastic.py
    horovodrun -np 2 --min-np 1 --max-np 8 --host-discovery-script ./hosts.sh \
        python examples/tensorflow/elastic.py

``hosts.sh`` prints a line ``HOST:SLOTS`` for each host that may be used; Horovod asks it each
second. A host whose worker failed is not used again. Also runs with ``KERAS_BACKEND=torch``.
"""

import click
import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import hvdkit.keras as hvd

COUNT = click.IntRange(min=1)


def load_splits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return training images (float32, 64 pixels, 0 to 1) and labels, then the held-out ones."""
    digits = load_digits()
    images = digits.data.astype("float32") / 16
    held_out = np.arange(len(images)) % 5 == 0
    return images[~held_out], digits.target[~held_out], images[held_out], digits.target[held_out]


@click.command()
@click.option("--epochs", type=COUNT, default=10, show_default=True)
@click.option(
    "--batch-size", type=COUNT, default=32, show_default=True, help="Samples a worker and step."
)
@click.option("--lr", default=0.05, show_default=True, help="For one worker; scaled by workers.")
@click.option("--commit-every", type=COUNT, default=5, show_default=True, help="Steps.")
@click.option("--seed", default=0, show_default=True)
def main(epochs: int, batch_size: int, lr: float, commit_every: int, seed: int) -> None:
    """Classify handwritten digits with workers that come and go."""
    hvd.init()
    hvd.set_threads()
    images, labels, held_out_images, held_out_labels = load_splits()
    model = keras.Sequential(
        [keras.Input((64,)), layers.Dense(128, activation="relu"), layers.Dense(10)]
    )
    optimizer = keras.optimizers.SGD(hvd.scale_learning_rate(lr), momentum=0.9)
    model.compile(
        hvd.DistributedOptimizer(optimizer),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    # Everything that a worker which joins must be given, and that a loss takes back to the last
    # commit. No collective may come before train(): who joins would run it alone.
    state = hvd.elastic.KerasState(
        model,
        shard=hvd.elastic.ElasticShard((images, labels), seed=seed),
        learning_rate_rule="linear",  # three workers instead of two: half as much again
    )

    @hvd.elastic.run
    def train(state: hvd.elastic.KerasState) -> None:
        """Begins anew, with the state as it is, whenever workers have come or gone."""
        if hvd.rank() == 0:
            print(f"{hvd.size()} worker(s), from step {int(optimizer.iterations)}", flush=True)
        while state.shard.epoch < epochs:
            epoch = state.shard.epoch
            mine, targets = state.shard.rest()  # this worker's share of what the epoch has left
            model.fit(
                mine,
                targets,
                batch_size,
                initial_epoch=epoch,
                epochs=epoch + 1,
                shuffle=False,  # the shard is, and knows in which order
                verbose=0,
                callbacks=[
                    # Each sample counts once an epoch.
                    hvd.elastic.UpdateShardCallback(state.shard, batch_size),
                    hvd.elastic.CommitStateCallback(state, commit_every),
                ],
            )
            _, accuracy = model.evaluate(held_out_images, held_out_labels, verbose=0)
            if hvd.rank() == 0:
                print(
                    f"epoch {epoch + 1:2}  {hvd.size()} worker(s)  "
                    f"rate {float(optimizer.learning_rate):.4f}  "
                    f"held-out accuracy {accuracy:.4f}",
                    flush=True,
                )
        hvd.check_replicas(model)

    train(state)


if __name__ == "__main__":
    main()
