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

[[ $# -le 1 && ${1:---store} == --store ]] || die "usage: $0 [--store]"
unshare --mount --uts --pid --fork true 2>/dev/null || unshare --user --map-root-user --mount --uts --pid --fork true ||
  die "this system allows no namespaces, of which the stand-in makes containers"
setup_python --editable '.[torch,aws]' --group dev
python=$PWD/.venv/bin/python kit=$PWD/.venv/bin/hyperpod-ft
directory=$(mktemp -d)
coproc server { exec "$python" -m tests.aws.server; }
tell() { # tell JSON: what the stand-in shall do, see tests/aws/scenario.py
  "$python" -c 'import sys, urllib.request as request; request.urlopen(sys.argv[1], sys.argv[2].encode())' \
    "$endpoint/_test/scenario" "$1"
}
stop() {
  local status=$?
  kill "${interruption:-}" 2>/dev/null || true
  if [[ -n "${server_PID:-}" ]]; then
    eval "exec ${server[1]}>&-" # the stand-in's standard input: it then ends its containers, and itself
    wait "$server_PID" || true
  fi
  rm -rf "$directory"
  exit "$status"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
read -r -t 60 endpoint <&"${server[0]}" || die "the stand-in for AWS did not start; see its error above"

for name in "${!AWS_@}" http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY; do unset "$name"; done
touch "$directory/empty"
export AWS_ENDPOINT_URL=$endpoint AWS_ACCESS_KEY_ID=rehearsal AWS_SECRET_ACCESS_KEY=rehearsal AWS_DEFAULT_REGION=us-west-2 \
  AWS_CONFIG_FILE="$directory/empty" AWS_SHARED_CREDENTIALS_FILE="$directory/empty" AWS_EC2_METADATA_DISABLED=true \
  HYPERPOD_FT_POLL_SECONDS=1 HOME="$directory"

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
interruption=$!
"$kit" submit run.yaml --launcher sagemaker --watch
wait "$interruption"
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
