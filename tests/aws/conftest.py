"""A server that stands in for AWS (server.py) for every test here; AWS itself cannot be reached."""

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.config import Config

from hyperpod_ft.aws.session import Session
from tests.aws.kit import NAME, ROOT, WORKERS, Kit

if TYPE_CHECKING:
    from tests.aws.account_place import Place

REGION = "us-west-2"
ZONE_ID = "usw2-az4"
_CREDENTIALS = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing"}
_LOOPBACK = ("127.", "::1", "localhost")


@functools.cache
def kit_session() -> Session:
    """The kit's session, for tests that use `aws`: shared, since making clients takes longer than many of them."""
    return Session()


@dataclass(frozen=True)
class Aws:
    """The server: its URL, clients, the environment for programs that use it, and its interface for tests."""

    endpoint: str
    environment: dict[str, str] = field(repr=False)
    region: str = REGION
    _session: boto3.Session = field(default_factory=lambda: boto3.Session(**_CREDENTIALS), repr=False)
    _clients: dict[tuple[str, str], Any] = field(default_factory=dict, repr=False)

    def client(self, service: str, region: str = REGION) -> Any:
        """A client without retries, shared by all tests."""
        if (service, region) not in self._clients:
            config = Config(retries={"mode": "standard", "total_max_attempts": 1})
            options = {"endpoint_url": self.endpoint, "region_name": region, "config": config}
            self._clients[service, region] = self._session.client(service, **options)
        return self._clients[service, region]

    def client_of_role(self, role_arn: str, service: str) -> Any:
        """A client with a role's credentials, as every process on a node can have them."""
        found = self.client("sts").assume_role(RoleArn=role_arn, RoleSessionName="node")["Credentials"]
        names = ("AccessKeyId", "SecretAccessKey", "SessionToken")
        return boto3.Session(*(found[name] for name in names), self.region).client(service, endpoint_url=self.endpoint)

    def scenario(self, **changes: Any) -> None:
        """What goes wrong and how long things take: the fields of scenario.py."""
        self._post("scenario", changes)

    def requests(self) -> list[tuple[str, str]]:
        """(service, operation) of every call since the reset that began this test."""
        return [(service, operation) for service, operation in self._post("requests", {})]

    def reset(self) -> None:
        self._post("reset", {})

    def begin(self) -> None:
        """As for another test, with the resources that are there."""
        self._post("begin", {})

    def _post(self, action: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(f"{self.endpoint}/_test/{action}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)


@pytest.fixture(scope="session")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Aws]:
    empty = tmp_path_factory.mktemp("aws") / "empty"
    empty.touch()
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "BOTO_", "MOTO_"))},
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(empty),
        "AWS_SHARED_CREDENTIALS_FILE": str(empty),
        "NO_PROXY": "127.0.0.1,localhost",
    }
    # It ends when its stdin closes, so also when this process is killed.
    with subprocess.Popen(
        [sys.executable, "-m", "tests.aws.server"],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        endpoint = process.stdout.readline().strip()
        assert endpoint, "the server that stands in for AWS did not start"
        _end_with(process)
        server = Aws(endpoint, {**environment, "AWS_ENDPOINT_URL": endpoint})
        yield server
        # it then ends its containers, and itself
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(300)
        finally:
            process.kill()


def _end_with(stand_in: "subprocess.Popen[str]") -> None:
    """When the stand-in fails, fail the test that runs, which would wait for minutes."""

    def fail(*_: object) -> None:
        pytest.fail("the server that stands in for AWS has ended; its error is below, in the captured stderr", False)

    def watch() -> None:
        assert stand_in.stdout is not None
        stand_in.stdout.read()
        if stand_in.wait():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR2)

    signal.signal(signal.SIGUSR2, fail)
    threading.Thread(target=watch, daemon=True).start()


@pytest.fixture
def aws(_server: Aws, monkeypatch: pytest.MonkeyPatch) -> Aws:
    """The stand-in, empty, with this process's environment pointing at it."""
    _server.reset()
    for name in [name for name in os.environ if name.startswith(("AWS_", "BOTO_"))]:
        monkeypatch.delenv(name)
    for name, value in _server.environment.items():
        if name.startswith(("AWS_", "NO_PROXY")):
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("HYPERPOD_FT_POLL_SECONDS", "0.02")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    return _server


@pytest.fixture
def place(aws: Aws) -> "Place":
    """An account with valid resources that a cluster file may name under `existing`."""
    from tests.aws.account_place import make_place

    return make_place(aws)


@pytest.fixture
def kit(tmp_path: Path, aws: Aws) -> Kit:
    kit = Kit(tmp_path, aws)
    kit.configure()
    return kit


@pytest.fixture
def running(tmp_path: Path, _server: Aws) -> Kit:
    """A running cluster with three workers. Tests share it: it is created only if the one before has left another."""
    kit = Kit(tmp_path, _server)
    kit.configure(workers=[{"name": WORKERS, "instance_type": "ml.trn1.32xlarge", "count": 3, "partition": "trn1"}])
    kit.aws.begin()
    if not _is_as_created(kit.aws):
        kit.aws.reset()
        kit.run("create")
    return kit


def _is_as_created(aws: Aws) -> bool:
    client = aws.client("sagemaker")
    try:
        cluster = client.describe_cluster(ClusterName=NAME)
    except client.exceptions.ResourceNotFound:
        return False
    nodes = client.list_cluster_nodes(ClusterName=NAME)["ClusterNodeSummaries"]
    extensions = client.list_cluster_extensions(ClusterArn=cluster["ClusterArn"])["Extensions"]
    counts = sorted((group["TargetCount"], group["CurrentCount"]) for group in cluster["InstanceGroups"])
    states = {node["InstanceStatus"]["Status"] for node in nodes}
    complete = (cluster["ClusterStatus"], counts, states) == ("InService", [(1, 1), (3, 3)], {"Running"})
    return complete and not extensions


@pytest.fixture(autouse=True)
def _loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reaches AWS: a connection to anywhere but this machine fails, in this process."""
    connect, connect_ex = socket.socket.connect, socket.socket.connect_ex

    def check(where: Any) -> None:
        if isinstance(where, tuple) and not str(where[0]).startswith(_LOOPBACK):
            raise AssertionError(f"a test tried to connect to {where[0]}")

    def only_loopback(self: socket.socket, where: Any) -> None:
        check(where)
        connect(self, where)

    def only_loopback_ex(self: socket.socket, where: Any) -> int:
        check(where)
        return connect_ex(self, where)

    monkeypatch.setattr(socket.socket, "connect", only_loopback)
    monkeypatch.setattr(socket.socket, "connect_ex", only_loopback_ex)


@pytest.fixture
def client(aws: Aws) -> Any:
    """The kit's client for S3, and a bucket named `bucket`."""
    found = Session().client("s3")
    found.create_bucket(Bucket="bucket", CreateBucketConfiguration={"LocationConstraint": aws.region})
    return found
