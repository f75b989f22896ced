#!/usr/bin/env bash
# ssh to a node of a HyperPod cluster, for machines with only the AWS CLI and its session-manager-plugin.
#
#   easy-ssh.sh [options] CLUSTER [-- COMMAND...]
#     -g GROUP        instance group (exact name); default: login-group, or else controller-machine
#     -n INSTANCE     node, by instance id
#     -u USER         default: ubuntu
#     -k KEY          private or public key; default: the first of ~/.ssh/id_ed25519, id_ecdsa, id_rsa
#     -r REGION, -p PROFILE   as the AWS CLI's
#     -L PORT:HOST:PORT       forward a port, as ssh's; may be repeated
#     --dry-run       print target and command, without connecting
#
# `hyperpod-ft cluster ssh` is the same with more checks. Needs OpenSSH 7.6, bash 3.2.
set -euo pipefail

die() { printf 'easy-ssh: %s\n' "$*" >&2; exit 2; }

user=ubuntu group='' node='' key='' dry='' cluster=''
aws=() forwards=()
while (($#)); do
  case $1 in
    -[gnukrpL]) (($# > 1)) || die "$1 needs a value; see the top of $0" ;;
  esac
  case $1 in
    -g) group=$2; shift ;;
    -n) node=$2; shift ;;
    -u) user=$2; shift ;;
    -k) key=$2; shift ;;
    -r) aws+=(--region "$2"); shift ;;
    -p) aws+=(--profile "$2"); shift ;;
    -L) forwards+=(-L "$2"); shift ;;
    --dry-run) dry=1 ;;
    --) shift; break ;;
    -h | --help) sed -nE '2,/^set/s/^# ?//p' "$0"; exit ;;
    -*) die "unknown option $1; see the top of $0" ;;
    *) [[ -z $cluster ]] || die "more than one cluster: $cluster, $1; pass one"; cluster=$1 ;;
  esac
  shift
done
[[ $cluster =~ ^[A-Za-z0-9][A-Za-z0-9-]*$ ]] || die "no cluster; pass its name: $0 CLUSTER"
[[ $user =~ ^[a-z_][a-z0-9_-]*$ ]] || die "-u $user: not a Linux user name; pass the login name of the node's user"
docs=https://docs.aws.amazon.com
command -v aws >/dev/null || die "the AWS CLI is not installed; install it: $docs/cli/latest/userguide/getting-started-install.html"
command -v session-manager-plugin >/dev/null || die "AWS's session-manager-plugin is not installed; install it:" \
  "$docs/systems-manager/latest/userguide/session-manager-working-with-install-plugin.html"

if [[ -z $key ]]; then
  for key in ~/.ssh/id_ed25519 ~/.ssh/id_ecdsa ~/.ssh/id_rsa ''; do [[ -f $key.pub ]] && break; done
  [[ -n $key ]] || die "no public key in ~/.ssh; make one with: ssh-keygen -t ed25519"
fi
key=${key%.pub}
[[ $key == /* ]] || key=$PWD/$key
public=$(cat -- "$key.pub") || die "$key.pub: cannot read the public key; make it with: ssh-keygen -y -f $key"
[[ $public != *$'\n'* && $public =~ ^(sk-)?(ssh|ecdsa)-[a-z0-9@.-]+\ [A-Za-z0-9+/]+=*(\ .*)?$ ]] || die "$key.pub: must be one line with an ssh public key; pass another key with -k"
[[ $HOME$key != *[\"\\]* ]] || die "ssh's configuration cannot express paths with quotes or backslashes; use another key with -k"

ask() { aws sagemaker "$@" ${aws[@]+"${aws[@]}"} --cluster-name "$cluster" --output text; }
arn=$(ask describe-cluster --query ClusterArn) || die "cannot describe $cluster; check the credentials, the region and the name (error above)"
groups=$(ask describe-cluster --query 'InstanceGroups[].InstanceGroupName' | tr '\t' '\n')
# The CLI reads all pages. Exact names: --instance-group-name-contains matches parts of names.
nodes=$(ask list-cluster-nodes --query 'ClusterNodeSummaries[].[InstanceGroupName,InstanceStatus.Status,InstanceId]')
if [[ -n $node ]]; then
  group=$(awk -v id="$node" '$3 == id {print $1}' <<<"$nodes")
  [[ -n $group ]] || die "$cluster has no node $node; list them with: aws sagemaker list-cluster-nodes"
fi
for usual in login-group controller-machine; do
  if [[ -z $group ]] && grep -qx "$usual" <<<"$groups"; then group=$usual; fi
done
grep -qx -- "${group:-.none}" <<<"$groups" || die "$cluster has no group ${group:-login-group or controller-machine};" \
  "pass -g with one of: ${groups//$'\n'/ }"
there=$(awk -v g="$group" -v id="$node" '$1 == g && (id == "" || $3 == id)' <<<"$nodes")
node=$(awk '$2 == "Running" {print $3; exit}' <<<"$there")
[[ -n $node ]] || die "no node of $group is Running: $(awk '{print $3, $2}' <<<"$there" | paste -sd, -)"
target=sagemaker-cluster:${arn##*/}_$group-$node

# Known host keys belong to an instance, not to a name: a replaced node has new ones.
own=$HOME/.ssh/hyperpod-ft/$cluster
session="aws ssm start-session$(printf ' %q' ${aws[@]+"${aws[@]}"} --target "$target")"
config="Host $cluster
    User $user
    IdentityFile \"${key//%/%%}\"
    IdentitiesOnly yes
    ProxyCommand ${session//%/%%} --document-name AWS-StartSSHSession --parameters portNumber=22
    HostKeyAlias $cluster
    UserKnownHostsFile \"${own//%/%%}/nodes/$node\"
    StrictHostKeyChecking accept-new
    ServerAliveInterval 60"
run=(ssh -F "$own/easy-config" -o ExitOnForwardFailure=yes ${forwards[@]+"${forwards[@]}"} -- "$cluster" "$@")
if [[ -n $dry ]]; then
  printf 'target   %s\ncommand %s\n\n%s\n' "$target" "$(printf ' %q' "${run[@]}")" "$config"
  exit
fi
IFS= read -r -d '' put <<'PUT_KEY' || true # not $(cat): bash 3.2 trips over quotes in it
# Add a public key to a user's authorized_keys, once. Runs on the node: sh -s -- USER BASE64-OF-THE-KEY
# Prints one line: "hyperpod-ft-key: ", then added, present, no-user, or the error.
# shellcheck shell=sh
user=$1 key=$2 PATH=$PATH:/usr/sbin:/sbin
say() { echo "hyperpod-ft-key: $(echo "$*" | tr "\n" " ")"; }
entry=$(getent passwd "$user") || { say no-user; exit 0; }
# as the user: the files are then theirs, and their links reach nothing that they could not write themselves
if [ "$(id -un)" = "$user" ]; then become() { "$@"; }
elif [ "$(id -u)" = 0 ]; then become() { runuser -u "$user" -- "$@"; }
else become() { sudo -n -u "$user" "$@"; }
fi
put=$(cat <<"END"
set -e
umask 077
cd "$1"
mkdir -p .ssh
chmod 700 .ssh
exec 9>>.ssh/authorized_keys
flock -w 20 9
chmod 600 .ssh/authorized_keys
key=$(printf %s "$2" | base64 -d)
bare=$(echo "$key" | cut -d " " -f 1,2)
if grep -v "^[[:space:]]*#" .ssh/authorized_keys | grep -qF -- "$bare"; then echo present; exit 0; fi
if [ -n "$(tail -c 1 .ssh/authorized_keys)" ]; then echo >&9; fi
printf "%s\n" "$key" >&9
echo added
END
)
if said=$(become sh -c "$put" sh "$(echo "$entry" | cut -d : -f 6)" "$key" 2>&1 </dev/null); then say "$said"; else say "failed: $said"; fi
PUT_KEY
b64() { printf '%s' "$1" | base64 | tr -d '\n'; }
parameters="{\"command\": [\"sh -c 'echo $(b64 "$put") | base64 -d | sh -s -- $user $(b64 "$public")'\"]}"
for _ in 1 2 3; do # sessions occasionally end without any output
  said=$(aws ssm start-session ${aws[@]+"${aws[@]}"} --target "$target" --document-name AWS-StartNonInteractiveCommand \
    --parameters "$parameters" </dev/null 2>&1 | tr -d '\r') || true
  [[ $said != *hyperpod-ft-key:* ]] || break
done
case $said in
  *'hyperpod-ft-key: added'* | *'hyperpod-ft-key: present'*) ;;
  *'hyperpod-ft-key: no-user'*) die "$group $node has no user $user; pass -u, or find out why its lifecycle scripts failed" ;;
  *) die "could not add the key on $group $node: $said; for a shell without it: $session" ;;
esac
umask 077
mkdir -p "$own/nodes"
printf '%s\n' "$config" >"$own/.easy-config.$$"
mv "$own/.easy-config.$$" "$own/easy-config"
exec "${run[@]}"
