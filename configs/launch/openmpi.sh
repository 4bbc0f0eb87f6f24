#!/bin/sh
# Open MPI, one process per host:  HOSTS=node001,node002 sh configs/launch/openmpi.sh CONFIG [--FIELD VALUE ...]
#
# The first host is that of rank 0, where the processes meet; PORT has to be free there. Without --coordinator, Open MPI
# before 5 says where rank 0 is, and later ones do with the package mpi4py.
# For one process per GPU: --map-by ppr:8:node with 8 GPUs in a node.
set -eu
: "${HOSTS:?the hosts, with commas between them, such as node001,node002}"
PORT=${PORT:-6006}

mpirun --host "$HOSTS" --map-by ppr:1:node --bind-to none \
    libra train "$@" --multihost openmpi --coordinator "${HOSTS%%,*}:$PORT"
