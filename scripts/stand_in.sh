# shellcheck shell=bash
# Sourced by the rehearsals, in the checkout, after setup.sh: a stand-in for AWS on this machine, and no way to AWS.

start_stand_in() { # start_stand_in POLL_SECONDS: sets `directory`, a temporary one, and `endpoint`
  directory=$(mktemp -d)
  trap stop_stand_in EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  export TMPDIR=$directory
  coproc server { exec "$PWD/.venv/bin/python" -m tests.aws.server; }
  stand_in=$server_PID
  read -r -t 300 endpoint <&"${server[0]}" || die "the stand-in for AWS did not start; see its error above"

  for name in "${!AWS_@}" http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY; do unset "$name"; done
  touch "$directory/empty"
  export AWS_ENDPOINT_URL=$endpoint AWS_ACCESS_KEY_ID=rehearsal AWS_SECRET_ACCESS_KEY=rehearsal \
    AWS_DEFAULT_REGION=us-west-2 AWS_EC2_METADATA_DISABLED=true HYPERPOD_FT_POLL_SECONDS=$1 \
    AWS_CONFIG_FILE="$directory/empty" AWS_SHARED_CREDENTIALS_FILE="$directory/empty"
}

# run COMMAND...: until it ends, or the stand-in does, without which it would wait for AWS for minutes. A signal to the
# script ends it too: bash handles none while it waits for a command in the foreground.
run() {
  local status=0
  watching=
  "$@" <&0 &
  running=$!
  # not `wait -n`, which waits for the other when one has ended before
  { while kill -0 "$stand_in"; do sleep 0.5; done; kill "$running"; } &>/dev/null &
  watching=$!
  wait "$running" || status=$?
  kill "$watching" 2>/dev/null || true
  wait "$watching" 2>/dev/null || true
  running=
  kill -0 "$stand_in" 2>/dev/null || die "the stand-in for AWS has ended; see its error above"
  return "$status"
}

stop_stand_in() {
  local status=$?
  trap '' INT TERM
  if [[ ${running:-} ]]; then
    kill ${watching:+"$watching"} "$running" 2>/dev/null || true
    wait "$running" || true
  fi
  if [[ ${server_PID:-} ]]; then
    eval "exec ${server[1]}>&-" # the stand-in's standard input: it then ends its containers, and itself
    wait "$stand_in" || true
  fi
  # a stand-in that has failed leaves containers, which end with it, to the kernel
  for _ in {1..600}; do
    if rm -rf "$directory" 2>/dev/null; then break; fi
    sleep 0.1
  done
  exit "$status"
}
