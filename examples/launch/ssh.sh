#!/usr/bin/env bash
# Starts, lists and stops aiorl workers on other hosts over ssh.
#
#   aiorl keys keys                                                  # once, on the learner's host
#   aiorl train --env CartPole-v1 --bind tcp://0.0.0.0:5557 --keys keys
#
#   examples/launch/ssh.sh start tcp://LEARNER:5557 host1 host2=16   # 16 workers on host2
#   examples/launch/ssh.sh start tcp://LEARNER:5557 hosts.txt        # a file with HOST or HOST=N on each line
#   examples/launch/ssh.sh status hosts.txt
#   examples/launch/ssh.sh stop hosts.txt
#
# Each host needs aiorl (pip install aiorl) and must reach the learner's port and the one after it. Keys and logs go
# to ~/.aiorl on the host: keys/ (mode 0700), worker.log, worker.pid. HOST can be anything that ssh accepts.
#
# Settings, from the environment:
#   KEYS=keys            local directory made by `aiorl keys`; HOST.key_secret is preferred over
#                        worker.key_secret, so each host can have its own key; KEYS= for none
#   PYTHON=python3       Python on the other hosts, such as '~/aiorl/.venv/bin/python'
#   NUM_WORKERS=4        workers on a host without =N
set -euo pipefail

KEYS=${KEYS-keys}
PYTHON=${PYTHON:-python3}
NUM_WORKERS=${NUM_WORKERS:-4}

usage() {
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2
    exit 2
}

# Runs the script on standard input on host $1 without a terminal, with the other arguments as $1, $2...
on_host() {
    local host=$1
    shift
    # shellcheck disable=SC2029  # the arguments are quoted here for the remote shell
    ssh -o BatchMode=yes -o ConnectTimeout=10 "$host" "bash -s -- $(printf '%q ' "$@")"
}

copy_key() { # host, local file, remote name
    # shellcheck disable=SC2029
    ssh -o BatchMode=yes -o ConnectTimeout=10 "$1" \
        "umask 077; mkdir -p ~/.aiorl/keys && cat >~/.aiorl/keys/$3.new && mv ~/.aiorl/keys/$3.new ~/.aiorl/keys/$3" <"$2"
}

start() { # host, workers, address
    local own=worker
    if [[ -n $KEYS ]]; then
        [[ -e $KEYS/${1##*@}.key_secret ]] && own=${1##*@}
        copy_key "$1" "$KEYS/$own.key_secret" worker.key_secret || return
        copy_key "$1" "$KEYS/learner.key" learner.key || return
    fi
    on_host "$1" "$PYTHON" "$3" "$2" "${KEYS:+--keys=keys}" <<'REMOTE'
umask 077
mkdir -p ~/.aiorl && cd ~/.aiorl
if [ -e worker.pid ] && ps -ww -o args= -p "$(cat worker.pid)" | grep -q aiorl.worker; then
    echo "already running (process $(cat worker.pid)); stop it first"
    exit 1
fi
python=${1/#\~/$HOME}
setsid nohup "$python" -m aiorl.worker --connect "$2" --num-workers "$3" ${4:+"$4"} </dev/null >worker.log 2>&1 &
echo $! >worker.pid
sleep 1
if ! kill -0 "$(cat worker.pid)" 2>/dev/null; then
    echo "ended at once:"
    tail -n 5 worker.log
    exit 1
fi
echo "started $3 workers (process $(cat worker.pid)), log in $PWD/worker.log"
REMOTE
}

status() { # host
    on_host "$1" <<'REMOTE'
cd ~/.aiorl 2>/dev/null || { echo "nothing was started here"; exit 0; }
if [ -e worker.pid ] && ps -ww -o args= -p "$(cat worker.pid)" | grep -q aiorl.worker; then
    echo "running (process $(cat worker.pid)): $(tail -n 1 worker.log)"
else
    echo "not running: $(tail -n 1 worker.log 2>/dev/null)"
fi
REMOTE
}

stop() { # host
    on_host "$1" <<'REMOTE'
cd ~/.aiorl 2>/dev/null || { echo "nothing was started here"; exit 0; }
pid=$(cat worker.pid 2>/dev/null || true)
if [ -z "$pid" ] || ! ps -ww -o args= -p "$pid" | grep -q aiorl.worker; then
    echo "not running"
    exit 0
fi
kill -TERM "$pid"
for _ in $(seq 100); do
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.1
done
kill -KILL -- "-$pid" 2>/dev/null || true # the rest of its session
rm -f worker.pid
echo "stopped"
REMOTE
}

[[ $# -ge 2 ]] || usage
command=$1
shift
address=
case $command in
start)
    address=$1
    [[ $address == tcp://* && $# -ge 2 ]] || usage
    shift
    ;;
status | stop) ;;
*) usage ;;
esac

hosts=()
for argument in "$@"; do
    if [[ -f $argument ]]; then
        while read -r line; do
            line=${line%%#*}
            line=${line//[[:space:]]/}
            [[ -z $line ]] || hosts+=("$line")
        done <"$argument"
    else
        hosts+=("$argument")
    fi
done

failed=0
for entry in "${hosts[@]}"; do
    host=${entry%%=*}
    workers=$NUM_WORKERS
    [[ $entry != *=* ]] || workers=${entry#*=}
    if ! said=$("$command" "$host" "$workers" "$address" 2>&1); then
        failed=1
    fi
    echo "$host: $said"
done
exit "$failed"
