"""The Python environment of the stages: section `env`."""

from typing import Literal

from pydantic import Field

from hyperpod_ft.config.fields import PackageRepository, PlainPath, Section


class PythonEnvironment(Section):
    """The Python environment of the stages that use torch."""

    python: PlainPath | None = Field(
        None,
        description="Path of an existing interpreter to use, or `current` for the one that runs hyperpod-ft. If not"
        " set, the `env` stage creates a virtual environment below `cluster.root`.",
    )
    sdk: Literal["2.26.1", "2.28.0"] = Field(
        "2.26.1",
        description="Engine neuron: the version of the AWS Neuron SDK to install. optimum-neuron 0.4.5 was released"
        " with `2.26.1`; `2.28.0` is newer.",
    )
    package_repositories: tuple[PackageRepository, ...] = Field(
        (),
        description="On Trainium: where pip finds the Neuron packages and a PyTorch build without CUDA: URLs of"
        " package indexes (AWS's Neuron repository and PyTorch's index of CPU builds), or directories of wheels. If"
        " not set, pip's own configuration must name them.",
    )
