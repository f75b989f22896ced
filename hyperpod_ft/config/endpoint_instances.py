"""The instance types of endpoints that can hold a language model, and their accelerators' memory.

GPUs are those of instances.py. Sources of the others: the Neuron documentation's architecture pages (Inferentia2 and
Trainium: two NeuronCores and 32 GiB a chip) and EC2's instance pages (chips). trn2 is missing: no image of section
`deploy` runs on it.
"""

from dataclasses import dataclass

from hyperpod_ft.config.instances import CATALOGUE


@dataclass(frozen=True)
class EndpointInstance:
    """An instance of an endpoint. A device is a GPU or a NeuronCore: what a rank of tensor parallelism runs on."""

    name: str
    device: str  # torch's name: "cuda", "neuron"
    devices: int
    device_gib: float  # memory of one device
    chips: int  # what SageMaker counts as accelerator devices
    nvme: bool  # has local disks, which hold model and image; others need a volume

    @property
    def is_neuron(self) -> bool:
        """Whether it has Inferentia or Trainium chips."""
        return self.device == "neuron"

    @property
    def gib(self) -> float:
        return self.devices * self.device_gib


def _neuron(name: str, chips: int, *, nvme: bool) -> EndpointInstance:
    return EndpointInstance(name, "neuron", 2 * chips, 16, chips, nvme)


ENDPOINT_INSTANCES: dict[str, EndpointInstance] = {
    instance.name: instance
    for instance in (
        *(
            EndpointInstance(name, "cuda", it.devices, it.device_gib, it.devices, True)
            for name, it in CATALOGUE.items()
            if it.device == "cuda"
        ),
        _neuron("inf2.xlarge", 1, nvme=False),
        _neuron("inf2.8xlarge", 1, nvme=False),
        _neuron("inf2.24xlarge", 6, nvme=False),
        _neuron("inf2.48xlarge", 12, nvme=False),
        _neuron("trn1.2xlarge", 1, nvme=True),
        _neuron("trn1.32xlarge", 16, nvme=True),
    )
}


def families() -> list[str]:
    return sorted({name.partition(".")[0] for name in ENDPOINT_INSTANCES})
