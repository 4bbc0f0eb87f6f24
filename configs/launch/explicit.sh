#!/bin/sh
# Hosts that only ssh reaches, one process each:  HOSTS="node001 node002" sh configs/launch/explicit.sh CONFIG [...]
#
# Run it where the same folder, with the same .venv, lies on all hosts. The first host is where the processes meet. When
# one process ends with an error the others end as well, within launch.heartbeat_timeout_seconds at the latest.
set -eu
: "${HOSTS:?the hosts, with blanks between them, such as 'node001 node002'}"
PORT=${PORT:-6006}
first=${HOSTS%% *}
count=$(echo "$HOSTS" | wc -w)
number=0
started=
for host in $HOSTS; do
    # -tt: what runs there ends with the connection.
    ssh -tt "$host" "cd '$PWD' && .venv/bin/libra train $* --multihost explicit --coordinator $first:$PORT \
        --num-processes $count --process-id $number" </dev/null >"process-$number.log" 2>&1 &
    started="$started $!"
    number=$((number + 1))
done

status=0
for process in $started; do
    wait "$process" || status=$?
done
echo "ended with $status; what each process printed is in process-*.log"
exit "$status"
