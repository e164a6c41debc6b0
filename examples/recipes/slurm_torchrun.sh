#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2 --ntasks-per-node=1
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
# As slurm.sh, with one torchrun for each node: sbatch slurm_torchrun.sh
# SIGTERM, because SIGUSR1 kills a torchrun that is not started with --signals-to-handle.

# A signal that reaches this shell too must not end it before it has queued the job again.
trap : TERM

rm -f runs/example.again
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes="$SLURM_NNODES" --nproc-per-node="${SLURM_GPUS_ON_NODE:-1}" --max-restarts=10 --shutdown-timeout=100 \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$head:$((20000 + SLURM_JOB_ID % 10000))" training.py
code=$?
# torchrun ends with 1 when it was asked to leave: training.py has left word if all is saved.
# Of an array, only this task. After scancel the job does not run (R) any more, and is not to be queued again.
task=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
if [ $code -ne 0 ] && [ -e runs/example.again ] && [ "$(squeue -h -j "$task" -o %t)" = R ]; then
    scontrol requeue "$task"
fi
exit $code
