"""What one node of each instance type offers. Sources: AWS instance pages and the Neuron documentation, 2026."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Instance:
    """One node. `ranks` is how many training processes it runs: one per logical NeuronCore or GPU."""

    name: str
    device: str  # what torch calls it: "cpu", "cuda", "neuron"
    ranks: int | None  # None: any number, the run file says
    device_memory_gib: float | None  # per rank
    vcpus: int | None
    memory_gib: int | None
    efa: int = 0

    @property
    def has_accelerators(self) -> bool:
        return self.device != "cpu"


# trn2's logical cores are counted at LNC=2, the default.
CATALOGUE: dict[str, Instance] = {
    instance.name: instance
    for instance in (
        Instance("local", "cpu", None, None, None, None),
        Instance("trn1.32xlarge", "neuron", 32, 16, 128, 512, efa=8),
        Instance("trn1n.32xlarge", "neuron", 32, 16, 128, 512, efa=16),
        Instance("trn2.3xlarge", "neuron", 4, 24, 12, 128, efa=1),
        Instance("trn2.48xlarge", "neuron", 64, 24, 192, 2048, efa=16),
        Instance("p4d.24xlarge", "cuda", 8, 40, 96, 1152, efa=4),
        Instance("p4de.24xlarge", "cuda", 8, 80, 96, 1152, efa=4),
        Instance("p5.48xlarge", "cuda", 8, 80, 192, 2048, efa=32),
        Instance("p5e.48xlarge", "cuda", 8, 141, 192, 2048, efa=32),
        Instance("p5en.48xlarge", "cuda", 8, 141, 192, 2048, efa=16),
    )
}
