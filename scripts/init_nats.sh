#!/usr/bin/env bash
# A NATS server with JetStream for local work: in Docker where an engine answers, else the local nats-server.
#
# Environment (defaults): NATS_PORT (4222), NATS_HTTP_PORT (8222), NATS_CLUSTER_PORT (6222), MAX_MEMORY (5GB),
# MAX_STORAGE (10GB), ENABLE_AUTH (false), TOKEN (made up where ENABLE_AUTH is true), CONTAINER_NAME (nats-jetstream),
# DOCKER_NETWORK (aviso-net), SKIP_DOCKER (false), CONFIG_DIR (nats_config: configuration, and locally store and log).
# It listens on 127.0.0.1 only. `scripts/init_nats.sh stop` ends what it started; the streams stay.
set -euo pipefail

NATS_PORT=${NATS_PORT:-4222} NATS_HTTP_PORT=${NATS_HTTP_PORT:-8222} NATS_CLUSTER_PORT=${NATS_CLUSTER_PORT:-6222}
MAX_MEMORY=${MAX_MEMORY:-5GB} MAX_STORAGE=${MAX_STORAGE:-10GB}
ENABLE_AUTH=${ENABLE_AUTH:-false} SKIP_DOCKER=${SKIP_DOCKER:-false}
CONTAINER_NAME=${CONTAINER_NAME:-nats-jetstream} DOCKER_NETWORK=${DOCKER_NETWORK:-aviso-net}
CONFIG_DIR=${CONFIG_DIR:-nats_config}
root=$(cd "$(dirname "$0")/.." && pwd)
pid_file=$CONFIG_DIR/nats-server.pid
config_file=$CONFIG_DIR/nats-server.conf

die() { echo "init_nats.sh: $*" >&2; exit 1; }

docker_answers() { [ "$SKIP_DOCKER" != true ] && command -v docker >/dev/null && docker info >/dev/null 2>&1; }

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

stop() {
    docker_answers && docker rm -f "$CONTAINER_NAME" >/dev/null 2>&1
    if [ -f "$pid_file" ]; then
        kill "$(cat "$pid_file")" 2>/dev/null || true
        for _ in $(seq 100); do kill -0 "$(cat "$pid_file")" 2>/dev/null || break; sleep 0.1; done
        rm -f "$pid_file"
    fi
}

write_config() { # address, client port, http port, cluster port, store directory
    mkdir -p "$CONFIG_DIR"
    (umask 077; : > "$config_file")
    {
        echo "server_name: $CONTAINER_NAME"
        echo "listen: \"$1:$2\""
        echo "http: \"$1:$3\""
        echo "jetstream { store_dir: \"$5\", max_memory_store: $MAX_MEMORY, max_file_store: $MAX_STORAGE }"
        if [ "$ENABLE_AUTH" = true ]; then
            echo "authorization { token: \"${TOKEN:-$(head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \n')}\" }"
        fi
    } >> "$config_file"
}

start_in_docker() {
    write_config 0.0.0.0 4222 8222 6222 /data
    docker network inspect "$DOCKER_NETWORK" >/dev/null 2>&1 || docker network create "$DOCKER_NETWORK" >/dev/null
    docker run -d --name "$CONTAINER_NAME" --network "$DOCKER_NETWORK" --user 0 \
        -p "127.0.0.1:$NATS_PORT:4222" -p "127.0.0.1:$NATS_HTTP_PORT:8222" -p "127.0.0.1:$NATS_CLUSTER_PORT:6222" \
        -v nats-jetstream-data:/data -v "$(cd "$CONFIG_DIR" && pwd):/config:ro" \
        nats:2-alpine -c /config/nats-server.conf >/dev/null
}

start_locally() {
    local binary store_dir
    binary=$(find_nats_server)
    mkdir -p "$CONFIG_DIR/store"
    store_dir=$(cd "$CONFIG_DIR/store" && pwd)
    write_config 127.0.0.1 "$NATS_PORT" "$NATS_HTTP_PORT" "$NATS_CLUSTER_PORT" "$store_dir"
    nohup "$binary" -c "$config_file" --pid "$pid_file" >"$CONFIG_DIR/nats-server.log" 2>&1 </dev/null &
}

stop
[ "${1:-start}" = stop ] && exit 0
[ -z "$(greeting)" ] || die "port $NATS_PORT is in use; set NATS_PORT to another"
if docker_answers; then start_in_docker; else start_locally; fi
for _ in $(seq 600); do
    case $(greeting) in
        *"\"server_name\":\"$CONTAINER_NAME\""*)
            echo "nats://localhost:$NATS_PORT is ready; monitoring at http://localhost:$NATS_HTTP_PORT"
            [ "$ENABLE_AUTH" = true ] && echo "its token is in $config_file: set NATS_TOKEN to it"
            echo "stop it with: $0 stop"
            exit 0
            ;;
    esac
    sleep 0.1
done
die "the server did not get ready within a minute; see $CONFIG_DIR/nats-server.log"
