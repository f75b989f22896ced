# shellcheck shell=bash
# Sourced by the rehearsals, in the checkout, after setup.sh: a stand-in for AWS on this machine, and no way to AWS.

start_stand_in() { # start_stand_in POLL_SECONDS: sets `directory`, a temporary one, and `endpoint`
  directory=$(mktemp -d)
  coproc server { exec "$PWD/.venv/bin/python" -m tests.aws.server; }
  trap stop_stand_in EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  read -r -t 60 endpoint <&"${server[0]}" || die "the stand-in for AWS did not start; see its error above"

  for name in "${!AWS_@}" http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY; do unset "$name"; done
  touch "$directory/empty"
  export AWS_ENDPOINT_URL=$endpoint AWS_ACCESS_KEY_ID=rehearsal AWS_SECRET_ACCESS_KEY=rehearsal \
    AWS_DEFAULT_REGION=us-west-2 AWS_EC2_METADATA_DISABLED=true HYPERPOD_FT_POLL_SECONDS=$1 \
    AWS_CONFIG_FILE="$directory/empty" AWS_SHARED_CREDENTIALS_FILE="$directory/empty"
}

stop_stand_in() { # `meanwhile`: a process that the script has started beside it
  local status=$?
  kill "${meanwhile:-}" 2>/dev/null || true
  if [[ -n "${server_PID:-}" ]]; then
    eval "exec ${server[1]}>&-" # the stand-in's standard input: it then ends its containers, and itself
    wait "$server_PID" || true
  fi
  rm -rf "$directory"
  exit "$status"
}
