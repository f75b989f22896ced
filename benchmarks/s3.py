"""Benchmarks push and pull of a tree of files against `aws s3 cp`, s5cmd and s3transfer, on one local S3 server.

python -m benchmarks.s3 push                    # 8 files of 128 MiB and 200 of 64 KiB
python -m benchmarks.s3 pull --mib 32

Writes benchmarks/results/s3.json; `python -m benchmarks.table` brings it into the documentation. Needs memory for six
trees in /dev/shm. The kit alone computes digests, and verifies them when it pulls. Exits with 1 when a goal is missed.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from benchmarks import command, rounds
from benchmarks.command import Installed, Peer
from benchmarks.goals import KIT
from benchmarks.measure import CommandError
from benchmarks.rounds import Contender
from hyperpod_ft.digests import file_xxh3, files_below, text_sha256

AWS, S5CMD, S3TRANSFER = "aws s3 cp", "s5cmd", "s3transfer"
PEERS = {
    AWS: Peer("s3", "", ("awscli",)),
    S5CMD: Peer("s3", "", ("s5cmd",)),
    S3TRANSFER: Peer("s3", "copy_with_s3transfer.py", ("s3transfer", "botocore")),
}
KIT_PACKAGES = ("hyperpod-ft", "boto3", "xxhash")
LARGE_FILES, SMALL_FILES, SMALL_BYTES = 8, 200, 64 << 10
_SOURCE = "source"  # the bucket that is pulled
# What botocore does for https by itself: no SHA-256 of a body that TLS protects. s5cmd has no such setting.
_CONFIG = "[default]\ns3 =\n    payload_signing_enabled = false\n"


def main() -> None:
    parser = command.parser("Benchmark push or pull of a tree.")
    parser.add_argument("verb", choices=("push", "pull"))
    parser.add_argument("--mib", type=int, default=128, help="size of each large file; default 128")
    options = parser.parse_args()
    installed = command.install(options.peers, PEERS, options.environments, KIT_PACKAGES)
    options.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.work) as name, _server() as url:
        directory = Path(name).resolve()
        tree = directory / "tree"
        _write_tree(tree, options.mib << 20)
        (directory / "config").write_text(_CONFIG, encoding="utf-8")
        environment = {
            "AWS_ENDPOINT_URL": url,
            "S3_ENDPOINT_URL": url,
            "AWS_CONFIG_FILE": str(directory / "config"),
            "AWS_ACCESS_KEY_ID": "benchmark",
            "AWS_SECRET_ACCESS_KEY": "benchmark",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "NO_PROXY": "127.0.0.1",
        }
        contenders = [
            _contender(name, options.verb, tree, directory / "copy", url, installed)
            for name in (KIT, *installed.pythons)
        ]
        if options.verb == "pull":
            push = _command(KIT, "push", f"s3://{_SOURCE}", tree, installed)
            subprocess.run(push, cwd=command.ROOT, env=os.environ | environment, check=True)
        log = directory / "log.txt"
        measured, failed = rounds.run(contenders, options.rounds, tree, environment, log)
        arguments = (options.verb, "--mib", str(options.mib))
        entry = {
            **command.facts(options.work, command.typed("benchmarks.s3", options, *arguments), installed),
            "tree_bytes": sum(file.stat().st_size for file in files_below(tree)),
            "large_mib": options.mib,
            "contenders": measured,
            "not_measured": installed.missing | failed,
        }
    sys.exit(0 if command.record(options.results, "s3", options.verb, entry) else 1)


def _write_tree(tree: Path, large_bytes: int) -> None:
    sizes = {f"model-{number}.safetensors": large_bytes for number in range(LARGE_FILES)}
    sizes |= {f"rows/{number:03d}.jsonl": SMALL_BYTES for number in range(SMALL_FILES)}
    for name, size in sizes.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        block = os.urandom(min(size, 1 << 20))
        with path.open("wb") as stream:
            for begin in range(0, size, len(block)):
                stream.write(block[: size - begin])


@contextlib.contextmanager
def _server() -> Iterator[str]:
    """The URL of a server that keeps its objects in memory."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as objects,
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.s3_server", objects],
            cwd=command.ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.kill()


def _contender(name: str, verb: str, tree: Path, copy: Path, url: str, installed: Installed) -> Contender:
    """One that pushes the tree to a bucket of its own, or pulls the source."""
    bucket = name.replace(" ", "-")
    if verb == "push":
        moved = _command(name, verb, f"s3://{bucket}", tree, installed)
    else:
        moved = _command(name, verb, f"s3://{_SOURCE}", copy, installed)

    def inspect() -> dict[str, Any]:
        found = _digest_of_bucket(f"{url}/{bucket}", tree) if verb == "push" else _digest(copy)
        if found != _digest(tree):
            raise CommandError("the copy differs from the tree")
        return {"digest": found}

    def prepare() -> None:
        copy.mkdir()
        urllib.request.urlopen(urllib.request.Request(f"{url}/{bucket}", method="DELETE")).close()  # noqa: S310

    return Contender(name, moved, lambda: [copy], inspect, name != KIT, prepare=prepare)


def _command(name: str, verb: str, url: str, directory: Path, installed: Installed) -> list[str]:
    if name == KIT:
        return [sys.executable, "-m", "benchmarks.s3_kit", verb, url, str(directory)]
    python = installed.pythons[name]
    if name == S3TRANSFER:
        return [str(python), str(command.ROOT / "benchmarks" / "peers" / PEERS[name].driver), verb, url, str(directory)]
    if name == S5CMD:
        places = [f"{directory}/", f"{url}/"] if verb == "push" else [f"{url}/*", f"{directory}/"]
        return [str(python.parent / "s5cmd"), "--log", "error", "cp", *places]
    places = [str(directory), url] if verb == "push" else [url, str(directory)]
    return [str(python), str(python.parent / "aws"), "s3", "cp", "--recursive", "--quiet", *places]


def _digest(directory: Path) -> str:
    names = {file.relative_to(directory).as_posix(): file for file in files_below(directory)}
    return text_sha256("\n".join(f"{name} {file_xxh3(names[name])}" for name in sorted(names)))


def _digest_of_bucket(url: str, tree: Path) -> str:
    """As `_digest`, of the objects with the names of the tree."""
    lines = []
    for name in sorted(file.relative_to(tree).as_posix() for file in files_below(tree)):
        digest = xxhash.xxh3_128()
        with urllib.request.urlopen(f"{url}/{name}") as answer:  # noqa: S310
            while block := answer.read(1 << 20):
                digest.update(block)
        lines.append(f"{name} {digest.hexdigest()}")
    return text_sha256("\n".join(lines))


if __name__ == "__main__":
    main()
