"""A Neuron runtime made of CPU processes: lets optimum-neuron and neuronx-distributed train where no NeuronCore is.

Three things are replaced, and nothing else: the packages that only a Neuron node has (packages.py), XLA's device
(device.py), and collectives between ranks (collectives.py). scripts/test-neuron.sh makes an environment whose every
rank starts with `install`. What is not stood in for: the compiler, lazy execution, NKI kernels, stochastic rounding.
"""

import os


def install() -> None:
    """Stand in for the runtime in this process. Comes before any import of optimum-neuron or neuronx-distributed."""
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    os.environ.setdefault("NXD_CPU_MODE", "1")  # neuronx-distributed: process groups are gloo's
    # torch_xla looks for libneuronxla when it is imported, so it comes before the package that stands for that one
    import torch_xla  # noqa: F401

    from neuron_runtime import collectives, device, packages

    packages.install()
    device.install()
    collectives.install()
