"""Train ResNet-50 on a folder of images, or on synthetic ones to see how fast it goes.

    horovodrun -np 4 python examples/torch/resnet50.py --folder imagenet --batch-size 64
    horovodrun -np 2 python examples/torch/resnet50.py --size 64 --batch-size 8 --images 256

FOLDER holds ``train`` and ``validation``, each with one folder of images a class, which needs
Pillow. The learning rate follows Goyal et al., Accurate, Large Minibatch SGD (2017).
"""

import time
from pathlib import Path

import click
import torch
from images import ImageFolder, SyntheticImages
from resnet50_model import ResNet50
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, SequentialLR
from torch.utils.data import DataLoader, Dataset

import hvdkit.torch as hvd

CLASSES = 10  # of the synthetic images
COUNT = click.IntRange(min=1)


def load_splits(folder: Path | None, size: int, images: int) -> tuple[Dataset, Dataset, int]:
    """Return training images, validation images and the number of classes."""
    if folder is None:
        training = SyntheticImages(images, size, CLASSES)
        validation = SyntheticImages(max(images // 4, hvd.size()), size, CLASSES)
        return training, validation, CLASSES
    training = ImageFolder(folder / "train", size, augment=True)
    validation = ImageFolder(folder / "validation", size, augment=False)
    if training.classes != validation.classes:
        raise click.ClickException(f"train and validation in {folder} have other classes")
    return training, validation, len(training.classes)


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, device: torch.device, amp: bool) -> float:
    """Return the share of the validation images that the model gets right."""
    # In training each worker's batch norms measured their own share of the data.
    hvd.average_buffers(model)
    model.eval()
    right = []
    for images, labels in loader:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=amp):
            scores = model(images.to(device, memory_format=torch.channels_last))
        right.append(scores.argmax(1).cpu() == labels)
    return hvd.gather(torch.cat(right), loader.sampler).float().mean().item()


@click.command()
@click.option("--folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--images", type=COUNT, default=1024, show_default=True, help="Synthetic images.")
@click.option("--size", type=COUNT, default=224, show_default=True, help="Pixels of a side.")
@click.option("--epochs", type=COUNT, default=1, show_default=True)
@click.option("--batch-size", type=COUNT, default=32, show_default=True, help="Images a worker.")
@click.option("--lr", default=0.1, show_default=True, help="For 256 images a step; scaled.")
@click.option("--warmup-epochs", type=click.FloatRange(min=0), default=0.25, show_default=True)
@click.option("--bfloat16/--float32", default=False, show_default=True)
@click.option("--sync-batch-norm", is_flag=True, help="Batch norm over all workers' batches.")
@click.option("--loaders", default=0, show_default=True, help="Processes that load images.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
def main(
    folder, images, size, epochs, batch_size, lr, warmup_epochs, bfloat16, sync_batch_norm,
    loaders, device,
) -> None:  # fmt: skip
    """Train ResNet-50 with data-parallel SGD."""
    hvd.init()
    hvd.set_threads()
    where = hvd.pick_device(device)
    torch.manual_seed(hvd.rank())  # each worker its own crops and flips
    training, validation, classes = load_splits(folder, size, images)

    model = ResNet50(classes)
    if sync_batch_norm:
        model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    model = model.to(where, memory_format=torch.channels_last)
    # Biases and batch norms, which are vectors, are not decayed.
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 5e-5},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    rate = hvd.scale_learning_rate(lr * batch_size / 256)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(groups, lr=rate, momentum=0.9, nesterov=True),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.bf16 if bfloat16 else hvd.Compression.none,
    )
    hvd.broadcast_initial_state(model, optimizer, root_rank=0)

    sampler = hvd.shard(training, shuffle=True)
    options = {"num_workers": loaders, "pin_memory": where.type == "cuda"}
    loader = DataLoader(training, batch_size, sampler=sampler, **options)
    check = DataLoader(validation, batch_size, sampler=hvd.shard(validation, False), **options)
    warmup_steps = min(round(warmup_epochs * len(loader)), epochs * len(loader) - 1)
    schedule = SequentialLR(
        optimizer,
        [
            hvd.warmup(optimizer, warmup_steps),
            CosineAnnealingLR(optimizer, epochs * len(loader) - warmup_steps),
        ],
        milestones=[warmup_steps],
    )

    if hvd.rank() == 0:
        print(f"{hvd.size()} worker(s), {classes} classes, {len(training)} training images")
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        start_s, loss_sum = time.perf_counter(), torch.zeros((), device=where)
        for pixels, labels in loader:
            pixels = pixels.to(where, memory_format=torch.channels_last, non_blocking=True)
            optimizer.zero_grad()
            with torch.autocast(where.type, dtype=torch.bfloat16, enabled=bfloat16):
                scores = model(pixels)
            loss = cross_entropy(scores.float(), labels.to(where), label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            schedule.step()
            loss_sum += loss.detach()
        metrics = {"loss": loss_sum.item() / len(loader), "elapsed": time.perf_counter() - start_s}
        metrics = hvd.average_metrics(metrics)
        accuracy = evaluate(model, check, where, bfloat16)
        if hvd.rank() == 0:
            print(
                f"epoch {epoch + 1}  loss {metrics['loss']:.4f}  accuracy {accuracy:.4f}  "
                f"{len(sampler) * hvd.size() / metrics['elapsed']:.1f} images/s",
                flush=True,
            )
    hvd.check_replicas(model)


if __name__ == "__main__":
    main()
