#!/usr/bin/env bash
# A NATS server with JetStream for local work: in Docker where an engine answers, else the local nats-server.
#
# Environment (defaults): NATS_PORT (4222), NATS_HTTP_PORT (8222), NATS_CLUSTER_PORT (6222), MAX_MEMORY (5GB),
# MAX_STORAGE (10GB), ENABLE_AUTH (false), TOKEN (made up where ENABLE_AUTH is true), CONTAINER_NAME (nats-jetstream),
# DOCKER_NETWORK (aviso-net), CONFIG_DIR (nats_config: configuration, and locally store and log), SKIP_DOCKER (any value:
# only write the configuration, for a server that is started by other means).
# It listens on 127.0.0.1 only. `scripts/init_nats.sh stop` ends what it started; the streams stay.
set -euo pipefail

NATS_PORT=${NATS_PORT:-4222} NATS_HTTP_PORT=${NATS_HTTP_PORT:-8222} NATS_CLUSTER_PORT=${NATS_CLUSTER_PORT:-6222}
MAX_MEMORY=${MAX_MEMORY:-5GB} MAX_STORAGE=${MAX_STORAGE:-10GB}
ENABLE_AUTH=${ENABLE_AUTH:-false} TOKEN=${TOKEN:-} SKIP_DOCKER=${SKIP_DOCKER:-}
CONTAINER_NAME=${CONTAINER_NAME:-nats-jetstream} DOCKER_NETWORK=${DOCKER_NETWORK:-aviso-net}
mkdir -p "${CONFIG_DIR:=nats_config}"
CONFIG_DIR=$(cd "$CONFIG_DIR" && pwd)
root=$(cd "$(dirname "$0")/.." && pwd)
pid_file=$CONFIG_DIR/nats-server.pid
log_file=$CONFIG_DIR/nats-server.log
config_file=$CONFIG_DIR/nats-server.conf
started= # the process id of the local server that this run has started

die() { echo "init_nats.sh: $*" >&2; exit 1; }

docker_answers() { command -v docker >/dev/null && docker info >/dev/null 2>&1; }

# The first line that a NATS server sends to whoever connects.
greeting() { (exec 3<>"/dev/tcp/127.0.0.1/$NATS_PORT" && head -n 1 <&3) 2>/dev/null; }

find_nats_server() {
    local python=$root/.venv/bin/python
    if [ -x "$python" ]; then
        "$python" -c 'from aviso_workers.server import find_binary; print(find_binary())'
    else
        command -v "${AVISO_WORKERS_NATS_SERVER:-nats-server}" || die "no nats-server: run scripts/setup, or put one on PATH"
    fi
}

# The process of the local server. A process id is given to others when its process has ended, so that the one in the
# file counts only where that process runs with our configuration file.
running() {
    local pid
    pid=$(cat "$pid_file" 2>/dev/null) && [[ $pid =~ ^[0-9]+$ ]] || return 1
    [[ "$(command_of "$pid") " == *" -c $config_file "* ]] && echo "$pid"
}

# The command line of a process; not every Linux has ps, and macOS has no /proc.
command_of() {
    if [ -d /proc/self ]; then { tr '\0' ' ' <"/proc/$1/cmdline"; } 2>/dev/null || true; return; fi
    ps -ww -o args= -p "$1" 2>/dev/null || true # -ww: whole, whatever COLUMNS says
}

stop() {
    local pid
    docker_answers && docker rm -f "$CONTAINER_NAME" >/dev/null 2>&1
    if pid=$(running); then
        kill "$pid"
        for _ in $(seq 100); do running >/dev/null || break; sleep 0.1; done
        running >/dev/null && die "nats-server (process $pid) has not ended within 10 s"
    fi
    rm -f "$pid_file"
}

# The token as text in quotes, as nats-server reads it.
quoted_token() {
    [[ $TOKEN =~ ^[[:print:]]+$ ]] || die "TOKEN must be printable text on one line"
    [[ $TOKEN != \$2?\$* ]] || die "TOKEN must not begin as a bcrypt hash does: nats-server would take it for one"
    local escaped=${TOKEN//\\/\\\\}
    echo "\"${escaped//\"/\\\"}\""
}

write_config() { # address, client port, http port, store directory
    local authorization=
    if [ "$ENABLE_AUTH" = true ]; then
        TOKEN=${TOKEN:-$(head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \n')}
        authorization="authorization { token: $(quoted_token) }"
    fi
    (umask 077; : > "$config_file")
    {
        echo "server_name: $CONTAINER_NAME"
        echo "listen: \"$1:$2\""
        echo "http: \"$1:$3\""
        echo "jetstream { store_dir: \"$4\", max_memory_store: $MAX_MEMORY, max_file_store: $MAX_STORAGE, strict: true }"
        echo "$authorization"
    } >> "$config_file"
}

start_in_docker() {
    write_config 0.0.0.0 4222 8222 /data
    docker network inspect "$DOCKER_NETWORK" >/dev/null 2>&1 || docker network create "$DOCKER_NETWORK" >/dev/null
    docker run -d --name "$CONTAINER_NAME" --network "$DOCKER_NETWORK" --user 0 \
        -p "127.0.0.1:$NATS_PORT:4222" -p "127.0.0.1:$NATS_HTTP_PORT:8222" -p "127.0.0.1:$NATS_CLUSTER_PORT:6222" \
        -v nats-jetstream-data:/data -v "$CONFIG_DIR:/config:ro" \
        nats:2-alpine -c /config/nats-server.conf >/dev/null
}

write_local_config() {
    mkdir -p "$CONFIG_DIR/store"
    write_config 127.0.0.1 "$NATS_PORT" "$NATS_HTTP_PORT" "$CONFIG_DIR/store"
}

start_locally() {
    local binary
    binary=$(find_nats_server)
    write_local_config
    nohup "$binary" -c "$config_file" --pid "$pid_file" >"$log_file" 2>&1 </dev/null &
    started=$!
}

# Whether the server that was started has ended already.
has_ended() {
    if [ -n "$started" ]; then ! kill -0 "$started" 2>/dev/null; return; fi
    [ "$(docker inspect -f '{{.State.Running}}' "$CONTAINER_NAME" 2>/dev/null)" != true ]
}

# What the server said last of an error; a mistake in its configuration it tells without the word.
reason() {
    local log
    log=$(if [ -n "$started" ]; then cat "$log_file"; else docker logs "$CONTAINER_NAME" 2>&1; fi)
    { grep -E '\[(FTL|ERR)\]|rror' <<<"$log" || tail -n 1 <<<"$log"; } | tail -n 1
}

if [ "${1:-start}" = stop ]; then stop; exit 0; fi
if [ -n "$SKIP_DOCKER" ]; then
    write_local_config
    echo "$config_file is written, and no server started (SKIP_DOCKER). To start one: nats-server -c $config_file"
    exit 0
fi
stop
[ -z "$(greeting)" ] || die "port $NATS_PORT is in use; set NATS_PORT to another"
if docker_answers; then start_in_docker; else start_locally; fi
for _ in $(seq 100); do
    case $(greeting) in
        *"\"server_name\":\"$CONTAINER_NAME\""*)
            echo "nats://localhost:$NATS_PORT is ready; monitoring at http://localhost:$NATS_HTTP_PORT"
            [ "$ENABLE_AUTH" = true ] && echo "its token is in $config_file: set NATS_TOKEN to it"
            echo "stop it with: $0 stop"
            exit 0
            ;;
    esac
    ! has_ended || die "the server ended at once: $(reason)"
    sleep 0.1
done
die "the server did not get ready within 10 s: $(reason)"
