#!/usr/bin/env bash
# Fine-tune a language model as SageMaker training jobs, on a stand-in for AWS on this machine. Costs nothing.
#
#   ./scripts/rehearse-sagemaker.sh            the run on a file system that all containers mount
#   ./scripts/rehearse-sagemaker.sh --store    the run in a bucket
#
# Sets up .venv, starts tests/aws/server.py on the loopback interface, and submits the quickstart recipe to it: two hosts
# of two ranks. Every host is a real process tree in Linux namespaces, with its own /opt/ml. While it trains, its spot
# instances are taken away once. It contacts no real AWS endpoint and reads no credentials.
set -Eeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/setup.sh
source scripts/setup.sh
# shellcheck source=scripts/stand_in.sh
source scripts/stand_in.sh

[[ $# -le 1 && ${1:---store} == --store ]] || die "usage: $0 [--store]"
unshare --mount --uts --pid --fork true 2>/dev/null || unshare --user --map-root-user --mount --uts --pid --fork true ||
  die "this system allows no namespaces, of which the stand-in makes containers"
setup_python --editable '.[torch,aws]' --group dev
python=$PWD/.venv/bin/python kit=$PWD/.venv/bin/hyperpod-ft
start_stand_in 1
export HOME=$directory
tell() { # tell JSON: what the stand-in shall do, see tests/aws/scenario.py
  "$python" -c 'import sys, urllib.request as request; request.urlopen(sys.argv[1], sys.argv[2].encode())' \
    "$endpoint/_test/scenario" "$1"
}

if [[ ${1:-} == --store ]]; then
  "$python" -c 'import boto3; boto3.client("s3").create_bucket(
    Bucket="rehearsal-store", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})'
  root=$directory/client place='  store: s3://rehearsal-store/ft'
else
  root=$directory/fsx/ft
  mkdir -p "$root"
  tell "{\"file_systems\": {\"fs-0123456789abcdef0\": \"$directory/fsx\"}}"
  place='  file_system:
    id: fs-0123456789abcdef0
    directory: /abcdefgh/ft
    subnets: [subnet-0123456789abcdef0]
    security_groups: [sg-0123456789abcdef0]'
fi
"$python" - "$root" "$place" >"$directory/run.yaml" <<'END'
import sys
from pathlib import Path
recipe = Path("hyperpod_ft/recipes/quickstart.yaml").read_text()
recipe = recipe.replace("root: .quickstart ", f"root: {sys.argv[1]} ").replace("instance_type: local", "instance_type: c7i.4xlarge")
print(f"{recipe}\nsagemaker:\n  region: us-west-2\n  role: arn:aws:iam::123456789012:role/rehearsal\n  spot: true\n{sys.argv[2]}")
END
cd "$directory"

# Prints the name of the job that trains, once it has trained some steps.
training() {
  "$python" - <<'END'
import time
import boto3
sagemaker, logs = boto3.client("sagemaker"), boto3.client("logs")
while True:
    time.sleep(1)
    for job in sagemaker.list_training_jobs(NameContains="-train-")["TrainingJobSummaries"]:
        name = job["TrainingJobName"]
        found = logs.filter_log_events(logGroupName="/aws/sagemaker/TrainingJobs", logStreamNamePrefix=name)
        if any(event["message"].startswith("step 30/") for event in found["events"]):
            raise SystemExit(print(name))
END
}
say "Submitting the quickstart recipe as SageMaker training jobs"
(name=$(training) && say "Taking the spot instances of $name away" && tell "{\"interruptions\": {\"$name\": \"spot\"}}") &
meanwhile=$!
"$kit" submit run.yaml --launcher sagemaker --watch
wait "$meanwhile"
say "The training jobs, as SageMaker lists them"
"$python" - <<'END'
import boto3
sagemaker = boto3.client("sagemaker")
for job in sagemaker.list_training_jobs(SortOrder="Ascending")["TrainingJobSummaries"]:
    found = sagemaker.describe_training_job(TrainingJobName=job["TrainingJobName"])
    path = " > ".join(transition["Status"] for transition in found["SecondaryStatusTransitions"])
    print(f"{found['TrainingJobName']}: {path}")
END
say "Rehearsed: prepared, trained on two hosts, interrupted, continued and merged, all on this machine"
