#!/bin/bash
# One process per node, which takes all GPUs of its node:  sbatch configs/launch/slurm.sh CONFIG [--FIELD VALUE ...]
#
# The run folder and the corpus have to lie on a disk that all nodes share. A job that ends before its last step (time
# limit, preemption, a broken node) is put in the queue again and goes on from its newest checkpoint.
#SBATCH --job-name=libra
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@300
# The last line: SIGTERM to the processes five minutes before the time limit, time for one last checkpoint.

# When one process ends with an error, srun ends the others. 75 is a run that was told to stop and has saved itself.
srun --kill-on-bad-exit=1 libra train "$@" --multihost slurm
status=$?
if [ "$status" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
