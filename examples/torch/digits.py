"""Train a small convolutional net on handwritten digits, on as many workers as you start.

    python examples/torch/digits.py
    horovodrun -np 2 python examples/torch/digits.py

The data are the 1797 scans of 8 x 8 pixels that come with scikit-learn. Everything that makes
this data-parallel is a line that names ``hvd``; without those it is ordinary PyTorch.
"""

import json
import time
from pathlib import Path

import click
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hvdkit.torch as hvd

COUNT = click.IntRange(min=1)


def load_splits() -> tuple[TensorDataset, TensorDataset]:
    """Return training and held-out images (float32, 1 x 8 x 8, 0 to 1) with their labels."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    held_out = torch.arange(len(labels)) % 5 == 0
    training = TensorDataset(images[~held_out], labels[~held_out])
    return training, TensorDataset(images[held_out], labels[held_out])


def make_model() -> nn.Module:
    """Two convolutions and a linear layer, 29 thousand parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(64 * 16, 10),
    )


@torch.no_grad()
def evaluate(model: nn.Module, dataset: Dataset, device: torch.device) -> float:
    """Return the share of ``dataset`` that the model gets right; the workers share the work."""
    model.eval()
    # Every rank must take part equally often, so the last share is padded with repeated samples;
    # gather() puts all predictions back into the dataset's order and drops the repetitions.
    sampler = hvd.shard(dataset, shuffle=False)
    right = [
        model(images.to(device)).argmax(1).cpu() == labels
        for images, labels in DataLoader(dataset, batch_size=256, sampler=sampler)
    ]
    return hvd.gather(torch.cat(right), sampler).float().mean().item()


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
    torch.manual_seed(seed + hvd.rank())  # each worker its own dropout
    training, held_out = load_splits()

    model = make_model().to(where)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=hvd.scale_learning_rate(lr), momentum=0.9, weight_decay=1e-4
    )
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    # The workers drew other weights: from here on all have those of rank 0.
    hvd.broadcast_initial_state(model, optimizer, root_rank=0)

    sampler = hvd.shard(training, shuffle=True, seed=seed)
    loader = DataLoader(training, batch_size=batch_size, sampler=sampler)
    if hvd.rank() == 0:
        print(f"{hvd.size()} worker(s) on {where.type}, {len(training)} training samples")

    lines = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)  # another order, and other shares
        model.train()
        start_s = time.perf_counter()
        loss_sum = torch.zeros((), device=where)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images.to(where)), labels.to(where))
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach() * len(labels)
        mean_loss = loss_sum.item() / len(sampler)
        elapsed_s = time.perf_counter() - start_s
        metrics = hvd.average_metrics({"loss": mean_loss, "elapsed_s": elapsed_s})
        accuracy = evaluate(model, held_out, where)
        speed = len(training) / metrics["elapsed_s"]
        lines.append({"loss": metrics["loss"], "accuracy": accuracy, "samples_per_s": speed})
        if hvd.rank() == 0:
            print(
                f"epoch {epoch + 1:2}  loss {metrics['loss']:.4f}  "
                f"held-out accuracy {accuracy:.4f}  {speed:.0f} samples/s",
                flush=True,
            )

    hvd.check_replicas(model)  # raises on every rank, naming the parameter, if one differs
    if hvd.rank() == 0:
        print(f"replicas identical: {hvd.size()} worker(s) hold the same weights")
        if summary:
            summary.write_text(json.dumps({"framework": "PyTorch", "epochs": lines}), "utf-8")


if __name__ == "__main__":
    main()
