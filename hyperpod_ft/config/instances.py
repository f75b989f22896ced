"""The hardware of a node of each instance type, and of the instances that endpoints may have.

Sources: EC2's DescribeInstanceTypes (GPUs and their memory, EFA interfaces); the Neuron documentation's architecture
pages (Trainium: 190 TFLOPS in bf16 and 32 GiB for two cores; Trainium2: 667 and 96 GiB for eight); NVIDIA's data sheets
(dense bf16: A100 312, H100 and H200 989, B200 and B300 2250, A10G 70, L4 121, L40S 362). Links: NVIDIA's data sheets
(NVLink: A100 600 GB/s, H100 and H200 900, B200 and B300 1,800; A10G, L4 and L40S on PCIe Gen4: 64) and the Neuron
documentation (NeuronLink-v3: 1.28 TB/s a chip) count both directions. AWS's instance pages give a node's network: P4d
400 Gbit/s, P5 3,200, P6-B200 3,200, P6-B300 6,400, trn2.3xlarge 200, trn2.48xlarge 3,200, trn1 800 and trn1n 1,600; for
G5, G6 and G6e it is EC2's, the baseline.

Types without accelerators are for rehearsals and small models; their network is EC2's too. Only training jobs have C7i.

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
    network_gbit: float = 0  # of the node, 1e9 bits a second in each direction
    device_link_gbs: float = 0.0  # of one chip to the others of its node, 1e9 bytes a second in each direction
    tensor_parallel: int = 1  # default of both engines on Trainium

    @property
    def has_accelerators(self) -> bool:
        return self.device != "cpu"

    @property
    def nvme(self) -> bool:
        """Whether SageMaker gives it its local disks and no volume; EC2's pages list them for all but inf2."""
        return self.has_accelerators and not self.name.startswith("inf2.")

    @property
    def is_neuron(self) -> bool:
        """Whether it has Trainium or Inferentia chips."""
        return self.device == "neuron"

    @property
    def rank_gib(self) -> float:
        """Accelerator memory of one rank, GiB."""
        return self.device_gib * self.devices / self.ranks if self.ranks else 0.0

    @property
    def rank_link_gbs(self) -> float:
        """Bandwidth of one rank to others of its node, 1e9 bytes a second in each direction."""
        return self.device_link_gbs * self.devices / self.ranks if self.ranks else 0.0

    @property
    def rank_network_gbs(self) -> float:
        """One rank's part of the node's network, 1e9 bytes a second in each direction."""
        return self.network_gbit / 8 / self.ranks if self.ranks else 0.0

    @property
    def rank_tflops(self) -> float:
        """Peak of one rank in dense bf16, 1e12 operations a second."""
        return self.device_tflops * self.devices / self.ranks if self.ranks else 0.0


def _trainium(name: str, chips: int, cores: int, efa: int, network: int, lnc: int = 1) -> Instance:
    """`cores`: physical cores of a chip. Tensor parallelism as in optimum-neuron's training examples."""
    # the documentation gives no bandwidth for NeuronLink-v2
    gib, tflops, link, degree = (32, 190.0, 0.0, 8) if name.startswith("trn1") else (96, 667.0, 640.0, 4)
    ranks = chips * cores // lnc
    return Instance(name, "neuron", ranks, chips, lnc, gib, tflops, efa, network, link, degree)


def _gpus(name: str, gib: int, tflops: float, efa: int, network: float, link: float, count: int = 8) -> Instance:
    """`gib`: of each GPU."""
    return Instance(name, "cuda", count, count, 1, gib, tflops, efa, network, link if count > 1 else 0.0)


# GPUs of the sizes of g5, g6 and g6e; of each family EFA interfaces and network
_G_GPUS = {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8}  # others have one
_G5_NETWORK = {
    **{"xlarge": (0, 2.5), "2xlarge": (0, 5), "4xlarge": (0, 10), "8xlarge": (1, 25), "16xlarge": (1, 25)},
    **{"12xlarge": (1, 40), "24xlarge": (1, 50), "48xlarge": (1, 100)},
}
_G6E_NETWORK = {
    **{"xlarge": (0, 2.5), "2xlarge": (0, 5), "4xlarge": (0, 20), "8xlarge": (1, 25), "16xlarge": (1, 35)},
    **{"12xlarge": (1, 100), "24xlarge": (2, 200), "48xlarge": (4, 400)},
}


def _g_family(family: str, gib: int, tflops: float, networks: dict[str, tuple[int, float]]) -> list[Instance]:
    return [
        _gpus(f"{family}.{size}", gib, tflops, efa, network, 32, _G_GPUS.get(size, 1))
        for size, (efa, network) in networks.items()
    ]


# instances without accelerators: network of each size
_I_SIZES = {
    **{"xlarge": 1.562, "2xlarge": 3.125, "4xlarge": 6.25, "8xlarge": 12.5, "12xlarge": 18.75},
    **{"16xlarge": 25, "24xlarge": 37.5, "48xlarge": 50},
}
_CPU_NETWORK = {
    "c5": {"xlarge": 1.25, "2xlarge": 2.5, "4xlarge": 5, "9xlarge": 12, "18xlarge": 25},
    "m5": {"xlarge": 1.25, "2xlarge": 2.5, "4xlarge": 5, "12xlarge": 12, "24xlarge": 25},
    "c7i": _I_SIZES,
    "m7i": _I_SIZES,
}


def _cpus() -> list[Instance]:
    return [
        Instance(f"{family}.{size}", "cpu", None, efa=int(size == "48xlarge"), network_gbit=network)
        for family, networks in _CPU_NETWORK.items()
        for size, network in networks.items()
    ]


CATALOGUE: dict[str, Instance] = {
    instance.name: instance
    for instance in (
        Instance("local", "cpu", None),
        *_cpus(),
        _trainium("trn1.32xlarge", 16, 2, efa=8, network=800),
        _trainium("trn1n.32xlarge", 16, 2, efa=16, network=1600),
        _trainium("trn2.3xlarge", 1, 8, efa=1, network=200, lnc=2),
        _trainium("trn2.48xlarge", 16, 8, efa=16, network=3200, lnc=2),
        _gpus("p4d.24xlarge", 40, 312.0, efa=4, network=400, link=300),
        _gpus("p4de.24xlarge", 80, 312.0, efa=4, network=400, link=300),
        _gpus("p5.48xlarge", 80, 989.4, efa=32, network=3200, link=450),
        _gpus("p5.4xlarge", 80, 989.4, efa=1, network=100, link=450, count=1),
        _gpus("p5e.48xlarge", 141, 989.4, efa=32, network=3200, link=450),
        _gpus("p5en.48xlarge", 141, 989.4, efa=16, network=3200, link=450),
        _gpus("p6-b200.48xlarge", 179, 2250.0, efa=8, network=3200, link=900),
        _gpus("p6-b300.48xlarge", 268, 2250.0, efa=16, network=6400, link=900),
        *_g_family("g5", 22, 70.0, _G5_NETWORK),
        *_g_family("g6", 22, 121.0, _G5_NETWORK),
        *_g_family("g6e", 44, 362.05, _G6E_NETWORK),
    )
}


def alternatives(name: str) -> str:
    """What an error about an unknown type says: the types of its family, or which families there are."""
    families = sorted({known.partition(".")[0] for known in CATALOGUE})
    if (family := name.partition(".")[0]) in families:
        return f"known: {', '.join(known for known in CATALOGUE if known.partition('.')[0] == family)}"
    return f"give it with its size, as in p5.48xlarge; families: {', '.join(families)}"


_INF2_CHIPS = {"xlarge": 1, "8xlarge": 1, "24xlarge": 6, "48xlarge": 12}


def _for_endpoints(name: str, chips: int) -> Instance:
    """With two cores of 16 GiB on a chip, as Inferentia2 and Trainium have."""
    return Instance(name, "neuron", 2 * chips, chips, device_gib=32)


# instances that endpoints may have; a rank is one of tensor parallelism
ENDPOINT_INSTANCES: dict[str, Instance] = {
    **{name: instance for name, instance in CATALOGUE.items() if instance.device == "cuda"},
    **{f"inf2.{size}": _for_endpoints(f"inf2.{size}", chips) for size, chips in _INF2_CHIPS.items()},
    "trn1.2xlarge": _for_endpoints("trn1.2xlarge", 1),
    "trn1.32xlarge": CATALOGUE["trn1.32xlarge"],
}


def endpoint_families() -> list[str]:
    return sorted({name.partition(".")[0] for name in ENDPOINT_INSTANCES})
