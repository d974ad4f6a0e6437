#!/usr/bin/env bash
# What `rljax pod` runs on a host, by ssh: host.sh VERB NAME ...
#   identity                          prints WORKER ADDRESS, by the metadata of the machine
#   start SHA SETUP [VAR=VALUE ...] -- COMMAND ...
#   logs                              prints the log until the command ends, exit code: its own
#   state                             prints none, running, stopped, "ended CODE" or lost
#   kill                              SIGKILL, for the test of a pod
#   stop                              SIGTERM, so that the run saves; SIGKILL after GRACE_S
set -euo pipefail
verb=$1 name=$2
shift 2
root=$HOME/rljax-pod/$name
mkdir -p "$root"
cd "$root"

metadata() {
  curl -sf -m 10 --noproxy '*' -H 'Metadata-Flavor: Google' \
    "http://${GCE_METADATA_IP:-metadata.google.internal}/computeMetadata/v1/instance/$1"
}

running() { [ -s run.pid ] && kill -0 "$(cat run.pid)" 2>/dev/null; }

stop_run() {
  if running; then
    pid=$(cat run.pid)
    kill -TERM "$pid"
    for _ in $(seq "${GRACE_S:-300}"); do
      running || break
      sleep 1
    done
  fi
  # All of its session: a process that is left would hold the chips.
  if [ -s run.pid ]; then pkill -KILL -s "$(cat run.pid)" || true; fi
  rm -f run.pid
  # A run that was killed leaves libtpu's lock, perhaps another user's.
  if [ -e /tmp/libtpu_lockfile ]; then
    rm -f /tmp/libtpu_lockfile 2>/dev/null || sudo -n rm -f /tmp/libtpu_lockfile || true
  fi
}

new_venv() {
  for python in python3.13 python3.12 python3.11 python3; do
    if "$python" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      "$python" -m venv "$VENV"
      return
    fi
  done
  # Images of TPU VMs have Python 3.10.
  python3 -m pip install --quiet --user uv
  python3 -m uv venv --quiet --seed --python 3.12 "$VENV"
}

start() {
  local sha=$1 setup=$2 got code key
  shift 2
  while [ "$1" != -- ]; do
    export "${1?}"
    shift
  done
  shift
  got=$(sha256sum code.tar.gz | cut -d' ' -f1)
  if [ "$got" != "$sha" ]; then
    echo "code.tar.gz has the SHA-256 $got and not $sha: it did not arrive whole" >&2
    exit 3
  fi
  stop_run
  code=$root/code-${sha:0:12}
  if [ ! -d "$code" ]; then
    rm -rf code.new
    mkdir code.new
    tar -xzf code.tar.gz -C code.new
    mv code.new "$code"
  fi
  key=$({
    echo "$setup"
    cat "$code/pyproject.toml" "$code/requirements.txt" 2>/dev/null || true
  } | sha256sum | cut -c1-12)
  export VENV=$root/venv-$key
  if [ ! -e "$VENV/ready" ]; then
    rm -rf "$VENV"
    new_venv
    (cd "$code" && PATH=$VENV/bin:$PATH bash -euo pipefail -c "$setup")
    touch "$VENV/ready"
  fi
  export PATH=$VENV/bin:$PATH PYTHONPATH=$code${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
  if [ -e run.log ]; then mv run.log run.log.1; fi
  rm -f run.code run.stopped
  # A session of its own: it goes on when ssh ends. Its leader hands SIGTERM to the command.
  setsid bash -c '
    root=$0
    cd "$1"
    shift
    "$@" &
    child=$!
    trap "kill -TERM $child 2>/dev/null" TERM
    echo $$ >"$root/run.pid.new" && mv "$root/run.pid.new" "$root/run.pid"
    while kill -0 "$child" 2>/dev/null; do wait "$child"; done
    wait "$child"
    echo $? >"$root/run.code.new" && mv "$root/run.code.new" "$root/run.code"
  ' "$root" "$code" "$@" >run.log 2>&1 </dev/null &
  for _ in $(seq 100); do
    [ -s run.pid ] && break
    sleep 0.1
  done
  echo "started, code ${sha:0:12}"
}

case $verb in
  identity)
    worker=$(metadata attributes/agent-worker-number) ||
      worker=$(metadata attributes/tpu-env | sed -n "s/^WORKER_ID: *'\(.*\)'/\1/p") || worker=
    address=$(metadata network-interfaces/0/ip) || address=$(hostname -I | cut -d' ' -f1)
    echo "${worker:--} $address"
    ;;
  start) start "$@" ;;
  logs)
    if [ -s run.pid ]; then tail -n +1 -f --pid="$(cat run.pid)" run.log; else cat run.log; fi
    for _ in $(seq 50); do
      [ -s run.code ] && exit "$(cat run.code)"
      sleep 0.1
    done
    exit 137
    ;;
  state)
    if running; then
      echo running
    elif [ -e run.stopped ]; then
      echo stopped
    elif [ -s run.code ]; then
      echo "ended $(cat run.code)"
    elif [ -e run.log ]; then
      echo lost
    else
      echo none
    fi
    ;;
  stop)
    touch run.stopped
    stop_run
    ;;
  kill) pkill -KILL -s "$(cat run.pid)" ;;
  *)
    echo "host.sh: unknown verb $verb" >&2
    exit 64
    ;;
esac
