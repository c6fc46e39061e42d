#!/bin/bash
# Trains on 8 nodes of 8 GPUs, a task for each GPU: sbatch notebooks/slurm.sh runs/8b
# The last minute before the time limit goes to a checkpoint; submitted again, the run goes on from it.
#SBATCH --job-name=jaxflash
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@60
#SBATCH --requeue

# Each task sees the GPUs of its node and takes the one with its local number. What ends one task ends the job.
srun --kill-on-bad-exit=1 --gpu-bind=none \
    jaxflash launch train --preset llama3-8b --data /data/text --tokenizer /data/tokenizer.json \
    --mesh data=8,fsdp=8 --batch-size 512 --accumulate 4 --steps 20000 --checkpoint-every 500 --out "$1"
