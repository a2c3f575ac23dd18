"""Train a small transformer to write Python's documentation, byte by byte.

    python examples/torch/transformer_lm.py
    horovodrun -np 2 python examples/torch/transformer_lm.py --checkpoints /tmp/lm

Shows what longer runs need: gradient accumulation, clipping, bfloat16, a learning rate that
warms up, and checkpoints. Stop the second command and start it again: it goes on where it was.
"""

import math
import time
from pathlib import Path
from pydoc_data.topics import topics

import click
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from transformer_model import Transformer

import hvdkit.torch as hvd

COUNT = click.IntRange(min=1)


def load_splits(context: int) -> tuple[TensorDataset, TensorDataset]:
    """Cut the text into rows of ``context`` + 1 bytes; every tenth row is held out."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    tokens = torch.tensor(list(text))
    rows = tokens.unfold(0, context + 1, context)
    held_out = torch.arange(len(rows)) % 10 == 0
    return TensorDataset(rows[~held_out]), TensorDataset(rows[held_out])


def compute_loss(model: nn.Module, rows: Tensor, bfloat16: bool) -> Tensor:
    """Return the mean cross-entropy of the next byte, in nats."""
    with torch.autocast(rows.device.type, dtype=torch.bfloat16, enabled=bfloat16):
        scores = model(rows[:, :-1])
    return functional.cross_entropy(scores.float().flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, device: torch.device, bfloat16: bool) -> float:
    """Return the mean loss over the held-out rows, which the workers share, in bits a byte."""
    losses = [compute_loss(model, rows.to(device), bfloat16).item() for (rows,) in loader]
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
    where = hvd.pick_device(device)
    torch.manual_seed(0)
    training, held_out = load_splits(context)
    training = TensorDataset(training.tensors[0][:limit])

    model = Transformer(context, width, layers).to(where)
    optimizer = hvd.DistributedOptimizer(
        # Adam normalizes the gradient, so its rate grows with the root of the batch.
        torch.optim.AdamW(
            model.parameters(), hvd.scale_learning_rate(lr, "sqrt", accumulate), weight_decay=0.01
        ),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.bf16 if bfloat16 else hvd.Compression.none,
        backward_passes_per_step=accumulate,
        average_aggregated_gradients=True,
        clip_grad_norm=clip,  # after the reduction, so by the same norm on every worker
    )
    schedule = hvd.warmup(optimizer, warmup_steps)
    sampler = hvd.shard(training, shuffle=True)
    loader = DataLoader(training, batch_size, sampler=sampler)
    check = DataLoader(held_out, batch_size, sampler=hvd.shard(held_out, shuffle=False))

    step = 0
    store = hvd.CheckpointStore(checkpoints) if checkpoints else None
    if store is None:
        hvd.broadcast_initial_state(model, optimizer)
    elif saved := hvd.restore_or_broadcast(store, model, optimizer):
        step = saved["step"]
        sampler.load_state_dict(saved["sampler"])
        schedule.load_state_dict(saved["schedule"])
        if hvd.rank() == 0:
            done = "; nothing is left to do" if sampler.epoch >= epochs else ""
            print(f"resumed at step {step} in {checkpoints}{done}", flush=True)

    for epoch in range(sampler.epoch, epochs):
        sampler.set_epoch(epoch)
        passes, start_s = len(loader), time.perf_counter()
        seen = hvd.size() * len(sampler) * context
        for index, (rows,) in enumerate(loader, 1):
            compute_loss(model, rows.to(where), bfloat16).backward()
            sampler.advance(len(rows))
            if index % accumulate and index < passes:
                continue
            # Complete, or cut short by the end of the epoch: step() averages the passes made.
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            step += 1
            if store and (step % save_every == 0 or index == passes):
                state = {"sampler": sampler.state_dict(), "schedule": schedule.state_dict()}
                store.save(step, model, optimizer, **state)
        elapsed_s = time.perf_counter() - start_s
        bits = evaluate(model, check, where, bfloat16)
        if hvd.rank() == 0:
            print(
                f"epoch {epoch + 1}  step {step}  held out: {bits:.3f} bits a byte  "
                f"{seen / elapsed_s:.0f} bytes/s",
                flush=True,
            )
    hvd.check_replicas(model)


if __name__ == "__main__":
    main()
