#!/bin/bash
# One process per GPU:  sbatch configs/launch/slurm_per_gpu.sh CONFIG [--FIELD VALUE ...]
#
# As slurm.sh, but for the processes: each takes the GPU with its number on the node (SLURM_LOCALID). Do not bind GPUs
# to tasks (--gpus-per-task, --gpu-bind): GPUs of one node reach one another faster when each process sees all of them.
#SBATCH --job-name=libra
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@300

srun --kill-on-bad-exit=1 libra train "$@" --multihost slurm
status=$?
if [ "$status" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
