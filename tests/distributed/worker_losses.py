"""Training in which some ranks are lost: argv says in which framework, how, and which ranks.

The ranks that are left print what they are told, and how long after the fault, and fail.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

FRAMEWORK, FAULT = sys.argv[1:3]
VICTIMS = [int(rank) for rank in sys.argv[3].split(",")]
RANK = int(os.environ["HOROVOD_RANK"])
MOMENT = Path(os.environ["HVDKIT_TEST_RESULTS"], "moment")
STEPS = 8


def strike():
    """Do to this process what the fault is."""
    MOMENT.write_text(str(time.time()), encoding="utf-8")
    if FAULT == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif FAULT == "die_in_collective":
        threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGKILL)).start()
    elif FAULT == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif FAULT == "leave":
        sys.exit(0)
    elif FAULT == "fail":
        raise ValueError("a sample that cannot be read")
    elif FAULT == "sleep":
        time.sleep(60)


def batches() -> Iterator[np.ndarray]:
    generator = np.random.default_rng(RANK)
    for step in range(STEPS):
        if step == STEPS - 3 and RANK in VICTIMS:
            strike()
        yield generator.standard_normal((4, 8), dtype=np.float32)


def tell(error: BaseException) -> None:
    after_s = time.time() - float(MOMENT.read_text(encoding="utf-8"))
    message = " ".join(str(error).split())  # TensorFlow's has several lines
    print(f"rank {RANK} was told after {after_s:.1f} s: {message}", flush=True)


def train_torch() -> None:
    import torch

    import hvdkit.torch as hvd

    hvd.init()
    model = torch.nn.Sequential(torch.nn.Linear(8, 2000), torch.nn.Linear(2000, 2000))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3), named_parameters=model.named_parameters()
    )
    hvd.broadcast_initial_state(model, optimizer)
    try:
        for batch in batches():
            optimizer.zero_grad()
            model(torch.from_numpy(batch)).square().mean().backward()
            optimizer.step()
    except hvd.HorovodInternalError as error:
        tell(error)
        raise


def train_tensorflow(fit: bool) -> None:
    import keras
    import tensorflow as tf

    import hvdkit.tensorflow as hvd

    hvd.init()
    hvd.set_threads()
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2000), keras.layers.Dense(9)])
    optimizer = keras.optimizers.SGD(1e-3)

    @tf.function
    def step(batch: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(batch)))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    try:
        if fit:
            import hvdkit.keras

            model.compile(hvdkit.keras.DistributedOptimizer(optimizer), loss="mse")
            model.fit(((b, np.zeros((4, 9), np.float32)) for b in batches()), verbose=0)
        else:
            for batch in batches():
                step(tf.constant(batch))
    except tf.errors.OpError as error:
        tell(error)
        raise


TRAINING: dict[str, Callable[[], None]] = {
    "torch": train_torch,
    "tensorflow": lambda: train_tensorflow(fit=False),
    "keras": lambda: train_tensorflow(fit=True),
}

if __name__ == "__main__":
    TRAINING[FRAMEWORK]()
