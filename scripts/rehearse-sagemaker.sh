#!/usr/bin/env bash
# Fine-tune a language model as SageMaker training jobs, on a stand-in for AWS on this machine. Costs nothing.
#
#   ./scripts/rehearse-sagemaker.sh
#
# Sets up .venv, starts tests/aws/server.py on the loopback interface, and submits the quickstart recipe to it, shortened:
# two hosts of one rank, which mount the same file system. Every host is a real process tree in Linux namespaces, with its
# own /opt/ml, and may do what the role of `hyperpod-ft sagemaker setup` allows. While it trains, its spot instances are
# taken away once. It contacts no real AWS endpoint and reads no credentials.
set -Eeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/setup.sh
source scripts/setup.sh
# shellcheck source=scripts/stand_in.sh
source scripts/stand_in.sh

unshare --mount --uts --pid --fork true 2>/dev/null || unshare --user --map-root-user --mount --uts --pid --fork true ||
  die "this system allows no namespaces, of which the stand-in makes containers"
setup_python torch aws dev
python=$PWD/.venv/bin/python hyperpod_ft=$PWD/.venv/bin/hyperpod-ft
start_stand_in 3
export HOME=$directory
cd "$directory"

kit() {
  say "hyperpod-ft $*"
  run "$hyperpod_ft" "$@"
}
kit sagemaker setup --file-system >setup.txt
settings=(--set "sagemaker.file_system={id: fs-0123456789abcdef0, directory: /abcdefgh/ft,
  subnets: [subnet-0123456789abcdef0], security_groups: [sg-0123456789abcdef0]}")
cat setup.txt
mkdir -p "$directory/fsx/ft"
# see tests/aws/scenario.py
run "$python" - "$endpoint/_test/scenario" "$directory/fsx" <<'END'
import json, sys, urllib.request
scenario = {
    "file_systems": {"fs-0123456789abcdef0": sys.argv[2]},
    "interruptions": {"*-train-1": [["spot", 10]]},
}
urllib.request.urlopen(sys.argv[1], json.dumps(scenario).encode())
END
while read -r key value; do
  case $key in region: | role: | output:) settings+=(--set "sagemaker.${key%:}=$value") ;; esac
done <setup.txt

kit submit quickstart --launcher sagemaker --watch "${settings[@]}" --set sagemaker.spot=true \
  --set cluster.root="$directory/fsx/ft" --set cluster.instance_type=c7i.4xlarge --set training.max_steps=20 \
  --set generate.train_samples=4 --set generate.validation_samples=2 --set parallelism.ranks_per_node=1 --set parallelism.tensor_parallel=1
say "The training jobs, as SageMaker lists them"
run "$python" - <<'END'
import boto3
sagemaker = boto3.client("sagemaker")
for job in sagemaker.list_training_jobs(SortOrder="Ascending")["TrainingJobSummaries"]:
    found = sagemaker.describe_training_job(TrainingJobName=job["TrainingJobName"])
    path = " > ".join(transition["Status"] for transition in found["SecondaryStatusTransitions"])
    print(f"{found['TrainingJobName']}: {path}")
END
say "Rehearsed: prepared, trained on two hosts, interrupted, continued and merged, all on this machine"
