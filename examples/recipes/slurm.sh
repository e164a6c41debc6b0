#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2 --ntasks-per-node=4
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
# Trains until training.py ends by itself, over as many time limits as that takes: sbatch slurm.sh
# Slurm starts one worker for each task; torchrun is not needed. A worker that dies is started again at once.

# A signal that reaches this shell too must not end it before it has queued the job again.
trap : TERM USR1

export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
# With exec no shell is left that would die of the signal.
srun bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
              exec holdfast run training.py'
code=$?
# Of an array, only this task. After scancel the job does not run (R) any more, and is not to be queued again.
task=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
if [ $code -eq 42 ] && [ "$(squeue -h -j "$task" -o %t)" = R ]; then
    scontrol requeue "$task"
fi
# Jobs that wait for this one (--dependency=afterok) go by the code of training.
exit $code
