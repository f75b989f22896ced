"""The containers of a SageMaker training job: for each host a process tree of its own, in Linux namespaces.

What a container finds is what SageMaker documents: /opt/ml with its configuration, channels and hyperparameters, the
names of the hosts in /etc/hosts, nothing else of this machine that can be written. Its host name resolves to nothing,
as SageMaker warns. Every host has an address of its own on the loopback interface.
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyperpod_ft.processes import children
from tests.aws.role_access import credentials_path, types_of

if TYPE_CHECKING:
    from tests.aws.training_jobs import TrainingJob

_SCRIPT = Path(__file__).with_name("container.sh")
_CHECKOUT = Path(__file__).resolve().parents[2]


class Container:
    """One host's container of one start of a job."""

    def __init__(self, job: "TrainingJob", number: int, hosts: dict[str, str], directory: Path) -> None:
        """`hosts`: addresses by name, of all. `directory`: this host's disk, new."""
        self.name = f"algo-{number}"
        self.directory = directory
        self._log_at = 0
        for part in ("ml/input/config", "ml/input/data", "ml/model", "ml/output/data", "tmp"):
            (directory / part).mkdir(parents=True)
        (directory / "tmp").chmod(0o1777)
        names = "".join(f"{address} {name}\n" for name, address in hosts.items())
        (directory / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        self._configure(job, list(hosts))
        mounts = self._mount_channels(job)
        (directory / "mounts").write_text("".join("\t".join(map(str, mount)) + "\n" for mount in mounts))
        algorithm = job.request["AlgorithmSpecification"]
        # without an entry point, SageMaker runs the image with the argument `train`
        command = algorithm.get("ContainerEntrypoint") or ["train"]
        self.log = directory / "log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *("bash", str(_SCRIPT), str(directory), f"ip-10-0-{secrets.randbelow(250)}-{number}"),
                    *("env", "-i", *(f"{name}={value}" for name, value in self._environment(job).items())),
                    *(*command, *algorithm.get("ContainerArguments", [])),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _environment(self, job: "TrainingJob") -> dict[str, str]:
        # the image: this interpreter is its python3
        path = os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin"])
        return {
            "PATH": path,
            "HOME": "/tmp",
            "LANG": "C.UTF-8",
            # of the execution role; SageMaker has a RELATIVE_URI here, for which it has an address in the container
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": job.region.world.endpoint + credentials_path(job.name),
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_ENDPOINT_URL": job.region.world.endpoint,
            "NO_PROXY": "127.0.0.1,localhost",
            **job.request.get("Environment", {}),
            "TRAINING_JOB_NAME": job.name,
            "TRAINING_JOB_ARN": job.arn,
        }

    def _configure(self, job: "TrainingJob", hosts: list[str]) -> None:
        resources, channels = job.request["ResourceConfig"], job.request.get("InputDataConfig", [])
        (kind,) = types_of(resources)
        files: dict[str, Any] = {
            "resourceconfig": {
                "current_host": self.name,
                "current_instance_type": kind,
                "current_group_name": "homogeneousCluster",
                "hosts": sorted(hosts),  # as text, as AWS does
                "instance_groups": [
                    {
                        "instance_group_name": "homogeneousCluster",
                        "instance_type": kind,
                        "hosts": sorted(hosts),
                    }
                ],
                "network_interface_name": "lo",
            },
            "hyperparameters": job.request.get("HyperParameters", {}),
            "inputdataconfig": {
                channel["ChannelName"]: {
                    "TrainingInputMode": channel.get("InputMode", "File"),
                    "S3DistributionType": "FullyReplicated",
                    "RecordWrapperType": "None",
                }
                for channel in channels
            },
        }
        for name, content in files.items():
            (self.directory / "ml/input/config" / f"{name}.json").write_text(json.dumps(content))

    def _mount_channels(self, job: "TrainingJob") -> list[tuple[Path, str, str]]:
        """Put files of S3 in place; returns the file systems to mount: source, target, mode."""
        # the image has this checkout and its interpreter, also where they are in /tmp, of which a container has its own
        image = dict.fromkeys((str(_CHECKOUT), sys.prefix))
        mounts = [(Path(path), path, "ro") for path in image if path.startswith("/tmp/")]
        for channel in job.request.get("InputDataConfig", []):
            name = channel["ChannelName"]
            place = self.directory / "ml/input/data" / name
            if source := channel["DataSource"].get("FileSystemDataSource"):
                place.mkdir()
                mode = source.get("FileSystemAccessMode", "ro")
                mounts.append((job.directory_of(source), f"/opt/ml/input/data/{name}", mode))
            else:
                shutil.copytree(job.downloads / name, place)
        return mounts

    def new_lines(self) -> list[str]:
        """What it has printed since the last call: whole lines, and at its end the rest."""
        with self.log.open("rb") as log:
            log.seek(self._log_at)
            text = log.read()
        if self.process.poll() is None:
            text = text[: text.rfind(b"\n") + 1]
        self._log_at += len(text)
        return text.decode(errors="replace").splitlines()

    @property
    def failure(self) -> str:
        """What it left in the failure file."""
        with suppress(OSError):
            return (self.directory / "ml/output/failure").read_text(errors="replace")[:1024]
        return ""

    def signal(self, number: signal.Signals) -> bool:
        """Signal its PID 1; False if that has not started yet."""
        inits = [init for unshare in children(self.process.pid) for init in children(unshare)]
        for init in inits:
            with suppress(ProcessLookupError):
                os.kill(init, number)
        return bool(inits)

    def kill(self) -> None:
        """End it and everything in it."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def remove(self) -> None:
        """End it, and remove its disk."""
        self.kill()
        self.process.wait(300)
        shutil.rmtree(self.directory, ignore_errors=True)
