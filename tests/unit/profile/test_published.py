"""The scaling model against what Horovod's authors measured on 16 and on 512 GPUs.

Facts, the same for all three models unless they are facts about one:

* Efficiency on 128 hosts of 4 Pascal GPUs with 25 Gbit/s RoCE: 90 % for Inception V3 and
  ResNet-101, 68 % for VGG-16. Source: A. Sergeev, M. Del Balso, "Horovod: fast and easy
  distributed deep learning in TensorFlow", arXiv:1802.05799 (2018); Horovod's docs/benchmarks.rst.
* Images/s with tf_cnn_benchmarks and a batch of 64 on one GPU, and on 16 on 4 such hosts (RDMA,
  NCCL). Source: the table in Horovod's README of September 2017, replaced by the chart of the
  above in pull request 44.
* Parameters. Source: the table of Keras Applications. Gradients were float32.
* What travels together: 64 MiB. Source: Horovod's HOROVOD_FUSION_THRESHOLD at that time.
* RoCE puts 82 bytes of headers and gaps (Ethernet 38, IP 20, UDP 8, InfiniBand 16) around the
  1,024 bytes that fit into an Ethernet frame of 1,500.
* Latency of a ring's hop, 14 us between and 5.7 us within hosts, and 12 GB/s of PCI Express 3.0.
  Source: NVIDIA's NCCL, src/graph/tuning.cc (ring, Simple) and topo.h.

Assumptions: gradients become ready evenly over the backward pass (VGG-16's do not), and all of the
communication but the last bucket's can be hidden behind it, as transfers of GPUs take nothing from
the computation. One number is fitted, for all three models together: how far the steps of workers
scatter, to the throughput on 16 GPUs. What is said of 512 GPUs is a prediction.
"""

from dataclasses import dataclass

import pytest

from hvdkit.profile.allreduce_cost import Link
from hvdkit.profile.scaling import ScalingModel, predict_point

BATCH = 64


@dataclass(frozen=True)
class Published:
    """Of one model: parameters, images/s on 1 and 16 GPUs, efficiency on 512."""

    parameters: float
    alone_per_s: float
    sixteen_per_s: float
    efficiency_512: float

    @property
    def efficiency_16(self):
        return self.sixteen_per_s / 16 / self.alone_per_s

    def predict(self, straggler, workers):
        """Return the prediction for so many GPUs."""
        return predict_point(
            ScalingModel(
                per_sample_s=1 / self.alone_per_s,
                batch=BATCH,
                gradient_bytes=4 * self.parameters,
                bucket_bytes=64 << 20,
                within=Link(5.7e-6, 12e9),
                between=Link(14e-6, 25e9 / 8 * 1024 / (1024 + 82)),
                workers_per_host=4,
                slots_per_host=4,
                straggler=straggler,
            ),
            workers,
        )


MODELS = {
    "Inception V3": Published(23.9e6, 134.4, 2022.6, 0.90),
    "ResNet-101": Published(44.7e6, 119.4, 1746.2, 0.90),
    "VGG-16": Published(138.4e6, 130.9, 1787.4, 0.68),
}


def measure_error(straggler):
    """Return the sum of squared errors on 16 GPUs."""
    return sum(
        (one.predict(straggler, 16).scaling_efficiency - one.efficiency_16) ** 2
        for one in MODELS.values()
    )


# In steps of a tenth of a percent.
STRAGGLER = min((share / 1000 for share in range(51)), key=measure_error)


def test_workers_scatter_as_little_as_dedicated_machines_do():
    assert 0.001 <= STRAGGLER <= 0.02


@pytest.mark.parametrize("name", MODELS)
def test_sixteen_gpus(name):
    one = MODELS[name]
    predicted = one.predict(STRAGGLER, 16).scaling_efficiency
    assert predicted == pytest.approx(one.efficiency_16, abs=0.02)


@pytest.mark.parametrize(
    ("name", "tolerance"), [("Inception V3", 0.015), ("ResNet-101", 0.015), ("VGG-16", 0.06)]
)
def test_512_gpus(name, tolerance):
    one = MODELS[name]
    predicted = one.predict(STRAGGLER, 512).scaling_efficiency
    assert predicted == pytest.approx(one.efficiency_512, abs=tolerance)


def test_the_network_binds_the_model_with_most_parameters_only():
    binds = {name: one.predict(STRAGGLER, 512).binds for name, one in MODELS.items()}
    assert binds["VGG-16"] == "bandwidth between hosts"
    assert binds["Inception V3"] == binds["ResNet-101"] == "computing"
