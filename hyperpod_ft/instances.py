"""What one node of each instance type offers. Sources: AWS instance pages and the Neuron documentation, 2026."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Instance:
    """One node. `ranks` is how many training processes it runs: one per logical NeuronCore or GPU."""

    name: str
    device: str  # what torch calls it: "cpu", "cuda", "neuron"
    ranks: int | None  # None: any number, the run file says

    @property
    def has_accelerators(self) -> bool:
        return self.device != "cpu"


# trn2's logical cores are counted at LNC=2, the default.
CATALOGUE: dict[str, Instance] = {
    instance.name: instance
    for instance in (
        Instance("local", "cpu", None),
        Instance("trn1.32xlarge", "neuron", 32),
        Instance("trn1n.32xlarge", "neuron", 32),
        Instance("trn2.3xlarge", "neuron", 4),
        Instance("trn2.48xlarge", "neuron", 64),
        Instance("p4d.24xlarge", "cuda", 8),
        Instance("p4de.24xlarge", "cuda", 8),
        Instance("p5.48xlarge", "cuda", 8),
        Instance("p5e.48xlarge", "cuda", 8),
        Instance("p5en.48xlarge", "cuda", 8),
    )
}
