"""The hardware of a node of each instance type.

Sources: AWS's instance pages; the Neuron documentation's architecture pages (Trainium: 190 TFLOPS in bf16 and 32 GiB
for two cores; Trainium2: 667 and 96 GiB for eight); NVIDIA's data sheets (dense bf16: A100 312, H100 and H200 989).
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
    tensor_parallel: int = 1  # default of engine neuron

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


def _gpus(name: str, gib: int, tflops: float, efa: int) -> Instance:
    return Instance(name, "cuda", 8, 8, 1, gib, tflops, efa)


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
    )
}
