#!/usr/bin/env bash
# Put the charting library of the report (https://github.com/leeoniya/uPlot, MIT) into templates/report/uplot/, from npm.
#
#   ./scripts/vendor-uplot.sh
#
# The only place that names its version and digest. Needs npm and openssl; the kit itself needs neither.
set -Eeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly version=1.6.32
readonly sha512=KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==

directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
npm pack --silent --pack-destination "$directory" "uplot@$version" >/dev/null
found=$(openssl dgst -sha512 -binary "$directory/uplot-$version.tgz" | base64 --wrap=0)
if [[ $found != "$sha512" ]]; then
  printf 'error: uplot@%s: its package has SHA-512 %s, expected %s\n' "$version" "$found" "$sha512" >&2
  exit 1
fi
tar -xzf "$directory/uplot-$version.tgz" -C "$directory"
install -D -m 644 -t templates/report/uplot "$directory"/package/{LICENSE,dist/uPlot.iife.min.js,dist/uPlot.min.css}
