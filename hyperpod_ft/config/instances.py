"""The hardware of a node of each instance type.

Sources: EC2's DescribeInstanceTypes (GPUs and their memory, EFA interfaces); the Neuron documentation's architecture
pages (Trainium: 190 TFLOPS in bf16 and 32 GiB for two cores; Trainium2: 667 and 96 GiB for eight); NVIDIA's data sheets
(dense bf16: A100 312, H100 and H200 989, B200 and B300 2250, A10G 70, L4 121, L40S 362).

HyperPod's API accepts no trn3 type yet. It accepts p6e-gb200.36xlarge, whose hosts have ARM processors, for which the
kit was never installed.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Instance:
    """One node. `ranks` is its number of training processes: one per logical NeuronCore or GPU."""

    name: str
    device: str  # torch's name: "cpu", "cuda", "neuron"
    ranks: int | None  # None: any number, which the run file sets
    devices: int = 0  # accelerator chips
    cores_per_rank: int = 1  # physical NeuronCores in a logical one (LNC), by default
    device_gib: int = 0  # memory of one chip, GiB
    device_tflops: float = 0.0  # of one chip, dense bf16, 1e12 operations a second
    efa: int = 0  # network interfaces
    tensor_parallel: int = 1  # default of both engines on Trainium

    @property
    def has_accelerators(self) -> bool:
        return self.device != "cpu"

    @property
    def rank_gib(self) -> float:
        """Accelerator memory of one rank, GiB."""
        return self.device_gib * self.devices / self.ranks if self.ranks else 0.0

    @property
    def rank_tflops(self) -> float:
        """Peak of one rank in dense bf16, 1e12 operations a second."""
        return self.device_tflops * self.devices / self.ranks if self.ranks else 0.0


def _trainium(name: str, chips: int, cores: int, efa: int, lnc: int = 1) -> Instance:
    """`cores`: physical cores of a chip. Tensor parallelism as in optimum-neuron's training examples."""
    gib, tflops, degree = (32, 190.0, 8) if name.startswith("trn1") else (96, 667.0, 4)
    ranks = chips * cores // lnc
    return Instance(name, "neuron", ranks, chips, lnc, gib, tflops, efa, degree)


def _gpus(name: str, gib: int, tflops: float, efa: int, count: int = 8) -> Instance:
    """`gib`: of each GPU."""
    return Instance(name, "cuda", count, count, 1, gib, tflops, efa)


# GPUs and EFA interfaces of the sizes of g5, g6 and g6e
_G_SIZES = {
    **dict.fromkeys(("xlarge", "2xlarge", "4xlarge"), (1, 0)),
    **dict.fromkeys(("8xlarge", "16xlarge"), (1, 1)),
    **{"12xlarge": (4, 1), "24xlarge": (4, 1), "48xlarge": (8, 1)},
}
_MORE_EFA = {"g6e.24xlarge": 2, "g6e.48xlarge": 4}


def _g_family(family: str, gib: int, tflops: float) -> list[Instance]:
    return [
        _gpus(name := f"{family}.{size}", gib, tflops, _MORE_EFA.get(name, efa), count)
        for size, (count, efa) in _G_SIZES.items()
    ]


CATALOGUE: dict[str, Instance] = {
    instance.name: instance
    for instance in (
        Instance("local", "cpu", None),
        _trainium("trn1.32xlarge", 16, 2, efa=8),
        _trainium("trn1n.32xlarge", 16, 2, efa=16),
        _trainium("trn2.3xlarge", 1, 8, efa=1, lnc=2),
        _trainium("trn2.48xlarge", 16, 8, efa=16, lnc=2),
        _gpus("p4d.24xlarge", 40, 312.0, efa=4),
        _gpus("p4de.24xlarge", 80, 312.0, efa=4),
        _gpus("p5.48xlarge", 80, 989.4, efa=32),
        _gpus("p5e.48xlarge", 141, 989.4, efa=32),
        _gpus("p5en.48xlarge", 141, 989.4, efa=16),
        _gpus("p5.4xlarge", 80, 989.4, efa=1, count=1),
        _gpus("p6-b200.48xlarge", 179, 2250.0, efa=8),
        _gpus("p6-b300.48xlarge", 268, 2250.0, efa=16),
        *_g_family("g5", 22, 70.0),
        *_g_family("g6", 22, 121.0),
        *_g_family("g6e", 44, 362.05),
    )
}


def names() -> list[str]:
    """The types, for an error: those of a family of GPUs are one name."""
    return sorted({f"{name.partition('.')[0]}.*" if it.device == "cuda" else name for name, it in CATALOGUE.items()})
