"""Whether nodes run programs in the run's container: Slurm's daemon there may ignore what srun here has accepted."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from hyperpod_ft.doctor.check import Expectations
from hyperpod_ft.findings import Finding, error, ok
from hyperpod_ft.launch import container
from hyperpod_ft.launch.slurm.site import PYXIS, SlurmNode
from hyperpod_ft.runs.run_paths import image_file

_WHERE = ["/bin/sh", "-c", f'test -e {container.ONLY_INSIDE} && echo inside || echo "outside $SLURMD_NODENAME"']


def on_nodes(expected: Expectations, nodes: Sequence[SlurmNode], directory: Path) -> Iterator[Finding]:
    """A finding of these nodes of one partition; `directory`: one on the shared volume.

    Until stage env has fetched the image, a missing one is named to one node: Pyxis refuses it.
    """
    image = image_file(expected.root, expected.container)
    fetched = image is not None and image.exists()
    asked = nodes if fetched else nodes[:1]
    options = [
        f"--container-image={image if fetched else directory / 'missing.sqsh'}",
        f"--container-mounts={directory}:{container.ONLY_INSIDE}",
        *container.CLOSED,
        "--export=ALL,NVIDIA_VISIBLE_DEVICES=void",  # a node without NVIDIA's drivers would refuse many images
    ]
    output, messages = expected.site.on_nodes(asked, _WHERE, options)
    lines = output.splitlines()
    names = sorted(line.split()[1] for line in lines if line.startswith("outside "))
    where = f"partition {nodes[0].partition}"
    if names:
        yield error("container", f"srun's --container-image is ignored on {', '.join(names)}", PYXIS)
    elif fetched and lines.count("inside") < len(asked):
        yield error("container", f"{where}: {container.telling(messages)}", "see docs/install.md#containers")
    elif not fetched and "pyxis" not in messages:
        yield error(
            "container", f"{where}: Pyxis does not refuse a missing image: {container.telling(messages)}", PYXIS
        )
    else:
        yield ok("container", f"{where}: " + ("runs programs in it" if fetched else "Pyxis answers; no image yet"))
