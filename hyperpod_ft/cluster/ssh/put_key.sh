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
