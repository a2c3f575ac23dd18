"""Train on handwritten digits while workers come and go, or die.

    python examples/torch/elastic.py
    horovodrun -np 2 --min-np 1 --max-np 8 --host-discovery-script ./hosts.sh \
        python examples/torch/elastic.py

``hosts.sh`` prints a line ``HOST:SLOTS`` for each host that may be used; Horovod asks it each
second. A host whose worker failed is not used again.
"""

import click
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import hvdkit.torch as hvd

COUNT = click.IntRange(min=1)


def load_splits() -> tuple[TensorDataset, TensorDataset]:
    """Return training and held-out images (float32, 64 pixels, 0 to 1) with their labels."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    held_out = torch.arange(len(labels)) % 5 == 0
    training = TensorDataset(images[~held_out], labels[~held_out])
    return training, TensorDataset(images[held_out], labels[held_out])


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
    training, held_out = load_splits()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=hvd.scale_learning_rate(lr), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    # Everything that a worker which joins must be given, and that a loss takes back to the last
    # commit. No collective may come before train(): who joins would run it alone.
    state = hvd.elastic.TorchState(
        model,
        optimizer,
        schedule=schedule,
        sampler=hvd.shard(training, seed=seed),
        learning_rate_rule="linear",  # three workers instead of two: half as much again
        steps=0,
    )

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        """Begins anew, with the state as it is, whenever workers have come or gone."""
        loader = DataLoader(training, batch_size=batch_size, sampler=state.sampler)
        if hvd.rank() == 0:
            print(f"{hvd.size()} worker(s), from step {state.steps}", flush=True)
        for epoch in range(state.sampler.epoch, epochs):
            state.sampler.set_epoch(epoch)
            for images, labels in loader:
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                schedule.step()
                state.sampler.advance(len(labels))  # each sample counts once an epoch
                state.steps += 1
                if state.steps % commit_every == 0:
                    state.commit()
            state.commit()
            with torch.no_grad():
                images, labels = held_out.tensors
                accuracy = (model(images).argmax(1) == labels).float().mean().item()
            if hvd.rank() == 0:
                rate = optimizer.param_groups[0]["lr"]
                print(
                    f"epoch {epoch + 1:2}  {hvd.size()} worker(s)  rate {rate:.4f}  "
                    f"held-out accuracy {accuracy:.4f}",
                    flush=True,
                )
        hvd.check_replicas(model)

    train(state)


if __name__ == "__main__":
    main()
