#!/usr/bin/env bash
# Deploy a finished run to an endpoint on a stand-in for AWS on this machine, ask it, and delete it. Costs nothing.
#
#   ./scripts/rehearse-endpoint.sh [RUN]     a run directory; without one, the quickstart's (./scripts/quickstart.sh)
#
# Starts tests/aws/server.py on the loopback interface; its endpoint runs the kit's own server with the run's model. It
# contacts no real AWS endpoint and reads no credentials.
set -Eeuo pipefail
run=${1:+$(realpath "$1")}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/setup.sh
source scripts/setup.sh
# shellcheck source=scripts/stand_in.sh
source scripts/stand_in.sh

if [[ -z $run ]]; then
  run=$(find "$PWD/.quickstart/runs/quickstart" -mindepth 1 -maxdepth 1 -type d 2>/dev/null | head -n 1)
  [[ $run ]] || die "no run to deploy: run ./scripts/quickstart.sh first, or give a run directory"
fi
setup_python torch aws dev
start_stand_in 1
run .venv/bin/python - <<'PYTHON'
import json

import boto3

may_assume = {"Effect": "Allow", "Action": "sts:AssumeRole", "Principal": {"Service": "sagemaker.amazonaws.com"}}
trust = json.dumps({"Version": "2012-10-17", "Statement": [may_assume]})
boto3.client("iam").create_role(RoleName="endpoint", AssumeRolePolicyDocument=trust)
where = {"LocationConstraint": "us-west-2"}
boto3.client("s3").create_bucket(Bucket="rehearsal", CreateBucketConfiguration=where)
PYTHON

kit() {
  say "hyperpod-ft deploy $*"
  run .venv/bin/hyperpod-ft deploy "$@"
}
settings=(--set deploy.instance_type=g6.xlarge --set deploy.store=s3://rehearsal
  --set deploy.role=arn:aws:iam::123456789012:role/endpoint)

kit "$run" --dry-run "${settings[@]}"
kit "$run" "${settings[@]}"
kit list
kit ask "$run" "Run it on four nodes for two hours and mail me at the end"
kit logs "$run"
kit delete "$run" --yes
say "Rehearsed: deployed, compared with samples.json, asked and deleted, all on this machine"
